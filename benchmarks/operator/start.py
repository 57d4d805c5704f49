"""How fast jobs are planned, started and restarted, against pods that need no operator."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.operator.figures import Figure
from benchmarks.operator.jobs import big_job, small_job
from benchmarks.operator.scene import NAMESPACE, Scene, audit_s
from omni_contract.names import ANNOTATION_RESTART, PLURAL
from tests.cluster.api import Object, concurrently
from tests.cluster.job_kind import jobs_path
from tests.cluster.jobs import attempt_of, index_of, name_of, uid_of

LABEL_BARE: Final = "bench.megascale-omni.dev/set"
LABEL_ALL_BARE: Final = "bench.megascale-omni.dev/bare"

SMALL_NODES: Final = 8
"""Of a small job: a rack, so that all together fill nine tenths of the cluster."""

_SERVER_FIELDS: Final = ("nodeName", "serviceAccount", "schedulingGates")


def measure_first_start(
    scene: Scene, *, num_nodes: int, num_small: int, user: str
) -> Iterator[Figure]:
    """One large job and many small ones, all created at once."""
    bodies = [big_job("first", num_nodes=num_nodes)]
    bodies += [small_job(f"small-{i}", num_nodes=SMALL_NODES) for i in range(num_small)]
    num_pods = num_nodes + num_small * SMALL_NODES
    before, begin_s = scene.usage(), time.time()
    concurrently(lambda body: scene.api.create(jobs_path(NAMESPACE), body), bodies)
    end_s = scene.when_running(num_pods, is_of_attempt(None, 1), "all jobs")
    scene.say(f"{len(bodies)} jobs with {num_pods} pods run after {end_s - begin_s:.1f} s")
    # Its watch and its status go on for a moment.
    time.sleep(5)
    used = scene.usage().cpu_s - before.cpu_s
    requests = scene.audited(user, since_s=begin_s, until_s=time.time())
    creations = scene.audited_creations()
    plans = {name_of(body): _times_to_plan(scene, creations, name_of(body)) for body in bodies}
    small = [plans[f"small-{i}"].taken_up_s for i in range(num_small)]
    together = f"{len(bodies)} jobs created at once"
    from_to = (
        "from the operator's first request about it to the API server's answer to its placement"
    )
    yield Figure(
        name=f"to plan the job of {num_nodes}",
        value=plans["first"].taken_up_s,
        unit="s",
        goal=1,
        how=f"{from_to}, by the audit log; {together}",
    )
    yield Figure(
        name="to plan a small job",
        value=max(small, default=0),
        unit="s",
        goal=1,
        how=f"{from_to}, by the audit log; {together}; the worst, median "
        f"{statistics.median(small or [0]):.2f} s",
    )
    yield Figure(
        name="to plan the last of all jobs",
        value=max(plan.created_s for plan in plans.values()),
        unit="s",
        how=f"from the API server's answer to its creation, so with its wait for the others; "
        f"{together}; the job of {num_nodes} {plans['first'].created_s:.2f} s",
    )
    yield Figure(
        name=f"to have {len(bodies)} jobs running",
        value=end_s - begin_s,
        unit="s",
        how=f"{num_pods} pods, {together}, to the last one Running",
    )
    kinds = Counter(f"{one['verb']} {one['objectRef']['resource']}" for one in requests)
    most = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(12))
    yield Figure(
        name="API requests per pod",
        value=len(requests) / num_pods,
        unit="requests",
        goal=3,
        how=f"all {len(requests)} requests of the operator's account until all run, by the audit "
        f"log: {most}",
    )
    yield Figure(
        name="CPU of the operator per pod started",
        value=1000 * used / num_pods,
        unit="ms",
        how="until all run, its watches included",
    )


def measure_starts(scene: Scene, *, num_nodes: int, times: int) -> Iterator[Figure]:
    """The large job and its pods without it, by turns; then all of it once more."""
    pods = [bare_pod(pod) for pod in scene.pods(is_of_attempt(_uid(scene, "first"), 1))]
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "bare"}}
    scene.api.create(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", account)
    scene.api.create(f"/api/v1/namespaces/{NAMESPACE}/services", _service())
    delete_job(scene, "first")
    starts: dict[str, list[float]] = {"job": [], "bare": []}
    restarts: dict[str, list[float]] = {"job": [], "bare": []}

    def run_job(turn: int) -> None:
        name = f"big-{turn}"
        begin_s = time.time()
        uid = start_big_job(scene, name, num_nodes)
        starts["job"].append(time.time() - begin_s)
        body = {"metadata": {"annotations": {ANNOTATION_RESTART: str(turn)}}}
        begin_s = time.time()
        scene.api.patch(f"{jobs_path(NAMESPACE)}/{name}", body)
        end_s = scene.when_running(num_nodes, is_of_attempt(uid, 2), "a job after its restart")
        restarts["job"].append(end_s - begin_s)
        delete_job(scene, name)

    def run_bare(turn: int) -> None:
        first, second = (renamed(pods, f"bare-{turn}-{i}") for i in (1, 2))
        begin_s = scene.act_barely(create=first)["begin_s"]
        end_s = scene.when_running(num_nodes, is_bare(f"bare-{turn}-1"), "bare pods")
        starts["bare"].append(end_s - begin_s)
        begin_s = scene.act_barely(delete=[name_of(pod) for pod in first], create=second)["begin_s"]
        end_s = scene.when_running(num_nodes, is_bare(f"bare-{turn}-2"), "bare pods, once more")
        restarts["bare"].append(end_s - begin_s)
        scene.delete_pods(is_bare(f"bare-{turn}-2"))

    for turn in range(times):
        for run in (run_job, run_bare) if turn % 2 else (run_bare, run_job):
            run(turn)
        scene.say(
            f"started: job {starts['job'][-1]:.1f} s, bare {starts['bare'][-1]:.1f} s; "
            f"again: job {restarts['job'][-1]:.1f} s, bare {restarts['bare'][-1]:.1f} s"
        )
    yield from _against(
        f"to start {num_nodes} pods", starts, goal=1.25, other="the same pods without gates"
    )
    yield from _against(
        f"to restart {num_nodes} pods", restarts, goal=1.2, other="deleting and creating them"
    )


def start_big_job(scene: Scene, name: str, num_nodes: int) -> str:
    """Create the large job and wait until it runs. Returns its uid."""
    job = scene.api.create(jobs_path(NAMESPACE), big_job(name, num_nodes=num_nodes))
    uid = uid_of(job)
    scene.when_running(num_nodes, is_of_attempt(uid, 1), f"job {name}")
    return uid


def delete_job(scene: Scene, name: str) -> None:
    """Delete a job and wait until its pods are gone."""
    uid = _uid(scene, name)
    scene.api.delete(f"{jobs_path(NAMESPACE)}/{name}")
    scene.when_gone(is_of_attempt(uid, None))


def is_of_attempt(uid: str | None, attempt: int | None) -> Callable[[Object], bool]:
    """Whether a pod is a ranked one of a job (None: any of ours) in an attempt (None: any)."""

    def is_meant(pod: Object) -> bool:
        owners = pod["metadata"].get("ownerReferences") or [{"kind": "", "uid": ""}]
        if owners[0]["kind"] != "MultimodalTrainingJob" or uid not in (None, owners[0]["uid"]):
            return False
        return attempt is None or (attempt_of(pod) == attempt and index_of(pod) is not None)

    return is_meant


def is_bare(name: str) -> Callable[[Object], bool]:
    """Whether a pod belongs to a set of bare ones."""
    return lambda pod: (pod["metadata"].get("labels") or {}).get(LABEL_BARE) == name


def bare_pod(pod: Object) -> Object:
    """A pod as the operator made it, without its gate and owner, and bound to its node's name."""
    meta = pod["metadata"]
    spec = {key: value for key, value in pod["spec"].items() if key not in _SERVER_FIELDS}
    spec["serviceAccountName"] = "bare"
    spec["volumes"] = [
        volume for volume in spec.get("volumes", ()) if "kube-api-access" not in volume["name"]
    ]
    assert spec["nodeSelector"]["kubernetes.io/hostname"], "it was let go"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": meta["name"],
            "namespace": NAMESPACE,
            "labels": meta["labels"],
            "annotations": meta["annotations"],
        },
        "spec": spec,
    }


def renamed(pods: Sequence[Object], name: str) -> list[Object]:
    """The same pods as a set of their own."""
    return [
        {
            **pod,
            "metadata": {
                **pod["metadata"],
                "name": f"{name}-{i}",
                "labels": {LABEL_BARE: name, LABEL_ALL_BARE: "true"},
            },
        }
        for i, pod in enumerate(pods)
    ]


def _service() -> Object:
    """What the pods of any training job need to find each other: the control plane keeps addresses
    of bare pods, too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "bare"},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_ALL_BARE: "true"},
            "ports": [{"name": "rendezvous", "port": 29400}, {"name": "data", "port": 29500}],
        },
    }


def _against(
    name: str, seconds: dict[str, list[float]], *, goal: float, other: str
) -> Iterator[Figure]:
    job, bare = (statistics.median(seconds[kind]) for kind in ("job", "bare"))
    told = "; ".join(
        f"{kind}: {', '.join(f'{one:.1f}' for one in found)} s" for kind, found in seconds.items()
    )
    yield Figure(name=name, value=job, unit="s", how=told)
    yield Figure(
        name=f"{name}, over {other}",
        value=job / bare,
        unit="times",
        goal=goal,
        how=f"medians, by turns in the same run; best over best "
        f"{min(seconds['job']) / min(seconds['bare']):.2f}; {told}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """Seconds until a job was planned."""

    created_s: float
    """From its creation."""
    taken_up_s: float
    """From the operator's first request about it."""


def _times_to_plan(
    scene: Scene, creations: Mapping[tuple[str, str], Mapping[str, Any]], name: str
) -> _Planned:
    base = f"{name}-{_uid(scene, name)[:5]}"
    made = creations[PLURAL, name]
    begun = creations["pods", f"{base}-check"]  # whether its pods would be taken
    placed_s = audit_s(creations["configmaps", f"{base}-placement-1"])
    return _Planned(
        created_s=placed_s - audit_s(made),
        taken_up_s=placed_s - audit_s(begun, "requestReceivedTimestamp"),
    )


def _uid(scene: Scene, name: str) -> str:
    (uid,) = [uid_of(job) for job in scene.jobs() if name_of(job) == name]
    return uid
