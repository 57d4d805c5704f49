"""Client of the node's data sidecar: asks for steps in turn, maps what it answers.

The arrays of a step are views of the sidecar's ring, valid until `release`. A sidecar that dies is
waited for and joined again, with the same pair; the rank notices by the clock alone.
"""

import mmap
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from omni_contract import wire
from omni_contract.errors import DataError, StaleError, UnavailableError
from omni_trainer.batch import MicrobatchInputs, StepInputs
from omni_trainer.environment import Pair

AWAY_S = 300.0
"""A sidecar may be away for so long; its supervisor restarts it within seconds."""
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """One step's inputs and what the sidecar says about the whole global batch."""

    inputs: StepInputs
    tokens_by_source: Mapping[str, int]
    tokens_by_modality: Mapping[str, int]
    weights: Mapping[str, float]
    corrupt_samples: int


class EndOfData(Exception):
    """No step is left. All ranks learn it at the same step, so training ends there for all."""


class Interrupted(Exception):
    """The process was told to end while the sidecar was away."""


class _Away(Exception):
    """The sidecar closed the connection or is not there."""


class DataClient:
    """One rank's connection to its sidecar. Not for several threads."""

    def __init__(
        self,
        socket_path: Path,
        *,
        plan_hash: str,
        pair: Pair,
        rank: int,
        next_step: int,
        state: wire.LoaderState | None,
        is_ending: Callable[[], bool] = lambda: False,
        away_s: float = AWAY_S,
    ) -> None:
        self._path = socket_path
        self._plan_hash = plan_hash
        self._pair = pair
        self._rank = rank
        self._next_step = next_step
        self._state = state
        self._is_ending = is_ending
        self._away_s = away_s
        self._socket: socket.socket | None = None
        self._ring: mmap.mmap | None = None

    def next(self, step: int) -> StepData:
        """Wait for the inputs of a step; it becomes the rank's to consume and release."""
        assert step == self._next_step, f"step {step} asked, {self._next_step} is next"
        answer = self._ask(wire.Next(step=step))
        if isinstance(answer, wire.EndOfData):
            raise EndOfData(answer.message)
        if not isinstance(answer, wire.Batch) or answer.step != step:
            raise self._unexpected(f"the batch of step {step}", answer)
        assert self._ring is not None
        inputs = step_inputs(answer, self._ring)
        self._next_step = step + 1
        return StepData(
            inputs=inputs,
            tokens_by_source=answer.tokens_by_source,
            tokens_by_modality=answer.tokens_by_modality,
            weights=answer.weights,
            corrupt_samples=answer.corrupt_samples,
        )

    def release(self, step: int) -> None:
        """The step's arrays are no longer used; they are invalid from here on."""
        if self._socket is None:
            return
        try:
            self._socket.sendall(wire.encode(wire.Release(step=step)))
        except OSError:
            self._disconnect()  # its ring went with it; the next request joins again

    def snapshot(self, step: int) -> wire.LoaderState:
        """The data state with which training goes on after `step`."""
        answer = self._ask(wire.Snapshot(step=step))
        if not isinstance(answer, wire.State):
            raise self._unexpected(f"the state after step {step}", answer)
        return answer.state

    def close(self) -> None:
        """Leave. Arrays handed out stay mapped as long as something holds them."""
        self._disconnect()

    def _ask(self, request: wire.Message) -> wire.Message:
        deadline_s = time.monotonic() + self._away_s
        while True:
            try:
                if self._socket is None:
                    self._connect()
                return self._exchange(request)
            except _Away as exc:
                self._disconnect()
                if self._is_ending():
                    raise Interrupted(
                        f"told to end while the data service was away, at step {self._next_step}"
                    ) from None
                if time.monotonic() > deadline_s:
                    raise UnavailableError(
                        f"{self._path}: the data service was away for {self._away_s:.0f} s "
                        f"({exc}); its log is in the run folder"
                    ) from None
                time.sleep(_RETRY_S)

    def _connect(self) -> None:
        fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fresh.connect(str(self._path))
        except OSError as exc:
            fresh.close()
            raise _Away(str(exc)) from None
        self._socket = fresh
        hello = wire.Hello(
            plan_hash=self._plan_hash,
            attempt=self._pair.attempt,
            generation=self._pair.generation,
            rank=self._rank,
            next_step=self._next_step,
            state=self._state,
        )
        fds: list[int] = []
        try:
            answer = self._exchange(hello, fds)
            if not isinstance(answer, wire.Welcome):
                raise self._unexpected("a welcome", answer)
            if len(fds) != 1:
                raise DataError(f"{self._path}: the data service's welcome brought no memory")
            self._ring = mmap.mmap(fds[0], answer.ring_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            for fd in fds:
                os.close(fd)

    def _exchange(self, request: wire.Message, fds: list[int] | None = None) -> wire.Message:
        assert self._socket is not None
        try:
            self._socket.sendall(wire.encode(request))
            head = self._receive(4, fds)
            body = self._receive(int.from_bytes(head, "big"))
        except OSError as exc:
            raise _Away(str(exc)) from None
        answer = wire.REPLY.validate_json(body)
        if isinstance(answer, wire.Refused):
            if answer.reason == "stale":
                raise StaleError(answer.message)
            if answer.reason == "unavailable":
                raise UnavailableError(answer.message)
            raise DataError(answer.message)
        return answer

    def _receive(self, num_bytes: int, fds: list[int] | None = None) -> bytes:
        """Exactly `num_bytes`; file descriptors that come with them are added to `fds`."""
        assert self._socket is not None
        if num_bytes > wire.MAX_FRAME_BYTES:
            raise DataError(f"{self._path}: a frame of {num_bytes} bytes is no answer of ours")
        data = bytearray()
        while len(data) < num_bytes:
            if fds is None:
                part = self._socket.recv(num_bytes - len(data))
            else:
                part, new_fds, _, _ = socket.recv_fds(self._socket, num_bytes - len(data), 1)
                fds += new_fds
            if not part:
                raise _Away("it closed the connection")
            data += part
        return bytes(data)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._ring = None  # unmapped once no array of it is left

    def _unexpected(self, wanted: str, answer: wire.Message) -> DataError:
        kind = type(answer).__name__
        return DataError(
            f"{self._path}: rank {self._rank} asked for {wanted}, the data service answered {kind}"
        )


def step_inputs(batch: wire.Batch, ring: mmap.mmap) -> StepInputs:
    """The arrays of a batch: views of the ring, on the CPU. Never write to them."""
    with warnings.catch_warnings():
        # The ring is mapped for reading: a write in place ends the process instead of going
        # unnoticed, which is what torch warns of.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return StepInputs(
            step=batch.step,
            microbatches=tuple(_microbatch(m, ring) for m in batch.microbatches),
        )


def _microbatch(microbatch: wire.Microbatch, ring: mmap.mmap) -> MicrobatchInputs:
    arrays = {name: _array(ref, ring) for name, ref in microbatch.tensors.items()}

    def tensor(name: str) -> torch.Tensor | None:
        return torch.from_numpy(arrays[name]) if name in arrays else None

    return MicrobatchInputs(
        index=microbatch.index,
        # Records are made of these after the step, so they outlive the ring slot.
        samples=arrays["samples"].astype(np.int64),
        spans=arrays["spans"].astype(np.int64),
        tokens=tensor("tokens"),
        labels=tensor("labels"),
        loss_mask=tensor("loss_mask"),
        image_patches=tensor("image.patches"),
        image_grid=tensor("image.grid"),
        audio_features=tensor("audio.features"),
        audio_frames=tensor("audio.frames"),
    )


def _array(ref: wire.TensorRef, ring: mmap.mmap) -> NDArray[np.generic]:
    dtype = np.dtype(ref.dtype)
    count = int(np.prod(ref.shape, dtype=np.int64))
    if ref.offset < 0 or ref.offset + count * dtype.itemsize > len(ring):
        raise DataError(f"the data service points at bytes beyond its ring of {len(ring)}")
    if not count:
        return np.empty(ref.shape, dtype)  # frombuffer refuses a count of 0 at the ring's end
    flat = np.frombuffer(ring, dtype, count, ref.offset)
    return flat.reshape(ref.shape)
