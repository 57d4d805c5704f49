"""Where `make e2e` plays: real nodes, the chart installed on them as docs/install.md says, its S3
server filled with the demo's data, and a namespace for jobs that enforces pod security."""

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import yaml

from omni_contract.names import RUN_DIR
from omni_contract.spec_data import StorageSpec
from omni_dataloader.store import Store
from tests.cluster import binaries
from tests.cluster.api import wait_for
from tests.cluster.chart import CHART, RELEASE, ROOT, helm, set_values
from tests.cluster.real.cluster import RealCluster
from tests.e2e.cluster.record import Pod

NAMESPACE: Final = "team"
"""Of the job."""
SYSTEM: Final = "omni-system"
"""Of the operator and the S3 server."""
BUCKET: Final = "s3://omni"
NUM_TRAINING_NODES: Final = 3
"""Two for the job and one for its spare; one more has the operator and the S3 server."""
POOL: Final = "example.com/pool"
"""Label that tells the nodes for training from the other one."""
TRAINING: Final = {POOL: "training"}

_RUN_VOLUME: Final = Path(RUN_DIR).name
_ROLLOUT_S: Final = 180
_DATA_S: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """As the chart's notes name it to users."""

    endpoint: str
    secret: str

    @classmethod
    def read(cls, notes: str) -> Self:
        """What helm printed after the install."""
        found = {
            name: re.search(rf"^ *{name}: (\S+)$", notes, re.MULTILINE)
            for name in ("endpoint", "credentialsSecret")
        }
        words = {name: match[1] for name, match in found.items() if match}
        return cls(endpoint=words["endpoint"], secret=words["credentialsSecret"])


class Stage:
    """Context manager around all of it."""

    def __init__(self, archives: Sequence[Path]) -> None:
        self._archives = archives
        self.real: RealCluster
        """With its nodes, the last one for the operator and the S3 server."""
        self.s3: S3Server
        """That jobs use."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            nodes = NUM_TRAINING_NODES + 1
            self.real = stack.enter_context(RealCluster(nodes=nodes, archives=self._archives))
            self._label_nodes()
            self._make_namespace()
            self.s3 = S3Server.read(self.helm("install", "--create-namespace"))
            self.wait_for_rollout()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def operator(self) -> str:
        """Name of the operator's Deployment and of its Lease."""
        return f"{RELEASE}-{CHART.name}"

    @property
    def s3_pod(self) -> str:
        """Name of the S3 server's pod."""
        return f"{self.operator}-s3-0"

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl on the cluster, with its plugin."""
        return self.real.control_plane.kubectl(*arguments, stdin=stdin)

    def mmtj(self, *arguments: str) -> str:
        """What `kubectl mmtj` prints; raises RuntimeError where it fails."""
        folders = [str(Path(sys.executable).parent), str(binaries.path("kubectl").parent)]
        env = {
            **os.environ,
            "KUBECONFIG": str(self.real.control_plane.admin_kubeconfig),
            "PATH": ":".join([*folders, os.environ["PATH"]]),
        }
        command = ["kubectl", "mmtj", *arguments, f"--namespace={NAMESPACE}"]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=200, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def helm(self, *arguments: str, **values: Any) -> str:
        """Install or upgrade the chart, with these values over those of this stage."""
        action, *flags = arguments
        version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
        pinned = {POOL: "system"}
        given = {
            "replicas": 2,
            "nodeSelector": pinned,
            "objectStore.nodeSelector": pinned,
            "objectStore.namespaces": [NAMESPACE],
            # No image can be pulled; ours has the same S3 server in it.
            "objectStore.image.repository": "megascale-omni/cli",
            "objectStore.image.tag": version,
            **values,
        }
        return helm(
            *(action, RELEASE, str(CHART), f"--values={CHART / 'values-dev.yaml'}"),
            *set_values(given),
            *(f"--namespace={SYSTEM}", *flags),
            f"--kubeconfig={self.real.control_plane.admin_kubeconfig}",
        )

    def wait_for_rollout(self) -> None:
        """Wait until all replicas of the operator and the S3 server are the newest and ready."""
        for workload in (f"deployment/{self.operator}", f"statefulset/{self.operator}-s3"):
            self.real.control_plane.kubectl(
                *("rollout", "status", workload, f"--namespace={SYSTEM}"),
                f"--timeout={_ROLLOUT_S}s",
                timeout_s=_ROLLOUT_S + 10,
            )

    def fill_store(self) -> None:
        """Put the demo's data into the S3 server, from this machine, with the command for it."""
        command = [sys.executable, "-m", "omni_cli.main", "data", "build", f"--to={BUCKET}"]
        command.append(f"--endpoint={self._reachable_endpoint()}")
        done = subprocess.run(
            command,
            env={**os.environ, **self._keys()},
            cwd=ROOT,  # where the command keeps what it has fetched
            capture_output=True,
            text=True,
            timeout=_DATA_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"omni data build: {(done.stderr or done.stdout).strip()}")

    @cached_property
    def store(self) -> Store:
        """The S3 server, from this machine."""
        keys, spec = self._keys(), StorageSpec(endpoint=self._reachable_endpoint())
        return Store.open(spec, keys=(keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"]))

    def run_folder(self, pod: Pod) -> Path:
        """Where this machine sees the run folder of a pod that has a node."""
        return self.real.nodes[pod.node].volume(pod.uid, _RUN_VOLUME)

    def _label_nodes(self) -> None:
        *training, system = self.real.nodes
        for name in training:
            self.kubectl("label", "node", name, f"{POOL}={TRAINING[POOL]}")
        self.kubectl("label", "node", system, f"{POOL}=system")

    def _make_namespace(self) -> None:
        self.real.control_plane.create_namespace(NAMESPACE)
        self.kubectl(
            "label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted"
        )

    def _reachable_endpoint(self) -> str:
        """This machine knows no names of the cluster, but reaches its pods."""
        path = f"/api/v1/namespaces/{SYSTEM}/pods/{self.s3_pod}"
        api = self.real.control_plane.api
        address = wait_for(lambda: api.get(path)["status"].get("podIP"), "address of the S3 server")
        return f"http://{address}:8333"

    def _keys(self) -> dict[str, str]:
        found = json.loads(
            self.kubectl("get", "secret", self.s3.secret, f"--namespace={NAMESPACE}", "-o", "json")
        )
        return {name: base64.b64decode(value).decode() for name, value in found["data"].items()}
