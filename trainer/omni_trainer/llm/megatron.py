"""The only door to megatron-core: the language model's stage, its schedule and the optimizers.

Import it only after `Device.open`, which may have to give torch.cuda a CPU face first.
"""

# Shapes: T token positions of a microbatch, W hidden size of the language model.

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from omni_contract.errors import OmniError
from omni_contract.plan import JobPlan
from omni_contract.spec_model import OptimizerSpec
from omni_contract.topology import Layout
from omni_trainer.collectives import connect
from omni_trainer.llm.attention import PackedCausalAttention, cumulative
from omni_trainer.weights import initialize

StepFunc = Callable[[Iterator[Any], nn.Module], tuple[Tensor, Callable[..., Any]]]


class Slots(Protocol):
    """What the communicator tells of its waits."""

    def open_slot(self) -> None:
        """Own messages are posted; other work may run before the wait."""

    def end_wait(self) -> None:
        """Everything posted has arrived."""


@dataclass
class Blocks(PackedSeqParams):
    """Attention blocks of a microbatch, in the form that megatron hands through its layers."""

    lengths: tuple[int, ...] = ()


def blocks_of(lengths: Sequence[int], device: torch.device) -> Blocks:
    """The blocks of a packed microbatch; rotary positions restart in each."""
    bounds = cumulative(lengths, device)
    longest = max(lengths)
    return Blocks(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest,
        max_seqlen_kv=longest, lengths=tuple(lengths),
    )  # fmt: skip


def initialize_parallel(layout: Layout, *, seed: int) -> None:
    """Make megatron's process groups. Collective over the world, once per process."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=layout.pp_size,
        create_gloo_process_groups=False,
        order="tp-cp-ep-dp-pp",
    )
    rank = dist.get_rank()
    coords = layout.coords(rank)
    found = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    if found != (coords.pp_rank, coords.dp_rank):
        raise AssertionError(f"rank {rank} is at {found} for megatron, at {coords} in the plan")
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def connect_stages(device: torch.device) -> None:
    """Open the connections of neighbouring stages before a schedule needs them, see `connect`.

    Collective over the world, after `initialize_parallel`.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    pairs = list(pairwise(dist.get_process_group_ranks(group)))
    connect(pairs, device, group)
    if len(pairs) == 1:  # of two stages megatron sends one direction over the world's group
        connect(pairs, device)


def release_parallel() -> None:
    """Forget megatron's process groups, before the process group itself is destroyed."""
    parallel_state.destroy_model_parallel()


def transformer_config(plan: JobPlan, dtype: torch.dtype) -> Any:
    """The language model of a plan in megatron's words: a LLaMA, no dropout, no biases."""
    llm = plan.spec.model.llm
    return TransformerConfig(
        num_layers=llm.layers,
        hidden_size=llm.hidden_size,
        num_attention_heads=llm.heads,
        num_query_groups=llm.num_kv_heads,
        ffn_hidden_size=llm.num_ffn,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=plan.layout.pp_size,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        perform_initialization=False,  # `weights.initialize` does it
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        # A slot opens between posting a message and waiting for it.
        batch_p2p_comm=False,
        overlap_p2p_comm=False,
        deallocate_pipeline_outputs=True,
        cuda_graph_scope=[],  # its default warns that it is deprecated
    )


def build_stage(plan: JobPlan, *, device: torch.device, dtype: torch.dtype) -> Any:
    """This rank's pipeline stage as a GPTModel, with starting weights that depend on the seed."""
    llm = plan.spec.model.llm
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedCausalAttention
    model = GPTModel(
        transformer_config(plan, dtype),
        spec,
        llm.vocab_size,
        plan.microbatch_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    seed = plan.spec.train.seed
    initialize(global_parameters(model), seed=seed, num_layers=llm.layers)
    model.requires_grad_(llm.train == "full")
    return model.to(device=device, dtype=dtype)


def global_parameters(model: Any) -> list[tuple[str, Tensor]]:
    """Parameters of a stage under the names they have in the whole model."""
    named = []
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        named.append((f"llm.{'.'.join(parts)}", parameter))
    return named


def embed(stage: Any, tokens: Tensor) -> Tensor:
    """Token embeddings on the first stage: [T] -> [T, 1, W]."""
    embedded: Tensor = stage.embedding(input_ids=tokens[None], position_ids=None)
    return embedded  # [T, 1, W]


def run_stage(
    model: nn.Module, *, embedded: Tensor | None, labels: Tensor | None, blocks: Blocks
) -> Tensor:
    """One forward: hidden states [T, 1, W], on the last stage the loss of each position [1, T]."""
    output: Tensor = model(
        input_ids=None,
        position_ids=None,
        attention_mask=None,
        decoder_input=embedded,
        labels=None if labels is None else labels[None],
        packed_seq_params=blocks,
    )
    return output


def wrap_llm(stage: Any) -> Any:
    """Flat gradient buffers of the stage, reduced over its data-parallel group."""
    return DistributedDataParallel(stage.config, _ddp_config(), stage, disable_bucketing=True)


def wrap_encoders(config: Any, encoders: nn.Module, *, is_sharded: bool) -> Any:
    """Flat gradient buffers of all encoders. Sharded (ZeRO-1) over the world, they are summed over
    it by the wrapper; whole on every rank, the caller sums them."""
    groups = _encoder_groups(is_sharded=is_sharded)
    return DistributedDataParallel(
        config, _ddp_config(), encoders, disable_bucketing=True, pg_collection=groups
    )


def _ddp_config() -> Any:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        average_in_collective=False,
    )


def _encoder_groups(*, is_sharded: bool) -> Any:
    """Groups over which optimizer state of the encoders is spread: the world, or nobody."""
    groups = ProcessGroupCollection()
    alone = parallel_state.get_tensor_model_parallel_group()
    owners = dist.group.WORLD if is_sharded else alone
    groups.dp = groups.dp_cp = groups.intra_dist_opt = owners
    groups.tp = groups.ep = groups.expt_dp = groups.mp = groups.tp_ep_pp = groups.pp = alone
    return groups


def make_optimizer(
    spec: OptimizerSpec,
    *,
    llm: Any,
    encoders: Any | None,
    is_sharded: bool,
    learning_rate_scales: Mapping[str, float],
    dtype: torch.dtype,
) -> Any:
    """AdamW over both, with one norm to clip by; ZeRO-1 but for encoders that are not sharded.

    Collective over the world. `learning_rate_scales` are by submodule of `encoders`.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=spec.learning_rate,
        min_lr=spec.min_learning_rate,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.beta1,
        adam_beta2=spec.beta2,
        adam_eps=spec.epsilon,
        clip_grad=spec.clip_grad_norm,
        use_distributed_optimizer=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    is_flat = ParamPredicate(name="is_flat", fn=lambda parameter: parameter.dim() == 1)
    overrides = {ParamKey(predicate=is_flat): {"wd_mult": 0.0}}
    parts = []
    if any(p.requires_grad for p in llm.parameters()):
        chained = get_megatron_optimizer(
            config, [llm], config_overrides=overrides, use_gloo_process_groups=False
        )
        parts += chained.chained_optimizers
    if encoders is not None:
        scales = {
            ParamKey(name=f"module.{name}.*"): {"lr_mult": scale}
            for name, scale in learning_rate_scales.items()
        }
        chained = get_megatron_optimizer(
            config,
            [encoders],
            config_overrides={**overrides, **scales},
            use_gloo_process_groups=False,
            pg_collection=_encoder_groups(is_sharded=is_sharded),
        )
        parts += chained.chained_optimizers
    for part in parts:
        if not isinstance(part.optimizer, torch.optim.AdamW):
            # It would train, and forget its step count at every resume.
            raise OmniError(
                f"megatron took {type(part.optimizer).__module__} for Adam, whose state this "
                "trainer does not save; take Transformer Engine and Apex out of the image"
            )
    return ChainedOptimizer(parts)


class SlotCommunicator(P2PCommunicator):
    """Pipeline messages that open a slot once they are posted, and wait only then."""

    def __init__(self, config: Any, slots: Slots) -> None:
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        self._slots = slots

    def _communicate(self, *, wait_on_reqs: bool = True, **messages: Any) -> Any:
        from_previous, from_next, requests = super()._communicate(wait_on_reqs=False, **messages)
        self._slots.open_slot()
        for request in requests.values():
            request.wait()
        self._slots.end_wait()
        return from_previous, from_next, None


@dataclass(slots=True)
class TokenCount:
    """Global loss tokens of the step, as megatron reduced them; 0 before."""

    tokens: int = 0


def forward_backward(
    model: Any,
    step_func: StepFunc,
    *,
    microbatches: Sequence[Any],
    microbatch_tokens: int,
    slots: Slots,
) -> int:
    """Run megatron's own schedule over a step and reduce the language model's gradients.

    Collective over the world. Afterwards `model` holds gradients of the global loss sum over
    global loss tokens; returns that count of tokens.
    """
    config = model.config
    count = TokenCount()
    config.finalize_model_grads_func = functools.partial(_finalize, count, slots)
    get_forward_backward_func()(
        forward_step_func=step_func,
        data_iterator=iter(microbatches),
        model=model,
        num_microbatches=len(microbatches),
        seq_length=microbatch_tokens,
        micro_batch_size=1,
        forward_only=False,
        p2p_communicator=SlotCommunicator(config, slots),
        pg_collection=_pipeline_groups(),
    )
    return count.tokens


def _finalize(
    count: TokenCount, slots: Slots, models: Any, num_tokens: Any = None, **options: Any
) -> None:
    # Stage 0 may still owe the gradients of its last backwards. Stages that wait for them in the
    # slot of their own last backward come to the reductions below only afterwards.
    slots.open_slot()
    # megatron reduces `num_tokens` in place; the encoders' sums are divided by the same count.
    finalize_model_grads(models, num_tokens, **options)
    count.tokens = int(num_tokens.item())


def _pipeline_groups() -> Any:
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return groups
