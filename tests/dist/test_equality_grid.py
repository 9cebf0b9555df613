"""Every layout gives the loss, every gradient and the weights of one process: named cases, pairs of any two axes, random layouts.

A named case is one thing that once went wrong, or that others do not reach. The pairwise grid is made of as few cases as
possible in which any two values of two axes meet that can; random layouts are drawn from the same axes.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.layouts import Case, Sharded, alone, by_axes, run_cases
from support.ranks import run_ranks

from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.parallel.pipeline_stages import deal_layers

SEED = int(os.environ.get("MEGATRON_SP_LAYOUTS_SEED", "0"))
MODES = ("none", "split-qkv", "chunked")
KINDS: Any = ("1f1b", "interleaved", "zb1p", "zbv")
ROPE = {"position_embedding_type": "rope"}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
THREE_KEYS = {"group_query_attention": True, "num_query_groups": 3}
ONE_KEY = {"group_query_attention": True, "num_query_groups": 1}
EIGHT_HEADS = {"num_attention_heads": 8}
UNEVEN = {"num_attention_heads": 6, "kv_channels": 4}  # on four ranks, or two key heads on three
SEVEN = {"num_attention_heads": 7, "kv_channels": 2}
ODD_HEADS = {"num_attention_heads": 15, "kv_channels": 2, "group_query_attention": True, "num_query_groups": 5}
NORMED = {"qk_layernorm": True}
UNTIED = {"untie_embeddings_and_output_weights": True}
PLAIN_LLAMA = {**ROPE, **UNTIED, "swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True}
LLAMA = {**PLAIN_LLAMA, **GROUPED}
MISTRAL = {**LLAMA, "window_size": 3}
ALL_HEADS = PLAIN_LLAMA | NORMED | {"qk_layernorm_scope": "all"}
NEOX = {**ROPE, **UNTIED, "use_parallel_residual": True, "rotary_percent": 0.34, "gelu_approximate": "none"}
DROP, ALL_DROP = {"hidden_dropout": 0.2}, {"hidden_dropout": 0.2, "attention_dropout": 0.1}
WIDE = {"ffn_hidden_size": 12}  # four tp ranks divide it
POST, ONE_TASK = {"norm_placement": "post"}, {"bert_no_binary_head": True}
SIX, EIGHT = {"num_layers": 6}, {"num_layers": 8}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
BY_TWO, FIRST_ONE = {**FULL, "recompute_num_layers": 2}, {**FULL, "recompute_method": "block", "recompute_num_layers": 1}
EXCHANGE_AGAIN, ALL_AGAIN, NONE_AGAIN = ({**FULL, "recompute_attention": again} for again in ("exchange", "full", "none"))
QKV = {"recompute_qkv": True}
OFFLOAD = {"offload_activations": True}
THREE = {"mlp_chunks": 3}
HEAD = {"lm_head_chunk_tokens": 3}

TENSOR = [
    Case(tp=2, steps=2), Case(tp=2, tp_seq=True, steps=2), Case(tp=2, tp_seq=True, seq=7, model=LLAMA), Case(tp=2, model=ONE_KEY | DROP),
    Case(tp=4, model=WIDE | GROUPED, steps=2), Case(tp=4, tp_seq=True, seq=6, model=WIDE | ONE_KEY | ROPE | NORMED),
    Case(tp=4, tp_seq=True, model=WIDE | EIGHT_HEADS, kernels=FULL), Case(tp=2, tp_seq=True, model=ALL_DROP, micro_batches=2),
    Case(tp=2, model={"vocab_size": 16, "make_vocab_size_divisible_by": 16}),  # one rank has padding rows only
    Case(tp=2, model={"vocab_size": 33, "make_vocab_size_divisible_by": 1, **LLAMA}, kernels=HEAD),
    Case(tp=2, dp=2, tp_seq=True, steps=2), Case(tp=2, model=NEOX | DROP), Case(tp=2, tp_seq=True, packed=True, model=ROPE),
]  # fmt: skip
ULYSSES = [
    *(Case(sp=sp, mode=mode, steps=2) for sp in (2, 4) for mode in MODES),
    *(Case(sp=2, mode=mode, model=LLAMA, batch=3) for mode in MODES),
    *(Case(sp=3, mode=mode, seq=7, model=ROPE, batch=1) for mode in MODES),  # uneven heads, padded length
    *(Case(sp=4, mode=mode, model=ONE_KEY | ROPE) for mode in MODES),  # more ranks than key heads
    *(Case(sp=2, mode="chunked", chunks=n, model=EIGHT_HEADS | ONE_KEY) for n in (2, 3, 4, 9)),  # parts of a group
    *(Case(sp=4, mode=mode, model=UNEVEN | GROUPED | ROPE) for mode in MODES),  # ranks whose queries use two key heads unevenly
    *(Case(sp=sp, mode="chunked", model=SEVEN) for sp in (4, 3)),  # on three ranks the heads are uneven, a chunk of them is even
    Case(sp=2, mode="split-qkv", overlap=False), *(Case(sp=2, mode=mode, model=ROPE | NORMED | GROUPED) for mode in MODES),
    Case(sp=3, mode="chunked", model=UNEVEN | GROUPED | ROPE | NORMED), Case(sp=2, mode="chunked", model=ALL_DROP, micro_batches=2),
    Case(sp=4, mode="split-qkv", model=UNEVEN | GROUPED | {"attention_dropout": 0.3}),
    *(Case(sp=2, mode=mode, kernels=kernels, model=DROP) for mode in MODES for kernels in (FULL, SELECTIVE)),
    Case(sp=2, mode="chunked", model=ONE_KEY | ROPE, kernels=SELECTIVE),
    *(Case(sp=2, mode=mode, kernels=kernels, model=ROPE) for mode in ("none", "chunked") for kernels in (EXCHANGE_AGAIN, ALL_AGAIN)),
    Case(sp=4, mode="chunked", chunks=3, seq=7, model=SEVEN, kernels=FULL),  # uneven, many messages
    Case(sp=3, mode="split-qkv", batch=1, kernels=BY_TWO, dtype=torch.float32),
    Case(sp=2, packed=True, mode="chunked", kernels=BY_TWO, batch=3),
    *(Case(sp=2, mode=mode, kernels=QKV, model=ROPE, seq=7) for mode in MODES),
    Case(sp=2, mode="chunked", chunks=4, model=EIGHT_HEADS | ONE_KEY | ROPE, kernels=QKV),
    Case(sp=3, mode="chunked", chunks=3, model=EIGHT_HEADS | {"kv_channels": 4} | GROUPED | ROPE, kernels=QKV),
    Case(sp=2, tp=2, tp_seq=True, mode="chunked", model=EIGHT_HEADS | ONE_KEY | NORMED | ROPE, kernels=FULL),
    Case(sp=2, mode="chunked", model={"attention_dropout": 0.2, **DROP}, kernels=QKV),  # nothing kept: attention is repeated, too
    Case(sp=3, ragged=True, mode="chunked", dp=2, micro_batches=2, steps=2),
    Case(sp=4, seq=5, batch=1), Case(sp=4, seq=3, mode="chunked", model=ROPE),  # one rank has nothing but padding
    *(Case(sp=4, mode=mode, seq=4, batch=4, model={"kv_channels": 4}) for mode in MODES),  # no shape can give a mistake away
    *(Case(sp=sp, mode="chunked", chunks=3, seq=2 * sp + 1, model=ODD_HEADS) for sp in (2, 4)),
    Case(sp=2, dp=2, micro_batches=2, steps=3), Case(sp=4, mode="chunked", dtype=torch.float32, steps=2),
    *(Case(tp=2, sp=2, tp_seq=seq, mode=mode, model=DROP, steps=1) for seq in (False, True) for mode in MODES),
    Case(tp=2, sp=2, tp_seq=True, seq=7, mode="chunked", model=LLAMA, kernels=FULL),
    Case(tp=2, sp=2, tp_seq=True, seq=9, mode="split-qkv", model=ONE_KEY | EIGHT_HEADS),
    Case(tp=2, sp=2, dp=2, tp_seq=True, mode="chunked", model=LLAMA | EIGHT_HEADS, micro_batches=2, steps=2),
    Case(tp=4, sp=2, tp_seq=True, model=WIDE | EIGHT_HEADS | GROUPED), Case(tp=2, sp=4, mode="chunked", model=EIGHT_HEADS, seq=13),
    *(Case(tp=2, sp=2, tp_seq=True, mode=mode, dtype=torch.float32, model=LLAMA) for mode in MODES),
    Case(tp=2, sp=2, mode="chunked", model=ALL_HEADS | GROUPED), Case(tp=4, model=ALL_HEADS | WIDE | GROUPED),
    *(Case(sp=sp, mode="chunked", model=ALL_HEADS | EIGHT_HEADS | GROUPED, batch=3) for sp in (2, 3)),
    Case(sp=4, model=ALL_HEADS | ONE_KEY),
]  # fmt: skip
MASKS = [  # documents that do not see each other, padding, windows; and a parallel residual
    *(Case(sp=2, mode=mode, packed=True, model=LLAMA, batch=3) for mode in MODES), Case(packed=True, model=LLAMA),
    Case(sp=3, seq=11, packed=True, mode="chunked", kernels=SELECTIVE),
    Case(tp=2, sp=2, tp_seq=True, seq=7, packed=True, model=NORMED | ROPE, kernels=FULL),
    *(Case(sp=2, mode=mode, padding=True, seq=9, batch=3, model=GROUPED) for mode in MODES),
    Case(sp=4, mode="chunked", padding=True, seq=6, batch=3, model=DROP),
    Case(tp=2, sp=2, tp_seq=True, padding=True, seq=10, model=ROPE, kernels=SELECTIVE),
    Case(tp=2, sp=2, tp_seq=True, seq=7, mode="chunked", model=NEOX, kernels=THREE),
    Case(sp=2, mode="split-qkv", packed=True, model=MISTRAL, batch=3),
]  # fmt: skip
MORE = [  # flags that are no axis of the pairs below
    *(Case(sp=2, zero=zero, model=NEOX, kernels=k, micro_batches=2, steps=2, table_lr=0.2) for zero, k in ((1, {}), (3, FULL))),
    Case(tp=2, dp=2, tp_seq=True, zero=3, model=NEOX | {"disable_bias_linear": True, "add_mlp_bias": True}, kernels=THREE, steps=2),
    Case(tp=2, zero=1, dp=2, model=MISTRAL | {"add_qkv_bias": True, "add_proj_bias": True}, kernels=OFFLOAD, steps=2),
    Case(sp=2, mode="chunked", dtype=torch.float32,
         model=ROPE | {"geglu": True, "use_rope_scaling": True, "rope_scaling_original_length": 9}),
    Case(sp=2, bert=True, model=POST | {"relu": True, "bert_head_activation": "relu"}),
]  # fmt: skip
MLP = [  # over chunks of the positions: three of eight are 2, 3, 3
    *(Case(steps=2, kernels=THREE), Case(model=LLAMA | DROP, kernels=THREE), Case(bert=True, model=POST | DROP, kernels=THREE)),
    Case(model={"squared_relu": True}, micro_batches=2, kernels={"mlp_chunks": 2}), Case(model=DROP, kernels={"mlp_chunks": 8}),
    Case(seq=5, batch=1, kernels={"mlp_chunks": 100}), Case(kernels=THREE | FULL, model=DROP),
    Case(kernels={"mlp_chunks": 4} | SELECTIVE, dtype=torch.float32, model=LLAMA, steps=2),
    Case(tp=2, steps=2, kernels=THREE), Case(tp=2, model=DROP, micro_batches=2, kernels=THREE),
    Case(tp=2, tp_seq=True, seq=7, model=LLAMA, steps=2, kernels=THREE),
    Case(tp=2, tp_seq=True, kernels={"mlp_chunks": 4} | FULL, model=DROP, micro_batches=2),
    Case(tp=2, tp_seq=True, dtype=torch.float32, model={"squared_relu": True}, kernels=THREE),
    Case(sp=2, seq=7, model=DROP, mode="chunked", kernels=THREE), Case(dp=2, zero=1, micro_batches=2, steps=2, kernels={"mlp_chunks": 2}),
    Case(dp=2, zero=2, model=DROP, kernels=THREE), Case(bert=True, tp=2, tp_seq=True, seq=9, model=POST, steps=1, kernels=THREE),
    Case(dp=2, zero=3, kernels=THREE | FULL, micro_batches=2, steps=2), Case(dp=2, ragged=True, steps=2, kernels=THREE),
    Case(tp=2, sp=2, tp_seq=True, seq=13, mode="chunked", model=LLAMA, kernels=FULL | {"mlp_chunks": 2}),
    Case(tp=2, dp=2, tp_seq=True, zero=3, micro_batches=2, model=DROP, steps=2, kernels=THREE),
]  # fmt: skip
ZERO = [
    *(Case(zero=zero, steps=2, micro_batches=2) for zero in (1, 2, 3)),
    *(Case(dp=2, zero=zero, steps=3, micro_batches=m, model=DROP) for zero in (1, 2, 3) for m in (1, 3)),
    *(Case(dp=2, zero=zero, steps=2, model=LLAMA, kernels=FULL, micro_batches=2, ragged=True) for zero in (1, 2, 3)),
    Case(dp=2, zero=3, steps=2, fetch="all_reduce", micro_batches=2),
    Case(dp=2, zero=3, steps=2, buffers=3, micro_batches=2, kernels=BY_TWO),
    Case(dp=2, zero=3, steps=2, buffers=4, micro_batches=2, kernels=SELECTIVE), Case(dp=2, zero=3, steps=2, kernels=BY_TWO, model=DROP),
    Case(dp=2, zero=3, steps=2, kernels=FIRST_ONE), *(Case(dp=3, zero=zero, steps=2, micro_batches=2) for zero in (1, 2, 3)),
    *(Case(dp=4, zero=zero, steps=2, model=LLAMA) for zero in (1, 2, 3)),
    *(Case(sp=2, zero=zero, steps=2, mode=mode) for zero, mode in ((1, "split-qkv"), (2, "chunked"), (3, "none"))),
    Case(sp=2, zero=3, steps=2, mode="chunked", kernels=FULL, micro_batches=2), *(Case(tp=2, zero=zero, steps=2) for zero in (1, 2, 3)),
    *(Case(dp=2, sp=2, zero=zero, steps=2, ragged=True, mode="chunked") for zero in (1, 2, 3)),
    *(Case(dp=2, tp=2, zero=zero, steps=2, tp_seq=True, micro_batches=2) for zero in (1, 2, 3)),
    Case(dp=2, tp=2, zero=3, steps=2, tp_seq=True, model=ONE_KEY), Case(dp=2, tp=2, zero=3, steps=2, model=LLAMA | NORMED),
    *(Case(sp=2, tp=2, zero=zero, steps=2, tp_seq=zero != 2, mode="split-qkv") for zero in (1, 2, 3)),
]  # fmt: skip
BERT = [Case(bert=True, **case) for case in ({"tp": 2, "steps": 2, "seq": 11}, {"tp": 2, "tp_seq": True, "steps": 2, "seq": 11})]
BERT += [
    Case(bert=True, tp=2, tp_seq=True, seq=7, model=POST, steps=2),
    Case(bert=True, tp=4, tp_seq=True, seq=9, model=WIDE | EIGHT_HEADS | POST | DROP, kernels=FULL),
    Case(bert=True, tp=2, model=POST | {"vocab_size": 33, "make_vocab_size_divisible_by": 1}, kernels=HEAD),
    Case(bert=True, tp=2, model=ONE_TASK | {"vocab_size": 16, "make_vocab_size_divisible_by": 16}),  # one rank has padding rows only
    *(Case(bert=True, sp=2, mode=mode, seq=9, batch=3, model=model) for mode in MODES for model in (DROP, POST)),
    *(Case(bert=True, sp=4, mode=mode, seq=10, model=GROUPED | POST | NORMED) for mode in MODES),
    Case(bert=True, sp=3, mode="chunked", seq=7, model=ROPE, ragged=True, steps=2),
    Case(bert=True, sp=4, seq=3, mode="chunked", model=POST),  # one rank has nothing but padding
    Case(bert=True, sp=2, mode="split-qkv", model=POST | ALL_DROP, kernels=SELECTIVE, micro_batches=2),
    *(Case(bert=True, sp=2, mode=mode, packed=True, seq=11, batch=3, model=ONE_TASK | POST) for mode in MODES),
    Case(bert=True, tp=2, tp_seq=True, packed=True, model=ONE_TASK, kernels=FULL),
    Case(bert=True, sp=2, dp=2, micro_batches=2, steps=3, seq=9, model=POST),
    *(Case(bert=True, tp=2, sp=2, tp_seq=seq, mode="chunked", seq=9, model=POST, steps=1) for seq in (False, True)),
    Case(bert=True, tp=2, sp=2, dp=2, tp_seq=True, mode="split-qkv", seq=9, model=WIDE | EIGHT_HEADS | DROP, micro_batches=2, steps=2),
    *(Case(bert=True, dp=2, zero=zero, micro_batches=2, steps=3, table_lr=0.2, model=POST) for zero in (1, 2, 3)),
    Case(bert=True, sp=2, dp=2, zero=3, mode="chunked", seq=9, steps=2, kernels=FULL),
    Case(bert=True, tp=2, sp=2, tp_seq=True, zero=3, mode="chunked", seq=9, steps=2, model=POST),
    Case(bert=True, tp=2, sp=2, zero=1, micro_batches=2, seq=9, steps=2, ragged=True),
    Case(bert=True, dp=3, zero=3, mask=0.2, batch=1, steps=2, fetch="all_reduce"),  # ranks without a masked token
    *(Case(bert=True, tp=2, sp=2, tp_seq=seq, seq=11, model=POST | DROP, kernels=THREE) for seq in (False, True)),
    Case(bert=True, tp=2, sp=2, tp_seq=True, mode="chunked", dtype=torch.float32, model=POST, seq=9),
]  # fmt: skip
CLASSIFIER = [
    Case(bert=True, classes=3, tp=2, seq=9, steps=2, model=DROP),
    Case(bert=True, classes=3, tp=2, tp_seq=True, seq=9, model=POST | DROP, steps=2),
    *(Case(bert=True, classes=3, sp=2, mode=mode, seq=9, batch=3, model=POST | DROP) for mode in MODES),
    Case(bert=True, classes=2, sp=3, mode="chunked", seq=7, model=ONE_TASK, micro_batches=2, steps=2),
    Case(bert=True, classes=3, dp=2, zero=3, micro_batches=2, steps=2, model=POST | DROP),
    Case(bert=True, classes=5, tp=2, sp=2, tp_seq=True, zero=3, mode="chunked", seq=9, steps=2, model=DROP),
    Case(bert=True, classes=3, sp=2, dp=2, zero=1, mode="split-qkv", seq=9, steps=2, kernels=FULL, model=DROP),
    Case(bert=True, classes=3, tp=2, sp=2, dtype=torch.float32, seq=9, model=POST | DROP),
]  # fmt: skip
CONTEXT = [
    Case(cp=2, steps=2), Case(cp=2, cp_chunks=1, model=LLAMA), Case(cp=2, seq=7, cp_chunks=4, model=ROPE | ALL_DROP, micro_batches=2),
    Case(cp=2, model=MISTRAL, batch=3, kernels=FULL), Case(cp=2, seq=9, packed=True, model=ROPE | ALL_DROP, kernels=SELECTIVE),
    Case(cp=2, packed=True, cp_chunks=3, model={"window_size": 2, **GROUPED}, kernels=THREE),
    Case(cp=2, ragged=True, kernels=OFFLOAD | FULL),
    Case(cp=2, padding=True, model=ROPE), Case(cp=2, bert=True, model=ALL_DROP, steps=2),
    Case(cp=2, bert=True, packed=True, cp_chunks=2, model=POST), Case(cp=2, bert=True, classes=3, cp_chunks=2, model=DROP),
    Case(cp=3, seq=7, model=ROPE | NORMED), Case(cp=3, seq=2, cp_chunks=1, model=LLAMA | NORMED),  # the last rank has no position
    Case(cp=3, seq=2, bert=True, model=ALL_DROP), Case(cp=3, seq=1, cp_chunks=2, model=DROP, kernels=FULL),
    *(Case(cp=2, model=LLAMA, kernels=kernels) for kernels in (EXCHANGE_AGAIN, ALL_AGAIN)),
    Case(cp=2, seq=9, model=ROPE | ALL_DROP, kernels=QKV),  # the plain kernel gives its log of sums here
    Case(cp=2, sp=2, mode="chunked", chunks=4, model=ONE_KEY | EIGHT_HEADS | ROPE, kernels=QKV),
    Case(cp=2, sp=2, mode="chunked", chunks=3, packed=True, model=ROPE | UNEVEN | THREE_KEYS | NORMED, kernels=BY_TWO),
    Case(cp=3, sp=2, seq=2, mode="chunked", model=ROPE | UNEVEN | THREE_KEYS, kernels=QKV),
    Case(cp=2, sp=2, mode="chunked", model=LLAMA, seq=9),
    Case(cp=2, sp=2, seq=3, mode="chunked", model=ONE_KEY | ROPE),  # padding on each cp rank
    Case(cp=3, sp=2, seq=2, mode="chunked", model=ROPE | ALL_DROP, kernels=SELECTIVE),
    Case(cp=3, sp=2, seq=2, mode="split-qkv", model=LLAMA),
    *(Case(cp=3, sp=2, seq=2, mode=mode, model=ROPE | UNEVEN | THREE_KEYS) for mode in ("none", "split-qkv")),
    Case(cp=2, sp=2, bert=True, model=ALL_DROP, mode="split-qkv", steps=2),
    Case(cp=2, sp=2, bert=True, classes=3, mode="chunked", cp_chunks=2),
    Case(cp=2, sp=3, seq=7, packed=True, model=SEVEN | ROPE, mode="chunked"),  # uneven heads
    Case(cp=2, tp=2, tp_seq=True, seq=7, model=LLAMA | DROP, steps=2), Case(cp=2, tp=2, tp_seq=True, bert=True, seq=7, model=ALL_DROP),
    Case(cp=2, tp=2, packed=True, model=GROUPED | ALL_DROP, kernels=FULL), Case(cp=2, dp=2, micro_batches=2, ragged=True, steps=2),
    *(Case(cp=2, dp=2, zero=zero, steps=2, model=LLAMA, kernels=FULL if zero == 3 else {}) for zero in (1, 3)),
    Case(cp=2, sp=2, zero=3, steps=2, packed=True, mode="chunked", model=ROPE | DROP, micro_batches=2),
    Case(cp=2, sp=2, zero=2, steps=2, bert=True),
]  # fmt: skip
MORE_CONTEXT = [  # more ranks than the pairs below
    Case(cp=2, sp=2, tp=2, tp_seq=True, seq=9, zero=3, steps=2, model=LLAMA | DROP, mode="chunked"),
    Case(cp=2, sp=2, dp=2, zero=3, steps=2, packed=True, model=MISTRAL, kernels=SELECTIVE),
    Case(cp=8, seq=11, zero=3, steps=2, model=LLAMA), Case(cp=8, seq=5, bert=True, model=DROP),
]  # fmt: skip

SHARED = {"moe_shared_expert_intermediate_size": 4}
BALANCED = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
GLOBAL = {**BALANCED, "moe_router_load_balancing_type": "global_aux_loss"}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5}
OLMOE = {**ALL_HEADS, "moe_router_pre_softmax": True}


def moe(ep: int = 1, model: dict[str, Any] | None = None, **more: Any) -> Case:
    return Case(ep=ep, model={"num_experts": 6, "moe_ffn_hidden_size": 5, "moe_router_topk": 2, **(model or {})}, **more)


EXPERTS = [
    moe(), moe(model=SHARED | BALANCED, micro_batches=2), moe(model=GLOBAL, micro_batches=2, kernels=FULL),
    moe(dp=2, model=GLOBAL), moe(2, dp=2, model=SHARED | BALANCED),
    moe(2, dp=2, ep_chunks=3, model=PLAIN_LLAMA | BALANCED, micro_batches=2),
    moe(3, dp=3, model=SIGMOID | GLOBAL, micro_batches=2, steps=3), moe(2, sp=2, model=BALANCED, seq=7),
    moe(2, cp=2, model=BALANCED | SHARED),
    moe(2, cp=2, sp=2, model=BALANCED), moe(4, dp=4, model={"num_experts": 8, **GLOBAL}), moe(2, dp=4, zero=1, steps=2, model=BALANCED),
    *(moe(2, dp=2, zero=zero, micro_batches=2, model=SHARED | BALANCED, steps=2) for zero in (1, 2, 3)),
    moe(2, dp=4, zero=3, micro_batches=2, kernels=FULL, model=PLAIN_LLAMA | GLOBAL), moe(tp=2, model=SHARED | BALANCED),
    moe(2, tp=2, dp=2, model=SHARED | BALANCED, steps=2), moe(2, tp=2, tp_seq=True, model=SHARED | BALANCED, steps=2),
    moe(4, tp=2, tp_seq=True, sp=2, ep_chunks=2, model={"num_experts": 8, **GLOBAL}),
    moe(1, tp=2, tp_seq=True, model=SHARED | GLOBAL, micro_batches=2, zero=2),
    moe(2, dp=2, model={"moe_router_topk": 1, "moe_layer_freq": "[1,0,1]"}), moe(2, dp=2, model=DROP | SHARED),
    moe(2, dp=2, model={"use_parallel_residual": True, **BALANCED}), moe(2, dp=2, model={"moe_router_pre_softmax": True}, kernels=FULL),
    moe(2, dp=2, model=SIGMOID | BALANCED | {"moe_router_topk": 1}, skew=100.0, zero=2, micro_batches=2),  # one expert takes all
    moe(3, dp=3, model=SIGMOID | GLOBAL | {"moe_router_topk": 1}, skew=100.0, ep_chunks=2),
    moe(4, dp=4, model={"num_experts": 8, "moe_router_topk": 1, **BALANCED}, seq=1, batch=1, ep_chunks=3, zero=1),  # fewer tokens
    moe(2, sp=4, model={"moe_router_topk": 6, **GLOBAL}, seq=5, batch=1),  # ranks without a position
    moe(2, cp=2, tp=2, tp_seq=True, model={"num_experts": 4, **SHARED, **BALANCED}, seq=3, batch=1),
    *(moe(pp=2, schedule=kind, micro_batches=3, model=SHARED | BALANCED | {"num_layers": 4}, zero=zero) for zero, kind in enumerate(KINDS)),
    moe(2, pp=2, dp=2, schedule="zb1p", micro_batches=2, model=GLOBAL | {"num_layers": 4}, kernels=FULL),
    # weights that are away when their gradients, which were put off, are written
    moe(pp=2, schedule="zbv", layers=(1, 1, 1, 3), micro_batches=3, model=SHARED | SIX, zero=3),
    moe(pp=2, schedule="slices", slices=2, micro_batches=2, model=BALANCED),
    # a stage without experts
    *(moe(2, pp=2, dp=2, model=GLOBAL | {"num_layers": 2, "moe_layer_freq": has}) for has in ("[1,0]", "[0,1]")),
    moe(model=OLMOE), moe(tp=2, tp_seq=True, sp=2, model=OLMOE | ONE_KEY, mode="split-qkv", kernels=FULL),
    moe(2, dp=2, zero=3, model=OLMOE | GROUPED, steps=2),
    moe(2, cp=2, sp=2, model=OLMOE | GROUPED | {"apply_layernorm_1p": True}), moe(sp=3, model=OLMOE | ONE_KEY, seq=7, kernels=QKV),
]  # fmt: skip

OWN_RATE: dict[str, Any] = {"steps": 2, "table_lr": 0.2}
TWO: dict[str, Any] = {"pp": 2, "micro_batches": 3}
PIPELINES = [
    *(Case(pp=2, schedule=kind, micro_batches=m, model=SIX, steps=2) for kind in KINDS for m in (1, 4)),
    *(Case(**TWO, schedule=kind, model=EIGHT | UNTIED, zero=zero, **OWN_RATE) for kind in KINDS for zero in (1, 2, 3)),
    *(Case(**TWO, schedule=kind, model=SIX, zero=zero, steps=1) for kind in KINDS for zero in (1, 3)),
    *(Case(**TWO, schedule=kind, model=SIX | DROP, bert=True, zero=2) for kind in KINDS),
    *(Case(**TWO, schedule=kind, model=SIX | POST, bert=True, zero=3) for kind in KINDS),
    *(Case(**TWO, schedule=kind, model=SIX | LLAMA, kernels=FULL, zero=3) for kind in KINDS),
    *(Case(**TWO, schedule=kind, model=SIX, kernels=OFFLOAD | THREE) for kind in KINDS),
    *(Case(**TWO, schedule=kind, model=SIX, kernels=QKV, packed=True) for kind in KINDS),
    Case(**TWO, layers=(1, 5), model=SIX), Case(**TWO, schedule="zb1p", layers=(1, 3, 1, 1), model=SIX),
    *(Case(pp=3, schedule=kind, micro_batches=m, model=SIX, zero=1) for kind in KINDS for m in (2, 5)),
    *(Case(pp=4, schedule=kind, micro_batches=5, model=EIGHT, seq=7) for kind in KINDS),
    *(Case(**TWO, dp=2, schedule=kind, model=SIX, zero=zero, **OWN_RATE) for kind in KINDS for zero in (0, 3)),
    *(Case(**TWO, tp=2, tp_seq=bool(more), schedule=kind, model=SIX | more, steps=1) for kind in KINDS for more in ({}, LLAMA)),
    *(Case(**TWO, sp=2, schedule=kind, mode=mode, model=SIX | DROP) for kind in KINDS for mode in ("split-qkv", "chunked")),
    *(Case(**TWO, cp=2, schedule=kind, model=SIX | LLAMA, packed=packed) for kind in KINDS for packed in (False, True)),
]  # fmt: skip
SLICED: dict[str, Any] = {**TWO, "schedule": "slices"}
SLICES = [
    *(Case(**SLICED, slices=n, model=SIX, seq=s, steps=2) for n, s in ((1, 8), (2, 7), (5, 8), (8, 8))),
    *(Case(**SLICED, slices=3, model=SIX | more, zero=zero, steps=2) for zero in (1, 2, 3) for more in ({}, UNTIED | LLAMA)),
    *(Case(**SLICED, slices=3, model=SIX | LLAMA | DROP, kernels=kernels, packed=True) for kernels in (FULL, ALL_AGAIN)),
    *(Case(**SLICED, slices=3, model=SIX | DROP | {"attention_dropout": 0.2}, kernels=k) for k in (QKV, OFFLOAD | THREE, SELECTIVE)),
    *(Case(**SLICED, slices=3, model=SIX | MISTRAL, packed=packed) for packed in (False, True)),
    Case(**SLICED, slices=3, model=SIX | ROPE, dtype=torch.float32), Case(**SLICED, dp=2, slices=2, model=SIX, zero=3, steps=2),
    *(Case(**SLICED, slices=3, tp=2, tp_seq=seq, model=SIX, kernels={"mlp_chunks": 2}) for seq in (False, True)),
    *(Case(**SLICED, slices=3, sp=2, mode=mode, model=SIX | LLAMA, packed=True, kernels=kernels)
      for mode, kernels in (("split-qkv", {}), ("chunked", NONE_AGAIN))),
    *(Case(**SLICED, slices=n, cp=2, model=SIX | more, packed=packed)
      for n, packed, more in ((2, False, {}), (3, True, LLAMA), (3, False, {"window_size": 3, "attention_dropout": 0.2}))),
    Case(**SLICED, slices=3, cp=2, model=SIX | LLAMA, kernels=FULL, zero=3), Case(**SLICED, slices=2, cp=3, model=SIX),
    Case(**SLICED, slices=2, cp=2, sp=2, mode="chunked", model=SIX | LLAMA),
    *(Case(pp=4, schedule="slices", slices=n, micro_batches=m, model=EIGHT, zero=m % 2) for n, m in ((3, 1), (2, 2), (2, 5))),
    Case(pp=3, schedule="slices", slices=4, layers=(1, 4, 1), micro_batches=2, model=SIX),
]  # fmt: skip
DELAYING: dict[str, Any] = {"sp": 2, "mode": "chunked", "delay": True}
DELAYED = [  # gradients of the MLP's weights, --delay-wgrad
    Case(sp=2, mode="split-qkv", delay=True, steps=2), Case(sp=2, delay=True, overlap=False),
    *(Case(**DELAYING, zero=zero, micro_batches=2, model=LLAMA, kernels=FULL, steps=2) for zero in (0, 2, 3)),
    Case(**DELAYING, model=DROP | {"use_parallel_residual": True}), Case(**DELAYING, bert=True, model=POST | DROP),
    *(Case(**DELAYING, kernels=kernels) for kernels in (THREE, OFFLOAD, QKV)),
    *(Case(tp=2, tp_seq=seq, **DELAYING, model=EIGHT_HEADS, micro_batches=2, zero=1) for seq in (False, True)),
    Case(cp=2, delay=True, steps=2), Case(cp=2, delay=True, model=LLAMA, packed=True, zero=3, micro_batches=2, kernels=FULL),
    Case(cp=3, delay=True, seq=7, kernels={"mlp_chunks": 2}), Case(cp=2, tp=2, tp_seq=True, delay=True),
    Case(cp=2, **DELAYING, model=EIGHT_HEADS, micro_batches=2),
    *(Case(pp=2, **DELAYING, schedule=kind, micro_batches=3, zero=2, model=SIX) for kind in KINDS[1:3]),
    Case(pp=2, **DELAYING, schedule="slices", slices=2, micro_batches=2, model=SIX, zero=2),
]  # fmt: skip

AXES: dict[str, list[Any]] = {
    "tp": [(1, False), (2, False), (2, True), (4, False), (4, True)],  # with tp_seq
    "sp": [(1, "none"), *((sp, mode) for sp in (2, 3, 4) for mode in (*MODES, "split-qkv waiting"))],
    "cp": [(1, None), (2, None), (2, 1), (3, 2), (4, None)],  # with chunks
    "dp": [1, 2, 3, 4],
    "pp": [(1, "1f1b", 1, 1), *((p, "1f1b", 1, 1) for p in (2, 3, 4)), (2, "interleaved", 2, 1), (3, "interleaved", 3, 1),
           (2, "zb1p", 1, 1), (4, "zb1p", 2, 1), (2, "zbv", 2, 1), (3, "zbv", 2, 1), (2, "slices", 1, 2), (3, "slices", 1, 3)],
    "layers": [0, 1, 2],  # more than stages; with 2 on one of them
    "zero": [0, 1, 2, 3],
    "family": ["gpt", "untied", "llama", "one scale", "all heads", "window", "parallel residual", "bert", "bert, post-norm"],
    "groups": [8, 2, 1],
    "kernels": [{}, FULL, BY_TWO, EXCHANGE_AGAIN, ALL_AGAIN, SELECTIVE, QKV, OFFLOAD, OFFLOAD | FULL, {"mlp_chunks": 2}, HEAD],
    "dropout": [0.0, 0.2],
    "mask": ["whole", "packed", "padding", "ragged"],
    "seq": [8, 7, 3],
    "batch": [1, 2, 3],
    "micro_batches": [1, 2, 3],
    "dtype": [torch.float64, torch.float32],
    "experts": [None, (1, 1), (2, 1), (2, 3), (3, 2), (4, 1)],  # ep, and chunks of an exchange
    "choices": [1, 2, 5, 12],  # of each token
    "scores": [{}, {"moe_router_pre_softmax": True}, {"moe_router_score_function": "sigmoid"}, SIGMOID],
    "one takes all": [False, True],
    "router groups": [{}, *({"moe_router_num_groups": groups, "moe_router_group_topk": top} for groups, top in ((3, 2), (4, 1)))],
    "terms": [{}, {"moe_aux_loss_coeff": 0.5}, {"moe_z_loss_coeff": 0.1}, BALANCED, GLOBAL],
    "shared": [{}, SHARED],
    "frequency": ["1", "2"],
    "steps": [1, 3],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {}, "untied": UNTIED, "llama": PLAIN_LLAMA, "one scale": PLAIN_LLAMA | {"apply_layernorm_1p": True}, "all heads": ALL_HEADS,
    "window": PLAIN_LLAMA | {"window_size": 3}, "parallel residual": ROPE | {"use_parallel_residual": True}, "bert": {},
    "bert, post-norm": ROPE | POST,
}  # fmt: skip
NUM_EXPERTS = 12


def case_of(choice: dict[str, Any]) -> Case | None:
    """The case of one value from each axis; None where they cannot meet."""
    (tp, tp_seq), (sp, mode), (cp, cp_chunks), dp = (choice[axis] for axis in ("tp", "sp", "cp", "dp"))
    (pp, kind, stages, slices), experts, mask, drop = choice["pp"], choice["experts"], choice["mask"], choice["dropout"]
    bert = choice["family"].startswith("bert")
    if pp * tp * sp * cp * dp > 8 or tp * sp > 8 or (slices > 1 and (bert or mask == "padding")) or choice["seq"] < slices:
        return None
    if mask == "padding" and (bert or choice["family"] == "window"):  # BERT's sequences have padding anyhow
        return None
    num_layers = max(2, pp * stages + choice["layers"])
    layers = deal_layers(num_layers, pp * stages)
    if choice["layers"] == 2 and pp > 1:
        layers = (*(1,) * (pp * stages - 1), 3)
    model = {
        **EIGHT_HEADS, **WIDE, "kv_channels": 4, "group_query_attention": True, "num_query_groups": choice["groups"],
        "num_layers": num_layers, "hidden_dropout": drop, "attention_dropout": drop / 2, **FAMILIES[choice["family"]],
    }  # fmt: skip
    if experts is not None:
        others, biased = dp * sp * cp * (tp if tp_seq else 1), "moe_router_enable_expert_bias" in choice["scores"]
        per_group = NUM_EXPERTS // choice["router groups"].get("moe_router_num_groups", 1)
        few = choice["choices"] > per_group * choice["router groups"].get("moe_router_group_topk", 1)
        if bert or others % experts[0] or few or mask == "padding" or choice["dtype"] == torch.float32:  # which may choose others
            return None
        if (mask == "packed" and drop) or (choice["one takes all"] and not biased):  # the plain reference has no dropout in documents
            return None
        model |= {"num_experts": NUM_EXPERTS, "moe_ffn_hidden_size": 5, "moe_router_topk": choice["choices"], **choice["scores"]}
        model |= {**choice["router groups"], **choice["terms"], **choice["shared"], "moe_layer_freq": choice["frequency"]}
    elif choice["choices"] != 1 or choice["scores"] or choice["one takes all"] or choice["router groups"] or choice["terms"]:
        return None  # they mean nothing
    elif choice["shared"] or choice["frequency"] != "1":
        return None
    return Case(
        tp=tp, tp_seq=tp_seq, sp=sp, mode=mode.split()[0], overlap="waiting" not in mode, cp=cp, cp_chunks=cp_chunks, dp=dp, pp=pp,
        schedule=kind, slices=slices, layers=layers if pp > 1 else (), zero=choice["zero"], model=model, kernels=choice["kernels"],
        bert=bert, packed=mask == "packed", padding=mask == "padding", ragged=mask == "ragged", seq=choice["seq"], batch=choice["batch"],
        micro_batches=choice["micro_batches"], dtype=choice["dtype"], steps=choice["steps"], ep=experts[0] if experts else 1,
        ep_chunks=experts[1] if experts else 1, skew=100.0 if choice["one takes all"] else 0.0,
    )  # fmt: skip


RANKS = ("tp", "sp", "cp", "dp", "pp")
ROUTER = ("experts", "choices", "scores", "one takes all", "router groups", "terms", "shared", "frequency")
OTHERS = [axis for axis in AXES if axis not in RANKS]


@cache
def ranks() -> dict[tuple[int, ...], float]:
    """The numbers of all values of the axes of ranks that can meet, and how often each is drawn: rather few ranks."""
    sizes = [[value if isinstance(value, int) else value[0] for value in AXES[axis]] for axis in RANKS]
    numbers = itertools.product(*(range(len(size)) for size in sizes))
    worlds = {at: math.prod(size[number] for size, number in zip(sizes, at, strict=True)) for at in numbers}
    return {at: 1 / world**2 for at, world in worlds.items() if world <= 8}


def drawn(random: Random, *, dense: bool) -> tuple[Case, dict[str, int]]:
    """A random layout and the number of its value on each axis, with experts or without."""
    while True:
        (at,) = random.choices(list(ranks()), list(ranks().values()))
        numbers = dict(zip(RANKS, at, strict=True)) | {axis: int(random.random() * len(AXES[axis])) for axis in OTHERS}
        numbers |= dict.fromkeys(ROUTER, 0) if dense else {"experts": random.randrange(1, len(AXES["experts"]))}
        case = case_of({axis: AXES[axis][number] for axis, number in numbers.items()})
        if case is not None:
            return case, numbers


@cache
def pairwise(seed: int = SEED, draws: int = 1500, tries: int = 60) -> list[Case]:
    """Few cases in which any two values of two axes meet that do in any of many: of some the best for its cost, again and again."""
    random = Random(seed)
    first, total = dict[tuple[str, str], int](), 0  # of the bits of two axes: one for each two values
    for i, j in itertools.combinations(AXES, 2):
        first[i, j], total = total, total + len(AXES[i]) * len(AXES[j])
    cases, pairs, missing, chosen = list[Case](), list[int](), 0, list[Case]()
    for number in range(draws):
        case, at = drawn(random, dense=number % 2 == 0)
        cases.append(case)
        pairs.append(sum(1 << (bit + at[i] * len(AXES[j]) + at[j]) for (i, j), bit in first.items()))
        missing |= pairs[-1]
    cost = [case.world**0.8 * case.micro_batches**0.4 for case in cases]  # collectives of eight ranks are dear
    while missing:
        best = max(random.sample(range(draws), tries), key=lambda n: (pairs[n] & missing).bit_count() / cost[n])
        if pairs[best] & missing:
            chosen.append(cases[best])
            missing &= ~pairs[best]
    return chosen


def layouts(cases: list[Case], *, long: bool = False) -> pytest.MarkDecorator:
    """Parameters of a test: cases of the same axes together; with ``long`` all of them, otherwise those of eight ranks are for test-all."""
    mark = lambda same: pytest.mark.long if long or same[0].world == 8 else ()
    return pytest.mark.parametrize("cases", [pytest.param(same, id=name, marks=mark(same)) for name, same in by_axes(cases).items()])


def every_other(cases: list[Case], often: bool) -> list[Case]:
    """Half of the cases, of each line above with four schedules other two in turn; without ``often`` the other half."""
    return [case for number, case in enumerate(cases) if ((number + number // len(KINDS)) % 2 == 0) is often]


@layouts(TENSOR)
def test_tensor_parallel(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@layouts([*ULYSSES, *MASKS])
def test_ulysses(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@layouts(MLP)
def test_mlp_in_chunks(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@layouts(ZERO)
def test_zero(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@layouts([*BERT, *CLASSIFIER])
def test_bert(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@layouts(CONTEXT)
def test_context_parallel(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@layouts(EXPERTS)
def test_experts(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@layouts([*every_other(PIPELINES, True), *every_other(SLICES, True)])
def test_pipelines(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@layouts(DELAYED)
def test_delayed_weight_gradients(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@layouts([*MORE, *MORE_CONTEXT, *every_other(PIPELINES, False), *every_other(SLICES, False)], long=True)
def test_more_named_cases(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


SAMPLE = [case for case in pairwise() if case.world <= 4][::4]


@layouts(SAMPLE)
def test_pairs_of_axes(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@layouts([case for case in pairwise() if case not in SAMPLE], long=True)
def test_all_pairs_of_axes(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.long if n >= 4 else ()) for n in range(83)])
def test_random_layouts(number: int, tmp_path: Path) -> None:
    random = Random(f"{SEED}/{number}")
    run_cases([drawn(random, dense=random.random() < 0.5)[0]], tmp_path)


def bits_of(case: Case) -> list[dict[str, str]]:
    """Hashes of the loss and of the gradients of each rank. Collective."""
    sharded = Sharded(case, alone(case).whole)
    found = {"loss": sharded.step(), **sharded.grads()}
    return gather_json({name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in found.items()}, sharded.groups.control)


def same_bits(pairs: list[tuple[Case, Case]]) -> None:
    for case, without in pairs:
        assert bits_of(case) == bits_of(without), str(case)


@layouts([case for case in DELAYED if case.world == 2])
def test_delayed_weight_gradients_change_no_bit(cases: list[Case], tmp_path: Path) -> None:
    for case in cases:
        alone(case)
    run_ranks(same_bits, 2, tmp_path, [(case, replace(case, delay=False)) for case in cases])


OFFLOADED = [
    Case(), Case(model=LLAMA, kernels=SELECTIVE), Case(kernels=FULL, model=ALL_DROP), Case(kernels=FIRST_ONE, micro_batches=2),
    Case(padding=True, kernels=FULL | THREE), Case(model={"num_layers": 1}), Case(bert=True, model=DROP | POST, kernels=THREE),
    Case(sp=2, mode="chunked", model=LLAMA), Case(sp=2, mode="split-qkv", seq=7, kernels=SELECTIVE), Case(tp=2, tp_seq=True, model=DROP),
    Case(dp=2, zero=3, kernels=FULL, model=LLAMA), Case(dp=2, zero=2, kernels=THREE, micro_batches=2),
    Case(bert=True, sp=2, mode="chunked", model=POST, zero=3),
]  # fmt: skip


@layouts(OFFLOADED)
def test_activations_in_host_memory_change_no_bit(cases: list[Case], tmp_path: Path) -> None:
    for case in cases:
        alone(case)
    run_ranks(same_bits, cases[0].world, tmp_path, [(replace(case, kernels=case.kernels | OFFLOAD), case) for case in cases])


def same_as_the_first(cases: list[Case]) -> None:
    known = dict[str, str]()
    for case in cases:
        bits = {name: grad for of_rank in bits_of(case) for name, grad in of_rank.items()}
        known = known or bits
        assert bits.keys() == known.keys()
        different = [name for name, grad in bits.items() if grad != known[name]]
        if case.schedule == "zbv":  # a tied table's sums are of both of its uses there, in the order in which they come
            different = [name for name in different if name != "embedding.word_embeddings.weight"]
        assert not different, f"{case}: {different}"


@pytest.mark.parametrize(("more", "zero"), [
    (LLAMA, 2),
    *(pytest.param(*each, marks=pytest.mark.long) for each in (({}, 0), ({}, 2), (UNTIED | DROP, 0), (UNTIED | DROP, 2), (LLAMA, 0))),
])  # fmt: skip
def test_all_schedules_have_the_bits_of_1f1b(tmp_path: Path, more: dict[str, Any], zero: int) -> None:
    kernels: list[dict[str, Any]] = [{}, FULL, {"mlp_chunks": 2}]
    for of_kernels in kernels:
        cases = [Case(pp=2, schedule=kind, micro_batches=5, model=EIGHT | more, zero=zero, kernels=of_kernels) for kind in KINDS]
        run_ranks(same_as_the_first, 2, tmp_path, cases)
