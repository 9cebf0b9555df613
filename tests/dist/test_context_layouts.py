"""Layouts with context parallelism give the one-process loss and gradients: with the exchange that is planned from the mask,
and with the plain attention of ``support/context_core.py``, which tests everything around it by itself, from the cut of the
batch to the sums over dp, cp and sp.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.context_core import plain_context
from support.layouts import Case, by_axes, run_cases

__all__ = ["plain_context"]

ROPE = {"position_embedding_type": "rope"}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
MULTI_QUERY = {"group_query_attention": True, "num_query_groups": 1}
LLAMA = {
    **ROPE, **GROUPED, "swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
MISTRAL = {**LLAMA, "window_size": 3}
DROP = {"hidden_dropout": 0.2}
ALL_DROP = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
QKV = {"recompute_qkv": True}
NEOX = {**ROPE, "use_parallel_residual": True, "rotary_percent": 0.34, "untie_embeddings_and_output_weights": True}
UNEVEN = {**ROPE, "num_attention_heads": 6, "kv_channels": 4, "group_query_attention": True, "num_query_groups": 3}
WIDE = {"ffn_hidden_size": 12}

CASES = [
    # cp alone
    Case(cp=2, steps=2),
    Case(cp=2, cp_chunks=1, model=LLAMA),
    Case(cp=2, seq=7, cp_chunks=4, model={**ROPE, **ALL_DROP}, micro_batches=2),
    Case(cp=2, model=MISTRAL, batch=3, kernels=FULL),
    Case(cp=2, seq=9, packed=True, model={**ROPE, **ALL_DROP}, kernels=SELECTIVE),
    Case(cp=2, packed=True, cp_chunks=3, model={"window_size": 2, **GROUPED}, kernels={"mlp_chunks": 3}),
    Case(cp=2, ragged=True, kernels={"offload_activations": True, **FULL}),
    Case(cp=2, padding=True, model=ROPE),
    Case(cp=2, bert=True, model=ALL_DROP, steps=2),
    Case(cp=2, bert=True, packed=True, cp_chunks=2, model={"norm_placement": "post"}),
    Case(cp=2, bert=True, classes=3, cp_chunks=2, model=DROP),
    Case(cp=3, seq=7, model={**ROPE, "qk_layernorm": True}),
    Case(cp=3, seq=2, cp_chunks=1, model={**LLAMA, "qk_layernorm": True}),  # the last rank has no position
    Case(cp=3, seq=2, bert=True, model=ALL_DROP),
    Case(cp=3, seq=1, cp_chunks=2, model=DROP, kernels=FULL),
    # what is kept, and what is made again
    *(Case(cp=2, model=LLAMA, kernels={**FULL, "recompute_attention": again}) for again in ("exchange", "full")),
    Case(cp=2, seq=9, model={**ROPE, **ALL_DROP}, kernels=QKV),  # the plain kernel gives its log of sums here
    Case(cp=2, sp=2, mode="chunked", chunks=4, model={**MULTI_QUERY, "num_attention_heads": 8, **ROPE}, kernels=QKV),
    Case(
        cp=2,
        sp=2,
        mode="chunked",
        chunks=3,
        packed=True,
        model={**UNEVEN, "qk_layernorm": True},
        kernels={**FULL, "recompute_num_layers": 2},
    ),
    Case(cp=3, sp=2, seq=2, mode="chunked", model=UNEVEN, kernels=QKV),
    # with Ulysses, and with tp
    Case(cp=2, sp=2, mode="chunked", chunks=2, model=LLAMA, seq=9),
    Case(cp=2, sp=2, seq=3, mode="chunked", model={**MULTI_QUERY, **ROPE}),  # padding on each cp rank
    Case(cp=3, sp=2, seq=2, mode="chunked", model={**ROPE, **ALL_DROP}, kernels=SELECTIVE),
    Case(cp=3, sp=2, seq=2, mode="split-qkv", model=LLAMA),
    *(Case(cp=3, sp=2, seq=2, mode=mode, model=UNEVEN) for mode in ("none", "split-qkv")),
    Case(cp=2, sp=2, bert=True, model=ALL_DROP, mode="split-qkv", steps=2),
    Case(cp=2, sp=2, bert=True, classes=3, mode="chunked", cp_chunks=2),
    Case(cp=2, sp=3, seq=7, packed=True, model={"num_attention_heads": 7, "kv_channels": 2, **ROPE}, mode="chunked"),  # uneven heads
    Case(cp=2, tp=2, tp_seq=True, seq=7, model={**LLAMA, **DROP}, steps=2),
    Case(cp=2, tp=2, tp_seq=True, bert=True, seq=7, model=ALL_DROP),
    Case(cp=2, tp=2, packed=True, model={**GROUPED, **ALL_DROP}, kernels=FULL),
    Case(cp=2, dp=2, micro_batches=2, ragged=True, steps=2),
    # ZeRO over dp, cp and sp
    *(Case(cp=2, dp=2, zero=zero, steps=2, model=LLAMA, kernels=FULL if zero == 3 else {}) for zero in (1, 3)),
    Case(cp=2, sp=2, zero=3, steps=2, packed=True, mode="chunked", model={**ROPE, **DROP}, micro_batches=2),
    Case(cp=2, sp=2, zero=2, steps=2, bert=True),
]
LONG_CASES = [
    Case(cp=2, cp_chunks=3, ragged=True, batch=3, model=NEOX, kernels=SELECTIVE),
    *(Case(cp=2, sp=2, mode=mode, chunks=2, model=LLAMA, seq=seq) for mode, seq in (("none", 8), ("split-qkv", 7))),
    Case(cp=2, sp=2, dtype=torch.float32, mode="chunked", packed=True, model=LLAMA),
    *(Case(cp=2, sp=2, zero=zero, steps=2, packed=True, mode="chunked", model={**ROPE, **DROP}, micro_batches=2) for zero in (0, 1, 2)),
    Case(cp=4, zero=3, steps=2, seq=9, model=DROP),
    Case(cp=4, zero=1, steps=2, seq=3, bert=True),
    *(Case(cp=2, dp=2, zero=zero, steps=2, bert=True, model=ALL_DROP) for zero in (0, 1, 2, 3)),
    Case(cp=2, sp=2, tp=2, tp_seq=True, seq=9, zero=3, steps=2, model={**LLAMA, **DROP}, mode="chunked"),
    Case(cp=2, sp=2, tp=2, bert=True, zero=2, steps=2, model={**WIDE, **ALL_DROP}),
    Case(cp=2, sp=2, dp=2, zero=3, steps=2, packed=True, model=MISTRAL, kernels=SELECTIVE),
    Case(cp=4, tp=2, tp_seq=True, seq=5, model={**LLAMA, **ALL_DROP}, steps=2),
    Case(cp=8, seq=11, zero=3, steps=2, model=LLAMA),
    Case(cp=8, seq=5, bert=True, model=DROP),
]


@pytest.mark.parametrize("cases", by_axes(CASES))
def test_context_parallel_layouts(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("plain_context")
@pytest.mark.parametrize("cases", by_axes([*CASES, *LONG_CASES]))
def test_what_is_around_attention(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("cases", by_axes(LONG_CASES))
def test_more_context_parallel_layouts(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)
