"""Carries one job a step further: read what no watch brings, decide, write, report.

It may be ended between any two writes, and two processes may do it at once for a while: names are
made of attempt and index, and what counts is written only over the version it was decided from.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from omni_contract.plan import JobPlan
from omni_operator.api import Api, ApiError, ApiUnavailable, Conflict, NotFound, QuotaExceeded
from omni_operator.decisions.case import Case, is_valid
from omni_operator.decisions.decide import REFUSED_S, decide, read_case
from omni_operator.decisions.kueue import needs_priority, tend
from omni_operator.decisions.probe import find_refusal, tell_unanswered
from omni_operator.decisions.starting import refuse_for_good, refuse_for_quota, tell_hindrance
from omni_operator.decisions.steps import Step
from omni_operator.reconcile.reading import JobMemory, Reader, attempt_of, doubtful_pods
from omni_operator.reconcile.writing import PodRefused, Told, Writer
from omni_operator.render.pod import priority_class_of
from omni_operator.settings import Settings
from omni_operator.state import JobKey, JobState, Observed
from omni_operator.status.conditions import significance
from omni_operator.status.life import tell_unreadable
from omni_operator.watch.observe import StatusError
from omni_operator.watch.view import View

_LOG: Final = logging.getLogger(__name__)
_TROUBLE_S: Final = 30.0
"""A Workload that could not be written is tried again so much later."""
_REST: Final = 4.0
"""A job that waits is left alone this many times as long as a decision about it takes."""
_NUM_TIDIED: Final = 8
"""Old placements that a new process looks for: those that one before it had no time to delete."""
_NUM_STEPS: Final = 4
"""Steps of one job that follow at once, at most: making pods, letting them go and telling so are
three. All jobs that wait are placed before any of them makes pods."""
_PAUSE_S: Final = 1.0
"""After as many steps that led nowhere."""
_UNREADABLE_S: Final = 60.0
"""What could not be read is read again this much later."""
_WORDS_S: Final = 5.0
"""Words alone go into a status at most this often: while 500 pods start they change 500 times."""


class Reconciler:
    """Reconciles all jobs, one at a time each. What it remembers it can do without."""

    def __init__(
        self,
        *,
        view: View,
        cluster: Api,
        settings: Settings,
        clock: Callable[[], float],
        wake: Callable[[JobKey], None],
        told: Told = lambda job, status: None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._view = view
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._timer = timer
        self._wake = wake
        self._reader = Reader(view=view, cluster=cluster)
        self._writer = Writer(
            view=view,
            cluster=cluster,
            max_at_once=settings.max_concurrent_writes,
            wake=wake,
            told=told,
        )
        self._memories: dict[JobKey, JobMemory] = {}

    async def recall(self) -> None:
        """Read what earlier processes decided. Before that no job may be placed: it could be given
        what another one has reserved."""

        async def recall(job: JobState) -> None:
            try:
                await self._reader.read_attempt(job, self._memory(job))
            except ValueError as exc:  # One that nobody can read must not stop all others.
                _LOG.warning("A job cannot be recalled. job=%s error=%s", job.key, exc)

        found = map(self._readable, self._view.keys())
        await asyncio.gather(*(recall(job) for job in found if job and not _is_over(job)))

    async def reconcile(self, key: JobKey) -> float | None:
        """Move one job a step towards its spec.

        Returns the seconds after which it is to be looked at again if nothing happens before; None:
        a resync is soon enough. Raises ApiError where it has to be tried again.
        """
        rested = self._memories.get(key)
        if rested is not None and (rest_s := rested.rests_until_s - self._timer()) > 0:
            return rest_s
        job = await self._catch_up(key)
        if job is None:
            self._memories.pop(key, None)
            return None
        memory = self._memory(job)
        if not memory.is_untold:
            memory.turn_s = self._clock()
        if not _is_over(job):
            try:
                await self._reader.read_attempt(job, memory)
            except ValueError as exc:
                return await self._tell_unreadable(key, memory, str(exc))
            await self._reader.read_admission(job, memory, with_kueue=self._settings.with_kueue)
            # A clock may be set back.
            is_due = not 0 <= self._clock() - memory.lease_s < self._settings.progress_poll_s
            if is_due and job.status.holds("GangReady"):
                await self._read_progress(job)
            await self._have_judged(job, memory)
        elif not (job.is_deleting or is_valid(job)):
            # It is cleaned up by the spec that it ran by, if anybody can read that.
            with suppress(ValueError):
                await self._reader.read_plan(job)
        decided = self._decide(key)
        if decided is not None and decided[1].is_transition and await self._look_closer(decided[0]):
            decided = self._decide(key)
        again_s: float | None = 0
        for _ in range(_NUM_STEPS):
            if decided is None:
                break
            step = decided[1]
            again_s = await self._carry_out(*decided)
            if again_s != 0 or not (step.is_transition or step.goes_on):
                break
            # What it leads to is known now, and need not wait for all other jobs in the queue.
            decided = self._decide(key)
            if decided is not None and decided[1].is_transition:
                break
        else:
            again_s = _PAUSE_S  # Somebody takes away what it makes.
        if again_s != 0:
            # It waits for events: of hundreds of pods more come than can be looked at one by one.
            memory.rests_until_s = self._timer() + _REST * memory.decided_s
        return again_s

    async def _tell_unreadable(self, key: JobKey, memory: JobMemory, message: str) -> float:
        """Say that nobody looks after a job of which something cannot be read."""
        _LOG.warning("A job cannot be looked after. job=%s error=%s", key, message)
        observed = self._observe(key)
        if observed is not None:
            status = tell_unreadable(observed.job.status, observed, message)
            await self._report(observed.job, Step(status=status), memory)
        return _UNREADABLE_S

    async def _catch_up(self, key: JobKey) -> JobState | None:
        """The job, at least as new as its pods: while another process leads already, they belong to
        an attempt that this one knows nothing of, and are not strangers."""
        observed = self._view.observe(key, now_s=self._clock())
        if observed is not None and any(
            attempt_of(pod) > observed.job.status.attempt for pod in observed.pods
        ):
            self._wake_all(await self._reader.read_job(observed.job))
        return self._view.job(key)

    def _decide(self, key: JobKey) -> tuple[Observed, Step] | None:
        """Decide and reserve, without a moment in which another job could decide. None where the
        job became another one or got another attempt while it was read about."""
        observed = self._observe(key)
        if observed is None:
            return None
        job, memory = observed.job, self._memory(observed.job)
        if not _is_over(job):
            if memory.asked < job.status.attempt or memory.judged != job.generation:
                return None
            if memory.published < job.status.attempt:
                observed = replace(observed, placement=None)
        began_s = self._timer()
        step = decide(observed, self._settings)
        memory.decided_s = self._timer() - began_s
        if step.plan is not None:
            self._view.note_plan(step.plan)
        if step.placement is not None:
            self._reader.note_placement(observed.job, step.placement)
        if step.gives_up_room:
            for other in self._view.release(observed.job.uid):
                if other != key:
                    self._wake(other)
        return observed, step

    def _observe(self, key: JobKey) -> Observed | None:
        """What is known of a job, and what the API server said about the pods of its spec."""
        observed = self._view.observe(key, now_s=self._clock())
        if observed is None:
            return None
        memory = self._memory(observed.job)
        is_known = memory.judged == observed.job.generation
        return replace(observed, refusal=memory.refusal if is_known else "")

    async def _have_judged(self, job: JobState, memory: JobMemory) -> None:
        """Ask the API server about the pods of a spec once, and again now and then while it takes
        none of them."""
        now_s = self._clock()
        is_due = bool(memory.refusal) and now_s - memory.judged_s >= REFUSED_S
        if memory.judged == job.generation and not is_due:
            return
        plan = None if job.status.plan_hash is None else self._view.plan(job.status.plan_hash)
        try:
            memory.refusal = await find_refusal(job, plan, self._settings, self._cluster)
        except ApiUnavailable as exc:
            if not job.status.attempt:
                observed = self._view.observe(job.key, now_s=now_s)
                if observed is not None and exc.code is not None:
                    await self._report(job, tell_unanswered(observed, exc.message), memory)
                raise
            memory.refusal = ""  # A job that runs needs looking after more than this answer.
        memory.judged, memory.judged_s = job.generation, now_s

    async def _look_closer(self, observed: Observed) -> bool:
        """Before something counts: make sure of what the view may be behind of. Returns whether
        anything was looked at anew."""
        if observed.placement is None or not observed.job.status.holds("GangReady"):
            return False
        await self._read_progress(observed.job)
        if doubtful := doubtful_pods(observed):
            self._wake_all(await self._reader.read_pods(observed, doubtful))
        return True

    async def _read_progress(self, job: JobState) -> None:
        now_s = self._clock()
        await self._reader.read_progress(job, now_s)
        self._memory(job).lease_s = now_s

    async def _carry_out(self, observed: Observed, step: Step) -> float | None:
        job, memory = observed.job, self._memory(observed.job)
        if not step.is_transition:
            try:
                await self._write(job, step, memory)
            except QuotaExceeded as exc:
                step = refuse_for_quota(self._case(observed), exc.message)
            except PodRefused as exc:
                step = refuse_for_good(self._case(observed), exc.name, exc.message)
            except ApiError as exc:
                if exc.code is not None:  # Who does not answer takes no status either.
                    await self._report(job, tell_hindrance(step, observed, exc.message), memory)
                raise
        again_s = await self._report(job, step, memory)
        if not self._settings.with_kueue or step.is_transition:
            return again_s
        if (left_s := memory.tend_s - self._clock()) <= 0:
            left_s = await self._tend_workload(job.key, memory)
        if left_s <= 0:
            return again_s
        return left_s if again_s is None else min(left_s, again_s)

    async def _tend_workload(self, key: JobKey, memory: JobMemory) -> float:
        """Ask Kueue, and tell it what it has to know. Returns when to try again: while its webhooks
        do not answer, no Workload can be written, and jobs that run must not suffer."""
        observed = self._observe(key)
        if observed is None or observed.job.is_deleting:
            return 0
        case = read_case(observed, self._settings)
        if not isinstance(case, Case):
            return 0
        raw = self._view.workload(observed.job.uid)
        try:
            priority = None
            name = priority_class_of(case.spec, self._settings)
            if name is not None and needs_priority(case, raw):
                priority = await self._reader.read_priority(name)
            writes = tend(case, raw, priority=priority)
            if writes:
                await self._writer.write_group(observed.job, writes)
        except ApiError as exc:
            _LOG.warning("A Workload has to wait. job=%s error=%s", key, exc)
            if memory.trouble != exc.message:
                self._wake(key)
            memory.trouble, memory.tend_s = exc.message, self._clock() + _TROUBLE_S
            return _TROUBLE_S
        memory.trouble = ""
        if writes:
            self._wake(key)
        return 0

    async def _write(self, job: JobState, step: Step, memory: JobMemory) -> None:
        if step.needs_objects and step.plan is not None:
            await self._ensure_objects(job, step.plan, memory)
        is_new = True
        for group in step.writes:
            if group:
                is_new &= await self._writer.write_group(job, group)
        if step.needs_objects and job.status.holds("GangReady"):
            await self._tidy(job, memory)
        if step.placement is None:
            return
        attempt = step.placement.attempt
        if is_new:
            memory.published = attempt
        else:
            # Whoever was first has decided.
            await self._reader.read_placement(job, attempt, memory)

    async def _tidy(self, job: JobState, memory: JobMemory) -> None:
        """Keep the placements of this attempt and of the one before it."""
        newest = job.status.attempt - 2
        if memory.tidied < newest:
            oldest = max(memory.tidied, newest - _NUM_TIDIED) + 1
            memory.tidied = newest
            await self._writer.delete_placements(job, range(oldest, newest + 1))

    async def _ensure_objects(self, job: JobState, plan: JobPlan, memory: JobMemory) -> None:
        """Once for a plan and process, and again now and then, as people delete things."""
        now_s = self._clock()
        is_done = memory.plan_hash == plan.hash
        if is_done and now_s - memory.objects_s < self._settings.resync_s:
            return
        await self._writer.ensure_objects(job, plan)
        memory.plan_hash, memory.objects_s = plan.hash, now_s

    def _case(self, observed: Observed) -> Case:
        case = read_case(observed, self._settings)
        assert isinstance(case, Case), "pods are made by a plan"
        return case

    async def _report(self, job: JobState, step: Step, memory: JobMemory) -> float | None:
        """Write the status where that is due. Returns when to look again."""
        now_s, again_s = self._clock(), step.requeue_after_s
        # A clock may be set back.
        memory.status_s, memory.turn_s = min(memory.status_s, now_s), min(memory.turn_s, now_s)
        due_s = self._due_s(job, step, memory) - now_s
        memory.is_untold = due_s > 0 and step.goes_on
        if due_s > 0:
            return due_s if again_s is None else min(again_s, due_s)
        if step.status != job.status:
            try:
                await self._writer.write_status(job, step.status, now_s)
            except (Conflict, NotFound):
                self._wake_all(await self._reader.read_job(job))
                return 0
            memory.status_s = now_s
            if step.status.holds("GangReady") and not job.status.holds("GangReady"):
                memory.lease_s = now_s  # No pod of it can have told anything yet.
            if step.status.attempt > job.status.attempt:
                # Opened here and now: there is no placement of it to ask for.
                memory.asked = step.status.attempt
        return again_s

    def _due_s(self, job: JobState, step: Step, memory: JobMemory) -> float:
        """When the status is to be written at the latest."""
        how_much = significance(job.status, step.status)
        if step.goes_on and how_much == "facts":
            return memory.turn_s + _WORDS_S
        waits = {"words": _WORDS_S, "progress": self._settings.status_progress_s}
        return memory.status_s + waits.get(how_much, float("-inf"))

    def _memory(self, job: JobState) -> JobMemory:
        memory = self._memories.get(job.key)
        if memory is None or memory.uid != job.uid:
            memory = self._memories[job.key] = JobMemory(uid=job.uid)
        return memory

    def _readable(self, key: JobKey) -> JobState | None:
        try:
            return self._view.job(key)
        except StatusError:
            return None

    def _wake_all(self, keys: Iterable[JobKey]) -> None:
        for key in keys:
            self._wake(key)


def _is_over(job: JobState) -> bool:
    return job.is_deleting or job.status.holds("Completed") or job.status.holds("Failed")
