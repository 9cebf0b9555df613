"""The mixture of experts on one process against plain formulas: outputs, every gradient, terms, odd loads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import plain_experts, reference
from support.errors import FP64, assert_law
from torch import Tensor

from megatron_sp.ops.activation import Activation
from megatron_sp.ops.expert_mlp import ExpertWeights
from megatron_sp.ops.norm import NormInFront, NormSpec
from megatron_sp.ops.routing import RoutingSpec
from megatron_sp.parallel.experts import ExpertPlan, Router, expert_mlp
from megatron_sp.parallel.parallel_context import NO_EP
from megatron_sp.parallel.router_pass import BalanceKind, BalanceSpec, RouterStep, TermWeights

S, B, H, F, E, SHARED = 7, 3, 8, 5, 6, 4


def make(spec: RoutingSpec, *, bias: bool = True, gated: bool = False, shared: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a layer, named as inside of it, and of the norm before it."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (0.5 * torch.randn(*shape, dtype=torch.float64, generator=g)).requires_grad_()

    wide, n = 2 if gated else 1, spec.num_experts
    w = {"norm.weight": draw(H), "norm.bias": draw(H), "router.weight": draw(n, H)}
    w |= {"experts.linear_fc1.weight": draw(n, wide * F, H), "experts.linear_fc2.weight": draw(n, H, F)}
    if bias:
        w |= {"experts.linear_fc1.bias": draw(n, wide * F), "experts.linear_fc2.bias": draw(n, H)}
    if shared:
        w |= {"shared_experts.linear_fc1.weight": draw(wide * SHARED, H), "shared_experts.linear_fc2.weight": draw(H, SHARED)}
        if bias:
            w |= {"shared_experts.linear_fc1.bias": draw(wide * SHARED), "shared_experts.linear_fc2.bias": draw(H)}
    return w


def of(w: dict[str, Tensor], name: str) -> ExpertWeights | None:
    parts = [w.get(f"{name}.linear_fc{i}.{kind}") for i in (1, 2) for kind in ("weight", "bias")]
    return None if parts[0] is None else ExpertWeights(*parts)  # type: ignore[arg-type]


NORM = NormSpec("LayerNorm", 1e-5)


def ours(x: Tensor, w: dict[str, Tensor], plan: ExpertPlan, **more: Any) -> tuple[Tensor, Tensor]:
    norm = NormInFront(NORM, w["norm.weight"], w["norm.bias"])
    experts = of(w, "experts")
    assert experts is not None
    return expert_mlp(x, norm, Router(w["router.weight"], more.pop("bias", None)), experts, plan, shared=of(w, "shared_experts"), **more)


def plain(
    x: Tensor, w: dict[str, Tensor], spec: RoutingSpec, kind: str, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, list[list[int]]]:
    a = reference.norm(x, w["norm.weight"], w["norm.bias"], 1e-5).flatten(0, 1)
    y, logits, choices = plain_experts.moe(a, w, spec, kind, bias)
    return y.view_as(x), logits, choices


SPECS = {
    "top 1": RoutingSpec(E, 1), "top 2": RoutingSpec(E, 2), "all": RoutingSpec(E, E),
    "pre": RoutingSpec(E, 2, pre_softmax=True, scaling=2.0),
    "sigmoid": RoutingSpec(E, 3, "sigmoid", scaling=2.5), "groups": RoutingSpec(E, 2, "sigmoid", num_groups=3, group_top_k=2),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", SPECS)
def test_the_layer_and_every_gradient(name: str, kind: Any) -> None:
    spec = SPECS[name]
    w = make(spec, gated=kind == "swiglu", bias=name != "pre", shared=name != "all")
    bias = (
        0.3 * torch.randn(E, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) if spec.score_function == "sigmoid" else None
    )
    x = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight, other = (torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (5, 6))
    leaves = {"x": x, **w}

    def grads(y: Tensor, passed: Tensor) -> dict[str, Tensor]:
        return dict(zip(leaves, torch.autograd.grad((y * weight).sum() + (passed * other).sum(), list(leaves.values())), strict=True))

    y, passed = ours(x, w, ExpertPlan(spec, Activation(kind)), bias=bias)
    branch, _, _ = plain(x, w, spec, kind, bias)
    want = grads(x + branch, x)
    assert_law({"y": y, **grads(y, passed)}, {"y": x + branch, **want}, FP64)


def terms_of(x: Tensor, w: dict[str, Tensor], spec: RoutingSpec, kind: BalanceKind) -> Tensor:
    _, logits, choices = plain(x, w, spec, "gelu")
    rows = [slice(None)] if kind == "global" else [slice(i, None, B) for i in range(B)]
    parts = [plain_experts.balance(logits[part], choices[part], spec) for part in rows]
    return torch.stack([sum(parts) / len(parts), plain_experts.z_term(logits) / len(logits)])


@pytest.mark.parametrize("kind", ["sequence", "global"])
@pytest.mark.parametrize("name", ["top 2", "sigmoid"])
def test_the_terms(name: str, kind: BalanceKind) -> None:
    """Values, and their gradients beside those of the output."""
    spec, w = SPECS[name], make(SPECS[name])
    x = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    step = RouterStep(spec, BalanceSpec(kind, 0.7, 0.3), 1, NO_EP, x.device)
    one = torch.ones((), dtype=torch.float64)
    by = one / B if kind == "sequence" else one / (S * B) ** 2
    step.weights = lambda: TermWeights(0.7 * by, 0.3 * one / (S * B))
    told = step.micro_batch(B, S)
    leaves = {"x": x, **w}
    y, _ = ours(x, w, ExpertPlan(spec, Activation("gelu")), routers=told)
    step.settle()
    got = torch.autograd.grad((y * weight).sum(), list(leaves.values()))
    told.finish()
    branch, _, choices = plain(x, w, spec, "gelu")
    terms = terms_of(x, w, spec, kind)
    want = torch.autograd.grad(((x + branch) * weight).sum() + 0.7 * terms[0] + 0.3 * terms[1], list(leaves.values()))
    assert_law(dict(zip(leaves, got, strict=True)), dict(zip(leaves, want, strict=True)), FP64)
    values = step.sums * torch.stack([by, one / (S * B)])
    torch.testing.assert_close(values, terms.detach(), rtol=1e-10, atol=0)
    assert step.loads.tolist() == [[sum(experts.count(e) for experts in choices) for e in range(E)]]


def test_padding_chooses_nothing() -> None:
    spec, w = SPECS["top 2"], make(SPECS["top 2"])
    x = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    plan = ExpertPlan(spec, Activation("gelu"), rows=(S - 2) * B)
    y, _ = ours(x, w, plan)
    whole, _ = ours(x, w, replace(plan, rows=None))
    torch.testing.assert_close(y[: S - 2], whole[: S - 2], rtol=1e-12, atol=1e-12)
    without = {name: t for name, t in w.items() if not name.startswith("experts")}
    a = reference.norm(x, w["norm.weight"], w["norm.bias"], 1e-5)
    shared = [plain_experts.mlp(row, without, "shared_experts", "gelu") for row in a[S - 2 :].flatten(0, 1)]
    torch.testing.assert_close(y[S - 2 :], x[S - 2 :] + torch.stack(shared).view(2, B, H), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_fewer_tokens_than_experts(tokens: int) -> None:
    spec, w = SPECS["top 2"], make(SPECS["top 2"])
    x = torch.randn(tokens, 1, H, dtype=torch.float64).requires_grad_()
    y, _ = ours(x, w, ExpertPlan(spec, Activation("gelu")))
    got = torch.autograd.grad(y.sum(), list(w.values()))
    chosen = plain(x, w, spec, "gelu")[2] if tokens else []
    unused = set(range(E)) - {e for experts in chosen for e in experts}
    for name, grad in zip(w, got, strict=True):
        assert grad is not None
        if name.startswith("experts"):
            assert all(not grad[e].any() for e in unused), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    """The router computes in fp32, sums are in fp32: about as close to fp64 as the rounding of the weights."""
    spec, w = SPECS["top 2"], make(SPECS["top 2"], gated=True)
    x = torch.randn(S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    narrow = {name: t.detach().to(dtype).requires_grad_() for name, t in w.items()}
    y, _ = ours(x.to(dtype), narrow, ExpertPlan(spec, Activation("swiglu")))
    wide = {name: t.detach().double().requires_grad_() for name, t in narrow.items()}
    want, _ = ours(x.to(dtype).double(), wide, ExpertPlan(spec, Activation("swiglu")))
    assert float((y.double() - want).abs().max() / want.abs().max()) < 4 * torch.finfo(dtype).eps
    got = torch.autograd.grad(y.sum(), list(narrow.values()))
    true = torch.autograd.grad(want.sum(), list(wide.values()))
    for name, a, b in zip(w, got, true, strict=True):
        assert a.dtype == dtype and float((a.double() - b).abs().max() / b.abs().max()) < 16 * torch.finfo(dtype).eps, name
