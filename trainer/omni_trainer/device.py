"""Where a rank computes: a GPU with NCCL, or the CPU with gloo. The rest of the code asks here."""

import random
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch

from omni_contract.errors import SpecError
from omni_trainer import cpu_cuda


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of this rank. Open it before megatron is first imported."""

    torch_device: torch.device
    """Where tensors live."""
    backend: str
    """What to give `init_process_group`. On GPUs small messages on CPU tensors go by gloo."""

    @classmethod
    def open(cls, kind: Literal["auto", "cpu", "cuda"] = "auto", *, local_rank: int = 0) -> Self:
        """Choose and prepare the device.

        On a CPU it gives torch.cuda a CPU face for megatron's sake, for the whole process. Raises
        SpecError where CUDA is asked for and there is none.
        """
        has_cuda = not cpu_cuda.is_installed() and torch.cuda.is_available()
        if kind == "cuda" and not has_cuda:
            raise SpecError(
                "spec.resources.device", "'cuda' needs a GPU and there is none here; use auto"
            )
        if kind == "cpu" or not has_cuda:
            cpu_cuda.install()
            return cls(torch_device=torch.device("cpu"), backend="gloo")
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise SpecError(
                "spec.resources.ranksPerNode",
                f"local rank {local_rank} has no GPU, this node has {count}; use at most {count}",
            )
        torch.cuda.set_device(local_rank)
        return cls(torch_device=torch.device("cuda", local_rank), backend="cpu:gloo,cuda:nccl")

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.torch_device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until everything computed on the current stream is done.

        Not for the whole device: receives that are posted ahead stand on streams of their own, and
        what they wait for may need this rank to go on.
        """
        if self.is_cuda:
            torch.cuda.current_stream(self.torch_device).synchronize()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this device; the same tensor where it is there already."""
        if not self.is_cuda:
            return tensor
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def dtype(self, precision: Literal["fp32", "bf16"]) -> torch.dtype:
        """The type of parameters and activations. Raises SpecError for bf16 on a CPU."""
        if precision == "fp32":
            return torch.float32
        if not self.is_cuda:
            raise SpecError(
                "spec.train.precision", "'bf16' needs a GPU and this rank has none; use fp32"
            )
        return torch.bfloat16

    def seed(self, seed: int) -> None:
        """Seed every generator of the process and ask for reproducible kernels."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
