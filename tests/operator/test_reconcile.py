"""A job's life on an API server in memory: reads, writes, and views that are behind."""

import pytest

from omni_contract.names import ANNOTATION_ATTEMPT
from omni_operator.api import ApiError, ApiUnavailable, Refused
from omni_operator.kinds import CONFIG_MAP, EVENT, JOB, LEASE, POD, SERVICE, Kind
from omni_operator.reconcile.reconciler import Reconciler
from omni_operator.state import JobKey
from tests.fakes.fake_cluster import Killed
from tests.operator.world import SETTINGS, World, job, node

KEY = JobKey(namespace="default", name="stamps")
STATUS = ("patch_status", JOB.plural)


def test_a_job_runs_and_completes() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        assert world.status().phase == "Running"
        world.beat(step=3)
        world.pass_s(40)
        assert world.status().progress.step == 3
        world.beat(step=123, phase="done")
        world.complete()
        world.pass_s(5)
        assert world.status().phase == "Completed"
        assert world.status().progress.step == 123
        assert world.pods() == []


def test_a_job_that_waits_for_room_shows_its_phase() -> None:
    with World() as world:
        world.apply(job(nodes=8))
        world.pass_s(5)
        assert world.condition("Placed") == ("False", "NotEnoughNodes")
        assert world.cluster.find(JOB, "stamps")["status"]["phase"] == "Pending"


def test_a_job_is_placed_in_the_turn_that_opens_its_attempt_and_let_go_in_the_next() -> None:
    with World() as world:
        key = world.apply(job())
        world.deliver()
        assert world.reconcile(key) == 0
        uid = world.cluster.find(JOB, "stamps")["metadata"]["uid"]
        assert world.cluster.find(CONFIG_MAP, f"stamps-{uid[:5]}-placement-1") is not None
        assert world.pods() == [], "other jobs are placed before"
        world.reconcile(key)
        assert world.condition("Placed") == ("True", "Placed")
        assert world.condition("GangReady") == ("True", "Released")
        assert [pod["spec"].get("schedulingGates") for pod in world.pods()] == [[]] * 4
        statuses = [write for write in world.cluster.writes if write[:2] == STATUS]
        assert len(statuses) == 2, "one opens the attempt, one tells all that came of it"


def test_a_start_that_takes_long_tells_where_the_pods_go_before_it_is_over() -> None:
    with World() as world:

        def slow(verb: str, kind: Kind, name: str) -> ApiError | None:
            world.cluster.now_s += 2.0 if kind is POD else 0.0
            return None

        key = world.apply(job())
        world.deliver()
        world.cluster.refuses = slow
        world.reconcile(key)
        world.reconcile(key)
        statuses = [write for write in world.cluster.writes if write[:2] == STATUS]
        assert len(statuses) == 3, "one more tells where the pods go"
        assert world.condition("GangReady") == ("True", "Released")


def test_a_start_that_never_gets_on_is_told_all_the_same() -> None:
    """Somebody takes each pod away before it is let go."""
    with World() as world:

        def take(verb: str, kind: Kind, name: str) -> ApiError | None:
            if (verb, kind) == ("patch", POD):
                for pod in world.cluster.names(POD):
                    world.cluster.remove(POD, pod)
                world.deliver()
            return None

        key = world.apply(job())
        world.cluster.refuses = take
        for _ in range(10):
            world.deliver()
            again_s = world.reconcile(key)
            world.cluster.now_s += 1
        assert again_s == 1, "it is not tried all the time"
        assert world.condition("Placed") == ("True", "Placed")
        assert world.condition("GangReady") == ("False", "CreatingPods")


def test_a_start_asks_for_nothing_that_this_process_decided_itself() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.pod(2)
        assert world.cluster.reads == []


def test_a_pod_of_somebody_else_with_the_name_of_one_of_the_job_is_named() -> None:
    with World() as world:
        world.apply(job())
        uid = world.cluster.find(JOB, "stamps")["metadata"]["uid"]
        name = f"stamps-{uid[:5]}-1-0"
        meta = {"name": name, "namespace": "default"}
        spec: dict[str, object] = {"containers": []}
        world.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        world.pass_s(5)
        assert world.condition("Failed") == ("True", "StartError")
        assert f"there is a Pod {name} that is not of this job" in world.message("Failed")
        assert world.pods() == []


def test_a_job_that_takes_long_to_look_at_is_looked_at_more_seldom() -> None:
    """Each of its many pods tells several things while it starts."""
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        now_s = [0.0]

        def tick() -> float:
            now_s[0] += 0.01
            return now_s[0]

        reconciler = Reconciler(
            view=world.view,
            cluster=world.cluster,
            settings=SETTINGS,
            clock=lambda: world.cluster.now_s,
            wake=lambda key: None,
            timer=tick,
        )
        assert world.run(reconciler.reconcile(KEY)) == pytest.approx(SETTINGS.progress_poll_s)
        rest_s = world.run(reconciler.reconcile(KEY))
        assert rest_s is not None
        assert 0 < rest_s <= 0.04
        now_s[0] += 0.04
        assert world.run(reconciler.reconcile(KEY)) == pytest.approx(SETTINGS.progress_poll_s)


def test_a_quiet_reconcile_writes_nothing_and_reads_the_lease_only() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=3)
        world.pass_s(60)
        writes, reads = len(world.cluster.writes), len(world.cluster.reads)
        for _ in range(60):
            world.beat(step=3)  # it saves, say
            world.pass_s(5)
        assert len(world.cluster.writes) == writes
        assert {read[1] for read in world.cluster.reads[reads:]} == {LEASE.plural}
        assert len(world.cluster.reads) - reads <= 31


def test_a_restarted_operator_writes_nothing_about_a_quiet_job_but_its_objects() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=3)
        world.pass_s(60)
        before = world.cluster.find(JOB, "stamps")
        world.restart()
        writes = len(world.cluster.writes)
        world.pass_s(60)
        assert {verb for verb, _, _ in world.cluster.writes[writes:]} <= {"apply"}
        assert world.cluster.find(JOB, "stamps") == before


def test_progress_alone_is_written_every_half_minute() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        writes = len(world.cluster.writes)
        for step in range(1, 61):
            world.beat(step=step)
            world.pass_s(5)
        assert 8 <= len(world.cluster.writes) - writes <= 12


def test_c35_the_status_never_says_running_while_pods_are_pending() -> None:
    with World() as world:
        world.apply(job())
        world.settle()
        assert world.status().phase == "Starting"
        assert world.condition("Running")[0] == "False"
        world.cluster.dead_nodes.add("n1")
        world.pass_s(30)
        assert world.status().phase == "Starting"
        assert "3 of 4 pods" in world.message("Running")
        world.cluster.dead_nodes.clear()
        world.pass_s(2)
        assert world.status().phase == "Running"


def test_deleted_objects_come_back_at_the_next_resync() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=1)
        (service,) = world.cluster.names(SERVICE)
        world.cluster.remove(SERVICE, service)
        world.pass_s(SETTINGS.resync_s + 20, step_s=5)
        assert world.cluster.names(SERVICE) == [service]


def test_a_pod_that_no_admission_takes_fails_the_job_with_its_words() -> None:
    def refuse(verb: str, kind: Kind, name: str) -> ApiError | None:
        if (verb, kind) == ("create", POD):
            return Refused(
                reason="Forbidden", message='violates PodSecurity "restricted"', code=403
            )
        return None

    with World() as world:
        world.cluster.refuses = refuse
        world.apply(job())
        world.pass_s(5)
        assert world.condition("Failed") == ("True", "StartError")
        assert 'violates PodSecurity "restricted"' in world.message("Failed")


def test_a_right_the_operator_lacks_fails_no_job() -> None:
    def refuse(verb: str, kind: Kind, name: str) -> ApiError | None:
        if (verb, kind) == ("create", POD):
            message = 'User "omni" cannot create resource "pods" in API group ""'
            return Refused(reason="Forbidden", message=message, code=403)
        return None

    with World() as world:
        world.apply(job())
        world.cluster.refuses = refuse
        with pytest.raises(Refused):
            world.settle()
        assert world.status().phase != "Failed"
        world.cluster.refuses = lambda verb, kind, name: None
        world.restart()
        world.pass_s(5)
        assert world.status().phase == "Running"


@pytest.mark.parametrize("kind", [CONFIG_MAP, POD, SERVICE, JOB], ids=lambda kind: kind.plural)
def test_a_server_that_does_not_answer_for_a_while_costs_nothing_but_time(kind: Kind) -> None:
    calls = 0

    def refuse(verb: str, of: Kind, name: str) -> ApiError | None:
        nonlocal calls
        calls += of is kind
        if of is kind and calls % 3 == 1:
            return ApiUnavailable(reason="Timeout", message="no answer")
        return None

    with World() as world:
        world.cluster.refuses = refuse
        world.apply(job())
        for _ in range(50):
            try:
                world.pass_s(1)
            except ApiUnavailable:
                world.wake({KEY})
        assert (world.status().phase, world.status().attempt) == ("Running", 1)


def test_a_placement_that_was_never_published_is_not_acted_upon() -> None:
    """The POST failed: pods made by it would not be found again after a crash."""

    def refuse(verb: str, kind: Kind, name: str) -> ApiError | None:
        if verb == "create" and "-placement-" in name:
            return ApiUnavailable(reason="Timeout", message="no answer")
        return None

    with World() as world:
        world.cluster.refuses = refuse
        world.apply(job())
        for _ in range(5):
            with pytest.raises(ApiUnavailable):
                world.settle()
            world.wake({KEY})
        assert world.pods() == []
        world.cluster.refuses = lambda verb, kind, name: None
        world.pass_s(5)
        assert world.status().phase == "Running"


def test_a_placement_that_another_operator_published_first_is_adopted() -> None:
    with World(nodes=8) as first:
        first.apply(job())
        first.pass_s(5)
        (name,) = [n for n in first.cluster.names(CONFIG_MAP) if "-placement-" in n]
        published = first.cluster.find(CONFIG_MAP, name)
    with World(nodes=4) as world:
        for i in range(4, 8):
            world.cluster.put(node(f"m{i}"))
            world.ready(f"m{i}")
        world.apply(job())
        owner = world.cluster.find(JOB, "stamps")["metadata"]["uid"]
        body = {**published, "metadata": {**published["metadata"]}}
        body["metadata"]["ownerReferences"][0]["uid"] = owner

        def slip_in(verb: str, kind: Kind, name_: str) -> ApiError | None:
            if verb == "create" and name_ == name:
                world.cluster.refuses = lambda verb, kind, name: None
                world.cluster.put(body)
            return None

        world.cluster.refuses = slip_in
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert world.nodes_of() == first.nodes_of()


def test_reservations_of_earlier_processes_are_known_before_any_job_is_placed() -> None:
    """Job b's four nodes were chosen, but none of its pods was made when the operator fell."""
    with World(nodes=6) as world:
        world.apply(job("b"))
        world.cluster.kill_after(3)
        with pytest.raises(Killed):
            world.settle()
        assert [write[1] for write in world.cluster.writes] == [
            JOB.plural,
            EVENT.plural,
            CONFIG_MAP.plural,
        ]
        assert world.pods("b") == []
        first = world.apply(job("a"))
        world.restart()
        for _ in range(5):
            world.reconcile(first)  # before anybody looked at b
        assert world.condition("Placed", "a") == ("False", "NotEnoughNodes")
        world.pass_s(5)
        assert world.status("b").phase == "Running"
        assert world.condition("Placed", "a") == ("False", "NotEnoughNodes")


def test_a_view_that_lags_behind_its_own_pods_takes_none_for_deleted() -> None:
    with World() as world:
        world.lags = lambda kind: kind is POD
        world.apply(job())
        for _ in range(40):
            world.deliver()
            world.look()
        assert world.condition("GangReady") == ("True", "Released")
        world.lags = lambda kind: False
        world.pass_s(5)
        assert (world.status().phase, world.status().attempt) == ("Running", 1)


def test_a_pod_is_asked_for_before_it_counts_as_deleted() -> None:
    """A new process whose list of pods is older than its list of jobs."""
    with World() as world:
        world.apply(job())
        world.settle()
        missing = world.pod_name(2)
        world.restart(unlisted={missing})
        world.settle()
        assert world.status().attempt == 1
        assert ("get", "pods", missing) in world.cluster.reads


def test_a_pod_deleted_after_the_release_is_not_made_again_in_its_attempt() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=3)
        gone = world.pod_name(2)
        world.cluster.remove(POD, gone)
        world.pass_s(5)
        assert world.status().attempt == 2
        assert gone not in world.nodes_of()
        created = [name for verb, plural, name in world.cluster.writes if verb == "create"]
        assert created.count(gone) == 1


def test_an_operator_that_lost_its_lead_changes_nothing_that_counts() -> None:
    """It goes by what it saw last: its writes of the status are refused, and the pods it makes stay
    behind their gates and go."""
    with World(nodes=8) as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=3)
        old_view, old = world.view, world.reconciler
        world.restart()
        world.edit(
            "stamps",
            lambda raw: raw["metadata"].update(annotations={"megascale-omni.dev/restart": "1"}),
        )
        world.pass_s(5)
        assert (world.status().attempt, world.status().phase) == (2, "Running")
        before = world.cluster.find(JOB, "stamps")["status"]
        for raw in world.pods():
            old_view.see_pod("ADDED", raw)
        world.run(old.reconcile(KEY))
        world.pass_s(20)
        assert world.cluster.find(JOB, "stamps")["status"]["attempt"] == before["attempt"]
        assert world.status().phase == "Running"
        attempts = {pod["metadata"]["annotations"][ANNOTATION_ATTEMPT] for pod in world.pods()}
        assert attempts == {"2"}


def test_events_tell_what_happened() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        reasons = [event["reason"] for event in world.cluster.objects(EVENT)]
        assert sorted(reasons) == ["AttemptOpened", "Placed", "Running"]


@pytest.mark.parametrize("verb", ["create", "patch"])
def test_what_the_api_server_does_not_take_at_a_start_is_told(verb: str) -> None:
    """Pods that are not made, and pods that are not let go: a webhook may be away for long."""
    words = 'failed calling webhook "pods.example.com": connection refused'

    def refuse(said: str, kind: Kind, name: str) -> ApiError | None:
        is_meant = (said, kind) == (verb, POD)
        return ApiUnavailable(reason="InternalError", message=words, code=500) if is_meant else None

    with World() as world:
        world.apply(job())
        world.cluster.refuses = refuse
        with pytest.raises(ApiUnavailable):
            world.settle()
        assert world.condition("Placed") == ("True", "Placed")
        assert world.condition("GangReady") == ("False", "WritesRefused")
        assert words in world.message("GangReady")
        told = len(world.cluster.writes)
        world.wake({KEY})
        with pytest.raises(ApiUnavailable):
            world.settle()
        assert [write for write in world.cluster.writes[told:] if write[:2] == STATUS] == []
        world.cluster.refuses = lambda said, kind, name: None
        world.wake({KEY})
        world.pass_s(5)
        assert world.condition("GangReady") == ("True", "Released")
        assert world.status().phase == "Running"
