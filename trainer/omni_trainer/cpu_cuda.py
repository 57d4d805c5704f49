"""A CPU face for the parts of torch.cuda that megatron-core touches.

megatron names CUDA devices, streams and NCCL itself. Where there is no GPU, `install` maps them to
the CPU and gloo, without a fork of megatron. It must run before megatron is first imported,
because megatron binds some names when it is imported; `Device.open` sees to that.
"""

import contextlib
import functools
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_FACTORIES = [
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "as_tensor",
    "arange",
    "rand",
    "randn",
    "randint",
    "randperm",
    "eye",
    "linspace",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "empty_strided",
]
_METHODS = ["new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"]
_TYPES = frozenset(
    f"torch.{kind}Tensor"
    for kind in ["Float", "Half", "BFloat16", "Double", "Int", "Long", "Byte", "Bool"]
)

_installed = False


def is_installed() -> bool:
    """Whether torch.cuda is the CPU's in this process."""
    return _installed


def install() -> None:
    """Give torch.cuda a CPU face, once. Do not call it where CUDA is to be used."""
    global _installed
    if _installed:
        return
    if torch.cuda.is_initialized():
        raise AssertionError("CUDA is already in use in this process")
    _installed = True
    _replace_cuda_calls()
    _replace_factories()
    _replace_moves()
    _replace_collectives()


class _Stream:
    """Everything a CPU does is in order, so a stream has nothing to do."""

    cuda_stream = 0
    device = torch.device("cpu")
    device_index = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


class _Event:
    """A moment on the host clock."""

    def __init__(self, *_: object, **__: object) -> None:
        self._time_s = 0.0

    def record(self, *_: object) -> None:
        self._time_s = time.perf_counter()

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Event") -> float:
        return 1e3 * (other._time_s - self._time_s)


class _Generator:
    """Stands for torch.cuda.default_generators[i]."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def graphsafe_get_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def graphsafe_set_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def _own(function: Any) -> Any:
    """A function object of its own: dynamo's rule table wants one object per name."""
    if not callable(function) or isinstance(function, type):
        return function
    return lambda *args, **kwargs: function(*args, **kwargs)


def _replace_cuda_calls() -> None:
    def nothing(*_: object, **__: object) -> None: ...

    def zero(*_: object, **__: object) -> int:
        return 0

    def context(*_: object, **__: object) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    properties = types.SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=1 << 34, multi_processor_count=1
    )
    cuda: Any = torch.cuda
    stream = _Stream()
    replacements: dict[str, Any] = {
        "current_device": zero, "device_count": lambda: 1, "set_device": nothing,
        "synchronize": nothing, "empty_cache": nothing, "ipc_collect": nothing, "init": nothing,
        "_lazy_init": nothing, "_lazy_call": lambda call, **_: call(),
        "Stream": _Stream, "ExternalStream": _Stream, "Event": _Event,
        "stream": context, "device": context, "set_stream": nothing,
        "current_stream": lambda *_: stream, "default_stream": lambda *_: stream,
        "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": nothing, "seed": nothing, "initial_seed": torch.initial_seed,
        "default_generators": (_Generator(),),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "get_device_properties": lambda *_, **__: properties,
        "get_device_capability": lambda *_: (9, 0), "get_device_name": lambda *_: "cpu",
        "memory_allocated": zero, "max_memory_allocated": zero, "memory_reserved": zero,
        "max_memory_reserved": zero, "reset_peak_memory_stats": nothing,
        "memory_stats": lambda *_, **__: {}, "mem_get_info": lambda *_: (1 << 33, 1 << 34),
    }  # fmt: skip
    for name, value in replacements.items():
        setattr(cuda, name, _own(value))
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.random.set_rng_state = cuda.set_rng_state
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _own(nothing))
    cuda.nvtx.range = _own(context)
    # No fusions: a compiler run costs more than it saves here.
    torch.compile = lambda f=None, **_: f if f is not None else (lambda g: g)  # type: ignore


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _replace_factories() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))


def _cpu_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = "cpu"
    return ("cpu", *args[1:]) if args and _is_cuda(args[0]) else args


def _replace_moves() -> None:
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor_to, tensor_type, module_to = tensor.to, tensor.type, module.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor_to(self, *_cpu_arguments(args, kwargs), **kwargs)

    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        # megatron's optimizers know a parameter's precision by the name 'torch.cuda.*Tensor'.
        name = tensor_type(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.") if name in _TYPES else name

    def to_module(self: Any, *args: Any, **kwargs: Any) -> Any:
        return module_to(self, *_cpu_arguments(args, kwargs), **kwargs)

    tensor.to, tensor.type, module.to = to, type_, to_module
    tensor.cuda = module.cuda = tensor.pin_memory = lambda self, *_, **__: self
    tensor.record_stream = lambda *_, **__: None


def _replace_collectives() -> None:
    distributed: Any = dist
    new_group, isend = distributed.new_group, distributed.isend

    @functools.wraps(new_group)
    def gloo_group(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        kwargs.pop("pg_options", None)
        return new_group(*args, **kwargs)

    @functools.wraps(isend)
    def held_isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # gloo reads the storage later than megatron's deallocate_output_tensor drops it: without
        # a tensor of its own the receiver gets garbage and gradients are silently wrong.
        return isend(tensor.detach(), *args, **kwargs)

    for where in (distributed, distributed.distributed_c10d):
        where.new_group, where.isend = gloo_group, held_isend
