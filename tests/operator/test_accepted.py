"""Specs that are taken, refused by themselves or for their pods, or edited while the job runs."""

import pytest

from omni_contract.names import ANNOTATION_RESTART as RESTART
from omni_operator.api import ApiError, ApiUnavailable, QuotaExceeded, Refused
from tests.operator.world import World, job

BAD_LABEL = 'Pod "x" is invalid: metadata.labels: Invalid value: "a b": a valid label must be'


def test_an_invalid_spec_is_answered_and_tried_again_only_when_it_changes() -> None:
    with World() as world:
        body = job()
        body["spec"]["batch"]["globalSequences"] = 7
        world.apply(body)
        world.pass_s(100)
        assert world.condition("Accepted") == ("False", "InvalidSpec")
        assert "spec.batch.globalSequences" in world.message("Accepted")
        assert len([w for w in world.cluster.writes if w[0] == "patch_status"]) == 1
        world.edit("stamps", lambda raw: raw["spec"]["batch"].update(globalSequences=16))
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert world.condition("Accepted") == ("True", "Valid")
        assert world.status().observed_generation == 2


def test_a_spec_that_turns_invalid_stops_nothing() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.edit("stamps", lambda raw: raw["spec"].update(nonsense=1))
        world.pass_s(5)
        assert world.condition("Accepted") == ("False", "InvalidSpec")
        assert world.status().phase == "Running"
        world.beat(step=3)
        world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.pass_s(5)
        assert (world.status().attempt, world.status().phase) == (2, "Running")


def refuse_probes(world: World, message: str = BAD_LABEL, code: int = 422) -> None:
    no = Refused(reason="Invalid", message=message, code=code)
    world.cluster.refuses = lambda verb, kind, name: no if verb == "dry-run" else None


def test_a_mistake_in_the_pods_is_told_before_any_is_made_and_mended_by_an_edit() -> None:
    with World() as world:
        refuse_probes(world)
        world.apply(job(podTemplate={"labels": {"team": "a b"}}))
        world.pass_s(30)
        assert world.condition("Accepted") == ("False", "PodRefused")
        said = world.message("Accepted")
        assert said.startswith("spec.podTemplate.labels: ") and BAD_LABEL in said
        assert (world.status().phase, world.status().attempt) == ("Pending", 0)
        assert world.pods() == []
        assert len(world.cluster.dry_runs) == 1
        world.cluster.refuses = lambda verb, kind, name: None
        world.edit("stamps", lambda raw: raw["spec"]["podTemplate"].update(labels={"team": "a"}))
        world.pass_s(5)
        assert world.condition("Accepted") == ("True", "Valid")
        assert world.status().phase == "Running"
        assert len(world.cluster.dry_runs) == 2


def test_pods_that_the_cluster_takes_by_now_are_made_without_an_edit() -> None:
    with World() as world:
        refuse_probes(world, "no PriorityClass with name urgent was found", 403)
        world.apply(job(podTemplate={"priorityClassName": "urgent"}))
        world.pass_s(10)
        assert world.condition("Accepted") == ("False", "PodRefused")
        world.cluster.refuses = lambda verb, kind, name: None
        world.pass_s(100)
        assert world.status().phase == "Running"


def test_pods_are_judged_once_for_a_generation_and_process_and_only_where_they_differ() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=3)
        world.pass_s(60)
        assert len(world.cluster.dry_runs) == 1
        world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.pass_s(5)
        assert world.status().attempt == 2
        world.edit("stamps", lambda raw: raw["spec"].update(ttlSecondsAfterFinished=9))
        world.restart()
        world.pass_s(60)
        assert len(world.cluster.dry_runs) == 1


def test_a_job_goes_on_by_its_plan_while_an_edit_makes_pods_that_are_refused() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=3)
        refuse_probes(world)
        world.edit("stamps", lambda raw: raw["spec"].update(podTemplate={"labels": {"a": "b c"}}))
        world.pass_s(5)
        assert world.condition("Accepted") == ("False", "PodRefused")
        assert world.message("Accepted").endswith("attempt 1 goes on as it was planned")
        before = world.status().plan_hash
        world.edit("stamps", lambda raw: raw["metadata"].update(annotations={RESTART: "now"}))
        world.pass_s(10)
        assert (world.status().attempt, world.status().phase) == (2, "Running")
        assert world.status().plan_hash == before
        assert "a" not in world.pod(0)["metadata"]["labels"]


@pytest.mark.parametrize(
    "error",
    [
        QuotaExceeded(reason="Forbidden", message="exceeded quota: small", code=403),
        Refused(reason="Forbidden", message='cannot create resource "pods"', code=403),
        Refused(reason="BadRequest", message="webhook x does not support dry run", code=400),
        Refused(reason="Forbidden", message="error looking up service account a/b", code=403),
    ],
    ids=["quota", "right", "webhook", "new-namespace"],
)
def test_what_is_not_about_the_pod_does_not_refuse_a_spec(error: ApiError) -> None:
    with World() as world:
        world.cluster.refuses = lambda verb, kind, name: error if verb == "dry-run" else None
        world.apply(job())
        world.pass_s(5)
        assert world.condition("Accepted") == ("True", "Valid")
        assert world.status().phase == "Running"


def test_a_server_that_judges_nothing_now_keeps_nobody_from_a_job_that_runs() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=3)
        silent = ApiUnavailable(reason="Timeout", message="webhook down")
        world.cluster.refuses = lambda verb, kind, name: silent if verb == "dry-run" else None
        world.edit("stamps", lambda raw: raw["spec"].update(podTemplate={"labels": {"a": "b"}}))
        world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.pass_s(5)
        assert (world.status().attempt, world.status().phase) == (2, "Running")


def test_an_edit_that_waits_for_a_restart_says_so_until_there_is_one() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=3)
        assert "edited" not in world.message("Accepted")
        world.edit("stamps", lambda raw: raw["spec"].update(podTemplate={"labels": {"a": "b"}}))
        world.pass_s(10)
        said = world.message("Accepted")
        assert "spec.podTemplate was edited after attempt 1 was planned" in said
        assert "kubectl mmtj restart stamps" in said
        world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.pass_s(10)
        assert world.status().attempt == 2
        assert "edited after attempt 2" in world.message("Accepted")
        world.edit("stamps", lambda raw: raw["metadata"].update(annotations={RESTART: "now"}))
        world.pass_s(10)
        assert "edited" not in world.message("Accepted")
        assert world.pod(0)["metadata"]["labels"]["a"] == "b"


def test_a_server_that_cannot_say_whether_it_takes_the_pods_is_told_until_it_can() -> None:
    words = 'failed calling webhook "pods.example.com": connection refused'
    away = ApiUnavailable(reason="InternalError", message=words, code=500)
    with World() as world:
        key = world.apply(job())
        world.deliver()
        world.cluster.refuses = lambda verb, kind, name: away if verb == "dry-run" else None
        for _ in range(3):
            with pytest.raises(ApiUnavailable):
                world.reconcile(key)
        assert world.condition("Accepted") == ("False", "PodRefused")
        assert words in world.message("Accepted")
        assert len([w for w in world.cluster.writes if w[0] == "patch_status"]) == 1
        world.cluster.refuses = lambda verb, kind, name: None
        world.pass_s(5)
        assert world.condition("Accepted") == ("True", "Valid")
        assert world.status().phase == "Running"
