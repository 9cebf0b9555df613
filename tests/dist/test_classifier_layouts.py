"""A classifier in every layout: loss, gradients and weights as on one process; test_hugging_face.py holds that against another's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.layouts import Case, by_axes, run_cases

DROP = {"hidden_dropout": 0.2}
POST_DROP = {"norm_placement": "post", **DROP}

CASES = [
    Case(bert=True, classes=3, tp=2, seq=9, steps=2, model=DROP),
    Case(bert=True, classes=3, tp=2, tp_seq=True, seq=9, model=POST_DROP, steps=2),
    *(Case(bert=True, classes=3, sp=2, mode=mode, seq=9, batch=3, model=POST_DROP) for mode in ("none", "split-qkv", "chunked")),
    Case(bert=True, classes=2, sp=3, mode="chunked", seq=7, model={"bert_no_binary_head": True}, micro_batches=2, steps=2),
    Case(bert=True, classes=3, dp=2, zero=3, micro_batches=2, steps=2, model=POST_DROP),
    Case(bert=True, classes=5, tp=2, sp=2, tp_seq=True, zero=3, mode="chunked", seq=9, steps=2, model=DROP),
    Case(bert=True, classes=3, sp=2, dp=2, zero=1, mode="split-qkv", seq=9, steps=2, kernels={"recompute_granularity": "full"}, model=DROP),
    Case(bert=True, classes=3, tp=2, sp=2, dtype=torch.float32, seq=9, model=POST_DROP),
]


@pytest.mark.parametrize("cases", by_axes(CASES))
def test_a_layout_changes_nothing(cases: list[Case], tmp_path: Path) -> None:
    """The message names the case."""
    run_cases(cases, tmp_path)
