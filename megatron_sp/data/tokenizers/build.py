"""Construction of a tokenizer from the flags, and those that need no file: bytes, and text that is already numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_sp.config.schema import DataConfig
from megatron_sp.config.schema_data import SENTENCEPIECE, WORDPIECE, default_type
from megatron_sp.data.tokenizers.tokenizer import Tokenizer, well_formed
from megatron_sp.utils.errors import ConfigError, DataError


def build_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """Build the tokenizer of --tokenizer-type.

    Default with --tokenizer-model: HuggingFaceTokenizer if the file ends in .json, else SentencePieceTokenizer; with
    --merge-file: GPT2BPETokenizer; with --vocab-file alone: BertWordPieceLowerCase; with --vocab-size alone:
    NullTokenizer.

    Args:
        vocab_size: --vocab-size, entries of the model's vocabulary; it may exceed the tokenizer's, never the other way
            round.
    Raises:
        ConfigError: the flags do not determine a tokenizer, or ``vocab_size`` is too small for it.
        DataError: the tokenizer's file is missing or damaged.
    """
    kind = data.tokenizer_type or default_type(data, vocab_size)
    tokenizer: Tokenizer
    if kind is None:
        raise ConfigError(
            "there is no tokenizer: give --tokenizer-type (ByteTokenizer needs no file), --tokenizer-model FILE, --vocab-file FILE, or"
            " --vocab-size N for text that is integers"
        )
    if kind in SENTENCEPIECE:
        if not data.tokenizer_model:
            raise ConfigError(f"--tokenizer-type {kind} needs --tokenizer-model FILE")
        from megatron_sp.data.tokenizers.spm import Llama2Tokenizer, SentencePieceTokenizer

        tokenizer = (Llama2Tokenizer if kind == "Llama2Tokenizer" else SentencePieceTokenizer)(data.tokenizer_model)
    elif kind == "HuggingFaceTokenizer":
        if not data.tokenizer_model:
            raise ConfigError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model FILE, a tokenizer.json")
        from megatron_sp.data.tokenizers.hugging_face import HuggingFaceTokenizer

        tokenizer = HuggingFaceTokenizer(data.tokenizer_model)
    elif kind == "GPT2BPETokenizer":
        if not data.vocab_file or not data.merge_file:
            raise ConfigError(
                "--tokenizer-type GPT2BPETokenizer needs --vocab-file FILE, a vocab.json, and --merge-file FILE, a merges.txt"
            )
        from megatron_sp.data.tokenizers.hugging_face import GPT2BPETokenizer

        tokenizer = GPT2BPETokenizer(data.vocab_file, data.merge_file)
    elif kind in WORDPIECE:
        if not data.vocab_file:
            raise ConfigError(f"--tokenizer-type {kind} needs --vocab-file FILE")
        from megatron_sp.data.tokenizers.wordpiece import BertWordPieceTokenizer

        tokenizer = BertWordPieceTokenizer(data.vocab_file, lowercase=kind == "BertWordPieceLowerCase")
    elif kind == "ByteTokenizer":
        tokenizer = ByteTokenizer()
    elif kind == "NullTokenizer":
        if not vocab_size:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size N")
        tokenizer = NullTokenizer(vocab_size, data.eod_id)
    else:
        raise ConfigError(
            f"--tokenizer-type {kind} is not known: use {', '.join(SENTENCEPIECE)}, HuggingFaceTokenizer,"
            f" GPT2BPETokenizer, {', '.join(WORDPIECE)}, ByteTokenizer or NullTokenizer"
        )
    if data.eod_id is not None:
        _end_documents_with(tokenizer, data.eod_id)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"vocab_size ({vocab_size}) must be at least the tokenizer's ({tokenizer.vocab_size}): leave --vocab-size out to take the"
            " tokenizer's"
        )
    return tokenizer


def _end_documents_with(tokenizer: Any, eod: int) -> None:
    # let another id end documents than the tokenizer's own: --eod-id. Raises ConfigError: it is not in the vocabulary
    if not 0 <= eod < tokenizer.vocab_size:
        raise ConfigError(f"eod_id ({eod}) must be an id of the vocabulary, 0 to {tokenizer.vocab_size - 1}")
    if eod != tokenizer.eod:
        own = tokenizer.fingerprint()
        tokenizer.eod = eod
        tokenizer.fingerprint = lambda: hashlib.sha256(f"{own} {eod}".encode()).hexdigest()


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
            raise ConfigError(
                f"vocab_size ({vocab_size}) must be at least 2 with NullTokenizer: one token and the end of a document"
            )
        if eod is not None and not 0 <= eod < vocab_size:
            raise ConfigError(f"eod_id ({eod}) must be an id of the vocabulary, 0 to {vocab_size - 1}")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod is None else eod
        special: list[int | None] = [*range(vocab_size - 5, vocab_size - 1)] if vocab_size > 5 else [None] * 4
        self.pad, self.cls, self.sep, self.mask = special

    def encode(self, text: str) -> list[int]:
        """Parse the integers of the text. Raises DataError: a word is not an integer of the vocabulary."""
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
