"""What ranks are served, over real sockets and a real S3 server."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_contract import wire
from omni_contract.plan import JobPlan
from omni_contract.spec_model import Modality
from omni_dataloader.sources import open_data, plan_samples
from omni_dataloader.store import Store
from tests.dataloader.serving import (
    NAMES,
    NUM_STEPS,
    Undisturbed,
    assert_same,
    join_all,
    plan_of,
    take,
    walk,
)
from tests.fakes.sidecar_client import RefusedError, SidecarClient, Step, fake_plan, services


def test_every_sample_is_served_once_to_those_who_need_it(
    shared_store: Store, uri: str, undisturbed: Undisturbed
) -> None:
    plan = plan_of(uri)
    data = open_data(plan.spec, shared_store)
    samples = plan_samples(data, plan)
    state = samples.begin()
    for ranks in undisturbed.steps:
        expected, state = samples.step(state)
        served = [
            tuple(row[[0, 1, 2, 3, 5]].tolist())
            for rank in (2, 3)  # last stage of both replicas
            for microbatch in ranks[rank].microbatches
            for row in microbatch["samples"]
        ]
        assert sorted(served) == sorted(map(tuple, expected.pieces[:, [1, 2, 3, 4, 6]].tolist()))
        assert ranks[0].batch.weights == {name: 0.25 for name in NAMES}
        total = sum(row[4] for row in served)
        assert sum(ranks[0].batch.tokens_by_source.values()) == total
        assert sum(ranks[0].batch.tokens_by_modality.values()) == total


def test_stages_of_a_replica_agree_and_get_only_their_part(undisturbed: Undisturbed) -> None:
    encoder = {"image.patches", "image.grid", "audio.features", "audio.frames"}
    for ranks in undisturbed.steps:
        for replica in (0, 1):
            pairs = zip(ranks[replica].microbatches, ranks[replica + 2].microbatches, strict=True)
            for number, (first, last) in enumerate(pairs, start=1):
                assert (first["samples"] == last["samples"]).all()
                assert (first["spans"] == last["spans"]).all()
                encodes, other = (first, last) if (number - 1) % 2 == 0 else (last, first)
                assert encoder <= encodes.keys() and not encoder & other.keys()
                assert first.keys() - encoder == {"samples", "spans", "tokens"}
                assert last.keys() - encoder == {"samples", "spans", "labels", "loss_mask"}
                check_labels(first, last)
                check_media(encodes)


def check_labels(first: Any, last: Any) -> None:
    """The label of a position is the next token of its piece, where that is text or end."""
    mask, labels, tokens = last["loss_mask"], last["labels"], first["tokens"]
    expected, media, covered = (np.zeros_like(mask) for _ in range(3))
    for _, _, start, count, _, _ in first["spans"].tolist():
        media[start : start + count] = True
    for *_, start, count in first["samples"].tolist():
        expected[start : start + count - 1] = ~media[start + 1 : start + count]
        covered[start : start + count] = True
    assert (mask == expected).all()
    positions = np.flatnonzero(mask)
    assert (labels[positions] == tokens[positions + 1]).all()
    assert (tokens[~covered] == 0).all() and (tokens[covered & ~media] != 0).all()
    assert set(tokens[media].tolist()) <= {2, 3}
    assert not set(tokens[covered & ~media].tolist()) & {2, 3}


def check_media(encodes: Any) -> None:
    spans = encodes["spans"]
    images = spans[spans[:, 1] == Modality.IMAGE.number]
    recordings = spans[spans[:, 1] == Modality.AUDIO.number]
    assert (encodes["image.grid"].prod(axis=1) == images[:, 4]).all()
    assert len(encodes["image.patches"]) == images[:, 4].sum()
    assert (images[:, 4] == 4 * images[:, 3]).all()
    assert (encodes["audio.frames"] == recordings[:, 4]).all()
    assert len(encodes["audio.features"]) == recordings[:, 4].sum()


def test_c11_new_generations_go_on_from_the_saved_state(
    shared_store: Store, uri: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The sidecars live on and rewind; what they made ready ahead changes nothing (C15)."""
    plan = plan_of(uri)
    with services(plan, tmp_path, shared_store) as paths:
        walk(join_all(paths, plan), 1, 5)
        for generation, after in enumerate((4, 0, 1, 5), start=1):
            clients = join_all(
                paths, plan, generation=generation, next_step=after + 1,
                state=undisturbed.states[after - 1] if after else None,
            )  # fmt: skip
            assert_same(walk(clients, after + 1, NUM_STEPS), undisturbed.steps[after:])
            assert clients[0].snapshot(NUM_STEPS) == undisturbed.states[-1]


def test_c11_a_restored_state_may_lie_before_the_step_asked_for(
    shared_store: Store, uri: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    plan = plan_of(uri)
    with services(plan, tmp_path, shared_store) as paths:
        clients = join_all(paths, plan, attempt=3, next_step=5, state=undisturbed.states[1])
        assert_same(walk(clients, 5, NUM_STEPS), undisturbed.steps[4:])


def test_c11_a_state_of_another_seed_is_refused(
    shared_store: Store, uri: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    raw = plan_of(uri).model_dump(mode="json", by_alias=True)
    raw["spec"]["train"]["seed"] = 8
    plan = JobPlan.model_validate(raw)
    with services(plan, tmp_path, shared_store) as paths:
        with pytest.raises(RefusedError, match=r"train\.seed: 8 is not the 7") as refused:
            join_all(paths, plan, next_step=3, state=undisturbed.states[1])
        assert refused.value.refused.reason == "error"
        # Nothing is broken by it: who starts from the beginning is served.
        take(join_all(paths, plan), 1)


def test_c11_a_state_of_another_step_is_refused(
    shared_store: Store, uri: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    plan = plan_of(uri)
    state = undisturbed.states[1].model_copy(update={"next_step": 4})
    with (
        services(plan, tmp_path, shared_store) as paths,
        pytest.raises(RefusedError, match="begins at step 3, the checkpoint says 4"),
    ):
        join_all(paths, plan, next_step=4, state=state)


def test_a_lower_pair_is_refused_and_a_higher_one_sends_the_others_away(
    shared_store: Store, uri: str, tmp_path: Path
) -> None:
    plan = plan_of(uri)
    with services(plan, tmp_path, shared_store) as (path, _):
        old = SidecarClient.join(path, plan, rank=0, attempt=1, generation=5)
        SidecarClient.join(path, plan, rank=1, attempt=2, generation=0)
        with pytest.raises(RefusedError, match="attempt 2 generation 0 has taken over") as refused:
            old.take()
        assert refused.value.refused.reason == "stale"
        for attempt, generation in ((1, 5), (1, 9)):
            with pytest.raises(RefusedError) as refused:
                SidecarClient.join(path, plan, rank=0, attempt=attempt, generation=generation)
            assert refused.value.refused.reason == "stale"


def test_ranks_of_another_plan_node_or_state_are_refused(
    shared_store: Store, uri: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    plan = plan_of(uri)
    with services(plan, tmp_path, shared_store) as (path, _):
        SidecarClient.join(path, plan, rank=0)
        refusals: list[tuple[dict[str, Any], str]] = [
            ({"plan": fake_plan(uri), "rank": 1}, "mismatch"),
            ({"plan": plan, "rank": 2}, "mismatch"),
            ({"plan": plan, "rank": 1, "next_step": 2, "state": undisturbed.states[0]}, "error"),
            ({"plan": plan, "rank": 1, "next_step": 0}, "error"),
        ]
        for hello, reason in refusals:
            with pytest.raises(RefusedError) as refused:
                SidecarClient.join(path, **hello)
            assert refused.value.refused.reason == reason
        garbage = SidecarClient(path)
        garbage.send_raw((5).to_bytes(4, "big") + b"[1,2]")
        with pytest.raises(RefusedError, match="no frame of wire version"):
            garbage.receive()


def test_a_rank_that_joins_again_replaces_its_older_connection(
    shared_store: Store, uri: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    plan = plan_of(uri)
    with services(plan, tmp_path, shared_store) as paths:
        clients = join_all(paths, plan)
        walk(clients, 1, 2)
        older, clients[1] = clients[1], SidecarClient.join(paths[0], plan, rank=1, next_step=3)
        with pytest.raises(RefusedError, match="connected again"):
            older.take()
        assert_same(walk(clients, 3, 4), undisturbed.steps[2:4])


def test_a_rank_that_does_not_release_waits_for_itself_alone(
    shared_store: Store, uri: str, tmp_path: Path
) -> None:
    plan = plan_of(uri)
    with services(plan, tmp_path, shared_store) as paths:
        clients = join_all(paths, plan)
        lazy, others = clients[0], clients[1:]
        for step in (1, 2):
            lazy.ask(step)
            assert isinstance(lazy.take(), Step)
            take(others, step)
        lazy.ask(3)
        take(others, 3)
        with pytest.raises(TimeoutError):
            lazy.take(timeout_s=0.3)
        lazy.release(1)
        answer = lazy.take()
        assert isinstance(answer, Step) and answer.batch.step == 3


def test_c18_the_data_ends_at_the_same_step_for_all(
    shared_store: Store, uri: str, tmp_path: Path
) -> None:
    sources = plan_of(uri).spec.model_dump(mode="json", by_alias=True)["data"]["sources"]
    sources["pictures"]["whenExhausted"] = "stop"
    plan = plan_of(uri, sources=sources)
    with services(plan, tmp_path, shared_store) as paths:
        clients = join_all(paths, plan)
        seen: list[int] = []
        for step in range(1, 50):
            for client in clients:
                client.ask(step)
            answers = [client.take() for client in clients]
            if isinstance(answers[0], wire.EndOfData):
                break
            for client, answer in zip(clients, answers, strict=True):
                assert isinstance(answer, Step)
                client.release(step)
                if "labels" in answer.microbatches[0]:
                    for microbatch in answer.microbatches:
                        rows = microbatch["samples"]
                        seen += rows[rows[:, 0] == NAMES.index("pictures")][:, 2].tolist()
        end = answers[0]
        assert isinstance(end, wire.EndOfData) and answers == [end] * 4 and end.step == step
        assert "data.sources.pictures: all 60 samples are consumed" in end.message
        assert sorted(seen) == list(range(60))
        assert clients[0].snapshot(step - 1).next_step == step


def test_after_the_plan_s_last_step_there_is_none(
    shared_store: Store, uri: str, tmp_path: Path
) -> None:
    plan = plan_of(uri).model_copy(update={"num_steps": 2})
    with services(plan, tmp_path, shared_store) as paths:
        clients = join_all(paths, plan)
        walk(clients, 1, 2)
        clients[0].ask(3)
        expected = wire.EndOfData(step=3, message="all 2 steps of the plan are done")
        assert clients[0].take() == expected


def test_a_failure_of_the_service_itself_is_told_at_once(
    shared_store: Store, uri: str, tmp_path: Path
) -> None:
    """A rank that only sees its connection end asks again for minutes."""
    plan = plan_of(uri)
    broken = ThreadPoolExecutor(1)
    broken.shutdown()
    with services(plan, tmp_path, shared_store, executor=broken) as paths:
        (rank, *_) = join_all(paths, plan)
        rank.ask(1)
        with pytest.raises(RefusedError, match=r"the data service failed \(RuntimeError: ") as told:
            rank.take()
        assert told.value.refused.reason == "error"
