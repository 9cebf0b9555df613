"""Interface of the tokenizers, the base of those that use the tokenizers library, and helpers that they share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_sp.utils.errors import ConfigError, DataError

FILE = "tokenizer.json"


"""Name of the Hugging Face library's file."""
MAX_BYTES = 64 << 20
"""Of a tokenizer's file; the largest vocabularies of today take 35 MB."""


class Tokenizer(Protocol):
    """Converter of text to ids and back; instances are read-only and thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, which are 0 to ``vocab_size - 1`` and include the end-of-document id."""
        ...

    @property
    def eod(self) -> int:
        """Id that ends a document."""
        ...

    @property
    def bos(self) -> int | None:
        """Id that may stand before a text; None if the vocabulary has no such token."""
        ...

    @property
    def begin(self) -> tuple[int, ...]:
        """Ids with which a text begins where it is given to a GPT: BOS if that is the tokenizer's habit, often nothing."""
        ...

    @property
    def cls(self) -> int | None:
        """Id at the start of a BERT sample; this and the next three are None if the vocabulary has no such token."""
        ...

    @property
    def sep(self) -> int | None:
        """Id at the end of each segment of a BERT sample."""
        ...

    @property
    def mask(self) -> int | None:
        """Id that replaces a token to predict."""
        ...

    @property
    def pad(self) -> int | None:
        """Id that fills up a row."""
        ...

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        """Return bool [n]: whether each of the ids (int64 [n], all in the vocabulary) begins a word; others continue the previous one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a text, without ``begin`` and ``eod``."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; never fails on ids in the vocabulary."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of everything that determines what ``encode`` returns."""
        ...


def choose_bos(tokenizer: Any, bos: bool | None) -> None:
    """Let texts begin with BOS (--bos) or not (--no-bos) instead of as the tokenizer's own do.

    Args:
        tokenizer: its ``begin`` is set.
        bos: None: leave the tokenizer's habit.
    Raises:
        ConfigError: the tokenizer has no such token.
    """
    if bos is False:
        tokenizer.begin = ()
    elif bos and not tokenizer.begin:
        if tokenizer.bos is None:
            raise ConfigError(
                "--bos: the tokenizer has no token that begins a text (a bos_token in the tokenizer_config.json beside its file, or a"
                " SentencePiece model's own): leave --bos out"
            )
        tokenizer.begin = (tokenizer.bos,)


def well_formed(text: str) -> str:
    """Replace lone surrogates (possible in JSON, but not in UTF-8) by U+FFFD, and join pairs of surrogates."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_bounded(path: Path, max_bytes: int, rule: str) -> bytes:
    """Read a whole file. Raises DataError: it cannot be read, is empty, or is larger than ``max_bytes``."""
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
    """Ids of the special tokens that BERT needs."""

    cls: int
    sep: int
    mask: int
    pad: int


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return BERT's special tokens. Raises ConfigError, which names those that the vocabulary lacks."""
    ids = {name: getattr(tokenizer, name) for name in SpecialTokens._fields}
    lacking = [f"[{name.upper()}]" for name, token in ids.items() if token is None]
    if lacking:
        raise ConfigError(
            f"BERT needs the tokens [CLS], [SEP], [MASK] and [PAD], and {type(tokenizer).__name__} has no {', '.join(lacking)}: take"
            " BertWordPieceLowerCase with a --vocab-file that has them, or train a tokenizer with megatron-sp tokenizer --bert"
        )
    return SpecialTokens(**ids)


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
            raise DataError(
                f"token id {bad[0]}: expected 0 to {self.vocab_size - 1}, the vocabulary has {self.vocab_size} entries"
            )
        text: str = self._tokenizer.decode(plain, skip_special_tokens=False)
        return text

    def piece(self, token: int) -> str:
        """Return the vocabulary entry with this id."""
        return str(self._tokenizer.id_to_token(token))

    def fingerprint(self) -> str:
        """Hash of the tokenizer's files."""
        return self._fingerprint
