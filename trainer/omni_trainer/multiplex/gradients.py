"""One optimizer step over language model and encoders: reduce, clip, update, save, load.

LLM gradients are summed over the stage's data-parallel group, encoder gradients over the whole
world, whether a rank saw a sample or not. Both are divided by the global number of loss tokens.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omni_contract.errors import OmniError
from omni_contract.spec_model import OptimizerSpec
from omni_trainer.collectives import complete_shards
from omni_trainer.multiplex.shards import ShardFiller, by_name, shard_key

_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(spec: OptimizerSpec, *, tokens: float, total_tokens: int) -> float:
    """The rate after `tokens` of `total_tokens` token positions: warmup, then the decay."""
    if tokens < spec.warmup_tokens:
        return spec.learning_rate * tokens / spec.warmup_tokens
    span = max(1, total_tokens - spec.warmup_tokens)
    done = min(1.0, (tokens - spec.warmup_tokens) / span)
    left = {
        "constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2,
    }[spec.decay]  # fmt: skip
    return spec.min_learning_rate + (spec.learning_rate - spec.min_learning_rate) * left


class JointOptimizer:
    """Gradient buffers and optimizer of everything that learns on this rank.

    `parts` maps `llm` and, where one learns, `encoders` to megatron's DDP wrapper and the names of
    its parameters; `optimizer` is megatron's ChainedOptimizer over both. Where encoder state is
    whole on every rank, `encoder_group` are the ranks to sum encoder gradients over.
    """

    def __init__(
        self,
        *,
        parts: Mapping[str, tuple[Any, list[tuple[str, Tensor]]]],
        optimizer: Any,
        spec: OptimizerSpec,
        encoder_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._parts = parts
        self._encoder_group = encoder_group
        self._optimizer = optimizer
        self._spec = spec
        self._names = {p: name for _, named in parts.values() for name, p in named}
        for _, state, main in self._shards():
            # As AdamW itself would at its first step; so state has one shape from the beginning.
            state["step"] = torch.tensor(0.0)
            state.update({moment: torch.zeros_like(main) for moment in _MOMENTS})

    def zero_gradients(self) -> None:
        """Begin a step."""
        for ddp, _ in self._parts.values():
            ddp.zero_grad_buffer()

    def reduce_encoders(self, num_tokens: int) -> None:
        """Sum encoder gradients over the world and divide by the global loss tokens.

        Collective over the world, after every encoder backward of this rank; blocks.
        """
        if "encoders" not in self._parts:
            return
        ddp, _ = self._parts["encoders"]
        ddp.finish_grad_sync()
        if self._encoder_group is not None:
            for buffer in ddp.buffers:
                dist.all_reduce(buffer.grad_data, group=self._encoder_group)
        ddp.scale_gradients(1.0 / max(num_tokens, 1))

    def update(self, rate: float) -> float:
        """Clip by the one norm and step; returns the norm before clipping.

        Collective over the world; blocks. Gathers the updated parameters.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_mult"]
            group["weight_decay"] = self._spec.weight_decay * group["wd_mult"]
        _, norm, _ = self._optimizer.step()
        return float(norm)

    def gather_gradients(self) -> dict[str, Tensor]:
        """Whole gradients of this stage and of the encoders, before clipping, for diagnosis.

        Collective over the world, between the reductions and `update`, which it does not change.
        """
        gradients: dict[str, Tensor] = {}
        for ddp, named in self._parts.values():
            for buffer in ddp.buffers:
                for bucket in buffer.buckets:
                    complete_shards(bucket.grad_data, buffer.data_parallel_group)
            gradients |= {
                name: _main_grad(p).detach().to("cpu", copy=True)
                for name, p in named
                if p.requires_grad
            }
        return gradients

    def state(self) -> dict[str, dict[str, Any]]:
        """This rank's ZeRO-1 shard on the CPU, by parameter: where it lies and what it holds."""
        return {
            shard_key(name, start, end): {
                "main": main.detach().to("cpu", copy=True),
                "step": state["step"].clone(),
                **{moment: state[moment].to("cpu", copy=True) for moment in _MOMENTS},
            }
            for (name, start, end), state, main in self._shards()
        }

    @torch.no_grad()
    def load(self, saved: Iterable[tuple[str, Mapping[str, Mapping[str, Any]]]]) -> None:
        """Take over state bit for bit from what ranks have saved, however many those were.

        Reads (name, `state` of a rank) until all is there. Raises OmniError where something is
        left out or does not fit.
        """
        fillers = {
            name: (ShardFiller(name, start, end, {"main": main, **_moments(state)}), state)
            for (name, start, end), state, main in self._shards()
        }
        last = "the optimizer"
        for last, shards in saved:
            for name, places in by_name(shards, where=last).items():
                if name not in fillers:
                    continue
                filler, state = fillers[name]
                for start, end, shard in places:
                    if filler.take(start, end, shard, where=last):
                        # A step of its own for each: a shared one counts once per parameter.
                        state["step"] = shard["step"].clone()
            if all(filler.missing is None for filler, _ in fillers.values()):
                return
        missing = [filler.missing for filler, _ in fillers.values() if filler.missing is not None]
        if missing:
            raise OmniError(
                f"{last}: the checkpoint lacks {missing[0]!r}; it is of another model, resume with "
                "the job file it was written by"
            )

    def _shards(self) -> Iterator[tuple[tuple[str, int, int], dict[str, Any], Tensor]]:
        for part in self._optimizer.chained_optimizers:
            torch_optimizer = part.optimizer
            for parameter, (group, order) in part.model_param_group_index_map.items():
                main = torch_optimizer.param_groups[group]["params"][order]
                place = part._get_model_param_range_map(parameter)["param"]
                key = (self._names[parameter], place.start, place.end)
                yield key, torch_optimizer.state[main], main


def _moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {moment: state[moment] for moment in _MOMENTS}


def _main_grad(parameter: Any) -> Tensor:
    gradient: Tensor = parameter.main_grad
    return gradient
