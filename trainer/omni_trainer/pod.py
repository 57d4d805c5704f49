"""The trainer container of a pod: `python -m omni_trainer.pod`.

Runs the supervisor for the attempt and node that the pod's annotations name. An attempt that is
over for all is followed by the next one in the same pod; where this node is the cause, or the run
is over, the program ends with a `PodEnd` as termination message.
"""

import argparse
import ipaddress
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from omni_contract import names
from omni_contract.errors import OmniError
from omni_contract.names import Exit
from omni_contract.packed import read_packed
from omni_contract.plan import JobPlan
from omni_contract.pod_info import ANNOTATIONS_FILE, Assignment
from omni_contract.pod_log import PodLog
from omni_contract.records import History, PodEnd, RunEvent
from omni_contract.shared_files import END_FILE, PEERS_FILE, DataEnd
from omni_contract.spec_run import FaultClass
from omni_trainer.supervise import uses_cpu
from omni_trainer.supervisor.device_check import BROKEN
from omni_trainer.supervisor.ending import (
    AttemptEnd,
    conclude,
    conclude_data,
    termination_message,
)
from omni_trainer.supervisor.heartbeat import RunReader
from omni_trainer.supervisor.lease import LeaseApi, LeaseKeeper
from omni_trainer.supervisor.reaper import adopt_orphans, count_oom_kills, end_descendants
from omni_trainer.supervisor.tail import Tail

_TICK_S = 0.1
_LEAVE_S = 10.0
"""Part of the pod's grace that is kept for the end of supervisor and Lease."""
_CHECK_S = 120.0
"""A GPU that has not answered by then is broken."""
_FINAL = (Exit.OK, Exit.USER, Exit.GAVE_UP, Exit.STALE)


class Pod:
    """The life of the trainer container."""

    def __init__(self, options: argparse.Namespace, env: Mapping[str, str], *, log: PodLog) -> None:
        self._options = options
        self._env = env
        self._log = log
        self._is_told_to_end = False
        self._run_dir: Path = options.run_dir
        self._plan_path = self._run_dir / names.PLAN_FILE
        self._end_path = options.shared_dir / "supervisor-end.json"
        self._plan = self._write_plan()
        grace_s = self._plan.spec.pod_template.termination_grace_seconds
        self._save_grace_s = max(grace_s - _LEAVE_S, 1.0)
        self._news = Tail(self._run_dir / names.EVENTS_FILE, RunEvent)
        self._lease = self._open_lease()

    def tell_to_end(self, _number: int, _frame: FrameType | None) -> None:
        """Signal handler."""
        self._is_told_to_end = True

    def run(self) -> PodEnd:
        """Take part in one attempt after the other."""
        over = 0
        try:
            while not self._is_told_to_end:
                part = self._read_part()
                if part is not None:
                    self._log.turn_to(part)
                if part is None or part.attempt <= over or part.index is None:
                    time.sleep(_TICK_S)
                    continue
                end = self._take_part(part, part.index)
                if end is not None:
                    return end
                over = part.attempt
            return PodEnd(
                attempt=over,
                generation=0,
                exit_code=Exit.INTERRUPTED,
                message="the pod was told to end while it waited for an attempt",
            )
        finally:
            if self._lease is not None:
                self._lease.stop()

    def _take_part(self, part: Assignment, index: int) -> PodEnd | None:
        """One attempt on this node. None: the pod waits for another one."""
        _say(f"attempt {part.attempt}: this pod is node {index}, all meet at {part.rendezvous}")
        fault = self._check_device()
        if fault is not None:
            return PodEnd(
                attempt=part.attempt,
                generation=0,
                exit_code=Exit.ERROR,
                fault=FaultClass.GPU_HARDWARE,
                message=fault,
                history=part.history,
            )
        if self._lease is not None and index == 0:
            self._lease.follow(part.attempt, part.history)
        elif self._lease is not None:
            self._lease.rest()
        self._end_path.unlink(missing_ok=True)
        oom_kills = count_oom_kills()
        process = subprocess.Popen(
            self._command(part, index), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        words = threading.Thread(target=self._pass_on, args=(process,), daemon=True)
        words.start()
        try:
            is_ours, data_end = self._watch(process, part)
        finally:
            end_descendants()
            words.join(1)
        end = AttemptEnd.load(self._end_path)
        code = process.returncode
        if is_ours and code not in _FINAL:  # it ended because it was told to
            if data_end is not None:
                return conclude_data(data_end, part)
            return self._interrupted(part, end) if self._is_told_to_end else None
        concluded = conclude(
            end, code, part=part, plan=self._plan, ran_out=count_oom_kills() > oom_kills
        )
        if concluded is None:
            message = "the supervisors lost each other" if end is None else end.message
            _say(f"{message}; waiting for another attempt")
            if self._lease is not None:
                self._lease.tell_over(part.attempt, message)
        return concluded

    def _watch(
        self, process: "subprocess.Popen[bytes]", part: Assignment
    ) -> tuple[bool, DataEnd | None]:
        """Wait for the supervisor's end. Whether it was told to end, and by which data service."""
        told_s: float | None = None
        data_end: DataEnd | None = None
        while process.poll() is None:
            self._tell_news()
            now = time.monotonic()
            if told_s is None:
                newest = self._read_part()
                data_end = DataEnd.load(self._options.shared_dir / END_FILE)
                has_moved = newest is not None and newest.attempt > part.attempt
                if self._is_told_to_end or has_moved or data_end is not None:
                    told_s = now
                    process.terminate()  # its ranks save, if those of all nodes still can
            elif now > told_s + self._save_grace_s + _LEAVE_S / 2:
                process.kill()
            time.sleep(_TICK_S)
        self._tell_news()
        return told_s is not None, data_end

    def _pass_on(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._log.write(line)

    def _tell_news(self) -> None:
        """Pass events of the run on to the container's log."""
        for event in self._news.read():
            _say(f"[{event.attempt}.{event.generation}] {event.kind}: {event.message}")

    def _command(self, part: Assignment, index: int) -> list[str]:
        options = self._options
        host, _, port = options.data_listen.rpartition(":")
        if host == "*":
            host = own_host(part.rendezvous.rpartition(":")[0], self._env.get("HOSTNAME", ""))
        return [
            sys.executable,
            "-m",
            "omni_trainer.supervise",
            f"--plan={self._plan_path}",
            f"--node={index}",
            f"--attempt={part.attempt}",
            f"--rendezvous={part.rendezvous}",
            f"--sidecar={options.socket}",
            f"--run-dir={self._run_dir}",
            f"--trace-steps={self._env.get(names.ENV_TRACE_STEPS, '')}",
            f"--save-grace={self._save_grace_s}",
            f"--history={part.history.model_dump_json()}",
            f"--data-address={host}:{port}",
            f"--peers-file={options.shared_dir / PEERS_FILE}",
            f"--end-file={self._end_path}",
            "--die-with-parent",
            *([f"--rank-module={options.rank_module}"] if options.rank_module else []),
        ]

    def _interrupted(self, part: Assignment, end: AttemptEnd | None) -> PodEnd:
        step = 0 if end is None else end.step
        return PodEnd(
            attempt=part.attempt,
            generation=0 if end is None else end.generation,
            exit_code=Exit.INTERRUPTED,
            step=step,
            message=f"the pod was told to end, after step {step}",
            history=part.history if end is None else end.history,
        )

    def _read_part(self) -> Assignment | None:
        return Assignment.read(self._options.pod_info / ANNOTATIONS_FILE)

    def _check_device(self) -> str | None:
        """What is wrong with a GPU of this node; None: nothing, or there is none."""
        if uses_cpu(self._plan):
            return None
        module, count = "omni_trainer.supervisor.device_check", self._plan.layout.ranks_per_node
        try:
            checked = subprocess.run(
                [sys.executable, "-m", module, str(count)],
                stdout=subprocess.PIPE,
                text=True,
                timeout=_CHECK_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"a GPU of this node does not answer within {_CHECK_S:.0f} s"
        return checked.stdout.strip() if checked.returncode == BROKEN else None

    def _write_plan(self) -> JobPlan:
        """Unpack the plan into the run folder."""
        text = read_packed(self._options.plan_dir, names.PLAN_FILE)
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            fresh = self._plan_path.with_suffix(f".{os.getpid()}.tmp")
            fresh.write_text(text)
            fresh.replace(self._plan_path)
        except OSError as exc:
            raise OmniError(
                f"{self._run_dir}: {exc.strerror}; the run folder must be a volume"
            ) from None
        return JobPlan.load(self._plan_path)

    def _open_lease(self) -> LeaseKeeper | None:
        env = self._env
        if names.ENV_LEASE not in env:
            return None
        api = LeaseApi.of(
            env[names.ENV_LEASE],
            host=env.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc"),
            port=env.get("KUBERNETES_SERVICE_PORT", "443"),
            token_dir=self._options.lease_token_dir,
        )
        keeper = LeaseKeeper(api, RunReader(self._run_dir), holder=env.get("HOSTNAME", ""))
        keeper.start()
        return keeper


def own_host(rendezvous_host: str, hostname: str) -> str:
    """The name by which the other pods of the job reach this one.

    Pods of a job differ in their first label only; an address is of a machine that all share.
    """
    try:
        ipaddress.ip_address(rendezvous_host)
    except ValueError:
        _, dot, domain = rendezvous_host.partition(".")
        return f"{hostname}{dot}{domain}" if dot else rendezvous_host
    return rendezvous_host


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run to the end of the pod; leaves a termination message."""
    options = _parser().parse_args(argv)
    adopt_orphans()
    log = PodLog(options.run_dir, "trainer")
    sys.stderr = log.text()
    try:
        pod = Pod(options, os.environ, log=log)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pod.tell_to_end)
        end = pod.run()
    except OmniError as exc:
        end = PodEnd(
            attempt=0,
            generation=0,
            exit_code=Exit.USER,
            fault=FaultClass.START_ERROR,
            message=str(exc),
            history=History(),
        )
    fault = "" if end.fault is None else f", {end.fault}"
    _say(f"this pod ends with exit code {end.exit_code:d}{fault}: {end.message}")
    try:
        options.termination_log.write_bytes(termination_message(end))
    except OSError as exc:  # the exit code still tells most of it
        _say(f"--termination-log {options.termination_log}: {exc.strerror}")
    return end.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m omni_trainer.pod", description=__doc__)
    add = parser.add_argument
    add("--plan-dir", type=Path, default=Path(names.PLAN_DIR), help="the packed JobPlan")
    add("--pod-info", type=Path, default=Path(names.POD_INFO_DIR), help="the pod's annotations")
    add("--shared-dir", type=Path, default=Path(names.SHARED_DIR),
        help="volume shared with the data container")  # fmt: skip
    add("--socket", type=Path, default=Path(names.SIDECAR_SOCKET), help="the data service's socket")
    add("--run-dir", type=Path, default=Path(names.RUN_DIR), help="run folder")
    add("--lease-token-dir", type=Path, default=Path(names.LEASE_TOKEN_DIR),
        help="token and CA for the progress Lease")  # fmt: skip
    add("--termination-log", type=Path, default=Path("/dev/termination-log"),
        help="where the kubelet reads why the container ended")  # fmt: skip
    add("--data-listen", default=f"*:{names.DATA_PORT}", metavar="HOST:PORT",
        help="where this pod's data service listens")  # fmt: skip
    add("--rank-module", default="", help="main program of a rank")
    return parser


if __name__ == "__main__":
    sys.exit(main())
