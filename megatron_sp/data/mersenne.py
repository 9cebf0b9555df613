"""Bit-exact numpy versions of the two generators of C++'s ``<random>`` that Megatron-LM's compiled helpers use.

std::mt19937 seeded with an integer is the generator of ``numpy.random.RandomState``, which numpy promises not to
change. std::mt19937_64 is implemented here: 312 words of state, x[k+312] = x[k+156] ^ A(upper 33 bits of x[k], lower 31
bits of x[k+1]). A word depends on none of the 155 before it, so 156 words are computed at once. Source: M. Matsumoto
and T. Nishimura, Mersenne Twister; constants of the C++ standard, [rand.predef].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_WORDS, _HALF = 312, 156
_SEEDING = 6364136223846793005
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_UPPER = np.uint64(0xFFFFFFFF80000000)
_LOWER = np.uint64(0x000000007FFFFFFF)
_ONE = np.uint64(1)
_MASK64 = 2**64 - 1


def mt19937_blocks(seed: int, size: int) -> Iterator[np.ndarray]:
    """Yield the endless stream of std::mt19937(seed) as uint32 arrays of length ``size``."""
    random = np.random.RandomState(seed)
    while True:
        yield random.randint(0, 2**32, size, dtype=np.uint32)  # the whole range: every draw is one word of the stream


def mt19937_64(seed: int, count: int) -> np.ndarray:
    """Return the first draws of std::mt19937_64(seed), uint64 [count]."""
    words = np.empty((1 + -(-count // _WORDS)) * _WORDS, np.uint64)
    words[:_WORDS] = _seeded(seed)
    scratch = np.empty((2, _HALF), np.uint64)
    for start in range(0, words.size - _WORDS, _HALF):
        _next_half(words[start : start + _WORDS + _HALF], scratch)
    return _tempered(words[_WORDS : _WORDS + count])


def _seeded(seed: int) -> np.ndarray:
    words = [seed & _MASK64]
    for i in range(1, _WORDS):
        words.append((_SEEDING * (words[-1] ^ (words[-1] >> 62)) + i) & _MASK64)
    return np.array(words, np.uint64)


def _next_half(words: np.ndarray, scratch: np.ndarray) -> None:
    """Fill the last 156 of 468 words from the 312 before them; all operations are in place, as there are many short ones."""
    joined, low = scratch
    np.bitwise_and(words[:_HALF], _UPPER, out=joined)
    np.bitwise_and(words[1 : _HALF + 1], _LOWER, out=low)
    np.bitwise_or(joined, low, out=joined)
    np.bitwise_and(joined, _ONE, out=low)
    np.multiply(low, _MATRIX, out=low)
    np.right_shift(joined, _ONE, out=joined)
    np.bitwise_xor(joined, low, out=joined)
    np.bitwise_xor(joined, words[_HALF:_WORDS], out=words[_WORDS:])


def _tempered(x: np.ndarray) -> np.ndarray:
    x = x ^ ((x >> np.uint64(29)) & np.uint64(0x5555555555555555))
    x ^= (x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    x ^= (x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    x ^= x >> np.uint64(43)
    return x
