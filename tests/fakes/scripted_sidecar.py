"""A sidecar of a few lines: serves made-up steps from a sealed memfd, refuses or dies as told."""

import contextlib
import fcntl
import mmap
import os
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from omni_contract import wire

SLOT_BYTES = 4096
NUM_SLOTS = 2


class ScriptedSidecar:
    """Context manager around the server; it records every request it reads."""

    def __init__(
        self,
        path: Path,
        *,
        num_steps: int = 10**9,
        refuse: wire.Refused | None = None,
        dies_at: int | None = None,
    ) -> None:
        self.requests: list[wire.Message] = []
        self._path = path
        self._num_steps = num_steps
        self._refuse = refuse
        self._dies_at = dies_at
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._peer: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._fd = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, SLOT_BYTES * NUM_SLOTS)
        self._ring = mmap.mmap(self._fd, SLOT_BYTES * NUM_SLOTS)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10  # F_SEAL_FUTURE_WRITE
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)

    def __enter__(self) -> Self:
        self._path.unlink(missing_ok=True)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._peer is not None:
            with contextlib.suppress(OSError):  # closed already
                self._peer.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        self._listener.close()
        os.close(self._fd)

    def asked(self, kind: type[wire.Message]) -> list[wire.Message]:
        """The requests of one type, in order."""
        return [request for request in self.requests if isinstance(request, kind)]

    def _run(self) -> None:
        while True:
            try:
                self._peer, _ = self._listener.accept()
            except OSError:
                return
            with self._peer:
                try:
                    while self._answer(self._peer, self._read(self._peer)):
                        pass
                except (EOFError, OSError):
                    pass

    def _read(self, peer: socket.socket) -> wire.Message:
        size = int.from_bytes(_exactly(peer, 4), "big")
        return wire.REQUEST.validate_json(_exactly(peer, size))

    def _answer(self, peer: socket.socket, request: wire.Message) -> bool:
        self.requests.append(request)
        match request:
            case wire.Hello():
                if self._refuse is not None:
                    peer.sendall(wire.encode(self._refuse))
                    return False
                frame = wire.encode(wire.Welcome(ring_bytes=SLOT_BYTES * NUM_SLOTS))
                socket.send_fds(peer, [frame], [self._fd])
            case wire.Next(step=step):
                if step == self._dies_at:
                    self._dies_at = None
                    return False
                peer.sendall(wire.encode(self._step(step)))
            case wire.Snapshot(step=step):
                state = wire.LoaderState(next_step=step + 1, blob=b"after %d" % step)
                peer.sendall(wire.encode(wire.State(state=state)))
            case _:
                pass
        return True

    def _step(self, step: int) -> wire.Message:
        if step > self._num_steps:
            return wire.EndOfData(step=step, message="source 'books' is used up")
        base = step % NUM_SLOTS * SLOT_BYTES
        arrays: dict[str, NDArray[Any]] = {
            "samples": np.array([[0, 0, 10 * step, 0, 0, 5], [1, 2, step, 3, 5, 3]], np.int64),
            "spans": np.array([[1, 1, 5, 2, 8, 1]], np.int64),
            "tokens": np.full(8, step, np.int32),
            "loss_mask": np.arange(8) < 5,
            "image.patches": np.full((4, 12), step % 256, np.uint8),
            "image.grid": np.array([[2, 2]], np.int32),
            "audio.features": np.zeros((0, 80), np.float32),
            "audio.frames": np.zeros(0, np.int32),
        }
        refs: dict[str, wire.TensorRef] = {}
        offset = base
        for name, array in arrays.items():
            self._ring[offset : offset + array.nbytes] = array.tobytes()
            refs[name] = wire.TensorRef.model_validate(
                {"dtype": str(array.dtype), "shape": list(array.shape), "offset": offset}
            )
            offset += -(-array.nbytes // wire.ALIGN_BYTES) * wire.ALIGN_BYTES
        return wire.Batch(
            step=step,
            microbatches=[wire.Microbatch(index=1, tensors=refs)],
            tokens_by_source={"books": 5, "pictures": 3},
            tokens_by_modality={"text": 6, "image": 2},
            weights={"books": 0.5, "pictures": 0.5},
            corrupt_samples=1,
        )


def _exactly(peer: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = peer.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
