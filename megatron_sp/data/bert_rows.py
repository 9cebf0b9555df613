"""BERT samples: masking, and their layout in rows of ``seq_length``, padded or several samples packed into one row.

Packing takes the samples in order and begins a new row when the next one no longer fits, so the contents of a row
depend on the sample lengths alone. Each sample attends only to itself and has its own positions, which ``documents``
and ``positions`` tell the model, as for GPT (``packing``). The rest of a row is padding, which counts as a separate
document.

Masking makes the same draws in the same order as Megatron-LM's, by whole words. Words are visited in random order; at
each, a run of n = 1, 2 or 3 words is proposed with P(n) ~ 1/n, shortened until it fits into the number of tokens that
may still be masked, and accepted unless one of its tokens is already masked. Of the accepted tokens, 80 % become
[MASK], 10 % a random id, and 10 % stay unchanged. [CLS] and [SEP] belong to no word. Source: the algorithm of
Megatron-LM's core/datasets/masked_dataset.py and bert_dataset.py with the settings of pretrain_bert. Its draws after
the last mask (a second shuffle, for a permutation that BERT does not use) have no effect and are omitted here.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from megatron_sp.data.dataset import Sample

_MAX_NGRAM = 3
_SHARES = 1.0 / np.arange(1, _MAX_NGRAM + 1)
_SHARES = _SHARES / _SHARES.sum()
_CUMULATIVE = (_SHARES.cumsum() / _SHARES.cumsum()[-1]).tolist()  # computed as in RandomState.choice
_MASK_SHARE, _KEEP_SHARE = 0.8, 0.5  # the second is a share of those that do not become [MASK]


class Piece(NamedTuple):
    """One unpadded sample of n tokens."""

    tokens: np.ndarray  # int64 [n], the model's input
    types: np.ndarray  # int64 [n], 0 for [CLS] A [SEP], 1 for B [SEP]
    masked: np.ndarray  # int64 [m], positions to predict
    labels: np.ndarray  # int64 [m], original tokens at these positions
    swapped: bool | None  # True if A and B are swapped; None if there is no B


def lay_out(pieces: list[Piece], seq_length: int, pad: int, packed: bool) -> Sample:
    """Lay out one row.

    Args:
        pieces: one sample, or with ``packed`` as many as fit.
    Returns:
        ``tokens``, ``types`` and ``labels`` int64 [s] (labels 0 where nothing is predicted) and ``loss_mask`` float32
        [s] (1 where a token is predicted). A single sample also has ``length`` int64 [] (tokens before the padding)
        and, with two segments, ``order`` int64 [] (1 if they are swapped); packed samples have ``documents`` int64 [s]
        and ``positions`` int64 [s].
    """
    tokens, types = np.full(seq_length, pad, np.int64), np.zeros(seq_length, np.int64)
    labels, loss_mask = np.zeros(seq_length, np.int64), np.zeros(seq_length, np.float32)
    documents, positions = np.full(seq_length, len(pieces), np.int64), np.empty(seq_length, np.int64)
    at = 0
    for number, piece in enumerate(pieces):
        end = at + piece.tokens.size
        tokens[at:end], types[at:end], documents[at:end] = piece.tokens, piece.types, number
        labels[at + piece.masked], loss_mask[at + piece.masked] = piece.labels, 1.0
        positions[at:end] = np.arange(end - at)
        at = end
    positions[at:] = np.arange(seq_length - at)
    row: Sample = {"tokens": tokens, "types": types, "labels": labels, "loss_mask": loss_mask}
    if packed:
        return row | {"documents": documents, "positions": positions}
    row["length"] = np.array(at, np.int64)
    if pieces[0].swapped is not None:
        row["order"] = np.array(pieces[0].swapped, np.int64)
    return row


def row_lengths(pieces: np.ndarray, seq_length: int) -> np.ndarray:
    """Return the tokens of each document of a packed row, given those of its samples: they, and the padding if there is some."""
    padding = seq_length - int(pieces.sum())
    return np.append(pieces, padding) if padding else pieces


def pack(lengths: np.ndarray, seq_length: int) -> np.ndarray:
    """Assign samples to rows: row k holds the samples from entry k up to entry k+1.

    Args:
        lengths: [n], tokens of each sample, none above ``seq_length``.
    Returns:
        int64 [rows + 1], from 0 to n.
    """
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    next_row = array("q", (np.searchsorted(before, before[:-1] + seq_length, side="right") - 1).tobytes())
    rows, at = array("q", [0]), 0
    while at < len(next_row):
        at = next_row[at]
        rows.append(at)
    return np.frombuffer(rows, np.int64)


class MaskRule(NamedTuple):
    """Parameters of the masking.

    Attributes:
        cls, sep, mask: ids of [CLS], [SEP] and [MASK].
    """

    mask_prob: float  # fraction of the tokens to mask, in (0, 1)
    cls: int
    sep: int
    mask: int
    vocab_size: int  # random ids are below this


def mask_tokens(
    tokens: np.ndarray, starts_word: np.ndarray, target_length: int, rule: MaskRule, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Mask one sample.

    Args:
        tokens: int64 [n], including [CLS] and [SEP].
        starts_word: bool [n], True where a word begins; other tokens belong to the word before them.
        target_length: target length of the sample, from the index; at most ``mask_prob`` of it is masked.
    Returns:
        The model's input, int64 [n], and the masked positions, int64 [m], unordered.
    """
    words = words_of(tokens, starts_word, rule)
    limit = min(rule.mask_prob * target_length, max(1, round(tokens.size * rule.mask_prob)))
    order = np.arange(len(words))
    random.shuffle(order)
    seen = tokens.copy()
    masked: list[int] = []
    taken: set[int] = set()
    for first in order.tolist():
        if len(masked) >= limit:
            break
        n = 1 + bisect_right(_CUMULATIVE, random.random_sample())
        run = _run(words, first, n, limit - len(masked))
        if run is None or not taken.isdisjoint(run):
            continue
        taken.update(run)
        masked.extend(run)
        for position in run:
            replacement = _replacement(rule, random)
            if replacement is not None:
                seen[position] = replacement
    return seen, np.array(masked, np.int64)


def words_of(tokens: np.ndarray, starts_word: np.ndarray, rule: MaskRule) -> list[list[int]]:
    # the positions of each word; a piece whose word begins before the sample's cut joins the preceding word
    words: list[list[int]] = []
    for position, (token, starts) in enumerate(zip(tokens.tolist(), starts_word.tolist(), strict=True)):
        if token == rule.cls or token == rule.sep:
            continue
        if starts or not words:
            words.append([position])
        else:
            words[-1].append(position)
    return words


def _run(words: list[list[int]], first: int, n: int, room: float) -> list[int] | None:
    # positions of at most ``n`` words from ``first`` on that fit into ``room`` tokens; None if not even one word fits
    for length in range(n, 0, -1):
        run = [position for word in words[first : first + length] for position in word]
        if len(run) <= room:
            return run
    return None


def _replacement(rule: MaskRule, random: np.random.RandomState) -> int | None:
    # draw the replacement of a masked token; None keeps the token
    if random.random_sample() < _MASK_SHARE:
        return rule.mask
    if random.random_sample() < _KEEP_SHARE:
        return None
    return int(random.randint(0, rule.vocab_size))
