"""API server and Python model judge 2,000 generated jobs alike and say which field is wrong.

Where they differ, the difference is one of those that `DIFFERENCES` explains; all of them are
documents that only Python refuses, and the operator answers those with Accepted=False.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest

from omni_contract.errors import SpecError
from omni_contract.spec import Job, JobSpec
from omni_contract.spec_run import ResourcesSpec
from tests.cluster.api import ApiError, Object, concurrently
from tests.cluster.cluster import Cluster
from tests.cluster.job_kind import install_job_kind, jobs_path
from tests.cluster.job_specs import BASES, KINDS, Case, cases, shown

SEED: Final = 4
NUM_CASES: Final = 2000
NUM_UPDATES: Final = 400

DIFFERENCES: Final[Mapping[str, str]] = {
    r"\(null\)": "the API server drops null where a field is not nullable; a file that says it "
    "is refused, because an empty line is more often a mistake",
    r"not a whole number of tokens|above 10{16};": "CEL does not count what is written as text: "
    "50k, 1.5M",
    r"where the stage before ends": "nor does it compare two such texts",
    r"a container needs a name|the operator sets it (for container|to)": "containers have "
    "Kubernetes' own form, which the schema leaves free",
}
"""What Python refuses and the API server does not, by what Python says, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What both said about a case."""

    case: Case
    ours: Job | SpecError
    theirs: Object | ApiError
    """The object as it would be kept."""


def as_json(value: Any) -> Any:
    """7.0 is 7 in the API server, and when a job file is read."""
    if isinstance(value, dict):
        return {key: as_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_json(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def judged(document: Object) -> Job | SpecError:
    try:
        return Job.read(as_json(document))
    except SpecError as exc:
        return exc


@pytest.fixture(scope="module")
def fuzz_namespace(cluster: Cluster) -> Iterator[str]:
    install_job_kind(cluster)
    cluster.create_namespace("fuzz")
    yield "fuzz"
    cluster.api.delete("/api/v1/namespaces/fuzz")


def tried(
    cluster: Cluster, namespace: str, document: Object, *, validation: str = "Strict"
) -> Object | ApiError:
    """Create without keeping; Strict is what kubectl asks for."""
    query = {"dryRun": "All", "fieldValidation": validation}
    try:
        return cluster.api.request("POST", jobs_path(namespace), document, query=query)
    except ApiError as exc:
        return exc


@pytest.fixture(scope="module")
def verdicts(cluster: Cluster, fuzz_namespace: str) -> list[Verdict]:
    drawn = list(cases(SEED, NUM_CASES))
    answers = concurrently(lambda case: tried(cluster, fuzz_namespace, case.document), drawn)
    return [
        Verdict(case=case, ours=judged(case.document), theirs=answer)
        for case, answer in zip(drawn, answers, strict=True)
    ]


def accepted(verdicts: list[Verdict]) -> list[Case]:
    """Cases that a user can create."""
    return [v.case for v in verdicts if not isinstance(v.theirs, ApiError)]


def test_the_cases_are_of_every_kind_and_of_both_verdicts(verdicts: list[Verdict]) -> None:
    kinds = Counter(change.kind for v in verdicts for change in v.case.changes)
    assert min(kinds[kind] for kind in KINDS) > NUM_CASES / 20
    share = len(accepted(verdicts)) / NUM_CASES
    assert 0.2 < share < 0.8


def test_the_api_server_never_breaks(verdicts: list[Verdict]) -> None:
    """400: unknown fields and no JSON of this kind. 422: everything else that is wrong."""
    broken = [
        f"{shown(v.case)}: {v.theirs}"
        for v in verdicts
        if isinstance(v.theirs, ApiError) and v.theirs.status not in (400, 422)
    ]
    assert broken == []


def unexplained(error: SpecError) -> list[str]:
    known = "|".join(DIFFERENCES)
    return [f"{path}: {said}" for path, said in error.problems if not re.search(known, said)]


def test_what_the_api_server_accepts_python_accepts_or_the_difference_is_explained(
    verdicts: list[Verdict],
) -> None:
    different = []
    for v in verdicts:
        if isinstance(v.theirs, ApiError):
            continue
        if isinstance(v.ours, SpecError):
            different += [f"{shown(v.case)}: {said}" for said in unexplained(v.ours)]
        # What is kept, which the operator reads, has no nulls left to differ about.
        kept = judged(v.theirs)
        if isinstance(kept, SpecError):
            different += [f"{shown(v.case)} as kept: {said}" for said in unexplained(kept)]
            assert "(null)" not in str(kept), shown(v.case)
        elif isinstance(v.ours, Job):
            assert kept.spec == v.ours.spec, shown(v.case)
    assert different == []


def test_every_difference_that_is_explained_occurs(verdicts: list[Verdict]) -> None:
    said = "\n".join(
        str(v.ours)
        for v in verdicts
        if isinstance(v.ours, SpecError) and not isinstance(v.theirs, ApiError)
    )
    assert [words for words in DIFFERENCES if not re.search(words, said)] == []


def test_what_python_accepts_the_api_server_accepts(verdicts: list[Verdict]) -> None:
    different = [
        f"{shown(v.case)}: {v.theirs}"
        for v in verdicts
        if isinstance(v.ours, Job) and isinstance(v.theirs, ApiError)
    ]
    assert different == []


def test_errors_name_a_field_that_was_touched(verdicts: list[Verdict]) -> None:
    silent = []
    for v in verdicts:
        for who, error in (("python", v.ours), ("api", v.theirs)):
            said = str(error.message if isinstance(error, ApiError) else error)
            is_error = isinstance(error, SpecError | ApiError)
            if is_error and not any(field in said for field in v.case.fields):
                silent.append(f"{who}, {shown(v.case)}: {said}")
    assert silent == []


def test_without_strict_validation_unknown_fields_are_dropped(
    cluster: Cluster, fuzz_namespace: str, verdicts: list[Verdict]
) -> None:
    """Only what is unknown: a job that is refused for nothing else is kept without it."""
    alone = [
        v.case
        for v in verdicts
        if {change.kind for change in v.case.changes} == {"unknown"}
        and isinstance(v.ours, SpecError)
        and all("unknown field" in said for _, said in v.ours.problems)
    ]
    assert len(alone) > NUM_CASES / 50
    kept = concurrently(
        lambda case: tried(cluster, fuzz_namespace, case.document, validation="Ignore"), alone
    )
    for case, answer in zip(alone, kept, strict=True):
        assert not isinstance(answer, ApiError), f"{shown(case)}: {answer}"
        found = judged(answer)
        assert isinstance(found, Job), f"{shown(case)}: {found}"


def frozen_fields(spec: Object) -> dict[str, Any]:
    """What may not change, by name."""
    resources = spec.get("resources") or {}
    return {
        **{name: spec.get(name) for name in JobSpec.immutable},
        **{name: resources.get(name) for name in ResourcesSpec.immutable},
        "resources": "resources" in spec,
    }


def test_an_update_is_refused_just_where_it_changes_what_decides_the_training(
    cluster: Cluster, fuzz_namespace: str, verdicts: list[Verdict]
) -> None:
    paths = [f"{jobs_path(fuzz_namespace)}/base-{at}" for at in range(len(BASES))]
    kept = []
    for at, base in enumerate(BASES):
        job = copy.deepcopy(base)
        job["metadata"]["name"] = f"base-{at}"
        kept.append(cluster.api.create(jobs_path(fuzz_namespace), job))
    updates = [v for v in verdicts if not isinstance(v.theirs, ApiError)][:NUM_UPDATES]

    def update(v: Verdict) -> Object | ApiError:
        assert not isinstance(v.theirs, ApiError)
        body = kept[v.case.base] | {"spec": v.theirs["spec"]}
        try:
            return cluster.api.request(
                "PUT",
                paths[v.case.base],
                body,
                query={"dryRun": "All", "fieldValidation": "Strict"},
            )
        except ApiError as exc:
            return exc

    num_refused = 0
    for v, answer in zip(updates, concurrently(update, updates), strict=True):
        assert not isinstance(v.theirs, ApiError)
        before, after = frozen_fields(kept[v.case.base]["spec"]), frozen_fields(v.theirs["spec"])
        touched = {name for name in before if before[name] != after[name]}
        if not touched:
            assert not isinstance(answer, ApiError), f"{shown(v.case)}: {answer}"
            continue
        num_refused += 1
        assert isinstance(answer, ApiError), f"{shown(v.case)}: {touched} may change"
        assert answer.status == 422 and "create a new job" in answer.message, shown(v.case)
        assert any(name in answer.message for name in touched), f"{shown(v.case)}: {answer}"
    assert 0.2 < num_refused / len(updates) < 0.9
