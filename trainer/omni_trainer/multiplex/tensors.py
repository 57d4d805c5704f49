"""Saved tensors put back into their places, by name and bit for bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from omni_contract.errors import OmniError


def check_same_keys(saved: Mapping[str, Any], expected: Mapping[str, Any], *, where: str) -> None:
    """Raise OmniError that names the difference unless both have the same keys."""
    missing = sorted(expected.keys() - saved.keys())
    extra = sorted(saved.keys() - expected.keys())
    if missing or extra:
        parts = [f"lacks {len(missing)}, such as {missing[0]!r}"] if missing else []
        parts += [f"has {len(extra)} too many, such as {extra[0]!r}"] if extra else []
        raise OmniError(
            f"{where}: the checkpoint {' and '.join(parts)}; it is of another model or layout, "
            "resume with the job file it was written by"
        )


@torch.no_grad()
def copy_tensors(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor], *, where: str) -> None:
    """Copy saved tensors bit for bit into their places. Raises OmniError where they do not fit."""
    check_same_keys(saved, targets, where=where)
    for name, target in targets.items():
        source = saved[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise OmniError(
                f"{where}: {name!r} is {source.dtype} {list(source.shape)} in the checkpoint and "
                f"{target.dtype} {list(target.shape)} in the job; resume with the job file it was "
                "written by"
            )
        target.copy_(source)
