"""Plain JSON requests to an API server, as a kubeconfig names it: what tests inject and look at.

The operator has a client of its own; tests must not see the cluster through what they test.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from kubernetes import client, config
from kubernetes.client.api_client import RequestSerialized
from urllib3.exceptions import HTTPError

NUM_CONNECTIONS: Final = 16

Object = dict[str, Any]
PatchType = Literal["merge", "json", "strategic", "apply"]
T = TypeVar("T")
R = TypeVar("R")

_PATCH_TYPES: Final[Mapping[PatchType, str]] = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}

_AWAY: Final = frozenset({429, 500, 502, 503, 504})
_PAUSE_S: Final = 0.3


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, method: str, path: str, status: int, message: str) -> None:
        super().__init__(f"{method} {path}: {status} {message}")
        self.status = status
        """HTTP status."""
        self.message = message
        """What the API server said."""


class Api:
    """Requests by path, such as /api/v1/nodes/a, answered by JSON objects. Threads may share it.

    For `patience_s` a request is made again where the API server is away; what it did before its
    answer was lost it then refuses to do twice.
    """

    def __init__(self, kubeconfig: Path, *, patience_s: float = 0) -> None:
        configuration = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        configuration.connection_pool_maxsize = NUM_CONNECTIONS
        self._client = client.ApiClient(configuration)
        self._patience_s = patience_s

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
        timeout_s: float = 30,
    ) -> Object:
        """One request. Raises ApiError where the answer is not 2xx."""
        prepared = self._prepare(method, path, body, content_type, query)
        until = time.monotonic() + self._patience_s
        while True:
            try:
                answer = self._client.call_api(*prepared, _request_timeout=timeout_s)
                status, content = answer.status, answer.read()
            except HTTPError:
                if time.monotonic() > until:
                    raise
            else:
                if 200 <= status < 300:
                    found: Object = json.loads(content) if content else {}
                    return found
                if status not in _AWAY or time.monotonic() > until:
                    raise ApiError(method, path, status, _message(content))
            time.sleep(_PAUSE_S)

    def watch(self, path: str, version: str, *, within_s: int) -> Iterator[Object]:
        """What happens to the objects of a collection after a resource version, for that long.
        Raises ApiError and urllib3's errors."""
        query = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(within_s),
        }
        prepared = self._prepare("GET", path, None, "application/json", query)
        answer = self._client.call_api(*prepared, _request_timeout=within_s + 10).response
        try:
            if answer.status != 200:
                raise ApiError("WATCH", path, answer.status, _message(answer.read()))
            rest = b""
            for piece in answer.stream(2**16):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise ApiError("WATCH", path, status["code"], status["message"])
                    yield event
        finally:
            answer.close()

    def _prepare(
        self,
        method: str,
        path: str,
        body: object,
        content_type: str,
        query: Mapping[str, str] | None,
    ) -> RequestSerialized:
        return self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Content-Type": content_type, "Accept": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
        )

    def get(self, path: str, **query: str) -> Object:
        """Read an object."""
        return self.request("GET", path, query=query)

    def list(self, path: str, **query: str) -> list[Object]:
        """The items of a list; `labelSelector` and `fieldSelector` go into `query`."""
        items: list[Object] = self.request("GET", path, query=query)["items"]
        return items

    def create(self, path: str, body: object) -> Object:
        """POST an object to its collection, or to a subresource such as .../eviction."""
        return self.request("POST", path, body)

    def patch(self, path: str, body: object, *, kind: PatchType = "merge") -> Object:
        """Patch an object or one of its subresources."""
        query = {"fieldManager": "test", "force": "true"} if kind == "apply" else None
        return self.request("PATCH", path, body, content_type=_PATCH_TYPES[kind], query=query)

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        """Delete an object; one that is gone already is no error."""
        body = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        try:
            self.request("DELETE", path, body)
        except ApiError as exc:
            if exc.status != 404:
                raise

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        try:
            self.get(path)
        except ApiError as exc:
            if exc.status == 404:
                return False
            raise
        return True


def concurrently(act: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`act` on every item, as many at once as the client has connections; results in order."""
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        return list(pool.map(act, items))


def wait_for(
    predicate: Callable[[], T], what: str, timeout_s: float = 30, every_s: float = 0.2
) -> T:
    """The first true answer of `predicate`; after a time, fails with `what` and the last answer."""
    deadline = time.monotonic() + timeout_s
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}; last seen: {answer!r}")
        time.sleep(every_s)
    return answer


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")
