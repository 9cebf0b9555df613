"""Common base of the tokenizers that use the tokenizers library, whatever files they are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_sp.data.tokenizers.tokenizer import well_formed
from megatron_sp.utils.errors import ConfigError, DataError


def import_tokenizers() -> None:
    """Check that the tokenizers package is installed. Raises ConfigError, with the remedy."""
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the tokenizers package is needed for WordPiece and for files of Hugging Face ({error}): pip install 'tokenizers>=0.22'"
        ) from error


class LibraryTokenizer:
    """Tokenizer of the library, without special tokens added around the text; one spelled out in the text is encoded as that token.

    Args:
        tokenizer: tokenizer object of the library.
        vocab_size: ids are below this.
        fingerprint: hash of everything that determines what ``encode`` returns.
    """

    bos: int | None = None
    begin: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any, vocab_size: int, fingerprint: str) -> None:
        self._tokenizer, self.vocab_size, self._fingerprint = tokenizer, vocab_size, fingerprint

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.encode(well_formed(text), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, with special tokens by name; ids without an entry in the vocabulary give no text.

        Raises:
            DataError: an id outside the vocabulary.
        """
        plain = [int(i) for i in ids]
        bad = [i for i in plain if not 0 <= i < self.vocab_size]
        if bad:
            raise DataError(f"token id {bad[0]}: expected 0 to {self.vocab_size - 1}, the vocabulary has {self.vocab_size} entries")
        text: str = self._tokenizer.decode(plain, skip_special_tokens=False)
        return text

    def piece(self, token: int) -> str:
        """Return the vocabulary entry with this id."""
        return str(self._tokenizer.id_to_token(token))

    def fingerprint(self) -> str:
        """Hash of the tokenizer's files."""
        return self._fingerprint
