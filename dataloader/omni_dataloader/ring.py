"""The memory a rank reads its batches from: a sealed memfd with room for two steps.

It has no name, so a killed sidecar leaves nothing behind: the kernel frees it with the last
process that maps it. Its size is virtual; pages a step never touches cost nothing.
"""

import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

import numpy as np

from omni_contract.plan import JobPlan
from omni_contract.spec_model import VitSpec
from omni_contract.wire import ALIGN_BYTES, TensorRef
from omni_dataloader.assemble import Payload

NUM_SLOTS = 2
"""Steps at once: the one the rank trains on and the one it takes next."""

K = TypeVar("K")
_DType = Literal["uint8", "int32", "int64", "float32", "bool"]
_NUM_ARRAYS = 16  # at most so many in one microbatch, each rounded up to ALIGN_BYTES


def slot_bytes(plan: JobPlan) -> int:
    """Bytes that any step of a rank fits in: every position its own sample, all of them media."""
    positions = plan.microbatch_tokens
    size = 2 * positions * 6 * 8  # samples and spans
    size += positions * (4 + 4 + 1)  # tokens, labels, loss mask
    for _, encoder in plan.spec.model.encoders.items():
        if isinstance(encoder, VitSpec):
            patches = positions * encoder.merge_patches**2
            size += patches * 3 * encoder.patch_size**2 + positions * 2 * 4
        else:
            frames = positions * encoder.frames_per_token
            size += frames * encoder.mel_bins * 4 + positions * 4
    return plan.num_microbatches * _aligned(size + _NUM_ARRAYS * ALIGN_BYTES)


class Ring:
    """Slots of one rank in one generation."""

    def __init__(self, *, slot_bytes: int, name: str) -> None:
        self._slot_bytes = slot_bytes
        self.num_bytes = _aligned(slot_bytes) * NUM_SLOTS
        """Size of the memory."""
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The memory, for the rank to map."""
        os.ftruncate(self.fd, self.num_bytes)
        # No end can shrink it under the other, which would kill that one with SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self._map = mmap.mmap(self.fd, self.num_bytes)
        self._memory = np.frombuffer(self._map, np.uint8)
        self._slots: dict[int, int] = {}  # step -> slot

    def has_room(self, step: int) -> bool:
        """Whether a slot is free for a step; one that holds this step may be written anew."""
        return step in self._slots or len(self._slots) < NUM_SLOTS

    def write(self, step: int, arrays: Mapping[K, Payload]) -> dict[K, TensorRef]:
        """Copy a step's arrays into a slot and hold it until `release`."""
        free = [slot for slot in range(NUM_SLOTS) if slot not in self._slots.values()]
        slot = self._slots.setdefault(step, free[0] if free else -1)
        assert slot >= 0, "no slot is free; ask has_room first"
        begin = at = slot * _aligned(self._slot_bytes)
        refs = {}
        for name, payload in arrays.items():
            refs[name] = TensorRef(
                dtype=_dtype_name(payload.dtype), shape=list(payload.shape), offset=at
            )
            end = at
            for chunk in payload.chunks:
                flat = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
                assert end + len(flat) <= begin + self._slot_bytes, "a step outgrew its bound"
                self._memory[end : end + len(flat)] = flat
                end += len(flat)
            assert end - at == payload.num_bytes, f"{name}: chunks and shape disagree"
            at = _aligned(end)
        return refs

    def release(self, step: int) -> None:
        """The rank no longer reads a step; one not held is ignored."""
        self._slots.pop(step, None)

    def close(self) -> None:
        """Give the memory back; a rank that still maps it keeps it until it unmaps."""
        self._memory = np.empty(0, np.uint8)
        self._map.close()
        os.close(self.fd)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _dtype_name(dtype: np.dtype[np.generic]) -> _DType:
    for name in get_args(_DType):
        if dtype.name == name:
            known: _DType = name
            return known
    raise ValueError(f"{dtype} has no name on the wire")
