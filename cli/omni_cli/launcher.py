"""Runs a compiled job on this machine: per node a sidecar and a supervisor, as in a pod.

What a supervisor mends in place is its own business. The launcher restarts dead sidecars, and
starts a new attempt when a supervisor is lost.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from omni_cli.processes import Child, end_all, free_ports, wait_all
from omni_cli.progress_view import RunView
from omni_cli.rehearsal import Fault, Rehearsal, read_progress
from omni_contract.errors import OmniError
from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_contract.records import History, RunEvent
from omni_contract.spec_run import FaultClass, RestartAction
from omni_dataloader.beat import BeatWatch, beat_path
from omni_trainer.events import read_events, record_event
from omni_trainer.supervisor.ending import data_ended_early
from omni_trainer.supervisor.reaper import end_descendants
from omni_trainer.supervisor.verdict import Failure, Verdict, decide, history_of

_TICK_S = 0.05
_HASTY_TICK_S = 0.005
_CASCADE_GRACE_S = 2.0
_SAVE_GRACE_S = 7.0
_SIDECAR_GRACE_S = 1.0
_SIDECAR_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Waits before restarts of one sidecar within a minute; one death more is too many."""
_FINAL = (Exit.USER, Exit.GAVE_UP, Exit.STALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    message: str


@dataclass(slots=True, kw_only=True)
class _Sidecar:
    child: Child
    watch: BeatWatch
    deaths: list[float] = field(default_factory=list)
    """When it died, on the monotonic clock."""
    restart_at: float | None = None
    starts: int = 1


class Launcher:
    """One run of one job. Use as a context manager: leaving it ends every process it started."""

    def __init__(
        self,
        plan: JobPlan,
        run_dir: Path,
        *,
        env: Mapping[str, str],
        first_attempt: int,
        faults: Sequence[Fault] = (),
        trace_steps: Sequence[int] = (),
        sidecar_module: str = "omni_dataloader.main",
        supervisor_module: str = "omni_trainer.supervise",
        supervisor_arguments: Sequence[str] = (),
    ) -> None:
        """`env`: environment of all programs. The run folder holds plan.json already."""
        self._plan = plan
        self._run_dir = run_dir
        self._env = {**env, **plan.spec.pod_template.env}
        self._attempt = first_attempt
        self._trace_steps = ",".join(map(str, trace_steps))
        self._sidecar_module = sidecar_module
        self._supervisor_module = supervisor_module
        self._supervisor_arguments = tuple(supervisor_arguments)
        self._rehearsal = Rehearsal(faults, plan=plan, run_dir=run_dir, first=first_attempt)
        self._nodes = range(plan.layout.num_nodes)
        self._sidecars: dict[int, _Sidecar] = {}
        self._supervisors: dict[int, Child] = {}
        self._strangers = [child.pid for child in psutil.Process().children()]
        # Unix socket paths end at 107 bytes, and a run folder may lie deep.
        self._sockets = Path(tempfile.mkdtemp(prefix="omni-"))
        self._ports = free_ports(len(self._nodes))

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._all_supervisors(), timeout_s=0)
        end_all(self._all_sidecars(), timeout_s=_SIDECAR_GRACE_S)
        end_descendants(keep=self._strangers)
        self.remove_sockets()

    def run(self, view: RunView) -> Outcome:
        """Run until the job is done or cannot go on."""
        for node in self._nodes:
            watch = BeatWatch(beat_path(self._socket(node)))
            self._sidecars[node] = _Sidecar(child=self._start_sidecar(node, 0), watch=watch)
        self._start_attempt()
        while True:
            outcome = self._tick(view)
            view.update()
            if outcome is not None:
                return outcome
            time.sleep(_HASTY_TICK_S if self._rehearsal.needs_haste else _TICK_S)

    def interrupt(self) -> None:
        """End everything, giving ranks the time to end well."""
        end_all(self._all_supervisors(), timeout_s=_SAVE_GRACE_S)
        end_all(self._all_sidecars(), timeout_s=_SIDECAR_GRACE_S)
        self._record("interrupted", message="the run was interrupted and ended cleanly")

    def remove_sockets(self) -> None:
        """Delete the folder of the sidecars' sockets."""
        shutil.rmtree(self._sockets, ignore_errors=True)

    def left_faults(self) -> Sequence[Fault]:
        """Rehearsed faults that never happened."""
        return self._rehearsal.left

    def _tick(self, view: RunView) -> Outcome | None:
        children = {node: sidecar.child for node, sidecar in self._sidecars.items()}
        self._rehearsal.strike(children, self._supervisors)
        for node in self._nodes:
            outcome = self._look_at_sidecar(node)
            if outcome is not None:
                return outcome
        return self._look_at_supervisors()

    def _look_at_sidecar(self, node: int) -> Outcome | None:
        """Restart a dead sidecar; an outcome where it must not be."""
        sidecar = self._sidecars[node]
        code, now = sidecar.child.exit_code, time.monotonic()
        if code is None:
            if sidecar.watch.is_silent():  # stopped or stuck, and ranks would be blamed for it
                sidecar.child.send(signal.SIGKILL)
            return None
        if sidecar.restart_at is None:
            if code == Exit.USER:
                self._record("gave_up", message=sidecar.child.last_line(), node=node)
                return Outcome(exit_code=Exit.USER, message=sidecar.child.last_line())
            sidecar.deaths = [at for at in sidecar.deaths if now - at < 60] + [now]
            verdict = self._judge_sidecar(node, sidecar, code)
            if verdict.kind == "end":
                return Outcome(exit_code=verdict.exit_code, message=verdict.message)
            sidecar.restart_at = now + _SIDECAR_BACKOFF_S[len(sidecar.deaths) - 1]
        if now >= sidecar.restart_at:
            sidecar.watch = BeatWatch(beat_path(self._socket(node)))
            sidecar.child = self._start_sidecar(node, sidecar.starts)
            sidecar.starts += 1
            sidecar.restart_at = None
        return None

    def _judge_sidecar(self, node: int, sidecar: _Sidecar, code: int) -> Verdict:
        failure = Failure(
            node=node,
            rank=None,
            exit_code=code,
            message="" if code < 0 else sidecar.child.last_line(),
            time_s=time.time(),
            order=0,
            log=str(sidecar.child.log.relative_to(self._run_dir)),
        )
        verdict = decide(
            failure,
            step=self._step(),
            history=History(),  # it is restarted alone; its own limit follows
            spec=self._plan.spec.restart,
            fault=FaultClass.DATA_SERVICE,
        )
        sentence = verdict.message.replace("supervisor on", "data service of", 1)
        if verdict.kind != "end" and len(sidecar.deaths) > len(_SIDECAR_BACKOFF_S):
            sentence = f"gave up: it died {len(sidecar.deaths)} times within a minute; {sentence}"
            verdict = verdict.model_copy(update={"kind": "end", "exit_code": int(Exit.GAVE_UP)})
        verdict = verdict.model_copy(update={"message": sentence})
        kind = "gave_up" if verdict.kind == "end" else "sidecar_restarted"
        self._record(kind, message=sentence, node=node, fault=FaultClass.DATA_SERVICE)
        return verdict

    def _look_at_supervisors(self) -> Outcome | None:
        """None while all run; a new attempt where one is lost; an outcome at the end."""
        ended = self._ended()
        if not ended or (len(ended) < len(self._nodes) and set(ended.values()) == {Exit.OK}):
            return None
        if set(ended.values()) == {Exit.OK}:
            return self._complete()
        # Let the others see it too and leave by themselves: who ended how tells the cause.
        wait_all(self._all_supervisors(), timeout_s=_CASCADE_GRACE_S)
        ended = self._ended()
        final = next((code for code in ended.values() if code in _FINAL), None)
        if final is not None:
            wait_all(self._all_supervisors(), timeout_s=_SAVE_GRACE_S)
            said = [e.message for e in self._events("gave_up")]
            lost = next(node for node, code in ended.items() if code == final)
            words = said[-1] if said else self._supervisors[lost].last_line()
            return Outcome(exit_code=final, message=words)
        if self._completed() is not None:
            return self._complete()  # whatever befell a supervisor after that
        return self._replace_attempt()

    def _ended(self) -> dict[int, int]:
        """Exit codes of the supervisors that are gone."""
        codes = {node: child.exit_code for node, child in self._supervisors.items()}
        return {node: code for node, code in codes.items() if code is not None}

    def _events(self, kind: str) -> list[RunEvent]:
        """Events of this kind in this attempt; the run folder may hold those of earlier runs."""
        events = read_events(self._run_dir)
        return [e for e in events if e.kind == kind and e.attempt == self._attempt]

    def _completed(self) -> RunEvent | None:
        """The event that says so, once all ranks of this attempt are done."""
        return next(iter(self._events("completed")), None)

    def _complete(self) -> Outcome:
        """All ranks are done, which is not success where the data ended early."""
        completed = self._completed()
        assert completed is not None
        words = data_ended_early(completed.step or 0, self._plan)
        if words is None:
            return Outcome(exit_code=Exit.OK, message=completed.message)
        return Outcome(exit_code=Exit.USER, message=words)

    def _replace_attempt(self) -> Outcome | None:
        lost = {
            node: child.exit_code for node, child in self._supervisors.items() if child.exit_code
        }
        end_all(self._all_supervisors(), timeout_s=0)
        keep = [*self._strangers, *(child.pid for child in self._all_sidecars())]
        end_descendants(keep=keep)  # ranks whose supervisor was killed are ours now
        if not self._is_ordered():
            verdict = self._judge_supervisors(lost)
            if verdict.kind == "end":
                return Outcome(exit_code=verdict.exit_code, message=verdict.message)
        self._attempt += 1
        self._start_attempt()
        return None

    def _is_ordered(self) -> bool:
        """Whether the supervisors themselves asked for a new attempt, and wrote it down."""
        return any(
            event.action is not RestartAction.RESTART_IN_PLACE for event in self._events("restart")
        )

    def _judge_supervisors(self, lost: Mapping[int, int]) -> Verdict:
        node = min(lost, key=lambda n: (lost[n] == Exit.PEER_LOST, n))
        code = lost[node]
        child = self._supervisors[node]
        step = self._step()
        failure = Failure(
            node=node,
            rank=None,
            exit_code=code,
            message="" if code < 0 else child.last_line(),
            time_s=time.time(),
            order=0,
            log=str(child.log.relative_to(self._run_dir)),
        )
        verdict = decide(
            failure,
            step=step,
            history=history_of(read_events(self._run_dir)),
            spec=self._plan.spec.restart,
            fault=FaultClass.RENDEZVOUS if code == Exit.PEER_LOST else FaultClass.UNKNOWN,
        )
        action = RestartAction.FAIL_JOB if verdict.kind == "end" else RestartAction.RESTART_JOB
        fault = verdict.fault
        self._record(
            "fault", message=failure.describe(step), step=step, node=node, fault=fault,
            action=action,
        )  # fmt: skip
        if verdict.kind == "end":
            self._record("gave_up", message=verdict.message, step=step, fault=fault)
        else:
            message = f"attempt {self._attempt + 1}: a supervisor was lost; sidecars live on"
            self._record("restart", message=message, step=step, fault=fault, action=action)
        return verdict

    def _start_attempt(self) -> None:
        [port] = free_ports(1)
        for node in self._nodes:
            log = self._run_dir / "logs" / f"supervisor-{node}.{self._attempt}.log"
            self._supervisors[node] = Child.start(
                self._supervisor_module,
                [
                    f"--plan={self._run_dir / 'plan.json'}",
                    f"--node={node}",
                    f"--attempt={self._attempt}",
                    f"--rendezvous=127.0.0.1:{port}",
                    f"--sidecar={self._socket(node)}",
                    f"--run-dir={self._run_dir}",
                    f"--trace-steps={self._trace_steps}",
                    *self._supervisor_arguments,
                ],
                log=log,
                env=self._env,
            )

    def _start_sidecar(self, node: int, restarts: int) -> Child:
        peers = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        self._socket(node).unlink(missing_ok=True)
        return Child.start(
            self._sidecar_module,
            [
                f"--plan={self._run_dir / 'plan.json'}",
                f"--node={node}",
                f"--socket={self._socket(node)}",
                f"--listen=127.0.0.1:{self._ports[node]}",
                f"--peers={peers}",
                f"--run-dir={self._run_dir}",
            ],
            log=self._run_dir / "logs" / f"sidecar-{node}.{restarts}.log",
            env=self._env,
        )

    def _socket(self, node: int) -> Path:
        return self._sockets / f"sidecar-{node}.sock"

    def _all_supervisors(self) -> list[Child]:
        return list(self._supervisors.values())

    def _all_sidecars(self) -> list[Child]:
        return [sidecar.child for sidecar in self._sidecars.values()]

    def _step(self) -> int:
        """Most steps that a rank of this attempt has finished."""
        return max((step for step, _ in self._newest()), default=0)

    def _newest(self) -> list[tuple[int, int]]:
        """(step, generation) of the ranks' progress in this attempt."""
        found = (read_progress(self._run_dir, r) for r in range(self._plan.layout.world_size))
        return [(p.step, p.generation) for p in found if p and p.attempt == self._attempt]

    def _record(self, kind: str, **fields: Any) -> None:
        generation = max((g for _, g in self._newest()), default=0)
        record_event(
            self._run_dir, kind=kind, attempt=self._attempt, generation=generation, **fields
        )


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and a closed terminal raise KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_on_next_signal(*, after_s: float, clean: Callable[[], None]) -> None:
    """From now on a second Ctrl-C, or `after_s` seconds, kill all that is left at once."""

    def kill(number: int, _frame: object) -> None:
        end_descendants()
        clean()
        if number != signal.SIGALRM:
            os._exit(Exit.INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, kill)
    signal.setitimer(signal.ITIMER_REAL, after_s)


def check_run_dir(run_dir: Path, plan: JobPlan) -> None:
    """Make the run folder and write the plan. Raises OmniError where that cannot be."""
    held = run_dir / "plan.json"
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if held.exists() and (other := JobPlan.load(held).name) != plan.name:
            raise OmniError(
                f"--run-dir {run_dir}: it holds a run of job {other!r}, not of {plan.name!r}; "
                "take another folder"
            )
        plan.save(held)
    except OSError as exc:
        raise OmniError(
            f"--run-dir {run_dir}: {exc.strerror}; take a folder that you may write to"
        ) from None
