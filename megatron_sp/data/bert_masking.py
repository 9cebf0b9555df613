"""Masking of BERT samples: the same draws in the same order as Megatron-LM's.

Masking is by whole words. Words are visited in random order; at each, a run of n = 1, 2 or 3 words is proposed with
P(n) ~ 1/n, shortened until it fits into the number of tokens that may still be masked, and accepted unless one of its
tokens is already masked. Of the accepted tokens, 80 % become [MASK], 10 % a random id, and 10 % stay unchanged. [CLS]
and [SEP] belong to no word. Source: the algorithm of Megatron-LM's core/datasets/masked_dataset.py and bert_dataset.py
with the settings of pretrain_bert. Its draws after the last mask (a second shuffle, for a permutation that BERT does
not use) have no effect and are omitted here.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

_MAX_NGRAM = 3
_SHARES = 1.0 / np.arange(1, _MAX_NGRAM + 1)
_SHARES = _SHARES / _SHARES.sum()
_CUMULATIVE = (_SHARES.cumsum() / _SHARES.cumsum()[-1]).tolist()  # computed as in RandomState.choice
_MASK_SHARE, _KEEP_SHARE = 0.8, 0.5  # the second is a share of those that do not become [MASK]


class MaskRule(NamedTuple):
    """Parameters of the masking.

    Attributes:
        mask_prob: fraction of the tokens to mask, in (0, 1).
        cls, sep, mask: ids of [CLS], [SEP] and [MASK].
        vocab_size: random ids are below this.
    """

    mask_prob: float
    cls: int
    sep: int
    mask: int
    vocab_size: int


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
    """Return the positions of each word; a piece whose word begins before the sample's cut joins the preceding word."""
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
    """Positions of at most ``n`` words from ``first`` on that fit into ``room`` tokens; None if not even one word fits."""
    for length in range(n, 0, -1):
        run = [position for word in words[first : first + length] for position in word]
        if len(run) <= room:
            return run
    return None


def _replacement(rule: MaskRule, random: np.random.RandomState) -> int | None:
    """Draw the replacement of a masked token; None keeps the token."""
    if random.random_sample() < _MASK_SHARE:
        return rule.mask
    if random.random_sample() < _KEEP_SHARE:
        return None
    return int(random.randint(0, rule.vocab_size))
