"""The API server over HTTP: the only door to the `kubernetes` package. Objects stay as they come:
its models take more memory than all else that the operator holds."""

import asyncio
import json
import os
import random
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any, Final, Literal, Self

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from omni_operator.api import (
    AlreadyExists,
    Api,
    ApiError,
    ApiUnavailable,
    Conflict,
    NotFound,
    QuotaExceeded,
    Raw,
    Refused,
)
from omni_operator.kinds import Kind, kind_of
from omni_operator.settings import SetupError

FIELD_MANAGER: Final = "megascale-omni"
"""Owner of the fields that the operator applies."""

_PAGE: Final = 500
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_RETRIED: Final = frozenset({401, 429, 500, 502, 503, 504})  # 401: the token was just renewed

CountRequest = Callable[[str, str, int, float], None]
"""Called with verb, resource, HTTP status (0: no answer) and seconds of every request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some of the objects of a kind."""

    items: Sequence[Raw]
    version: str
    """Resource version at which all pages of a listing hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where the API server is and how to be let in."""

    configuration: Configuration

    @classmethod
    async def find(cls) -> Self:
        """From the files that KUBECONFIG names, else the pod's service account, else
        ~/.kube/config. Raises SetupError."""
        configuration = Configuration()
        try:
            if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
                load_incluster_config(client_configuration=configuration)
            else:
                await load_kube_config(
                    config_file=os.environ.get("KUBECONFIG"), client_configuration=configuration
                )
        except (ConfigException, OSError) as exc:
            raise SetupError(
                f"no way to reach a Kubernetes API server: {exc}; set KUBECONFIG to a kubeconfig "
                "file, or run in a pod with a service account"
            ) from exc
        return cls(configuration=configuration)

    @property
    def server(self) -> str:
        """Address of the API server."""
        return str(self.configuration.host)

    async def headers(self) -> dict[str, str]:
        """What a request has to carry now; tokens are renewed."""
        token = await self.configuration.get_api_key_with_prefix(
            "BearerToken", alias="authorization"
        )
        return {"Authorization": token} if token else {}


class Cluster(Api):
    """A real API server. Every call asks again after 401, 429, 5xx and broken connections, for
    about `patience_s`, and raises ApiUnavailable then."""

    def __init__(
        self,
        access: Access,
        *,
        max_requests: int,
        timeout_s: float = 30,
        patience_s: float = 10,
        count: CountRequest = lambda verb, resource, code, seconds: None,
    ) -> None:
        configuration = access.configuration
        configuration.connection_pool_maxsize = max_requests
        # Else the environment's proxies and ~/.netrc are read for each request, in a thread each,
        # and what that file says of the server's host is no use beside a token.
        configuration.client_session_kwargs = {"trust_env": False}
        configuration.proxy = configuration.proxy or _proxy_of(access.server)
        self._access = access
        self._client = ApiClient(configuration)
        self._room = asyncio.Semaphore(max_requests)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._patience_s = patience_s
        self._count = count

    @property
    def ssl_context(self) -> SSLContext:
        """For other clients of the same server."""
        context: SSLContext = self._client.rest_client.ssl_context
        return context

    async def close(self) -> None:
        """End all connections."""
        await self._client.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Raw | None:
        """See `Api.get`."""
        try:
            return await self._ask("get", kind, kind.path(namespace, name))
        except NotFound:
            return None

    async def list(
        self, kind: Kind, namespace: str | None = None, *, label_selector: str | None = None
    ) -> Sequence[Raw]:
        """See `Api.list`."""
        pages = self.pages(kind, namespace, label_selector=label_selector)
        return [item async for page in pages for item in page.items]

    async def pages(
        self, kind: Kind, namespace: str | None = None, *, label_selector: str | None = None
    ) -> AsyncIterator[Page]:
        """As `list`, a few hundred at a time: not all have to be in memory at once."""
        path = f"{kind.path(namespace)}?limit={_PAGE}"
        if label_selector:
            path += f"&labelSelector={_quoted(label_selector)}"
        token = ""
        while True:
            said = await self._ask("list", kind, path + token)
            meta = said["metadata"]
            yield Page(
                items=[
                    {"apiVersion": kind.api_version, "kind": kind.kind, **item}
                    for item in said["items"]
                ],
                version=meta["resourceVersion"],
            )
            if not meta.get("continue"):
                return
            token = f"&continue={_quoted(meta['continue'])}"

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server knows a kind now."""
        path = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.version}"
        try:
            said = await self._ask("discover", kind, path)
        except NotFound:
            return False
        return any(resource["name"] == kind.plural for resource in said["resources"])

    async def create(self, kind: Kind, body: Raw, *, dry_run: bool = False) -> Raw:
        """See `Api.create`."""
        path = kind.path(body["metadata"].get("namespace")) + ("?dryRun=All" if dry_run else "")
        return await self._ask("create", kind, path, method="POST", body=body)

    async def apply(self, body: Raw) -> Raw:
        """See `Api.apply`."""
        kind, meta = kind_of(body), body["metadata"]
        path = kind.path(meta.get("namespace"), meta["name"])
        path += f"?fieldManager={FIELD_MANAGER}&force=true"
        return await self._patch("apply", kind, path, body, "application/apply-patch+yaml")

    async def json_patch(
        self, kind: Kind, namespace: str | None, name: str, operations: Sequence[Raw]
    ) -> Raw:
        """See `Api.json_patch`."""
        return await self._patch(
            "patch",
            kind,
            kind.path(namespace, name),
            [*operations],
            "application/json-patch+json",
        )

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None,
        grace_s: int | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
    ) -> None:
        """See `Api.delete`."""
        body: dict[str, Any] = {"propagationPolicy": propagation}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            path = kind.path(namespace, name)
            await self._ask("delete", kind, path, method="DELETE", body=body)
        except (NotFound, Conflict):
            pass  # gone, or another object of this name

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, status: Raw, *, resource_version: str
    ) -> Raw:
        """See `Api.patch_status`."""
        path = kind.path(namespace, name) + f"/status?fieldManager={FIELD_MANAGER}"
        body = {"metadata": {"resourceVersion": resource_version}, "status": status}
        return await self._patch("patch_status", kind, path, body, "application/merge-patch+json")

    async def replace(self, kind: Kind, body: Raw) -> Raw:
        """See `Api.replace`."""
        path = kind.path(body["metadata"].get("namespace"), body["metadata"]["name"])
        return await self._ask("update", kind, path, method="PUT", body=body)

    async def _patch(
        self, verb: str, kind: Kind, path: str, body: Raw | Sequence[Raw], content_type: str
    ) -> Raw:
        return await self._ask(
            verb, kind, path, method="PATCH", body=body, content_type=content_type
        )

    async def _ask(
        self,
        verb: str,
        kind: Kind,
        path: str,
        *,
        method: str = "GET",
        body: Raw | Sequence[Raw] | None = None,
        content_type: str = "application/json",
    ) -> Raw:
        last_s = time.monotonic() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._ask_once(
                    verb, kind, path, method=method, body=body, content_type=content_type
                )
            except ApiUnavailable as exc:
                # Not in step with the others that were refused at the same moment.
                wait_s = max(pause_s * random.uniform(0.7, 1.3), _asked_pause(exc))
                if time.monotonic() + wait_s > last_s:
                    raise
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _ask_once(
        self,
        verb: str,
        kind: Kind,
        path: str,
        *,
        method: str,
        body: Raw | Sequence[Raw] | None,
        content_type: str,
    ) -> Raw:
        async with self._room:
            begin_s = time.monotonic()
            code = 0
            try:
                headers = await self._access.headers()
                response = await self._client.call_api(
                    method,
                    self._access.server + path,
                    headers | {"Content-Type": content_type, "Accept": "application/json"},
                    body,
                    _request_timeout=self._timeout,
                )
                text = await response.read()
                code = response.status
            except (aiohttp.ClientError, TimeoutError, OSError) as exc:
                raise ApiUnavailable(
                    reason="NoAnswer",
                    message=f"{method} {path}: no answer from {self._access.server}: "
                    f"{exc or type(exc).__name__}",
                ) from exc
            finally:
                self._count(verb, kind.plural, code, time.monotonic() - begin_s)
        if code >= 300:
            raise _error(method, path, code, text)
        answer: dict[str, Any] = json.loads(text)
        return answer


def _proxy_of(server: str) -> str | None:
    """The proxy on the way to a server, by HTTPS_PROXY, NO_PROXY and their like."""
    address = urllib.parse.urlsplit(server)
    if urllib.request.proxy_bypass(address.netloc):
        return None
    return urllib.request.getproxies().get(address.scheme)


def _quoted(value: str) -> str:
    return urllib.parse.quote(value, safe="")


def _asked_pause(exc: ApiUnavailable) -> float:
    return min(exc.retry_after_s, _LONGEST_PAUSE_S)


def _error(method: str, path: str, code: int, text: bytes) -> ApiError:
    """The API server's no, as one of our errors."""
    status = _status(text)
    details: Mapping[str, Any] = status.get("details") or {}
    causes = details.get("causes") or ()
    reason = status.get("reason") or f"Http{code}"
    message = status.get("message") or f"{method} {path}: HTTP {code}"

    def error(kind: type[ApiError]) -> ApiError:
        return kind(reason=reason, message=message, code=code)

    if code in _RETRIED:
        return ApiUnavailable(
            reason=reason,
            message=message,
            code=code,
            retry_after_s=float(details.get("retryAfterSeconds") or 0),
        )
    if code == 404:
        return error(NotFound)
    if code == 409:
        return error(AlreadyExists if reason == "AlreadyExists" else Conflict)
    if code == 403 and "exceeded quota" in message:
        return error(QuotaExceeded)
    if code == 422 and method == "PATCH" and not causes:
        # So it says that a JSON patch does not fit, and not more; what is invalid has causes.
        message = f"{method} {path}: what it tests or takes out is not as it was read"
        return error(Conflict)
    for cause in causes:
        if cause.get("reason") == "NamespaceTerminating":
            reason = "NamespaceTerminating"
    return error(Refused)


def _status(text: bytes) -> Mapping[str, Any]:
    try:
        said = json.loads(text)
    except ValueError:
        return {}  # a proxy's words, not the API server's
    return said if isinstance(said, dict) and said.get("kind") == "Status" else {}
