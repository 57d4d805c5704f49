"""The operator's client against a real API server, and that the fake one of the unit tests gives
the same answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from omni_contract.names import API_VERSION, GATE, KIND
from omni_operator.api import (
    AlreadyExists,
    Api,
    ApiError,
    Conflict,
    NotFound,
    QuotaExceeded,
    Refused,
)
from omni_operator.cluster import Access, Cluster
from omni_operator.kinds import CONFIG_MAP, JOB, LEASE, NODE, POD, SERVICE
from tests.cluster.api import wait_for
from tests.cluster.control_plane import ControlPlane
from tests.cluster.job_kind import install_job_kind
from tests.contract.jobs import DEMO
from tests.fakes.fake_cluster import FakeCluster

Story = Callable[[Api, str], Awaitable[None]]


@pytest.fixture(params=["real", "fake"])
def tell(
    request: pytest.FixtureRequest,
    control_plane: ControlPlane,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Story], None]:
    """Runs a story on the real API server or on the fake one."""
    install_job_kind(control_plane)
    monkeypatch.setenv("KUBECONFIG", str(control_plane.admin_kubeconfig))

    async def run(story: Story) -> None:
        if request.param == "fake":
            fake = FakeCluster()
            fake.quotas[namespace] = {"pods": 2}
            await story(fake, namespace)
            return
        quota = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "quota"},
            "spec": {"hard": {"pods": "2"}},
        }
        path = f"/api/v1/namespaces/{namespace}/resourcequotas"
        control_plane.api.create(path, quota)
        wait_for(lambda: control_plane.api.get(f"{path}/quota")["status"].get("used"), "a quota")
        cluster = Cluster(await Access.find(), max_requests=4)
        try:
            await story(cluster, namespace)
        finally:
            await cluster.close()

    return lambda story: asyncio.run(run(story))


def pod(namespace: str, name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {
            "containers": [{"name": "trainer", "image": "none"}],
            "schedulingGates": [{"name": GATE}],
            **spec,
        },
    }


def config_map(namespace: str, name: str, **data: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": data,
    }


async def refusal(asked: Awaitable[object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await asked
    return caught.value


def test_what_is_there_already_is_said_so(tell: Callable[[Story], None]) -> None:
    async def story(api: Api, namespace: str) -> None:
        assert await api.get(CONFIG_MAP, namespace, "a") is None
        made = await api.create(CONFIG_MAP, config_map(namespace, "a", k="v"))
        assert made["metadata"]["uid"]
        error = await refusal(api.create(CONFIG_MAP, config_map(namespace, "a", k="w")))
        assert type(error) is AlreadyExists
        assert (error.reason, error.code) == ("AlreadyExists", 409)
        assert 'configmaps "a" already exists' in error.message
        found = await api.get(CONFIG_MAP, namespace, "a")
        assert found is not None and found["data"] == {"k": "v"}

    tell(story)


def test_a_full_quota_is_told_from_other_refusals(tell: Callable[[Story], None]) -> None:
    async def story(api: Api, namespace: str) -> None:
        for name in ("a", "b"):
            await api.create(POD, pod(namespace, name))
        error = await refusal(api.create(POD, pod(namespace, "c")))
        assert type(error) is QuotaExceeded
        assert (error.reason, error.code) == ("Forbidden", 403)
        assert "exceeded quota: quota, requested: pods=1, used: pods=2" in error.message

    tell(story)


def test_what_is_only_to_be_judged_is_not_made(tell: Callable[[Story], None]) -> None:
    async def story(api: Api, namespace: str) -> None:
        body = pod(namespace, "a")
        judged = await api.create(POD, body, dry_run=True)
        assert judged["metadata"]["name"] == "a"
        assert await api.get(POD, namespace, "a") is None
        await api.create(POD, body)

    tell(story)


def test_gates_are_lifted_once_and_only_from_the_pod_that_was_looked_at(
    tell: Callable[[Story], None],
) -> None:
    async def story(api: Api, namespace: str) -> None:
        made = await api.create(POD, pod(namespace, "a"))

        def lift(uid: str) -> list[dict[str, Any]]:
            selector = {"kubernetes.io/hostname": "n0"}
            return [
                {"op": "test", "path": "/metadata/uid", "value": uid},
                {"op": "add", "path": "/spec/nodeSelector", "value": selector},
                {"op": "remove", "path": "/spec/schedulingGates"},
            ]

        wrong = await refusal(api.json_patch(POD, namespace, "a", lift("another")))
        assert type(wrong) is Conflict
        lifted = await api.json_patch(POD, namespace, "a", lift(made["metadata"]["uid"]))
        assert "schedulingGates" not in lifted["spec"]
        again = await refusal(api.json_patch(POD, namespace, "a", lift(made["metadata"]["uid"])))
        assert type(again) is Conflict
        gone = await refusal(api.json_patch(POD, namespace, "b", lift("x")))
        assert type(gone) is NotFound

    tell(story)


def test_a_pod_without_gates_cannot_get_other_selectors(tell: Callable[[Story], None]) -> None:
    async def story(api: Api, namespace: str) -> None:
        await api.create(POD, pod(namespace, "a", schedulingGates=[]))
        patch = [{"op": "add", "path": "/spec/nodeSelector", "value": {"a": "b"}}]
        error = await refusal(api.json_patch(POD, namespace, "a", patch))
        assert type(error) is Refused
        assert error.code == 422

    tell(story)


def test_a_status_is_written_only_over_the_version_it_was_decided_from(
    tell: Callable[[Story], None],
) -> None:
    async def story(api: Api, namespace: str) -> None:
        body = {**DEMO, "metadata": {"name": "train", "namespace": namespace}}
        assert body["apiVersion"] == API_VERSION and body["kind"] == KIND
        made = await api.create(JOB, body)
        old = made["metadata"]["resourceVersion"]
        status = {"attempt": 1, "planHash": "x", "progress": {"step": 3}}
        first = await api.patch_status(JOB, namespace, "train", status, resource_version=old)
        assert first["status"]["attempt"] == 1
        error = await refusal(
            api.patch_status(JOB, namespace, "train", {"attempt": 9}, resource_version=old)
        )
        assert type(error) is Conflict
        version = first["metadata"]["resourceVersion"]
        change = {"attempt": 2, "planHash": None}
        second = await api.patch_status(JOB, namespace, "train", change, resource_version=version)
        assert (second["status"]["attempt"], second["status"]["progress"]) == (2, {"step": 3})
        assert "planHash" not in second["status"]
        assert second["spec"] == made["spec"]
        same = second["metadata"]["resourceVersion"]
        third = await api.patch_status(JOB, namespace, "train", {}, resource_version=same)
        assert third["metadata"]["resourceVersion"] == same, "nothing was written"

    tell(story)


def test_applying_twice_changes_nothing(tell: Callable[[Story], None]) -> None:
    async def story(api: Api, namespace: str) -> None:
        meta: dict[str, Any] = {"name": "meet", "namespace": namespace, "labels": {"a": "b"}}
        spec = {"clusterIP": "None", "selector": {"x": "y"}}
        body = {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}
        first = await api.apply(body)
        second = await api.apply(body)
        versions = [made["metadata"]["resourceVersion"] for made in (first, second)]
        assert versions[0] == versions[1]
        changed = await api.apply({**body, "metadata": meta | {"labels": {"a": "c"}}})
        assert changed["metadata"]["labels"] == {"a": "c"}
        assert await api.get(SERVICE, namespace, "meet") == changed

    tell(story)


def test_only_the_pod_that_was_looked_at_is_deleted(tell: Callable[[Story], None]) -> None:
    async def story(api: Api, namespace: str) -> None:
        made = await api.create(POD, pod(namespace, "a"))
        await api.delete(POD, namespace, "a", uid="another")
        assert await api.get(POD, namespace, "a") is not None
        await api.delete(POD, namespace, "a", uid=made["metadata"]["uid"])
        assert await api.get(POD, namespace, "a") is None, "no kubelet has to end it"
        await api.delete(POD, namespace, "a", uid=made["metadata"]["uid"])

    tell(story)


def test_a_listing_selects_by_labels_and_says_what_each_object_is(
    tell: Callable[[Story], None],
) -> None:
    async def story(api: Api, namespace: str) -> None:
        for name in ("a", "b"):
            await api.create(POD, pod(namespace, name))
        found = await api.list(POD, namespace)
        assert [body["metadata"]["name"] for body in found] == ["a", "b"]
        assert {(body["apiVersion"], body["kind"]) for body in found} == {("v1", "Pod")}
        for selector in ("app=b", "app"):
            selected = await api.list(POD, namespace, label_selector=selector)
            assert len(selected) == (1 if "=" in selector else 2)

    tell(story)


def test_replacing_needs_the_newest_version(tell: Callable[[Story], None]) -> None:
    async def story(api: Api, namespace: str) -> None:
        meta = {"name": "lead", "namespace": namespace}
        spec: dict[str, Any] = {"holderIdentity": "a", "leaseDurationSeconds": 15}
        first = await api.create(
            LEASE,
            {"apiVersion": LEASE.api_version, "kind": "Lease", "metadata": meta, "spec": spec},
        )
        second = await api.replace(LEASE, {**first, "spec": spec | {"holderIdentity": "b"}})
        assert second["spec"]["holderIdentity"] == "b"
        assert type(await refusal(api.replace(LEASE, {**first, "spec": spec}))) is Conflict

    tell(story)


def test_an_invalid_object_is_refused_in_the_api_servers_words(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(control_plane.admin_kubeconfig))

    async def story() -> None:
        counted: list[tuple[str, str, int]] = []
        cluster = Cluster(
            await Access.find(),
            max_requests=2,
            count=lambda verb, resource, code, _: counted.append((verb, resource, code)),
        )
        error = await refusal(cluster.create(POD, pod(namespace, "Not_A_Name")))
        assert type(error) is Refused
        assert "metadata.name" in error.message and "RFC 1123" in error.message
        missing = await refusal(cluster.create(CONFIG_MAP, config_map("no-such-namespace", "a")))
        assert type(missing) is NotFound
        assert counted == [("create", "pods", 422), ("create", "configmaps", 404)]
        await cluster.close()

    asyncio.run(story())


def test_a_long_listing_comes_in_pages_of_one_moment(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(control_plane.admin_kubeconfig))

    async def story() -> None:
        cluster = Cluster(await Access.find(), max_requests=16)
        names = [f"c{number:04d}" for number in range(510)]
        await asyncio.gather(
            *(cluster.create(CONFIG_MAP, config_map(namespace, name)) for name in names)
        )
        pages = [page async for page in cluster.pages(CONFIG_MAP, namespace)]
        assert len(pages) == 2
        assert len({page.version for page in pages}) == 1
        listed = {body["metadata"]["name"] for page in pages for body in page.items}
        assert set(names) <= listed
        assert await cluster.serves(JOB) or await cluster.serves(NODE)
        await cluster.close()

    asyncio.run(story())


def test_a_short_outage_of_the_api_server_is_waited_for(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(control_plane.admin_kubeconfig))

    async def story() -> None:
        cluster = Cluster(await Access.find(), max_requests=4, patience_s=60)
        restart = asyncio.create_task(asyncio.to_thread(control_plane.restart_api_server))
        written = 0
        while not restart.done():
            await cluster.create(CONFIG_MAP, config_map(namespace, f"c{written}"))
            written += 1
        await restart
        assert written > 0
        await cluster.close()

    asyncio.run(story())
