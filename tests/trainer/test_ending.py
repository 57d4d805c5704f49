"""How a pod ends after its supervisor: with which code, class and words, or not at all."""

import json
from typing import Any

import pytest

from omni_contract.names import Exit
from omni_contract.pod_info import Assignment
from omni_contract.records import History, PodEnd
from omni_contract.spec_run import FaultClass, RestartAction
from omni_trainer.supervisor.ending import (
    MESSAGE_BYTES,
    AttemptEnd,
    conclude,
    termination_message,
)
from omni_trainer.supervisor.verdict import Verdict
from tests.trainer.test_supervise import fake_plan
from tests.trainer.test_verdict import failure

PLAN = fake_plan(steps=12)
BEFORE = History(infrastructure_restarts=4)
PART = Assignment(attempt=3, index=1, rendezvous="a:1", history=BEFORE)


def ended(code: int, *, step: int = 5, verdict: Verdict | None = None) -> AttemptEnd:
    return AttemptEnd(
        exit_code=code, generation=2, step=step, message="so it is", verdict=verdict, history=BEFORE
    )


def ruled(kind: Any, code: int, *, rank: int = 2) -> Verdict:
    return Verdict(
        kind=kind, exit_code=code, message="so it is", fault=FaultClass.HANG,
        action=RestartAction.REPLACE_POD, cause=failure(rank, tail=("one", "two")), step=5,
    )  # fmt: skip


def concluded(end: AttemptEnd | None, code: int, *, ran_out: bool = False) -> PodEnd | None:
    return conclude(end, code, part=PART, plan=PLAN, ran_out=ran_out)


def test_a_run_that_is_done_is_no_fault() -> None:
    end = concluded(ended(Exit.OK, step=12), Exit.OK)
    assert end is not None
    assert (end.exit_code, end.fault, end.step, end.history) == (Exit.OK, None, 12, BEFORE)


@pytest.mark.parametrize("rank", [0, 1])
def test_another_node_s_fault_is_waited_out(rank: int) -> None:
    verdict = ruled("new_attempt", Exit.PEER_LOST, rank=rank)
    assert concluded(ended(Exit.PEER_LOST, verdict=verdict), Exit.PEER_LOST) is None


def test_the_node_of_the_cause_ends_with_its_class_and_log() -> None:
    verdict = ruled("new_attempt", Exit.PEER_LOST)
    end = concluded(ended(Exit.PEER_LOST, verdict=verdict), Exit.PEER_LOST)
    assert end is not None
    assert (end.exit_code, end.fault, end.rank) == (Exit.ERROR, FaultClass.HANG, 2)
    assert (end.attempt, end.generation, end.tail) == (3, 2, ("one", "two"))


def test_lost_contact_after_a_restart_in_place_is_waited_out() -> None:
    verdict = ruled("restart", Exit.PEER_LOST)
    assert concluded(ended(Exit.PEER_LOST, verdict=verdict), Exit.PEER_LOST) is None
    assert concluded(ended(Exit.PEER_LOST), Exit.PEER_LOST) is None
    assert concluded(None, Exit.PEER_LOST) is None  # cut off: it ended without a word


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (Exit.GAVE_UP, FaultClass.HANG),
        (Exit.USER, FaultClass.START_ERROR),
        (Exit.STALE, FaultClass.START_ERROR),
    ],
)
def test_the_end_of_the_run_is_the_end_of_every_pod(code: Exit, fault: FaultClass) -> None:
    end = concluded(ended(code, verdict=ruled("end", code)), code)
    assert end is not None
    assert (end.exit_code, end.fault) == (code, fault)
    assert end.message.startswith("so it is")


@pytest.mark.parametrize("ran_out", [False, True])
def test_a_supervisor_that_was_killed_is_named(ran_out: bool) -> None:
    end = concluded(None, -9, ran_out=ran_out)
    assert end is not None
    fault = FaultClass.OOM if ran_out else FaultClass.UNKNOWN
    assert (end.exit_code, end.fault, end.history) == (Exit.ERROR, fault, BEFORE)
    assert end.message == "the supervisor of node 1 failed (killed by SIGKILL)"


def test_a_termination_message_fits_whatever_was_said() -> None:
    line = 'a "quoted" word \u2264 ' * 30
    end = PodEnd(attempt=1, generation=0, exit_code=1, message="short", tail=(line,) * 12)
    text = termination_message(end)
    assert len(text) <= MESSAGE_BYTES
    read = PodEnd.model_validate_json(text)
    assert read.message == "short" and 0 < len(read.tail) < 12
    text = termination_message(end.model_copy(update={"message": "\n" * 9000}))
    assert MESSAGE_BYTES - 20 < len(text) <= MESSAGE_BYTES
    assert json.loads(text)["message"].endswith(" ...")
