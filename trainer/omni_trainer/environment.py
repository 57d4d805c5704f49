"""Who a rank is: what agent and supervisor tell it through the environment, parsed once."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omni_contract import names
from omni_contract.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pair:
    """(attempt, generation): fences everything; the greater one holds the run."""

    attempt: int
    generation: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Place and surroundings of one rank process."""

    rank: int
    local_rank: int
    world_size: int
    node: int
    pair: Pair
    job_uid: str | None
    """UID of the job in its cluster; None: started by `omni run`."""
    plan: Path
    sidecar: Path
    run_dir: Path
    trace_steps: frozenset[int]
    """Steps whose timeline is written."""

    @classmethod
    def read(cls, env: Mapping[str, str]) -> "RankEnvironment":
        """Parse the environment. Raises SpecError that names the wrong variable."""
        steps = env.get(names.ENV_TRACE_STEPS, "")
        return cls(
            rank=_number(env, "RANK"),
            local_rank=_number(env, "LOCAL_RANK"),
            world_size=_number(env, "WORLD_SIZE"),
            node=_number(env, names.ENV_NODE),
            pair=Pair(
                attempt=_number(env, names.ENV_ATTEMPT),
                generation=_number(env, names.ENV_GENERATION),
            ),
            job_uid=env.get(names.ENV_JOB_UID) or None,
            plan=Path(_text(env, names.ENV_PLAN)),
            sidecar=Path(_text(env, names.ENV_SIDECAR)),
            run_dir=Path(_text(env, names.ENV_RUN_DIR)),
            trace_steps=frozenset(
                _integer(names.ENV_TRACE_STEPS, part) for part in steps.split(",") if part.strip()
            ),
        )


def _text(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise SpecError(
            name, "this variable is not set; ranks are started by omni_trainer.supervise"
        )
    return value


def _number(env: Mapping[str, str], name: str) -> int:
    return _integer(name, _text(env, name))


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SpecError(name, f"{text!r} is no whole number") from None
