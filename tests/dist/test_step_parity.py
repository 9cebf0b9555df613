"""Every layout gives the one-process loss and gradients: pairwise cases of the axes, and one case for each thing that once went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.layouts import Case, by_axes, run_cases

ROPE = {"position_embedding_type": "rope"}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
MULTI_QUERY = {"group_query_attention": True, "num_query_groups": 1}
LLAMA = {
    **ROPE,
    **GROUPED,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
NEOX = {
    **ROPE,
    "use_parallel_residual": True,
    "rotary_percent": 0.34,
    "gelu_approximate": "none",
    "untie_embeddings_and_output_weights": True,
}
MISTRAL = {**LLAMA, "window_size": 3}
PIECES = {"mlp_chunks": 3}
OFFLOAD = {"offload_activations": True}
DROP = {"hidden_dropout": 0.2}
WIDE = {"ffn_hidden_size": 12}  # four tp ranks divide it
FULL = {"recompute_granularity": "full"}
BACK_AGAIN, ALL_AGAIN = ({**FULL, "recompute_attention": again} for again in ("exchange", "full"))
SELECTIVE = {"recompute_granularity": "selective"}
QKV_AGAIN = {"recompute_qkv": True}

CASES = [
    # tensor parallel, with and without Megatron's sequence parallel
    Case(tp=2, steps=2),
    Case(tp=2, tp_seq=True, steps=2),
    Case(tp=2, tp_seq=True, seq=7, model=LLAMA),
    Case(tp=2, model={**MULTI_QUERY, **DROP}),
    Case(tp=4, model={**WIDE, **GROUPED}, steps=2),
    Case(tp=4, tp_seq=True, seq=6, model={**WIDE, **MULTI_QUERY, **ROPE, "qk_layernorm": True}),
    Case(tp=4, tp_seq=True, model={**WIDE, "num_attention_heads": 8}, kernels=FULL),
    Case(tp=2, tp_seq=True, model={"hidden_dropout": 0.2, "attention_dropout": 0.1}, micro_batches=2),
    Case(tp=2, model={"vocab_size": 16, "make_vocab_size_divisible_by": 16}),  # one rank has padding rows only
    Case(tp=2, model={"vocab_size": 33, "make_vocab_size_divisible_by": 1, **LLAMA}, kernels={"lm_head_chunk_tokens": 3}),
    # Ulysses
    *(Case(sp=sp, mode=mode, chunks=chunks, steps=2) for sp in (2, 4) for mode, chunks in (("none", 1), ("split-qkv", 1), ("chunked", 2))),
    *(Case(sp=2, mode=mode, model=LLAMA, batch=3) for mode in ("none", "split-qkv", "chunked")),
    *(Case(sp=3, mode=mode, seq=7, model=ROPE, batch=1) for mode in ("none", "split-qkv", "chunked")),  # uneven heads, padded length
    *(Case(sp=4, mode=mode, model={**MULTI_QUERY, **ROPE}) for mode in ("none", "split-qkv", "chunked")),  # more ranks than key heads
    *(Case(sp=2, mode="chunked", chunks=n, model={"num_attention_heads": 8, **MULTI_QUERY}) for n in (2, 3, 4, 9)),  # parts of a group
    *(
        Case(sp=4, mode=mode, model={"num_attention_heads": 6, "kv_channels": 4, **GROUPED, **ROPE})
        for mode in ("none", "split-qkv", "chunked")
    ),  # ranks whose queries use two key heads unevenly
    Case(sp=4, mode="chunked", model={"num_attention_heads": 7, "kv_channels": 2}),
    Case(sp=3, mode="chunked", model={"num_attention_heads": 7, "kv_channels": 2}),  # the heads are uneven, a chunk of them is even
    Case(sp=2, mode="split-qkv", overlap=False),
    *(Case(sp=2, mode=mode, model={**ROPE, "qk_layernorm": True, **GROUPED}) for mode in ("none", "split-qkv", "chunked")),
    Case(sp=3, mode="chunked", model={"num_attention_heads": 6, "kv_channels": 4, **GROUPED, **ROPE, "qk_layernorm": True}),
    Case(sp=2, mode="chunked", model={"hidden_dropout": 0.2, "attention_dropout": 0.1}, micro_batches=2),
    Case(sp=4, mode="split-qkv", model={"attention_dropout": 0.3, "num_attention_heads": 6, "kv_channels": 4, **GROUPED}),
    *(Case(sp=2, mode=mode, kernels=kernels, model=DROP) for mode in ("none", "split-qkv", "chunked") for kernels in (FULL, SELECTIVE)),
    Case(sp=2, mode="chunked", model={**MULTI_QUERY, **ROPE}, kernels=SELECTIVE),
    *(Case(sp=2, mode=mode, kernels=kernels, model=ROPE) for mode in ("none", "chunked") for kernels in (BACK_AGAIN, ALL_AGAIN)),
    Case(sp=4, mode="chunked", chunks=3, seq=7, model={"num_attention_heads": 7, "kv_channels": 2}, kernels=FULL),  # uneven, many pieces
    Case(sp=3, mode="split-qkv", batch=1, kernels={**FULL, "recompute_num_layers": 2}, dtype=torch.float32),
    Case(sp=2, packed=True, mode="chunked", kernels={**FULL, "recompute_num_layers": 2}, batch=3),
    *(Case(sp=2, mode=mode, kernels=QKV_AGAIN, model=ROPE, seq=7) for mode in ("none", "split-qkv", "chunked")),
    Case(sp=2, mode="chunked", chunks=4, model={"num_attention_heads": 8, **MULTI_QUERY, **ROPE}, kernels=QKV_AGAIN),  # parts of a group
    Case(sp=3, mode="chunked", chunks=3, model={"num_attention_heads": 8, "kv_channels": 4, **GROUPED, **ROPE}, kernels=QKV_AGAIN),
    Case(
        sp=2, tp=2, tp_seq=True, mode="chunked", model={"num_attention_heads": 8, **MULTI_QUERY, "qk_layernorm": True, **ROPE}, kernels=FULL
    ),
    Case(sp=2, mode="chunked", model={"attention_dropout": 0.2, **DROP}, kernels=QKV_AGAIN),  # nothing kept: attention is repeated, too
    Case(sp=3, seq=8, ragged=True, mode="chunked", dp=2, micro_batches=2, steps=2),
    Case(sp=4, seq=5, batch=1, mode="none"),  # one rank has nothing but padding
    Case(sp=4, seq=3, batch=2, mode="chunked", model=ROPE),
    # masks: documents that do not see each other, and bidirectional attention with padding
    *(Case(sp=2, mode=mode, packed=True, model={**LLAMA}, batch=3) for mode in ("none", "split-qkv", "chunked")),
    Case(sp=3, seq=11, packed=True, mode="chunked", kernels=SELECTIVE),
    Case(tp=2, tp_seq=True, packed=True, model=ROPE),
    Case(tp=2, sp=2, tp_seq=True, seq=7, packed=True, model={"qk_layernorm": True, **ROPE}, kernels=FULL),
    *(Case(sp=2, mode=mode, padding=True, seq=9, batch=3, model=GROUPED) for mode in ("none", "split-qkv", "chunked")),
    Case(sp=4, mode="chunked", padding=True, seq=6, batch=3, model=DROP),
    Case(tp=2, sp=2, tp_seq=True, padding=True, seq=10, batch=2, model=ROPE, kernels=SELECTIVE),
    Case(packed=True, model=LLAMA),
    # a parallel residual, and windows
    Case(tp=2, sp=2, tp_seq=True, seq=7, mode="chunked", model=NEOX, kernels=PIECES),
    Case(tp=2, model={**NEOX, **DROP}),
    Case(sp=2, mode="split-qkv", packed=True, model=MISTRAL, batch=3),
    # together
    Case(sp=2, dp=2, micro_batches=2, steps=3),
    Case(tp=2, dp=2, tp_seq=True, steps=2),
    *(
        Case(tp=2, sp=2, tp_seq=tp_seq, mode=mode, model=DROP, steps=1)
        for tp_seq in (False, True)
        for mode in ("none", "split-qkv", "chunked")
    ),
    Case(tp=2, sp=2, tp_seq=True, seq=7, mode="chunked", model=LLAMA, kernels=FULL),
    Case(tp=2, sp=2, tp_seq=True, seq=9, mode="split-qkv", model={**MULTI_QUERY, "num_attention_heads": 8}),
    Case(tp=2, sp=2, dp=2, tp_seq=True, mode="chunked", model={**LLAMA, "num_attention_heads": 8}, micro_batches=2, steps=2),
    Case(tp=4, sp=2, tp_seq=True, model={**WIDE, "num_attention_heads": 8, "num_query_groups": 2, "group_query_attention": True}),
    Case(tp=2, sp=4, mode="chunked", model={"num_attention_heads": 8}, seq=13),
    # fp32
    *(Case(tp=2, sp=2, tp_seq=True, mode=mode, dtype=torch.float32, model=LLAMA) for mode in ("none", "split-qkv", "chunked")),
    Case(sp=4, mode="chunked", dtype=torch.float32, steps=2),
]
LONG = [
    *(Case(tp=2, tp_seq=tp_seq, model={**NEOX, **drop}, steps=2) for tp_seq in (False, True) for drop in ({}, DROP)),
    *(Case(sp=2, mode=mode, model={**NEOX, **drop}) for mode in ("none", "split-qkv", "chunked") for drop in ({}, DROP)),
    *(
        Case(sp=2, zero=zero, model=NEOX, kernels=kernels, micro_batches=2, steps=2, table_lr=0.2)
        for zero in (1, 3)
        for kernels in ({}, FULL)
    ),
    *(Case(tp=2, model={**NEOX, **DROP}, kernels=kernels) for kernels in (PIECES, SELECTIVE, OFFLOAD, {**OFFLOAD, **FULL})),
    Case(tp=2, dp=2, tp_seq=True, zero=3, model={**NEOX, "disable_bias_linear": True, "add_mlp_bias": True}, kernels=PIECES, steps=2),
    *(Case(sp=2, mode=mode, model=MISTRAL, seq=11) for mode in ("none", "split-qkv", "chunked")),
    Case(sp=3, mode="chunked", seq=11, model={**MISTRAL, "num_query_groups": 4}, kernels=SELECTIVE),
    Case(tp=2, sp=2, tp_seq=True, seq=9, packed=True, model=MISTRAL, kernels=FULL),
    Case(tp=2, zero=1, dp=2, model={**MISTRAL, "add_qkv_bias": True, "add_proj_bias": True}, kernels=OFFLOAD, steps=2),
    Case(
        sp=2,
        mode="chunked",
        model={**ROPE, "geglu": True, "use_rope_scaling": True, "rope_scaling_original_length": 9},
        dtype=torch.float32,
    ),
    Case(sp=2, bert=True, model={"relu": True, "bert_head_activation": "relu", "norm_placement": "post"}),
]


@pytest.mark.parametrize("cases", [*by_axes(CASES), *(pytest.param([case], marks=pytest.mark.long) for case in LONG)])
def test_a_layout_changes_nothing(cases: list[Case], tmp_path: Path) -> None:
    """The message names the case."""
    run_cases(cases, tmp_path)
