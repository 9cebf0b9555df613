"""The three arrays of GPT samples: golden values and limits; ``test_megatron_order.py`` has random data against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sp.data import gpt_dataset
from megatron_sp.data.gpt_dataset import build_gpt_index, plan_epochs, split_bounds
from megatron_sp.utils.errors import ConfigError

LENGTHS = np.array([5, 3, 7, 2, 6], np.int32)
GOLDEN = {  # made by Megatron-LM's own helpers: sequence length 4, seed 1234
    5: (
        [4, 0, 1, 2, 3],
        [[0, 0], [0, 4], [1, 2], [2, 1], [3, 2], [3, 6]],
        [3, 2, 1, 0, 4],
    ),
    9: (
        [2, 2, 4, 1, 0, 3, 4, 0, 1, 3],
        [[0, 0], [0, 4], [1, 1], [1, 5], [2, 2], [3, 0], [4, 1], [5, 0], [6, 2], [7, 0], [7, 4], [9, 0]],
        [3, 10, 2, 1, 7, 5, 4, 0, 8, 6, 9],
    ),
}  # fmt: skip


@pytest.mark.parametrize("num_samples", GOLDEN)
def test_golden_values(num_samples: int) -> None:
    plan = plan_epochs(23, 4, num_samples)
    index = build_gpt_index(LENGTHS, np.arange(5), 4, plan, 1234)
    document, sample, shuffle = GOLDEN[num_samples]
    assert index.document.tolist() == document and index.document.dtype == np.int32
    assert index.sample.tolist() == sample and index.sample.dtype == np.int32
    assert index.shuffle.tolist() == shuffle and index.shuffle.dtype == np.uint32


def test_last_epoch_is_shuffled_apart_only_when_little_of_it_is_used() -> None:
    assert plan_epochs(101, 10, 10).num_epochs == 1
    assert plan_epochs(101, 10, 10).separate_last is False
    for num_samples, apart in [(11, True), (17, True), (18, False), (20, False)]:  # 8 of 10 are needed of the second epoch
        plan = plan_epochs(101, 10, num_samples)
        assert (plan.num_epochs, plan.separate_last) == (2, apart), num_samples
    assert plan_epochs(50, 10, 6).separate_last is True  # 4 samples in an epoch of 50 tokens, not 5; 2 are wanted of the second
    assert plan_epochs(50, 10, 7).separate_last is False
    assert plan_epochs(101, 10, 11).num_samples_before_last == 10
    assert plan_epochs(101, 10, None) == plan_epochs(101, 10, 10)
    assert (plan_epochs(40, 4, 10).num_epochs, plan_epochs(41, 4, 10).num_epochs) == (2, 1)  # the last label needs one token more
    with pytest.raises(ValueError, match="without tokens"):
        plan_epochs(0, 10, 1)


def test_first_epochs_are_used_whole_before_the_last() -> None:
    plan = plan_epochs(101, 10, 22)
    index = build_gpt_index(np.full(101, 1, np.int32), np.arange(101), 10, plan, 3)
    assert plan.num_epochs == 3 and plan.separate_last
    assert sorted(index.document[:202].tolist()) == sorted([*range(101)] * 2)
    assert sorted(index.document[202:].tolist()) == list(range(101))
    assert sorted(index.shuffle[: plan.num_samples_before_last].tolist()) == list(range(20))


def test_long_streams_do_not_overflow() -> None:
    """Positions beyond 2**31 tokens, and small chunks of the computation."""
    lengths = np.full(4, 2**31 - 1, np.int32)
    cuts = gpt_dataset.build_sample_index(lengths, np.arange(4, dtype=np.int32), 2**29, 15)
    flat = cuts[:, 0].astype(np.int64) * (2**31 - 1) + cuts[:, 1]
    assert flat.tolist() == [k * 2**29 for k in range(16)]


def test_chunks_join(monkeypatch: pytest.MonkeyPatch) -> None:
    want = gpt_dataset.build_sample_index(LENGTHS, np.tile(np.arange(5), 9), 2, 100)
    monkeypatch.setattr(gpt_dataset, "_CHUNK", 7)
    assert (gpt_dataset.build_sample_index(LENGTHS, np.tile(np.arange(5), 9), 2, 100) == want).all()


def test_wide_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpt_dataset.sample_index_dtype(2**31 - 1) == np.int32 and gpt_dataset.sample_index_dtype(2**31) == np.int64
    assert gpt_dataset.shuffle_index_dtype(2**32 - 3) == np.uint32 and gpt_dataset.shuffle_index_dtype(2**32 - 2) == np.int64
    monkeypatch.setattr(gpt_dataset, "_INT32_MAX", 9)
    monkeypatch.setattr(gpt_dataset, "_UINT32_MAX", 9)
    index = build_gpt_index(LENGTHS, np.arange(5), 4, plan_epochs(23, 4, 9), 1234)
    assert index.sample.dtype == np.int64 and index.sample.tolist() == GOLDEN[9][1]
    assert index.shuffle.dtype == np.int64 and index.shuffle.tolist() == GOLDEN[9][2]  # the stream does not depend on the dtype


@pytest.mark.parametrize(("split", "n", "bounds"), [
    ("969,30,1", 1000, [(0, 969), (969, 999), (999, 1000)]),
    ("969, 30, 1", 713, [(0, 691), (691, 712), (712, 713)]),
    ("98/2", 100, [(0, 98), (98, 100), (100, 100)]),
    ("100,0,0", 7, [(0, 7), (7, 7), (7, 7)]),
    ("1", 7, [(0, 7), (7, 7), (7, 7)]),
    ("1,1", 5, [(0, 2), (2, 5), (5, 5)]),  # round half to even
    ("1,1", 7, [(0, 4), (4, 7), (7, 7)]),
    ("0.9,0.05,0.05", 10, [(0, 9), (9, 10), (10, 10)]),  # 9.5 rounds to 10
    ("969,30,1", 3, [(0, 3), (3, 3), (3, 3)]),
    ("969,30,1", 0, [(0, 0), (0, 0), (0, 0)]),
])  # fmt: skip
def test_split_bounds(split: str, n: int, bounds: list[tuple[int, int]]) -> None:
    assert split_bounds(split, n) == bounds


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan,1", "inf,1", "1,,1"])
def test_bad_splits(split: str) -> None:
    with pytest.raises(ConfigError, match="must be up to three numbers"):
        split_bounds(split, 10)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=3).filter(lambda v: sum(v) > 1e-3), st.integers(0, 10**9))
def test_split_parts_tile_the_data(weights: list[float], n: int) -> None:
    bounds = split_bounds(",".join(map(repr, weights)), n)
    assert bounds[0][0] == 0 and bounds[2][1] == n
    assert all(a <= b for a, b in bounds) and bounds[0][1] == bounds[1][0] and bounds[1][1] == bounds[2][0]
