"""What the chart starts beside its rights: the object store, `helm test`, what is sent by OTLP, and
what an upgrade does to jobs that run."""

import base64
import contextlib
import copy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from omni_cli.local_s3 import Ports, choose_ports
from omni_contract.errors import StorageError
from omni_contract.names import ANNOTATION_RESTART, LABEL_JOB
from omni_contract.spec_data import StorageSpec
from omni_dataloader.store import Store
from omni_operator.render.names import Object
from tests.cluster.api import wait_for
from tests.cluster.chart import (
    CHART,
    RELEASE,
    helm,
    install_chart,
    render_chart,
    set_values,
    uninstall_chart,
)
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ControlPlane
from tests.cluster.job_kind import jobs_path
from tests.cluster.nodes import Grid, Nodes
from tests.cluster.operators import running_operator
from tests.cluster.pods import Pods
from tests.cluster.processes import Processes, free_port
from tests.contract.jobs import DEMO
from tests.operator.otlp import Receiver

STORE: Final = f"{RELEASE}-megascale-omni-s3"
KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def one(objects: list[Object], kind: str) -> Object:
    (found,) = [body for body in objects if body["kind"] == kind]
    return found


def keys_in(secret: Object) -> dict[str, str]:
    """As a container gets them."""
    return {key: base64.b64decode(secret["data"][key]).decode() for key in KEYS}


@pytest.fixture
def ports() -> Iterator[Ports]:
    """Of an object store that is killed: it leaves sockets, whose folder is fixed in it."""
    chosen = choose_ports(None)
    yield chosen
    for port in chosen.all():
        for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            left.unlink()


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as running:
        yield running


@contextlib.contextmanager
def answering(*codes: int) -> Iterator[str]:
    """The URL of a server that answers with these codes in order, and goes on with the last."""
    left = list(codes)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.end_headers()
            self.wfile.write(b"leading\n")

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/readyz"
        server.shutdown()
        thread.join()


def test_the_object_store_serves_who_has_the_keys_and_nobody_else(
    ports: Ports, processes: Processes, tmp_path: Path
) -> None:
    """Run as its container runs it, but for the ports, which a pod has for itself."""
    objects = render_chart(namespace="omni", values={"objectStore": {"enabled": True}})
    pod = one(objects, "StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["envFrom"] == [
        {"secretRef": {"name": one(objects, "Secret")["metadata"]["name"]}}
    ]
    keys = keys_in(one(objects, "Secret"))
    own = {"-dir=/data": f"-dir={tmp_path}", "-s3.port=8333": f"-s3.port={ports.s3}"}
    arguments = [own.pop(argument, argument) for argument in container["args"]]
    assert not own
    others = [f"-{name}.port={getattr(ports, name)}" for name in ("master", "volume", "filer")]
    weed = Path(sys.executable).parent / container["command"][0]
    processes.start("weed", [weed, *arguments, *others], env=keys)
    endpoint = f"http://127.0.0.1:{ports.s3}"
    probe = container["readinessProbe"]["httpGet"]["path"]
    wait_for(lambda: answers(f"{endpoint}{probe}"), "the object store ready")

    def store(key: str) -> Store:
        storage = StorageSpec(endpoint=endpoint)
        return Store.open(storage, keys=(keys[KEYS[0]], key))

    mine = store(keys[KEYS[1]])
    wait_for(lambda: written(mine, "s3://omni/a"), "a first object written")
    assert mine.read("s3://omni/a") == b"data"
    with pytest.raises(StorageError):
        store("wrong").read("s3://omni/a")
    processes.check("weed")
    processes.stop("weed", with_signal=signal.SIGKILL)  # it takes its time to end


def answers(url: str) -> bool:
    done = subprocess.run(
        [sys.executable, CHART / "files" / "ask.py", "0", url], capture_output=True, check=False
    )
    return done.returncode == 0


def written(store: Store, uri: str) -> bool:
    """Whether it is; the parts of the server find each other some moments after their start."""
    try:
        store.write(uri, b"data")
    except StorageError:
        return False
    return True


def test_keys_and_data_of_the_object_store_outlive_an_upgrade_and_an_install(
    cluster: Cluster, namespace: str
) -> None:
    where = (f"--namespace={namespace}", f"--kubeconfig={cluster.admin_kubeconfig}")
    jobs = f"{namespace[:50]}-jobs"
    cluster.create_namespace(jobs)
    store: dict[str, Any] = {"enabled": True, "namespaces": [jobs]}
    values = {"replicas": 1, "objectStore": store}

    def secret(where: str) -> str:
        return f"/api/v1/namespaces/{where}/secrets/{STORE}"

    def keys(where: str) -> dict[str, str]:
        return keys_in(cluster.api.get(secret(where)))

    def claim() -> str | None:
        """UID of the volume claim."""
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/data-{STORE}-0"
        return str(cluster.api.get(path)["metadata"]["uid"]) if cluster.api.exists(path) else None

    helm("install", RELEASE, str(CHART), *where, *set_values(values))
    made = keys(namespace)
    assert keys(jobs) == made and len(made[KEYS[1]]) == 40
    stateful_set = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{STORE}"
    before = cluster.api.get(stateful_set)["spec"]
    helm("upgrade", RELEASE, str(CHART), *where, *set_values(values | {"logLevel": "DEBUG"}))
    assert keys(namespace) == made and keys(jobs) == made
    assert cluster.api.get(stateful_set)["spec"] == before
    wait_for(lambda: claim() is not None, "a volume claim")
    kept = claim()
    helm("uninstall", RELEASE, *where)
    assert not cluster.api.exists(stateful_set) and not cluster.api.exists(secret(jobs))
    store["keep"] = False
    helm("install", RELEASE, str(CHART), *where, *set_values(values))
    assert keys(namespace) == made and keys(jobs) == made
    assert claim() == kept
    wait_for(
        lambda: cluster.api.get(stateful_set)["status"].get("currentReplicas") == 1,
        "the store's pod with the claim of before",
    )
    helm("uninstall", RELEASE, *where)
    assert not cluster.api.exists(secret(namespace))
    wait_for(lambda: claim() is None, "the end of the claim that is not to be kept", 60)
    cluster.api.delete(f"/api/v1/namespaces/{jobs}")


def test_helm_test_succeeds_with_its_pod(
    control_plane: ControlPlane, namespace: str, nodes: Nodes, pods: Pods
) -> None:
    nodes.add(Grid(nodes=1, name="helm-test"))
    where = (f"--namespace={namespace}", f"--kubeconfig={control_plane.admin_kubeconfig}")
    helm("install", RELEASE, str(CHART), *where, "--set=replicas=1")
    pod = f"{RELEASE}-megascale-omni-test"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(helm, "test", RELEASE, *where)
        wait_for(lambda: pods.exists(pod), "the pod of helm test")
        pods.wait_until_running(pod)
        pods.end_container(pod, exit_code=0)
        assert "Succeeded" in asked.result()
    assert not pods.exists(pod)
    helm("uninstall", RELEASE, *where)


@pytest.mark.parametrize(
    ("codes", "patience", "is_well"),
    [((503, 200), "60", True), ((503,), "0", False)],
    ids=["late", "never"],
)
def test_what_helm_test_runs_waits_until_the_operator_is_ready(
    codes: tuple[int, ...], patience: str, is_well: bool
) -> None:
    objects = render_chart(namespace="omni", with_tests=True)
    (container,) = one(objects, "Pod")["spec"]["containers"]
    service = one(objects, "Service")
    (port,) = service["spec"]["ports"]
    host = f"{service['metadata']['name']}.omni.svc.cluster.local:{port['port']}"
    assert container["args"] == ["60", f"http://{host}/readyz"]
    with answering(*codes) as url:
        command = [sys.executable, *container["command"][1:], patience, url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is is_well, done.stderr
    assert ("leading" in done.stdout) if is_well else ("503" in done.stderr)


def environment(pod: Mapping[str, Any], secrets: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What a container of a pod finds in its environment."""
    found = {}
    for entry in pod["containers"][0]["env"]:
        if "value" in entry:
            found[entry["name"]] = entry["value"]
        else:
            ref = entry["valueFrom"]["secretKeyRef"]
            found[entry["name"]] = secrets[ref["name"]][ref["key"]]
    return found


def test_the_operator_sends_its_metrics_where_the_chart_says(
    control_plane: ControlPlane, namespace: str
) -> None:
    with Receiver() as receiver:
        values = {
            "watchNamespace": namespace,
            "openTelemetry": {
                "endpoint": receiver.endpoint,
                "headersSecret": {"name": "collector"},
            },
            "extraEnv": [{"name": "OTEL_METRIC_EXPORT_INTERVAL", "value": "500"}],
        }
        installed = install_chart(control_plane, namespace, values)
        deployment = one(render_chart(namespace=namespace, values=values), "Deployment")
        secrets = {"collector": {"headers": "x-tenant=omni"}}
        env = environment(deployment["spec"]["template"]["spec"], secrets)
        name = f"operator-{namespace}"
        control_plane.processes.start(
            name,
            [sys.executable, "-m", "omni_operator.main", *installed.arguments]
            + [f"--port={free_port()}"],
            env={"KUBECONFIG": str(installed.kubeconfig), **env},
        )
        try:
            wait_for(
                lambda: receiver.metrics.keys() >= {"omni_operator_watch_age"},
                "the metrics of an operator that leads",
            )
        finally:
            print(control_plane.processes.log(name).read_text())
            control_plane.processes.stop(name)
            uninstall_chart(control_plane, installed)
    assert {sent["x-tenant"] for sent in receiver.headers} == {"omni"}
    assert "omni_operator_api_request" in receiver.metrics


def test_a_new_version_of_the_operator_leaves_running_jobs_alone(
    control_plane: ControlPlane, namespace: str, nodes: Nodes, pods: Pods
) -> None:
    """Given another image and priority class it keeps what runs, and all pods of an attempt alike;
    the new ones come with a restart of all."""
    nodes.add(Grid(nodes=3, gpus=2, name="upgrade"))
    raw = copy.deepcopy(DEMO)
    raw["spec"]["resources"]["device"] = "auto"
    api, path = control_plane.api, f"{jobs_path(namespace)}/{raw['metadata']['name']}"

    def is_running() -> bool:
        return bool(api.get(path).get("status", {}).get("phase") == "Running")

    def tags() -> dict[str, str]:
        """Of the images of the pods that run."""
        running = pods.list(f"{LABEL_JOB}={raw['metadata']['name']}")
        return {
            pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"].rpartition(":")[2]
            for pod in running
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        }

    with running_operator(control_plane, namespace, values={"jobImage": {"tag": "1"}}):
        api.create(jobs_path(namespace), raw)
        wait_for(is_running, "the job running", 60)
    first, second = tags()
    assert tags() == {first: "1", second: "1"}
    newer = {"jobImage": {"tag": "2"}, "priorityClass": {"value": 5}}
    with running_operator(control_plane, namespace, values=newer):
        assert tags() == {first: "1", second: "1"}
        pods.end_container(first, exit_code=1)
        wait_for(lambda: len(tags()) == 2 and first not in tags(), "a pod in its place", 60)
        assert list(tags().values()) == ["1", "1"]
        wait_for(is_running, "the job running again", 60)
        assert api.get(path)["status"]["attempt"] == 2
        api.patch(path, {"metadata": {"annotations": {ANNOTATION_RESTART: "now"}}})
        wait_for(lambda: list(tags().values()) == ["2", "2"], "all pods anew", 60)
