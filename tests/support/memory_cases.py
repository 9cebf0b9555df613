"""Layouts whose memory is measured: groups of the same number of ranks, of which ``few`` are in every run."""

from __future__ import annotations

import sys
from typing import Any

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


KINDS = ("1f1b", "interleaved", "zb1p", "zbv")
TWO_GROUPS = LLAMA | {"num_query_groups": 2}
# The prediction is a run of the program itself, so a combination of features cannot be forgotten: each is here where it is the
# worst moment, alone, with what changes the order of the moments, and on every axis.
CASES = [
    [Layout(), Layout(model=WORDS), Layout(model=WIDE), Layout(kernels={**FULL, "recompute_num_layers": 2})],
    [Layout(kernels=SELECTIVE), Layout(model=DROPOUT), Layout(model=TWO_GROUPS), Layout(model={"attention_dropout": 0.1})],
    [Layout(kernels={"lm_head_chunk_tokens": 64}, model=WORDS), Layout(micro_batches=2, model=WORDS),
     Layout(bf16=True, model=WORDS)],
    [Layout(kernels=FULL | {"recompute_attention": "full"}, model=DEEP | ROTARY),
     Layout(kernels=QKV_AGAIN | OFFLOAD, model=DEEP | ROTARY), Layout(model=ROTARY, bf16=True)],
    [Layout(kernels=OFFLOAD | more, model=DEEP | WIDE) for more in ({}, FULL, PIECES)],
    [Layout(sp=2, kernels=FULL | {"recompute_attention": again}, model=DEEP | ROTARY)
     for again in ("none", "exchange", "full")],
    [Layout(kernels=PIECES, model=BROAD), Layout(kernels=PIECES | FULL), Layout(kernels=PIECES, bf16=True),
     Layout(kernels=PIECES, model=TWO_GROUPS | BROAD), Layout(kernels=PIECES, model={"squared_relu": True} | BROAD)],
    [Layout(model=PARALLEL | more, kernels=kernels) for more, kernels in
     (({}, {}), (BROAD, PIECES), (WIDE, SELECTIVE), (DEEP, OFFLOAD), (DROPOUT, FULL))],
    [Layout(model=WINDOW | {"ffn_hidden_size": 40}), Layout(model=WINDOW | {"window_size": 20}, kernels=FULL),
     Layout(model={"window_size": 64, "seq_length": 800, "ffn_hidden_size": 40}), Layout(model={"geglu": True} | WIDE)],
    [Layout(zero=zero(stage), micro_batches=2) for stage in (1, 2, 3)],
    [Layout(dp=2, zero=zero(1), micro_batches=count, model=DEEP) for count in (1, 3)],
    [Layout(sp=2), Layout(sp=2, mode="chunked"), Layout(sp=2, mode="split-qkv"), Layout(sp=2, micro_batches=2)],
    [Layout(sp=2, mode=mode, kernels=kernels, model={"ffn_hidden_size": 40} | more) for mode, kernels, more in
     (("none", QKV_AGAIN, {}), ("split-qkv", FULL, GROUPS), ("chunked", QKV_AGAIN, GROUPS), ("chunked", FULL, GROUPS))],
    [Layout(sp=2, kernels=SELECTIVE), Layout(sp=2, model=TWO_GROUPS | {"seq_length": 201}), Layout(sp=2, model=POST),
     Layout(sp=2, bf16=True, model=ROTARY), Layout(sp=2, mode="split-qkv", model=WINDOW)],
    [Layout(sp=2, kernels=OFFLOAD, mode="chunked", model=DEEP),
     Layout(sp=2, zero=zero(3), kernels=OFFLOAD | FULL, model=DEEP)],
    [pipe(), pipe(kernels=FULL | {"recompute_num_layers": 2}, model=POST)],
    [Layout(tp=2), Layout(tp=2, tp_seq=True, model=WORDS), Layout(tp=2, tp_seq=True, model=DROPOUT)],
    [Layout(tp=2, kernels=PIECES, model=BROAD), Layout(tp=2, tp_seq=True, kernels=PIECES, model=BROAD | DROPOUT),
     Layout(tp=2, tp_seq=True, model=PARALLEL | UNTIED), Layout(tp=2, tp_seq=True, model=BERT)],
    [Layout(sp=4), Layout(tp=2, tp_seq=True, sp=2)],
    [Layout(dp=2, zero=zero(3), micro_batches=count, model=DEEP) for count in (1, 3)],
    [Layout(dp=2, zero=zero(3), micro_batches=count, model=UNTIED | DEEP) for count in (1, 2)],
    [Layout(dp=2, zero=zero(2), model=UNTIED | DEEP), Layout(dp=2, zero=zero(3), model=PARALLEL | DEEP),
     Layout(dp=2, zero=zero(1, overlap_grad_reduce=False), micro_batches=2, model=DEEP),
     Layout(dp=2, zero=zero(2, overlap_grad_reduce=False), micro_batches=2, model=DEEP)],
    [Layout(sp=2, zero=zero(3), kernels=FULL, model=DEEP), Layout(sp=2, zero=zero(2), model=DEEP),
     Layout(dp=2, zero=zero(1), kernels=FULL)],
    [Layout(dp=2, zero=zero(3, zero3_keep_units=1), model=DEEP),
     Layout(dp=2, zero=zero(3, zero3_gather_once=True), micro_batches=2)],
    [Layout(dp=2, zero=zero(stage, grad_reduce_in_bf16=True), model=DEEP) for stage in (0, 1, 3)],
    [Layout(dp=2, zero=zero(stage), bf16=True, model=DEEP) for stage in (1, 3)],
    [Layout(dp=2, tp=2, tp_seq=True, zero=zero(stage)) for stage in (1, 2, 3)],
    [Layout(dp=3, zero=zero(3), model={"vocab_size": 301, "ffn_hidden_size": 101})],
    [Layout(model=BERT), Layout(model=POST | WORDS), Layout(model=POST | WIDE, kernels=FULL),
     Layout(model=POST, micro_batches=2)],
    [Layout(dp=2, zero=zero(3), model=POST | DEEP),
     Layout(dp=2, zero=zero(1), model=BERT | {"bert_no_binary_head": True})],
    [Layout(cp=2, model=NARROW), Layout(cp=2, kernels=FULL, zero={"cp_keep_kv": True}, model=NARROW),
     Layout(cp=2, model=TWO_GROUPS | NARROW), Layout(cp=2, model=NARROW | {"window_size": 64})],
    [Layout(cp=2, kernels=kernels, model=NARROW) for kernels in (FULL | {"recompute_attention": "full"}, SELECTIVE, QKV_AGAIN)],
    [Layout(cp=2, model=NARROW | more) for more in (BERT, ROTARY, DROPOUT)] + [Layout(cp=2, model=NARROW, bf16=True)],
    [Layout(cp=2, model=NARROW | {"attention_dropout": 0.1}, zero={"cp_keep_kv": keep}) for keep in (False, True)],
    [Layout(cp=4, model=NARROW), Layout(cp=4, model=NARROW | {"window_size": 20}),
     Layout(cp=4, model=NARROW, zero={"cp_keep_kv": True}, kernels=OFFLOAD), Layout(cp=2, tp=2, tp_seq=True, model=NARROW),
     Layout(cp=4, model=NARROW, zero={"cp_stages_ahead": "all"}), Layout(cp=2, sp=2, mode="chunked", model=NARROW),
     Layout(cp=2, sp=2, mode="chunked", kernels=QKV_AGAIN, model=NARROW | GROUPS)],
    [Layout(sp=2, mode="split-qkv", zero=DELAY), Layout(sp=2, mode="chunked", zero=DELAY, kernels=FULL, model=BROAD),
     Layout(sp=2, mode="chunked", zero=DELAY, kernels=OFFLOAD, model=DEEP), Layout(cp=2, zero=DELAY, model=NARROW),
     Layout(sp=2, mode="chunked", zero=DELAY | zero(3), model=DEEP), Layout(sp=2, zero=DELAY, bf16=True, mode="split-qkv")],
    [Layout(tp=2, tp_seq=True, sp=2, mode="chunked", zero=DELAY, model=BROAD), Layout(tp=2, cp=2, zero=DELAY, model=BROAD),
     pipe(sp=2, mode="chunked", zero=DELAY), pipe("slices", slices=2, sp=2, mode="chunked", zero=DELAY)],
    *([pipe(kind, model=WORDS), pipe(kind, kernels=FULL, model=WIDE), pipe(kind, kernels=PIECES, model=DROPOUT | BROAD),
       pipe(kind, kernels=OFFLOAD | FULL, model=UNTIED), pipe(kind, bf16=True), pipe(kind, micro_batches=1),
       pipe(kind, model=PARALLEL | ROTARY, kernels=QKV_AGAIN, micro_batches=7)] for kind in KINDS),
    *([pipe(kind, tp=2, tp_seq=True, model=DROPOUT), pipe(kind, sp=2, mode="chunked"), pipe(kind, cp=2),
       pipe(kind, dp=2, zero=zero(0, grad_reduce_in_bf16=True), model=DEEP),
       *(pipe(kind, dp=2, zero=zero(stage), model=DEEP) for stage in (1, 2, 3)),
       pipe(kind, dp=2, zero=zero(2, overlap_grad_reduce=False), model=DEEP | UNTIED)] for kind in KINDS[::2]),
    [pipe("slices", slices=3, kernels=kernels, model=model) for kernels, model in
     ((FULL | OFFLOAD, WORDS), (SELECTIVE, WIDE), (QKV_AGAIN, ROTARY | NARROW), (PIECES, BROAD), ({}, UNTIED | DROPOUT),
      (FULL | {"recompute_attention": "full"}, WINDOW))],
    [pipe("slices", slices=2, **more) for more in
     ({"tp": 2, "tp_seq": True}, {"sp": 2, "mode": "chunked"}, {"cp": 2, "zero": {"cp_keep_kv": True}},
      *({"dp": 2, "zero": zero(stage), "model": DEEP} for stage in (1, 3)))],
    [pipe(pp=3), pipe("zb1p", pp=3), pipe("interleaved", pp=3, model={"num_layers": 8}),
     pipe("slices", pp=3, slices=4, micro_batches=5)],
]  # fmt: skip


EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 160, "moe_router_topk": 2}
MANY = EXPERTS | {"moe_ffn_hidden_size": 600}  # an expert is the worst moment
SHARED = EXPERTS | {"moe_shared_expert_intermediate_size": 64}
SOME = EXPERTS | {"moe_layer_freq": "[1,1,0]"}
EP = {"expert_model_parallel_size": 2}

EXPERT_CASES = [
    [Layout(model=EXPERTS), Layout(model=MANY | TWO_GROUPS), Layout(model=SOME, micro_batches=2),
     Layout(model=SHARED, kernels=FULL)],
    [Layout(dp=2, model=EXPERTS, zero=EP), Layout(dp=2, model=SHARED, zero=EP | {"moe_chunks": 4}),
     Layout(tp=2, tp_seq=True, model=SHARED, zero=EP)],
    [Layout(model=EXPERTS | more) for more in
     (DROPOUT | PARALLEL, {"norm_placement": "post"}, {"moe_aux_loss_coeff": 0.1}, {"geglu": True},
      {"moe_router_topk": 4, "moe_router_pre_softmax": True}, {"moe_router_dtype": "fp64"}, WORDS, DEEP)],
    [Layout(model=SOME, kernels=kernels) for kernels in (FULL, SELECTIVE, OFFLOAD | FULL, PIECES)] + [Layout(model=MANY, bf16=True)],
    [Layout(dp=2, model=MANY, zero=EP | {"moe_chunks": 4}), Layout(dp=2, model=MANY, zero=EP, kernels=FULL)],
    [Layout(tp=2, model=SHARED), Layout(sp=2, model=SHARED, zero=EP), Layout(cp=2, model=SHARED, zero=EP)],
    *([Layout(dp=2, model=SHARED | DEEP, zero=EP | zero(stage, **more), micro_batches=2)
       for more in ({}, {"overlap_grad_reduce": False})] for stage in (1, 2, 3)),
    [Layout(dp=4, model=SHARED, zero=EP | zero(stage)) for stage in (1, 3)],
    [pipe(kind, model=model, kernels=kernels) for kind in KINDS[::2] for model, kernels in
     ((SHARED, {}), (EXPERTS | UNTIED | {"moe_layer_freq": "[1,0,1,0,1]"}, FULL))],
    [pipe("zb1p", model=EXPERTS | DEEP, dp=2, zero=parallel) for parallel in (EP, EP | zero(2))],
]  # fmt: skip
