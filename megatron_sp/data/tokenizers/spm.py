"""SentencePiece models; the library is imported when the first model is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from megatron_sp.data.tokenizers.tokenizer import well_formed
from megatron_sp.utils.errors import ConfigError, DataError

_EOD_PIECES = ("<eod>", "<|endoftext|>")


class SentencePieceTokenizer:
    """A SentencePiece model. A document ends with the piece ``<eod>`` if the model has one, else with its end-of-sentence id.

    Args:
        model: path of the ``.model`` file.
    Raises:
        DataError: no such file, not a model, or a model without any id that could end a document.
        ConfigError: the sentencepiece package is absent.
    """

    def __init__(self, model: str | Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise ConfigError(f"the sentencepiece package is needed to read {model}: pip install 'sentencepiece>=0.2.1'") from error
        contents = _read(Path(model))
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = self._processor.LoadFromSerializedProto(contents)
        except Exception as error:  # its errors are RuntimeError, OSError or its own, by version
            raise DataError(f"{model}: not a SentencePiece model ({_first_line(error)}): give the .model file, not the .vocab") from error
        if not loaded or self._processor.GetPieceSize() < 1:
            raise DataError(f"{model}: not a SentencePiece model: give the .model file, not the .vocab")
        self.vocab_size: int = self._processor.GetPieceSize()
        self.eod = self._find_eod(model)
        self._fingerprint = hashlib.sha256(b"SentencePieceTokenizer " + contents).hexdigest()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.EncodeAsIds(well_formed(text))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control pieces such as ``eod`` are left out.

        Raises:
            DataError: an id outside the vocabulary.
        """
        plain = [int(i) for i in ids]
        if plain and not (0 <= min(plain) and max(plain) < self.vocab_size):
            bad = next(i for i in plain if not 0 <= i < self.vocab_size)
            raise DataError(f"token id {bad}: expected 0 to {self.vocab_size - 1}, the vocabulary has {self.vocab_size} entries")
        text: str = self._processor.DecodeIds(plain)
        return text

    def fingerprint(self) -> str:
        return self._fingerprint

    def _find_eod(self, model: str | Path) -> int:
        for piece in _EOD_PIECES:
            i = self._processor.PieceToId(piece)
            if self._processor.IdToPiece(i) == piece:  # an unknown piece gives the id of <unk>
                return int(i)
        if self._processor.eos_id() < 0:
            raise DataError(f"{model}: has neither an end-of-sentence id nor a piece {_EOD_PIECES[0]}, one of which must end a document")
        return int(self._processor.eos_id())


def _read(path: Path) -> bytes:
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}: --tokenizer-model needs a SentencePiece .model file") from error
    if not contents:
        raise DataError(f"{path}: is empty: --tokenizer-model needs a SentencePiece .model file")
    return contents


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
