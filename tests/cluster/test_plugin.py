"""`kubectl mmtj` against a real API server, through kubectl's own search for plugins.

There is no operator here: the test writes the status, as the operator would.
"""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_contract.names import ANNOTATION_RESTART, LABEL_JOB_UID
from omni_contract.packed import pack
from omni_contract.placement import JobPlacement
from tests.cli.job_objects import PLACEMENT, a_pod, condition, running_status
from tests.cluster import binaries
from tests.cluster.api import Object, wait_for
from tests.cluster.cluster import Cluster
from tests.cluster.job_kind import install_job_kind, jobs_path, set_status
from tests.contract.jobs import DEMO


class Plugin:
    """A shell with kubectl and the plugin on PATH."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        program = folder / "kubectl-mmtj"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m omni_cli.job "$@"\n')
        program.chmod(0o755)
        (folder / "kubectl").symlink_to(binaries.path("kubectl"))
        self._env = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "KUBECONFIG": str(cluster.admin_kubeconfig),
        }

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run `kubectl mmtj` in the test's namespace; what it said on the channel of its code."""
        done = subprocess.run(
            ["kubectl", "mmtj", *arguments, f"--namespace={self.namespace}"],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr if code == 2 else done.stdout

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """The same, without waiting for its end."""
        return subprocess.Popen(
            ["kubectl", "mmtj", *arguments, f"--namespace={self.namespace}"],
            env=self._env,
            stdout=subprocess.PIPE,
            text=True,
        )

    def create_job(self) -> Object:
        """The demo's job."""
        return self.cluster.api.create(jobs_path(self.namespace), DEMO)

    def job(self) -> Object:
        """That job as it is."""
        return self.cluster.api.get(f"{jobs_path(self.namespace)}/stamps")

    def set_status(self, status: Object) -> None:
        """What the operator would write."""
        set_status(self.cluster, self.namespace, "stamps", status)


@pytest.fixture
def plugin(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Plugin]:
    install_job_kind(cluster)
    yield Plugin(cluster, namespace, tmp_path)


def placed(plugin: Plugin, uid: str) -> None:
    """The placement of a running job and its pods, which no node will take."""
    for placed_pod, index in zip(PLACEMENT.all_pods, (0, 1, None), strict=True):
        pod = a_pod(placed_pod.name, index)
        pod["metadata"]["labels"] = {LABEL_JOB_UID: uid}
        pod["spec"] = {
            "containers": [{"name": "trainer", "image": "x"}],
            "nodeSelector": {"a": "b"},
        }
        plugin.cluster.api.create(f"/api/v1/namespaces/{plugin.namespace}/pods", pod)
    pieces = pack("placement.json", PLACEMENT.model_dump_json())
    config_map = {
        "metadata": {"name": "stamps-5d1ce-placement-2"},
        "binaryData": {key: base64.b64encode(piece).decode() for key, piece in pieces.items()},
        "immutable": True,
    }
    plugin.cluster.api.create(f"/api/v1/namespaces/{plugin.namespace}/configmaps", config_map)


def test_a_job_is_looked_at(plugin: Plugin) -> None:
    assert "there is no job in namespace" in plugin.run("status", code=2)
    uid = plugin.create_job()["metadata"]["uid"]
    assert "stamps  Pending  no attempt yet" in plugin.run("status")
    plugin.set_status(running_status())
    placed(plugin, uid)
    event = {
        "metadata": {"name": "stamps.1"},
        "involvedObject": {
            "apiVersion": "megascale-omni.dev/v1alpha1",
            "kind": "MultimodalTrainingJob",
            "namespace": plugin.namespace,
            "name": "stamps",
            "uid": uid,
        },
        "reason": "Placed",
        "message": "2 pods on 2 nodes",
        "type": "Normal",
        "lastTimestamp": "2026-01-01T08:00:30Z",
    }
    plugin.cluster.api.create(f"/api/v1/namespaces/{plugin.namespace}/events", event)

    said = plugin.run("status")
    assert "stamps  Running  attempt 2.1" in said and "step 60/120  50.0 %" in said
    assert "event Placed: 2 pods on 2 nodes" in plugin.run("timeline")
    assert "? pending: 3" in plugin.run("placement", "stamps")
    kept = JobPlacement.model_validate_json(plugin.run("placement", "-o", "json"))
    assert kept == PLACEMENT
    assert "there is no job nobody" in plugin.run("status", "nobody", code=2)
    assert "there is stamps" in plugin.run("logs", "nobody", code=2)


def test_a_job_is_suspended_and_resumed(plugin: Plugin) -> None:
    plugin.create_job()
    assert "its pods end" in plugin.run("suspend")
    assert plugin.job()["spec"]["suspend"] is True
    assert "suspended already" in plugin.run("suspend", "stamps")
    assert "kubectl mmtj resume stamps" in plugin.run("restart", code=2)
    assert "it goes on" in plugin.run("resume")
    assert plugin.job()["spec"]["suspend"] is False


def test_a_restart_is_asked_for_and_waited_for(plugin: Plugin) -> None:
    plugin.create_job()
    plugin.set_status(running_status())
    with plugin.start("restart", "--wait") as waiting:

        def answer() -> None:
            asked = wait_for(
                lambda: plugin.job()["metadata"].get("annotations", {}).get(ANNOTATION_RESTART),
                "the restart annotation",
            )
            plugin.set_status(running_status(attempt=3, restartHandled=asked))

        operator = threading.Thread(target=answer)
        operator.start()
        said, _ = waiting.communicate(timeout=60)
        operator.join()
    assert waiting.returncode == 0
    assert "the pods of attempt 2 end now" in said
    assert "job stamps runs, attempt 3" in said


def test_a_watch_ends_when_the_job_failed(plugin: Plugin) -> None:
    plugin.create_job()
    plugin.set_status(running_status())
    with plugin.start("status", "--watch", "--every=0.2") as watch:
        assert watch.stdout is not None
        assert "Running" in watch.stdout.readline()
        failed = condition("Failed", "True", "RestartLimit", "3 of 3 restarts are spent")
        plugin.set_status(running_status(phase="Failed", conditions=[failed]))
        said, _ = watch.communicate(timeout=60)
    assert watch.returncode == 1
    assert "3 of 3 restarts are spent" in said
    assert "a job that is over stays so" in plugin.run("resume", code=2)


def test_a_user_without_rights_is_told_which(plugin: Plugin) -> None:
    kubeconfig = plugin.cluster.kubeconfig_for(plugin.namespace, "default")
    said = plugin.run("status", f"--kubeconfig={kubeconfig}", code=2)
    assert "cannot list resource" in said and "Ask who runs the cluster" in said


def test_a_cluster_that_does_not_answer_is_told(plugin: Plugin, tmp_path: Path) -> None:
    config = json.loads(plugin.cluster.kubeconfig_for(plugin.namespace, "default").read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    path = tmp_path / "dead.kubeconfig"
    path.write_text(json.dumps(config))
    said = plugin.run("status", f"--kubeconfig={path}", code=2)
    assert "does not answer" in said and "127.0.0.1:1" in said


def test_a_context_that_is_not_there_is_told(plugin: Plugin) -> None:
    assert 'context "nope" does not exist' in plugin.run("status", "--context=nope", code=2)
