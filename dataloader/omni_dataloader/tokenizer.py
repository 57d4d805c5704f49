"""Text to token ids: any Hugging Face tokenizer.json, and the training of the demo's own."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from omni_contract.errors import DataError

PAD, EOS, IMAGE, AUDIO = "<pad>", "<eos>", "<image>", "<audio>"
SPECIAL_TOKENS = (PAD, EOS, IMAGE, AUDIO)
"""Tokens 0 to 3 of a tokenizer trained here."""

# What other families call the end of a document.
_EOS_NAMES = (EOS, "</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>")


class TextTokenizer:
    """A tokenizer.json. Its hash names it wherever token counts are kept."""

    def __init__(self, data: bytes, *, name: str = "tokenizer.json") -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer(data)
        except Exception as exc:  # the library raises nothing narrower
            raise DataError(f"{name}: is no tokenizer.json ({exc})") from None
        # Markup typed by a user is text; only this program may place a special token.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.hash = hashlib.sha256(data).hexdigest()
        """SHA-256 of the file."""
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        """Rows an embedding needs."""
        found = (self._tokenizer.token_to_id(token) for token in _EOS_NAMES)
        eos_id = next((i for i in found if i is not None), None)
        if eos_id is None:
            raise DataError(f"{name}: has no end token; add one of {', '.join(_EOS_NAMES)}")
        self.eos_id: int = eos_id
        """Ends every sample."""
        pad_id = self._tokenizer.token_to_id(PAD)
        self.pad_id: int = eos_id if pad_id is None else pad_id
        """Fills positions that hold no text; never learnt."""

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids of a text, without an end token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, np.int32)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, on all cores."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(one) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown by name."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> bytes:
    """Byte-level BPE over the texts, as the bytes of a tokenizer.json. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so every text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str().encode()
