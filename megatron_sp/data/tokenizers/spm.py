"""SentencePiece tokenizers; the library is imported when the first model is loaded.

For programs that read ``tokenizer.json``, a BPE model is converted to the tokenizers library. BPE is built from pieces
and scores: pairs are merged in the order of the scores of the resulting pieces. The type of the model and its text
normalisation are not read from the .model file; instead the result is accepted if it gives the same ids on many texts.
Unigram models, and normalisations other than the identity, fail this test and are not converted: among equally likely
segmentations SentencePiece takes the one favoured by its 32-bit sums, rounded at each piece (it matters in one text of
some hundreds, mostly in runs of "="), whereas the library sums in 64 bits; and the library's Precompiled normaliser
looks only at the first characters of a cluster (a full-width A followed by an accent loses the accent).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sp.data.tokenizers.tokenizer import MAX_BYTES, import_tokenizers, read_bounded, well_formed
from megatron_sp.utils.errors import ConfigError, DataError

_SPACE = "\u2581"  # SentencePiece's letter for a space; it stands at the beginning of a word
_PROBES = (
    "", " ", "a", "The quick brown fox jumps over the lazy dog.", "  two  spaces\n\nlines\t\r\n end ", "na\u00efve \u00e9\u00e8 e\u0301",
    "\u4e2d\u56fd \U0001f600\u200d", "\ufb01 \u2460 \u00bd \uff21", "don't x=y 1992.5% 0x7f", "a" * 300, "</s><s><unk><pad>", "<0x0A>",
    "[CLS] [MASK]", "\u2581x \u2581\u2581", "\u0130stanbul \u00df UPPER lower",
)  # fmt: skip
_EOD_PIECES = ("<eod>", "<|endoftext|>")


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
            raise ConfigError(
                f"the sentencepiece package is needed to read {model}: pip install 'sentencepiece>=0.2.1'"
            ) from error
        contents = read_bounded(Path(model), MAX_BYTES, "--tokenizer-model needs a SentencePiece .model file")
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = self._processor.LoadFromSerializedProto(contents)
        except Exception as error:  # its errors are RuntimeError, OSError or its own, by version
            raise DataError(
                f"{model}: not a SentencePiece model ({_first_line(error)}): give the .model file, not the .vocab"
            ) from error
        if not loaded or self._processor.GetPieceSize() < 1:
            raise DataError(f"{model}: not a SentencePiece model: give the .model file, not the .vocab")
        self.vocab_size: int = self._processor.GetPieceSize()
        self.eod = self._find_eod(model)
        self.bos = None if self._processor.bos_id() < 0 else int(self._processor.bos_id())
        self.cls, self.sep, self.mask, self.pad = (
            self._find(f"[{n.upper()}]", f"<{n}>") for n in ("cls", "sep", "mask", "pad")
        )
        self._begins, self._before_word = self._word_tables()
        self._fingerprint = hashlib.sha256(b"SentencePieceTokenizer " + contents).hexdigest()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.EncodeAsIds(well_formed(text))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; control pieces such as ``eod`` are omitted. Raises DataError: an id outside the vocabulary."""
        plain = [int(i) for i in ids]
        if plain and not (0 <= min(plain) and max(plain) < self.vocab_size):
            bad = next(i for i in plain if not 0 <= i < self.vocab_size)
            raise DataError(
                f"token id {bad}: expected 0 to {self.vocab_size - 1}, the vocabulary has {self.vocab_size} entries"
            )
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
        return [(self._processor.IdToPiece(i), float(self._processor.GetScore(i))) for i in range(self.vocab_size)]

    @property
    def unknown(self) -> int:
        """Id of text that no piece can spell."""
        return int(self._processor.unk_id())

    @property
    def spells_bytes(self) -> bool:
        return any(self._processor.IsByte(i) for i in range(self.vocab_size))

    def _find(self, *pieces: str) -> int | None:
        # the id of the first of these pieces that the model has, else None
        for piece in pieces:
            i = self._processor.PieceToId(piece)
            if self._processor.IdToPiece(i) == piece:  # an unknown piece gives the id of <unk>
                return int(i)
        return None

    def _word_tables(self) -> tuple[np.ndarray, np.ndarray]:
        # bool [vocab_size] each: pieces that begin a word, and pieces after which one begins
        processor, size = self._processor, self.vocab_size
        text = [processor.IdToPiece(i).replace(_SPACE, " ") for i in range(size)]
        special = np.array([processor.IsControl(i) or processor.IsUnknown(i) for i in range(size)])
        special |= np.isin(np.arange(size), [i for i in (self.cls, self.sep, self.mask, self.pad) if i is not None])
        begins = np.array([piece[:1].isspace() for piece in text])
        ends = np.array([piece[-1:].isspace() for piece in text])
        return begins | special, ends | special

    def _find_eod(self, model: str | Path) -> int:
        eod = self._find(*_EOD_PIECES)
        if eod is not None:
            return eod
        if self._processor.eos_id() < 0:
            raise DataError(
                f"{model}: has neither an end-of-sentence id nor a piece {_EOD_PIECES[0]}, one of which must end a document"
            )
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


def library_tokenizer(model: SentencePieceTokenizer, texts: Iterable[str] = ()) -> Any | None:
    """Convert a model to a tokenizer of the library; None if the result does not give the same ids.

    Args:
        texts: texts to compare, besides a few hard cases.
    Raises:
        ConfigError: the tokenizers package is not installed.
    """
    import_tokenizers()
    pieces = model.scored_pieces()
    texts = [*_PROBES, *_spelled(pieces), *texts]
    converted = _bpe(model, pieces)
    same = all(converted.encode(text, add_special_tokens=False).ids == model.encode(text) for text in texts)
    return converted if same else None


def pieces_have_their_ids(model: SentencePieceTokenizer) -> bool:
    """Return whether looking up a text's pieces by name gives the ids of the text, whatever the text spells out."""
    names = [piece for piece, _ in model.scored_pieces()]
    spelled = [f"{front}{name}{behind}" for name in names for front, behind in (("", ""), ("a", "a")) if len(name) > 1]
    return all(model.ids_of_pieces(text) == model.encode(text) for text in [*_PROBES, *spelled])


def _spelled(pieces: Sequence[tuple[str, float]]) -> list[str]:
    words = [piece.replace(_SPACE, " ") for piece, _ in pieces]
    together = ["".join(words[at : at + 50]) for at in range(0, len(words), 50)]
    return together + [" ".join(words[at::97]) for at in range(min(97, len(words)))]


def _bpe(model: SentencePieceTokenizer, pieces: Sequence[tuple[str, float]]) -> Any:
    from tokenizers import Tokenizer, models

    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    unknown = pieces[model.unknown][0]
    converted = Tokenizer(
        models.BPE(vocab, _merges(vocab, pieces), unk_token=unknown, fuse_unk=True, byte_fallback=model.spells_bytes)
    )
    _set_spaces(converted, in_front=model.encode_pieces("a")[:1] != ["a"])
    return converted


def _merges(vocab: dict[str, int], pieces: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    merges = []
    for piece, score in pieces:
        ways = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in vocab and piece[at:] in vocab]
        merges += [(-score, vocab[a], vocab[b], a, b) for a, b in ways]
    return [(a, b) for *_, a, b in sorted(merges)]


def _set_spaces(made: Any, *, in_front: bool) -> None:
    from tokenizers import decoders, normalizers

    first = [normalizers.Prepend(_SPACE)] if in_front else []
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if in_front else []
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last])
