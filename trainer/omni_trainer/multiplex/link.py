"""Messages between the stage that encodes a microbatch and stage 0 of the same replica.

Embeddings and gradients each have a process group of their own, so that on NCCL, where messages of
a pair keep one order, neither waits for the other. Headers and sample ids stay on the CPU: they are
compared there, and a GPU need not be waited for.
"""

# Shapes: m healthy spans, n encoder tokens, W hidden size of the language model.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omni_contract.errors import OmniError
from omni_trainer.multiplex.places import Places

_HEADER = 3
"""Numbers in a header: microbatch, spans, tokens."""


@dataclass(slots=True)
class _Incoming:
    header: Tensor
    ids: Tensor
    embeddings: Tensor
    works: tuple[Any, Any, Any]


class EmbeddingLink:
    """One rank's end of the messages. All sends are asynchronous and waited for in `finish`.

    Sender and receiver of a pair post in ascending order of microbatches. Microbatches without
    healthy encoder tokens have no message: both sides see that in their spans.
    """

    def __init__(
        self,
        *,
        stage: int,
        embedding_group: dist.ProcessGroup,
        gradient_group: dist.ProcessGroup,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        source_names: Sequence[str] = (),
    ) -> None:
        self._stage = stage
        self._embedding_group = embedding_group
        self._gradient_group = gradient_group
        self._width, self._dtype, self._device = width, dtype, device
        self._source_names = source_names
        self._incoming: dict[int, _Incoming] = {}
        self._gradients: dict[int, tuple[Tensor, Any]] = {}
        self._sends: list[tuple[Any, Tensor]] = []

    def send_embeddings(self, microbatch: int, places: Places, embeddings: Tensor) -> None:
        """To stage 0: header, ids, embeddings [n, W]. Called on the encoding stage, in order."""
        header = torch.tensor([microbatch, len(places.ids), places.num_tokens])
        parts = (header, torch.from_numpy(places.ids), embeddings.detach().contiguous())
        for part, tensor in enumerate(parts):
            self._send(tensor, 0, self._embedding_group, tag=3 * microbatch + part)

    def post_embeddings(self, microbatch: int, places: Places, *, stage: int) -> None:
        """Post the receives of what `stage` encodes; does not block. Stage 0 only, in order."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        ids = torch.empty(places.ids.shape, dtype=torch.int64)
        embeddings = self._empty(places.num_tokens)
        group, source = self._embedding_group, self._rank(self._embedding_group, stage)
        works = [
            dist.irecv(tensor, source, group=group, tag=3 * microbatch + part)
            for part, tensor in enumerate((header, ids, embeddings))
        ]
        self._incoming[microbatch] = _Incoming(
            header, ids, embeddings, (works[0], works[1], works[2])
        )

    def wait_embeddings(self, microbatch: int, places: Places, *, stage: int) -> Tensor:
        """The embeddings posted before: [n, W]. Blocks; stage 0 only.

        Raises OmniError where the other stage encoded other samples than this one has tokens for.
        """
        incoming = self._incoming.pop(microbatch)
        incoming.works[0].wait()
        expected = [microbatch, len(places.ids), places.num_tokens]
        if incoming.header.tolist() != expected:
            names = ("microbatch", "samples", "tokens")
            told = dict(zip(names, incoming.header.tolist(), strict=True))
            raise OmniError(
                f"microbatch {microbatch}: stage {stage} sent embeddings of {told}, stage 0 "
                f"expects {dict(zip(names, expected, strict=True))}; the data services of the two "
                "stages disagree, restart the job from its last checkpoint"
            )
        incoming.works[1].wait()
        ours = torch.from_numpy(places.ids)
        wrong = (incoming.ids != ours).any(dim=1).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise OmniError(
                f"microbatch {microbatch}: stage {stage} encoded "
                f"{self._sample(incoming.ids[row])} where stage 0 has "
                f"{self._sample(ours[row])}; the data services of the two stages disagree, "
                "restart the job from its last checkpoint"
            )
        incoming.works[2].wait()
        return incoming.embeddings  # [n, W]

    def post_gradient(self, microbatch: int, places: Places) -> None:
        """Post the receive of a gradient from stage 0; the encoding stage only, in order."""
        gradient = self._empty(places.num_tokens)
        source = self._rank(self._gradient_group, 0)
        work = dist.irecv(gradient, source, group=self._gradient_group, tag=microbatch)
        self._gradients[microbatch] = (gradient, work)

    def wait_gradient(self, microbatch: int) -> Tensor:
        """The gradient posted before: [n, W]. Blocks; the encoding stage only."""
        gradient, work = self._gradients.pop(microbatch)
        work.wait()
        return gradient  # [n, W]

    def send_gradient(self, microbatch: int, gradient: Tensor, *, stage: int) -> None:
        """Gradient [n, W] to the stage that encoded; does not block. Stage 0 only, in order."""
        self._send(gradient.contiguous(), stage, self._gradient_group, tag=microbatch)

    def finish(self) -> None:
        """Wait for every send of the step. Blocks."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()
        if self._incoming or self._gradients:
            raise AssertionError(f"messages nobody read: {[*self._incoming, *self._gradients]}")

    def _empty(self, num_tokens: int) -> Tensor:
        return torch.empty(num_tokens, self._width, dtype=self._dtype, device=self._device)

    def _rank(self, group: dist.ProcessGroup, stage: int) -> int:
        return dist.get_global_rank(group, stage)

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup, *, tag: int) -> None:
        work = dist.isend(tensor, self._rank(group, stage), group=group, tag=tag)
        self._sends.append((work, tensor))  # the tensor must outlive the send

    def _sample(self, ids: Tensor) -> str:
        source, epoch, index = ids.tolist()
        known = source < len(self._source_names)
        name = self._source_names[source] if known else f"source {source}"
        return f"{name} epoch {epoch} sample {index}"
