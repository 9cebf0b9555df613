"""Layouts whose memory is measured: groups of the same number of ranks, of which some are long."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from memory import BERT, DROPOUT, FULL, LLAMA, SELECTIVE, Layout, zero

SHAPE = {
    "num_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "ffn_hidden_size": 200, "seq_length": 202, "vocab_size": 300,
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
BATCH = 3
WORDS = {"vocab_size": 3000}  # the head is the worst moment
WIDE = {"ffn_hidden_size": 500}  # the MLP is
NARROW = {"ffn_hidden_size": 40}  # attention is
DEEP = {"num_layers": 5, "seq_length": 40}  # gradients are
BROAD = {"ffn_hidden_size": 1500}  # the MLP is, even in pieces
OFFLOAD = {"offload_activations": True}
PIECES = {"mlp_chunks": 4}
QKV_AGAIN = {"recompute_qkv": True}
GROUPS = {"group_query_attention": True, "num_attention_heads": 12, "num_query_groups": 2}  # parts of a group in each chunk
PARALLEL = {"use_parallel_residual": True}
WINDOW = LLAMA | {"num_query_groups": 2, "window_size": 64}
ROTARY = {"position_embedding_type": "rope", "ffn_hidden_size": 40}  # attention is the worst moment, and what turns its gradients back
DELAY = {"delay_wgrad": True}
UNTIED = {"untie_embeddings_and_output_weights": True}
POST = BERT | {"norm_placement": "post"}


def pipe(schedule: str = "1f1b", **more: Any) -> Layout:
    """A pipeline of two ranks, whose stages have different numbers of layers."""
    return Layout(**{"pp": 2, "schedule": schedule, "micro_batches": 4, **more, "model": {"num_layers": 5} | more.get("model", {})})


CASES = [
    [Layout(), Layout(model=WORDS), Layout(model=WIDE), Layout(kernels={**FULL, "recompute_num_layers": 2})],
    [Layout(kernels=SELECTIVE), Layout(model=DROPOUT), Layout(model=LLAMA | {"num_query_groups": 2}),
     Layout(model={"attention_dropout": 0.1})],
    [Layout(kernels={"lm_head_chunk_tokens": 64}, model=WORDS), Layout(micro_batches=2, model=WORDS), Layout(bf16=True, model=WORDS)],
    [Layout(sp=2), Layout(sp=2, mode="chunked"), Layout(sp=2, mode="split-qkv"), Layout(sp=2, micro_batches=2)],
    [Layout(kernels=FULL | {"recompute_attention": "full"} | more, model=DEEP | ROTARY) for more in ({}, {"recompute_num_layers": 2})],
    [Layout(sp=2, kernels=FULL | {"recompute_attention": again}, model=DEEP | ROTARY) for again in ("none", "exchange", "full")],
    [Layout(kernels=QKV_AGAIN, model=ROTARY), Layout(kernels=QKV_AGAIN | OFFLOAD, model=DEEP | ROTARY)],
    [Layout(sp=2, mode="chunked", kernels=kernels, model={"ffn_hidden_size": 40} | GROUPS) for kernels in (QKV_AGAIN, FULL)],
    pytest.param(
        [Layout(sp=2, mode=mode, kernels=kernels, model={"ffn_hidden_size": 40} | more) for mode in ("none", "split-qkv", "chunked")
         for kernels in (QKV_AGAIN, FULL) for more in ({}, GROUPS)],
        marks=pytest.mark.long,
    ),
    pytest.param(
        [Layout(sp=2, mode="chunked", kernels=FULL | {"recompute_attention": again}, model=DEEP) for again in ("none", "exchange")],
        marks=pytest.mark.long,
    ),
    pytest.param(
        [Layout(sp=2, kernels=FULL),
         Layout(sp=2, kernels=SELECTIVE), Layout(sp=2, model=LLAMA | {"num_query_groups": 2, "seq_length": 201})],
        marks=pytest.mark.long,
    ),
    [Layout(kernels=OFFLOAD | more, model=DEEP | WIDE) for more in ({}, FULL, PIECES)],
    pytest.param(
        [Layout(sp=2, kernels=OFFLOAD, mode="chunked", model=DEEP), Layout(sp=2, zero=zero(3), kernels=OFFLOAD | FULL, model=DEEP)],
        marks=pytest.mark.long,
    ),
    pytest.param(
        [Layout(kernels=OFFLOAD | FULL | {"recompute_num_layers": 2}, model=DEEP), Layout(kernels=OFFLOAD, model=DROPOUT | DEEP)],
        marks=pytest.mark.long,
    ),
    [Layout(tp=2), Layout(tp=2, tp_seq=True, model=WORDS), Layout(tp=2, tp_seq=True, model=DROPOUT)],
    [Layout(kernels=PIECES, model=BROAD), Layout(kernels=PIECES | FULL),
     Layout(kernels=PIECES, model=LLAMA | BROAD | {"num_query_groups": 2})],
    [Layout(tp=2, kernels=PIECES, model=BROAD), Layout(tp=2, tp_seq=True, kernels=PIECES, model=BROAD | DROPOUT)],
    pytest.param([Layout(kernels=PIECES, bf16=True), Layout(kernels=PIECES, model=DROPOUT | BROAD)], marks=pytest.mark.long),
    pytest.param([Layout(kernels=PIECES, model={"squared_relu": True} | BROAD)], marks=pytest.mark.long),
    [Layout(model=PARALLEL), Layout(model=PARALLEL | BROAD, kernels=PIECES), Layout(model=WINDOW | {"ffn_hidden_size": 40})],
    pytest.param(
        [Layout(model=PARALLEL | more, kernels=kernels) for more in (WORDS, WIDE, DROPOUT, BROAD)
         for kernels in ({}, FULL, SELECTIVE, PIECES)],
        marks=pytest.mark.long,
    ),
    pytest.param([Layout(kernels=OFFLOAD, model=PARALLEL | DEEP), Layout(model=PARALLEL | UNTIED, micro_batches=2)],
                 marks=pytest.mark.long),
    pytest.param(
        [Layout(model=LLAMA | {"num_query_groups": 2, "window_size": size, "ffn_hidden_size": ffn}, kernels=kernels) for size in (20, 100)
         for ffn in (40, 500) for kernels in ({}, FULL)],
        marks=pytest.mark.long,
    ),
    pytest.param([Layout(model={"window_size": size, "seq_length": 800, "ffn_hidden_size": 40}) for size in (64, 300)],
                 marks=pytest.mark.long),
    pytest.param([Layout(model={"geglu": True} | WIDE, kernels=kernels) for kernels in ({}, PIECES)], marks=pytest.mark.long),
    pytest.param([Layout(tp=2, tp_seq=True, model=PARALLEL | more) for more in ({}, DROPOUT, UNTIED)], marks=pytest.mark.long),
    pytest.param([Layout(sp=2, mode=mode, model=model) for mode in ("none", "chunked", "split-qkv")
                  for model in (PARALLEL, WINDOW)], marks=pytest.mark.long),
    pytest.param([Layout(dp=2, zero=zero(stage), model=PARALLEL | DEEP) for stage in (1, 3)], marks=pytest.mark.long),
    pytest.param([Layout(sp=4), Layout(tp=2, tp_seq=True, sp=2)], marks=pytest.mark.long),
    [Layout(model=ROTARY, kernels=FULL | PIECES), Layout(model=ROTARY | {"num_query_groups": 2}), Layout(model=ROTARY, bf16=True)],
    pytest.param([Layout(model=ROTARY, kernels=kernels, bf16=bf16) for kernels in (SELECTIVE, FULL) for bf16 in (False, True)],
                 marks=pytest.mark.long),
    pytest.param([Layout(sp=2, mode=mode, model=ROTARY) for mode in ("none", "chunked", "split-qkv")], marks=pytest.mark.long),
    pytest.param([Layout(sp=2, bf16=True, model=ROTARY)], marks=pytest.mark.long),
    *([Layout(dp=2, zero=zero(stage), micro_batches=count, model=DEEP) for count in (1, 3)] for stage in (1, 3)),
    pytest.param([Layout(dp=2, zero=zero(2), micro_batches=count, model=DEEP) for count in (1, 3)], marks=pytest.mark.long),
    pytest.param([Layout(dp=2, zero=zero(stage, overlap_grad_reduce=False), micro_batches=2, model=DEEP) for stage in (1, 2)],
                 marks=pytest.mark.long),
    [Layout(dp=2, zero=zero(stage), micro_batches=count, model=UNTIED | DEEP) for stage in (2, 3) for count in (1, 2)],
    [Layout(sp=2, zero=zero(3), kernels=FULL, model=DEEP), Layout(sp=2, zero=zero(2), model=DEEP),
     Layout(dp=2, zero=zero(1), kernels=FULL)],
    [Layout(dp=2, zero=zero(3, zero3_keep_units=1), model=DEEP), Layout(dp=2, zero=zero(3, zero3_gather_once=True), micro_batches=2)],
    pytest.param([Layout(dp=2, zero=zero(stage, grad_reduce_in_bf16=True), model=DEEP) for stage in (0, 1, 3)], marks=pytest.mark.long),
    pytest.param([Layout(dp=2, zero=zero(stage), bf16=True, model=DEEP) for stage in (1, 3)], marks=pytest.mark.long),
    [Layout(zero=zero(stage), micro_batches=2) for stage in (1, 2, 3)],
    pytest.param([Layout(dp=2, tp=2, tp_seq=True, zero=zero(stage)) for stage in (1, 2, 3)], marks=pytest.mark.long),
    [Layout(model=BERT), Layout(model=POST | WORDS), Layout(model=POST | WIDE, kernels=FULL), Layout(model=POST, micro_batches=2)],
    [Layout(sp=2, model=POST), Layout(tp=2, tp_seq=True, model=BERT), Layout(tp=2, tp_seq=True, model=POST | DROPOUT)],
    pytest.param(
        [Layout(dp=2, zero=zero(3), model=POST | DEEP), Layout(dp=2, zero=zero(1), model=BERT | {"bert_no_binary_head": True})],
        marks=pytest.mark.long,
    ),
    [Layout(cp=2, model=NARROW), Layout(cp=2, kernels=FULL, zero={"cp_keep_kv": True}, model=NARROW),
     Layout(cp=2, model=LLAMA | NARROW | {"num_query_groups": 2}), Layout(cp=2, model=NARROW | {"window_size": 64})],
    [Layout(cp=4, model=NARROW), Layout(cp=4, model=NARROW | BERT), Layout(cp=2, sp=2, mode="chunked", model=NARROW)],
    pytest.param(
        [Layout(cp=2, kernels=kernels, model=NARROW) for kernels in (FULL, FULL | {"recompute_attention": "full"}, SELECTIVE, QKV_AGAIN)],
        marks=pytest.mark.long,
    ),
    pytest.param([Layout(cp=2, model=NARROW | more) for more in (BERT, {"window_size": 20}, ROTARY, DROPOUT)], marks=pytest.mark.long),
    pytest.param([Layout(cp=2, model=NARROW, bf16=True), Layout(cp=2, model=WORDS), Layout(cp=2, model=WIDE)], marks=pytest.mark.long),
    pytest.param(
        [Layout(cp=2, sp=2, mode=mode, kernels=kernels, model=NARROW | more) for mode in ("none", "chunked")
         for kernels in (QKV_AGAIN, FULL) for more in ({}, GROUPS)],
        marks=pytest.mark.long,
    ),
    pytest.param([Layout(cp=4, model=NARROW, zero={"cp_stages_ahead": "all"}), Layout(cp=4, model=NARROW | {"window_size": 20}),
                  Layout(cp=4, model=NARROW, zero={"cp_keep_kv": True}),
                  Layout(cp=4, model=NARROW, zero={"cp_keep_kv": True}, kernels=OFFLOAD), Layout(cp=2, tp=2, tp_seq=True, model=NARROW)],
                 marks=pytest.mark.long),
    [Layout(cp=2, model=NARROW | {"attention_dropout": 0.1}, zero={"cp_keep_kv": keep}) for keep in (False, True)],
    pytest.param([Layout(cp=4, model=NARROW | {"attention_dropout": 0.1}, kernels=kernels) for kernels in ({}, OFFLOAD)],
                 marks=pytest.mark.long),
    [Layout(sp=2, mode="split-qkv", zero=DELAY), Layout(sp=2, mode="chunked", zero=DELAY, kernels=FULL, model=BROAD),
     Layout(cp=2, zero=DELAY, model=NARROW)],
    pytest.param([Layout(sp=2, mode=mode, zero=DELAY, model=model) for mode in ("split-qkv", "chunked")
                  for model in (DROPOUT, POST, PARALLEL, BROAD, WIDE, ROTARY)], marks=pytest.mark.long),
    pytest.param([Layout(sp=2, mode=mode, zero=DELAY, micro_batches=2, model=LLAMA | {"num_query_groups": 2})
                  for mode in ("split-qkv", "chunked")], marks=pytest.mark.long),
    pytest.param([Layout(sp=2, mode="chunked", zero=DELAY, kernels=kernels, model=DEEP | model) for model in ({}, BROAD)
                  for kernels in (FULL, SELECTIVE, QKV_AGAIN, PIECES, OFFLOAD, OFFLOAD | FULL)], marks=pytest.mark.long),
    pytest.param([Layout(cp=2, zero=DELAY, model=model, kernels=kernels, micro_batches=count)
                  for model, count in ((NARROW, 1), (BROAD, 1), (LLAMA | {"num_query_groups": 2}, 2)) for kernels in ({}, FULL, PIECES)],
                 marks=pytest.mark.long),
    pytest.param([Layout(sp=2, mode="split-qkv", zero=DELAY, bf16=True)], marks=pytest.mark.long),
    pytest.param([Layout(cp=2, sp=2, mode="chunked", zero=DELAY, model=NARROW),
                  Layout(tp=2, sp=2, mode="chunked", zero=DELAY, model=BROAD), Layout(tp=2, cp=2, zero=DELAY, model=BROAD),
                  Layout(tp=2, tp_seq=True, sp=2, mode="chunked", zero=DELAY, model=BROAD)], marks=pytest.mark.long),
    pytest.param([Layout(sp=2, mode="chunked", zero=DELAY | zero(stage), model=DEEP) for stage in (1, 2, 3)], marks=pytest.mark.long),
    pytest.param([pipe(sp=2, mode="chunked", zero=DELAY), pipe("slices", slices=2, sp=2, mode="chunked", zero=DELAY)],
                 marks=pytest.mark.long),
    [Layout(dp=3, zero=zero(3), model={"vocab_size": 301, "ffn_hidden_size": 101})],
    [pipe(), pipe(kernels=FULL | {"recompute_num_layers": 2}, model=POST)],
    pytest.param([pipe("interleaved"), pipe("zbv", model=WORDS), pipe("zb1p", kernels=PIECES, model=DROPOUT)], marks=pytest.mark.long),
    pytest.param([pipe("zbv", kernels=FULL), pipe("zb1p", kernels=FULL | PIECES | {"recompute_num_layers": 2})], marks=pytest.mark.long),
    [pipe("1f1b", dp=2, zero=zero(2), model=DEEP), pipe("zb1p", dp=2, zero=zero(3), model=DEEP)],
    [pipe("slices", slices=2, kernels=FULL | OFFLOAD, model=WORDS)],
    pytest.param([pipe("slices", slices=3)], marks=pytest.mark.long),
    pytest.param([pipe("slices", slices=2, model=model) for model in (
        WIDE, NARROW, UNTIED, DROPOUT, PARALLEL, ROTARY, BROAD, LLAMA | {"num_query_groups": 2, "window_size": 64},
        {"attention_dropout": 0.1},
    )], marks=pytest.mark.long),
    pytest.param([pipe("slices", slices=3, kernels=kernels) for kernels in (
        FULL, FULL | {"recompute_num_layers": 2}, FULL | {"recompute_attention": "full"}, SELECTIVE, QKV_AGAIN, PIECES, OFFLOAD,
        OFFLOAD | FULL, OFFLOAD | QKV_AGAIN,
    )], marks=pytest.mark.long),
    pytest.param([pipe("slices", slices=2, **more) for more in (
        {"tp": 2}, {"tp": 2, "tp_seq": True}, {"sp": 2}, {"sp": 2, "mode": "chunked"}, {"cp": 2}, {"cp": 2, "zero": {"cp_keep_kv": True}},
    )], marks=pytest.mark.long),
    pytest.param([pipe("slices", slices=2, dp=2, zero=zero(stage, overlap_grad_reduce=overlap), model=DEEP | model)
                  for stage in (1, 2, 3) for overlap in (True, False) for model in ({}, UNTIED)], marks=pytest.mark.long),
    pytest.param([pipe("slices", pp=3, slices=4, micro_batches=count) for count in (1, 5)], marks=pytest.mark.long),
    pytest.param([pipe("slices", slices=2, bf16=True)], marks=pytest.mark.long),
    pytest.param([pipe("zbv", model=BROAD), pipe("1f1b", model={"ffn_hidden_size": 1500, "vocab_size": 3000})], marks=pytest.mark.long),
    pytest.param([pipe(pp=3), pipe("zb1p", pp=3), pipe("interleaved", pp=3, model={"num_layers": 8})], marks=pytest.mark.long),
    pytest.param([pipe(kind, micro_batches=count) for kind in ("1f1b", "interleaved", "zb1p", "zbv") for count in (1, 2, 7)],
                 marks=pytest.mark.long),
    *(pytest.param(
        [pipe(kind, model=model) for model in (WORDS, WIDE, NARROW, UNTIED, DROPOUT, PARALLEL, ROTARY, LLAMA | {"num_query_groups": 2},
                                               {"seq_length": 40}, BERT, POST, DROPOUT | PARALLEL)],
        marks=pytest.mark.long,
    ) for kind in ("1f1b", "interleaved", "zb1p", "zbv")),
    *(pytest.param(
        [pipe(kind, kernels=kernels) for kernels in (FULL, FULL | {"recompute_num_layers": 2}, SELECTIVE, QKV_AGAIN, PIECES, OFFLOAD,
                                                     OFFLOAD | FULL, FULL | PIECES)],
        marks=pytest.mark.long,
    ) for kind in ("1f1b", "interleaved", "zb1p", "zbv")),
    *(pytest.param(
        [pipe(kind, tp=2), pipe(kind, tp=2, tp_seq=True), pipe(kind, sp=2), pipe(kind, sp=2, mode="chunked"), pipe(kind, cp=2),
         pipe(kind, tp=2, tp_seq=True, model=DROPOUT), pipe(kind, tp=2, tp_seq=True, kernels=PIECES)],
        marks=pytest.mark.long,
    ) for kind in ("1f1b", "zb1p")),
    *(pytest.param(
        [pipe(kind, dp=2, zero=zero(stage, overlap_grad_reduce=overlap), model=DEEP | model, micro_batches=count)
         for overlap in (True, False) for model in ({}, UNTIED) for count in (1, 5)],
        marks=pytest.mark.long,
    ) for kind in ("1f1b", "interleaved", "zb1p", "zbv") for stage in (1, 2, 3)),
    pytest.param([pipe(kind, dp=2, zero=zero(stage, grad_reduce_in_bf16=True), model=DEEP) for kind in ("1f1b", "zb1p")
                  for stage in (0, 1, 3)], marks=pytest.mark.long),
    pytest.param([pipe(kind, bf16=True) for kind in ("1f1b", "zb1p", "zbv")], marks=pytest.mark.long),
]  # fmt: skip


EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 160, "moe_router_topk": 2}
MANY = EXPERTS | {"moe_ffn_hidden_size": 600}  # an expert is the worst moment
SHARED = EXPERTS | {"moe_shared_expert_intermediate_size": 64}
SOME = EXPERTS | {"moe_layer_freq": "[1,1,0]"}
EP = {"expert_model_parallel_size": 2}

EXPERT_CASES = [
    [Layout(model=EXPERTS), Layout(model=MANY | LLAMA | {"num_query_groups": 2}), Layout(model=SOME, micro_batches=2),
     Layout(model=SHARED, kernels=FULL)],
    [Layout(dp=2, model=EXPERTS, zero=EP), Layout(dp=2, model=SHARED, zero=EP | {"moe_chunks": 3}),
     Layout(tp=2, tp_seq=True, model=SHARED, zero=EP)],
    [Layout(dp=2, model=EXPERTS, zero=EP | zero(3))],
    pytest.param([Layout(dp=2, model=EXPERTS, zero=zero(1)), pipe("zb1p", model=EXPERTS)], marks=pytest.mark.long),
    pytest.param([Layout(model=EXPERTS | more) for more in (
        DROPOUT, PARALLEL, {"norm_placement": "post"}, {"moe_aux_loss_coeff": 0.1}, {"moe_layer_freq": "[0,1,0]"}, {"geglu": True},
        {"moe_router_topk": 4, "moe_router_pre_softmax": True}, {"moe_router_dtype": "fp64"}, WORDS, DEEP,
    )], marks=pytest.mark.long),
    pytest.param([Layout(model=SOME, kernels=kernels) for kernels in (FULL, FULL | {"recompute_num_layers": 2}, SELECTIVE, OFFLOAD,
                                                                      OFFLOAD | FULL, PIECES)], marks=pytest.mark.long),
    pytest.param([Layout(model=model, bf16=True) for model in (EXPERTS, MANY)], marks=pytest.mark.long),
    pytest.param([Layout(dp=2, model=EXPERTS | more, zero=EP | parallel, kernels=kernels) for more in ({}, {"moe_ffn_hidden_size": 600})
                  for parallel, kernels in (({}, {}), ({"moe_chunks": 4}, {}), ({}, FULL))], marks=pytest.mark.long),
    pytest.param([Layout(tp=2, model=SHARED), Layout(tp=2, tp_seq=True, model=EXPERTS), Layout(sp=2, model=SHARED, zero=EP),
                  Layout(cp=2, model=SHARED, zero=EP)], marks=pytest.mark.long),
    *(pytest.param([Layout(dp=2, model=SHARED | DEEP, zero=parallel | zero(stage, **more), micro_batches=count)
                    for count in (1, 2) for parallel in ({}, EP) for more in ({}, {"overlap_grad_reduce": False})], marks=pytest.mark.long)
      for stage in (1, 2, 3)),
    pytest.param([Layout(dp=4, model=SHARED, zero=EP | zero(stage)) for stage in (1, 3)], marks=pytest.mark.long),
    *(pytest.param([pipe(kind, model=model, **more) for model, more in (
        (SHARED, {}), (EXPERTS | {"moe_layer_freq": "[1,0,1,0,1]"}, {}), (EXPERTS | UNTIED, {"kernels": FULL}),
    )], marks=pytest.mark.long) for kind in ("1f1b", "interleaved", "zb1p", "zbv")),
    pytest.param([pipe(kind, model=EXPERTS | DEEP, dp=2, zero=parallel) for kind in ("1f1b", "zb1p")
                  for parallel in (EP, zero(1), EP | zero(2))], marks=pytest.mark.long),
]  # fmt: skip
