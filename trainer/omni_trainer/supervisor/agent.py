"""The elastic agent of one node: starts ranks, sees them fall, asks for the next generation.

torch's agent loop is kept. It calls, in this order: `next_rendezvous`, `_start_workers`, then
`_monitor_workers` at every tick; after a failure or a waiting peer `_stop_workers` and again from
the top. Restarts are counted in the run's events, not in torch's max_restarts.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from omni_contract import names
from omni_contract.plan import JobPlan
from omni_contract.records import History, StepRecord
from omni_contract.shared_files import DataPeers
from omni_trainer.events import read_events, record_event, unrecovered_since
from omni_trainer.supervisor.hang import HangWatch
from omni_trainer.supervisor.nursery import Nursery
from omni_trainer.supervisor.rank_processes import RankProcesses, RunLogs, rank_log
from omni_trainer.supervisor.reaper import count_oom_kills, end_descendants
from omni_trainer.supervisor.rendezvous import PlanRendezvous
from omni_trainer.supervisor.tail import Tail
from omni_trainer.supervisor.verdict import (
    Failure,
    Report,
    Verdict,
    decide,
    find_cause,
    history_of,
    last_action,
)

_CASCADE_GRACE_S = 1.5
"""How long ranks may take to end by themselves where only lost peers are known so far."""
_TAIL_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one supervisor runs."""

    plan: JobPlan
    plan_path: Path
    node: int
    attempt: int
    run_dir: Path
    sidecar: str
    """Path of the node's sidecar socket."""
    trace_steps: str
    """Comma-separated steps."""
    rank_module: str
    """Main program of a rank."""
    device_env: dict[str, str]
    """What the device asks of the ranks' environment."""
    save_grace_s: float
    """How long ranks may take after SIGTERM, for a last checkpoint."""
    history: History | None = None
    """Restarts before this attempt, where somebody above replaces pods. None: those of the run
    folder, and nobody above knows a dearer cure than a restart in place."""
    peers_file: Path | None = None
    """Where the node's data service reads the addresses of all; None: it knows them."""
    monitor_interval_s: float = 0.1

    @property
    def ranks(self) -> range:
        """Global ranks in local order."""
        return self.plan.layout.ranks_of_node(self.node)


class NodeAgent(LocalElasticAgent):
    """Runs the ranks of one node until all ranks of the job are done."""

    def __init__(self, node: Node, *, rendezvous: PlanRendezvous, nursery: Nursery) -> None:
        self._logs = RunLogs(node.run_dir)
        spec = WorkerSpec(
            role="trainer",
            local_world_size=len(node.ranks),
            rdzv_handler=rendezvous,
            entrypoint=node.rank_module,
            max_restarts=1_000_000_000,  # the verdict says when it is enough
            monitor_interval=node.monitor_interval_s,
        )
        super().__init__(spec, self._logs)
        self._node = node
        self._meeting = rendezvous
        self._nursery = nursery
        self._processes: RankProcesses | None = None
        self._watch: HangWatch | None = None
        self._hung: dict[int, Literal["stalled", "silent"]] = {}
        self._failures: dict[int, Failure] = {}
        self._oom_kills = 0
        self._recovery: _Recovery | None = None
        self._highest_step = 0

    @property
    def highest_step(self) -> int:
        """Most steps finished by one of this node's ranks in this attempt."""
        newest = 0 if self._watch is None else self._watch.highest_step
        return max(self._highest_step, newest)

    def judge(self, generation: int, reports: Sequence[Report]) -> Verdict:
        """Node 0: what follows the generation; written to the run's events."""
        step = max(report.step for report in reports)
        cause = find_cause([failure for report in reports for failure in report.failures])
        events, previous = read_events(self._node.run_dir), None
        if self._node.history is not None:  # what came before this attempt is counted in it
            events = [event for event in events if event.attempt == self._node.attempt]
            previous = last_action(events, cause.fault, step=step)
        verdict = decide(
            cause,
            step=step,
            history=history_of(events, self._node.history),
            spec=self._node.plan.spec.restart,
            previous=previous,
        )
        about = {
            "attempt": self._node.attempt,
            "generation": generation,
            "step": step,
            "node": cause.node,
            "rank": cause.rank,
            "fault": verdict.fault,
            "action": verdict.action,
        }
        self._record("fault", time_s=cause.time_s, message=cause.describe(step), **about)
        if verdict.kind == "end":
            # A mistake of the user's is one sentence; any other end is told with its log.
            lines = () if verdict.exit_code == names.Exit.USER else cause.tail
            tail = "".join(f"\n    {line}" for line in lines)
            self._record("gave_up", message=verdict.message + tail, **about)
        else:
            what = "all ranks restart in place" if verdict.kind == "restart" else "a new attempt"
            self._record("restart", message=f"{what} after {verdict.fault}", **about)
        return verdict

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Ranks come from the plan; nothing to agree on."""
        world_size = self._node.plan.layout.world_size
        return [
            Worker(
                local_rank=local_rank,
                global_rank=rank,
                role_rank=rank,
                world_size=world_size,
                role_world_size=world_size,
            )
            for local_rank, rank in enumerate(self._node.ranks)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        generation = self._generation
        if not self._nursery.is_alive:
            self._nursery = self._nursery.reborn()
        self._failures = {}
        self._hung = {}
        self._oom_kills = count_oom_kills()
        self._highest_step = self.highest_step
        if generation == 0 and self._node.peers_file is not None:
            addresses = tuple(self._meeting.data_addresses())
            DataPeers(attempt=self._node.attempt, addresses=addresses).save(self._node.peers_file)
        if self._node.node == 0:
            if generation == 0:
                self._record("started", generation=0, message=self._greeting())
            self._recovery = _Recovery.of(self._node, generation)
        spec = self._node.plan.spec.restart
        self._watch = HangWatch(
            run_dir=self._node.run_dir,
            ranks=self._node.ranks,
            attempt=self._node.attempt,
            generation=generation,
            hang_after_s=spec.hang_after_seconds,
            start_after_s=spec.start_after_seconds,
        )
        envs = {w.local_rank: self._rank_env(worker_group, w) for w in worker_group.workers}
        self._processes = RankProcesses(
            nursery=self._nursery, module=self._node.rank_module, envs=envs, logs=self._logs
        )
        self._pcontext = self._processes
        self._processes.start()
        return self._processes.pids()

    def _rank_env(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        node = self._node
        return {
            **os.environ,
            **node.device_env,
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(len(node.ranks)),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            # Ranks are clients of the generation's own store; none of them serves one.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": self._meeting.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": str(self._generation),
            names.ENV_PLAN: str(node.plan_path),
            names.ENV_NODE: str(node.node),
            names.ENV_ATTEMPT: str(node.attempt),
            names.ENV_GENERATION: str(self._generation),
            names.ENV_SIDECAR: node.sidecar,
            names.ENV_RUN_DIR: str(node.run_dir),
            names.ENV_TRACE_STEPS: node.trace_steps,
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._meeting.check_contact()
        if self._recovery is not None and self._recovery.look():
            self._recovery = None
        result: RunResult = super()._monitor_workers(worker_group)
        assert self._watch is not None
        if result.state is WorkerState.HEALTHY:
            self._hung = self._watch.look()
            return RunResult(state=WorkerState.UNHEALTHY) if self._hung else result
        if result.state is WorkerState.SUCCEEDED and not self._meeting.mark_done():
            return RunResult(state=WorkerState.HEALTHY)  # others may yet fail and need our ranks
        self._watch.look()  # the last step
        if result.state is WorkerState.SUCCEEDED and self._node.node == 0:
            step, planned = self._watch.highest_step, self._node.plan.num_steps
            message = f"all {planned} steps are done"
            if step < planned:
                message = f"the data ended after step {step} of {planned}"
            self._record("completed", message=message, step=step)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the generation: see what fell, kill the rest, report."""
        processes, watch = self._processes, self._watch
        assert processes is not None and watch is not None
        self._meeting.end_generation()
        deadline = time.monotonic() + _CASCADE_GRACE_S
        while True:
            self._collect(processes)
            running = {
                self._node.ranks[local_rank]
                for local_rank, code in processes.exit_codes().items()
                if code is None
            }
            if self._hung or any(not failure.is_cascade for failure in self._failures.values()):
                self._meeting.tell_true_failure()
                break
            if not running or time.monotonic() > deadline or self._meeting.knows_true_failure():
                break
            time.sleep(0.03)
        hung = self._hung or dict.fromkeys(watch.silent(), "silent")
        for rank, how in hung.items():
            if rank in running:
                self._failures[rank] = self._hang_failure(rank, how)
        processes.close(signal.SIGKILL, timeout=10)
        end_descendants(keep=[self._nursery.pid])
        failures = tuple(self._failures.values())
        self._meeting.report(
            Report(node=self._node.node, failures=failures, step=watch.highest_step)
        )

    def _collect(self, processes: RankProcesses) -> None:
        """Note ranks that fell since the last look; signals before the errors they cause."""
        fresh = [f for f in processes.failures().values() if self._rank(f) not in self._failures]
        for found in sorted(fresh, key=lambda f: (f.exitcode == names.Exit.PEER_LOST, f.exitcode)):
            rank = self._rank(found)
            log, tail = self._log_of(rank)
            self._failures[rank] = Failure(
                node=self._node.node,
                rank=rank,
                exit_code=found.exitcode,
                message=_message(found, tail),
                time_s=time.time(),
                order=self._meeting.draw_order(),
                out_of_memory=count_oom_kills() > self._oom_kills,
                log=log,
                tail=tail,
            )

    def _hang_failure(self, rank: int, how: Literal["stalled", "silent"]) -> Failure:
        log, tail = self._log_of(rank)
        return Failure(
            node=self._node.node,
            rank=rank,
            exit_code=-signal.SIGKILL,
            message="",
            time_s=time.time(),
            order=self._meeting.draw_order(),
            hang=how,
            log=log,
            tail=tail,
        )

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGKILL, timeout: int | None = None
    ) -> None:
        """torch's loop passes a signal only where it got one itself: then ranks may still save."""
        if self._processes is None:
            return
        if death_sig is not signal.SIGKILL:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # once is enough
            self._let_save(self._processes)
        self._processes.close(signal.SIGKILL, timeout=10)

    def _let_save(self, processes: RankProcesses) -> None:
        """Tell the ranks to end and wait for it.

        They tell those of all other nodes before the next step; all save at the same step.
        """
        processes.tell_to_end()
        deadline = time.monotonic() + self._node.save_grace_s
        while None in processes.exit_codes().values() and time.monotonic() < deadline:
            if self._meeting.is_closed():  # a peer is gone, or has saved and left
                deadline = min(deadline, time.monotonic() + _CASCADE_GRACE_S)
            if self._watch is not None and self._watch.look():
                break
            time.sleep(0.03)

    def _exit_barrier(self) -> None:
        """Nothing to wait for: success was already agreed by all nodes."""

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        """torch's own records are unused; without this each would look its host up in DNS."""
        return Event(state, source=source)

    @property
    def _generation(self) -> int:
        assert self._meeting.generation is not None
        return self._meeting.generation

    def _rank(self, failure: ProcessFailure) -> int:
        return self._node.ranks[failure.local_rank]

    def _log_of(self, rank: int) -> tuple[str, tuple[str, ...]]:
        log = rank_log(rank=rank, attempt=self._node.attempt, generation=self._generation)
        return str(log), read_tail(self._node.run_dir / log)

    def _greeting(self) -> str:
        layout = self._node.plan.layout
        return (
            f"attempt {self._node.attempt}: {layout.world_size} ranks on {layout.num_nodes} nodes, "
            f"{layout.pp_size} stages x {layout.dp_size} replicas"
        )

    def _record(self, kind: str, **fields: Any) -> None:
        fields = {"attempt": self._node.attempt, "generation": self._meeting.generation, **fields}
        record_event(self._node.run_dir, kind=kind, **fields)


class _Recovery:
    """Waits for the first step after a fault, to say how long the job stood still."""

    def __init__(self, node: Node, generation: int, since_s: float) -> None:
        self._node = node
        self._generation = generation
        self._since_s = since_s
        self._steps = Tail(node.run_dir / names.METRICS_FILE, StepRecord, from_end=True)

    @classmethod
    def of(cls, node: Node, generation: int) -> "_Recovery | None":
        since_s = unrecovered_since(read_events(node.run_dir))
        return None if since_s is None else cls(node, generation, since_s)

    def look(self) -> bool:
        """Read new lines; True once a step of this generation was among them."""
        for step in self._steps.read():
            if (step.attempt, step.generation) == (self._node.attempt, self._generation):
                seconds = step.time_s - self._since_s
                record_event(
                    self._node.run_dir,
                    kind="recovered",
                    attempt=step.attempt,
                    generation=step.generation,
                    step=step.step,
                    seconds=round(seconds, 3),
                    message=f"step {step.step} done {seconds:.1f} s after the fault",
                )
                return True
        return False


def read_tail(path: Path) -> tuple[str, ...]:
    """Last lines of a log, without empty ones."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 8192, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(line[:300] for line in lines if line.strip())[-_TAIL_LINES:]


def _message(failure: ProcessFailure, tail: tuple[str, ...]) -> str:
    """The exception where the rank left one, else the last line it wrote."""
    said = failure.error_file_data.get("message")
    if isinstance(said, dict):  # written by torch's `record`
        return str(said.get("message", ""))
    return tail[-1] if tail and failure.exitcode > 0 else ""
