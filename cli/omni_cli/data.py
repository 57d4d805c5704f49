"""`omni data`: build the demo's data, index shards of one's own."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from omni_cli.demo_data import CACHE, CAPTIONS_PER_PICTURE, DemoSummary, build_demo
from omni_cli.local_s3 import LocalS3
from omni_contract.errors import DataError
from omni_contract.spec_data import StorageSpec
from omni_contract.spec_model import Modality
from omni_dataloader.build import Indexer, index_folder, index_source
from omni_dataloader.index import Manifest
from omni_dataloader.store import Store
from omni_dataloader.tokenizer import TextTokenizer

_SHOWN_MESSAGES = 20
_LOCAL_HELP = "Serve S3 from this folder while the command runs, as `omni run --local-s3` does."


@click.group()
def data() -> None:
    """Build, index and upload training data."""


@data.command()
@click.option("--to", "uri", metavar="S3_URI", help="Upload under this address, such as s3://omni.")
@click.option("--local-s3", type=click.Path(path_type=Path, file_okay=False), help=_LOCAL_HELP)
@click.option("--endpoint", help="S3-compatible server; left out: AWS_ENDPOINT_URL, then AWS.")
@click.option(
    "--from",
    "from_folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder with the unpacked packages (/ where they are installed), instead of fetching.",
)
@click.option(
    "--captions-per-picture",
    type=click.IntRange(1, 100),
    default=CAPTIONS_PER_PICTURE,
    show_default=True,
    help="Languages each picture is captioned in: English, and others chosen evenly.",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    default=CACHE,
    show_default=True,
    help="Folder for the packages and the shards built.",
)
def build(
    uri: str | None,
    local_s3: Path | None,
    endpoint: str | None,
    from_folder: Path | None,
    captions_per_picture: int,
    cache: Path,
) -> None:
    """Turn two Debian packages into the demo's sources: pictures, drawings, speech, books.

    Done once: a second run finds what the first one made. Nothing is installed.
    """
    console = Console()
    if uri is None and (local_s3 is not None or endpoint is not None):
        raise click.UsageError("--local-s3 and --endpoint need --to S3_URI, such as --to s3://omni")
    begin = time.monotonic()
    with _store(uri, local_s3, endpoint) as store:
        summary = build_demo(
            store,
            uri.rstrip("/") if uri is not None else None,
            cache=cache,
            from_folder=from_folder,
            captions_per_picture=captions_per_picture,
            say=lambda line: _print(console, f"{time.monotonic() - begin:5.0f} s  {line}"),
        )
    _show(console, summary, uri)


@data.command()
@click.argument("place", metavar="FOLDER|S3_URI")
@click.option(
    "--parts",
    required=True,
    metavar="MODALITY=ENDING,...",
    help="Files of a sample, such as image=png,text=txt.",
)
@click.option(
    "--tokenizer",
    required=True,
    metavar="FILE|S3_URI",
    help="tokenizer.json under which text tokens are counted; the one of model.llm.tokenizer.",
)
@click.option("--skip-bad", is_flag=True, help="Leave bad samples out and count them.")
@click.option(
    "--headers-only",
    is_flag=True,
    help="Read only headers of pictures and recordings: faster, damage shows in training.",
)
@click.option("--local-s3", type=click.Path(path_type=Path, file_okay=False), help=_LOCAL_HELP)
@click.option("--endpoint", help="S3-compatible server; left out: AWS_ENDPOINT_URL, then AWS.")
def index(
    place: str,
    parts: str,
    tokenizer: str,
    skip_bad: bool,
    headers_only: bool,
    local_s3: Path | None,
    endpoint: str | None,
) -> None:
    """Index WebDataset shards where they are: *.tar in a folder or under an S3 address.

    Writes NAME.tar.idx beside each shard, index.npy and index.json. Run it again when shards or
    the tokenizer change.
    """
    place = place.rstrip("/")
    in_s3 = place if place.startswith("s3://") else None
    needs_store = in_s3 or (tokenizer if tokenizer.startswith("s3://") else None)
    with _store(needs_store, local_s3, endpoint) as store:
        indexer = Indexer(
            parts=_parts(parts),
            tokenizer=TextTokenizer(_read(store, tokenizer), name=tokenizer),
            skip_bad=skip_bad,
            verify=not headers_only,
        )
        if in_s3 is not None:
            assert store is not None
            with tempfile.TemporaryDirectory(prefix="omni-index-") as scratch:
                manifest = index_source(store, in_s3, Path(scratch), indexer)
        else:
            if not Path(place).is_dir():
                raise DataError(f"{place}: there is no such folder")
            manifest = index_folder(Path(place), indexer)
    _show_index(Console(), place, manifest, indexer.messages)


@contextmanager
def _store(uri: str | None, local_s3: Path | None, endpoint: str | None) -> Iterator[Store | None]:
    """The store a command works on, if it works on one."""
    if local_s3 is not None and endpoint is not None:
        raise click.UsageError("say --local-s3 or --endpoint, not both")
    if uri is None:
        yield None
    elif local_s3 is not None:
        with LocalS3(local_s3) as server:
            yield server.open()
    else:
        yield Store.open(StorageSpec.parse({"endpoint": endpoint}, path="--endpoint"))


def _parts(text: str) -> dict[str, Modality]:
    """`image=png,text=txt` -> {png: image, txt: text}."""
    parts: dict[str, Modality] = {}
    for pair in text.split(","):
        modality, _, extension = pair.strip().partition("=")
        if modality not in list(Modality) or not extension or extension.lower() in parts:
            raise DataError(
                f"--parts: {pair.strip()!r} is refused; write modality=ending pairs, each ending "
                f"once, with modalities out of {', '.join(Modality)}: image=png,text=txt"
            )
        parts[extension.lower().removeprefix(".")] = Modality(modality)
    if Modality.TEXT not in parts.values():
        raise DataError("--parts: text is missing; every sample needs text to learn from")
    return parts


def _read(store: Store | None, place: str) -> bytes:
    if place.startswith("s3://"):
        assert store is not None
        return store.read(place)
    try:
        return Path(place).read_bytes()
    except OSError as exc:
        raise DataError(f"{place}: cannot be read: {exc.strerror}") from None


def _show(console: Console, summary: DemoSummary, uri: str | None) -> None:
    table = Table(box=None)
    for heading in ("source", "samples", "shards", "MB", "left out"):
        table.add_column(heading, justify="left" if heading in ("source", "left out") else "right")
    for source in summary.sources:
        table.add_row(
            source.name,
            str(source.num_samples),
            str(source.num_shards),
            f"{source.size_bytes / 1e6:.0f}",
            _counted(source.skipped) or "nothing",
        )
    console.print(table)
    if not summary.built and not summary.uploaded:
        _print(console, "Everything was there already.")
    if uri is not None:
        _print(console, f"The data is at {uri}, the tokenizer at {uri}/tokenizer.json.")


def _show_index(console: Console, place: str, manifest: Manifest, messages: list[str]) -> None:
    for message in messages[:_SHOWN_MESSAGES]:
        _print(console, f"left out: {message}")
    if len(messages) > _SHOWN_MESSAGES:
        _print(console, f"and {len(messages) - _SHOWN_MESSAGES} more")
    left_out = _counted(manifest.skipped)
    _print(
        console,
        f"{place}: {manifest.num_samples} samples in {len(manifest.shards)} shards indexed"
        + (f"; left out: {left_out}" if left_out else ""),
    )


def _print(console: Console, line: str) -> None:
    """One line, as it is: paths are neither wrapped nor read as markup."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _counted(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
