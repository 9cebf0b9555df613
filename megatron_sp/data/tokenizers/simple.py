"""Tokenizers that need no file: bytes, and text that is already numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megatron_sp.data.tokenizers.tokenizer import well_formed
from megatron_sp.utils.errors import ConfigError, DataError


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, plus an end-of-document id; there are none of BERT's special tokens."""

    vocab_size = 257
    eod = 256
    bos: int | None = None
    begin: tuple[int, ...] = ()
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    pad: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(well_formed(text).encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; invalid UTF-8 (a sample cut inside a character) becomes U+FFFD, and ``eod`` is omitted.

        Raises:
            DataError: an id outside the vocabulary.
        """
        _check_ids(ids, self.vocab_size)
        return bytes(i for i in ids if i != self.eod).decode("utf-8", errors="replace")

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        """Treat every byte as a word: without a vocabulary there are no words."""
        return np.ones(ids.size, bool)

    def fingerprint(self) -> str:
        return hashlib.sha256(b"ByteTokenizer 257").hexdigest()


class NullTokenizer:
    """Tokenizer of text that is integers separated by white space; documents end with ``eod`` (default: the last id).

    ``vocab_size`` counts all ids, as it does for every other tokenizer: the model has exactly that many. Where a command
    line names this tokenizer, its --vocab-size counts the integers alone, as in Megatron-LM
    (``Config.adds_null_end``). For BERT the four ids before the last are [PAD], [CLS], [SEP] and [MASK], if
    ``vocab_size`` is above 5.

    Raises:
        ConfigError: the vocabulary has fewer than 2 ids, or ``eod`` is outside it.
    """

    bos: int | None = None
    begin: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, eod: int | None = None) -> None:
        if vocab_size < 2:
            raise ConfigError(f"vocab_size ({vocab_size}) must be at least 2 with NullTokenizer: one token and the end of a document")
        if eod is not None and not 0 <= eod < vocab_size:
            raise ConfigError(f"eod_id ({eod}) must be an id of the vocabulary, 0 to {vocab_size - 1}")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod is None else eod
        special: list[int | None] = [*range(vocab_size - 5, vocab_size - 1)] if vocab_size > 5 else [None] * 4
        self.pad, self.cls, self.sep, self.mask = special

    def encode(self, text: str) -> list[int]:
        """Parse the integers of the text.

        Raises:
            DataError: a word is not an integer of the vocabulary.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(
                f"NullTokenizer reads integers with spaces between them, not text: {error}; choose another --tokenizer-type"
            ) from None
        _check_ids(ids, self.vocab_size)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        """Treat every integer as a word."""
        return np.ones(ids.size, bool)

    def fingerprint(self) -> str:
        own_end = "" if self.eod == self.vocab_size - 1 else f" {self.eod}"
        return hashlib.sha256(f"NullTokenizer {self.vocab_size}{own_end}".encode()).hexdigest()


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if len(ids) and not (0 <= min(ids) and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise DataError(f"token id {bad}: expected 0 to {vocab_size - 1}, the vocabulary has {vocab_size} entries")
