"""Routing: choice, weights and their gradients against plain formulas and autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron_sp.ops.routing import RoutingSpec, balance_scores, choose, count_chosen, logits_backward, margins, ranking, route

SPECS = [
    RoutingSpec(6, k, score, pre, scaling)
    for k, score, pre, scaling in itertools.product((1, 2, 6), ("softmax", "sigmoid"), (False, True), (1.0, 2.5))
    if score == "softmax" or not pre
]


def draw(tokens: int, experts: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(tokens, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain_weights(logits: Tensor, chosen: Tensor, spec: RoutingSpec) -> Tensor:
    """One token after another, by autograd."""
    rows = []
    for row, experts in zip(logits, chosen.tolist(), strict=True):
        if spec.score_function == "sigmoid":
            mine = torch.stack([1 / (1 + torch.exp(-row[e])) for e in experts])
            mine = mine / mine.sum() if spec.top_k > 1 else mine
        else:
            powers = torch.exp(row)
            total = powers.sum() if spec.pre_softmax else powers[experts].sum()
            mine = powers[experts] / total
        rows.append(mine * spec.scaling)
    return torch.stack(rows)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_weights_and_their_gradients(spec: RoutingSpec) -> None:
    logits = draw(7, 6).requires_grad_()
    routed = route(logits.detach(), spec)
    want = plain_weights(logits, routed.chosen, spec)
    torch.testing.assert_close(routed.weights, want.detach(), rtol=1e-12, atol=1e-14)
    grad_weights, grad_scores = draw(7, spec.top_k, 1), draw(7, 6, 2)
    scores = torch.softmax(logits, 1) if spec.score_function == "softmax" else torch.sigmoid(logits)
    scores = scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(balance_scores(logits.detach(), spec), scores.detach(), rtol=1e-12, atol=1e-14)
    z = torch.tensor(0.3, dtype=torch.float64)
    terms = {
        "weights": (want * grad_weights).sum(), "scores": (scores * grad_scores).sum(), "z": z * torch.logsumexp(logits, 1).square().sum(),
    }  # fmt: skip
    (only,) = torch.autograd.grad(terms["weights"], logits, retain_graph=True)
    torch.testing.assert_close(logits_backward(logits.detach(), routed, spec, grad_weights), only, rtol=1e-11, atol=1e-13)
    (every,) = torch.autograd.grad(sum(terms.values()), logits)
    torch.testing.assert_close(logits_backward(logits.detach(), routed, spec, grad_weights, grad_scores, z), every, rtol=1e-11, atol=1e-13)


def test_ties_go_to_the_lower_number() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 0.0, 1.0, 0.0]])
    assert choose(logits, RoutingSpec(5, 2)).tolist() == [[1, 2], [0, 1], [1, 3]]
    assert choose(logits, RoutingSpec(5, 3)).tolist() == [[1, 2, 3], [0, 1, 2], [1, 3, 0]]
    assert margins(logits, RoutingSpec(5, 2)).tolist() == [0.0, 0.0, 1.0]
    assert margins(logits, RoutingSpec(5, 5)).tolist() == [float("inf")] * 3


def test_a_bias_decides_on_the_choice_alone() -> None:
    spec = RoutingSpec(4, 2, "sigmoid")
    logits, bias = torch.tensor([[3.0, 2.0, 1.0, 0.0]], dtype=torch.float64), torch.tensor([0.0, 0.0, 0.0, 5.0])
    routed = route(logits, spec, bias)
    assert routed.chosen.tolist() == [[3, 0]]
    want = torch.sigmoid(logits[0, [3, 0]])
    torch.testing.assert_close(routed.weights[0], want / want.sum(), rtol=1e-12, atol=0)


def test_groups_limit_the_choice() -> None:
    """The groups are those with the best sums of their best experts; of the others none is chosen."""
    spec = RoutingSpec(8, 2, "sigmoid", num_groups=4, group_top_k=1)
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.2, 0.3, 0.8, 0.1]], dtype=torch.float64)  # sums of two: 1.0, 1.1, 0.5, 0.9
    logits = torch.logit(scores)
    assert choose(logits, spec).tolist() == [[2, 3]]
    two = RoutingSpec(8, 2, "sigmoid", num_groups=4, group_top_k=2)  # the best of each: 0.9, 0.6, 0.3, 0.8
    assert choose(logits, two).tolist() == [[0, 6]]
    bias = torch.zeros(8, dtype=torch.float64)
    bias[5] = 1.0
    assert choose(logits, two, bias).tolist() == [[5, 0]]
    assert ranking(logits, two, bias).isinf().tolist() == [[False, False, True, True, False, False, True, True]]


def test_groups_with_equal_sums_go_to_the_lower_number() -> None:
    spec = RoutingSpec(6, 2, "softmax", num_groups=3, group_top_k=1)
    assert choose(torch.zeros(1, 6), spec).tolist() == [[0, 1]]


def test_counts() -> None:
    chosen = torch.tensor([[0, 2], [2, 3], [2, 0]])
    assert count_chosen(chosen, 4).tolist() == [[2, 0, 3, 1]]
    assert count_chosen(chosen, 4, torch.tensor([1, 0, 1]), 3).tolist() == [[0, 0, 1, 1], [2, 0, 2, 0], [0, 0, 0, 0]]
    assert count_chosen(chosen[:0], 4).tolist() == [[0, 0, 0, 0]]


def test_a_choice_made_before_is_kept() -> None:
    spec = RoutingSpec(6, 2)
    logits, other = draw(5, 6), torch.tensor([[5, 4]] * 5)
    routed = route(logits, spec, chosen=other)
    assert routed.chosen is other
    torch.testing.assert_close(routed.weights, plain_weights(logits, other, spec), rtol=1e-12, atol=1e-14)
