"""What all tokenizers of the tokenizers library share, whatever files they are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_sp.data.tokenizers.tokenizer import well_formed
from megatron_sp.utils.errors import ConfigError, DataError


def import_tokenizers() -> None:
    """Raises ConfigError, with the remedy, if the package is absent."""
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the tokenizers package is needed for WordPiece and for files of Hugging Face ({error}): pip install 'tokenizers>=0.22'"
        ) from error


class LibraryTokenizer:
    """Text to ids and back by the library, without special tokens around the text; one that is written out in the text is that token.

    Args:
        tokenizer: the library's.
        vocab_size: ids are below this.
        fingerprint: a hash of all that decides what ``encode`` returns.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, fingerprint: str) -> None:
        self._tokenizer, self.vocab_size, self._fingerprint = tokenizer, vocab_size, fingerprint

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(well_formed(text), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens by their names; ids that no entry of the vocabulary has are nothing.

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
        """The entry of the vocabulary that has this id."""
        return str(self._tokenizer.id_to_token(token))

    def fingerprint(self) -> str:
        return self._fingerprint
