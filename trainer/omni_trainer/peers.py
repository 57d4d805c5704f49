"""Tells the loss of another rank from an error of one's own."""

import torch.distributed as dist

# What gloo, NCCL and the store say when the other end is gone; none of them has a type for it.
_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was closed",
    "broken pipe",
    "read error",
    "write error",
    "socket timeout",
    "timed out waiting",
    "application timeout caused pair closure",
    "connect timeout",
    "recvvalue failed",
    "failed to recv",
    "communicator was aborted",
)


def is_peer_lost(error: BaseException) -> bool:
    """Whether an error, or one that it came from, means that another rank is gone."""
    seen: BaseException | None = error
    while seen is not None:
        # Most of torch's own types derive from DistError; gloo's errors are plain RuntimeErrors.
        if isinstance(seen, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
            return True
        if isinstance(seen, RuntimeError) and any(s in str(seen).lower() for s in _SIGNS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
