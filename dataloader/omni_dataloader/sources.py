"""Open a job's sources and weigh their samples: two index objects each become a table."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omni_contract.errors import DataError, SpecError
from omni_contract.plan import JobPlan
from omni_contract.spec import JobSpec
from omni_contract.spec_data import SourceSpec
from omni_contract.spec_model import EncoderSpec, Modality
from omni_dataloader.index import SourceIndex
from omni_dataloader.sample_plan import Ints, MediaTable, SamplePlan, SourceTable
from omni_dataloader.store import Store
from omni_dataloader.tokenizer import TextTokenizer
from omni_planner.cost import encoder_cost, encoder_units, is_oversize, out_len

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source ready to be planned and read."""

    name: str
    spec: SourceSpec
    index: SourceIndex
    table: SourceTable


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedData:
    """All that the plan and the reader need."""

    sources: Sequence[Source]
    """By sorted name: a source's place here is its number on the wire."""
    tokenizer: TextTokenizer
    encoders: Mapping[Modality, EncoderSpec]


def open_data(spec: JobSpec, store: Store) -> OpenedData:
    """Read tokenizer and indexes. Raises an OmniError naming field, file and way out."""
    tokenizer = _open_tokenizer(spec, store)
    encoders = dict(spec.model.encoders.items())
    sources = []
    for name, source in sorted(spec.data.sources.items()):
        index = SourceIndex.load(store, source.uri)
        index.check_tokenizer(tokenizer.hash)
        index.check_shards(store)
        table = source_table(
            name, source, index, encoders, sequence_tokens=spec.batch.sequence_tokens
        )
        sources.append(Source(name=name, spec=source, index=index, table=table))
        log.info(
            "source opened name=%s samples=%d left_out=%d tokens=%d",
            name, len(table.rows), len(index) - len(table.rows), table.tokens[table.rows].sum(),
        )  # fmt: skip
    return OpenedData(sources=sources, tokenizer=tokenizer, encoders=encoders)


def plan_samples(data: OpenedData, plan: JobPlan) -> SamplePlan:
    """The sample plan of a job over opened sources."""
    spec = plan.spec
    return SamplePlan(
        [source.table for source in data.sources],
        mixture=spec.data.mixture,
        seed=spec.train.seed,
        global_sequences=spec.batch.global_sequences,
        sequence_tokens=spec.batch.sequence_tokens,
        total_tokens=spec.train.tokens,
    )


def source_table(
    name: str,
    spec: SourceSpec,
    index: SourceIndex,
    encoders: Mapping[Modality, EncoderSpec],
    *,
    sequence_tokens: int,
) -> SourceTable:
    """Weigh every sample of a source from the raw sizes in its index.

    Left out for good: media samples longer than a sequence (they cannot be cut), and those an
    encoder's `oversize: skip` excludes.
    """
    num_samples = len(index)
    rows = np.ones(num_samples, np.bool_)
    tokens = np.zeros(num_samples, np.int64)
    cost = np.zeros(num_samples, np.int64)
    media: list[MediaTable] = []
    for modality in spec.order:
        part = index.part(spec.parts[modality], modality)
        if modality is Modality.TEXT:
            tokens = tokens + part.text_tokens
            continue
        encoder = encoders[modality]
        length = out_len(part.size, encoder)
        media.append(
            MediaTable(
                modality=modality,
                first=tokens,
                tokens=length,
                units=encoder_units(part.size, encoder),
            )
        )
        cost = cost + encoder_cost(part.size, encoder)
        tokens = tokens + length
        if encoder.oversize == "skip":
            rows &= ~is_oversize(part.size, encoder)
    tokens = tokens + 1  # the end token
    if media:
        rows &= tokens <= sequence_tokens
    if not rows.any():
        raise DataError(
            f"data.sources.{name}: none of its {num_samples} samples can be used: the shortest has "
            f"{tokens.min()} tokens, batch.sequenceTokens is {sequence_tokens}; raise it, or lower "
            "maxPatches or maxFrames of the encoder"
        )
    used = np.flatnonzero(rows)
    return SourceTable(
        name=name,
        fingerprint=_fingerprint(index.fingerprint, spec, used, tokens, media),
        rows=used,
        tokens=tokens,
        media=media,
        cost=cost,
        stop=spec.when_exhausted == "stop",
    )


def _fingerprint(
    of_index: str, spec: SourceSpec, rows: Ints, tokens: Ints, media: Sequence[MediaTable]
) -> str:
    digest = hashlib.sha256(f"{of_index}:{spec.template}".encode())
    for array in (rows, tokens, *(a for m in media for a in (m.first, m.tokens, m.units))):
        digest.update(np.ascontiguousarray(array, "<i8").tobytes())
    return digest.hexdigest()


def _open_tokenizer(spec: JobSpec, store: Store) -> TextTokenizer:
    uri = spec.model.llm.tokenizer
    if uri.startswith("s3://"):
        raw = store.read(uri)
    else:
        try:
            raw = Path(uri).read_bytes()
        except OSError as exc:
            raise DataError(f"model.llm.tokenizer: {uri}: {exc.strerror}") from None
    tokenizer = TextTokenizer(raw, name=uri)
    if tokenizer.vocab_size > spec.model.llm.vocab_size:
        raise SpecError(
            "spec.model.llm.vocabSize",
            f"{spec.model.llm.vocab_size} is smaller than the {tokenizer.vocab_size} tokens of "
            f"{uri}; use at least {tokenizer.vocab_size}",
        )
    return tokenizer
