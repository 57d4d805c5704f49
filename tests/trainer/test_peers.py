"""A lost peer is no cause of its own; everything else is."""

import pytest
import torch.distributed as dist

from omni_trainer.peers import is_peer_lost


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[pair.cc:538] Connection closed by peer [127.0.0.1]:4711"),
        RuntimeError("[buf.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
        RuntimeError("Application timeout caused pair closure"),
        dist.DistNetworkError("The client socket has timed out"),
        dist.DistBackendError("NCCL error: remote process exited"),
    ],
    ids=str,
)
def test_what_torch_says_of_a_lost_peer(error: Exception) -> None:
    assert is_peer_lost(error)
    wrapped = ValueError("while reducing")
    wrapped.__cause__ = error
    assert is_peer_lost(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        ValueError("connection closed by peer"),
        ConnectionResetError("Connection reset by peer"),  # the sidecar's or S3's, not a rank's
        MemoryError(),
    ],
    ids=repr,
)
def test_errors_of_ones_own(error: Exception) -> None:
    assert not is_peer_lost(error)
