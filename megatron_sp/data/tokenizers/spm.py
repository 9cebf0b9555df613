"""SentencePiece tokenizers; the library is imported when the first model is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_sp.data.tokenizers.tokenizer import MAX_BYTES, read_bounded, well_formed
from megatron_sp.utils.errors import ConfigError, DataError

_EOD_PIECES = ("<eod>", "<|endoftext|>")
_SPACE = "\u2581"  # SentencePiece's letter for a space; it stands at the beginning of a word


class SentencePieceTokenizer:
    """Tokenizer from a SentencePiece model; a document ends with ``<eod>`` or ``<|endoftext|>``, else the end-of-sentence id.

    BERT's tokens are the pieces ``[CLS]``, ``[SEP]``, ``[MASK]`` and ``[PAD]``, or ``<cls>``, ``<sep>``, ``<mask>`` and
    ``<pad>``.

    Args:
        model: path of the ``.model`` file.
    Raises:
        DataError: the file is missing, is not a model, or the model has no id that can end a document.
        ConfigError: the sentencepiece package is not installed.
    """

    begin: tuple[int, ...] = ()

    def __init__(self, model: str | Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise ConfigError(f"the sentencepiece package is needed to read {model}: pip install 'sentencepiece>=0.2.1'") from error
        contents = read_bounded(Path(model), MAX_BYTES, "--tokenizer-model needs a SentencePiece .model file")
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = self._processor.LoadFromSerializedProto(contents)
        except Exception as error:  # its errors are RuntimeError, OSError or its own, by version
            raise DataError(f"{model}: not a SentencePiece model ({_first_line(error)}): give the .model file, not the .vocab") from error
        if not loaded or self._processor.GetPieceSize() < 1:
            raise DataError(f"{model}: not a SentencePiece model: give the .model file, not the .vocab")
        self.vocab_size: int = self._processor.GetPieceSize()
        self.eod = self._find_eod(model)
        self.bos = None if self._processor.bos_id() < 0 else int(self._processor.bos_id())
        self.cls, self.sep, self.mask, self.pad = (self._find(f"[{n.upper()}]", f"<{n}>") for n in ("cls", "sep", "mask", "pad"))
        self._begins, self._before_word = self._word_tables()
        self._fingerprint = hashlib.sha256(b"SentencePieceTokenizer " + contents).hexdigest()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.EncodeAsIds(well_formed(text))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; control pieces such as ``eod`` are omitted.

        Raises:
            DataError: an id outside the vocabulary.
        """
        plain = [int(i) for i in ids]
        if plain and not (0 <= min(plain) and max(plain) < self.vocab_size):
            bad = next(i for i in plain if not 0 <= i < self.vocab_size)
            raise DataError(f"token id {bad}: expected 0 to {self.vocab_size - 1}, the vocabulary has {self.vocab_size} entries")
        text: str = self._processor.DecodeIds(plain)
        return text

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        """Return whether each piece starts a word: it begins with a space, or follows white space or a special token."""
        starts: np.ndarray = self._begins[ids]
        starts[:1] = True
        starts[1:] |= self._before_word[ids[:-1]]
        return starts

    def fingerprint(self) -> str:
        return self._fingerprint

    def encode_pieces(self, text: str) -> list[str]:
        """Return the pieces of a text, with spaces as U+2581."""
        pieces: list[str] = self._processor.EncodeAsPieces(well_formed(text))
        return pieces

    def ids_of_pieces(self, text: str) -> list[int]:
        """Return the ids of a text as found by looking up its pieces by name, as transformers does.

        They equal those of ``encode``, except where characters without a piece spell the name of a special one.
        """
        return [int(self._processor.PieceToId(piece)) for piece in self.encode_pieces(text)]

    def piece(self, token: int) -> str:
        """Return the piece with this id."""
        return str(self._processor.IdToPiece(token))

    def scored_pieces(self) -> list[tuple[str, float]]:
        """Return every piece and its score, by id."""
        return [(self._processor.IdToPiece(i), float(self._processor.GetScore(i))) for i in range(self.vocab_size)]

    @property
    def unknown(self) -> int:
        """Id of text that no piece can spell."""
        return int(self._processor.unk_id())

    @property
    def spells_bytes(self) -> bool:
        """True if the model has byte pieces, which spell text that no other piece can."""
        return any(self._processor.IsByte(i) for i in range(self.vocab_size))

    def _find(self, *pieces: str) -> int | None:
        """Return the id of the first of these pieces that the model has, else None."""
        for piece in pieces:
            i = self._processor.PieceToId(piece)
            if self._processor.IdToPiece(i) == piece:  # an unknown piece gives the id of <unk>
                return int(i)
        return None

    def _word_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """bool [vocab_size] each: pieces that begin a word, and pieces after which one begins."""
        processor, size = self._processor, self.vocab_size
        text = [processor.IdToPiece(i).replace(_SPACE, " ") for i in range(size)]
        special = np.array([processor.IsControl(i) or processor.IsUnknown(i) for i in range(size)])
        special |= np.isin(np.arange(size), [i for i in (self.cls, self.sep, self.mask, self.pad) if i is not None])
        begins = np.array([piece[:1].isspace() for piece in text])
        ends = np.array([piece[-1:].isspace() for piece in text])
        return begins | special, ends | special

    def _find_eod(self, model: str | Path) -> int:
        found = self._find(*_EOD_PIECES)
        if found is not None:
            return found
        if self._processor.eos_id() < 0:
            raise DataError(f"{model}: has neither an end-of-sentence id nor a piece {_EOD_PIECES[0]}, one of which must end a document")
        return int(self._processor.eos_id())


class Llama2Tokenizer(SentencePieceTokenizer):
    """A SentencePiece model whose texts begin with BOS, as those of Llama 2 and Megatron's tokenizer of this name do; else the same.

    Raises:
        DataError: the model has no such id; or as for ``SentencePieceTokenizer``.
    """

    def __init__(self, model: str | Path) -> None:
        super().__init__(model)
        if self.bos is None:
            raise DataError(
                f"{model}: has no id that begins a text, which Llama2Tokenizer needs: use --tokenizer-type SentencePieceTokenizer"
            )
        self.begin = (self.bos,)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
