"""--offload-activations in layouts: the bits of the same layout without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.late_network import late_network
from support.layouts import Case, Sharded
from support.ranks import run_ranks

LLAMA = {
    "position_embedding_type": "rope", "group_query_attention": True, "num_query_groups": 2, "swiglu": True, "normalization": "RMSNorm",
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True, "qk_layernorm": True,
}  # fmt: skip
DROP = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
FULL, SELECTIVE, PIECES = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}, {"mlp_chunks": 3}
BY_TWO = {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2}
FIRST_TWO = {**FULL, "recompute_method": "block", "recompute_num_layers": 2}

ALONE = [
    Case(), Case(model=LLAMA, kernels=SELECTIVE), Case(model=DROP, micro_batches=2), Case(kernels=FULL, model=DROP), Case(kernels=BY_TWO),
    Case(kernels=FIRST_TWO, micro_batches=2), Case(kernels=PIECES, packed=True), Case(padding=True, kernels=FULL | PIECES),
    Case(model={"num_layers": 1}), Case(bert=True, model={**DROP, "norm_placement": "post"}, kernels=PIECES),
]  # fmt: skip
PAIRS = [
    Case(sp=2, mode="chunked", model=LLAMA), Case(sp=2, mode="split-qkv", seq=7, kernels=SELECTIVE), Case(tp=2, tp_seq=True, model=DROP),
    Case(dp=2, zero=3, micro_batches=2), Case(dp=2, zero=3, kernels=FULL, model=LLAMA), Case(dp=2, zero=2, kernels=PIECES, micro_batches=2),
    Case(bert=True, sp=2, mode="chunked", model={"norm_placement": "post"}, zero=3),
]  # fmt: skip


@pytest.mark.parametrize("cases", [ALONE, PAIRS], ids=["1 rank", "2 ranks"])
def test_the_same_bits(cases: list[Case], tmp_path: Path) -> None:
    run_ranks(_compare, cases[0].world, tmp_path, cases)


def _compare(cases: list[Case]) -> None:
    for case in cases:
        whole = tiny.make_model(tiny.shape(**{"seq_length": case.seq, **case.model}))
        plain = Sharded(case, whole)
        want = {"loss": plain.step(), **plain.grads()}
        sharded = Sharded(Case(**{**vars(case), "kernels": {**case.kernels, "offload_activations": True}}), whole)
        for _ in range(2):  # the second step finds the first one's host memory
            got = {"loss": sharded.step(), **sharded.grads()}
            different = [name for name, t in want.items() if not torch.equal(t, got[name])]
            assert not different, f"{case}: {different}"
        offload: Any = sharded.model._offload
        moved = sum(buffer.numel() for buffers in offload._free.values() for buffer in buffers)
        assert offload.num_bytes == moved and (moved > 0) == (whole.config.num_layers != 1), f"{case}: {moved} of {offload.num_bytes} bytes"


def test_nothing_moves_before_it_is_there(tmp_path: Path) -> None:
    """With results of collectives that arrive when they are waited for, and memory that is NaN until written."""
    run_ranks(_late, 2, tmp_path)


def _late() -> None:
    with late_network():
        _compare([Case(sp=2, mode="chunked"), Case(tp=2, tp_seq=True, kernels=FULL)])
