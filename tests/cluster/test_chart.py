"""The Helm chart: what it refuses, what a real API server says to it, which rights it gives."""

from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from omni_contract.records import History
from omni_operator.kinds import LEASE, POD, kind_of
from omni_operator.options import parse
from omni_operator.render.names import Object
from omni_operator.render.objects import render_objects, render_placement
from omni_operator.render.pod import render_pod
from omni_operator.settings import Settings
from omni_operator.watch.observe import read_job
from tests.cluster.api import Api, ApiError, wait_for
from tests.cluster.chart import (
    CHART,
    RELEASE,
    Installed,
    helm,
    install_chart,
    render_chart,
    set_values,
    uninstall_chart,
)
from tests.cluster.cluster import Cluster
from tests.cluster.job_kind import jobs_path
from tests.contract.jobs import DEMO
from tests.operator.rendering import place_on, plan_of, with_template

EVERYTHING: Final[dict[str, Any]] = {
    "image": {"repository": "registry.example/operator", "tag": "1"},
    "jobImage": {"repository": "registry.example/trainer", "pullPolicy": "Always"},
    "dataImage": {"repository": "registry.example/data"},
    "pullSecrets": ["a"],
    "replicas": 3,
    "logLevel": "DEBUG",
    "watchNamespace": "default",
    "kueue": {"enabled": True},
    "priorityClass": {"value": 100},
    "serviceAccount": {"annotations": {"note": "x"}},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "control", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "podAnnotations": {"note": "x"},
    "podLabels": {"team": "platform"},
    "extraEnv": [{"name": "A", "value": "b"}],
    "networkPolicies": {
        "apiServer": {"cidrs": ["10.0.0.1/32", "fd00::1/128"]},
        "operator": {
            "from": [{"namespaceSelector": {}}],
            "limitEgress": True,
            "egress": [{"ports": [{"protocol": "TCP", "port": 4318}]}],
        },
        "jobs": {
            "namespaces": ["default"],
            "objectStore": {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]},
            "egress": [{"to": [{"ipBlock": {"cidr": "10.2.0.0/16"}}]}],
        },
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True, "annotations": {"grafana_folder": "Training"}},
    "openTelemetry": {"endpoint": "http://collector:4318", "headersSecret": {"name": "otlp"}},
    "topologySpreadConstraints": [
        {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "objectStore": {
        "enabled": True,
        "namespaces": ["default"],
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "control", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    },
}
VARIANTS: Final = {
    "as it is": {},
    "everything": EVERYTHING,
    "for development": yaml.safe_load((CHART / "values-dev.yaml").read_text()),
    "bare": {"replicas": 1, "priorityClass": {"create": False}, "userRoles": False},
}


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [body for body in objects if body["kind"] == kind]


@pytest.fixture
def installed(
    cluster: Cluster, namespace: str, request: pytest.FixtureRequest
) -> Iterator[Installed]:
    """A release that may write in this namespace, or everywhere where `request.param` says so."""
    everywhere = getattr(request, "param", "one") == "everywhere"
    values = {} if everywhere else {"watchNamespace": namespace}
    release = install_chart(cluster, namespace, values)
    yield release
    uninstall_chart(cluster, release)


@pytest.fixture
def operator(installed: Installed) -> Iterator[Api]:
    """Requests with the rights of the chart's service account."""
    api = Api(installed.kubeconfig)
    wait_for(lambda: may_list_pods(api), "the role bindings to hold")
    yield api
    api.close()


def may_list_pods(api: Api) -> bool:
    try:
        api.list("/api/v1/pods", limit="1")
    except ApiError as exc:
        if exc.status != 403:
            raise
        return False
    return True


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_helm_finds_no_fault(values: dict[str, Any]) -> None:
    helm("lint", "--strict", "--quiet", str(CHART), *set_values(values))


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_api_server_takes_every_object(
    cluster: Cluster, namespace: str, values: dict[str, Any]
) -> None:
    """Strictly: an unknown field is an error."""
    objects = render_chart(namespace=namespace, values=values, with_crds=True, with_tests=True)
    # Its kind is the Prometheus operator's, which is not here.
    text = yaml.safe_dump_all([body for body in objects if body["kind"] != "ServiceMonitor"])
    cluster.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text
    )


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_pod_passes_restricted(
    cluster: Cluster, namespace: str, values: dict[str, Any]
) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})
    objects = render_chart(namespace=namespace, values=values, with_tests=True)
    (account,) = of_kind(objects, "ServiceAccount")
    cluster.api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    pods = of_kind(objects, "Pod")
    for body in of_kind(objects, "Deployment") + of_kind(objects, "StatefulSet"):
        template = body["spec"]["template"]
        template["metadata"]["name"] = body["metadata"]["name"]
        for claim in body["spec"].get("volumeClaimTemplates", ()):
            name = claim["metadata"]["name"]
            source = {"persistentVolumeClaim": {"claimName": name}}
            template["spec"]["volumes"].append({"name": name, **source})
        pods.append({"apiVersion": "v1", "kind": "Pod", **template})
    assert len(pods) == (3 if values.get("objectStore") else 2)
    for pod in pods:
        cluster.api.create(POD.path(namespace), pod)


def test_what_the_values_say_reaches_the_operator() -> None:
    objects = render_chart(namespace="omni-system", values=EVERYTHING)
    (deployment,) = of_kind(objects, "Deployment")
    (priority_class,) = of_kind(objects, "PriorityClass")
    options = parse(deployment["spec"]["template"]["spec"]["containers"][0]["args"])
    assert options.settings == Settings(
        image="registry.example/trainer:0.1.0",
        image_pull_policy="Always",
        data_image="registry.example/data:0.1.0",
        data_image_pull_policy="IfNotPresent",
        priority_class=priority_class["metadata"]["name"],
        watched_namespace="default",
        with_kueue=True,
    )
    assert options.log_level == "DEBUG"
    (role,) = of_kind(objects, "Role")
    assert role["rules"][1]["resourceNames"] == [options.lease_name]
    assert role["metadata"]["namespace"] == options.lease_namespace


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": "two"}, "replicas"),
        ({"watchNamspace": "team"}, "watchNamspace"),
        ({"watchNamespace": "No Name"}, "watchNamespace"),
        ({"kueue": {"enabled": "yes"}}, "kueue/enabled"),
        ({"jobImage": {"repository": ""}}, "jobImage/repository"),
        ({"jobImage": {"pullPolicy": "Sometimes"}}, "jobImage/pullPolicy"),
        ({"priorityClass": {"value": 2_000_000_000}}, "priorityClass/value"),
        ({"extraEnv": {"A": "b"}}, "extraEnv"),
        ({"networkPolicies": {"dnsPorts": []}}, "networkPolicies/dnsPorts"),
        ({"networkPolicies": {"jobs": {"namespaces": [""]}}}, "networkPolicies/jobs/namespaces/0"),
        ({"openTelemetry": {"endpoint": "collector:4318"}}, "openTelemetry/endpoint"),
        ({"serviceMonitor": {"interval": "30"}}, "serviceMonitor/interval"),
        ({"objectStore": {"persistence": {"size": "many"}}}, "objectStore/persistence/size"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(values: dict[str, Any], field: str) -> None:
    with pytest.raises(RuntimeError, match=field):
        render_chart(namespace="omni-system", values=values)


def test_helm_installs_upgrades_and_takes_away_all_but_the_jobs(
    cluster: Cluster, namespace: str
) -> None:
    where = (f"--namespace={namespace}", f"--kubeconfig={cluster.admin_kubeconfig}")
    helm("install", RELEASE, str(CHART), *where)
    job = f"{jobs_path(namespace)}/{DEMO['metadata']['name']}"
    wait_for(lambda: cluster.api.exists(jobs_path(namespace)), "the job kind served")
    cluster.api.create(jobs_path(namespace), DEMO)
    deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/{RELEASE}-megascale-omni"
    assert cluster.api.get(deployment)["spec"]["replicas"] == 2
    helm("upgrade", RELEASE, str(CHART), *where, "--set=replicas=1", "--set=kueue.enabled=true")
    after = cluster.api.get(deployment)["spec"]
    assert after["replicas"] == 1
    assert "--with-kueue" in after["template"]["spec"]["containers"][0]["args"]
    cluster.kubectl(  # as NOTES say
        *("apply", "--server-side", "--force-conflicts", "--field-manager=helm", "-f", "-"),
        stdin=helm("show", "crds", str(CHART)),
    )
    helm("uninstall", RELEASE, *where)
    assert not cluster.api.exists(deployment)
    named = cluster.kubectl("get", "clusterroles,clusterrolebindings,priorityclasses", "-o=name")
    assert [name for name in named.split() if f"/{namespace}-" in name] == []
    assert cluster.api.exists(job)


def test_two_releases_stand_side_by_side() -> None:
    """Names outside the namespaces must differ."""
    names = [
        {
            (body["kind"], body["metadata"]["name"])
            for body in render_chart(namespace=namespace)
            if body["metadata"].get("namespace") is None
        }
        for namespace in ("one", "two")
    ]
    assert names[0] and not names[0] & names[1]


def test_no_other_pod_of_the_release_is_taken_for_the_operator() -> None:
    """Its Service would send to it, and its PodDisruptionBudget count it."""
    objects = render_chart(namespace="omni-system", values=EVERYTHING, with_tests=True)
    (deployment,) = of_kind(objects, "Deployment")
    selector = deployment["spec"]["selector"]["matchLabels"].items()
    assert selector <= deployment["spec"]["template"]["metadata"]["labels"].items()
    others = of_kind(objects, "Pod") + [
        body["spec"]["template"] for body in of_kind(objects, "StatefulSet")
    ]
    assert len(others) == 2
    for pod in others:
        assert not selector <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("installed", ["one", "everywhere"], indirect=True)
def test_the_rights_suffice_for_the_objects_of_a_job(
    cluster: Cluster, namespace: str, operator: Api
) -> None:
    """Server-side apply of roles it must hold itself, pods, ConfigMaps, the progress Lease."""
    raw = with_template({})
    jobs = jobs_path(namespace)
    job, plan = read_job(cluster.api.create(jobs, raw)), plan_of(raw)
    objects, placement = render_objects(job, plan), place_on(job, plan)
    for body in (*objects.applied, objects.role_binding):
        operator.patch(kind_of(body).path(namespace, body["metadata"]["name"]), body, kind="apply")
    settings = Settings(image="registry.example/omni:1")
    pods = [render_pod(job, plan, placement, i, settings, History()) for i in range(2)]
    for body in (*objects.created, render_placement(job, placement), *pods):
        operator.create(kind_of(body).path(namespace), body)
    operator.get(LEASE.path(namespace, objects.lease["metadata"]["name"]))
    operator.patch(f"{jobs}/{job.key.name}/status", {"status": {"attempt": 1}})
    operator.delete(POD.path(namespace, pods[0]["metadata"]["name"]))
    operator.delete(f"{jobs}/{job.key.name}")


def test_an_operator_of_one_namespace_writes_in_no_other(operator: Api) -> None:
    for path in (POD.path("default"), "/api/v1/namespaces/default/configmaps"):
        with pytest.raises(ApiError) as refused:
            operator.create(path, {"metadata": {"name": "x"}})
        assert refused.value.status == 403


def test_the_operator_reads_no_secrets_and_lists_no_config_maps(
    operator: Api, namespace: str
) -> None:
    mine = f"/api/v1/namespaces/{namespace}"
    for path in ("/api/v1/secrets", f"{mine}/secrets/x", f"{mine}/configmaps"):
        with pytest.raises(ApiError) as refused:
            operator.get(path)
        assert refused.value.status == 403


@pytest.mark.parametrize(("role", "may_create"), [("view", False), ("edit", True), ("admin", True)])
def test_who_may_edit_a_namespace_may_create_jobs_in_it(
    cluster: Cluster, namespace: str, installed: Installed, role: str, may_create: bool
) -> None:
    account = {"metadata": {"name": role}}
    cluster.api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    cluster.kubectl(
        "create", "rolebinding", role, f"--clusterrole={role}", f"--namespace={namespace}",
        f"--serviceaccount={namespace}:{role}",
    )  # fmt: skip
    user = Api(cluster.kubeconfig_for(namespace, role))
    jobs = jobs_path(namespace)

    def status(method: str) -> int:
        try:
            user.request(method, jobs, DEMO if method == "POST" else None)
        except ApiError as exc:
            return exc.status
        return 200

    try:
        # The controller gathers aggregated rights some moments after the chart is installed.
        wait_for(lambda: status("GET") == 200, f"{role} to list jobs")
        wait_for(lambda: (status("POST") != 403) is may_create, f"{role} to create jobs")
        assert (status("POST") == 403) is not may_create
    finally:
        user.close()
