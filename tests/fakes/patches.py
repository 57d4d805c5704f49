"""Patches of documents, as an API server does them."""

import pickle
from collections.abc import Mapping
from typing import Any, TypeVar

from omni_operator.api import Conflict, Raw

T = TypeVar("T")


def copied(body: T) -> T:
    """A deep copy; of plain documents pickle makes one several times faster than `copy`."""
    made: T = pickle.loads(pickle.dumps(body, pickle.HIGHEST_PROTOCOL))
    return made


def merge(into: dict[str, Any], patch: Raw) -> None:
    """JSON merge patch."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, Mapping):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            merge(into[key], value)
        else:
            into[key] = copied(value)


def operate(body: dict[str, Any], operation: Raw) -> None:
    """JSON patch: one operation of it, or Conflict where it does not fit."""
    *path, last = [
        part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
    ]
    verb = operation["op"]
    room: Any = body
    try:
        for part in path:
            room = room[int(part)] if isinstance(room, list) else room[part]
        match verb:
            case "test":
                if room.get(last) != operation["value"]:
                    raise KeyError(last)
            case "remove" if isinstance(room, list):
                del room[int(last)]
            case "remove":
                del room[last]
            case "replace":
                if last not in room:
                    raise KeyError(last)
                room[last] = copied(operation["value"])
            case "add":
                room[last] = copied(operation["value"])
            case _:
                raise NotImplementedError(verb)
    except (KeyError, IndexError) as exc:
        message = f"the server rejected our request: {verb} {operation['path']} failed"
        raise Conflict(reason="Invalid", message=message, code=422) from exc
