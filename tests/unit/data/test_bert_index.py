"""The sentence-level sample map of BERT: golden values, the streams of C++, and against a literal walk."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_sp.data.bert_index import SampleRule, build_bert_index, mt19937_64, mt19937_blocks, shuffled_order
from megatron_sp.data.index_cache import ANY_LENGTH, cached_arrays

BOUNDS = np.array([0, 3, 4, 8])
LENGTHS = np.array([10, 12, 9, 20, 15, 7, 30, 5], np.int32)
GOLDEN = {  # made by Megatron-LM's own helpers: two epochs, max_length 32, short_seq_prob 0.1, seed 1234; by min_sentences
    2: [[0, 3, 32], [0, 3, 32], [4, 8, 32], [4, 8, 32]],
    1: [[4, 8, 32], [3, 4, 32], [0, 3, 32], [4, 8, 32], [3, 4, 32], [0, 3, 32]],
}


@pytest.mark.parametrize("min_sentences", GOLDEN)
def test_golden_values(min_sentences: int) -> None:
    rows = build_bert_index(BOUNDS, LENGTHS, SampleRule(32, 0.1, 1234, min_sentences), max_samples=100, max_epochs=2)
    assert rows.tolist() == GOLDEN[min_sentences] and rows.dtype == np.uint32


def test_streams_are_those_of_the_standard() -> None:
    """The C++ standard names the 10000th draw of each generator with its default seed, [rand.predef]."""
    assert next(mt19937_blocks(5489, 10_000))[-1] == 4123659995
    assert mt19937_64(5489, 10_000)[-1] == 9981545732273789042
    pieces = np.concatenate(list(itertools.islice(mt19937_blocks(7, 101), 30)))
    assert pieces.tolist() == next(mt19937_blocks(7, 30 * 101)).tolist()
    for count in (0, 1, 155, 156, 157, 312, 313, 700):
        assert mt19937_64(3, count).tolist() == mt19937_64(3, 1000)[:count].tolist()


def literal(bounds: list[int], lengths: list[int], rule: SampleRule, max_samples: int, max_epochs: int) -> list[list[int]]:
    """The rows by the definition: epoch by epoch, document by document, sentence by sentence."""
    draws = itertools.chain.from_iterable(mt19937_blocks(rule.seed, 1000))
    ratio = int(1 / rule.short_seq_prob + 0.5) if rule.short_seq_prob else 0

    def target_length() -> int:
        if ratio == 0:
            return rule.max_length
        draw = int(next(draws))
        return 2 + draw % (rule.max_length - 1) if draw % ratio == 0 else rule.max_length

    rows: list[list[int]] = []
    for _ in range(max_epochs):
        if len(rows) >= max_samples:
            break
        for first, last in itertools.pairwise(bounds):
            left = last - first
            if left < rule.min_sentences or (left > 1 and max(lengths[first:last]) > 512):
                continue
            begin, size, taken, target = first, 0, 0, target_length()
            for sentence in range(first, last):
                size, taken, left = size + lengths[sentence], taken + 1, left - 1
                if left == 0 or (size >= target and left > 1 and taken >= rule.min_sentences):
                    rows.append([begin, sentence + 1, target])
                    begin, size, taken, target = sentence + 1, 0, 0, target_length()
    for i, draw in zip(range(len(rows) - 1, 0, -1), mt19937_64(rule.seed + 1, max(len(rows) - 1, 0)).tolist(), strict=True):
        j = draw % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return rows


documents = st.lists(st.lists(st.sampled_from([0, 1, 2, 5, 9, 14, 30, 80, 512, 513]), max_size=12), max_size=12)


@settings(deadline=None, max_examples=150)
@given(
    documents, st.integers(0, 3), st.integers(2, 60), st.sampled_from([0.0, 0.1, 0.4, 0.7, 1.0]), st.integers(1, 2**31 - 1),
    st.sampled_from([1, 2]), st.integers(1, 60), st.integers(1, 5),
)  # fmt: skip
@example([[513], [], [600, 1], [5, 5]], 1, 8, 0.1, 1234, 1, 10, 5)
@example([[9]] * 3, 0, 8, 0.1, 1, 2, 10, 3)
@example([[5] * 12] * 12, 2, 11, 0.4, 1, 2, 60, 5)
def test_the_rows_of_a_literal_walk(
    docs: list[list[int]], skipped: int, max_length: int, prob: float, seed: int, min_sentences: int, max_samples: int, max_epochs: int
) -> None:
    """Also for a split that does not begin with the first sentence of the data set."""
    lengths = [7] * skipped + [size for doc in docs for size in doc]
    bounds = [skipped, *(skipped + n for n in itertools.accumulate(len(doc) for doc in docs))]
    rule = SampleRule(max_length, prob, seed, min_sentences)
    rows = build_bert_index(np.array(bounds), np.array(lengths, np.int32), rule, max_samples, max_epochs)
    assert rows.tolist() == literal(bounds, lengths, rule, max_samples, max_epochs)


def test_a_larger_case() -> None:
    """Longer than a block of draws and than a block of the shuffle, over many epochs."""
    random = np.random.RandomState(1)
    counts = random.randint(0, 30, 300)
    bounds, lengths = np.append(0, np.cumsum(counts)), random.randint(0, 90, counts.sum()).astype(np.int32)
    rule = SampleRule(125, 0.1, 99, 2)
    rows = build_bert_index(bounds, lengths, rule, max_samples=25_000)
    assert len(rows) > 25_000 and rows.tolist() == literal(bounds.tolist(), lengths.tolist(), rule, 25_000, 10**9)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 63, 64, 65, 200, 30_000])
def test_shuffle_is_fisher_yates(n: int) -> None:
    order, draws = list(range(n)), mt19937_64(7, max(n - 1, 0)).tolist()
    for draw, i in zip(draws, range(n - 1, 0, -1), strict=True):
        j = draw % (i + 1)
        order[i], order[j] = order[j], order[i]
    assert shuffled_order(n, 7).tolist() == order


def test_limits() -> None:
    rule = SampleRule(32, 0.1, 1, 2)
    assert build_bert_index(np.array([0, 1, 2]), np.array([5, 5], np.int32), rule, max_samples=5).shape == (0, 3), "no endless search"
    with pytest.raises(ValueError, match="needs max_samples or max_epochs"):
        build_bert_index(BOUNDS, LENGTHS, rule)
    for bad in (rule._replace(max_length=1), rule._replace(min_sentences=0), rule._replace(short_seq_prob=1.5)):
        with pytest.raises(ValueError, match="must be at least 2"):
            build_bert_index(BOUNDS, LENGTHS, bad, 1)


def test_arrays_of_unknown_length_are_cached(tmp_path: Path) -> None:
    calls = []

    def make() -> dict[str, np.ndarray]:
        calls.append(1)
        return {"sample": build_bert_index(BOUNDS, LENGTHS, SampleRule(32, 0.1, 1234, 2), 4)}

    for shape in ((ANY_LENGTH, 3), (4, 3), (ANY_LENGTH, ANY_LENGTH)):
        expected = {"sample": (shape, np.dtype(np.uint32))}
        assert cached_arrays(tmp_path, "k", expected, make)["sample"].tolist() == GOLDEN[2]
    assert len(calls) == 1
    for shape in ((ANY_LENGTH, 2), (ANY_LENGTH,), (5, 3)):
        cached_arrays(tmp_path, "k", {"sample": (shape, np.dtype(np.uint32))}, make)
    assert len(calls) == 4, "another shape is no hit"
