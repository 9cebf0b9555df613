"""Random data sets, blends, splits and seeds: the package's samples are Megatron's, in order (plain loops: support/megatron_order.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.megatron_order import SPLITS, VOCAB, Case, Refused, order_of, random_case

from megatron_sp.data.build import build_datasets
from megatron_sp.data.dataset import Dataset
from megatron_sp.data.tokenizers import NullTokenizer
from megatron_sp.utils.errors import DataError

CASES = 80


def built(case: Case, split: int) -> Dataset | None:
    """Our data set of one split."""
    wanted = tuple(n if k == split else 0 for k, n in enumerate(case.wanted))
    options = {"seq_length": case.seq_length, "seed": case.seed, "tokenizer": NullTokenizer(VOCAB), "num_samples": wanted}
    sets = build_datasets(case.data, **options)  # type: ignore[arg-type]
    found: Dataset | None = getattr(sets, SPLITS[split])
    return found


@pytest.mark.often("0")
@pytest.mark.parametrize("block", range(8))
def test_random_cases(block: int, tmp_path: Path) -> None:
    compared = 0
    for number in range(block * CASES // 8, (block + 1) * CASES // 8):
        case = random_case(number, tmp_path / str(number))
        for split, name in enumerate(SPLITS):
            where = f"case {number}, {name}"
            try:
                expected = order_of(case, split)
            except Refused:
                with pytest.raises(DataError, match=r"split (is empty|has)"):
                    built(case, split)
                continue
            found = built(case, split)
            assert (found is None) == (expected is None), where
            if found is None or expected is None:
                continue
            assert len(found) >= case.wanted[split], where
            for i, stretch in enumerate(expected[: case.wanted[split]]):
                sample = found[i]
                assert np.array_equal(sample["tokens"], stretch[:-1]) and np.array_equal(sample["labels"], stretch[1:]), f"{where}: {i}"
            compared += 1
    assert compared > 10
