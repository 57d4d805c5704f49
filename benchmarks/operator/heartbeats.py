"""Renews the Leases of a thousand simulated nodes, as their kubelets would.

KWOK renews one at a time: while pods start it is late with most, and nodes seem lost. A process of
its own that KWOK's renewal, which waits longer, never gets ahead of.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Final

from omni_operator.api import ApiError
from omni_operator.cluster import Access, Cluster
from omni_operator.kinds import LEASE
from tests.cluster.kwok import LABEL_BEATING
from tests.cluster.nodes import now

NAMESPACE: Final = "kube-node-lease"

_NUM_AT_ONCE: Final = 16


async def beat(every_s: float) -> None:
    """Renew each Lease that is to be renewed once in a time, for ever."""
    cluster = Cluster(await Access.find(), max_requests=_NUM_AT_ONCE)
    while True:
        begin_s = time.monotonic()
        leases = await cluster.list(LEASE, NAMESPACE, label_selector=f"{LABEL_BEATING}=true")
        names = iter([lease["metadata"]["name"] for lease in leases])
        pause_s = every_s / max(1, len(leases)) * _NUM_AT_ONCE
        await asyncio.gather(*(_work(cluster, names, pause_s) for _ in range(_NUM_AT_ONCE)))
        await asyncio.sleep(max(0.0, begin_s + every_s - time.monotonic()))


async def _work(cluster: Cluster, names: Iterator[str], pause_s: float) -> None:
    """One of those that share the Leases of a round."""
    for name in names:
        due_s = time.monotonic() + pause_s
        with contextlib.suppress(ApiError):  # its node was just killed, or taken away
            await _renew(cluster, name)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def _renew(cluster: Cluster, name: str) -> None:
    label = f"/metadata/labels/{LABEL_BEATING.replace('/', '~1')}"
    operations = [
        {"op": "test", "path": label, "value": "true"},
        {"op": "replace", "path": "/spec/renewTime", "value": now()},
    ]
    await cluster.json_patch(LEASE, NAMESPACE, name, operations)


if __name__ == "__main__":
    asyncio.run(beat(float(sys.argv[1])))
