"""What every tokenizer can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


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
