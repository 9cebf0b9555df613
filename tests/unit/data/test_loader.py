"""Micro-batches of a step: which samples each rank gets, reading ahead, and errors that come out where they can be seen."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import PATIENCE_S, wait_until

from megatron_sp.data.dataset import Sample, make_sample, sample_digest
from megatron_sp.data.loader import BatchLoader, deal, epoch_permutation, next_ids
from megatron_sp.utils.errors import DataError


class Counting:
    """Sample i is i, i+1, ...; remembers what was read, and fails at ``bad``."""

    def __init__(self, n: int = 100, bad: int | None = None) -> None:
        self.n, self.bad, self.read = n, bad, []  # type: ignore[var-annotated]
        self.gate = threading.Event()
        self.gate.set()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Sample:
        self.gate.wait(PATIENCE_S)
        self.read.append(i)
        if i == self.bad:
            raise DataError(f"sample {i} is bad")
        return make_sample(np.arange(i, i + 6), None)

    def fingerprint(self) -> str:
        return ""


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_batches_of_each_rank(num_workers: int) -> None:
    for rank in range(2):
        with BatchLoader(Counting(), micro_batch_size=3, dp_rank=rank, dp_size=2, num_workers=num_workers) as loader:
            for consumed in (0, 12, 24):
                batches = loader.step(consumed, 2)
                want = [[consumed + 6 * m + 3 * rank + k for k in range(3)] for m in range(2)]
                assert [b["sample_ids"].tolist() for b in batches] == want
                for batch, ids in zip(batches, want, strict=True):
                    assert batch["tokens"].tolist() == [list(range(i, i + 5)) for i in ids]
                    assert (batch["labels"] == batch["tokens"] + 1).all() and batch["loss_mask"].tolist() == [[1.0] * 5] * 3
            types = {name: value.dtype for name, value in batch.items()}
            assert types == {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "sample_ids": torch.int64}
            assert all(value.is_contiguous() for value in batch.values())
            assert loader.global_sample_ids(24, 2).tolist() == list(range(24, 36))


def test_the_next_step_is_read_while_this_one_trains() -> None:
    data = Counting()
    with BatchLoader(data, micro_batch_size=2, num_workers=1) as loader:
        loader.step(0, 2)
        wait_until(lambda: len(data.read) == 8)
        assert sorted(data.read) == list(range(8))
        data.gate.clear()  # nothing can be read any more, and nothing needs to be
        assert [b["sample_ids"].tolist() for b in loader.step(4, 2)] == [[4, 5], [6, 7]]
        data.gate.set()


def test_without_workers_nothing_is_read_ahead() -> None:
    data = Counting()
    BatchLoader(data, micro_batch_size=2).step(0, 1)
    assert data.read == [0, 1]


def test_wrong_guesses_are_thrown_away() -> None:
    with BatchLoader(Counting(), micro_batch_size=1, num_workers=2) as loader:
        for consumed, count in [(0, 2), (2, 4), (50, 1), (3, 3), (3, 3), (6, 3)]:
            assert [b["sample_ids"].tolist() for b in loader.step(consumed, count)] == [[consumed + k] for k in range(count)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_come_out_at_the_call_that_needs_the_sample(num_workers: int) -> None:
    with BatchLoader(Counting(bad=5), micro_batch_size=2, num_workers=num_workers) as loader:
        loader.step(0, 2)  # reads ahead into the bad one
        with pytest.raises(DataError, match="sample 5 is bad"):
            loader.step(4, 2)
        assert loader.step(8, 1)[0]["sample_ids"].tolist() == [8, 9]  # and the loader lives on


def test_a_step_that_failed_can_be_asked_for_again() -> None:
    data = Counting(bad=5)
    with BatchLoader(data, micro_batch_size=2, num_workers=1) as loader:
        loader.step(0, 2)
        with pytest.raises(DataError):
            loader.step(4, 2)
        data.bad = None  # the file is back
        assert [b["sample_ids"].tolist() for b in loader.step(4, 2)] == [[4, 5], [6, 7]]


def test_an_error_in_a_wrong_guess_concerns_nobody() -> None:
    data = Counting(bad=5)
    with BatchLoader(data, micro_batch_size=2, num_workers=1) as loader:
        loader.step(0, 2)
        wait_until(lambda: 5 in data.read)
        assert loader.step(8, 2)[0]["sample_ids"].tolist() == [8, 9]


@pytest.mark.parametrize("by", ["a wrong guess", "close"])
def test_what_nobody_waits_for_is_not_read(by: str) -> None:
    """The only thread is held in the first batch that it reads ahead; the others have not begun."""
    data = Counting()
    with BatchLoader(data, micro_batch_size=2, num_workers=1) as loader:
        loader.step(0, 1)
        wait_until(lambda: len(data.read) == 4)
        data.gate.clear()
        loader._read_ahead(20, 4)
        assert loader._ahead is not None
        _, ahead = loader._ahead
        wait_until(ahead[0].running)
        thread = threading.Thread(target=loader.close if by == "close" else lambda: loader.step(0, 1))
        thread.start()
        wait_until(lambda: all(future.cancelled() for future in ahead[1:]) or not thread.is_alive())
        data.gate.set()
        thread.join()
        assert not {22, 24, 26} & set(data.read)
        if by == "close":
            assert loader._ahead is None


def test_a_batch_has_memory_of_its_own() -> None:
    """Whoever writes into it does not write into the data, or into a later batch."""
    data = Counting()
    kept = make_sample(np.arange(6), None)
    data.__class__ = type("Kept", (Counting,), {"__getitem__": lambda self, i: kept})
    loader = BatchLoader(data, micro_batch_size=1, order="cyclic")
    for value in loader.step(0, 1)[0].values():
        value.fill_(0)
    again = loader.step(0, 1)[0]
    assert again["tokens"].tolist() == [[0, 1, 2, 3, 4]] and again["sample_ids"].tolist() == loader.global_sample_ids(0, 1).tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_end_of_the_data(num_workers: int) -> None:
    with BatchLoader(Counting(8), micro_batch_size=2, dp_size=2, num_workers=num_workers) as loader:
        loader.step(0, 1)
        loader.step(4, 1)
        with pytest.raises(DataError, match="samples 8 to 11 are wanted"):
            loader.step(8, 1)


def backwards(ids: np.ndarray) -> np.ndarray:
    return np.arange(ids.size)[::-1]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_rows_are_dealt_as_one_is_told(num_workers: int) -> None:
    """Their ids, contents, digests and places go together; the global batch stays what it is."""
    for rank in range(2):
        loader = BatchLoader(
            Counting(), micro_batch_size=2, dp_rank=rank, dp_size=2, num_workers=num_workers, digests=True, deal_rows=backwards
        )
        with loader:
            for consumed in (0, 8, 16):
                first, second = loader.step(consumed, 2)
                assert first["places"].tolist() == [7 - 2 * rank, 6 - 2 * rank] and second["places"].tolist() == [
                    3 - 2 * rank,
                    2 - 2 * rank,
                ]
                for batch in (first, second):
                    assert batch["sample_ids"].tolist() == batch["tokens"][:, 0].tolist() == (batch["places"] + consumed).tolist()
                    assert batch["digests"].tolist() == [sample_digest(Counting()[i]) for i in batch["sample_ids"].tolist()]
                assert loader.global_sample_ids(consumed, 2).tolist() == list(range(consumed, consumed + 8))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_dealing_comes_out_at_the_step(num_workers: int) -> None:
    def fail(ids: np.ndarray) -> np.ndarray:
        raise DataError("no lengths")

    loader = BatchLoader(Counting(), micro_batch_size=2, num_workers=num_workers, deal_rows=fail)
    with loader, pytest.raises(DataError, match="no lengths"):
        loader.step(0, 2)


def test_close() -> None:
    before = set(threading.enumerate())  # one of another test may end meanwhile
    loader = BatchLoader(Counting(), micro_batch_size=2, num_workers=3)
    loader.step(0, 3)
    loader.close()
    loader.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="after close"):
        loader.step(6, 3)


def test_misuse() -> None:
    for bad in [dict(micro_batch_size=0), dict(micro_batch_size=1, dp_rank=1), dict(micro_batch_size=1, dp_rank=-1, dp_size=2)]:
        with pytest.raises(ValueError, match="micro_batch_size"):
            BatchLoader(Counting(), **bad)


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


def test_ids_that_cannot_be_dealt() -> None:
    with pytest.raises(ValueError, match="cannot deal 5 samples"):
        deal(np.arange(5), 2, 0, 1)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        deal(np.arange(4), 1, 2, 2)
    with pytest.raises(ValueError, match="'single' or 'cyclic'"):
        next_ids("other", 0, 1, 5, 1)  # type: ignore[arg-type]
