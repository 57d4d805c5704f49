"""EncoderAnchor: attaches encoders to a stage of the language model (paper 4.2).

Which encoder microbatch runs where and when is the dataflow, data that can be exchanged between
steps. The language model's schedule stays megatron's own.
"""

# Shapes: T token positions, n encoder tokens of a microbatch, W hidden size of the language model.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omni_contract.dataflow import Dataflow, Window
from omni_contract.errors import SpecError
from omni_planner.check import check_dataflow
from omni_planner.schedule import Op, OpKind
from omni_trainer.batch import StepInputs
from omni_trainer.encoders.plugin import Encoder
from omni_trainer.multiplex.executor import Executor, Timeline
from omni_trainer.multiplex.work import Embeddings, StagePlace, StageWork


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorConfig:
    """Where an anchor is and how it holds its encoders.

    Raises SpecError for what this version cannot.
    """

    place: StagePlace
    """The stage it attaches to."""
    zero3: bool = False
    """Shard encoder parameters over the ranks of a stage; replicated otherwise."""

    def __post_init__(self) -> None:
        if self.zero3:
            raise SpecError("zero3", "True is not offered; encoders are replicated, leave it out")


cfg = AnchorConfig
"""The name of the paper's listing."""


class EncoderAnchor:
    """Encoders on one stage of the language model.

        anchor = EncoderAnchor([vit, usm], cfg(place=place))
        anchor.dataflow = {"5": (0, [4, 5]), "6": (1, [4, 5]), "-5": (0, [-5, -6]), ...}
        anchor.hook(llm_stage, True)  # in step_func(), before the stage's forward

    Between `begin` and `finish` lies one step. Every stage of a replica must hold the same
    dataflow.
    """

    def __init__(self, encoders: Sequence[Encoder], config: AnchorConfig) -> None:
        self._encoders = list(encoders)
        self._place = config.place
        self._dataflow: dict[str, Window] = {}
        self._ops: tuple[Op, ...] = ()
        self._executor: Executor | None = None
        self._work: StageWork | None = None

    @property
    def dataflow(self) -> Mapping[str, Window]:
        """Encoder microbatch -> (stage, [after, before] LLM microbatch); negative = backward."""
        return self._dataflow

    @dataflow.setter
    def dataflow(self, dataflow: Dataflow) -> None:
        """Take over a dataflow that can run. Raises SpecError that names the entry that cannot."""
        table = check_dataflow(
            num_stages=self._place.num_stages,
            num_microbatches=self._place.num_microbatches,
            dataflow=dataflow,
        )
        self._ops = table[self._place.stage]
        self._dataflow = dict(dataflow)

    def begin(self, inputs: StepInputs, timeline: Timeline) -> None:
        """Begin a step."""
        stage_of = {int(e): stage for e, (stage, _) in self._dataflow.items() if int(e) > 0}
        self._work = StageWork(self._encoders, inputs, self._place, stage_of)
        self._executor = Executor(self._ops, self._work, timeline)

    def hook(self, llm_stage: Any, is_forward: bool) -> Embeddings | None:
        """Tell the anchor where the language model is.

        True: `llm_stage` is about to run its next forward. Opens the slot before it and, on stage
        0, returns the encoder tokens of that microbatch. False: it has just run its next backward;
        the anchor calls this itself, from a hook on the tensor whose gradient comes last.
        """
        executor, work = self._step()
        if not is_forward:
            executor.end_llm(OpKind.LLM_BACKWARD)
            work.end_backward()
            return None
        microbatch = executor.begin_forward()
        embeddings = work.embeddings(microbatch) if self._place.stage == 0 else None
        last = llm_stage.decoder.input_tensor if embeddings is None else embeddings.tokens

        def end_backward(_: Tensor) -> None:
            self.hook(llm_stage, False)

        last.register_post_accumulate_grad_hook(end_backward)
        return embeddings

    def end_forward(self) -> None:
        """The forward that `hook` was called for is done."""
        self._step()[0].end_llm(OpKind.LLM_FORWARD)

    def open_slot(self) -> None:
        """Own pipeline messages are posted; encoder work may run before they are waited for."""
        self._step()[0].open_slot()

    def end_wait(self) -> None:
        """The pipeline messages posted before have arrived."""
        self._step()[0].end_wait()

    def finish(self) -> int:
        """End the step: trailing encoder work, outstanding sends. Blocks.

        Returns the most encoder microbatches that were alive at once.
        """
        executor, work = self._step()
        executor.finish()
        work.finish()
        self._executor = self._work = None
        return executor.max_live

    def _step(self) -> tuple[Executor, StageWork]:
        if self._executor is None or self._work is None:
            raise AssertionError("the anchor is between steps")
        return self._executor, self._work


def merge(embedded: Tensor, embeddings: Embeddings) -> Tensor:
    """Put encoder tokens over their placeholders: [T, 1, W] -> [T, 1, W]; corrupt ones are zero."""
    places, device = embeddings.places, embedded.device
    blanks = torch.from_numpy(places.blanks).to(device)  # [c]
    positions = torch.from_numpy(places.positions).to(device)  # [n]
    embedded = embedded.index_fill(0, blanks, 0.0)  # [T, 1, W]
    return embedded.index_copy(0, positions, embeddings.tokens[:, None])  # [T, 1, W]
