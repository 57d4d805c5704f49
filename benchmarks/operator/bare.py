"""Creates and deletes pods with the operator's own client and as many requests at once as it has,
and nothing else: the least that any operator can do.

A process of its own, as the operator is. Reads its orders as JSON from standard input, prints when
it began and ended, in Unix seconds.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from omni_operator.cluster import Access, Cluster
from omni_operator.kinds import POD
from omni_operator.settings import Settings


async def run(*, delete: Sequence[str], create: Sequence[Any], namespace: str) -> dict[str, float]:
    """Delete pods by name, then create pods."""
    at_once = Settings(image="").max_concurrent_writes
    cluster = Cluster(await Access.find(), max_requests=at_once)
    begin_s = time.time()
    try:
        await _each(
            delete, lambda name: cluster.delete(POD, namespace, name, uid=None), at_once=at_once
        )
        await _each(create, lambda body: cluster.create(POD, body), at_once=at_once)
    finally:
        await cluster.close()
    return {"begin_s": begin_s, "end_s": time.time()}


async def _each(
    items: Sequence[Any], act: Callable[[Any], Awaitable[object]], *, at_once: int
) -> None:
    left = iter(items)

    async def work() -> None:
        for item in left:
            await act(item)

    await asyncio.gather(*(work() for _ in range(at_once)))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(**json.load(sys.stdin)))))
