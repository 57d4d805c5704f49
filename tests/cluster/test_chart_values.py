"""Each value of the chart does something, and its README says what it is."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import pytest
import yaml

from omni_contract.records import History
from omni_operator.render.log_reader import render_log_reader
from omni_operator.render.names import Object
from omni_operator.render.pod import render_pod
from omni_operator.settings import Settings
from tests.cluster.chart import CHART, render_chart
from tests.contract.jobs import DEMO
from tests.operator.rendering import job_state, place_on, plan_of

POLICIES: Final = "networkPolicies"
EVERY_PART: Final[dict[str, Any]] = {
    POLICIES: {"operator": {"from": [{"podSelector": {}}], "limitEgress": True}},
    "serviceMonitor": {"enabled": True},
    "dashboard": {"enabled": True},
    "openTelemetry": {"endpoint": "http://a:4318", "headersSecret": {"name": "a"}},
    "objectStore": {"enabled": True},
}
"""So that a value of a part that is off at first shows, too."""
PEER: Final = [{"ipBlock": {"cidr": "10.9.0.0/16"}}]
RULE: Final = [{"ports": [{"protocol": "TCP", "port": 9}]}]
CHANGES: Final[dict[str, tuple[Any, str]]] = {
    "image.repository": ("mine/operator", "image: mine/operator:0.1.0"),
    "image.tag": ("9", "image: megascale-omni/operator:9"),
    "image.pullPolicy": ("Always", "imagePullPolicy: Always"),
    "pullSecrets": (["mine"], "imagePullSecrets[0].name: mine"),
    "jobImage.repository": ("mine/trainer", "--image=mine/trainer:0.1.0"),
    "jobImage.tag": ("9", "--image=megascale-omni/trainer:9"),
    "jobImage.pullPolicy": ("Never", "--image-pull-policy=Never"),
    "dataImage.repository": ("mine/data", "--data-image=mine/data:0.1.0"),
    "dataImage.tag": ("9", "--data-image=megascale-omni/dataloader:9"),
    "dataImage.pullPolicy": ("Never", "--data-image-pull-policy=Never"),
    "replicas": (1, "spec.replicas: 1"),
    "watchNamespace": ("team", "--watched-namespace=team"),
    "clusterDomain": ("example.org", "--cluster-domain=example.org"),
    "logLevel": ("DEBUG", "--log-level=DEBUG"),
    "kueue.enabled": (True, "--with-kueue"),
    "priorityClass.create": (False, "PriorityClass"),
    "priorityClass.name": ("mine", "--priority-class=mine"),
    "priorityClass.value": (7, "PriorityClass value: 7"),
    "userRoles": (False, "aggregate-to-edit"),
    "serviceAccount.name": ("mine", "serviceAccountName: mine"),
    "serviceAccount.annotations": ({"a": "b"}, "ServiceAccount metadata.annotations.a: b"),
    "resources.requests.cpu": ("9m", "requests.cpu: 9m"),
    "resources.requests.memory": ("9Mi", "requests.memory: 9Mi"),
    "resources.limits.memory": ("9Gi", "limits.memory: 9Gi"),
    "nodeSelector": ({"a": "b"}, "Deployment spec.template.spec.nodeSelector.a: b"),
    "tolerations": ([{"key": "a"}], "Deployment spec.template.spec.tolerations[0].key: a"),
    "affinity": ({"nodeAffinity": {"a": "b"}}, "affinity.nodeAffinity.a: b"),
    "topologySpreadConstraints": (
        [{"topologyKey": "zone"}],
        "topologySpreadConstraints[0].labelSelector.matchLabels.app.kubernetes.io/instance: omni",
    ),
    "podAnnotations": ({"a": "b"}, "Deployment spec.template.metadata.annotations.a: b"),
    "podLabels": ({"a": "b"}, "Deployment spec.template.metadata.labels.a: b"),
    "extraEnv": ([{"name": "A", "value": "b"}], "env[0].name: A"),
    f"{POLICIES}.apiServer.ports": ([9443], "port: 9443"),
    f"{POLICIES}.apiServer.cidrs": (["10.0.0.1/32"], "ipBlock.cidr: 10.0.0.1/32"),
    f"{POLICIES}.dnsPorts": ([5353], "port: 5353"),
    f"{POLICIES}.operator.enabled": (False, "NetworkPolicy"),
    f"{POLICIES}.operator.from": (PEER, "ingress[0].from[0].ipBlock.cidr: 10.9.0.0/16"),
    f"{POLICIES}.operator.limitEgress": (False, "policyTypes[1]: Egress"),
    f"{POLICIES}.operator.egress": (RULE, "egress[2].ports[0].port: 9"),
    f"{POLICIES}.jobs.namespaces": (["team"], "NetworkPolicy metadata.namespace: team"),
    f"{POLICIES}.jobs.objectStore.ports": ([9000], "port: 9000"),
    f"{POLICIES}.jobs.objectStore.to": (PEER, "to[0].ipBlock.cidr: 10.9.0.0/16"),
    f"{POLICIES}.jobs.egress": (RULE, "port: 9"),
    "serviceMonitor.enabled": (False, "ServiceMonitor"),
    "serviceMonitor.labels": ({"a": "b"}, "ServiceMonitor metadata.labels.a: b"),
    "serviceMonitor.interval": ("9s", "endpoints[0].interval: 9s"),
    "dashboard.enabled": (False, "megascale-omni.json"),
    "dashboard.labels": ({"a": "b"}, "ConfigMap metadata.labels.a: b"),
    "dashboard.annotations": ({"a": "b"}, "ConfigMap metadata.annotations.a: b"),
    "openTelemetry.endpoint": ("http://b:4318", "value: http://b:4318"),
    "openTelemetry.headersSecret.name": ("mine", "secretKeyRef.name: mine"),
    "openTelemetry.headersSecret.key": ("mine", "secretKeyRef.key: mine"),
    "objectStore.enabled": (False, "StatefulSet"),
    "objectStore.image.repository": ("mine/weed", "image: mine/weed:4.48"),
    "objectStore.image.tag": ("9", "image: chrislusf/seaweedfs:9"),
    "objectStore.image.pullPolicy": ("Always", "StatefulSet"),
    "objectStore.secret": ("mine", "envFrom[0].secretRef.name: mine"),
    "objectStore.namespaces": (["team"], "Secret metadata.namespace: team"),
    "objectStore.persistence.enabled": (False, "volumes[0].name: data"),
    "objectStore.persistence.size": ("9Gi", "resources.requests.storage: 9Gi"),
    "objectStore.persistence.storageClass": ("fast", "storageClassName: fast"),
    "objectStore.keep": (False, "persistentVolumeClaimRetentionPolicy.whenDeleted: Delete"),
    "objectStore.resources.requests.cpu": ("9m", "StatefulSet"),
    "objectStore.resources.requests.memory": ("9Mi", "StatefulSet"),
    "objectStore.resources.limits.memory": ("9Gi", "StatefulSet"),
    "objectStore.nodeSelector": ({"a": "b"}, "StatefulSet spec.template.spec.nodeSelector.a: b"),
    "objectStore.tolerations": ([{"key": "a"}], "spec.template.spec.tolerations[0].key: a"),
    "objectStore.affinity": ({"nodeAffinity": {"a": "b"}}, "affinity.nodeAffinity.a: b"),
}
"""Another value for each, and what must be found in the lines that differ then."""
JOB_POLICY: Final = {f"{POLICIES}.jobs.{name}" for name in ("egress", "objectStore.ports")} | {
    f"{POLICIES}.jobs.objectStore.to"
}
"""Values that show only where a namespace is named."""
WHOLE: Final = {"dashboard.labels"}
"""Filled maps that are one value, as their keys are the user's."""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything that is no filled map."""
    if isinstance(value, dict) and value and path not in WHOLE:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value


def lines(value: Any, path: str = "") -> Iterator[str]:
    """A part of an object as lines of path and value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from lines(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from lines(inner, f"{path}[{number}]")
    else:
        yield f"{path}: {value}"


def documented() -> dict[str, Any]:
    """Default of each value, in order."""
    return dict(leaves(yaml.safe_load((CHART / "values.yaml").read_text())))


def changed(path: str, value: Any) -> dict[str, Any]:
    """Values that turn every part on, with one changed."""
    made: dict[str, Any] = yaml.safe_load(yaml.safe_dump(EVERY_PART))
    if path in JOB_POLICY:
        made[POLICIES]["jobs"] = {"namespaces": ["team"]}
    at, (*parents, last) = made, path.split(".")
    for name in parents:
        at = at.setdefault(name, {})
    at[last] = value
    return made


def told(objects: list[Object]) -> frozenset[str]:
    """What is rendered, but for the keys of the object store, which are new each time."""
    return frozenset(
        f"{body['kind']} {line}"
        for body in objects
        for line in lines({key: value for key, value in body.items() if key != "kind"})
        if body["kind"] != "Secret" or not line.startswith("data.")
    )


@cache
def before(with_jobs: bool) -> frozenset[str]:
    path = f"{POLICIES}.jobs.namespaces" if with_jobs else "replicas"
    return told(render_chart(namespace="omni", values=changed(path, ["team"] if with_jobs else 2)))


def test_each_value_has_a_change_here() -> None:
    assert sorted(CHANGES) == sorted(documented())


@pytest.mark.parametrize("path", CHANGES)
def test_a_changed_value_is_found_in_what_is_rendered(path: str) -> None:
    value, expected = CHANGES[path]
    after = told(render_chart(namespace="omni", values=changed(path, value)))
    differing = before(path in JOB_POLICY) ^ after
    assert [line for line in differing if expected in line], sorted(differing)


def test_the_readme_has_each_value_with_its_default() -> None:
    text = (CHART / "README.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| (.+) \|$", text, re.M)
    shown = {path: yaml.safe_load(default) for path, default, _ in rows}
    assert list(shown.items()) == list(documented().items())


def test_the_values_for_development_are_valid_and_bring_an_object_store() -> None:
    values = yaml.safe_load((CHART / "values-dev.yaml").read_text())
    assert dict(leaves(values)).keys() <= documented().keys()
    objects = render_chart(namespace="omni", values=values)
    secrets = [body for body in objects if body["kind"] == "Secret"]
    assert [body["metadata"]["namespace"] for body in secrets] == ["omni", "default"]
    assert secrets[0]["data"] == secrets[1]["data"]


def test_the_policy_for_jobs_selects_the_pods_of_jobs() -> None:
    """By the labels that the operator gives them and those that read their stored logs. They may
    reach each other on any port."""
    objects = render_chart(
        namespace="omni", values={POLICIES: {"jobs": {"namespaces": ["one", "two"]}}}
    )
    policies = [body for body in objects if body["metadata"]["name"].endswith("-jobs")]
    policies = [body for body in policies if body["kind"] == "NetworkPolicy"]
    assert [body["metadata"]["namespace"] for body in policies] == ["one", "two"]
    job, plan = job_state(DEMO), plan_of(DEMO)
    placement, settings = place_on(job, plan), Settings(image="a:1")
    pods = [
        render_pod(job, plan, placement, 0, settings, History()),
        render_log_reader(job, plan, placement, settings),
    ]
    for body in policies:
        selector = body["spec"]["podSelector"]
        (asked,) = selector["matchExpressions"]
        assert asked["operator"] == "Exists"
        assert all(asked["key"] in pod["metadata"]["labels"] for pod in pods)
        assert body["spec"]["ingress"] == [{"from": [{"podSelector": selector}]}]
        assert {"to": [{"podSelector": selector}]} in body["spec"]["egress"]


def test_without_a_limit_the_operators_policy_bounds_only_who_reaches_it() -> None:
    objects = render_chart(namespace="omni")
    (policy,) = [body for body in objects if body["kind"] == "NetworkPolicy"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": "http"}]}]


def test_the_service_monitor_asks_the_port_that_the_service_has() -> None:
    objects = render_chart(namespace="omni", values={"serviceMonitor": {"enabled": True}})
    (monitor,) = [body for body in objects if body["kind"] == "ServiceMonitor"]
    (service,) = [body for body in objects if body["kind"] == "Service"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    selector = monitor["spec"]["selector"]["matchLabels"]
    assert selector.items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    (deployment,) = [body for body in objects if body["kind"] == "Deployment"]
    notes = deployment["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/scrape"] == "false"  # or the same would be read twice
