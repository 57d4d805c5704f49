"""The device of a rank, and the CPU's stand-in for CUDA."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from omni_contract.errors import SpecError
from omni_trainer.device import Device
from tests.trainer.ranks import run_ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_the_users_error() -> None:
    with pytest.raises(SpecError, match="there is none here; use auto"):
        Device.open("cuda")


def on_the_cpu(rank: int) -> dict[str, Any]:
    device = Device.open("auto")
    try:
        device.dtype("bf16")
    except SpecError as exc:
        refusal = str(exc)
    device.seed(3)
    numbers = torch.rand(2)
    device.seed(3)
    return {
        "kind": device.torch_device.type,
        "backend": device.backend,
        "refusal": refusal,
        "made on cuda": torch.zeros(1, device="cuda").device.type,
        "moved to cuda": torch.zeros(1).to("cuda:0").cuda().device.type,
        "reproducible": bool(torch.equal(numbers, torch.rand(2))),
        "precision": device.dtype("fp32"),
    }


def test_without_a_gpu_everything_lands_on_the_cpu() -> None:
    (seen,) = run_ranks(1, on_the_cpu)
    assert "spec.train.precision: 'bf16' needs a GPU" in seen.pop("refusal")
    assert seen == {
        "kind": "cpu", "backend": "gloo", "made on cuda": "cpu", "moved to cuda": "cpu",
        "reproducible": True, "precision": torch.float32,
    }  # fmt: skip


def send_then_drop(rank: int) -> float:
    """As megatron does with a stage's output: the storage goes before the peer has read it."""
    if rank == 0:
        tensor = torch.full((1 << 20,), 7.0)
        work = dist.isend(tensor, 1)
        assert work is not None
        tensor.data = torch.zeros(1)
        filler = [torch.full((1 << 20,), -1.0) for _ in range(4)]
        dist.barrier()
        work.wait()
        return float(filler[0][0])
    dist.barrier()
    received = torch.zeros(1 << 20)
    dist.recv(received, 0)
    return float(received.sum()) / (1 << 20)


def test_a_tensor_on_its_way_outlives_its_owner() -> None:
    assert run_ranks(2, send_then_drop)[1] == 7.0
