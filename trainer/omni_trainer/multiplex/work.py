"""The encoder work of one stage in one step: encode, hand embeddings on, take gradients back."""

# Shapes: n encoder tokens of a microbatch, W hidden size of the language model.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_contract.errors import OmniError
from omni_trainer.batch import StepInputs
from omni_trainer.encoders.plugin import Encoder
from omni_trainer.multiplex.link import EmbeddingLink
from omni_trainer.multiplex.places import Places, places_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Where a rank stands in its replica, and what its tensors look like."""

    stage: int
    num_stages: int
    num_microbatches: int
    width: int
    """Hidden size of the language model."""
    device: torch.device
    dtype: torch.dtype
    link: EmbeddingLink | None
    """Messages to or from stage 0; None where stage 0 is the only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """Encoder tokens of one microbatch where they meet the text."""

    tokens: Tensor
    """[n, W], a leaf: its gradient is what the encoder's backward needs."""
    places: Places


class StageWork:
    """Encoder outputs and gradients that one stage holds during a step.

    On stage 0 it also holds the embeddings of the whole replica, of which at most those of the
    next `2 * num_stages` microbatches are being received.
    """

    def __init__(
        self,
        encoders: Sequence[Encoder],
        inputs: StepInputs,
        place: StagePlace,
        stage_of: Mapping[int, int],
    ) -> None:
        self._encoders = encoders
        self._place = place
        self._stage_of = stage_of
        self._microbatches = {m.index: m for m in inputs.microbatches}
        modalities = [encoder.modality for encoder in encoders]
        learning = [encoder.modality for encoder in encoders if encoder.learns]
        self._places = {
            m.index: places_of(m, modalities, learning=learning) for m in inputs.microbatches
        }
        self._outputs: dict[int, Tensor] = {}
        """Graphs that wait for their backward."""
        self._ready: dict[int, Tensor] = {}
        """Embeddings that stage 0 encoded itself."""
        self._leaves: dict[int, Tensor] = {}
        """Embeddings whose gradient is not used up."""
        self._num_posted = 0
        self._num_backwards = 0
        self._num_flushed = 0

    @property
    def num_live(self) -> int:
        """Encoder microbatches whose activations this rank holds."""
        return len(self._outputs)

    def forward(self, microbatch: int) -> None:
        """Encode a microbatch and send it to stage 0; never blocks on a message."""
        places = self._places[microbatch]
        if not places.num_tokens:
            return
        inputs, device = self._microbatches[microbatch], self._place.device
        output = torch.cat([encoder.encode(inputs, device) for encoder in self._encoders])  # [n, W]
        if len(output) != places.num_tokens:
            raise OmniError(
                f"microbatch {microbatch}: the encoders make {len(output)} tokens of its samples "
                f"where the sample plan has {places.num_tokens}; the data was built for other "
                "encoder settings, run `omni data build` again"
            )
        if self._place.stage == 0:
            self._ready[microbatch] = output.detach()
        else:
            self._link().send_embeddings(microbatch, places, output)
            if places.learns:
                self._link().post_gradient(microbatch, places)
        if places.learns:
            self._outputs[microbatch] = output

    def backward(self, microbatch: int) -> None:
        """Propagate the gradient of a microbatch into the encoders; blocks until it is there."""
        output = self._outputs.get(microbatch)
        if output is None:
            return
        if self._place.stage == 0:
            gradient = self._leaves.pop(microbatch).grad
        else:
            gradient = self._link().wait_gradient(microbatch)
        torch.autograd.backward(output, gradient)
        del self._outputs[microbatch]

    def embeddings(self, microbatch: int) -> Embeddings:
        """What stage 0 merges into a microbatch; blocks until it is there."""
        self._post_receives(microbatch)
        places, stage = self._places[microbatch], self._stage_of[microbatch]
        if not places.num_tokens:
            # A leaf without rows still tells when the backward of this microbatch is done.
            tokens = torch.empty(
                0, self._place.width, device=self._place.device, dtype=self._place.dtype
            )
        elif stage == 0:
            tokens = self._ready.pop(microbatch)
        else:
            tokens = self._link().wait_embeddings(microbatch, places, stage=stage)
        self._leaves[microbatch] = tokens.requires_grad_()
        return Embeddings(tokens=tokens, places=places)

    def end_backward(self) -> None:
        """An LLM backward of this stage is done; they come in ascending order."""
        self._num_backwards += 1

    def flush(self) -> None:
        """Send the gradients of finished LLM backwards to where they were encoded."""
        if self._place.stage != 0:
            return
        for microbatch in range(self._num_flushed + 1, self._num_backwards + 1):
            stage = self._stage_of[microbatch]
            is_wanted = self._places[microbatch].learns
            if is_wanted and stage == 0:
                continue  # its own backward takes it
            leaf = self._leaves.pop(microbatch)
            if is_wanted:
                if leaf.grad is None:
                    raise AssertionError(f"microbatch {microbatch} has no gradient to send")
                self._link().send_gradient(microbatch, leaf.grad, stage=stage)
        self._num_flushed = self._num_backwards

    def finish(self) -> None:
        """Wait for every message of the step."""
        if self._place.link is not None:
            self._place.link.finish()
        if self._outputs or self._ready or self._leaves:
            left = [*self._outputs, *self._ready, *self._leaves]
            raise AssertionError(f"encoder microbatches {left} were left over")

    def _post_receives(self, microbatch: int) -> None:
        last = min(microbatch + 2 * self._place.num_stages - 1, self._place.num_microbatches)
        for ahead in range(self._num_posted + 1, last + 1):
            places, stage = self._places[ahead], self._stage_of[ahead]
            if stage != 0 and places.num_tokens:
                self._link().post_embeddings(ahead, places, stage=stage)
        self._num_posted = max(self._num_posted, last)

    def _link(self) -> EmbeddingLink:
        if self._place.link is None:
            raise AssertionError("a pipeline of one stage has no messages")
        return self._place.link
