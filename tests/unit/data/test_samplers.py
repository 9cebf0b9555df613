"""Consumed samples to ids: the same global batches however they are dealt out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sp.data.loader import deal, epoch_permutation, next_ids
from megatron_sp.utils.errors import DataError


def test_slices_of_each_chunk() -> None:
    ids = next_ids("single", 100, 12, 1000, 0)
    assert deal(ids, 2, 0, 3).tolist() == [[100, 101], [106, 107]]
    assert deal(ids, 2, 1, 3).tolist() == [[102, 103], [108, 109]]
    assert deal(ids, 2, 2, 3).tolist() == [[104, 105], [110, 111]]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.sampled_from(["single", "cyclic"]), st.integers(0, 50))
def test_ranks_together_read_the_global_batch_once(mbs: int, dp: int, chunks: int, order: str, consumed: int) -> None:
    ids = next_ids(order, consumed, mbs * dp * chunks, 200, 7)  # type: ignore[arg-type]
    shares = [deal(ids, mbs, rank, dp) for rank in range(dp)]
    assert all(share.shape == (chunks, mbs) for share in shares)
    assert np.concatenate([s for chunk in zip(*shares, strict=True) for s in chunk]).tolist() == ids.tolist()


def test_single_ends_with_the_data() -> None:
    assert next_ids("single", 8, 2, 10, 0).tolist() == [8, 9]
    assert next_ids("single", 10, 0, 10, 0).tolist() == []
    with pytest.raises(DataError, match="samples 9 to 10 are wanted, the data set was built with 10"):
        next_ids("single", 9, 2, 10, 0)
    with pytest.raises(DataError):
        next_ids("single", -1, 2, 10, 0)


def test_cyclic_is_one_endless_order() -> None:
    whole = next_ids("cyclic", 0, 35, 10, 5)
    assert [sorted(whole[k : k + 10].tolist()) for k in (0, 10, 20)] == [list(range(10))] * 3
    assert whole[:10].tolist() != whole[10:20].tolist()
    for consumed in range(30):
        assert next_ids("cyclic", consumed, 5, 10, 5).tolist() == whole[consumed : consumed + 5].tolist()
    assert next_ids("cyclic", 0, 35, 10, 6).tolist() != whole.tolist()
    assert next_ids("cyclic", 3, 0, 10, 5).tolist() == []
    assert next_ids("cyclic", 0, 7, 1, 5).tolist() == [0] * 7
    with pytest.raises(DataError, match="no samples"):
        next_ids("cyclic", 0, 1, 0, 5)


def test_the_permutation_is_pinned() -> None:
    """A change here would reorder every resumed run."""
    assert epoch_permutation(8, 1234, 0).tolist() == PINNED[0]
    assert epoch_permutation(8, 1234, 1).tolist() == PINNED[1]
    assert epoch_permutation(8, -1, 2**40).size == 8  # any seed, any epoch
    with pytest.raises(ValueError, match="read-only"):
        epoch_permutation(8, 1234, 0)[0] = 1


PINNED = ([0, 2, 5, 3, 4, 7, 6, 1], [6, 4, 5, 7, 0, 1, 3, 2])


def test_misuse() -> None:
    with pytest.raises(ValueError, match="cannot deal 5 samples"):
        deal(np.arange(5), 2, 0, 1)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        deal(np.arange(4), 1, 2, 2)
    with pytest.raises(ValueError, match="'single' or 'cyclic'"):
        next_ids("other", 0, 1, 5, 1)  # type: ignore[arg-type]
