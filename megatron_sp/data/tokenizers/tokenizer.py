"""What every tokenizer can do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megatron_sp.utils.errors import ConfigError, DataError

MAX_BYTES = 64 << 20
"""Of a tokenizer's file; the largest vocabularies of today take 35 MB."""


class Tokenizer(Protocol):
    """Text to ids and back; an instance is read-only and may be used from several threads."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to this, exclusive; the end-of-document id is one of them."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        ...

    @property
    def cls(self) -> int | None:
        """The id before a BERT sample; this and the next three are None where the vocabulary has no such token."""
        ...

    @property
    def sep(self) -> int | None:
        """The id behind each of its segments."""
        ...

    @property
    def mask(self) -> int | None:
        """The id in the place of a token that has to be guessed."""
        ...

    @property
    def pad(self) -> int | None:
        """The id that fills up a row."""
        ...

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        """bool [n]: whether each of the ids (int64 [n], all inside the vocabulary) begins a word; the others continue the one before."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without ``eod``."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; never fails on ids inside the vocabulary."""
        ...

    def fingerprint(self) -> str:
        """A hash of everything that decides what ``encode`` returns."""
        ...


def well_formed(text: str) -> str:
    """The text with lone surrogates (JSON can carry them, UTF-8 cannot) replaced by U+FFFD, and pairs of them joined."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_bounded(path: Path, max_bytes: int, rule: str) -> bytes:
    """The whole file. Raises DataError: it cannot be read, is empty, or larger than this."""
    try:
        with open(path, "rb") as file:
            contents = file.read(max_bytes + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}: {rule}") from error
    if len(contents) > max_bytes:
        raise DataError(f"{path}: is larger than the {max_bytes:,} bytes that such a file can have: {rule}")
    if not contents:
        raise DataError(f"{path}: is empty: {rule}")
    return contents


class SpecialTokens(NamedTuple):
    """The ids that BERT needs."""

    cls: int
    sep: int
    mask: int
    pad: int


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Raises ConfigError if the vocabulary lacks one of them; names it."""
    found = {name: getattr(tokenizer, name) for name in SpecialTokens._fields}
    lacking = [f"[{name.upper()}]" for name, token in found.items() if token is None]
    if lacking:
        raise ConfigError(
            f"BERT needs the tokens [CLS], [SEP], [MASK] and [PAD], and {type(tokenizer).__name__} has no {', '.join(lacking)}: take"
            " BertWordPieceLowerCase with a --vocab-file that has them, or train a tokenizer with megatron-sp tokenizer --bert"
        )
    return SpecialTokens(**found)
