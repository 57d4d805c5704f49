"""Whether the GPUs of this node work: `python -m omni_trainer.supervisor.device_check COUNT`.

A process of its own, since the supervisor opens no GPU. What it says on stdout is for the user.
"""

# Shapes: S size of the test matrix.

import sys
from typing import Final

BROKEN: Final = 3
"""Exit code where a GPU does not work."""
_SIZE: Final = 1024
_MEMORY_BYTES: Final = 1 << 30


def find_fault(count: int) -> str | None:
    """What is wrong with the first `count` GPUs; None: nothing."""
    import torch  # late: the pod's main program asks for the exit code only

    if not torch.cuda.is_available():
        return f"the driver is there but CUDA finds none of {count} GPUs"
    if (found := torch.cuda.device_count()) < count:
        return f"CUDA finds {found} of {count} GPUs"
    left = torch.randint(0, 8, (_SIZE, _SIZE)).float()  # [S, S]
    right = torch.randint(0, 8, (_SIZE, _SIZE)).float()  # [S, S]
    expected = left @ right  # [S, S]  whole numbers below 2^24: the same on every device
    for gpu in range(count):
        try:
            result = (left.cuda(gpu) @ right.cuda(gpu)).cpu()  # [S, S]
            memory = torch.full((_MEMORY_BYTES,), 0xA5, dtype=torch.uint8, device=f"cuda:{gpu}")
            wrong_bytes = int((memory != 0xA5).sum())
        except RuntimeError as exc:  # torch's errors of a device derive from it
            return f"GPU {gpu}: {str(exc).splitlines()[0]}"
        if not torch.equal(result, expected) or wrong_bytes:
            return f"GPU {gpu} computes wrong numbers"
        del memory
        torch.cuda.empty_cache()
    return None


def main() -> int:
    """Check, say what is wrong, return an exit code."""
    fault = find_fault(int(sys.argv[1]))
    if fault is not None:
        print(fault)
    return 0 if fault is None else BROKEN


if __name__ == "__main__":
    sys.exit(main())
