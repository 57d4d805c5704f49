"""Many jobs played at once against one operator: a story is a generator that acts and yields what
it waits for, and all of them look at the cluster through one listing a moment."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from omni_contract.names import LABEL_JOB
from tests.cluster.api import Api, Object
from tests.cluster.job_kind import jobs_path

_LOG: Final = logging.getLogger(__name__)
_EVERY_S: Final = 0.3

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What a story waits for."""

    what: str
    is_so: Callable[[], object]
    within_s: float = 60


Story = Generator[Wait, None, T]


class Seen:
    """The jobs and pods of a namespace as they were a moment ago."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._jobs: Mapping[str, Object] = {}
        self._pods: Mapping[str, list[Object]] = {}
        self.jobs_version = self.pods_version = "0"
        """Resource versions of the listings."""

    def look(self) -> None:
        """Look again."""
        listed = self._api.get(f"/api/v1/namespaces/{self._namespace}/pods")
        pods = defaultdict(list)
        for pod in listed["items"]:
            pods[pod["metadata"].get("labels", {}).get(LABEL_JOB, "")].append(pod)
        jobs = self._api.get(jobs_path(self._namespace))
        self._jobs = {job["metadata"]["name"]: job for job in jobs["items"]}
        self._pods = pods
        self.pods_version = listed["metadata"]["resourceVersion"]
        self.jobs_version = jobs["metadata"]["resourceVersion"]

    @property
    def jobs(self) -> list[Object]:
        """All jobs."""
        return list(self._jobs.values())

    def __call__(self, job: str) -> tuple[Object | None, list[Object]]:
        """A job and its pods."""
        return self._jobs.get(job), self._pods.get(job, [])


def play(
    stories: Mapping[str, Story[T]],
    seen: Seen,
    *,
    num_at_once: int,
    between: Callable[[], None] = lambda: None,
) -> dict[str, T | Exception]:
    """Play stories to their ends: what each returns, or what went wrong with it. `between` is
    called after every look."""
    to_come = list(stories)[::-1]
    ends: dict[str, T | Exception] = {}
    waits: dict[str, tuple[Wait, float]] = {}

    def go_on(name: str, failure: Exception | None = None) -> None:
        story = stories[name]
        try:
            wait = next(story) if failure is None else story.throw(failure)
        except StopIteration as end:
            _LOG.info("%s is over", name)
            ends[name] = end.value
            waits.pop(name, None)
        except Exception as exc:  # every story has an end of its own
            _LOG.info("%s failed: %s", name, exc)
            ends[name] = exc
            waits.pop(name, None)
        else:
            _LOG.info("%s waits for: %s", name, wait.what)
            waits[name] = (wait, time.monotonic() + wait.within_s)

    while to_come or waits:
        time.sleep(_EVERY_S)
        seen.look()
        between()
        while to_come and len(waits) < num_at_once:
            go_on(to_come.pop())
        for name, (wait, until_s) in list(waits.items()):
            try:
                is_so = wait.is_so()
            except Exception as exc:  # the story's own
                go_on(name, exc)
                continue
            if is_so:
                go_on(name)
            elif time.monotonic() > until_s:
                go_on(name, AssertionError(f"not within {wait.within_s:.0f} s: {wait.what}"))
    return ends


def returned(end: Any) -> Any:
    """What a story returned; raises what went wrong."""
    if isinstance(end, Exception):
        raise end
    return end
