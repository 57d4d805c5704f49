"""One optimizer step over language model and encoders: reduce, clip, update, save, load.

LLM gradients are summed over the stage's data-parallel group, encoder gradients over the whole
world, whether a rank saw a sample or not. Both are divided by the global number of loss tokens.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omni_contract.errors import OmniError
from omni_contract.spec_model import OptimizerSpec
from omni_trainer.collectives import complete_shards

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
            f"{name}[{start}:{end}]": {
                "main": main.detach().to("cpu", copy=True),
                "step": state["step"].clone(),
                **{moment: state[moment].to("cpu", copy=True) for moment in _MOMENTS},
            }
            for (name, start, end), state, main in self._shards()
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, Mapping[str, Any]], *, where: str) -> None:
        """Take over a shard bit for bit. Raises OmniError where it is another layout's."""
        shards = {f"{n}[{a}:{b}]": (state, main) for (n, a, b), state, main in self._shards()}
        check_same_keys(saved, shards, where=where)
        for key, (state, main) in shards.items():
            copy_tensors({"main": main}, {"main": saved[key]["main"]}, where=f"{where}: {key}")
            # A step of its own for each: a shared one counts once per parameter.
            state["step"] = saved[key]["step"].clone()
            moments = {moment: state[moment] for moment in _MOMENTS}
            copy_tensors(moments, {m: saved[key][m] for m in _MOMENTS}, where=f"{where}: {key}")

    def _shards(self) -> Iterator[tuple[tuple[str, int, int], dict[str, Any], Tensor]]:
        for part in self._optimizer.chained_optimizers:
            torch_optimizer = part.optimizer
            for parameter, (group, order) in part.model_param_group_index_map.items():
                main = torch_optimizer.param_groups[group]["params"][order]
                place = part._get_model_param_range_map(parameter)["param"]
                key = (self._names[parameter], place.start, place.end)
                yield key, torch_optimizer.state[main], main


def _main_grad(parameter: Any) -> Tensor:
    gradient: Tensor = parameter.main_grad
    return gradient


def check_same_keys(saved: Mapping[str, Any], expected: Mapping[str, Any], *, where: str) -> None:
    """Raise OmniError that names the difference unless both have the same keys."""
    missing = sorted(expected.keys() - saved.keys())
    extra = sorted(saved.keys() - expected.keys())
    if missing or extra:
        parts = [f"lacks {len(missing)}, such as {missing[0]!r}"] if missing else []
        parts += [f"has {len(extra)} too many, such as {extra[0]!r}"] if extra else []
        raise OmniError(
            f"{where}: the checkpoint {' and '.join(parts)}; it is of another model or layout, "
            "resume with the job file it was written by"
        )


@torch.no_grad()
def copy_tensors(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor], *, where: str) -> None:
    """Copy saved tensors bit for bit into their places. Raises OmniError where they do not fit."""
    check_same_keys(saved, targets, where=where)
    for name, target in targets.items():
        source = saved[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise OmniError(
                f"{where}: {name!r} is {source.dtype} {list(source.shape)} in the checkpoint and "
                f"{target.dtype} {list(target.shape)} in the job; resume with the job file it was "
                "written by"
            )
        target.copy_(source)
