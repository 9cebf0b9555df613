"""Routing of tokens to experts, and the gradients of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# scores    softmax or sigmoid of the logits, in fp32 (or wider)
# chosen    the top k; a loss-free bias (arXiv:2408.15664) is added for the choice only; with groups
#           (arXiv:2412.19437) experts of the best groups alone
# weights   softmax: of the logits of the chosen experts alone; with pre_softmax their scores, which do not sum to 1
#           sigmoid: the scores of the chosen experts, divided by their sum if there are several
# balance   E / (k T^2) * sum over experts of c_e * sum over tokens of q_te, for T tokens of which c_e have chosen
#           expert e; q are the scores, which sum to 1 (arXiv:2101.03961, arXiv:2412.19437, arXiv:2501.11873)
# z         mean over tokens of logsumexp(logits)^2 (arXiv:2202.08906)
ScoreFunction = Literal["softmax", "sigmoid"]
_TINY = 1e-20  # Megatron-LM's, in the sum of the chosen sigmoids


@dataclass(frozen=True)
class RoutingSpec:
    """How tokens choose experts."""

    num_experts: int
    top_k: int
    score_function: ScoreFunction = "softmax"
    pre_softmax: bool = False  # the softmax is over all experts and not over the chosen ones
    scaling: float = 1.0  # factor of the weights
    num_groups: int = 1  # of consecutive experts
    group_top_k: int = 1  # groups of a token whose experts can be chosen


class Routed(NamedTuple):
    """The experts of some tokens."""

    chosen: Tensor  # int64 [tokens, k], the best expert first
    weights: Tensor  # [tokens, k], in the dtype of the logits


def route(logits: Tensor, spec: RoutingSpec, bias: Tensor | None = None, chosen: Tensor | None = None) -> Routed:
    """Choose experts by logits [tokens, E], unless they are ``chosen``, and compute their weights."""
    if chosen is None:
        chosen = choose(logits, spec, bias)
    if spec.score_function == "sigmoid":
        scores = torch.sigmoid(logits.gather(1, chosen))
        weights = scores / (scores.sum(1, keepdim=True) + _TINY) if spec.top_k > 1 else scores
    elif spec.pre_softmax:
        weights = (logits.gather(1, chosen) - logits.logsumexp(1, keepdim=True)).exp()
    else:
        weights = torch.softmax(logits.gather(1, chosen), 1)
    return Routed(chosen, weights if spec.scaling == 1.0 else weights * spec.scaling)


def choose(logits: Tensor, spec: RoutingSpec, bias: Tensor | None = None) -> Tensor:
    """Return experts, int64 [tokens, k], the best first."""
    ranked = ranking(logits, spec, bias).clone()
    chosen = torch.empty(len(logits), spec.top_k, dtype=torch.int64, device=logits.device)
    # of equal ones max finds the first, so that no layout, kernel or order of rows decides; a stable sort takes several
    # times as long
    for place in range(spec.top_k):
        best = ranked.max(1, keepdim=True).indices
        chosen[:, place] = best[:, 0]
        ranked.scatter_(1, best, float("-inf"))
    return chosen


def ranking(logits: Tensor, spec: RoutingSpec, bias: Tensor | None = None) -> Tensor:
    """Return what experts are ranked by, [tokens, E]; -inf in groups that are not chosen."""
    if bias is None and spec.num_groups == 1:
        return logits  # which have the order of the scores and no ties that rounding made
    scores = torch.sigmoid(logits) if spec.score_function == "sigmoid" else torch.softmax(logits, 1)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if spec.num_groups == 1:
        return scores
    by_group = scores.unflatten(1, (spec.num_groups, -1))
    best = by_group.topk(max(1, spec.top_k // spec.group_top_k), 2).values.sum(2)
    groups = best.sort(dim=1, descending=True, stable=True).indices[:, : spec.group_top_k]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
    return by_group.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)


def margins(logits: Tensor, spec: RoutingSpec, bias: Tensor | None = None) -> Tensor:
    """Return how far each token's last chosen expert is ahead of the next one, [tokens]."""
    ranked = ranking(logits, spec, bias)
    if spec.top_k == spec.num_experts:
        return torch.full_like(ranked[:, 0], float("inf"))
    top = ranked.sort(dim=1, descending=True).values
    return top[:, spec.top_k - 1] - top[:, spec.top_k]


def count_chosen(chosen: Tensor, num_experts: int, groups: Tensor | None = None, num_groups: int = 1) -> Tensor:
    """Count the tokens of each expert, int64 [num_groups, E]; ``groups`` [tokens]: which is whose."""
    numbers = chosen if groups is None else chosen + groups[:, None] * num_experts
    counts = torch.zeros(num_groups * num_experts, dtype=torch.int64, device=chosen.device)
    # integers: the order in which they are added up does not matter
    counts.index_add_(0, numbers.flatten(), torch.ones_like(numbers).flatten())
    return counts.view(num_groups, num_experts)


def balance_scores(logits: Tensor, spec: RoutingSpec) -> Tensor:
    """Return q, the scores of the balance term, [tokens, E]."""
    if spec.score_function == "softmax":
        return torch.softmax(logits, 1)
    scores = torch.sigmoid(logits)
    return scores / (scores.sum(1, keepdim=True) + _TINY)


def logits_backward(
    logits: Tensor, routed: Routed, spec: RoutingSpec, grad_weights: Tensor, grad_scores: Tensor | None = None,
    z_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the logits."""
    # grad_scores: of ``balance_scores``, for each token or one row for all; z_weight: scalar factor of the sum over
    # tokens of logsumexp(logits)^2
    chosen, weights = routed
    if spec.score_function == "softmax":
        inner = (grad_weights * weights).sum(1, keepdim=True)
        of_chosen = weights * grad_weights
        if spec.pre_softmax or grad_scores is not None or z_weight is not None:
            soft = torch.softmax(logits, 1)
        if spec.pre_softmax:
            grad = (soft * -inner).scatter_add_(1, chosen, of_chosen)
        else:
            of_chosen = of_chosen - weights * (inner / spec.scaling)
            grad = torch.zeros_like(logits).scatter_(1, chosen, of_chosen)
        if grad_scores is not None:
            grad.add_(soft * (grad_scores - (soft * grad_scores).sum(1, keepdim=True)))
    else:
        scores = torch.sigmoid(logits.gather(1, chosen))
        grad_chosen = grad_weights * spec.scaling
        if spec.top_k > 1:
            total = scores.sum(1, keepdim=True) + _TINY
            grad_chosen = (grad_chosen - (grad_chosen * scores).sum(1, keepdim=True) / total) / total
        grad = torch.zeros_like(logits).scatter_(1, chosen, grad_chosen * scores * (1 - scores))
        if grad_scores is not None:
            scores = torch.sigmoid(logits)
            total = scores.sum(1, keepdim=True) + _TINY
            of_scores = (grad_scores - (grad_scores * scores).sum(1, keepdim=True) / total) / total
            grad.add_(of_scores * scores * (1 - scores))
        if z_weight is not None:
            soft = torch.softmax(logits, 1)
    if z_weight is not None:
        grad.add_(soft * (2.0 * z_weight * logits.logsumexp(1, keepdim=True)))
    return grad
