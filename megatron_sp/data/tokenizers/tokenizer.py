"""Interface of the tokenizers, those that need no file (bytes, and integers), and what all share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megatron_sp.utils.errors import ConfigError, DataError

FILE = "tokenizer.json"
MAX_BYTES = 64 << 20  # of a tokenizer's file; the largest vocabularies of today take 35 MB


class Tokenizer(Protocol):
    """Converter of text to ids and back; thread-safe."""

    vocab_size: int  # ids are 0 to vocab_size - 1
    eod: int  # ends a document
    bos: int | None  # may stand before a text; None, here and below, if the vocabulary has no such token
    begin: tuple[int, ...]  # with which a text begins where it is given to a GPT; often nothing
    cls: int | None  # starts a BERT sample
    sep: int | None  # ends each segment of one
    mask: int | None  # replaces a token to predict
    pad: int | None  # fills up a row

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        """Return bool [n]: whether each of the ids, int64 [n], begins a word; others continue the previous one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a text, without ``begin`` and ``eod``."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids of the vocabulary."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of everything that determines what ``encode`` returns."""
        ...


def choose_bos(tokenizer: Tokenizer, bos: bool | None) -> None:
    """Let texts begin with BOS, or not, or as the tokenizer's own do (None). Raises ConfigError: it has no BOS."""
    if bos is False:
        tokenizer.begin = ()
    elif bos and not tokenizer.begin:
        if tokenizer.bos is None:
            raise ConfigError(
                "--bos: the tokenizer has no token that begins a text (a bos_token in the tokenizer_config.json beside"
                " its file, or a SentencePiece model's own): leave --bos out"
            )
        tokenizer.begin = (tokenizer.bos,)


class SpecialTokens(NamedTuple):
    """Ids of the special tokens that BERT needs."""

    cls: int
    sep: int
    mask: int
    pad: int


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return BERT's special tokens. Raises ConfigError: the vocabulary lacks one."""
    ids = {name: getattr(tokenizer, name) for name in SpecialTokens._fields}
    lacking = [f"[{name.upper()}]" for name, token in ids.items() if token is None]
    if lacking:
        raise ConfigError(
            f"BERT needs the tokens [CLS], [SEP], [MASK] and [PAD], and {type(tokenizer).__name__} has no"
            f" {', '.join(lacking)}: take BertWordPieceLowerCase with a --vocab-file that has them, or train a"
            " tokenizer with megatron-sp tokenizer --bert"
        )
    return SpecialTokens(**ids)


class ByteTokenizer:
    """UTF-8 bytes, plus an end-of-document id."""

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
        # invalid UTF-8 (a sample cut inside a character) becomes U+FFFD
        return bytes(i for i in checked_ids(ids, self.vocab_size) if i != self.eod).decode("utf-8", errors="replace")

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(ids.size, bool)  # without a vocabulary there are no words

    def fingerprint(self) -> str:
        return hashlib.sha256(b"ByteTokenizer 257").hexdigest()


class NullTokenizer:
    """Text that is integers; documents end with ``eod`` (default: the last id)."""

    # ``vocab_size`` counts all ids; that of a command line counts the integers alone (``Config.adds_null_end``). For
    # BERT the four ids before the last are [PAD], [CLS], [SEP] and [MASK], if ``vocab_size`` is above 5.

    bos: int | None = None
    begin: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, eod: int | None = None) -> None:
        if vocab_size < 2:
            least = "must be at least 2 with NullTokenizer: one token and the end of a document"
            raise ConfigError(f"vocab_size ({vocab_size}) {least}")
        if eod is not None and not 0 <= eod < vocab_size:
            raise ConfigError(f"eod_id ({eod}) must be an id of the vocabulary, 0 to {vocab_size - 1}")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod is None else eod
        special: list[int | None] = [*range(vocab_size - 5, vocab_size - 1)] if vocab_size > 5 else [None] * 4
        self.pad, self.cls, self.sep, self.mask = special

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            reads = "NullTokenizer reads integers with spaces between them, not text"
            raise DataError(f"{reads}: {error}; choose another --tokenizer-type") from None
        return checked_ids(ids, self.vocab_size)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(ids.size, bool)

    def fingerprint(self) -> str:
        own_end = "" if self.eod == self.vocab_size - 1 else f" {self.eod}"
        return hashlib.sha256(f"NullTokenizer {self.vocab_size}{own_end}".encode()).hexdigest()


# ---- what the tokenizers share ----


def checked_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return ids as integers. Raises DataError: one is outside the vocabulary."""
    plain = [int(i) for i in ids]
    if plain and not (0 <= min(plain) and max(plain) < vocab_size):
        bad = next(i for i in plain if not 0 <= i < vocab_size)
        rule = f"expected 0 to {vocab_size - 1}, the vocabulary has {vocab_size} entries"
        raise DataError(f"token id {bad}: {rule}")
    return plain


def well_formed(text: str) -> str:
    """Replace lone surrogates, which JSON may have, by U+FFFD, and join pairs of them."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_bounded(path: Path, max_bytes: int, rule: str) -> bytes:
    """Read a whole file. Raises DataError: it cannot, or the file is empty or larger than ``max_bytes``."""
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


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def import_tokenizers() -> None:
    """Raise ConfigError if the tokenizers package is not installed."""
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        needed = f"the tokenizers package is needed for WordPiece and for files of Hugging Face ({error})"
        raise ConfigError(f"{needed}: pip install 'tokenizers>=0.22'") from error
