"""The loader's saved state: versioned bytes that refuse to go on with other data.

The state before step t depends on t alone: not on prefetch, not on the layout of ranks.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from omni_contract.errors import DataError
from omni_dataloader.draw import DRAW_VERSION
from omni_dataloader.mix import MIX_VERSION
from omni_dataloader.pack import PACK_VERSION
from omni_dataloader.sample_plan import CURSOR, PlanState, SamplePlan

STATE_VERSION = 1

CORRUPT = np.dtype([("step", "<i8"), ("source", "<i8"), ("epoch", "<i8"), ("index", "<i8")])
"""A sample found corrupt and the first step that masked it; source is its number by name."""

_MAGIC = b"OMNILOAD"
_DIGEST_BYTES = 16
_ALGORITHMS = {"draw": DRAW_VERSION, "mix": MIX_VERSION, "pack": PACK_VERSION}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a state belongs to. A state goes on only where all of it is equal."""

    seed: int
    sources: Mapping[str, str]
    """Fingerprint of each source, by sorted name."""

    @classmethod
    def of(cls, plan: SamplePlan, *, seed: int) -> Self:
        """The identity of a plan's data."""
        return cls(seed=seed, sources={table.name: table.fingerprint for table in plan.tables})


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state before a step with the samples found corrupt before it."""

    plan: PlanState
    corrupt: NDArray[np.void]
    """CORRUPT records, ascending; each sample of an epoch once."""

    def to_bytes(self, identity: Identity) -> bytes:
        """Header, arrays and a checksum."""
        header = json.dumps(
            {
                "version": STATE_VERSION,
                "algorithms": _ALGORITHMS,
                "seed": identity.seed,
                "sources": dict(identity.sources),
                "next_step": self.plan.next_step,
                "num_corrupt": len(self.corrupt),
            },
            sort_keys=True,
        ).encode()
        body = b"".join(
            (
                _MAGIC,
                len(header).to_bytes(4, "little"),
                header,
                self.plan.cursors.tobytes(),
                self.corrupt.tobytes(),
            )
        )
        return body + _digest(body)

    @classmethod
    def from_bytes(cls, raw: bytes, identity: Identity) -> Self:
        """Read what `to_bytes` wrote. Raises DataError for damage and for other data."""
        body, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
        if not body.startswith(_MAGIC) or _digest(body) != digest:
            raise DataError(
                f"data state: {len(raw)} bytes that are truncated or no data state; resume from "
                "another checkpoint"
            )
        start = len(_MAGIC) + 4
        size = int.from_bytes(body[len(_MAGIC) : start], "little")
        header = json.loads(body[start : start + size])
        _check(header, identity)
        arrays = body[start + size :]
        cut = CURSOR.itemsize * len(identity.sources)
        return cls(
            plan=PlanState(
                next_step=header["next_step"], cursors=np.frombuffer(arrays[:cut], CURSOR)
            ),
            corrupt=np.frombuffer(arrays[cut:], CORRUPT),
        )


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _check(header: Mapping[str, Any], identity: Identity) -> None:
    """Refuse a state of other software or data: going on would repeat or skip samples unseen."""
    if header["version"] != STATE_VERSION or header["algorithms"] != _ALGORITHMS:
        raise DataError(
            f"data state: written with version {header['version']}, algorithms "
            f"{header['algorithms']}; this program has {STATE_VERSION}, {_ALGORITHMS}; resume with "
            "the program that wrote it"
        )
    if header["seed"] != identity.seed:
        raise DataError(
            f"train.seed: {identity.seed} is not the {header['seed']} the checkpoint was trained "
            f"with; set it back to {header['seed']} or start a new run"
        )
    saved: Mapping[str, str] = header["sources"]
    if saved.keys() != identity.sources.keys():
        raise DataError(
            f"data.sources: {', '.join(sorted(identity.sources))} are not the sources the "
            f"checkpoint was trained with ({', '.join(sorted(saved))}); to drop a source give it "
            "weight 0"
        )
    for name, fingerprint in identity.sources.items():
        if saved[name] != fingerprint:
            raise DataError(
                f"data.sources.{name}: its samples or their lengths are not those the checkpoint "
                f"was trained with (fingerprint {fingerprint[:12]}, saved {saved[name][:12]}); "
                "restore source, template, encoder sizes and sequenceTokens, or start a new run"
            )
