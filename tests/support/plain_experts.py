"""A mixture of experts once more, independent of the package's: plain formulas, one token after another, gradients by autograd alone.

Only conventions are shared: names and shapes of the weights, [gate | up], and what the terms of the routers are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_sp.ops.routing import RoutingSpec

Weights = Mapping[str, Tensor]


def scores_of(logits: Tensor, spec: RoutingSpec) -> Tensor:
    """Scores of one token, [E]."""
    return torch.softmax(logits, 0) if spec.score_function == "softmax" else 1 / (1 + torch.exp(-logits))


def choice(logits: Tensor, spec: RoutingSpec, bias: Tensor | None = None) -> list[int]:
    """Experts of one token, by (-score, number)."""
    ranked = scores_of(logits, spec) + (0 if bias is None else bias)
    each, allowed = spec.num_experts // spec.num_groups, set(range(spec.num_experts))
    if spec.num_groups > 1:
        best = [
            sum(sorted(ranked[g * each : (g + 1) * each].tolist())[-max(1, spec.top_k // spec.group_top_k) :])
            for g in range(spec.num_groups)
        ]
        groups = sorted(range(spec.num_groups), key=lambda g: (-best[g], g))[: spec.group_top_k]
        allowed = {e for g in groups for e in range(g * each, (g + 1) * each)}
    return sorted(allowed, key=lambda e: (-float(ranked[e]), e))[: spec.top_k]


def mlp(x: Tensor, w: Weights, name: str, kind: str, expert: int | None = None) -> Tensor:
    """fc1, activation, fc2 of one token, [h] -> [h]."""
    from support.reference import activation as activation_of  # which reads this file

    part = {key: t if expert is None else t[expert] for key, t in w.items() if key.startswith(f"{name}.linear_fc")}
    u = part[f"{name}.linear_fc1.weight"] @ x + part.get(f"{name}.linear_fc1.bias", 0)
    return part[f"{name}.linear_fc2.weight"] @ activation_of(kind, u) + part.get(f"{name}.linear_fc2.bias", 0)


def moe(a: Tensor, w: Weights, spec: RoutingSpec, kind: str, bias: Tensor | None = None) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Output of one layer for tokens [T, h], the logits [T, E] and the choices; names are those inside of the layer."""
    logits = a @ w["router.weight"].t()
    rows, choices = [], []
    for x, row in zip(a, logits, strict=True):
        experts = choice(row.detach(), spec, bias)
        if spec.score_function == "softmax" and not spec.pre_softmax:
            weights = torch.softmax(row[experts], 0)
        else:
            weights = scores_of(row, spec)[experts]
            if spec.score_function == "sigmoid" and spec.top_k > 1:
                weights = weights / weights.sum()
        weights = weights * spec.scaling
        y = sum((p * mlp(x, w, "experts", kind, e) for p, e in zip(weights, experts, strict=True)), torch.zeros_like(x))
        if any(key.startswith("shared_experts") for key in w):
            y = y + mlp(x, w, "shared_experts", kind)
        rows.append(y)
        choices.append(experts)
    return torch.stack(rows), logits, choices


def balance(logits: Tensor, choices: list[list[int]], spec: RoutingSpec) -> Tensor:
    """The balance term of a group of tokens."""
    tokens = len(logits)
    counts = torch.zeros(spec.num_experts, dtype=logits.dtype)
    for experts in choices:
        for e in experts:
            counts[e] += 1
    q = torch.stack([scores_of(row, spec) for row in logits])
    q = q / q.sum(1, keepdim=True)
    return (counts / tokens / spec.top_k * spec.num_experts * q.mean(0)).sum()


def z_term(logits: Tensor) -> Tensor:
    """Sum over tokens."""
    return torch.logsumexp(logits, 1).square().sum()
