"""Made-up sources for tests of the sample plan: the demo's shapes without its data."""

from collections.abc import Sequence

import numpy as np

from omni_contract.spec_data import MixtureStage
from omni_contract.spec_model import Modality
from omni_dataloader.sample_plan import Ints, MediaTable, SamplePlan, SourceTable

STOP_AFTER_DEMO = 2_000_000


def media_source(
    name: str, modality: Modality, media: Ints, text: Ints, *, stop: bool = False
) -> SourceTable:
    """A source of one encoded modality followed by text."""
    tokens = media + text + 1
    rows = np.flatnonzero(tokens <= 512)
    return SourceTable(
        name=name,
        fingerprint=f"of-{name}",
        rows=rows,
        tokens=tokens,
        media=(
            MediaTable(
                modality=modality, first=np.zeros_like(media), tokens=media, units=4 * media
            ),
        ),
        cost=media**2,
        stop=stop,
    )


def text_source(name: str, text: Ints, *, stop: bool = False) -> SourceTable:
    """A source of documents."""
    return SourceTable(
        name=name,
        fingerprint=f"of-{name}",
        rows=np.arange(len(text)),
        tokens=text + 1,
        media=(),
        cost=np.zeros_like(text),
        stop=stop,
    )


def demo_tables(*, stop: bool = False) -> list[SourceTable]:
    """Pictures of 4 to 64 tokens, recordings of 20 to 187, documents of up to 30,000."""
    rng = np.random.default_rng(0)

    def ints(low: int, high: int, size: int) -> Ints:
        return rng.integers(low, high, size).astype(np.int64)

    return [
        media_source("pictures", Modality.IMAGE, ints(4, 65, 950), ints(3, 30, 950), stop=stop),
        media_source("drawings", Modality.IMAGE, ints(4, 65, 700), ints(3, 30, 700), stop=stop),
        media_source("speech", Modality.AUDIO, ints(20, 188, 740), ints(3, 30, 740), stop=stop),
        text_source("books", ints(500, 30_000, 66), stop=stop),
    ]


DEMO_MIXTURE = [
    MixtureStage.parse({"until": 200_000, "weights": {"pictures": 1, "books": 1}}),
    MixtureStage.parse(
        {
            "ramp": "linear",
            "weights": {"pictures": 13, "drawings": 13, "speech": 61, "books": 13},
        }
    ),
]


def sample_plan(
    tables: Sequence[SourceTable],
    mixture: Sequence[MixtureStage] = (),
    *,
    seed: int = 7,
    global_sequences: int = 16,
) -> SamplePlan:
    """A plan of 512-token sequences."""
    return SamplePlan(
        tables,
        mixture=mixture,
        seed=seed,
        global_sequences=global_sequences,
        sequence_tokens=512,
        total_tokens=1_000_000,
    )
