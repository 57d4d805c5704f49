"""One of several operators leads: the one that holds a Lease. What others write in it is timed by
the own clock from when it was seen, as clocks of two machines cannot be compared."""

import asyncio
import datetime
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from omni_operator.api import AlreadyExists, Api, ApiError, ApiUnavailable, Conflict, NotFound, Raw
from omni_operator.kinds import LEASE

_LOG: Final = logging.getLogger(__name__)


class LeaseLost(Exception):
    """This operator may lead no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seconds of an election."""

    lease_s: float = 15
    """Others leave a Lease alone that was renewed within this time."""
    renew_s: float = 10
    """A holder that could not renew for this time leads no more; less than `lease_s`, so that it
    has stopped before another one begins."""
    retry_s: float = 2
    """How often it is renewed, or looked at."""


class Elector:
    """Takes, holds and gives back one Lease."""

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        name: str,
        identity: str,
        terms: Terms = Terms(),  # noqa: B008 -- frozen
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._terms = terms
        self._clock = clock
        self._sleep = sleep
        self._lease: Raw | None = None
        self._seen_spec: Raw = {}
        self._seen_s = 0.0

    async def acquire(self) -> None:
        """Wait until this operator holds the Lease. Raises Refused where it may not."""
        while True:
            try:
                wait_s = await self._try_to_take()
            except (AlreadyExists, Conflict, NotFound):
                wait_s = 0.0  # somebody was faster: look who
            except ApiUnavailable as exc:
                _LOG.warning("The Lease cannot be read. error=%s", exc)
                wait_s = self._terms.retry_s
            if wait_s is None:
                return
            await self._sleep(wait_s)

    async def hold(self) -> None:
        """Renew the Lease for ever. Raises LeaseLost."""
        renewed_s = self._clock()
        while True:
            await self._sleep(self._terms.retry_s)
            began_s = self._clock()
            try:
                await self._renew()
                renewed_s = began_s
            except ApiError as exc:
                stood_s = self._clock() - renewed_s
                if stood_s >= self._terms.renew_s:
                    raise LeaseLost(
                        f"Lease {self._namespace}/{self._name} could not be renewed for "
                        f"{stood_s:.0f} s, so another operator may lead: {exc}"
                    ) from exc
                _LOG.warning("The Lease could not be renewed. seconds=%.1f error=%s", stood_s, exc)

    async def release(self) -> None:
        """Let the next one lead at once; it waits for the Lease to end where this fails."""
        try:
            found = await self._api.get(LEASE, self._namespace, self._name)
            if found is not None and found["spec"].get("holderIdentity") == self._identity:
                spec = {**found["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace(LEASE, {**found, "spec": spec})
        except ApiError as exc:
            _LOG.warning("The Lease could not be given back. error=%s", exc)

    async def _try_to_take(self) -> float | None:
        """Returns the seconds to wait before looking again, None once it is held."""
        found = await self._api.get(LEASE, self._namespace, self._name)
        if found is None:
            meta = {"namespace": self._namespace, "name": self._name}
            body = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": meta}
            self._lease = await self._api.create(LEASE, body | {"spec": self._spec(0)})
            return None
        spec = found.get("spec") or {}
        if spec != self._seen_spec:
            self._seen_spec, self._seen_s = spec, self._clock()
        holder = spec.get("holderIdentity")
        left_s = self._seen_s + (spec.get("leaseDurationSeconds") or 0) - self._clock()
        if holder and holder != self._identity and left_s > 0:
            return min(left_s, self._terms.retry_s)
        taken = self._spec((spec.get("leaseTransitions") or 0) + 1)
        self._lease = await self._api.replace(LEASE, {**found, "spec": taken})
        if holder:
            _LOG.info("Took the Lease over. holder_before=%s", holder)
        return None

    async def _renew(self) -> None:
        if self._lease is None:
            self._lease = await self._api.get(LEASE, self._namespace, self._name)
            if self._lease is None:
                raise LeaseLost(f"Lease {self._namespace}/{self._name} was deleted")
        holder = self._lease["spec"].get("holderIdentity")
        if holder != self._identity:
            raise LeaseLost(f"Lease {self._namespace}/{self._name} is held by {holder!r}")
        spec = {**self._lease["spec"], "renewTime": _now()}
        lease, self._lease = self._lease, None  # read anew, unless this is answered
        self._lease = await self._api.replace(LEASE, {**lease, "spec": spec})

    def _spec(self, transitions: int) -> dict[str, Any]:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._terms.lease_s),
            "acquireTime": _now(),
            "renewTime": _now(),
            "leaseTransitions": transitions,
        }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
