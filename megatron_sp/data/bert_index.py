"""Sentence-level sample map of BERT: the same rows (first sentence, last one + 1, target length) as Megatron-LM's."""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_WORDS, _HALF = 312, 156
_SEEDING = 6364136223846793005
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_UPPER = np.uint64(0xFFFFFFFF80000000)
_LOWER = np.uint64(0x000000007FFFFFFF)
_ONE = np.uint64(1)
LONG_SENTENCE = 512  # tokens; one sentence above this rules out its document, unless it is all of it
_DRAWS = 1 << 14
_SHUFFLE_BLOCK = 16.0


class SampleRule(NamedTuple):
    """Parameters that determine the samples of given documents."""

    max_length: int  # tokens of a sample at full length, at least 2
    short_seq_prob: float  # fraction of shorter samples, in [0, 1]
    seed: int  # seed of the target lengths and of the shuffle
    min_sentences: int  # minimum number of sentences in a document, and in every sample but the last of a document


def build_bert_index(
    bounds: np.ndarray, lengths: np.ndarray, rule: SampleRule, max_samples: int | None = None,
    max_epochs: int | None = None,
) -> np.ndarray:  # fmt: skip
    """Build the rows, [n, 3], uint32 if sentence numbers fit, else uint64.

    Args:
        bounds: int64 [d + 1], first sentence of each document, then one past the last sentence.
        lengths: int32 [sentences of the whole data set], tokens of each sentence.
        max_samples, max_epochs: whole epochs are added until one of these is reached.
    """
    if max_samples is None and max_epochs is None:
        raise ValueError("build_bert_index needs max_samples or max_epochs: the epochs would never end")
    if rule.max_length < 2 or rule.min_sentences < 1 or not 0 <= rule.short_seq_prob <= 1:
        raise ValueError(f"{rule}: max_length must be at least 2, min_sentences at least 1, short_seq_prob in [0, 1]")
    documents = eligible_documents(bounds, lengths, rule.min_sentences)
    dtype = np.uint32 if lengths.size <= 2**32 - 1 else np.uint64
    parts: list[np.ndarray] = []
    if documents.first.size:
        tokens = array("q", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tobytes())
        targets = _targets(rule)
        count = epoch = 0
        while (max_samples is None or count < max_samples) and (max_epochs is None or epoch < max_epochs):
            if parts and not rule.short_seq_prob:
                rows = parts[0]  # nothing is drawn: all epochs are alike
            else:
                rows = _walk(documents, tokens, rule, targets).astype(dtype)
            parts.append(rows)
            count, epoch = count + len(rows), epoch + 1
    rows = np.concatenate(parts) if parts else np.zeros((0, 3), dtype)
    return rows[shuffled_order(len(rows), rule.seed + 1)]


class Documents(NamedTuple):
    """Sentences of each document, both int64 [docs]."""

    first: np.ndarray
    last: np.ndarray  # one past its last sentence


def eligible_documents(bounds: np.ndarray, lengths: np.ndarray, min_sentences: int) -> Documents:
    """Return the documents that yield samples."""
    first, last = bounds[:-1].astype(np.int64), bounds[1:].astype(np.int64)
    before = np.concatenate([[0], np.cumsum(lengths > LONG_SENTENCE)])
    too_long = (last - first > 1) & (before[last] > before[first])
    good = (last - first >= min_sentences) & ~too_long
    return Documents(first[good], last[good])


def left_out(bounds: np.ndarray, lengths: np.ndarray, min_sentences: int) -> str:
    """Describe the documents that yield no sample because of a long sentence, if there are some."""
    sizes = np.diff(bounds.astype(np.int64))
    least = max(2, min_sentences)  # a document of one sequence may be of any length
    several = int((sizes >= least).sum())
    kept = eligible_documents(bounds, lengths, least).first.size
    if several <= kept:
        return ""
    return (
        f"{several - kept:,} of {sizes.size:,} documents are left out, which have a sentence above {LONG_SENTENCE}"
        " tokens (whatever the length of a row is, as in Megatron-LM, whose samples these are): text without ends of"
        " sentences, such as tables, is best cut before"
    )


def sentence_summary(bounds: np.ndarray, lengths: np.ndarray) -> str:
    """Describe how much of a data set of sentences BERT can use; empty without sentences."""
    sizes = np.diff(bounds)
    if not sizes.size or int(sizes.max()) < 2:
        return ""
    full = int((sizes > 0).sum())
    two, one = (eligible_documents(bounds, lengths, least).first.size for least in (2, 1))
    return (
        f"sentences: {lengths.size / full:.1f} per document, at most {int(lengths.max()):,} tokens; BERT takes samples"
        f" from {two:,} documents, without the binary head from {one:,}; {full - one:,} have a sentence above"
        f" {LONG_SENTENCE} tokens"
    )


def _walk(documents: Documents, tokens: array[int], rule: SampleRule, draws: Iterator[int]) -> np.ndarray:
    # int64 [n, 3]: the samples of all documents, in order. tokens: [sentences + 1], tokens before each sentence; an
    # ``array``: indexing numpy is slow, and a list takes five times the memory. Each draw determines where the next
    # sample starts, so this loop is Python's. Source: Megatron-LM's core/datasets/helpers.cpp :: build_mapping, with
    # its two passes (count, then fill) merged into one.
    starts, ends, targets = array("q"), array("q"), array("q")
    for start, last in zip(array("q", documents.first.tobytes()), array("q", documents.last.tobytes()), strict=True):
        while start < last:
            target = next(draws)
            starts.append(start)
            targets.append(target)
            end = bisect_left(tokens, tokens[start] + target, start, last)
            if end < start + rule.min_sentences:
                end = start + rule.min_sentences
            start = last if end > last - 2 else end  # never leave a single sentence over
            ends.append(start)
        next(draws)  # Megatron-LM draws once more at the end of each document
    return np.stack([np.frombuffer(column, np.int64) for column in (starts, ends, targets)], axis=1)


def _targets(rule: SampleRule) -> Iterator[int]:
    # the target length before each sample: the maximum, but for one draw in ``ratio``, which gives a shorter one
    if rule.short_seq_prob == 0:
        return itertools.repeat(rule.max_length)
    ratio = math.floor(1 / rule.short_seq_prob + 0.5)  # C's round, half away from zero
    blocks = (block.astype(np.int64) for block in mt19937_blocks(rule.seed, _DRAWS))
    return itertools.chain.from_iterable(
        np.where(draw % ratio == 0, 2 + draw % (rule.max_length - 1), rule.max_length).tolist() for draw in blocks
    )


def shuffled_order(n: int, seed: int) -> np.ndarray:
    """Return 0 to n - 1, int64, after a Fisher-Yates shuffle from the top with the draws of std::mt19937_64(seed)."""
    # Swaps are made in blocks. Within a block, those that share no position with another one are independent and are
    # vectorised; the few others (about (block size)^2 / n) are made one by one.
    order = np.arange(n)
    top = n - 1
    draws = mt19937_64(seed, max(n - 1, 0))
    while top > 0:
        size = min(top, max(64, int(_SHUFFLE_BLOCK * math.sqrt(top))))
        i = np.arange(top, top - size, -1)
        j = (draws[n - 1 - top : n - 1 - top + size] % (i + 1).astype(np.uint64)).astype(np.int64)
        by_place = np.argsort(j, kind="stable")
        repeated = np.zeros(j.size, bool)
        same = j[by_place[1:]] == j[by_place[:-1]]
        repeated[by_place[1:][same]] = repeated[by_place[:-1][same]] = True
        within = j >= i[-1]  # j is also the i of another swap, or of this one
        entangled = repeated | within
        entangled[i[0] - j[within]] = True
        free = ~entangled
        order[i[free]], order[j[free]] = order[j[free]], order[i[free]]
        for a, b in zip(i[entangled].tolist(), j[entangled].tolist(), strict=True):
            order[a], order[b] = order[b], order[a]
        top -= size
    return order


def mt19937_blocks(seed: int, size: int) -> Iterator[np.ndarray]:
    """Yield the stream of C++'s std::mt19937(seed) as uint32 arrays of length ``size``."""
    random = np.random.RandomState(seed)  # the same generator, which numpy promises not to change
    while True:
        yield random.randint(0, 2**32, size, dtype=np.uint32)  # the whole range: every draw is one word of the stream


def mt19937_64(seed: int, count: int) -> np.ndarray:
    """Return the first draws of std::mt19937_64(seed), uint64 [count]."""
    # 312 words of state, x[k+312] = x[k+156] ^ A(upper 33 bits of x[k], lower 31 bits of x[k+1]). A word depends on
    # none of the 155 before it, so 156 are computed at once, in place, as there are many short operations. Source: M.
    # Matsumoto and T. Nishimura, Mersenne Twister; constants of the C++ standard, [rand.predef].
    words = np.empty((1 + -(-count // _WORDS)) * _WORDS, np.uint64)
    state = [seed & (2**64 - 1)]
    for i in range(1, _WORDS):
        state.append((_SEEDING * (state[-1] ^ (state[-1] >> 62)) + i) & (2**64 - 1))
    words[:_WORDS] = state
    joined, low = np.empty((2, _HALF), np.uint64)
    for start in range(0, words.size - _WORDS, _HALF):
        window = words[start : start + _WORDS + _HALF]
        np.bitwise_and(window[:_HALF], _UPPER, out=joined)
        np.bitwise_and(window[1 : _HALF + 1], _LOWER, out=low)
        np.bitwise_or(joined, low, out=joined)
        np.bitwise_and(joined, _ONE, out=low)
        np.multiply(low, _MATRIX, out=low)
        np.right_shift(joined, _ONE, out=joined)
        np.bitwise_xor(joined, low, out=joined)
        np.bitwise_xor(joined, window[_HALF:_WORDS], out=window[_WORDS:])
    x = words[_WORDS : _WORDS + count]
    x = x ^ ((x >> np.uint64(29)) & np.uint64(0x5555555555555555))  # tempering
    x ^= (x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    x ^= (x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    x ^= x >> np.uint64(43)
    return x
