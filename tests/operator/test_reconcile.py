"""A job's life from apply to its end, on an API server in memory."""

from tests.operator.world import World, job


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
        assert world.pods() == []
