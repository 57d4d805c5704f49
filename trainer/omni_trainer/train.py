"""The engine: one optimizer step of the multiplexed model on one rank, and its saved state.

Knows nothing of where data comes from, of files or of restarts. Every method but the constructors
of plain values is collective over the world: all ranks call it, in the same order.
"""

# Shapes: T token positions of a microbatch.

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_contract.errors import OmniError
from omni_contract.plan import JobPlan
from omni_contract.records import LossSum
from omni_contract.topology import Layout
from omni_trainer.batch import MicrobatchInputs, StepInputs, StepResult
from omni_trainer.collectives import connect, gather_rows, make_replica_group
from omni_trainer.device import Device
from omni_trainer.encoders.build import as_module, build_encoders
from omni_trainer.encoders.plugin import Encoder
from omni_trainer.llm.attention import block_lengths
from omni_trainer.multiplex.anchor import EncoderAnchor, cfg, merge
from omni_trainer.multiplex.executor import Timeline
from omni_trainer.multiplex.gradients import JointOptimizer, learning_rate
from omni_trainer.multiplex.link import EmbeddingLink
from omni_trainer.multiplex.places import sample_classes
from omni_trainer.multiplex.shards import donors
from omni_trainer.multiplex.tensors import check_same_keys, copy_tensors
from omni_trainer.multiplex.work import StagePlace

if TYPE_CHECKING:
    from types import ModuleType

ReadObject = Callable[[str], Mapping[str, Any]]
"""A saved object by its name; raises OmniError where there is none."""

STATE_VERSION = 1
_CLASSES = ("all", "text", "image", "audio")


class Engine:
    """The multiplexed model on one rank. Make it with `Engine.build`."""

    def __init__(
        self,
        plan: JobPlan,
        rank: int,
        device: Device,
        *,
        megatron: "ModuleType",
        model: Any,
        encoders: list[Encoder],
        anchor: EncoderAnchor,
        optimizer: JointOptimizer,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._coords = plan.layout.coords(rank)
        self._device = device
        self._megatron = megatron
        self._model = model
        self._stage = model.module
        self._encoders = encoders
        self._anchor = anchor
        self._optimizer = optimizer
        self._step = 0
        self._losses = _Losses()
        self._max_live = 0
        self._timeline = Timeline(is_traced=False, synchronize=device.synchronize)

    @classmethod
    def build(cls, plan: JobPlan, rank: int, device: Device) -> Self:
        """Build model, anchor and optimizer of a rank, with the plan's starting weights.

        Collective over the world, after `init_process_group`; once in a process. `device` comes
        from `Device.open`. Raises SpecError where the job asks for what the device cannot.
        """
        # Not at the top: megatron may be imported only after the device is open.
        from omni_trainer.llm import megatron

        spec = plan.spec
        dtype = device.dtype(spec.train.precision)
        device.seed(spec.train.seed)
        megatron.initialize_parallel(plan.layout, seed=spec.train.seed)
        megatron.connect_stages(device.torch_device)
        stage = megatron.build_stage(plan, device=device.torch_device, dtype=dtype)
        encoders = build_encoders(
            spec.model, seed=spec.train.seed, device=device.torch_device, dtype=dtype
        )
        model = megatron.wrap_llm(stage)
        parts = {"llm": (model, megatron.global_parameters(stage))}
        learning = as_module([encoder for encoder in encoders if encoder.learns])
        is_sharded = spec.parallelism.encoders.zero == 1
        wrapped = None
        if len(learning):
            wrapped = megatron.wrap_encoders(stage.config, learning, is_sharded=is_sharded)
            parts["encoders"] = (wrapped, _named(encoders))
        optimizer = megatron.make_optimizer(
            spec.train.optimizer,
            llm=model,
            encoders=wrapped,
            is_sharded=is_sharded,
            learning_rate_scales={
                str(modality): encoder.learning_rate_scale
                for modality, encoder in spec.model.encoders.items()
            },
            dtype=dtype,
        )
        coords = plan.layout.coords(rank)
        place = StagePlace(
            stage=coords.pp_rank,
            num_stages=plan.layout.pp_size,
            num_microbatches=plan.num_microbatches,
            width=spec.model.llm.hidden_size,
            device=device.torch_device,
            dtype=dtype,
            link=_make_link(plan, coords.pp_rank, device, dtype),
        )
        anchor = EncoderAnchor(encoders, cfg(place=place))
        anchor.dataflow = plan.dataflow
        return cls(
            plan,
            rank,
            device,
            megatron=megatron,
            model=model,
            encoders=encoders,
            anchor=anchor,
            optimizer=JointOptimizer(
                parts=parts,
                optimizer=optimizer,
                spec=spec.train.optimizer,
                encoder_group=None if is_sharded else dist.group.WORLD,
            ),
        )

    def step(self, inputs: StepInputs, *, trace: bool = False) -> StepResult:
        """Run one optimizer step.

        Raises OmniError where the inputs contradict each other between ranks (C04); the process
        must then end.
        """
        self.accumulate(inputs, trace=trace)
        return self.update()

    def accumulate(self, inputs: StepInputs, *, trace: bool = False) -> None:
        """The first half of a step: forward, backward, reduction of all gradients."""
        if inputs.step != self._step + 1:
            raise OmniError(
                f"the engine has done {self._step} steps and is given inputs of step "
                f"{inputs.step}; it needs those of step {self._step + 1}"
            )
        self._losses = _Losses()
        self._timeline = Timeline(is_traced=trace, synchronize=self._device.synchronize)
        self._optimizer.zero_gradients()
        self._anchor.begin(inputs, self._timeline)
        num_tokens = self._megatron.forward_backward(
            self._model,
            self._run_forward,
            microbatches=inputs.microbatches,
            microbatch_tokens=self._plan.microbatch_tokens,
            slots=self._anchor,
        )
        self._max_live = self._anchor.finish()
        self._timeline.mark()
        self._optimizer.reduce_encoders(num_tokens)
        self._timeline.end("reduce", 0, 0)

    def update(self) -> StepResult:
        """The second half: clip, optimizer step, result of the whole world."""
        step, step_tokens = self._step + 1, self._plan.spec.batch.step_tokens
        rate = learning_rate(
            self._plan.spec.train.optimizer,
            # The middle of the step: neither the first nor the last step has the rate 0.
            tokens=(step - 0.5) * step_tokens,
            total_tokens=self._plan.num_steps * step_tokens,
        )
        self._timeline.mark()
        norm = self._optimizer.update(rate)
        self._timeline.end("optimizer", 0, 0)
        self._step = step
        loss_sums, max_live = self.measure()
        return StepResult(
            loss_sums=loss_sums,
            grad_norm=norm,
            learning_rate=rate,
            max_live_encoder_microbatches=max_live,
            spans=self._timeline.spans,
        )

    def measure(self) -> tuple[dict[str, LossSum], int]:
        """Loss sums and most live encoder microbatches of the last `accumulate`, world-wide."""
        row = torch.tensor([*self._losses.numbers(), self._max_live], dtype=torch.float64)
        rows = gather_rows(self._device.put(row)).cpu()  # [R, 2*classes + 1]
        sums = rows[:, :-1].sum(0).tolist()
        loss_sums = {
            name: LossSum(loss=sums[2 * i], tokens=int(sums[2 * i + 1]))
            for i, name in enumerate(_CLASSES)
        }
        return loss_sums, int(rows[:, -1].max())

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients between `accumulate` and `update`, unclipped, by parameter name."""
        return self._optimizer.gather_gradients()

    def state(self) -> dict[str, dict[str, Any]]:
        """The checkpoint objects that this rank writes, as copies on the CPU.

        Over the world each object has one writer: a stage's parameters its replica 0, the encoders
        rank 0, each rank its ZeRO-1 shard of the optimizer. Not collective.
        """
        objects: dict[str, dict[str, Any]] = {}
        if self._coords.dp_rank == 0:
            objects[self._llm_name] = _copies(self._megatron.global_parameters(self._stage))
        if self._rank == 0 and self._encoders:
            objects["encoders"] = _copies(_named(self._encoders))
        objects[_optimizer_name(self._rank)] = {
            "version": STATE_VERSION,
            "step": self._step,
            "rng": torch.get_rng_state(),
            "shards": self._optimizer.state(),
        }
        return objects

    def load(self, read: ReadObject, saved_by: Layout) -> None:
        """Go on from saved objects, bit for bit. Not collective.

        `saved_by` are the ranks that wrote them: as many stages, any number of replicas. With
        another number of them, sums of the next steps are the same but for their order. Raises
        OmniError that names the object where one is of another model.
        """
        name = self._llm_name
        copy_tensors(dict(self._megatron.global_parameters(self._stage)), read(name), where=name)
        if self._encoders:
            copy_tensors(dict(_named(self._encoders)), read("encoders"), where="encoders")
        names = [_optimizer_name(rank) for rank in donors(self._rank, self._plan.layout, saved_by)]
        nearest = _read_optimizer(read, names[0])
        others = ((name, _read_optimizer(read, name)["shards"]) for name in names[1:])
        self._optimizer.load(itertools.chain([(names[0], nearest["shards"])], others))
        torch.set_rng_state(nearest["rng"])
        self._step = int(nearest["step"])

    def close(self) -> None:
        """Forget megatron's process groups; then the process group may be destroyed."""
        self._megatron.release_parallel()

    @property
    def _llm_name(self) -> str:
        return f"llm-pp{self._coords.pp_rank:02d}"

    def _run_forward(
        self, microbatches: Iterator[MicrobatchInputs], model: nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        """megatron's forward_step_func: one LLM forward of this stage."""
        inputs = next(microbatches)
        llm = self._megatron
        num_tokens = self._plan.microbatch_tokens
        embeddings = self._anchor.hook(self._stage, True)
        embedded = None
        if embeddings is not None:
            tokens = self._put(inputs.tokens, inputs, "tokens")
            embedded = merge(llm.embed(self._stage, tokens), embeddings)  # [T, 1, W]
        labels = mask = None
        if self._coords.pp_rank == self._plan.layout.pp_size - 1:
            mask = self._put(inputs.loss_mask, inputs, "loss_mask").bool()  # [T]
            labels = self._put(inputs.labels, inputs, "labels").masked_fill(~mask, 0)  # [T]
        lengths = block_lengths(inputs.samples, num_tokens)
        blocks = llm.blocks_of(lengths, self._device.torch_device)
        output = llm.run_stage(model, embedded=embedded, labels=labels, blocks=blocks)
        self._anchor.end_forward()
        return output, partial(self._take_loss, inputs, mask)

    def _take_loss(
        self, inputs: MicrobatchInputs, mask: Tensor | None, losses: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum of the token losses [1, T], never their mean: ranks differ in loss tokens (C06)."""
        if mask is None:
            raise AssertionError("only the last stage has a loss")
        counted = losses[0].float() * mask  # [T]
        self._losses.add(inputs, counted.detach(), mask)
        return counted.sum(), mask.sum().to(torch.int), {}

    def _put(self, tensor: Tensor | None, inputs: MicrobatchInputs, name: str) -> Tensor:
        if tensor is None or tensor.shape != (self._plan.microbatch_tokens,):
            found = None if tensor is None else list(tensor.shape)
            raise OmniError(
                f"microbatch {inputs.index}: stage {self._coords.pp_rank} was served {name} of "
                f"shape {found}, it needs [{self._plan.microbatch_tokens}]"
            )
        return (
            self._device.put(tensor).long()
            if tensor.dtype != torch.bool
            else (self._device.put(tensor))
        )


class _Losses:
    """Loss sums of one step on one rank, by what the samples hold."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, inputs: MicrobatchInputs, losses: Tensor, mask: Tensor) -> None:
        """Add the losses [T] of a microbatch."""
        classes = sample_classes(inputs, len(losses))
        for name in _CLASSES:
            if name == "all":
                chosen = mask
            else:
                chosen = mask & torch.from_numpy(classes[name]).to(mask.device)
            self._sums += [losses[chosen].double().sum(), chosen.sum().double()]

    def numbers(self) -> list[float]:
        """Loss and tokens of each class in turn; zeros where this rank has no loss."""
        if not self._sums:
            return [0.0] * (2 * len(_CLASSES))
        total: list[float] = torch.stack(self._sums).view(-1, 2 * len(_CLASSES)).sum(0).tolist()
        return total


def _optimizer_name(rank: int) -> str:
    return f"optimizer-{rank:05d}"


def _read_optimizer(read: ReadObject, name: str) -> Mapping[str, Any]:
    saved = read(name)
    check_same_keys(saved, dict.fromkeys(("version", "step", "rng", "shards")), where=name)
    if saved["version"] != STATE_VERSION:
        raise OmniError(
            f"{name}: state of version {saved['version']}, this trainer reads {STATE_VERSION}; use "
            "the release that wrote it"
        )
    return saved


def _named(encoders: list[Encoder]) -> list[tuple[str, Tensor]]:
    return [
        (f"encoders.{encoder.modality}.{name}", parameter)
        for encoder in encoders
        for name, parameter in encoder.named_parameters()
    ]


def _copies(named: list[tuple[str, Tensor]]) -> dict[str, Any]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in named}


def _make_link(
    plan: JobPlan, stage: int, device: Device, dtype: torch.dtype
) -> EmbeddingLink | None:
    """Collective over the world."""
    layout = plan.layout
    if layout.pp_size == 1:
        return None
    replicas = [
        [layout.rank_of(pp_rank=s, dp_rank=d) for s in range(layout.pp_size)]
        for d in range(layout.dp_size)
    ]
    embedding_group, gradient_group = make_replica_group(replicas), make_replica_group(replicas)
    for group in (embedding_group, gradient_group):
        first, *others = dist.get_process_group_ranks(group)
        connect([(first, other) for other in others], device.torch_device, group)
    return EmbeddingLink(
        stage=stage,
        embedding_group=embedding_group,
        gradient_group=gradient_group,
        width=plan.spec.model.llm.hidden_size,
        dtype=dtype,
        device=device.torch_device,
        source_names=sorted(plan.spec.data.sources),
    )
