"""The data container of a pod: `python -m omni_dataloader.pod`. Keeps the data service running.

The kubelet would wait 1, 13, 23 seconds before it starts a dead container again; this parent starts
a dead service at once. Where that cannot help it says so to the trainer container, which ends.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from omni_contract import names
from omni_contract.errors import OmniError
from omni_contract.log_store import LOG_FOLDER
from omni_contract.names import Exit
from omni_contract.packed import read_packed
from omni_contract.plan import JobPlan
from omni_contract.pod_info import ANNOTATIONS_FILE, Assignment
from omni_contract.pod_log import PodLog
from omni_contract.shared_files import END_FILE, PEERS_FILE, DataEnd
from omni_contract.spec_data import StorageSpec
from omni_dataloader.beat import SILENT_AFTER_S, BeatWatch, beat_path
from omni_dataloader.ship import Limits, Shipper

if TYPE_CHECKING:
    from omni_dataloader.store import Store

_TICK_S = 0.05
_END_S = 5.0
"""Time for the service to end after SIGTERM."""
_READ_S = 1.0
"""Time for the last lines of a dead service; a process that it left behind may hold the pipe."""
_SHIP_S = 10.0
"""Time for the last lines to reach the store then."""
_MINUTE_S = 60.0
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Waits before restarts within a minute; one death more is too many."""


@dataclass(slots=True, kw_only=True)
class _Service:
    """The data service as a child process; what it says goes to this process's stderr."""

    process: "subprocess.Popen[bytes]"
    index: int
    watch: BeatWatch
    last_line: str = ""
    reader: threading.Thread = field(init=False)

    @classmethod
    def start(cls, index: int, arguments: Sequence[str], watch: BeatWatch) -> "_Service":
        command = [sys.executable, "-m", "omni_dataloader.main", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        service = cls(process=process, index=index, watch=watch)
        service.reader = threading.Thread(target=service._pass_on, daemon=True)
        service.reader.start()
        return service

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join(_READ_S)

    def last_words(self) -> str:
        """What an ended service said last."""
        self.reader.join(_READ_S)
        return self.last_line.removeprefix("error: ") or "it said nothing"

    def _pass_on(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
                self.last_line = line.decode(errors="replace").strip() or self.last_line


class DataPod:
    """The life of the data container."""

    def __init__(self, options: argparse.Namespace, *, log: PodLog) -> None:
        self._options = options
        self._log = log
        self._is_told_to_end = False
        self._plan = options.shared_dir / names.PLAN_FILE
        self._service: _Service | None = None
        self._deaths: list[float] = []
        self._shipper: Shipper | None = None

    def tell_to_end(self, _number: int, _frame: FrameType | None) -> None:
        """Signal handler."""
        self._is_told_to_end = True

    def run(self) -> int:
        """Serve until told to end, or until that is no use."""
        (self._options.shared_dir / END_FILE).unlink(missing_ok=True)
        try:
            self._plan.write_text(read_packed(self._options.plan_dir, names.PLAN_FILE))
            self._shipper = self._start_shipper(JobPlan.load(self._plan))
            while not self._is_told_to_end:
                end = self._look()
                if end is not None:
                    return self._give_up(end)
                self._pause(_TICK_S)
            return Exit.INTERRUPTED
        except OmniError as exc:
            return self._give_up(DataEnd(exit_code=Exit.USER, message=str(exc)))
        finally:
            if self._shipper is not None:
                self._shipper.hurry()
            self._end_service()
            if self._shipper is not None:
                self._shipper.close(_SHIP_S)

    def _start_shipper(self, plan: JobPlan) -> Shipper:
        shipper = Shipper(
            logs=self._options.run_dir / LOG_FOLDER,
            uri=plan.spec.checkpoint.uri,
            pod=self._options.pod_name,
            open_store=lambda: _open_store(plan.spec.storage),
            limits=Limits(every_s=self._options.ship_every),
        )
        shipper.start()
        return shipper

    def _look(self) -> DataEnd | None:
        """Start the service where it should run and does not; an end where that is no use."""
        part = Assignment.read(self._options.pod_info / ANNOTATIONS_FILE)
        if part is None:
            return None
        self._log.turn_to(part)
        if self._service is not None and self._service.index != part.index:
            self._end_service()
        if self._service is None and part.index is not None:  # a spare has no ranks to serve
            watch = BeatWatch(
                beat_path(self._options.socket), silent_after_s=self._options.silent_after
            )
            self._service = _Service.start(part.index, self._arguments(part.index), watch)
        if self._service is not None and self._service.watch.is_silent():
            print("the data service is stopped or stuck: it is killed", file=sys.stderr)
            self._service.process.kill()
            self._service.process.wait()
        code = None if self._service is None else self._service.process.poll()
        if self._service is None or code is None:
            return None
        words, self._service = self._service.last_words(), None
        if code == Exit.USER:
            return DataEnd(exit_code=code, message=words)
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < _MINUTE_S] + [now]
        if len(self._deaths) > len(_BACKOFF_S):
            return _too_often(len(self._deaths), code, words)
        self._pause(_BACKOFF_S[len(self._deaths) - 1])
        return None

    def _end_service(self) -> None:
        if self._service is not None:
            self._service.end()
        self._service = None

    def _arguments(self, index: int) -> list[str]:
        options = self._options
        return [
            f"--plan={self._plan}",
            f"--node={index}",
            f"--socket={options.socket}",
            f"--listen={options.listen}",
            f"--peers-file={options.shared_dir / PEERS_FILE}",
            f"--run-dir={options.run_dir}",
            f"--die-with={os.getpid()}",
        ]

    def _give_up(self, end: DataEnd) -> int:
        """Tell the trainer container, which ends and takes the pod along."""
        end.save(self._options.shared_dir / END_FILE)
        print(f"giving up: {end.message}", file=sys.stderr)
        return end.exit_code

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_told_to_end and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _TICK_S))


def _open_store(spec: StorageSpec) -> "Store":
    # On the shipper's thread: the service must not wait for the import.
    from omni_dataloader.store import Store

    return Store.open(spec)


def _too_often(deaths: int, code: int, words: str) -> DataEnd:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return DataEnd(
        exit_code=Exit.ERROR,
        message=f"the data service died {deaths} times within a minute, last by {how}: {words}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to end. Returns an exit code of omni_contract.names.Exit."""
    options = _parser().parse_args(argv)
    log = PodLog(options.run_dir, "data")
    sys.stderr = log.text()
    pod = DataPod(options, log=log)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pod.tell_to_end)
    return pod.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m omni_dataloader.pod", description=__doc__)
    add = parser.add_argument
    add("--plan-dir", type=Path, default=Path(names.PLAN_DIR), help="the packed JobPlan")
    add("--pod-info", type=Path, default=Path(names.POD_INFO_DIR), help="the pod's annotations")
    add("--shared-dir", type=Path, default=Path(names.SHARED_DIR),
        help="volume shared with the trainer container")  # fmt: skip
    add("--socket", type=Path, default=Path(names.SIDECAR_SOCKET), help="where ranks connect")
    add("--run-dir", type=Path, default=Path(names.RUN_DIR), help="run folder")
    add("--pod-name", default=os.environ.get("HOSTNAME", "pod"), help="name of this pod")
    add("--ship-every", type=float, default=Limits().every_s, metavar="SECONDS",
        help="how often the pod's logs are stored")  # fmt: skip
    add("--listen", default=f"*:{names.DATA_PORT}", metavar="HOST:PORT",
        help="where data services of other pods reach this one")  # fmt: skip
    add("--silent-after", type=float, default=SILENT_AFTER_S, metavar="SECONDS",
        help="a service without a sign of life for so long is killed")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
