"""The control plane of a run, and what is seen of the pods and of the operator on it."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from tests.cluster.api import Object, concurrently
from tests.cluster.chart import Installed
from tests.cluster.control_plane import ControlPlane
from tests.cluster.history import History
from tests.cluster.jobs import name_of
from tests.cluster.processes import free_port, last_lines

NAMESPACE: Final = "bench"
RELEASE: Final = "omni-system"
OPERATOR: Final = "operator"

_POLL_S: Final = 0.05
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process took so far."""

    cpu_s: float
    most_memory_mb: float


class Scene:
    """What the measurements act on and look at."""

    def __init__(self, control_plane: ControlPlane, history: History) -> None:
        self.control_plane = control_plane
        self.api = control_plane.api
        self.pods_path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        self._history = history
        self._begin_s = time.monotonic()
        self._pid = 0

    def say(self, line: str) -> None:
        """Tell people how far it is."""
        print(f"{time.monotonic() - self._begin_s:6.0f} s  {line}", flush=True)

    def start_operator(self, installed: Installed) -> None:
        """Run the operator with the chart's rights and arguments, and wait until it leads."""
        port = free_port()
        self._pid = self.control_plane.processes.start(
            OPERATOR,
            [sys.executable, "-m", "omni_operator.main", *installed.arguments, f"--port={port}"],
            env={"KUBECONFIG": str(installed.kubeconfig)},
        )

        def leads() -> bool:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as page,
            ):
                return b"leading" in page.read()
            return False

        self.when(leads, "the operator leads")

    def usage(self) -> Usage:
        """What the operator took so far."""
        with open(f"/proc/{self._pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        with open(f"/proc/{self._pid}/status") as file:
            (peak,) = [line for line in file if line.startswith("VmHWM")]
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
        return Usage(cpu_s=cpu_s, most_memory_mb=int(peak.split()[1]) / 1024)

    def pods(self, is_meant: Callable[[Object], bool]) -> list[Object]:
        """Pods of the namespace as they are now."""
        found = self._history.now("pod")
        return [pod for pod in found if pod["metadata"]["namespace"] == NAMESPACE and is_meant(pod)]

    def jobs(self) -> list[Object]:
        """All jobs as they are now."""
        return self._history.now("job")

    def when(self, is_so: Callable[[], object], what: str, *, within_s: float = 600) -> float:
        """Wait for something and return when it was so, in Unix seconds."""
        until_s = time.monotonic() + within_s
        while not is_so():
            if time.monotonic() > until_s:
                processes = self.control_plane.processes
                log = last_lines(processes.log(OPERATOR))
                raise AssertionError(f"not within {within_s:.0f} s: {what}; operator: {log}")
            time.sleep(_POLL_S)
        return time.time()

    def when_running(
        self, num_pods: int, is_meant: Callable[[Object], bool], what: str, **options: float
    ) -> float:
        """When so many of some pods run."""

        def are_running() -> bool:
            return sum(map(is_running, self.pods(is_meant))) == num_pods

        return self.when(are_running, f"{num_pods} pods run: {what}", **options)

    def when_gone(self, is_meant: Callable[[Object], bool]) -> None:
        """Wait until there are no such pods."""
        self.when(lambda: not self.pods(is_meant), "pods gone")

    def act_barely(
        self, *, delete: Sequence[str] = (), create: Sequence[Object] = ()
    ) -> dict[str, float]:
        """Delete and create pods with the operator's client alone; when that began and ended."""
        orders = {"delete": list(delete), "create": list(create), "namespace": NAMESPACE}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.operator.bare"],
            input=json.dumps(orders),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "KUBECONFIG": str(self.control_plane.admin_kubeconfig)},
        )
        if done.returncode:
            raise RuntimeError(f"benchmarks.operator.bare failed: {done.stderr}")
        times: dict[str, float] = json.loads(done.stdout)
        return times

    def delete_pods(self, is_meant: Callable[[Object], bool]) -> None:
        """Delete pods and wait until they are gone."""
        names = [name_of(pod) for pod in self.pods(is_meant)]
        concurrently(lambda name: self.api.delete(f"{self.pods_path}/{name}"), names)
        self.when_gone(is_meant)

    def audited(self, user: str, *, since_s: float, until_s: float) -> list[dict[str, Any]]:
        """Requests of a user in a time, by the API server's audit log; each once."""
        found: dict[str, dict[str, Any]] = {}
        with self.control_plane.audit_log.open() as file:
            for line in file:
                if user in line:
                    event = json.loads(line)
                    if (
                        event["user"]["username"] == user
                        and since_s <= audit_s(event, "requestReceivedTimestamp") <= until_s
                    ):
                        found[event["auditID"]] = event
        return list(found.values())

    def audited_creations(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The first completed creation of each object of the namespace, by resource and name."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        with self.control_plane.audit_log.open() as file:
            for line in file:
                if '"verb":"create"' in line and f'"namespace":"{NAMESPACE}"' in line:
                    event = json.loads(line)
                    about = event["objectRef"]
                    if event["stage"] == "ResponseComplete" and "subresource" not in about:
                        found.setdefault((about["resource"], about.get("name", "")), event)
        return found


def is_running(pod: Object) -> bool:
    """Whether a pod runs and nobody ends it."""
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def audit_s(event: Mapping[str, Any], field: str = "stageTimestamp") -> float:
    """A time of an audit event, in Unix seconds."""
    return datetime.fromisoformat(event[field]).timestamp()
