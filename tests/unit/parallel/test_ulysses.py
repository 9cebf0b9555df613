"""The attention block as an op on one rank: the plain formula, which gradients there are, and what is kept until backward."""

from __future__ import annotations

import weakref
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from support.errors import FP64, assert_law
from support.op_checks import Inputs, PoisonedSink, gradients, leaves, randn
from torch import Tensor

from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.ops.norm import NormInFront, NormSpec
from megatron_sp.parallel.attention_block import attention_block
from megatron_sp.parallel.attention_core import Core
from megatron_sp.parallel.heads import Sections, Share, plan_heads
from megatron_sp.parallel.parallel_context import NO_SP
from megatron_sp.parallel.ulysses import AttentionPlan

S, B, H, R, G, D = 5, 2, 7, 3, 2, 4
N = R * G
SPEC = NormSpec("LayerNorm", 1e-5)
MODES = [("none", 1), ("split-qkv", 1), ("chunked", 2), ("chunked", 4)]
NAMES = ("x", "norm", "norm_bias", "w_qkv", "b_qkv", "w_proj", "b_proj", "scale")


class SoftmaxCore(Core):
    """Causal attention with one parameter, by which queries are multiplied."""

    def __init__(self, scale: Tensor) -> None:
        self.parameters = [scale]

    def prepare(self, recv_buffers: dict[str, Tensor], share: Share) -> tuple[Tensor, Tensor | None, Tensor | None]:
        queries, keys = len(share.queries), len(share.keys)
        fused = recv_buffers.get("qkv")
        if "q" in recv_buffers and "k" not in recv_buffers:
            q, k, v = rearrange(recv_buffers["q"], "s b (n d) -> s b n d", d=D), None, None
            if "kv" in recv_buffers:
                k, v = rearrange(recv_buffers["kv"], "s b (n two d) -> two s b n d", two=2, d=D)
        elif fused is None:
            q, k, v = (rearrange(recv_buffers[part], "s b (n d) -> s b n d", d=D) for part in "qkv")
        elif keys == 0:
            q, k, v = rearrange(fused, "s b (n d) -> s b n d", d=D), None, None
        else:
            groups = rearrange(fused, "s b (g rows d) -> s b g rows d", g=keys, d=D)
            r = queries // keys
            q, k, v = rearrange(groups[:, :, :, :r], "s b g r d -> s b (g r) d"), groups[:, :, :, r], groups[:, :, :, r + 1]
        return q * self.parameters[0], k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Share, kept: KeptTensors | None) -> Tensor:
        k, v = (repeat(t, "s b g d -> s b (g r) d", r=q.shape[2] // t.shape[2]) for t in (k, v))
        return attention(q, k, v)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [s, b, n, d] by its formula."""
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) / D**0.5
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    return torch.einsum("bnst,tbnd->sbnd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def tensors() -> Inputs:
    rows = G * (R + 2) * D
    return {
        "x": randn(S, B, H), "norm": randn(H) + 1, "norm_bias": randn(H, seed=1), "w_qkv": randn(rows, H), "b_qkv": randn(rows),
        "w_proj": randn(H, N * D), "b_proj": randn(H, seed=2), "scale": randn(1) + 1,
    }  # fmt: skip


def block(
    t: Inputs, mode: Any = "none", chunks: int = 1, *, add_input: bool = True, main_grad: Any = None, remakes: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    norm = NormInFront(SPEC, t["norm"], t["norm_bias"]) if "norm" in t else None
    plan = AttentionPlan(
        tuple(plan_heads(Sections.in_groups(R, G, D), 1, mode, chunks)), D, S, add_input=add_input, heads="remade" if remakes else "fresh"
    )
    qkv, proj = (t["w_qkv"], t.get("b_qkv")), (t["w_proj"], t.get("b_proj"))
    return attention_block(t["x"], norm, qkv, proj, SoftmaxCore(t["scale"]), plan, main_grad=main_grad)


def plain(t: Inputs, *, add_input: bool = True) -> Tensor:
    normed = F.layer_norm(t["x"], (H,), t["norm"], t["norm_bias"], SPEC.eps) if "norm" in t else t["x"]
    heads = rearrange(F.linear(normed, t["w_qkv"], t.get("b_qkv")), "s b (g rows d) -> rows s b g d", g=G, d=D)
    q = rearrange(heads[:R], "r s b g d -> s b (g r) d") * t["scale"]
    k, v = (repeat(t, "s b g d -> s b (g r) d", r=R) for t in heads[R:])
    y = F.linear(rearrange(attention(q, k, v), "s b n d -> s b (n d)"), t["w_proj"], t.get("b_proj"))
    return y + t["x"] if add_input else y


@pytest.mark.parametrize(("mode", "chunks"), MODES)
@pytest.mark.parametrize("add_input", [True, False])
@pytest.mark.parametrize("without", [(), ("norm", "norm_bias"), ("b_qkv", "b_proj")], ids=str)
@pytest.mark.parametrize("remakes", [False, True], ids=["heads kept", "heads made again"])
def test_is_the_formula(remakes: bool, without: tuple[str, ...], add_input: bool, mode: Any, chunks: int) -> None:
    i, grad = leaves(**{n: t for n, t in tensors().items() if n not in without}), randn(S, B, H, seed=3)
    want = gradients(lambda i: plain(i, add_input=add_input), i, grad)
    assert_law(gradients(lambda i: block(i, mode, chunks, add_input=add_input, remakes=remakes)[0], i, grad), want, FP64)


@pytest.mark.parametrize("add_input", [True, False])
def test_the_gradients_of_both_outputs_meet(add_input: bool) -> None:
    """The second output is x, for a residual branch outside; its gradient is added inside the op."""
    i, grad, weight = leaves(**tensors()), randn(S, B, H, seed=3), randn(S, B, H, seed=4)

    def ours(i: Inputs) -> Tensor:
        y, x = block(i, add_input=add_input)
        return y + x * weight

    assert_law(gradients(ours, i, grad), gradients(lambda i: plain(i, add_input=add_input) + i["x"] * weight, i, grad), FP64)


def test_only_the_residual_branch_is_used() -> None:
    i, grad = leaves(**tensors()), randn(S, B, H, seed=3)
    got = gradients(lambda i: block(i)[1], i, grad)
    assert got.pop("x") is not None and torch.equal(i["x"].grad, grad)  # type: ignore[arg-type]
    assert torch.equal(got.pop("out"), i["x"]) and set(got.values()) == {None}  # type: ignore[arg-type]


FROZEN = [*combinations(NAMES, 1), *(tuple(n for n in NAMES if n != name) for name in NAMES), ("x", "norm", "norm_bias")]


@pytest.mark.parametrize("remakes", [False, True], ids=["heads kept", "heads made again"])
@pytest.mark.parametrize("frozen", FROZEN, ids="-".join)
def test_what_needs_no_gradient_gets_none(frozen: tuple[str, ...], remakes: bool) -> None:
    """One tensor frozen, all but one, and all that the gradient of the normed input is for."""
    i, grad = leaves(frozen, **tensors()), randn(S, B, H, seed=3)
    got, want = gradients(lambda i: block(i, remakes=remakes)[0], i, grad), gradients(plain, i, grad)
    assert {n for n, g in got.items() if g is None} == set(frozen)
    assert_law(got, want, FP64)


@pytest.mark.parametrize("remakes", [False, True], ids=["heads kept", "heads made again"])
def test_the_main_grad_gets_every_gradient_once_and_adds_the_next(remakes: bool) -> None:
    i, grad = leaves(**tensors()), randn(S, B, H, seed=3)
    want = gradients(plain, i, grad)
    held = {n: i[n] for n in NAMES if n not in ("x", "scale")}
    main_grad = PoisonedSink(*held.values())
    for times in (1, 2):
        got = gradients(lambda i: block(i, "chunked", 4, main_grad=main_grad, remakes=remakes)[0], i, grad)
        assert all(got[n] is None for n in held), "a gradient went past the main_grad"
        views = {n: main_grad.views[id(t)] for n, t in held.items()}
        assert_law(views, {n: times * want[n] for n in held}, FP64)  # type: ignore[operator]
        assert_law({n: got[n] for n in ("x", "scale")}, {n: want[n] for n in ("x", "scale")}, FP64)


def test_backward_runs_once() -> None:
    y, _ = block(leaves(**tensors()))
    y.backward(torch.ones_like(y), retain_graph=True)
    with pytest.raises(RuntimeError, match="attention block's backward ran already"):
        y.backward(torch.ones_like(y))


class Spy(SoftmaxCore):
    """Remembers what it has prepared, without keeping it alive."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__(scale)
        self.prepared: list[weakref.ref[Tensor]] = []

    def prepare(self, recv_buffers: dict[str, Tensor], share: Share) -> tuple[Tensor, Tensor | None, Tensor | None]:
        self.prepared += [weakref.ref(buffer) for buffer in recv_buffers.values()]
        return super().prepare(recv_buffers, share)

    @property
    def alive(self) -> int:
        return sum(buffer() is not None for buffer in self.prepared)


@pytest.mark.parametrize(("chunks", "most"), [(1, 1), (2, 1), (4, 2)])
def test_heads_that_are_made_again_are_those_of_one_chunk(chunks: int, most: int) -> None:
    """After forward there are none; in backward those of a chunk, and keys and values of a group that has several (4 chunks: 2 of each)."""
    i, alive = leaves(**tensors()), list[int]()

    class Watched(Spy):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Share, kept: KeptTensors | None) -> Tensor:
            alive.append(self.alive)
            return super().attend(q, k, v, share, kept)

    core = Watched(i["scale"])
    plan = AttentionPlan(tuple(plan_heads(Sections.in_groups(R, G, D), 1, "chunked", chunks)), D, S, heads="remade")
    y, _ = attention_block(i["x"], None, (i["w_qkv"], None), (i["w_proj"], None), core, plan)
    assert core.alive == 0
    y.backward(torch.ones_like(y))
    assert core.alive == 0 and max(alive[chunks:]) <= most + 1


def test_backward_lets_go_of_the_core() -> None:
    """What a pass holds besides its tensors (masks, rotary tables, dropout keys) ends with backward, not with the graph."""
    i = leaves(**tensors())
    core = SoftmaxCore(i["scale"])
    plan = AttentionPlan(tuple(plan_heads(Sections.in_groups(R, G, D), 1, "none")), D, S)
    y, _ = attention_block(i["x"], None, (i["w_qkv"], None), (i["w_proj"], None), core, plan)
    alive = weakref.ref(core)
    del core
    assert alive() is not None
    y.backward(torch.ones_like(y))
    assert alive() is None


def test_without_a_graph_nothing_is_kept() -> None:
    i = leaves(**tensors())
    with torch.no_grad():
        y, x = block(i, "chunked", 2)
    assert not y.requires_grad and x.data_ptr() == i["x"].data_ptr()
    assert_law({"y": y}, {"y": plain(i)}, FP64)


def test_an_exchange_on_one_rank_is_the_buffer_itself() -> None:
    send = randn(6)
    assert NO_SP.exchange_async("out", send, [6], [6]).wait() is send
