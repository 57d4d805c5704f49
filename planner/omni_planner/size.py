"""How large a model is: parameters by part and stage, and the memory that is certain.

Counts are exact (tests compare them with the modules); bytes are a bound from below, because
activations and buffers come on top.
"""

from dataclasses import dataclass

from omni_contract.plan import JobPlan
from omni_contract.spec_model import EncoderSpec, LlmSpec, UsmSpec, VitSpec

KERNEL = 15
"""Width of the Conformer's depthwise convolution, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSize:
    """What one rank of a pipeline stage holds."""

    llm_parameters: int
    encoder_parameters: int
    state_bytes: int
    """Weights, gradients and its share of the optimizer state."""


def llm_layer_parameters(llm: LlmSpec) -> int:
    """One transformer layer: attention, SwiGLU MLP, two RMSNorms, no biases."""
    width = llm.hidden_size
    kv_width = llm.num_kv_heads * (width // llm.heads)
    attention = 2 * width * width + 2 * width * kv_width
    return attention + 3 * width * llm.num_ffn + 2 * width


def llm_stage_parameters(llm: LlmSpec, *, stage: int, num_stages: int) -> int:
    """The share of a pipeline stage: the first embeds, the last has the final norm and the head."""
    table = llm.vocab_size * llm.hidden_size
    total = llm.layers // num_stages * llm_layer_parameters(llm)
    if stage == 0:
        total += table
    if stage == num_stages - 1:
        total += llm.hidden_size + table
    return total


def encoder_parameters(encoder: EncoderSpec, *, out_size: int) -> int:
    """An encoder with its projector into a language model of width `out_size`."""
    match encoder:
        case VitSpec():
            return _vit_parameters(encoder, out_size)
        case UsmSpec():
            return _usm_parameters(encoder, out_size)


def stage_sizes(plan: JobPlan) -> list[StageSize]:
    """One entry a pipeline stage, for any rank of it."""
    spec, layout = plan.spec, plan.layout
    weight_bytes = 4 if spec.train.precision == "fp32" else 2
    # Adam's two moments, and an fp32 copy of weights that are not.
    state_bytes = 8 if weight_bytes == 4 else 12
    encoders = sum(
        encoder_parameters(encoder, out_size=spec.model.llm.hidden_size)
        for _, encoder in spec.model.encoders.items()
    )
    shards = layout.world_size if spec.parallelism.encoders.zero else 1
    sizes = []
    for stage in range(layout.pp_size):
        llm = llm_stage_parameters(spec.model.llm, stage=stage, num_stages=layout.pp_size)
        total = (llm + encoders) * (weight_bytes + 4)  # gradients are kept in fp32
        total += llm * state_bytes // layout.dp_size + encoders * state_bytes // shards
        sizes.append(StageSize(llm_parameters=llm, encoder_parameters=encoders, state_bytes=total))
    return sizes


def _linear(in_size: int, out_size: int) -> int:
    return in_size * out_size + out_size


def _norm(size: int) -> int:
    return 2 * size


def _attention(width: int) -> int:
    return _norm(width) + _linear(width, 3 * width) + _linear(width, width)


def _mlp(width: int) -> int:
    return _norm(width) + _linear(width, 4 * width) + _linear(4 * width, width)


def _projector(in_size: int, out_size: int) -> int:
    return _norm(in_size) + _linear(in_size, out_size) + _linear(out_size, out_size)


def _vit_parameters(vit: VitSpec, out_size: int) -> int:
    width = vit.hidden_size
    blocks = vit.layers * (_attention(width) + _mlp(width))
    front = _linear(3 * vit.patch_size**2, width)
    return front + blocks + _projector(vit.merge_patches**2 * width, out_size)


def _usm_parameters(usm: UsmSpec, out_size: int) -> int:
    width = usm.hidden_size
    num_halvings = usm.frames_per_token.bit_length() - 1
    front = _norm(usm.mel_bins) + _linear(3 * usm.mel_bins, width) + _norm(width)
    front += (num_halvings - 1) * (_linear(3 * width, width) + _norm(width))
    convolution = _linear(width, 2 * width) + (KERNEL + 1) * width + _linear(width, width)
    convolution += 2 * _norm(width)
    block = 2 * _mlp(width) + _attention(width) + convolution + _norm(width)
    return front + usm.layers * block + _projector(width, out_size)
