"""Steps of one pair (attempt, generation): planned, read, agreed on, ready for the ranks to take.

A production starts from one state and knows nothing of sockets. What it keeps beyond a crash is
one small file: the state a few steps back, and every corrupt sample agreed on.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omni_contract.errors import DataError, StorageError
from omni_contract.plan import JobPlan
from omni_contract.spec_model import Modality
from omni_dataloader.agree import Agreement, Bad, Board, Pair, reported
from omni_dataloader.assemble import Payload, Sample, assemble
from omni_dataloader.fetch import Fetched, Fetcher
from omni_dataloader.sample_plan import (
    MicrobatchPlan,
    OutOfSamples,
    PlanState,
    SamplePlan,
    StepPlan,
    place_step,
)
from omni_dataloader.select import needs, wanted_parts
from omni_dataloader.sources import OpenedData
from omni_dataloader.state import CORRUPT, Identity, SavedState
from omni_dataloader.store import Store

log = logging.getLogger(__name__)

PREFETCH_STEPS = 2
"""Steps made ready beyond the one asked for: one to read, one to agree on."""
BEHIND_STEPS = 2
"""How far a rank of the node may be behind another; states that far back stay at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A step that can be served."""

    step_plan: StepPlan
    placed: Mapping[tuple[int, int], MicrobatchPlan]
    fetched: Fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """Counts over the whole global batch of one step, corrupt samples left out."""

    tokens_by_source: dict[str, int]
    tokens_by_modality: dict[str, int]
    weights: dict[str, float]
    corrupt_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """No step is left."""

    step: int
    """The first that does not exist."""
    message: str


class World:
    """What outlives a pair: plan, opened data, threads, the agreement with other nodes."""

    def __init__(
        self,
        *,
        plan: JobPlan,
        node: int,
        data: OpenedData,
        samples: SamplePlan,
        store: Store,
        executor: Executor,
        agreement: Agreement,
        run_dir: Path,
        cache_bytes: int,
    ) -> None:
        self.plan = plan
        self.node = node
        self.data = data
        self.samples = samples
        self.agreement = agreement
        self.run_dir = run_dir
        self.identity = Identity.of(samples, seed=plan.spec.train.seed)
        self.fetcher = Fetcher(data, store, executor, cache_bytes=cache_bytes)
        # In turn, so that the step needed first is ready first; two, so that one is read while the
        # other is decoded.
        self.fetching = asyncio.Semaphore(2)
        self.needs = needs(plan, node)


class Production:
    """The steps of one pair, from one origin."""

    def __init__(
        self, world: World, pair: Pair, *, origin: SavedState | None, next_step: int
    ) -> None:
        self._world = world
        self._pair = pair
        begin = world.samples.begin()
        self._origin = origin or SavedState(plan=begin, corrupt=np.zeros(0, CORRUPT))
        self._states: dict[int, PlanState] = {self._origin.plan.next_step: self._origin.plan}
        self._corrupt: dict[Sample, tuple[int, str]] = {}
        self._recall(self._origin.corrupt)
        self._end: End | None = None
        self._planning = asyncio.Lock()
        self._tasks: dict[int, asyncio.Task[Prepared | End]] = {}
        self._file = self._file_path()
        self._load_file()
        self._board = Board(pair, floor=next_step, history=self._agreed_at)
        world.agreement.open(self._board)

    def close(self) -> None:
        """Drop everything that is under way."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    def seek(self, step: int) -> None:
        """A rank starts at this step, perhaps before those of others."""
        self._board.floor = min(self._board.floor, step)
        self._ensure(step)

    async def ready(self, step: int) -> Prepared | End:
        """Wait for a step. Raises an OmniError where it cannot be served."""
        self._ensure(step)
        try:
            prepared = await asyncio.shield(self._tasks[step])
        except Exception:
            self._tasks.pop(step, None)  # the next to ask tries again
            raise
        if isinstance(prepared, Prepared):
            self._check_policy(step)
        return prepared

    def forget(self, before: int) -> None:
        """No rank asks for steps before this one any more."""
        for step in [s for s in self._tasks if s < before]:
            self._tasks.pop(step).cancel()
        for step in [s for s in self._states if s < before - BEHIND_STEPS]:
            if step != self._origin.plan.next_step:
                del self._states[step]

    async def state_after(self, step: int) -> bytes:
        """The state with which training goes on after a step that was served."""
        if step + 1 not in self._states:
            await self._walk(step)
        state = self._states.get(step + 1)
        if state is None:
            raise DataError(f"step {step} does not exist, so there is no state after it")
        saved = SavedState(plan=state, corrupt=self._records(step))
        return saved.to_bytes(self._world.identity)

    async def arrays(self, rank: int, prepared: Prepared) -> dict[tuple[int, str], Payload]:
        """What a rank takes from a step, by microbatch and name."""
        corrupt = self._corrupt_by(prepared.step_plan.step)
        return await asyncio.to_thread(_assembled, self._world, rank, prepared, corrupt)

    def sums(self, prepared: Prepared) -> StepSums:
        """Counts of a step."""
        corrupt = self._corrupt_by(prepared.step_plan.step)
        tables = self._world.samples.tables
        by_source = dict.fromkeys(self._world.samples.names, 0)
        by_modality = {str(modality): 0 for modality in Modality}
        for _, source, epoch, index, _, _, tokens in prepared.step_plan.pieces.tolist():
            if (source, epoch, index) in corrupt:
                continue
            by_source[tables[source].name] += tokens
            for media in tables[source].media:
                by_modality[media.modality] += int(media.tokens[index])
                tokens -= int(media.tokens[index])
            by_modality[Modality.TEXT] += tokens
        return StepSums(
            tokens_by_source=by_source,
            tokens_by_modality=by_modality,
            weights=dict(prepared.step_plan.weights),
            corrupt_samples=len(corrupt),
        )

    def _ensure(self, step: int) -> None:
        """Begin the step and those after it; what is begun already goes on."""
        for ahead in range(step, step + PREFETCH_STEPS + 1):
            if ahead not in self._tasks and (ahead == step or not self._is_beyond(ahead)):
                task = asyncio.create_task(self._prepare(ahead))
                task.add_done_callback(_retrieve)
                self._tasks[ahead] = task

    def _is_beyond(self, step: int) -> bool:
        return step > self._world.plan.num_steps or self._end is not None

    async def _prepare(self, step: int) -> Prepared | End:
        num_steps = self._world.plan.num_steps
        if step > num_steps:
            return End(step=num_steps + 1, message=f"all {num_steps} steps of the plan are done")
        planned = await self._walk(step)
        if isinstance(planned, End):
            return planned
        with reported(self._board, step):
            placed = place_step(planned, self._world.samples.tables, self._world.plan)
            wanted = wanted_parts(self._world.needs, placed, self._world.samples.tables)
            async with self._world.fetching:
                fetched = await asyncio.to_thread(self._world.fetcher.fetch, wanted)
        local = [
            Bad(source=s, epoch=e, index=i, reason=fetched.corrupt[s, i])
            for s, e, i in sorted({tuple(p[1:4]) for p in planned.pieces.tolist()})
            if (s, i) in fetched.corrupt
        ]
        agreed = await self._world.agreement.agree(self._board, step, local)
        self._note(step, agreed)
        masked = self._corrupt_by(step)
        unmasked = [bad for bad in local if (bad.source, bad.epoch, bad.index) not in masked]
        if unmasked:
            raise DataError(
                f"step {step} was agreed on when all its samples could be read; now one cannot: "
                f"{self._named(unmasked[0])}; resume from the last checkpoint"
            )
        return Prepared(step_plan=planned, placed=placed, fetched=fetched)

    async def _walk(self, step: int) -> StepPlan | End:
        """The plan of a step; states up to the one after it are known then."""
        async with self._planning:
            if self._end is not None and step >= self._end.step:
                return self._end
            start = max((s for s in self._states if s <= step), default=None)
            if start is None:
                raise DataError(f"step {step} lies before the state this run started from")
            # Only the event loop touches the states: they are also saved and dropped meanwhile.
            planned, passed = await asyncio.to_thread(
                _planned, self._world.samples, self._states[start], step
            )
            self._states |= {state.next_step: state for state in passed}
            if isinstance(planned, End):
                self._end = planned
            return planned

    def _note(self, step: int, agreed: list[Bad]) -> None:
        for bad in agreed:
            sample = (bad.source, bad.epoch, bad.index)
            first, reason = self._corrupt.get(sample, (step, bad.reason))
            if sample not in self._corrupt:
                log.warning("corrupt sample masked step=%d %s", step, self._named(bad))
            self._corrupt[sample] = (min(first, step), reason)
        self._save_file(step)

    def _named(self, bad: Bad) -> str:
        source = self._world.data.sources[bad.source].name
        return f"source={source} epoch={bad.epoch} index={bad.index}: {bad.reason}"

    def _check_policy(self, step: int) -> None:
        """Raise DataError where the job's policy says that training ends at this step."""
        policy = self._world.plan.spec.data.corrupt_samples
        corrupt = self._corrupt_by(step)
        if not corrupt:
            return
        (source, epoch, index), (_, reason) = max(
            ((s, self._corrupt[s]) for s in corrupt), key=lambda item: item[1][0]
        )
        named = self._named(Bad(source=source, epoch=epoch, index=index, reason=reason))
        if policy.action == "stop":
            raise DataError(
                f"data.corruptSamples.action is stop and step {step} holds a corrupt sample: "
                f"{named}; mend or remove it, or use skip"
            )
        if len(corrupt) > policy.limit:
            raise DataError(
                f"data.corruptSamples.limit: {len(corrupt)} samples are corrupt by step {step}, "
                f"more than the {policy.limit} allowed; the last is {named}; mend the data or "
                "raise the limit"
            )

    def _corrupt_by(self, step: int) -> set[Sample]:
        return {sample for sample, (first, _) in self._corrupt.items() if first <= step}

    def _agreed_at(self, step: int) -> list[Bad]:
        return sorted(
            Bad(source=source, epoch=epoch, index=index, reason=reason)
            for (source, epoch, index), (first, reason) in self._corrupt.items()
            if first == step
        )

    def _records(self, last: int) -> NDArray[np.void]:
        rows = sorted((first, *s) for s, (first, _) in self._corrupt.items() if first <= last)
        return np.array(rows, CORRUPT)

    def _recall(self, records: NDArray[np.void]) -> None:
        for first, source, epoch, index in records.tolist():
            reason = "found corrupt before the data service was restarted"
            self._corrupt.setdefault((source, epoch, index), (first, reason))

    def _file_path(self) -> Path:
        """Named after all that its state follows from, so that no other run can pick it up."""
        origin = self._origin.to_bytes(self._world.identity)
        text = f"{self._world.plan.hash}:{self._pair}:{origin.hex()}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._world.run_dir / f"loader-{self._world.node}-{digest}.state"

    def _save_file(self, step: int) -> None:
        """Before a step is served: what a restarted service must know to go on from it."""
        kept = [s for s in self._states if s <= step - BEHIND_STEPS]
        state = self._states[max(kept)] if kept else self._origin.plan
        saved = SavedState(plan=state, corrupt=self._records(2**62))
        path = self._file
        fresh = path.with_suffix(".new")
        try:
            fresh.write_bytes(saved.to_bytes(self._world.identity))
            fresh.replace(path)
        except OSError as exc:
            raise StorageError(f"{path}: {exc.strerror}; make room in the run folder") from None

    def _load_file(self) -> None:
        """Go on where this pair's service was before it died, if it was."""
        with contextlib.suppress(FileNotFoundError, DataError):
            saved = SavedState.from_bytes(self._file.read_bytes(), self._world.identity)
            self._recall(saved.corrupt)
            if self._origin.plan.next_step < saved.plan.next_step:
                self._states[saved.plan.next_step] = saved.plan
            log.info("state of an earlier life found step=%d", saved.plan.next_step)
        for old in self._world.run_dir.glob(f"loader-{self._world.node}-*.state"):
            if old != self._file:  # of an older pair, which never comes back
                old.unlink(missing_ok=True)


def _planned(
    samples: SamplePlan, state: PlanState, step: int
) -> tuple[StepPlan | End, list[PlanState]]:
    """The plan of a step, walked to from a state before it, and the last states passed."""
    passed: deque[PlanState] = deque(maxlen=BEHIND_STEPS + 2)
    while True:
        try:
            planned, state = samples.step(state)
        except OutOfSamples as exc:
            return End(step=state.next_step, message=str(exc)), list(passed)
        passed.append(state)
        if planned.step == step:
            return planned, list(passed)


def _assembled(
    world: World, rank: int, prepared: Prepared, corrupt: set[Sample]
) -> dict[tuple[int, str], Payload]:
    arrays: dict[tuple[int, str], Payload] = {}
    for need in world.needs:
        if need.rank == rank:
            of_microbatch = assemble(
                need,
                prepared.placed[need.replica, need.microbatch],
                world.data,
                prepared.fetched,
                corrupt=corrupt,
                microbatch_tokens=world.plan.microbatch_tokens,
            )
            arrays |= {(need.microbatch, name): array for name, array in of_microbatch.items()}
    return arrays


def _retrieve(task: "asyncio.Task[Prepared | End]") -> None:
    """A step made ahead may fail unasked; who asks for it gets the error."""
    if not task.cancelled():
        task.exception()
