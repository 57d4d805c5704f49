import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_contract.spec import Job
from omni_contract.wire import ALIGN_BYTES
from omni_dataloader.assemble import Payload
from omni_dataloader.ring import NUM_SLOTS, Ring, slot_bytes
from omni_planner.compile import compile_plan
from tests.contract.jobs import DEMO

Array = NDArray[Any]


def payload(*chunks: Array) -> Payload:
    shape = (sum(len(c) for c in chunks), *chunks[0].shape[1:])
    return Payload(dtype=chunks[0].dtype, shape=shape, chunks=chunks)


def test_arrays_come_out_as_they_went_in_and_aligned() -> None:
    ring = Ring(slot_bytes=4096, name="test")
    first: Array = np.arange(7, dtype=np.int32)
    images = [np.full((2, 3), 1, np.uint8), np.full((3, 3), 2, np.uint8)]
    refs = ring.write(1, {"a": payload(first), "b": payload(*images), "c": payload(first > 3)})
    with mmap.mmap(ring.fd, ring.num_bytes, prot=mmap.PROT_READ) as view:
        arrays: dict[str, Array] = {"a": first, "b": np.concatenate(images), "c": first > 3}
        for name, expected in arrays.items():
            ref = refs[name]
            assert ref.offset % ALIGN_BYTES == 0
            raw = view[ref.offset : ref.offset + expected.nbytes]
            assert (np.frombuffer(raw, ref.dtype).reshape(ref.shape) == expected).all()
    ring.close()


def test_a_step_stays_untouched_until_it_is_released() -> None:
    ring = Ring(slot_bytes=64, name="test")
    assert NUM_SLOTS == 2
    offsets = [ring.write(s, {"a": payload(np.full(8, s))})["a"].offset for s in (1, 2)]
    assert not ring.has_room(3)
    ring.release(2)
    assert ring.has_room(3)
    assert ring.write(3, {"a": payload(np.full(8, 3))})["a"].offset == offsets[1]
    with mmap.mmap(ring.fd, ring.num_bytes, prot=mmap.PROT_READ) as view:
        assert view[offsets[0]] == 1
    ring.release(7)  # never held
    ring.close()


def test_no_end_can_shrink_or_grow_the_memory() -> None:
    ring = Ring(slot_bytes=4096, name="test")
    seals = fcntl.fcntl(ring.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    with pytest.raises(PermissionError):
        os.ftruncate(ring.fd, 0)
    ring.close()


def test_c21_the_memory_has_no_name_and_goes_with_its_last_user() -> None:
    before = set(os.listdir("/dev/shm"))
    ring = Ring(slot_bytes=4096, name="omni-c21")
    assert set(os.listdir("/dev/shm")) <= before
    fd = ring.fd
    ring.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert "omni-c21" not in Path("/proc/self/maps").read_text()


def test_the_bound_holds_the_fullest_step_and_costs_only_what_is_touched() -> None:
    plan = compile_plan(Job.read(DEMO))
    size = slot_bytes(plan)
    positions = plan.microbatch_tokens
    all_media = positions * 4 * 588 + positions * 8 * 80 * 4
    assert size >= plan.num_microbatches * all_media
    ring = Ring(slot_bytes=size, name="test")
    ring.write(1, {"a": payload(np.ones(1000, np.uint8))})
    assert os.fstat(ring.fd).st_blocks * 512 < 100_000 < ring.num_bytes
    ring.close()
