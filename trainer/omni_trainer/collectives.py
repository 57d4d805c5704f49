"""The few collectives of the trainer that are not megatron's, each with its contract."""

# Shapes: R ranks of the group, n numbers a rank.

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_rows(row: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Every rank's row on every rank: [n] -> [R, n], in rank order.

    Collective over `group` (default: the world), with the same n and type everywhere; blocks. As
    every rank then reduces in the same order, sums are the same bits everywhere. Not
    differentiable.
    """
    out = row.new_empty(dist.get_world_size(group) * len(row))  # [R*n]
    dist.all_gather_single(out, row, group=group)
    return out.view(-1, len(row))  # [R, n]


def make_replica_group(replicas: list[list[int]]) -> ProcessGroup:
    """A fresh process group of the replica that this rank is in.

    Collective over the world: every rank calls it with the same list of the ranks of each replica.
    """
    rank = dist.get_rank()
    mine: ProcessGroup | None = None
    for ranks in replicas:
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    if mine is None:
        raise AssertionError(f"rank {rank} is in no replica of {replicas}")
    return mine


def connect(
    pairs: Sequence[tuple[int, int]], device: torch.device, group: ProcessGroup | None = None
) -> None:
    """Open the connections of `group` (default: the world) between pairs of global ranks, in turn.

    NCCL opens one at its first message and blocks both ends until the other comes to it, even in a
    send or receive that does not block afterwards. In the middle of a schedule that is a deadlock:
    the other end may first need something that this rank has yet to do.

    Every rank of a pair calls it with the same list; blocks; one number a pair.
    """
    rank = dist.get_rank()
    box = torch.zeros(1, device=device)
    for sender, receiver in pairs:
        if rank == sender:
            dist.send(box, receiver, group=group)
        elif rank == receiver:
            dist.recv(box, sender, group=group)


def take_shard(flat: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's equal part of a flat buffer, a view: [R*n] -> [n]. No message."""
    return flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)]  # [n]


def complete_shards(flat: Tensor, group: ProcessGroup) -> None:
    """Fill a flat buffer [R*n] in which each rank holds only its own part, in place.

    Collective over `group`, same size everywhere; blocks; each rank sends its part.
    """
    part = take_shard(flat, group).clone()  # [n]
    dist.all_gather_single(flat, part, group=group)
