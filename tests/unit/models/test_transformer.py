"""The block's own parts: which rows of the fused QKV weight a rank holds, how heads reach the attention, and the forms of a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from einops import rearrange
from support import tiny
from support.errors import FP64, assert_law
from support.op_checks import randn
from torch import Tensor

from megatron_sp.inference.decoder import KVCache, StepPass
from megatron_sp.models.attention import FusedQKV, SelfAttention, SoftmaxCore
from megatron_sp.models.transformer import TransformerBlock
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.heads import Sections, Share, plan_heads
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.parallel.tensor_parallel import TensorParallel

S, B = tiny.S, 2
GROUPED = {"num_attention_heads": 6, "group_query_attention": True, "num_query_groups": 2, "kv_channels": 4}


def rows_of_rank(rank: int, size: int, **shape: Any) -> list[int]:
    """Numbers of the head rows (d rows of the weight each) that a rank holds."""
    config = tiny.shape(**GROUPED, **shape)
    _, spec = FusedQKV.in_groups(config, TensorParallel(tiny.Rank(rank, size)))  # type: ignore[arg-type]
    assert spec.shape == ((6 + 2 * 2) * 4, config.hidden_size) and spec.dim == 0
    assert all(start % 4 == length % 4 == 0 for start, length in spec.runs)
    return [row for start, length in spec.runs for row in range(start // 4, (start + length) // 4)]


def test_a_rank_holds_whole_groups_or_some_queries_and_their_key_and_value() -> None:
    """Head rows of two groups: queries 0 1 2, key 3, value 4; queries 5 6 7, key 8, value 9."""
    assert [rows_of_rank(r, 1) for r in range(1)] == [list(range(10))]
    assert [rows_of_rank(r, 2) for r in range(2)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [rows_of_rank(r, 6) for r in range(6)] == [[q, k, k + 1] for k, queries in ((3, (0, 1, 2)), (8, (5, 6, 7))) for q in queries]


def test_shared_keys_are_summed_and_counted_once() -> None:
    config = tiny.shape(**GROUPED)
    for rank in range(6):
        sections, spec = FusedQKV.in_groups(config, TensorParallel(tiny.Rank(rank, 6)))  # type: ignore[arg-type]
        assert len(sections.q.first_rows) == len(sections.k.first_rows) == 1
        (shared,) = spec.sums
        assert (shared.start, shared.length, shared.slot, shared.num_slots) == (4, 8, rank // 3, 2)
        assert spec.counted == ((0, 12 if rank % 3 == 0 else 4),), "the first rank of a group counts its key and value"


def attention(**shape: Any) -> SelfAttention:
    return SelfAttention(tiny.shape(**GROUPED, **shape), 1, "layer", 3, torch.float64, ParallelContext())


def parts_of(fused: Tensor, share: Share, d: int) -> dict[str, Tensor]:
    """The fused heads of one rank, [s, b, (g r+2 d)], as three messages."""
    groups = rearrange(fused, "s b (g rows d) -> s b g rows d", g=len(share.keys), d=d)
    return {"q": groups[..., :-2, :].flatten(2), "k": groups[..., -2, :].flatten(2), "v": groups[..., -1, :].flatten(2)}


@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_heads_in_one_message_or_three_are_the_same(qk_layernorm: bool) -> None:
    layer = attention(qk_layernorm=qk_layernorm, position_embedding_type="rope")
    cos, sin = randn(S, 2), randn(S, 2, seed=1)
    core = SoftmaxCore(layer, ForwardContext(AttentionMask(), length=S, rotary=(cos, sin)))
    share = plan_heads(Sections.in_groups(3, 2, 4), 1, "none")[0].shares[0]
    fused = randn(S, B, 10 * 4)
    apart = {name: part.contiguous() for name, part in parts_of(fused, share, 4).items()}
    want = core.prepare({"qkv": fused.clone()}, share)
    got = core.prepare(apart, share)
    assert [None if t is None else tuple(t.shape) for t in got] == [(S, B * 2, 3, 4), (S, B * 2, 1, 4), (S, B * 2, 1, 4)]
    assert_law(dict(zip("qkv", got, strict=True)), dict(zip("qkv", want, strict=True)), FP64)


def test_heads_reach_the_attention_without_a_copy() -> None:
    core = SoftmaxCore(attention(), ForwardContext(AttentionMask(), length=S))
    share = plan_heads(Sections.in_groups(3, 2, 4), 1, "none")[0].shares[0]
    fused = randn(S, B, 10 * 4)
    apart = {name: part.contiguous() for name, part in parts_of(fused, share, 4).items()}
    q, k, v = core.prepare(apart, share)
    assert k is not None and v is not None
    assert [t.data_ptr() for t in (q, k, v)] == [apart[name].data_ptr() for name in "qkv"]
    q, k, v = core.prepare({"qkv": fused}, share)
    assert k is not None and {t.untyped_storage().data_ptr() for t in (q, k)} == {fused.untyped_storage().data_ptr()}


def test_uneven_groups_get_a_key_for_each_query() -> None:
    """Queries 0 to 3 of two groups of three: the second group serves one of them."""
    core = SoftmaxCore(attention(), ForwardContext(AttentionMask(), length=S))
    share = Share(range(4), range(2), range(2))
    heads = randn(S, B, 8, 4)  # four queries, two keys, two values
    q, k, v = core.prepare({"qkv": heads.flatten(2)}, share)
    assert k is not None and v is not None
    assert_law({"q": q}, {"q": rearrange(heads[:, :, :4], "s b n d -> s (b n) 1 d")}, 0.0)
    for got, first in ((k, 4), (v, 6)):
        places = [first, first, first, first + 1]
        assert_law({"heads": got}, {"heads": rearrange(heads[:, :, places], "s b n d -> s (b n) 1 d")}, 0.0)


def test_a_follower_chunk_has_queries_only() -> None:
    core = SoftmaxCore(attention(), ForwardContext(AttentionMask(), length=S))
    leader, follower = plan_heads(Sections.in_groups(3, 1, 4), 1, "chunked", 2)
    assert not follower.shares[0].keys and leader.shares[0].keys
    x = randn(S, B, len(follower.shares[0].queries) * 4)
    q, k, v = core.prepare({"qkv": x}, follower.shares[0])
    assert k is None and v is None and q.shape == (S, B, 1, 4) and q.data_ptr() == x.data_ptr()


def test_a_window_is_put_where_the_kind_of_mask_has_it() -> None:
    layer = attention(window_size=3)
    causal = layer.mask(ForwardContext(AttentionMask()), groups=2)
    assert causal.causal and causal.window == 3 and causal.bias is None
    new = StepPass(KVCache(1, 2, 8), torch.tensor([4, 6]), 8)
    one_new = layer.mask(ForwardContext(AttentionMask(), cache=new), groups=2)
    assert one_new.window is None and one_new.bias is not None
    seen = [[at for at, added in enumerate(row) if added == 0] for row in one_new.bias[:, 0, 0].tolist()]
    assert seen == [[2, 3, 4]] * 2 + [[4, 5, 6]] * 2, "each sequence's new position sees the last three keys"
    assert attention().mask(ForwardContext(AttentionMask()), groups=2).window is None


def block(**shape: Any) -> tuple[TransformerBlock, ForwardContext]:
    config = tiny.shape(**GROUPED, **shape)
    return TransformerBlock(config, 0, "block", 3, torch.float64, ParallelContext()), ForwardContext(AttentionMask(), length=S)


def test_the_three_forms_of_a_block() -> None:
    x = randn(S, B, tiny.BASE.hidden_size or 0)
    pre, ctx = block()
    y = pre.self_attention(x, ctx, pre.input_layernorm.in_front(), None)[0]
    mlp = pre.mlp(y, pre.pre_mlp_layernorm.in_front(), None) - y
    assert_law({"pre": pre(x, ctx)}, {"pre": y + mlp}, FP64)
    parallel, ctx = block(use_parallel_residual=True)
    parallel.load_state_dict(pre.state_dict())
    mlp = parallel.mlp(x, parallel.pre_mlp_layernorm.in_front(), None) - x
    assert_law({"parallel": parallel(x, ctx)}, {"parallel": y + mlp}, FP64)
    post, ctx = block(norm_placement="post")
    z = post.post_attention_layernorm(post.self_attention(x, ctx, None, None)[0])
    assert_law({"post": post(x, ctx)}, {"post": post.post_mlp_layernorm(post.mlp(z, None, None))}, FP64)


def test_parameters_and_layers_may_be_replaced_between_passes() -> None:
    x = randn(S, B, tiny.BASE.hidden_size or 0)
    one, ctx = block()
    other, _ = block()
    for param in other.parameters():
        param.data.add_(0.1)
    one(x, ctx)
    for name in ("linear_qkv", "linear_proj"):
        ours, theirs = (getattr(each.self_attention, name) for each in (one, other))
        ours.weight, ours.bias = theirs.weight, theirs.bias
    one.mlp.linear_fc1, one.mlp.linear_fc2 = other.mlp.linear_fc1, other.mlp.linear_fc2
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        getattr(one, name).weight, getattr(one, name).bias = getattr(other, name).weight, getattr(other, name).bias
    assert_law({"y": one(x, ctx)}, {"y": other(x, ctx)}, FP64)


@pytest.mark.parametrize("shape", [{}, {"use_parallel_residual": True}, {"norm_placement": "post"}, {"swiglu": True}], ids=str)
def test_chunks_of_the_mlp_change_nothing(shape: dict[str, Any]) -> None:
    x = randn(S, B, tiny.BASE.hidden_size or 0)
    one, ctx = block(**shape)
    assert_law({"y": one(x, replace(ctx, mlp_chunks=3))}, {"y": one(x, ctx)}, FP64)
