"""BERT in every layout: masked tokens and sentence order as on one process (tests/integration/test_hugging_face.py: against others)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.layouts import Case, by_axes, run_cases

POST = {"norm_placement": "post"}
ALONE = {"bert_no_binary_head": True}
DROP = {"hidden_dropout": 0.2}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
WIDE = {"ffn_hidden_size": 12, "num_attention_heads": 8}
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}

CASES = [
    Case(bert=True, tp=2, steps=2, seq=11),
    Case(bert=True, tp=2, tp_seq=True, steps=2, seq=11),
    Case(bert=True, tp=2, tp_seq=True, seq=7, model=POST, steps=2),
    Case(bert=True, tp=4, tp_seq=True, seq=9, model={**WIDE, **POST, **DROP}, kernels=FULL),
    Case(bert=True, tp=2, model={**POST, "vocab_size": 33, "make_vocab_size_divisible_by": 1}, kernels={"lm_head_chunk_tokens": 3}),
    Case(bert=True, tp=2, model={"vocab_size": 16, "make_vocab_size_divisible_by": 16, **ALONE}),  # one rank has padding rows only
    *(Case(bert=True, sp=2, mode=mode, seq=9, batch=3, model=model) for mode in ("none", "split-qkv", "chunked") for model in (DROP, POST)),
    *(
        Case(bert=True, sp=4, mode=mode, seq=10, model={**GROUPED, **POST, "qk_layernorm": True})
        for mode in ("none", "split-qkv", "chunked")
    ),
    Case(bert=True, sp=3, mode="chunked", seq=7, model={"position_embedding_type": "rope"}, ragged=True, steps=2),
    Case(bert=True, sp=4, seq=3, mode="chunked", model=POST),  # one rank has nothing but padding
    Case(
        bert=True,
        sp=2,
        mode="split-qkv",
        model={**POST, "hidden_dropout": 0.2, "attention_dropout": 0.1},
        kernels=SELECTIVE,
        micro_batches=2,
    ),
    *(Case(bert=True, sp=2, mode=mode, packed=True, seq=11, batch=3, model={**ALONE, **POST}) for mode in ("none", "split-qkv", "chunked")),
    Case(bert=True, tp=2, tp_seq=True, packed=True, model=ALONE, kernels=FULL),
    Case(bert=True, sp=2, dp=2, micro_batches=2, steps=3, seq=9, model=POST),
    *(Case(bert=True, tp=2, sp=2, tp_seq=tp_seq, mode="chunked", seq=9, model=POST, steps=1) for tp_seq in (False, True)),
    Case(bert=True, tp=2, sp=2, dp=2, tp_seq=True, mode="split-qkv", seq=9, model={**WIDE, **DROP}, micro_batches=2, steps=2),
    *(Case(bert=True, dp=2, zero=zero, micro_batches=2, steps=3, table_lr=0.2, model=POST) for zero in (1, 2, 3)),
    Case(bert=True, sp=2, dp=2, zero=3, mode="chunked", seq=9, steps=2, kernels=FULL),
    Case(bert=True, tp=2, sp=2, tp_seq=True, zero=3, mode="chunked", seq=9, steps=2, model=POST),
    Case(bert=True, tp=2, sp=2, zero=1, micro_batches=2, seq=9, steps=2, ragged=True),
    Case(bert=True, dp=3, zero=3, mask=0.2, batch=1, steps=2, fetch="all_reduce"),  # ranks without a masked token
    *(Case(bert=True, tp=2, sp=2, tp_seq=tp_seq, seq=11, model={**POST, **DROP}, kernels={"mlp_chunks": 3}) for tp_seq in (False, True)),
    Case(bert=True, tp=2, sp=2, tp_seq=True, mode="chunked", dtype=torch.float32, model=POST, seq=9),
]


@pytest.mark.parametrize("cases", by_axes(CASES, long="tp2-sp2-dp2"))
def test_a_layout_changes_nothing(cases: list[Case], tmp_path: Path) -> None:
    """The message names the case."""
    run_cases(cases, tmp_path)
