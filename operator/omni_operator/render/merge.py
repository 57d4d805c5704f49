"""Lays what a user says about pods over what the operator says, as a person would by hand.

Theirs may be anything that JSON can say: what is no container or list goes on as it is, and the API
server says in its own words what is wrong with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

_KEYS: Final[Mapping[str, str]] = {
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
}
"""Lists of a container that are maps in disguise."""
_APPENDED: Final = "envFrom"


def merge_named(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], key: str
) -> list[dict[str, Any]]:
    """Items of both lists, one for each value of `key`; theirs stands in the place of ours.

    An item is replaced as a whole: half of a `value` and half of a `valueFrom` is neither.
    """
    merged = {repr(item.get(key)): dict(item) for item in ours}
    return list((merged | {repr(item.get(key)): dict(item) for item in theirs}).values())


def merge(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Both maps, key by key, theirs over ours."""
    merged = dict(ours)
    for key, value in theirs.items():
        both_are_maps = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both_are_maps else value
    return merged


def merge_container(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """One of our containers with what the user says about it."""
    adapted = dict(theirs)
    for key in (*_KEYS, _APPENDED):
        before, after = ours.get(key, []), theirs.get(key)
        if _is_list_of_maps(before) and _is_list_of_maps(after):
            name = _KEYS.get(key)
            adapted[key] = merge_named(before, after, name) if name else [*before, *after]
    return merge(_without_high_requests(ours, theirs), adapted)


def _without_high_requests(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Our container without requests for what the user gives a limit of. Such a limit alone is the
    request, too, and ours may be above it."""
    resources = ours["resources"]
    requests = _map(_map(resources).get("requests"))
    limits = _map(_map(theirs.get("resources")).get("limits"))
    if not limits.keys() & requests.keys():
        return ours
    kept = {name: amount for name, amount in requests.items() if name not in limits}
    return {**ours, "resources": {**resources, "requests": kept}}


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_list_of_maps(value: object) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
