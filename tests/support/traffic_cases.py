"""Layouts whose collectives are counted: groups of the same number of ranks, of which some are long."""

from __future__ import annotations

import sys

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from memory import BERT, FULL, LLAMA, SELECTIVE, Layout, zero

SHAPE = {
    "num_layers": 4, "hidden_size": 24, "num_attention_heads": 6, "ffn_hidden_size": 20, "seq_length": 21, "vocab_size": 50,
    "make_vocab_size_divisible_by": 8, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
BATCH = 3
UNTIED = {"untie_embeddings_and_output_weights": True}
BY_TWO = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
CHUNKS = {"lm_head_chunk_tokens": 10}
PIECES = {"mlp_chunks": 4}  # of 21 positions, of 11 with tp_seq

CASES = [
    [Layout(dp=2, zero=zero(stage), micro_batches=count) for stage in (0, 1, 2, 3) for count in (1, 3)],
    [Layout(dp=2, zero=zero(3, **more), micro_batches=2, model=UNTIED)
        for more in ({}, {"zero3_keep_units": 1}, {"zero3_gather_once": True})],
    [Layout(dp=2, zero=zero(3, **{name: value})) for name,
        value in (("zero3_fetch", "all_reduce"), ("overlap_param_gather", False))],
    [Layout(dp=2, zero=zero(stage, grad_reduce_in_bf16=True), bf16=True) for stage in (0, 2)],
    [Layout(dp=2, zero=zero(3), kernels=kernels, micro_batches=2) for kernels in (FULL, BY_TWO, SELECTIVE)],
    [Layout(dp=3, zero=zero(stage)) for stage in (1, 3)],
    [Layout(sp=2, mode=mode) for mode in ("none", "split-qkv", "chunked")],
    [Layout(sp=2, mode="chunked", kernels=FULL, zero=zero(2), micro_batches=2),
        Layout(sp=2, model=LLAMA | {"num_query_groups": 2})],
    [Layout(sp=2, mode="chunked", kernels=FULL | {"recompute_attention": again}) for again in ("exchange", "full")],
    [Layout(sp=2, mode=mode, kernels={"recompute_qkv": True}) for mode in ("none", "split-qkv", "chunked")],
    [Layout(sp=2, mode="chunked", model={"num_query_groups": 2, "num_attention_heads": 12}, kernels=kernels)
        for kernels in ({"recompute_qkv": True}, FULL,
        {**FULL, "recompute_method": "block", "recompute_num_layers": 3})],
    [Layout(sp=4), Layout(sp=4, mode="split-qkv"), Layout(sp=4, mode="chunked", kernels=BY_TWO)],
  # 6 heads: 2, 2, 1, 1
    [Layout(tp=2, kernels=CHUNKS), Layout(tp=2, tp_seq=True, kernels=FULL | CHUNKS),
        Layout(tp=2, tp_seq=True, micro_batches=2)],
    [Layout(tp=2, kernels=PIECES), Layout(tp=2, tp_seq=True, kernels=FULL | PIECES, micro_batches=2)],
    [Layout(tp=2, model={"num_query_groups": 1, "qk_layernorm": True}),
        Layout(tp=2, tp_seq=True, model=LLAMA | {"num_query_groups": 1})],
    [Layout(dp=2, tp=2, tp_seq=True, zero=zero(stage), micro_batches=2) for stage in (1, 2, 3)],
    [Layout(tp=2, model=BERT),
        Layout(tp=2, tp_seq=True, model=BERT | {"norm_placement": "post"}, micro_batches=2, kernels=CHUNKS)],
    [Layout(dp=2, zero=zero(3), model=BERT, micro_batches=2), Layout(sp=2, model=BERT | {"bert_no_binary_head": True})],
    [Layout(cp=2), Layout(cp=2, kernels=FULL, micro_batches=2),
        Layout(cp=2, kernels=SELECTIVE | {"recompute_qkv": True})],
    [Layout(cp=2, kernels=FULL | {"recompute_attention": again}, zero=keep) for again in ("exchange", "full")
        for keep in ({}, {"cp_keep_kv": True})],
    [Layout(cp=3, model=more)
        for more in ({"window_size": 5}, {"window_size": 1}, BERT, LLAMA | {"num_query_groups": 2})],
    [Layout(cp=4), Layout(cp=4, zero=zero(3, cp_chunks=3, cp_stages_ahead="all")),
        Layout(cp=4, model={"seq_length": 3})],
    [Layout(cp=2, sp=2), Layout(cp=2, sp=2, mode="chunked", kernels=FULL, zero=zero(2, cp_keep_kv=True)), Layout(cp=2,
        sp=2, model={"num_query_groups": 2, "num_attention_heads": 12}, mode="chunked",
        kernels={"recompute_qkv": True})],
    [Layout(cp=2, sp=4), Layout(cp=2, sp=4, mode="chunked", kernels=BY_TWO), Layout(cp=2, sp=2, tp=2, tp_seq=True)],
    [Layout(cp=2, tp=2, model=BERT | {"seq_length": 28}),
        Layout(cp=2, tp=2, tp_seq=True, zero=zero(1), model=LLAMA | {"num_query_groups": 1})],
    [Layout(pp=2, schedule=kind, micro_batches=3) for kind in ("1f1b", "interleaved", "zb1p", "zbv")],
    [Layout(pp=2, schedule="slices", slices=2, micro_batches=3, model=model) for model in ({}, UNTIED)],
    [Layout(pp=2, cp=2, schedule="slices", slices=3, micro_batches=2, kernels=kernels) for kernels in ({}, FULL)],
    [Layout(pp=2, tp=2, tp_seq=seq, schedule=kind, slices=slices, micro_batches=2, kernels=CHUNKS | PIECES)
        for seq in (True, False) for kind, slices in (("1f1b", 1), ("zbv", 1), ("slices", 2))],
    [Layout(pp=2, sp=2, schedule=kind, slices=slices, micro_batches=2) for kind,
        slices in (("zb1p", 1), ("slices", 2))],
    [Layout(pp=2, dp=2, schedule=kind, slices=slices, micro_batches=3, zero=zero(stage), model=model)
        for stage in (0, 1, 2) for kind, slices in (("1f1b", 1), ("zb1p", 1), ("zbv", 1), ("slices", 2))
        for model in ({}, UNTIED)],
    [Layout(sp=2, tp=2, mode="split-qkv", zero=zero(stage), model=LLAMA | {"num_query_groups": 2}) for stage in (0, 3)],
]  # fmt: skip


ALL_HEADS = LLAMA | {"qk_layernorm": True, "qk_layernorm_scope": "all", "num_query_groups": 2}
KEPT = {"recompute_qkv": True}
CASES += [
    [Layout(sp=2, model=ALL_HEADS, mode=mode, kernels=kernels, micro_batches=2) for mode, kernels in
     (("none", {}), ("split-qkv", FULL), ("chunked", KEPT))],
    [Layout(tp=2, model=ALL_HEADS), Layout(tp=2, tp_seq=True, model=ALL_HEADS, kernels=FULL | {"recompute_attention": "full"}),
     Layout(pp=2, schedule="slices", slices=2, micro_batches=2, model=ALL_HEADS)],
    [Layout(tp=2, sp=2, model=ALL_HEADS, kernels=BY_TWO), Layout(cp=2, sp=2, model=ALL_HEADS, kernels=FULL),
                  Layout(cp=2, tp=2, model=ALL_HEADS, kernels=SELECTIVE)],
]  # fmt: skip
