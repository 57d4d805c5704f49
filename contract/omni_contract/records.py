"""What a run leaves in its folder for people and for `omni`: one JSON document a line."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from omni_contract.spec_model import Modality
from omni_contract.spec_run import FaultClass, RestartAction


class Record(BaseModel):
    """A frozen line of a record file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @classmethod
    def read_all(cls, path: Path) -> list[Self]:
        """Every whole line of a file; a line cut short by a kill is left out; no file, no lines."""
        if not path.exists():
            return []
        records: list[Self] = []
        for line in filter(None, path.read_bytes().split(b"\n")[:-1]):
            try:
                records.append(cls.model_validate_json(line))
            except ValidationError as exc:
                if any(error["type"] != "json_invalid" for error in exc.errors()):
                    raise
        return records


class LossSum(Record):
    """A loss as its two addends, so that sums stay exact."""

    loss: float
    """Sum over loss tokens."""
    tokens: int
    """Loss tokens."""


class StepRecord(Record):
    """One optimizer step, as done. Replays of a step after a restart are further lines."""

    step: int
    attempt: int
    generation: int
    time_s: float
    """Unix time at the end of the step."""
    step_s: float
    """Seconds the step took."""
    loss: float
    """Global loss over loss tokens."""
    loss_by: dict[str, LossSum]
    """By `text` (samples of text alone), `image`, `audio` (samples holding the modality)."""
    grad_norm: float
    learning_rate: float
    tokens: int
    """Sample tokens consumed in this step, modality tokens included, padding not."""
    tokens_by_modality: dict[Modality, int]
    tokens_by_source: dict[str, int]
    weights: dict[str, float]
    """Mixture weights in force, normalised to 1."""
    corrupt_samples: int
    """Samples masked so far."""
    max_live_encoder_microbatches: int
    """Most encoder microbatches alive at once on any rank."""


class ConsumedSample(Record):
    """Where one piece of a sample was consumed."""

    microbatch: int
    source: str
    epoch: int
    index: int
    first_token: int
    """Offset of the piece in its sample, in tokens; 0 unless a document was cut."""
    num_tokens: int
    corrupt: bool = False


class ConsumedRecord(Record):
    """Every sample one rank computed the loss of in one step."""

    step: int
    attempt: int
    generation: int
    rank: int
    samples: list[ConsumedSample]


class RunEvent(Record):
    """One thing that happened to a run."""

    time_s: float
    kind: Literal[
        "started", "rehearsed_fault", "fault", "restart", "recovered", "sidecar_restarted",
        "checkpoint", "checkpoint_failed", "resumed", "completed", "gave_up", "interrupted",
    ]  # fmt: skip
    attempt: int
    generation: int
    message: str
    step: int | None = None
    node: int | None = None
    rank: int | None = None
    fault: FaultClass | None = None
    action: RestartAction | None = None
    seconds: float | None = None


class Progress(Record):
    """The newest state of one rank, for its supervisor."""

    pid: int
    attempt: int
    generation: int
    phase: Literal["starting", "restoring", "training", "saving", "done"]
    step: int
    """Steps finished."""
    time_s: float
    """Unix time when phase or step last changed."""


class OpSpan(Record):
    """One operation of a step as executed."""

    op: Literal["LF", "LB", "EF", "EB", "send", "recv", "reduce", "optimizer"]
    microbatch: int
    start_s: float
    """Seconds since the step began on this rank."""
    end_s: float
    live: int
    """Encoder microbatches alive on the rank when it ended."""


class RankTrace(Record):
    """The timeline of one rank in one step."""

    step: int
    rank: int
    pp_rank: int
    dp_rank: int
    begin_s: float
    """Unix time of the step's begin."""
    spans: list[OpSpan]


class History(Record):
    """The restarts of a job so far, by what they count against. Kept by whoever starts attempts."""

    user_restarts: int = 0
    infrastructure_restarts: int = 0
    restarts_without_progress: int = 0
    """In a row, up to now."""
    highest_step: int = 0
    """Most steps finished when one of the faults struck."""


class JobHeartbeat(Record):
    """What rank 0's supervisor writes into the progress Lease."""

    attempt: int
    generation: int
    phase: Literal["starting", "training", "saving", "done"]
    step: int
    """Optimizer steps finished."""
    step_s: float | None = None
    """Mean seconds of a step over the last minute."""
    tokens: int = 0
    """Tokens consumed since step 1, padding not counted."""
    tokens_per_second: float | None = None
    """Over the last minute."""
    loss: float | None = None
    """Loss of the last step, per loss token."""
    checkpoint_step: int | None = None
    """Newest step a restart would resume from."""
    resumed_step: int | None = None
    """Step that the generation went on from, 0: the beginning; None: it trains not yet."""
    history: History = History()
    """With the restarts in place of this attempt counted."""
    last_fault: FaultClass | None = None
    """Cause of the newest restart in place."""
    last_message: str = ""
    """What was seen then, in a sentence."""


class PodEnd(Record):
    """A trainer container's termination message: why its supervisor ended. At most 4096 bytes."""

    attempt: int
    generation: int
    exit_code: int
    fault: FaultClass | None = None
    """None where all steps are done."""
    step: int = 0
    rank: int | None = None
    message: str = ""
    tail: tuple[str, ...] = ()
    """Last lines of the log of the rank that fell first."""
    history: History = History()
