"""Other mixers than attention, plugged in by the seam: every layout gives the loss, every gradient and the weights of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import tiny
from support.errors import FP64, assert_law
from support.layouts import Case, by_axes, run_cases
from support.op_checks import randn
from support.toy_mixer import V_WIDTH, DecayMixer, WideValues, decays
from torch import Tensor

from megatron_sp.inference.decoder import KVCache, StepPass
from megatron_sp.models.attention import SelfAttention
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.parallel_context import ContextParallel, ParallelContext
from megatron_sp.utils.errors import ConfigError

MODES = ("none", "split-qkv", "chunked")
ROPE, NORMED, DROP = {"position_embedding_type": "rope"}, {"qk_layernorm": True}, {"hidden_dropout": 0.2}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
ONE_KEY = {"group_query_attention": True, "num_query_groups": 1}
EIGHT, UNEVEN = {"num_attention_heads": 8}, {"num_attention_heads": 6, "kv_channels": 4}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
AGAIN = [{**FULL, "recompute_attention": again} for again in ("exchange", "full", "none")]
WINDOW = {"window_size": 3, "attention_dropout": 0.2}
QKV, THREE, OFFLOAD = {"recompute_qkv": True}, {"mlp_chunks": 3}, {"offload_activations": True}
LAYOUTS = [
    *(Case(sp=2, mode=mode, model=ROPE | GROUPED, batch=3, steps=2) for mode in MODES),
    *(Case(sp=2, mode=mode, seq=7, model=ROPE, kernels=QKV) for mode in MODES),  # padded
    Case(sp=2, mode="split-qkv", overlap=False), Case(sp=2, mode="chunked", chunks=3, model=EIGHT | ONE_KEY | ROPE),
    Case(sp=2, mode="chunked", chunks=4, model=EIGHT | ONE_KEY | ROPE, kernels=QKV),  # parts of a group, remade
    Case(sp=2, mode="chunked", chunks=4, model=EIGHT | ONE_KEY | ROPE | NORMED, kernels=FULL),
    *(Case(sp=2, mode="chunked", model=DROP | ROPE, kernels=kernels) for kernels in (FULL, SELECTIVE, THREE, OFFLOAD, *AGAIN)),
    *(Case(sp=3, mode=mode, model=EIGHT | GROUPED | ROPE) for mode in MODES),  # a rank whose queries use two keys unevenly
    Case(sp=4, mode="chunked", model=UNEVEN | GROUPED | ROPE), Case(sp=3, model=EIGHT | GROUPED | NORMED, kernels=QKV),
    Case(sp=4, mode="chunked", seq=3, batch=1, model=GROUPED | NORMED),  # one rank has nothing but padding
    Case(sp=2, zero=3, mode="chunked", kernels=FULL, micro_batches=2, steps=2), Case(sp=2, dtype=torch.float32, model=GROUPED | ROPE),
    Case(tp=2, model=GROUPED | ROPE, steps=2), Case(tp=2, tp_seq=True, seq=7, model=GROUPED | DROP, kernels=FULL),
    *(Case(dp=2, zero=zero, steps=2, model=ROPE) for zero in (1, 2, 3)),
    *(Case(tp=2, sp=2, tp_seq=True, seq=7, mode=mode, model=GROUPED | EIGHT | ROPE) for mode in MODES),
    Case(pp=2, model=GROUPED | {"num_layers": 2}, micro_batches=3),
]  # fmt: skip
ATTENTION = [  # what a mixer of one rank's positions under one mask does not do
    *(Case(cp=2, model=GROUPED | ROPE, kernels=kernels, steps=2) for kernels in ({}, FULL, QKV)),
    Case(cp=2, seq=9, packed=True, model=ROPE, batch=3), Case(cp=2, model=WINDOW),
    *(Case(cp=2, sp=2, mode=mode, model=UNEVEN | ROPE | {"group_query_attention": True, "num_query_groups": 3}) for mode in MODES),
    *(Case(sp=2, mode=mode, packed=True, model=GROUPED | ROPE, batch=3) for mode in MODES),
    Case(sp=2, mode="chunked", padding=True, seq=9, model=GROUPED), Case(sp=2, model=GROUPED | WINDOW),
    Case(tp=2, tp_seq=True, model=ONE_KEY | ROPE, steps=2), Case(tp=4, model=EIGHT | GROUPED | {"ffn_hidden_size": 12} | ROPE, steps=2),
    Case(pp=2, schedule="slices", slices=2, model=GROUPED | ROPE | {"num_layers": 2}, micro_batches=3),
]  # fmt: skip


def cases_of(attention: type[SelfAttention], cases: list[Case]) -> pytest.MarkDecorator:
    together = by_axes([replace(case, attention=attention) for case in cases])
    return pytest.mark.parametrize("cases", list(together.values()), ids=list(together))


@cases_of(DecayMixer, LAYOUTS)
def test_a_mixer_with_decay(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


@cases_of(WideValues, [*LAYOUTS[1::4], *ATTENTION])
def test_attention_with_values_of_another_width(cases: list[Case], tmp_path: Path) -> None:
    run_cases(cases, tmp_path)


def mixer(attention: type[SelfAttention], layout: ParallelContext | None = None) -> SelfAttention:
    return attention(tiny.shape(**GROUPED), 0, "layer", 3, torch.float64, layout or ParallelContext())


def heads_of(layer: SelfAttention, x: Tensor) -> list[Tensor]:
    """q, k and v [s, b, n, width] of each query head."""
    weight, bias = layer.linear_qkv.linear()
    assert bias is not None
    rows, d, b = x @ weight.t() + bias, 6, x.shape[1]
    if isinstance(layer, DecayMixer):
        v, q, k = rows.split([2 * V_WIDTH, 4 * d, 2 * d], -1)
    else:
        groups = rows.view(*rows.shape[:2], 2, 3 * d + V_WIDTH)
        q, k, v = (part.flatten(2) for part in groups.split([2 * d, d, V_WIDTH], -1))
    q = q.view(*x.shape[:2], 4, d)
    k, v = (t.view(x.shape[0], b, 2, -1).repeat_interleave(2, 2) for t in (k, v))
    return [q, k, v]


@pytest.mark.parametrize("attention", [DecayMixer, WideValues])
def test_one_process_is_the_formula(attention: type[SelfAttention]) -> None:
    layer, x = mixer(attention), randn(tiny.S, 3, 14)
    for p in layer.parameters():
        p.data += 0.1 * randn(*p.shape)
    out, _ = layer(x, ForwardContext(AttentionMask(), length=tiny.S), None, None)
    q, k, v = heads_of(layer, x)
    products = torch.einsum("sbnd,tbnd->bnst", q, k)
    at = torch.arange(tiny.S)
    if attention is DecayMixer:
        scores = products * (decays(0, 4)[:, None, None] ** (at[:, None] - at).clamp(min=0)).tril()
    else:
        scores = (products / 6**0.5).masked_fill(at > at[:, None], -torch.inf).softmax(-1)
    weight, bias = layer.linear_proj.linear()
    mixed = torch.einsum("bnst,tbne->sbne", scores, v).flatten(2)
    assert_law({"out": out}, {"out": x + mixed @ weight.t() + bias}, FP64)


def test_what_a_core_cannot_do_is_refused() -> None:
    apart = ParallelContext(cp=ContextParallel(tiny.Rank(0, 2)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="DecayMixer mixes the positions of one rank and one slice of a row: give the ranks of --context"):
        mixer(DecayMixer, apart)
    with pytest.raises(ConfigError, match="another --pipeline-schedule than slices"):
        mixer(DecayMixer, ParallelContext(num_slices=2))
    cache = StepPass(KVCache(1, 2, 8), torch.tensor([4, 6]), 8)
    with pytest.raises(ConfigError, match="DecayMixer has no cache of past positions"):
        mixer(DecayMixer)(randn(1, 2, 14), ForwardContext(AttentionMask(), length=1, cache=cache), None, None)
    mixer(WideValues, apart)
