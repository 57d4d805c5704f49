"""The demo's four sources from real pictures, speech and text: fetched, built and uploaded once."""

import fcntl
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from omni_cli.debian import check_folder, fetch_packages
from omni_contract.spec_model import Modality
from omni_dataloader import bible, stamps
from omni_dataloader.build import Indexer, RawSample, upload_source, write_shards
from omni_dataloader.index import MANIFEST_NAME, Manifest
from omni_dataloader.store import Store, split_uri
from omni_dataloader.tokenizer import TextTokenizer, train_tokenizer

RECIPE_VERSION = 1
"""Grows with every change of what the same packages are turned into."""
VOCAB_SIZE = 4096
CAPTIONS_PER_PICTURE = 4
"""English and three more: all 78 languages occur, and the pixels, which repeat with every caption,
stay near 130 MB."""
CACHE = Path(".cache/omni")
TOKENIZER_NAME = "tokenizer.json"

PICTURE = {"png": Modality.IMAGE, "txt": Modality.TEXT}
SOURCES: dict[str, dict[str, Modality]] = {
    "pictures": PICTURE,
    "drawings": PICTURE,
    "speech": {"ogg": Modality.AUDIO, "txt": Modality.TEXT},
    "books": {"txt": Modality.TEXT},
}

_DONE_NAME = "demo.json"
_BY_WORK = ("speech", "drawings", "pictures", "books")

_T = TypeVar("_T")

Say = Callable[[str], None]
"""Shows a line of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSummary:
    """One source as built."""

    name: str
    num_samples: int
    num_shards: int
    size_bytes: int
    skipped: dict[str, int]
    """Samples left out, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """What `build_demo` did."""

    sources: list[SourceSummary]
    built: bool
    """False when the shards were there from an earlier run."""
    uploaded: bool
    """False when the store held these very sources already."""


def build_demo(
    store: Store | None,
    uri: str | None,
    *,
    cache: Path = CACHE,
    from_folder: Path | None = None,
    captions_per_picture: int = CAPTIONS_PER_PICTURE,
    say: Say = lambda _: None,
) -> DemoSummary:
    """Fetch, build and upload under `uri`, each only where it is not done yet.

    Without a store the sources stay in `cache` alone. Two builds at once wait for each other.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock", say):
        packages = from_folder or cache / "packages"
        if from_folder is None and not packages.exists():
            say("Fetching two Debian packages (163 MB)")
            fetch_packages(packages)
        check_folder(packages)
        recipe = _recipe(packages, captions_per_picture)
        folder = cache / "sources" / recipe[:16]
        built = not folder.exists()
        if built:
            shutil.rmtree(folder.parent, ignore_errors=True)  # of an older recipe
            _build(packages, folder, captions_per_picture, say)
        uploaded = store is not None and uri is not None and _upload(store, folder, uri, say)
    skipped = json.loads((folder / _DONE_NAME).read_text())["skipped"]
    sources = [_summary(folder / name, skipped.get(name, {})) for name in SOURCES]
    return DemoSummary(sources=sources, built=built, uploaded=uploaded)


def _recipe(packages: Path, captions_per_picture: int) -> str:
    """Hash of everything that decides what is built: the packages' files and our settings."""
    digest = sha256(f"{RECIPE_VERSION} {VOCAB_SIZE} {captions_per_picture}\n".encode())
    files = sorted((packages / stamps.STAMPS_FOLDER).rglob("*.*"))
    for path in (*files, packages / bible.BIBLE_FILE):
        digest.update(f"{path.relative_to(packages)} {path.stat().st_size}\n".encode())
    return digest.hexdigest()


def _build(packages: Path, folder: Path, captions_per_picture: int, say: Say) -> None:
    """Write all sources and the tokenizer to `folder`, which exists afterwards or not at all."""
    partial = folder.with_name("partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    found = stamps.find_stamps(packages)
    texts = list(bible.documents((packages / bible.BIBLE_FILE).read_bytes()))
    say("Training the tokenizer")
    tokenizer = _train(found, texts, partial)
    skipped = {name: Counter[str]() for name in SOURCES}
    samples: dict[str, Iterable[RawSample]] = {
        "pictures": stamps.pictures(found, captions_per_picture=captions_per_picture),
        "drawings": stamps.drawings(
            found, captions_per_picture=captions_per_picture, skipped=skipped["drawings"]
        ),
        "speech": stamps.speech(found, skipped=skipped["speech"]),
        "books": texts,
    }

    given_up = threading.Event()

    def build(name: str) -> None:
        say(f"Building {name}")
        paths = write_shards(_until(given_up, samples[name]), partial / name)
        indexer = Indexer(parts=SOURCES[name], tokenizer=tokenizer, skip_bad=True)
        for path in _until(given_up, paths):
            indexer.add(path)
        indexer.finish(partial / name)
        skipped[name] += indexer.skipped
        for message in indexer.messages:
            say(f"  left out: {message.removeprefix(f'{partial}/')}")

    # Decoders run outside Python's lock, so threads do; speech takes longest and goes first.
    with ThreadPoolExecutor(2) as pool:
        try:
            for done in [pool.submit(build, name) for name in _BY_WORK]:
                done.result()
        except BaseException:  # Ctrl-C must not wait until all is built
            given_up.set()
            pool.shutdown(cancel_futures=True)
            raise
    (partial / _DONE_NAME).write_text(json.dumps({"skipped": skipped}, indent=1))
    partial.replace(folder)


def _until(given_up: threading.Event, items: Iterable[_T]) -> Iterator[_T]:
    """The items, until somebody gives up."""
    for item in items:
        if given_up.is_set():
            raise CancelledError("given up")
        yield item


def _train(found: list[stamps.Stamp], texts: list[RawSample], folder: Path) -> TextTokenizer:
    captions = [text for stamp in found for text in stamp.captions.values()]
    books = [sample.files["txt"].decode() for sample in texts]
    data = train_tokenizer([*captions, *books], vocab_size=VOCAB_SIZE)
    (folder / TOKENIZER_NAME).write_bytes(data)
    return TextTokenizer(data)


def _upload(store: Store, folder: Path, uri: str, say: Say) -> bool:
    store.create_bucket(split_uri(uri)[0])
    changed = False
    for name in SOURCES:
        if upload_source(store, folder / name, f"{uri}/{name}"):
            say(f"Uploaded {uri}/{name}")
            changed = True
    tokenizer = (folder / TOKENIZER_NAME).read_bytes()
    there = f"{uri}/{TOKENIZER_NAME}"
    if not store.exists(there) or store.read(there) != tokenizer:
        store.write(there, tokenizer)
        changed = True
    return changed


def _summary(folder: Path, skipped: dict[str, int]) -> SourceSummary:
    manifest = Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    return SourceSummary(
        name=folder.name,
        num_samples=manifest.num_samples,
        num_shards=len(manifest.shards),
        size_bytes=sum(shard.size_bytes for shard in manifest.shards),
        skipped=skipped,
    )


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another build is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
