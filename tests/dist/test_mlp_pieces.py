"""The MLP over pieces of the positions: one process's loss and gradients in every layout, and nothing used before it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.late_network import late_network
from support.layouts import Case, check, run_cases
from support.ranks import run_ranks

LLAMA = {
    "position_embedding_type": "rope", "group_query_attention": True, "num_query_groups": 2, "swiglu": True, "normalization": "RMSNorm",
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
DROP, SQUARED = {"hidden_dropout": 0.2}, {"squared_relu": True}
POST = {"norm_placement": "post"}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}


def over(pieces: int, **rest: Any) -> Case:
    return Case(**{**rest, "kernels": {**rest.get("kernels", {}), "mlp_chunks": pieces}})


ALONE = [  # 3 pieces of 8 positions: 2, 3, 3
    over(3, steps=2), over(3, model=LLAMA | DROP), over(2, model=SQUARED, micro_batches=2), over(8, model=DROP), over(100, seq=5, batch=1),
    over(3, bert=True, model=POST | DROP),
    over(3, kernels=FULL, model=DROP), over(4, kernels=SELECTIVE, dtype=torch.float32, model=LLAMA, steps=2),
]  # fmt: skip
PAIRS = [
    over(3, tp=2, steps=2), over(3, tp=2, model=DROP, micro_batches=2), over(3, tp=2, tp_seq=True, seq=7, model=LLAMA, steps=2),
    over(4, tp=2, tp_seq=True, kernels=FULL, model=DROP, micro_batches=2), over(3, tp=2, tp_seq=True, dtype=torch.float32, model=SQUARED),
    over(3, sp=2, seq=7, model=DROP, mode="chunked"), over(2, dp=2, zero=1, micro_batches=2, steps=2), over(3, dp=2, zero=2, model=DROP),
    over(3, bert=True, tp=2, tp_seq=True, seq=9, model=POST, steps=1),
    over(3, dp=2, zero=3, kernels=FULL, micro_batches=2, steps=2), over(3, dp=2, ragged=True, steps=2),
]  # fmt: skip
FOURS = [
    over(2, tp=2, sp=2, tp_seq=True, seq=13, mode="chunked", model=LLAMA, kernels=FULL),
    over(3, tp=2, dp=2, tp_seq=True, zero=3, micro_batches=2, model=DROP, steps=2),
]


@pytest.mark.parametrize("cases", [ALONE, PAIRS, pytest.param(FOURS, marks=pytest.mark.long)], ids=["1 rank", "2 ranks", "4 ranks"])
def test_pieces_change_nothing(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@pytest.mark.parametrize("tp_seq", [False, True])
def test_no_piece_is_used_before_it_is_there(tp_seq: bool, tmp_path: Path) -> None:
    run_ranks(_late, 2, tmp_path, over(3, tp=2, tp_seq=tp_seq, model=DROP))


def _late(case: Case) -> None:
    with late_network():
        check(case)
