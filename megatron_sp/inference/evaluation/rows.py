"""Rows of tokens for scoring, and which of their tokens count.

A row has at most one more token than the model reads at once: all but the last are its input, all but the first its
labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.utils.errors import DataError


class ScoredTokens(NamedTuple):
    """Tokens of one row of a forward pass.

    Attributes:
        tokens: the model reads all but the last.
        first: number of leading predictions that are not scored: ``tokens[first + 1:]`` are scored.
    """

    tokens: Sequence[int] | np.ndarray
    first: int

    @property
    def num_scored(self) -> int:
        """Number of tokens that are scored."""
        return len(self.tokens) - 1 - self.first


def encoded(tokenizer: Tokenizer, texts: Sequence[str], where: str) -> list[list[int]]:
    """Encode texts. Raises DataError if there are no tokens at all, as some tokenizers drop what they do not know."""
    found = [tokenizer.encode(text) for text in texts]
    if not any(found):
        raise DataError(f"{where}: the tokenizer has no token for any of it: is it the one that the model was trained with?")
    return found


def front(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens before a text, which are not scored: those with which its texts begin, else the one that ends documents."""
    return list(tokenizer.begin) or [tokenizer.eod]


def windows(tokens: Sequence[int] | np.ndarray, length: int, stride: int, num_known: int = 1) -> Iterator[ScoredTokens]:
    """Yield rows in which every token but the first ``num_known`` is scored exactly once.

    Args:
        tokens: a document, or several concatenated.
        length: tokens that the model reads at once.
        stride: offset between consecutive windows; with ``length`` they do not overlap, with less every scored token
            after the first window has at least ``length - stride`` tokens of context.
    """
    scored, start = num_known - 1, 0  # the labels 1 to ``scored`` are done
    while scored < len(tokens) - 1:
        stop = min(start + length, len(tokens) - 1)
        yield ScoredTokens(tokens[start : stop + 1], scored - start)
        scored, start = stop, start + stride


def continuation(tokenizer: Tokenizer, context: str, text: str, length: int, where: str) -> ScoredTokens:
    """Return a row with the tokens of ``context + text``, of which those of ``text`` are scored.

    Both are encoded together, as they would be in a corpus, and split where the encoding of the context alone ends;
    trailing spaces of the context belong to the text. Before them stands what texts begin with (BOS); with nothing before
    the text, an end-of-document token. A context that is too long is truncated on the left.

    Args:
        length: tokens that the model reads at once.
        where: for messages.
    Raises:
        DataError: the text alone is too long, or has no tokens.
    """
    if not tokenizer.encode(text):  # nothing would be scored, or the context's last token
        raise DataError(f"{where}: the tokenizer has no token for '{text[:40]}': leave the line out, or use the tokenizer of the training")
    kept = context.rstrip()
    whole = tokenizer.encode(context + text)
    known = min(len(tokenizer.encode(kept)), len(whole) - 1) if kept else 0
    before = list(tokenizer.begin) if known else front(tokenizer)
    whole, known = [*before, *whole], len(before) + known
    num_scored = len(whole) - known
    if num_scored > length:
        raise DataError(f"{where}: '{text[:40]}...' has {num_scored} tokens, the model reads {length} at once: shorten it")
    whole = whole[-(length + 1) :]
    return ScoredTokens(whole, len(whole) - 1 - num_scored)
