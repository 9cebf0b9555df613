"""Blending: golden values, the sequential rule, and what --data-path may say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sp.data import blend
from megatron_sp.data.blend import Blend, blending_weights, build_blending_indices, normalized, parse_blend, samples_per_set
from megatron_sp.utils.errors import ConfigError


def sequential(weights: list[float], n: int) -> tuple[list[int], list[int]]:
    taken = [0] * len(weights)
    sets, samples = [], []
    for i in range(n):
        lags = [w * max(i, 1) - t for w, t in zip(weights, taken, strict=True)]
        chosen = lags.index(max(lags))
        sets.append(chosen)
        samples.append(taken[chosen])
        taken[chosen] += 1
    return sets, samples


def test_golden_values() -> None:
    sets, samples = build_blending_indices(np.array([0.3, 0.7]), 10)
    assert sets.tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1] and sets.dtype == np.int16
    assert samples.tolist() == [0, 0, 1, 2, 1, 3, 4, 2, 5, 6] and samples.dtype == np.int64


def test_given_weights_are_normalised_twice() -> None:
    """As megatron-core 0.16.1 does, whose order this is: at sample 20 the last bit of a weight decides."""
    weights = [93.0, 28.0, 81.0, 67.0, 1.0]
    sets, samples = build_blending_indices(blending_weights(weights), 24)
    assert sets.tolist() == [0, 2, 3, 1, 0, 2, 3, 0, 2, 3, 0, 2, 1, 0, 3, 2, 0, 3, 2, 0, 1, 2, 0, 3]
    assert samples.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 1, 4, 3, 4, 5, 4, 5, 6, 2, 6, 7, 5]
    assert build_blending_indices(normalized(weights), 24)[0].tolist() != sets.tolist()


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=20), st.integers(0, 700), st.sampled_from([2, 7, 256]))
@settings(max_examples=150, deadline=None)
def test_equals_the_sequential_rule(weights: list[float], n: int, chunk: int) -> None:
    """With chunks down to 2 samples nearly every start is guessed, and wrong guesses are walked again."""
    old, blend._MIN_CHUNK = blend._MIN_CHUNK, chunk
    try:
        w = normalized(weights)
        sets, samples = build_blending_indices(w, n)
    finally:
        blend._MIN_CHUNK = old
    assert (sets.tolist(), samples.tolist()) == sequential(w.tolist(), n)


@pytest.mark.parametrize("weights", [[1, 1], [1, 1, 1, 1], [1e-9, 1, 1], [0.1] * 13, [5, 3, 2]])
def test_ties_and_extremes(weights: list[float]) -> None:
    w = normalized(weights)
    sets, samples = build_blending_indices(w, 3000)
    assert (sets.tolist(), samples.tolist()) == sequential(w.tolist(), 3000)


@pytest.mark.parametrize(("weights", "shares"), [
    ([1e308, 1e308], [0.5, 0.5]),
    ([1.7e308, 1.7e308 / 4], [0.8, 0.2]),
    ([1.7e308] * 4, [0.25] * 4),
    ([1e308, 1e308, 1.0], [0.5, 0.5, 0.0]),
    ([5e-324, 5e-324], [0.5, 0.5]),
    ([5e-324, 15e-324], [0.25, 0.75]),
])  # fmt: skip
def test_weights_at_the_ends_of_the_range_have_their_shares(weights: list[float], shares: list[float]) -> None:
    """A sum of weights that overflows gave shares of 0, and samples that do not exist."""
    assert normalized(weights).tolist() == pytest.approx(shares, abs=1e-15)
    sets, _ = build_blending_indices(blending_weights(weights), 1000)
    assert np.bincount(sets, minlength=len(shares)).tolist() == pytest.approx([share * 1000 for share in shares], abs=1)


@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=9), st.integers(1, 2000))
@settings(deadline=None)
def test_no_set_is_asked_for_more_than_it_was_built_with(weights: list[float], n: int) -> None:
    w = normalized(weights)
    sets, _ = build_blending_indices(w, n)
    assert all(a <= b for a, b in zip(np.bincount(sets, minlength=len(w)), samples_per_set(w, n), strict=True))


def test_requests_are_rounded_up_twice() -> None:
    assert samples_per_set(np.array([0.3, 0.7]), 10) == [4, 8]
    assert samples_per_set(np.array([0.5, 0.5]), 1000) == [503, 503]
    assert samples_per_set(np.array([0.5]), 1) == [2]  # the share is rounded up before the surplus, and again after it


@pytest.mark.parametrize(("parts", "expected"), [
    (("a",), Blend(("a",), None)),
    (("a", "b", "c"), Blend(("a", "b", "c"), None)),
    (("a", "b"), Blend(("a", "b"), None)),  # even, but no weights
    (("0.3", "a", "0.7", "b"), Blend(("a", "b"), (0.3, 0.7))),
    (("2", "a"), Blend(("a",), (2.0,))),
    (("1", "2", "3"), Blend(("1", "2", "3"), None)),  # odd: names that look like numbers
])  # fmt: skip
def test_data_path(parts: tuple[str, ...], expected: Blend) -> None:
    assert parse_blend(parts) == expected


@pytest.mark.parametrize("parts", [("0", "a"), ("-1", "a", "2", "b"), ("1", "a", "x", "b"), ("nan", "a"), ("inf", "a", "1", "b")])
def test_bad_weights(parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"--data-path: '.*' must be a weight above 0"):
        parse_blend(parts)
    with pytest.raises(ConfigError, match="--valid-data-path"):
        parse_blend(parts, "--valid-data-path")
    with pytest.raises(ConfigError, match="at most 32767"):
        parse_blend(("a",) * 32769)
