"""The model part of a job: language model, encoders, batch, optimizer, parallel layout."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, StrictFloat, StrictInt, model_validator

from omni_contract.base import SpecModel, divisors
from omni_contract.quantity import AutoTokens, SomeTokens, Tokens

Size = Annotated[StrictInt, Field(ge=1, le=10**6)]
Uri = Annotated[str, Field(min_length=1, max_length=512)]
Trained = Literal["full", "frozen", "projector"]


def _refuse_weights(uri: str) -> str:
    # Silently starting from random weights instead would cost the user a run.
    raise ValueError("this version starts from random weights only; leave it out")


Weights = Annotated[Uri, AfterValidator(_refuse_weights)]
"""Saved weights to start from. Refused until they can be loaded."""


_NO_WEIGHTS = (
    "!has(self.weights)",
    "weights must be left out; this version starts from random weights only",
)


class Modality(StrEnum):
    """A kind of content a sample can hold. Text goes straight to the language model."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"

    @property
    def number(self) -> int:
        """Its code in wire arrays: text 0, image 1, audio 2."""
        return list(Modality).index(self)


ENCODED = (Modality.IMAGE, Modality.AUDIO)


class LlmSpec(SpecModel):
    """The language model."""

    family: Literal["llama"] = "llama"
    """Architecture: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""
    layers: Size
    """Transformer layers over all pipeline stages."""
    hidden_size: Size
    """Width of the residual stream; encoders project to it."""
    heads: Size
    """Attention heads; each has hiddenSize / heads features."""
    kv_heads: Size | None = None
    """Key and value heads, dividing `heads`. Left out: as many as `heads`."""
    ffn_hidden_size: Size | None = None
    """Width of the SwiGLU MLP. Left out: 8/3 hiddenSize, rounded up to a multiple of 64."""
    vocab_size: Annotated[StrictInt, Field(ge=8, le=10**6)] = 4096
    """Rows of the embedding; at least the tokenizer's. The default is the demo tokenizer's."""
    tokenizer: Uri
    """URI of a Hugging Face tokenizer.json."""
    weights: Weights | None = None
    """Folder of weights to start from; must be left out in this version, which starts from random
    weights drawn with `train.seed`."""
    train: Literal["full", "frozen"] = "full"
    """Whether the language model learns."""

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        _NO_WEIGHTS,
        (
            "self.hiddenSize % (2 * self.heads) == 0",
            "hiddenSize must be a multiple of twice the heads",
        ),
        (
            "!has(self.kvHeads) || self.heads % self.kvHeads == 0",
            "kvHeads must divide heads",
        ),
    )

    @model_validator(mode="after")
    def _sizes_divide(self) -> Self:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hiddenSize: {self.hidden_size} is no multiple of twice the {self.heads} heads "
                f"(rotary positions need an even head size); use a multiple of {2 * self.heads}"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"kvHeads: {self.num_kv_heads} does not divide the {self.heads} heads; "
                f"use one of {divisors(self.heads)}"
            )
        return self

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads after the default."""
        return self.kv_heads or self.heads

    @property
    def num_ffn(self) -> int:
        """Width of the MLP after the default."""
        return self.ffn_hidden_size or -(-self.hidden_size * 8 // (3 * 64)) * 64


class _EncoderSpec(SpecModel):
    layers: Size
    """Transformer (vit) or Conformer (usm) layers."""
    hidden_size: Size
    """Width of the encoder."""
    heads: Size
    """Attention heads; each has hiddenSize / heads features."""
    weights: Weights | None = None
    """Folder of weights to start from; must be left out in this version, which starts from random
    weights drawn with `train.seed`."""
    train: Trained = "full"
    """What learns: everything, nothing, or only the projector into the language model."""
    learning_rate_scale: Annotated[StrictFloat, Field(gt=0, le=1000)] = 1.0
    """Factor on `train.optimizer.learningRate` for this encoder; below 1 protects weights."""

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        _NO_WEIGHTS,
        (
            "self.hiddenSize % (2 * self.heads) == 0",
            "hiddenSize must be a multiple of twice the heads",
        ),
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hiddenSize: {self.hidden_size} is no multiple of twice the {self.heads} heads; "
                f"use a multiple of {2 * self.heads}"
            )
        return self


class VitSpec(_EncoderSpec):
    """A vision transformer over packed patches of pictures of any resolution."""

    kind: Literal["vit"] = "vit"
    """Architecture."""
    patch_size: Annotated[StrictInt, Field(ge=2, le=64)] = 14
    """Side of a square patch, in pixels."""
    max_patches: Annotated[StrictInt, Field(ge=4, le=65536)] = 256
    """Most patches of one picture, before merging; larger pictures follow `oversize`."""
    merge_patches: Annotated[StrictInt, Field(ge=1, le=8)] = 2
    """Side of the square of patches that become one LLM token; 2 makes 4 patches a token."""
    oversize: Literal["shrink", "skip"] = "shrink"
    """A picture over maxPatches is scaled down, keeping its aspect, or counted and skipped."""

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        *_EncoderSpec.cel_rules,
        (
            "(has(self.mergePatches) ? self.mergePatches : 2) * "
            "(has(self.mergePatches) ? self.mergePatches : 2) <= "
            "(has(self.maxPatches) ? self.maxPatches : 256)",
            "maxPatches must be at least mergePatches squared",
        ),
    )

    @model_validator(mode="after")
    def _one_token_fits(self) -> Self:
        if self.max_patches < self.merge_patches**2:
            raise ValueError(
                f"maxPatches: {self.max_patches} patches make no token at mergePatches "
                f"{self.merge_patches}; use at least {self.merge_patches**2}"
            )
        return self


class UsmSpec(_EncoderSpec):
    """A Conformer speech encoder (USM style) on log-mel frames."""

    kind: Literal["usm"] = "usm"
    """Architecture."""
    mel_bins: Annotated[StrictInt, Field(ge=8, le=256)] = 80
    """Features of one 10 ms log-mel frame."""
    max_frames: Annotated[StrictInt, Field(ge=8, le=360_000)] = 1500
    """Most 10 ms frames of one recording; longer ones follow `oversize`. 1500 is 15 s."""
    frames_per_token: Literal[4, 8, 16] = 8
    """10 ms frames that become one LLM token, by strided convolution."""
    oversize: Literal["cut", "skip"] = "cut"
    """A recording over maxFrames is cut, or counted and skipped."""


EncoderSpec = VitSpec | UsmSpec


class EncodersSpec(SpecModel):
    """The encoders by modality. A modality left out cannot appear in the data."""

    image: VitSpec | None = None
    """Encoder of pictures."""
    audio: UsmSpec | None = None
    """Encoder of recordings."""

    def items(self) -> Iterator[tuple[Modality, EncoderSpec]]:
        """The encoders there are, always in the order image, audio."""
        if self.image is not None:
            yield Modality.IMAGE, self.image
        if self.audio is not None:
            yield Modality.AUDIO, self.audio


class ModelSpec(SpecModel):
    """What is trained."""

    llm: LlmSpec
    """The language model."""
    encoders: EncodersSpec = EncodersSpec()
    """Encoders by modality; none trains text alone."""


class BatchSpec(SpecModel):
    """What one optimizer step consumes."""

    global_sequences: Annotated[StrictInt, Field(ge=1, le=10**6)]
    """Packed sequences a step, over all replicas."""
    microbatch_sequences: Annotated[StrictInt, Field(ge=1, le=1024)] = 1
    """Packed sequences of one microbatch. 1 keeps the pipeline's bubble smallest."""
    sequence_tokens: Annotated[StrictInt, Field(ge=16, le=2**24)]
    """Tokens of one packed sequence, text and modality tokens together."""

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "!has(self.microbatchSequences) || "
            "self.globalSequences % self.microbatchSequences == 0",
            "globalSequences must be a multiple of microbatchSequences",
        ),
    )

    @model_validator(mode="after")
    def _divides(self) -> Self:
        per_round = self.microbatch_sequences
        if self.global_sequences % per_round:
            raise ValueError(
                f"globalSequences: {self.global_sequences} is no multiple of "
                f"microbatchSequences {per_round}; use "
                f"{per_round * max(1, self.global_sequences // per_round)}"
            )
        return self

    @property
    def step_tokens(self) -> int:
        """Token positions of one step, padding included."""
        return self.global_sequences * self.sequence_tokens


class OptimizerSpec(SpecModel):
    """AdamW with ZeRO-1: each rank of a data-parallel group keeps its share of the state."""

    name: Literal["adamw"] = "adamw"
    """Optimizer."""
    learning_rate: Annotated[StrictFloat, Field(gt=0, le=10)] = 3e-4
    """Peak learning rate."""
    min_learning_rate: Annotated[StrictFloat, Field(ge=0, le=10)] = 0.0
    """Where the decay ends."""
    warmup_tokens: Tokens = 0
    """Tokens over which the rate rises linearly from 0."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the fall from the peak to minLearningRate over the rest of `train.tokens`."""
    weight_decay: Annotated[StrictFloat, Field(ge=0, le=10)] = 0.1
    """Decoupled weight decay; biases and norms are exempt."""
    beta1: Annotated[StrictFloat, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[StrictFloat, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment; 0.95 forgets a loss spike sooner than 0.999."""
    epsilon: Annotated[StrictFloat, Field(gt=0, le=1)] = 1e-8
    """Added to the root of the second moment."""
    clip_grad_norm: Annotated[StrictFloat, Field(ge=0, le=10**6)] = 1.0
    """Bound of the gradient norm over LLM and encoders together; 0 turns clipping off."""


class TrainSpec(SpecModel):
    """How long and how."""

    tokens: SomeTokens
    """Token positions to train on; rounded up to whole steps."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Parameters and activations; gradients are reduced in fp32 either way. bf16 needs a GPU."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The optimizer."""
    seed: Annotated[StrictInt, Field(ge=0, lt=2**31)] = 1234
    """Start of every random choice: weights, sample order."""


class SequenceParallelSpec(SpecModel):
    """How one long sequence is spread over ranks."""

    kind: Literal["none"] = "none"
    """none: every rank of a stage holds its sequences whole."""
    size: Literal[1] = 1
    """Ranks that share a sequence."""


class LlmParallelSpec(SpecModel):
    """The language model's layout. What is left of the world is data parallel (ZeRO-1)."""

    pipeline: Annotated[StrictInt, Field(ge=1, le=1024)] = 1
    """Pipeline stages; must divide `model.llm.layers`."""
    tensor: Literal[1] = 1
    """Tensor-parallel ranks of a stage."""
    virtual_pipeline: Literal[1] = 1
    """Model chunks of a stage."""
    sequence: SequenceParallelSpec = SequenceParallelSpec()
    """Sequence parallelism."""
    expert: Literal[1] = 1
    """Expert-parallel ranks."""
    schedule: Literal["1f1b"] = "1f1b"
    """Order of forwards and backwards: one forward, one backward."""


class EncoderParallelSpec(SpecModel):
    """The encoders' layout: replicated on every rank, in one data-parallel group."""

    sequence_parallel: Literal[1] = 1
    """Ranks that share one long sample."""
    longer_than_tokens: AutoTokens = "auto"
    """Samples longer than this are encoded sequence-parallel (the paper's eta); no effect at
    sequenceParallel 1."""
    zero: Literal[0, 1] = 1
    """ZeRO stage of the encoders' optimizer over the whole world."""
    schedule: Literal["onDemand", "upfront"] = "onDemand"
    """When encoder microbatches run: onDemand just before the first stage needs them (at most 2
    alive a rank), upfront all before the first LLM microbatch (the baseline)."""


class ParallelismSpec(SpecModel):
    """How model and data are spread over the ranks."""

    llm: LlmParallelSpec = LlmParallelSpec()
    """Language model."""
    encoders: EncoderParallelSpec = EncoderParallelSpec()
    """Encoders."""
