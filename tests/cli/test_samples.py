"""The report shows samples as the encoders got them, and knows what should have been consumed."""

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image

from omni_cli.samples import choose, planned_pieces, shown
from omni_cli.summary import final_samples, repeated_and_lost
from omni_contract.plan import JobPlan
from omni_contract.records import ConsumedRecord, ConsumedSample
from omni_dataloader.sources import OpenedData, open_data
from omni_dataloader.store import Store
from tests.fakes.sidecar_client import fake_plan
from tests.fakes.sources import make_sources

MODALITIES = {"pictures": "image", "drawings": "image", "speech": "audio", "books": None}


def opened(s3: Store, bucket: str, folder: Path) -> tuple[JobPlan, OpenedData]:
    make_sources(folder, num_samples=12).upload(s3, bucket)
    tokens = {"tokens": 4 * 8192, "precision": "fp32"}
    plan = fake_plan(bucket, train=tokens)
    return plan, open_data(plan.spec, s3)


def consumed(data: OpenedData, plan: JobPlan) -> list[ConsumedRecord]:
    """What ranks would record that follow the plan."""
    return [
        ConsumedRecord(
            step=step,
            attempt=1,
            generation=0,
            rank=2,
            samples=[
                ConsumedSample(
                    microbatch=1, source=s, epoch=e, index=i, first_token=f, num_tokens=n
                )
                for s, e, i, f, n in pieces
            ],
        )
        for step, pieces in planned_pieces(data, plan).items()
    ]


def test_samples_are_shown_as_the_model_was_given_them(
    s3: Store, bucket: str, tmp_path: Path
) -> None:
    plan, data = opened(s3, bucket, tmp_path)
    records = consumed(data, plan)
    assert len(records) == plan.num_steps == 4
    final = final_samples(records)
    assert repeated_and_lost(final, planned_pieces(data, plan)) == (0, 0)

    chosen = list(choose(final, data.sources))
    assert sorted(source.name for _, source, _ in chosen) == sorted(
        ["books"] + 2 * ["drawings", "pictures", "speech"]
    )
    for step, source, sample in chosen:
        assert step == 4
        card = shown(step, source, sample, data, s3)
        assert card.text
        assert (card.picture is not None) == (MODALITIES[source.name] == "image")
        assert (card.frames is not None) == (MODALITIES[source.name] == "audio")
        if card.picture is not None:
            _, _, encoded = card.picture.partition("base64,")
            image = Image.open(io.BytesIO(base64.b64decode(encoded)))
            patches = int(source.table.media[0].units[sample.index])
            assert image.width * image.height == patches * 14 * 14
        if card.frames is not None:
            assert card.frames.shape == (int(source.table.media[0].units[sample.index]), 80)
            assert np.isfinite(card.frames).all()


def test_a_corrupt_piece_is_not_shown(s3: Store, bucket: str, tmp_path: Path) -> None:
    plan, data = opened(s3, bucket, tmp_path)
    final = final_samples(consumed(data, plan))
    marked = {
        step: [s.model_copy(update={"corrupt": s.source == "speech"}) for s in samples]
        for step, samples in final.items()
    }
    assert {source.name for _, source, _ in choose(marked, data.sources)} == {
        "books",
        "drawings",
        "pictures",
    }
