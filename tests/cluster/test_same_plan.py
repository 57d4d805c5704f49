"""`omni run` and kubectl make the same plan of the same file, or both refuse it."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_contract.errors import SpecError
from omni_contract.jobfile import plain_value, read_document, read_job
from omni_contract.spec import Job
from omni_planner.compile import compile_plan
from tests.cluster.cluster import Cluster
from tests.cluster.job_kind import install_job_kind, jobs_path
from tests.contract.jobs import EXAMPLES

DEMO_TEXT = (EXAMPLES / "demo.yaml").read_text()
NUM_SCALARS = 3000
NAMESPACE = "same-plan"


@pytest.fixture(scope="module")
def plan_namespace(cluster: Cluster) -> Iterator[str]:
    install_job_kind(cluster)
    cluster.create_namespace(NAMESPACE)
    yield NAMESPACE
    cluster.api.delete(f"/api/v1/namespaces/{NAMESPACE}")


def changed_text(old: str, new: str) -> str:
    assert DEMO_TEXT.count(old) == 1, old
    return DEMO_TEXT.replace(old, new)


def hash_by_kubectl(cluster: Cluster, namespace: str, path: Path) -> str | None:
    """Apply the file and compile what the API server kept; None where it is refused."""
    try:
        cluster.kubectl(f"--namespace={namespace}", "apply", f"--filename={path}")
    except RuntimeError:
        return None
    kept = cluster.api.get(f"{jobs_path(namespace)}/stamps")
    cluster.api.delete(f"{jobs_path(namespace)}/stamps")
    return compile_plan(Job.read(kept)).hash


def hash_by_omni(path: Path) -> str | None:
    try:
        return compile_plan(read_job(path)).hash
    except SpecError:
        return None


LEARNING_RATE = ("learningRate: 0.01", "learningRate: @")
NODES = ("nodes: 2", "nodes: @")
TOKENS = ("tokens: 1M ", "tokens: @ ")
EVERY = ("every: 20 steps", "every: @")
UNTIL = ("until: 700k", "until: @")
BOOKS = ("books: 13}}\n      - {weights", "books: @}}\n      - {weights")
SUSPEND = ("spec:\n", "spec:\n  suspend: @\n")
QUEUE = ("spec:\n", "spec:\n  queueName: @\n")
ENV = ("spec:\n", "spec:\n  podTemplate: {env: {A: @}}\n")
SEED = ("seed: 7", "seed: @")
SECONDS = ("spec:\n", "spec:\n  podTemplate: {tolerations: [{key: a, tolerationSeconds: @}]}\n")

SAME = [
    (LEARNING_RATE, "3e-3"), (LEARNING_RATE, "3E-3"), (LEARNING_RATE, ".01"),
    (LEARNING_RATE, "1_0e-3"), (LEARNING_RATE, "1"), (LEARNING_RATE, "1.0"),
    (LEARNING_RATE, "0.1e+1"), (LEARNING_RATE, "1.2345678901234567e-3"),
    (NODES, "0x2"), (NODES, "02"), (NODES, "0o2"), (NODES, "0b10"), (NODES, "2.0"),
    (NODES, "0.2e1"), (NODES, "+2"),
    (TOKENS, "1e6"), (TOKENS, "1_000_000"), (TOKENS, "1000000.0"), (TOKENS, "'1000000'"),
    (TOKENS, "0x100000"), (TOKENS, "04000000"), (TOKENS, "'1.5M'"),
    (EVERY, "20"), (EVERY, "2e1"), (EVERY, "024"), (EVERY, "'20'"), (EVERY, "0x14"),
    (UNTIL, "7e5"), (UNTIL, "'700000'"), (UNTIL, "700_000"),
    (BOOKS, "1e3"), (BOOKS, "010"), (BOOKS, "0.5"),
    (SUSPEND, "on"), (SUSPEND, "no"), (SUSPEND, "y"), (SUSPEND, "False"),
    (QUEUE, "~"), (QUEUE, "null"), (QUEUE, ""), (QUEUE, "'on'"), (QUEUE, "yEs"), (QUEUE, "1:30"),
    (QUEUE, "2026-01-01"), (QUEUE, "="),
    (ENV, "'010'"), (ENV, "'yes'"), (ENV, "''"), (ENV, "3.0.1"),
    (SEED, "1_0"), (SEED, "08"), (SEED, "-0"),
    (SECONDS, "300"), (SECONDS, "3e2"), (SECONDS, "~"), (SECONDS, "0x12c"),
]  # fmt: skip
REFUSED = [
    (LEARNING_RATE, "'3e-3'"), (LEARNING_RATE, ".inf"), (LEARNING_RATE, "1e999"),
    (NODES, "'2'"), (NODES, "2.5"), (NODES, "1:02"), (NODES, "yes"),
    (TOKENS, "'1e6'"), (TOKENS, "'1_000'"), (TOKENS, "1.5"), (TOKENS, "on"),
    (EVERY, "'0x14'"), (EVERY, "1:30"),
    (SUSPEND, "'on'"), (SUSPEND, "1"), (SUSPEND, "oN"),
    (QUEUE, "on"), (QUEUE, "010"), (QUEUE, "1e3"),
    (ENV, "010"), (ENV, "yes"), (ENV, "1.5"),
    (SEED, "99999999999999999999"), (SEED, "1e30"),
]  # fmt: skip


EMPTY = [LEARNING_RATE, SUSPEND, SEED, ENV]


def variant_id(value: object) -> str:
    if isinstance(value, tuple):
        return str(re.sub(r"spec:|[^a-zA-Z]", "", value[1]))
    return str(value) or "empty"


@pytest.mark.parametrize(("field", "value"), SAME, ids=variant_id)
def test_both_read_the_same(
    field: tuple[str, str], value: str, cluster: Cluster, plan_namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(changed_text(field[0], field[1].replace("@", value)))
    ours = hash_by_omni(path)
    assert ours is not None
    assert ours == hash_by_kubectl(cluster, plan_namespace, path)


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=variant_id)
def test_both_refuse(
    field: tuple[str, str], value: str, cluster: Cluster, plan_namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(changed_text(field[0], field[1].replace("@", value)))
    assert hash_by_omni(path) is None
    assert hash_by_kubectl(cluster, plan_namespace, path) is None


@pytest.mark.parametrize("field", EMPTY, ids=variant_id)
def test_an_empty_value_is_refused_where_the_api_server_takes_it_for_left_out(
    field: tuple[str, str], cluster: Cluster, plan_namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(changed_text(field[0], field[1].replace("@", "~")))
    with pytest.raises(SpecError, match="empty value|None"):
        read_job(path)
    assert hash_by_kubectl(cluster, plan_namespace, path) is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("books: {uri", "010: {uri"),
        ("  train:\n", "  train:\n    <<: {seed: 9, precision: bf16}\n"),
        ("seed: 7", "seed: &seed 7\n  storage: {region: us}"),
        ("name: stamps", "name: stamps\n  labels: {a: b}"),
    ],
    ids=["demo", "number-as-name", "merge", "anchor", "labels"],
)
def test_other_forms_are_the_same(
    old: str, new: str, cluster: Cluster, plan_namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    text = changed_text(old, new) if old else DEMO_TEXT
    if new.startswith("010"):
        text = text.replace(" books: ", " 8: ")
    path.write_text(text)
    ours = hash_by_omni(path)
    assert ours is not None
    assert ours == hash_by_kubectl(cluster, plan_namespace, path)


def random_scalars(seed: int) -> list[str]:
    """Text that looks like numbers, truth values and times, or nearly."""
    draw = random.Random(seed)
    parts = [
        "0", "1", "7", "8", "9", "10", "_", ".", "+", "-", "e", "E", "x", "X", "o", "b", "0x", "0b",
        "0o", "e-3", "e+3", "1e", ":", "30", "y", "n", "yes", "No", "on", "OFF", "true", "null",
        "2026", "01", "T", "Z", "f", "A", "00",
    ]  # fmt: skip
    found: dict[str, None] = {}
    while len(found) < NUM_SCALARS:
        text = "".join(draw.choices(parts, k=draw.choice((1, 2, 2, 3, 3, 3, 4, 5))))
        # These are no plain text in YAML, or no number in JSON.
        if text in ("-", ":") or text.endswith(":") or text.startswith(":"):
            continue
        found[text] = None
    return list(found)


def test_any_text_without_quotes_is_read_alike(
    cluster: Cluster, plan_namespace: str, tmp_path: Path
) -> None:
    """A toleration is free in form, so it holds whatever kubectl makes of a value."""
    scalars = random_scalars(seed=4)
    lines = "".join(f"      v{number}: {text}\n" for number, text in enumerate(scalars))
    header = "spec:\n  podTemplate:\n    tolerations:\n    -\n"
    path = tmp_path / "job.yaml"
    path.write_text(changed_text("spec:\n", header + lines))
    said = cluster.kubectl(
        f"--namespace={plan_namespace}",
        "create",
        "--dry-run=server",
        "--output=json",
        f"--filename={path}",
    )
    (theirs,) = json.loads(said)["spec"]["podTemplate"]["tolerations"]
    document = read_document(path.read_text(), name="job.yaml")
    (ours,) = document["spec"]["podTemplate"]["tolerations"]
    different = {
        text: (plain_value(text), theirs[f"v{number}"])
        for number, text in enumerate(scalars)
        if (ours[f"v{number}"], type(ours[f"v{number}"]))
        != (theirs[f"v{number}"], type(theirs[f"v{number}"]))
    }
    assert different == {}, "text: (ours, kubectl's)"
