"""Conversion of a SentencePiece model to the tokenizers library, for programs that read ``tokenizer.json``.

BPE is built from pieces and scores: pairs are merged in the order of the scores of the resulting pieces. The type of
the model and its text normalisation are not read from the .model file; instead the result is accepted if it gives the
same ids on many texts. Unigram models, and normalisations other than the identity, fail this test and are not
converted: among equally likely segmentations SentencePiece takes the one favoured by its 32-bit sums, rounded at each
piece (it matters in one text of some hundreds, mostly in runs of "="), whereas the library sums in 64 bits; and the
library's Precompiled normaliser looks only at the first characters of a cluster (a full-width A followed by an accent
loses the accent).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron_sp.data.tokenizers.library import import_tokenizers
from megatron_sp.data.tokenizers.spm import SentencePieceTokenizer

_SPACE = "\u2581"
_PROBES = (
    "", " ", "a", "The quick brown fox jumps over the lazy dog.", "  two  spaces\n\nlines\t\r\n end ", "na\u00efve \u00e9\u00e8 e\u0301",
    "\u4e2d\u56fd \U0001f600\u200d", "\ufb01 \u2460 \u00bd \uff21", "don't x=y 1992.5% 0x7f", "a" * 300, "</s><s><unk><pad>", "<0x0A>",
    "[CLS] [MASK]", "\u2581x \u2581\u2581", "\u0130stanbul \u00df UPPER lower",
)  # fmt: skip


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
    made = _bpe(model, pieces)
    same = all(made.encode(text, add_special_tokens=False).ids == model.encode(text) for text in texts)
    return made if same else None


def pieces_have_their_ids(model: SentencePieceTokenizer) -> bool:
    """Return whether looking up a text's pieces by name gives the ids of the text, whatever the text spells out."""
    names = [piece for piece, _ in model.scored_pieces()]
    spelled = [f"{front}{name}{behind}" for name in names for front, behind in (("", ""), ("a", "a")) if len(name) > 1]
    return all(model.ids_of_pieces(text) == model.encode(text) for text in [*_PROBES, *spelled])


def _spelled(pieces: Sequence[tuple[str, float]]) -> list[str]:
    """Return texts that together spell out all pieces, several pieces in each."""
    words = [piece.replace(_SPACE, " ") for piece, _ in pieces]
    together = ["".join(words[at : at + 50]) for at in range(0, len(words), 50)]
    return together + [" ".join(words[at::97]) for at in range(min(97, len(words)))]


def _bpe(model: SentencePieceTokenizer, pieces: Sequence[tuple[str, float]]) -> Any:
    from tokenizers import Tokenizer, models

    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    unknown = pieces[model.unknown][0]
    made = Tokenizer(models.BPE(vocab, _merges(vocab, pieces), unk_token=unknown, fuse_unk=True, byte_fallback=model.spells_bytes))
    _set_spaces(made, in_front=model.encode_pieces("a")[:1] != ["a"])
    return made


def _merges(vocab: dict[str, int], pieces: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return every way to merge two pieces into a third, ordered by the score of the result."""
    found = []
    for piece, score in pieces:
        ways = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in vocab and piece[at:] in vocab]
        found += [(-score, vocab[a], vocab[b], a, b) for a, b in ways]
    return [(a, b) for *_, a, b in sorted(found)]


def _set_spaces(made: Any, *, in_front: bool) -> None:
    from tokenizers import decoders, normalizers

    first = [normalizers.Prepend(_SPACE)] if in_front else []
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if in_front else []
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last])
