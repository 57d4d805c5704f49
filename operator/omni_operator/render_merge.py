"""Lays what a user says about pods over what the operator says, as a person would by hand."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

_KEYS: Final[Mapping[str, str]] = {
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
}
"""Lists of a container that are maps in disguise."""
_APPENDED: Final = ("envFrom",)


def merge_named(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], key: str
) -> list[dict[str, Any]]:
    """Items of both lists, one for each value of `key`; theirs stands in the place of ours.

    An item is replaced as a whole: half of a `value` and half of a `valueFrom` is neither.
    """
    merged = {item.get(key): dict(item) for item in ours}
    return list((merged | {item.get(key): dict(item) for item in theirs}).values())


def merge(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Both maps, key by key, theirs over ours; a null of theirs takes a key of ours away."""
    merged = dict(ours)
    for key, value in theirs.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def merge_container(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """One of our containers with what the user says about it."""
    lists = {
        key: merge_named(ours.get(key, []), theirs.get(key) or [], name)
        for key, name in _KEYS.items()
    } | {key: [*ours.get(key, []), *(theirs.get(key) or [])] for key in _APPENDED}
    rest = {key: value for key, value in theirs.items() if key not in lists}
    merged = merge(ours, rest) | {key: value for key, value in lists.items() if value}
    resources = _resources(ours.get("resources", {}), theirs.get("resources") or {})
    return merged | ({"resources": resources} if resources else {})


def _resources(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """A limit without a request is the request, so ours, which may be above it, gives way."""
    asked, limits = theirs.get("requests") or {}, theirs.get("limits") or {}
    kept = {
        name: amount
        for name, amount in ours.get("requests", {}).items()
        if name in asked or name not in limits
    }
    return merge({**ours, "requests": kept}, theirs)
