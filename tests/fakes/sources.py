"""Four small sources over three modalities, written by the real build code."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from omni_contract.spec_model import Modality
from omni_dataloader.build import Indexer, RawSample, index_folder, upload_source, write_shards
from omni_dataloader.store import Store
from omni_dataloader.tokenizer import TextTokenizer, train_tokenizer

VOCAB_SIZE = 512
NUM_SAMPLES = 60

PICTURE = {"png": Modality.IMAGE, "txt": Modality.TEXT}
RECORDING = {"ogg": Modality.AUDIO, "txt": Modality.TEXT}
TEXT = {"txt": Modality.TEXT}
SOURCES = {"pictures": PICTURE, "drawings": PICTURE, "speech": RECORDING, "books": TEXT}

_TEXT = "a red green blue small large round house frog bird boat on the hill by sea at night"
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSources:
    """What `make_sources` wrote."""

    folder: Path
    """Holds one folder a source, and tokenizer.json."""
    tokenizer: TextTokenizer

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    def upload(self, store: Store, uri: str) -> None:
        """Upload everything under an address such as s3://tests/0."""
        for name in SOURCES:
            upload_source(store, self.folder / name, f"{uri}/{name}")
        store.write_file(f"{uri}/tokenizer.json", self.tokenizer_path)


def make_sources(
    folder: Path, *, num_samples: int = NUM_SAMPLES, shard_bytes: int = 64 * 1024
) -> FakeSources:
    """Write pictures, drawings, speech and books with their indexes, and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    data = fake_tokenizer()
    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = TextTokenizer(data)
    for number, (name, parts) in enumerate(SOURCES.items()):
        samples = fake_samples(parts, num_samples=num_samples, seed=number)
        write_shards(samples, folder / name, shard_bytes=shard_bytes)
        index_folder(folder / name, Indexer(parts=parts, tokenizer=tokenizer))
    return FakeSources(folder=folder, tokenizer=tokenizer)


@lru_cache
def fake_tokenizer() -> bytes:
    """A small real tokenizer.json."""
    rng = np.random.default_rng(0)
    return train_tokenizer((sentence(rng, 20) for _ in range(200)), vocab_size=VOCAB_SIZE)


def fake_samples(parts: dict[str, Modality], *, num_samples: int, seed: int) -> Iterator[RawSample]:
    """Samples with the given parts, of many sizes; the same for the same seed."""
    rng = np.random.default_rng(seed)
    for number in range(num_samples):
        files: dict[str, bytes] = {}
        for extension, modality in parts.items():
            if modality is Modality.IMAGE:
                width, height = (int(n) for n in rng.integers(8, 200, 2))
                files[extension] = picture(rng, width=width, height=height)
            elif modality is Modality.AUDIO:
                files[extension] = recording(rng, seconds=float(rng.uniform(0.1, 2.0)))
            else:
                num_words = rng.integers(3, 15) if len(parts) > 1 else rng.integers(200, 900)
                files[extension] = sentence(rng, int(num_words)).encode()
        yield RawSample(key=f"{number:06d}", files=files)


def sentence(rng: np.random.Generator, num_words: int) -> str:
    """Words."""
    return " ".join(rng.choice(_WORDS, num_words))


def picture(rng: np.random.Generator, *, width: int, height: int) -> bytes:
    """A png: two flat colours and a little noise."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[: height // 2] = rng.integers(0, 256, 3)
    pixels[height // 2 :] = rng.integers(0, 256, 3)
    pixels[:2, :2] = rng.integers(0, 256, (min(2, height), min(2, width), 3))
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def recording(rng: np.random.Generator, *, seconds: float, rate: int = 22_050) -> bytes:
    """A tone. FLAC, as decoders go by content: an ogg would differ from run to run (its serial)."""
    time = np.arange(round(seconds * rate)) / rate
    wave = 0.3 * np.sin(2 * np.pi * float(rng.uniform(100, 2000)) * time)
    buffer = io.BytesIO()
    soundfile.write(buffer, wave.astype(np.float32), rate, format="FLAC")
    return buffer.getvalue()
