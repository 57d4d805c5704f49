"""Who needs what of a step: the filter that keeps a node from fetching what it does not consume."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from omni_contract.dataflow import stage_of
from omni_contract.plan import JobPlan
from omni_contract.spec_model import Modality
from omni_dataloader.sample_plan import MicrobatchPlan, SourceTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one rank takes from one LLM microbatch. Lengths and places it always takes."""

    rank: int
    replica: int
    microbatch: int
    """From 1."""
    tokens: bool
    """Token ids: the first stage embeds them."""
    labels: bool
    """Labels and loss mask: the last stage computes the loss."""
    encode: bool
    """Encoder inputs: the rank's stage runs this encoder microbatch."""

    @property
    def text(self) -> bool:
        """Whether the texts must be read."""
        return self.tokens or self.labels


def needs(plan: JobPlan, node: int) -> list[Need]:
    """What the ranks of a node take from each microbatch, by rank, then by microbatch."""
    return [
        _need(plan, rank, microbatch)
        for rank in plan.layout.ranks_of_node(node)
        for microbatch in range(1, plan.num_microbatches + 1)
    ]


def _need(plan: JobPlan, rank: int, microbatch: int) -> Need:
    coords = plan.layout.coords(rank)
    encodes = str(microbatch) in plan.dataflow
    return Need(
        rank=rank,
        replica=coords.dp_rank,
        microbatch=microbatch,
        tokens=plan.layout.is_first_stage(rank),
        labels=plan.layout.is_last_stage(rank),
        encode=encodes and stage_of(plan.dataflow, microbatch) == coords.pp_rank,
    )


def wanted_parts(
    ranks: Iterable[Need],
    placed: Mapping[tuple[int, int], MicrobatchPlan],
    tables: Sequence[SourceTable],
) -> set[tuple[int, int, Modality]]:
    """Parts of samples that a node must read: (source number, sample, modality)."""
    parts: set[tuple[int, int, Modality]] = set()
    for need in ranks:
        samples = placed[need.replica, need.microbatch].samples
        for source, _, row, *_ in samples.tolist():
            if need.text:
                parts.add((source, row, Modality.TEXT))
            if need.encode:
                parts.update((source, row, media.modality) for media in tables[source].media)
    return parts
