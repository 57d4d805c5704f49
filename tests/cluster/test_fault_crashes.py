"""The operator killed right after each of its writes, on the real control plane, while a job
starts, is struck by a fault, recovers and ends: it all comes out as if nothing had happened."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest

from omni_contract.names import LABEL_JOB, TRAINER_CONTAINER, Exit
from omni_contract.spec_run import FaultClass, RestartAction
from omni_operator.api import Raw
from omni_operator.state import JobKey
from tests.cluster.api import Api, Object
from tests.cluster.control_plane import ControlPlane, Options
from tests.cluster.job_kind import install_job_kind
from tests.cluster.jobs import RANKS_PER_NODE, JobHandle, job_document, name_of
from tests.cluster.mortal import MortalOperator, MortalOperators
from tests.cluster.nodes import Grid, Nodes
from tests.cluster.stories import Seen, Story, Wait, play, returned

LABEL_POOL: Final = "test.megascale-omni.dev/pool"
COMMON: Final = "common"
NUM_PODS: Final = 2
NUM_AT_ONCE: Final = 40
LONG_S: Final = 120.0
_KINDS: Final = ("configmaps", "services", "serviceaccounts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A life of a job with one fault."""

    name: str
    strike: Callable[["Life"], None]
    """What befalls pod 1, or the job."""
    fault: FaultClass | None
    """As it is classified; None: it is none."""
    action: RestartAction | None = None
    """What is done about it."""
    has_own_nodes: bool = False
    """Whether nodes are struck."""
    is_long: bool = False
    """Whether it takes the operator long to say that it is a fault."""
    dies_from_start: bool = False
    """Whether writes are counted from the job's creation, else from the fault."""
    fails: bool = False
    spec: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a life came to."""

    recovered: Mapping[str, Any]
    """Job and objects when it ran again, or failed; nothing in it tells one run from another."""
    end: Mapping[str, Any]
    """And at its end."""
    writes: Sequence[str]
    """Of the operator, if it lived through."""
    deaths: int


class Life:
    """One job and its operator."""

    def __init__(
        self, api: Api, nodes: Nodes, seen: Seen, namespace: str, scenario: Scenario, name: str
    ) -> None:
        self._api = api
        self._namespace = namespace
        self.nodes = nodes
        self.scenario = scenario
        self.job = JobHandle(api, namespace, name, seen=seen)

    def play(self, operators: MortalOperators, die_after: int | None) -> Story[Outcome]:
        """From its creation to its end."""
        operator = operators.add(JobKey(namespace=self._namespace, name=self.job.name))
        try:
            return (yield from self._play(operator, die_after))
        except AssertionError as exc:
            said = f"{exc}\n{self.job.describe()}\nwrites: {operator.writes}"
            raise AssertionError(said) from exc

    def _play(self, operator: MortalOperator, die_after: int | None) -> Story[Outcome]:
        job, scenario = self.job, self.scenario
        if scenario.dies_from_start:
            operator.count_from_now(die_after=die_after)
        job.create(self._document())
        yield self._wait("the job running", lambda: self._runs_in(1))
        job.beat(step=5)
        if not scenario.dies_from_start:
            yield self._rest(operator)
            operator.count_from_now(die_after=die_after)
        scenario.strike(self)
        if scenario.is_long:
            while job.status.attempt == 1:
                operator.ahead_s += 700
                yield self._rest(operator)
        if scenario.fault is None:
            yield self._wait("the job suspended", lambda: job.is_phase("Suspended"))
            job.patch({"spec": {"suspend": False}})
        if scenario.fails:
            yield self._wait("the job failed", lambda: job.is_phase("Failed"))
        else:
            yield self._wait("the job running again", lambda: self._runs_in(2))
            job.beat(step=6)
        yield self._rest(operator)
        recovered = self._all()
        if not scenario.fails:
            job.complete()
            yield self._wait("the job Completed", lambda: job.is_phase("Completed"))
        yield self._wait("no pod left", lambda: not job.living)
        yield self._rest(operator)
        return Outcome(
            recovered=recovered, end=self._all(), writes=operator.writes, deaths=operator.deaths
        )

    def _document(self) -> Object:
        pool = self.job.name if self.scenario.has_own_nodes else COMMON
        spec = {"restart": {"nodeLostAfterSeconds": 2}, **self.scenario.spec}
        return job_document(
            self.job.name,
            nodes=NUM_PODS,
            podTemplate={"nodeSelector": {LABEL_POOL: pool}},
            parallelism={"llm": {"pipeline": 4}, "encoders": {"schedule": "onDemand"}},
            **spec,
        )

    def _wait(self, what: str, is_so: Callable[[], object]) -> Wait:
        return Wait(what=what, is_so=is_so, within_s=LONG_S)

    def _rest(self, operator: MortalOperator) -> Wait:
        looks = operator.looks
        return self._wait("the operator at rest", lambda: operator.looks >= looks + 3)

    def _runs_in(self, attempt: int) -> bool:
        status = self.job.status
        return status.attempt >= attempt and status.holds("Running")

    def _all(self) -> Mapping[str, Any]:
        """All that is there of the job, with nothing in it that differs from run to run."""
        found = {"status": _timeless(self.job.raw["status"]), "pods": self._pods()}
        for plural in _KINDS:
            path = f"/api/v1/namespaces/{self._namespace}/{plural}"
            objects = self._api.list(path, labelSelector=f"{LABEL_JOB}={self.job.name}")
            found[plural] = sorted(map(name_of, objects))
        names = {
            rf"\b{re.escape(self.job.name)}\b(-{self.job.uid5}\b)?": "JOB",
            str(self.job.status.plan_hash): "HASH",  # it covers the job's name
        }
        nameless: Mapping[str, Any] = _nameless(found, names)
        return nameless

    def _pods(self) -> list[Any]:
        return sorted(
            (
                name_of(pod),
                pod["spec"].get("nodeName"),
                pod["status"].get("phase"),
                "deletionTimestamp" in pod["metadata"],
                pod["metadata"]["annotations"],
                bool(pod["spec"].get("schedulingGates")),
            )
            for pod in self.job.pods
        )


def _end(exit_code: int) -> Callable[[Life], None]:
    def strike(life: Life) -> None:
        name = name_of(life.job.pod(1))
        life.job.act.end_container(name, exit_code=exit_code, container=TRAINER_CONTAINER)

    return strike


SCENARIOS: Final = (
    Scenario(
        name="from-start",
        strike=_end(Exit.ERROR),
        fault=FaultClass.APP_ERROR,
        action=RestartAction.REPLACE_POD,
        dies_from_start=True,
    ),
    Scenario(
        name="pod-deleted",
        strike=lambda life: life.job.act.delete(name_of(life.job.pod(1))),
        fault=FaultClass.POD_DELETED,
        action=RestartAction.RESTART_GROUP,
    ),
    Scenario(
        name="node-lost",
        strike=lambda life: life.nodes.kill(life.job.pod(1)["spec"]["nodeName"]),
        fault=FaultClass.NODE_LOST,
        action=RestartAction.REPLACE_POD,
        has_own_nodes=True,
    ),
    Scenario(
        name="hang",
        strike=lambda life: None,
        fault=FaultClass.HANG,
        action=RestartAction.RESTART_IN_PLACE,
        is_long=True,
    ),
    Scenario(
        name="slot-taken",
        strike=lambda life: life.job.act.fail(name_of(life.job.pod(1)), reason="OutOfcpu"),
        fault=FaultClass.PENDING_TIMEOUT,
        action=RestartAction.RESTART_JOB,
    ),
    Scenario(
        name="mistake",
        strike=_end(Exit.USER),
        fault=FaultClass.START_ERROR,
        action=RestartAction.FAIL_JOB,
        fails=True,
    ),
    Scenario(
        name="suspended",
        strike=lambda life: life.job.patch({"spec": {"suspend": True}}),
        fault=None,
    ),
)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
) -> Iterator[Mapping[str, Mapping[int | None, Outcome | Exception]]]:
    """By scenario, by the write after which the operator died (None: it lived)."""
    asked = {item.name for item in request.session.items}
    scenarios = [one for one in SCENARIOS if any(f"[{one.name}]" in name for name in asked)]
    namespace = "crashes"
    with ControlPlane(Options(heartbeat_s=4, node_monitor_grace_s=12)) as control_plane:
        install_job_kind(control_plane)
        control_plane.create_namespace(namespace)
        seen = Seen(control_plane.api, namespace)
        with (
            Nodes(control_plane) as nodes,
            MortalOperators(control_plane, seen, nodes=_is_node_of) as operators,
        ):
            _add_nodes(nodes, [COMMON], num_nodes=NUM_PODS + 2, gpus=100 * RANKS_PER_NODE)

            def live(chosen: Mapping[str, tuple[Scenario, int | None]]) -> dict[str, Any]:
                own = [name for name, (scenario, _) in chosen.items() if scenario.has_own_nodes]
                _add_nodes(nodes, own, num_nodes=NUM_PODS + 1, gpus=RANKS_PER_NODE)
                stories = {
                    name: Life(control_plane.api, nodes, seen, namespace, scenario, name).play(
                        operators, die_after
                    )
                    for name, (scenario, die_after) in chosen.items()
                }
                return play(stories, seen, num_at_once=NUM_AT_ONCE, between=operators.look)

            lived = live({one.name: (one, None) for one in scenarios})
            ends: dict[str, dict[int | None, Outcome | Exception]] = {
                one.name: {None: lived[one.name]} for one in scenarios
            }
            chosen = {
                f"{one.name}-{number}": (one, number)
                for one in scenarios
                if isinstance(end := lived[one.name], Outcome)
                for number in range(1, len(end.writes) + 1)
            }
            for name, end in live(chosen).items():
                scenario, number = chosen[name]
                ends[scenario.name][number] = end
            yield ends


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[one.name for one in SCENARIOS])
def test_a_death_after_any_write_changes_nothing(
    scenario: Scenario, outcomes: Mapping[str, Mapping[int | None, Outcome | Exception]]
) -> None:
    ends = outcomes[scenario.name]
    lived: Outcome = returned(ends[None])
    assert lived.deaths == 0 and len(lived.writes) >= 3
    status = lived.recovered["status"]
    if scenario.fault is not None:
        (incident,) = status["incidents"]
        assert (incident["fault"], incident["action"]) == (scenario.fault, scenario.action)
    assert status["attempt"] == (1 if scenario.fails else 2)
    wrong, num_spared = [], 0
    for number, end in ends.items():
        if number is None:
            continue
        what = f"died after write {number} ({lived.writes[number - 1]})"
        if isinstance(end, Exception):
            wrong.append(f"{what}: {end}")
            continue
        num_spared += not end.deaths
        for when, one, other in (
            ("recovered", end.recovered, lived.recovered),
            ("at its end", end.end, lived.end),
        ):
            wrong += [f"{what}, {when}: {line}" for line in _differences(one, other)]
    assert not wrong, "\n".join(wrong)
    # Two statuses may become one where looks come apart in another way.
    assert num_spared <= 3


def _is_node_of(key: JobKey, raw: Raw) -> bool:
    return raw["metadata"]["labels"].get(LABEL_POOL) in (COMMON, key.name)


def _add_nodes(nodes: Nodes, pools: Sequence[str], *, num_nodes: int, gpus: int) -> None:
    nodes.add(
        replace(spec, labels={**spec.labels, LABEL_POOL: pool}, pods=10_000, cpu=10_000)
        for pool in pools
        for spec in Grid(nodes=num_nodes, gpus=gpus, name=pool)
    )


_TIMES: Final = re.compile(r"Time$|^time$|^openedAt$|^until$|[sS]econds|^goodput$|^progress$")
"""Fields that differ from run to run; progress is written now and then only."""


def _timeless(value: Any) -> Any:
    """A document without times and words, which tell of times."""
    if isinstance(value, dict):
        return {
            key: _timeless(inner)
            for key, inner in value.items()
            if not _TIMES.search(key) and key != "message"
        }
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


def _nameless(value: Any, names: Mapping[str, str]) -> Any:
    """A document in which jobs of all names are alike."""
    if isinstance(value, dict):
        return {key: _nameless(inner, names) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_nameless(inner, names) for inner in value]
    if isinstance(value, str):
        for pattern, common in names.items():
            value = re.sub(pattern, common, value)
    return value


def _differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from _differences(one.get(key), other.get(key), f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _differences(left, right, f"{path}[{number}]")
    elif one != other:
        yield f"{path}: {one!r}, and {other!r} where it lived"
