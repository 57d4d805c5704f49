"""Text to ids and back, the same everywhere."""

import subprocess
import sys

import pytest

from omni_contract.errors import DataError
from omni_dataloader.tokenizer import SPECIAL_TOKENS, TextTokenizer, train_tokenizer
from tests.fakes.sources import VOCAB_SIZE, fake_tokenizer

TEXTS = ["A frog.", "Un rățoi.", "የአሜሪካ ሃያ አምስት ሳንቲም", "🐸 <image> <eos>", "  two  spaces\n"]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(fake_tokenizer())


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert len(ids) == tokenizer.count([text])[0]
    assert ids.max() < tokenizer.vocab_size <= VOCAB_SIZE


def test_markup_in_a_text_is_text(tokenizer: TextTokenizer) -> None:
    """Or a caption could end its own sample, or ask for a picture that is not there."""
    ids = tokenizer.encode("".join(SPECIAL_TOKENS))
    assert ids.min() >= len(SPECIAL_TOKENS)


def test_special_tokens_come_first(tokenizer: TextTokenizer) -> None:
    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.decode([0, 1, 2, 3]).split() == list(SPECIAL_TOKENS) or tokenizer.decode(
        [0, 1, 2, 3]
    ) == "".join(SPECIAL_TOKENS)


def test_training_gives_the_same_bytes_in_another_process() -> None:
    code = (
        "import hashlib; from tests.fakes.sources import fake_tokenizer; "
        "print(hashlib.sha256(fake_tokenizer()).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONHASHSEED": "5", "RAYON_NUM_THREADS": "1"},
    )
    assert other.stdout.strip() == TextTokenizer(fake_tokenizer()).hash, other.stderr


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_foreign_file_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(DataError, match=r"s3://b/t\.json"):
        TextTokenizer(data, name="s3://b/t.json")


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    data = train_tokenizer(["a b"], vocab_size=300).replace(b"<eos>", b"<fin>")
    with pytest.raises(DataError, match="no end token"):
        TextTokenizer(data)
