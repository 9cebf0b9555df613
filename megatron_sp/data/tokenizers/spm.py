"""SentencePiece tokenizers, and their conversion for programs that read ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sp.data.tokenizers.tokenizer import (
    MAX_BYTES,
    checked_ids,
    first_line,
    import_tokenizers,
    read_bounded,
    well_formed,
)  # fmt: skip
from megatron_sp.utils.errors import ConfigError, DataError

_SPACE = "\u2581"  # SentencePiece's letter for a space; it stands at the beginning of a word
_PROBES = (
    "", " ", "a", "The quick brown fox jumps over the lazy dog.", "  two  spaces\n\nlines\t\r\n end ",
    "na\u00efve \u00e9\u00e8 e\u0301", "\u4e2d\u56fd \U0001f600\u200d", "\ufb01 \u2460 \u00bd \uff21",
    "don't x=y 1992.5% 0x7f", "a" * 300, "</s><s><unk><pad>", "<0x0A>", "[CLS] [MASK]", "\u2581x \u2581\u2581",
    "\u0130stanbul \u00df UPPER lower",
)  # fmt: skip
_EOD_PIECES = ("<eod>", "<|endoftext|>")


class SentencePieceTokenizer:
    """Tokenizer from a SentencePiece model; a document ends with ``<eod>`` or ``<|endoftext|>``, else ``</s>``.

    Raises:
        DataError: the file is no model, or has no id that can end a document.
    """

    begin: tuple[int, ...] = ()

    def __init__(self, model: str | Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            needed = f"the sentencepiece package is needed to read {model}: pip install 'sentencepiece>=0.2.1'"
            raise ConfigError(needed) from error
        contents = read_bounded(Path(model), MAX_BYTES, "--tokenizer-model needs a SentencePiece .model file")
        self._processor = processor = sentencepiece.SentencePieceProcessor()
        way = "give the .model file, not the .vocab"
        try:
            loaded = processor.LoadFromSerializedProto(contents)
        except Exception as error:  # its errors are RuntimeError, OSError or its own, by version
            raise DataError(f"{model}: not a SentencePiece model ({first_line(error)}): {way}") from error
        if not loaded or processor.GetPieceSize() < 1:
            raise DataError(f"{model}: not a SentencePiece model: {way}")
        self.vocab_size: int = processor.GetPieceSize()
        eod = self._find(*_EOD_PIECES)
        if eod is None and processor.eos_id() < 0:
            neither = f"has neither an end-of-sentence id nor a piece {_EOD_PIECES[0]}"
            raise DataError(f"{model}: {neither}, one of which must end a document")
        self.eod = int(processor.eos_id()) if eod is None else eod
        self.unknown = int(processor.unk_id())  # what no piece can spell
        self.bos = None if processor.bos_id() < 0 else int(processor.bos_id())
        special = [self._find(f"[{name.upper()}]", f"<{name}>") for name in ("cls", "sep", "mask", "pad")]
        self.cls, self.sep, self.mask, self.pad = special
        # bool [vocab_size] each: pieces that begin a word, and pieces after which one begins
        ids = range(self.vocab_size)
        text = [processor.IdToPiece(i).replace(_SPACE, " ") for i in ids]
        apart = np.array([processor.IsControl(i) or processor.IsUnknown(i) or i in special for i in ids])
        self._begins = np.array([piece[:1].isspace() for piece in text]) | apart
        self._before_word = np.array([piece[-1:].isspace() for piece in text]) | apart
        self._fingerprint = hashlib.sha256(b"SentencePieceTokenizer " + contents).hexdigest()

    def _find(self, *pieces: str) -> int | None:
        # the id of the first of these pieces that the model has, else None
        for piece in pieces:
            i = self._processor.PieceToId(piece)
            if self._processor.IdToPiece(i) == piece:  # an unknown piece gives the id of <unk>
                return int(i)
        return None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.EncodeAsIds(well_formed(text))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        # control pieces, such as ``eod``, give no text
        text: str = self._processor.DecodeIds(checked_ids(ids, self.vocab_size))
        return text

    def starts_word(self, ids: np.ndarray) -> np.ndarray:
        """Return whether each piece begins with a space, or follows white space or a special token."""
        starts: np.ndarray = self._begins[ids]
        starts[:1] = True
        starts[1:] |= self._before_word[ids[:-1]]
        return starts

    def fingerprint(self) -> str:
        return self._fingerprint

    def ids_of_pieces(self, text: str) -> list[int]:
        """Return the ids of a text as found by looking up its pieces by name, as transformers does."""
        # another id than from ``encode`` where characters without a piece spell the name of a special one
        pieces = self._processor.EncodeAsPieces(well_formed(text))
        return [int(self._processor.PieceToId(piece)) for piece in pieces]

    def piece(self, token: int) -> str:
        return str(self._processor.IdToPiece(token))


class Llama2Tokenizer(SentencePieceTokenizer):
    """A SentencePiece model whose texts begin with BOS."""

    def __init__(self, model: str | Path) -> None:
        super().__init__(model)
        if self.bos is None:
            needs = "has no id that begins a text, which Llama2Tokenizer needs"
            raise DataError(f"{model}: {needs}: use --tokenizer-type SentencePieceTokenizer")
        self.begin = (self.bos,)


def library_tokenizer(model: SentencePieceTokenizer, texts: Iterable[str] = ()) -> Any | None:
    """Convert a model to a tokenizer of the library; None if it gives other ids on hard cases or ``texts``."""
    # BPE is built from pieces and scores: pairs are merged in the order of the scores of the resulting pieces. The type
    # of the model and its normalisation are not read from the file; instead the result has to give the same ids on many
    # texts. Unigram models and normalisations other than the identity fail: among equally likely segmentations
    # SentencePiece takes the one favoured by its 32-bit sums, rounded at each piece, whereas the library sums in 64
    # bits; and the library's Precompiled normaliser looks only at the first characters of a cluster.
    import_tokenizers()
    from tokenizers import Tokenizer, decoders, models, normalizers

    processor = model._processor
    pieces = [processor.IdToPiece(i) for i in range(model.vocab_size)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for i, piece in enumerate(pieces):
        score = float(processor.GetScore(i))
        ways = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in vocab and piece[at:] in vocab]
        merges += [(-score, vocab[a], vocab[b], a, b) for a, b in ways]
    pairs = [(a, b) for *_, a, b in sorted(merges)]
    spells_bytes = any(processor.IsByte(i) for i in range(model.vocab_size))
    bpe = models.BPE(vocab, pairs, unk_token=pieces[model.unknown], fuse_unk=True, byte_fallback=spells_bytes)
    converted = Tokenizer(bpe)
    space_in_front = processor.EncodeAsPieces("a")[:1] != ["a"]
    first = [normalizers.Prepend(_SPACE)] if space_in_front else []
    converted.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if space_in_front else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    converted.decoder = decoders.Sequence(steps)
    words = [piece.replace(_SPACE, " ") for piece in pieces]
    joined = ["".join(words[at : at + 50]) for at in range(0, len(words), 50)]
    spaced = [" ".join(words[at::97]) for at in range(min(97, len(words)))]
    probes = [*_PROBES, *joined, *spaced, *texts]
    same = all(converted.encode(text, add_special_tokens=False).ids == model.encode(text) for text in probes)
    return converted if same else None


def pieces_have_their_ids(model: SentencePieceTokenizer) -> bool:
    """Return whether ``ids_of_pieces`` are the ids of a text, whatever it spells out."""
    names = [model.piece(i) for i in range(model.vocab_size)]
    spelled = [text for name in names if len(name) > 1 for text in (name, f"a{name}a")]
    return all(model.ids_of_pieces(text) == model.encode(text) for text in [*_PROBES, *spelled])
