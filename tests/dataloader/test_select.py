from collections import defaultdict

import pytest

from omni_contract.plan import JobPlan
from omni_contract.spec import Job
from omni_contract.spec_model import Modality
from omni_dataloader.sample_plan import place_step
from omni_dataloader.select import needs, wanted_parts
from omni_planner.compile import compile_plan
from tests.contract.jobs import changed
from tests.dataloader.tables import demo_tables, sample_plan


def demo_plan(*, pipeline: int = 2, nodes: int = 2) -> JobPlan:
    job = changed("spec.parallelism.llm.pipeline", pipeline)
    job["spec"]["resources"]["nodes"] = nodes
    return compile_plan(Job.read(job))


@pytest.mark.parametrize(("pipeline", "nodes"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_every_microbatch_is_read_by_exactly_who_consumes_it(pipeline: int, nodes: int) -> None:
    plan = demo_plan(pipeline=pipeline, nodes=nodes)
    counts: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for node in range(nodes):
        for need in needs(plan, node):
            coords = plan.layout.coords(need.rank)
            assert need.replica == coords.dp_rank
            assert need.tokens == (coords.pp_rank == 0)
            assert need.labels == (coords.pp_rank == pipeline - 1)
            for column, flag in enumerate((need.tokens, need.labels, need.encode)):
                counts[need.replica, need.microbatch][column] += flag
    assert len(counts) == plan.layout.dp_size * plan.num_microbatches
    assert set(map(tuple, counts.values())) == {(1, 1, 1)}


def test_a_node_wants_media_only_for_the_microbatches_its_stage_encodes() -> None:
    plan = demo_plan()
    samples = sample_plan(demo_tables())
    step, _ = samples.step(samples.begin())
    placed = place_step(step, samples.tables, plan)
    media = []
    for node in range(2):
        wanted = wanted_parts(needs(plan, node), placed, samples.tables)
        media.append({part for part in wanted if part[2] is not Modality.TEXT})
        encoded = {
            (source, index, table.modality)
            for microbatch in placed.values()
            if (microbatch.index - 1) % 2 == node  # stage = node here
            for source, _, index, *_ in microbatch.samples.tolist()
            for table in samples.tables[source].media
        }
        assert media[-1] == encoded
    assert media[0] and media[1] and not media[0] & media[1]


def test_a_stage_in_the_middle_reads_no_text() -> None:
    plan = demo_plan(pipeline=4, nodes=4)
    samples = sample_plan(demo_tables())
    step, _ = samples.step(samples.begin())
    placed = place_step(step, samples.tables, plan)
    wanted = wanted_parts(needs(plan, 1), placed, samples.tables)
    assert wanted and all(part[2] is not Modality.TEXT for part in wanted)


def test_spans_follow_their_samples_and_stay_inside_them() -> None:
    plan = demo_plan()
    samples = sample_plan(demo_tables())
    step, _ = samples.step(samples.begin())
    for microbatch in place_step(step, samples.tables, plan).values():
        for row, modality, start, tokens, units, corrupt in microbatch.spans.tolist():
            source, _, index, first, begin, count = microbatch.samples[row].tolist()
            (media,) = samples.tables[source].media
            assert (modality, first, corrupt) == (media.modality.number, 0, 0)
            assert start == begin and tokens < count
            assert (tokens, units) == (media.tokens[index], media.units[index])
