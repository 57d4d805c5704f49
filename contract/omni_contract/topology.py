"""Where ranks stand: the one mapping between global ranks, pipeline coordinates and nodes."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Coords:
    """Place of a rank: its pipeline stage and its replica."""

    pp_rank: int
    dp_rank: int


class Layout(BaseModel):
    """Sizes of the parallel groups and the rank map built from them.

    Ranks run replica-fastest (megatron's order `tp-cp-ep-dp-pp`): rank = pp_rank * dp_size +
    dp_rank, so a pipeline strides through the world and a stage is a run of ranks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_nodes: int
    ranks_per_node: int
    pp_size: int
    dp_size: int

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_nodes * self.ranks_per_node

    def coords(self, rank: int) -> Coords:
        """Stage and replica of a global rank."""
        return Coords(pp_rank=rank // self.dp_size, dp_rank=rank % self.dp_size)

    def rank_of(self, *, pp_rank: int, dp_rank: int) -> int:
        """Global rank of a stage of a replica."""
        return pp_rank * self.dp_size + dp_rank

    def node_of(self, rank: int) -> int:
        """Index of the node that hosts a rank."""
        return rank // self.ranks_per_node

    def ranks_of_node(self, node: int) -> range:
        """Global ranks of a node, in local order."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def is_first_stage(self, rank: int) -> bool:
        """Whether the rank embeds tokens."""
        return self.coords(rank).pp_rank == 0

    def is_last_stage(self, rank: int) -> bool:
        """Whether the rank computes the loss."""
        return self.coords(rank).pp_rank == self.pp_size - 1
