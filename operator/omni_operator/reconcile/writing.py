"""Writes what was decided. What the API server answers goes into the view at once, because the
watch tells of it later than the next decision is made."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from omni_contract.plan import JobPlan
from omni_contract.status import JobStatus
from omni_operator.api import AlreadyExists, Api, ApiError, Conflict, NotFound, Raw, Refused
from omni_operator.decisions.probe import is_about_the_pod
from omni_operator.decisions.steps import Create, Delete, Patch, PatchStatus, Write
from omni_operator.kinds import CONFIG_MAP, EVENT, JOB, POD, WORKLOAD, Kind, kind_of
from omni_operator.render.names import ObjectNames
from omni_operator.render.objects import render_objects
from omni_operator.state import JobKey, JobState
from omni_operator.status.notes import EventBook, Note, notes_between
from omni_operator.watch.observe import owner_uid
from omni_operator.watch.view import View

_LOG: Final = logging.getLogger(__name__)
_NUM_ASKED: Final = 20_000

Told = Callable[[JobState, JobStatus], None]
"""Called with a job as it was and the status that was written for it."""


class PodRefused(Exception):
    """The API server takes a pod of the job under no circumstances."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message


class Writer:
    """Carries out writes."""

    def __init__(
        self,
        *,
        view: View,
        cluster: Api,
        max_at_once: int,
        wake: Callable[[JobKey], None],
        told: Told,
    ) -> None:
        self._view = view
        self._cluster = cluster
        self._max_at_once = max_at_once
        self._wake = wake
        self._told = told
        self._book = EventBook()
        self._asked: OrderedDict[tuple[str, int | None], None] = OrderedDict()

    async def write_group(self, job: JobState, group: Sequence[Write]) -> bool:
        """Do writes side by side; after the first that fails none is begun. Raises what it said.
        Returns whether all that was to be made is new."""
        waiting = iter(group)
        failures: list[ApiError | PodRefused] = []
        are_new = []

        async def work() -> None:
            for write in waiting:
                if failures:
                    return
                try:
                    are_new.append(await self._write(job, write))
                except (ApiError, PodRefused) as exc:
                    failures.append(exc)

        await asyncio.gather(*(work() for _ in range(min(len(group), self._max_at_once))))
        if failures:
            raise failures[0]
        return all(are_new)

    async def write_status(self, job: JobState, status: JobStatus, now_s: float) -> None:
        """Write a status over the version of the job that it was decided from, and tell people what
        is new in it. Raises Conflict and NotFound."""
        key = job.key
        # The first one writes defaults, too: `kubectl get` shows nothing for what is not there.
        old = _document(job.status) if job.status.conditions else {}
        raw = await self._cluster.patch_status(
            JOB,
            key.namespace,
            key.name,
            merge_patch(old, _document(status)),
            resource_version=job.resource_version,
        )
        self.see(JOB, raw, but=key)
        self._told(job, status)
        notes = notes_between(job.status, status)
        await asyncio.gather(*(self._tell(job, note, now_s) for note in notes))

    async def ensure_objects(self, job: JobState, plan: JobPlan) -> None:
        """Have all in place that pods need to run."""
        objects = render_objects(job, plan)
        await asyncio.gather(
            *(self._create(job, kind_of(body), body) for body in objects.created),
            *(self._cluster.apply(body) for body in objects.applied),
        )
        await self._cluster.apply(objects.role_binding)  # 404 as long as its role is not there

    async def delete_placements(self, job: JobState, attempts: Iterable[int]) -> None:
        """Delete the placements of attempts where there are any. No job waits for that."""
        await asyncio.gather(*(self._delete_placement(job, attempt) for attempt in attempts))

    def see(self, kind: Kind, raw: Raw, *, but: JobKey) -> bool:
        """Tell the view an answer, and wake the other jobs that it concerns. Returns whether it was
        news."""
        keys = self._view.see(kind, "MODIFIED", raw)
        for key in keys:
            if key != but:
                self._wake(key)
        return bool(keys)

    async def _delete_placement(self, job: JobState, attempt: int) -> None:
        namespace, name = job.key.namespace, ObjectNames.of(job).placement(attempt)
        try:
            found = await self._cluster.get(CONFIG_MAP, namespace, name)
            if found is not None and owner_uid(found) == job.uid:
                uid = found["metadata"]["uid"]
                await self._cluster.delete(CONFIG_MAP, namespace, name, uid=uid)
        except ApiError as exc:
            _LOG.info("A placement was not deleted. job=%s name=%s error=%s", job.key, name, exc)

    async def _tell(self, job: JobState, note: Note, now_s: float) -> None:
        write = self._book.write_of(job, note, now_s)
        try:
            if write.body is not None:
                await self._cluster.create(EVENT, write.body)
            else:
                namespace = job.key.namespace
                await self._cluster.json_patch(EVENT, namespace, write.name, write.operations)
        except AlreadyExists:
            pass  # The leader before told it.
        except NotFound:
            self._book.forget(write.name)
        except ApiError as exc:
            _LOG.info("An Event was not written. job=%s error=%s", job.key, exc)

    async def _write(self, job: JobState, write: Write) -> bool:
        """Returns whether it met no other object."""
        if isinstance(write, Create):
            return await self._create(job, write.kind, write.body)
        if isinstance(write, Patch):
            await self._patch(job, write)
        elif isinstance(write, PatchStatus):
            await self._patch_status(job, write)
        else:
            await self._delete(job, write)
        return True

    async def _patch(self, job: JobState, write: Patch) -> None:
        kind, namespace = write.kind, job.key.namespace
        found: Raw | None
        conflict: ApiError | None = None
        try:
            found = await self._cluster.json_patch(kind, namespace, write.name, write.operations)
        except (NotFound, Conflict) as exc:
            conflict = exc
            found = await self._cluster.get(kind, namespace, write.name)
        if found is None or found["metadata"]["uid"] != write.uid:
            self._view.see(kind, "DELETED", {"metadata": {"uid": write.uid}})
            conflict = None
        if found is not None and not self.see(kind, found, but=job.key) and conflict is not None:
            raise conflict  # The view was not behind: it would be tried again without an end.

    async def _patch_status(self, job: JobState, write: PatchStatus) -> None:
        found: Raw | None
        try:
            found = await self._cluster.patch_status(
                write.kind,
                job.key.namespace,
                write.name,
                write.status,
                resource_version=write.resource_version,
            )
        except (NotFound, Conflict):
            found = await self._cluster.get(write.kind, job.key.namespace, write.name)
        if found is not None:
            self.see(write.kind, found, but=job.key)

    async def _create(self, job: JobState, kind: Kind, body: Mapping[str, Any]) -> bool:
        """Returns whether it is new."""
        is_new = True
        found: Raw | None
        try:
            found = await self._cluster.create(kind, body)
        except AlreadyExists:
            is_new, found = False, None
            if kind in (POD, WORKLOAD):
                # Made before this process, or by one that still believes that it leads.
                name = body["metadata"]["name"]
                found = await self._cluster.get(kind, job.key.namespace, name)
                if found is not None and owner_uid(found) != job.uid:
                    raise _stands_in_the_way(kind, name) from None
        except Refused as exc:
            if kind is POD and is_about_the_pod(exc):
                raise PodRefused(body["metadata"]["name"], exc.message) from exc
            raise
        if found is not None and kind in (POD, WORKLOAD):
            self.see(kind, found, but=job.key)
        return is_new

    async def _delete(self, job: JobState, write: Delete) -> None:
        """Once is enough: the answer does not say when the object is gone, only the watch does."""
        asked = (write.uid, write.grace_s)
        if asked in self._asked:
            return
        await self._cluster.delete(
            write.kind, job.key.namespace, write.name, uid=write.uid, grace_s=write.grace_s
        )
        self._asked[asked] = None
        while len(self._asked) > _NUM_ASKED:
            self._asked.popitem(last=False)


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch from one document to another."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            if inner := merge_patch(before, value):
                patch[key] = inner
        elif before != value:
            patch[key] = value
    return patch


def _stands_in_the_way(kind: Kind, name: str) -> PodRefused | Refused:
    message = f"there is a {kind.kind} {name} that is not of this job; delete it"
    if kind is POD:
        return PodRefused(name, message)
    return Refused(reason="AlreadyExists", message=message, code=409)


def _document(status: JobStatus) -> dict[str, Any]:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)
