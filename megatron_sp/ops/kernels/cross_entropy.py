"""Cross entropy of a chunk of logits in Triton; the plain form is in ``parallel/lm_head.py``.

statistics   of each row: maximum, sum of exp(logit - maximum), logit of the label         one pass
gradient     (exp(logit - maximum) / sum - onehot) * weight, in the dtype of the model     one pass
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_sp.ops.kernels.launch import launch, power_of_2

_BLOCK = 2048


@triton.jit
def cross_entropy_statistics_kernel(
    LOGITS, LABELS, STATS, LOSSES, HITS, tokens, width, valid, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    # one token, online (arXiv:1805.02867): each of BLOCK lanes has a maximum and a sum of its own, joined at the end
    token = tl.program_id(0)
    start = token.to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, valid, BLOCK):
        # masked by the width, which is a multiple of 16: by ``valid`` the accesses would be narrow
        logits = tl.load(LOGITS + start + first + column, mask=first + column < width, other=float("-inf"))
        logits = logits.to(tl.float32)
        logits = tl.where(first + column < valid, logits, float("-inf"))
        above = tl.maximum(largest, logits, propagate_nan=tl.PropagateNan.ALL)  # by default a GPU drops NaN
        # where all logits so far are minus infinity, exp(-inf - -inf) would be NaN
        total = tl.where(above == float("-inf"), 0.0, total * tl.exp(largest - above) + tl.exp(logits - above))
        largest = above
    maximum = tl.max(largest, 0)
    shift = tl.where(largest == float("-inf"), 0.0, tl.exp(largest - maximum))
    total = tl.sum(total * shift, 0)
    label = tl.load(LABELS + token)
    if WHOLE:
        label = tl.minimum(tl.maximum(label, 0), valid - 1)
    at_label = tl.load(LOGITS + start + label, mask=(label >= 0) & (label < valid), other=0.0).to(tl.float32)
    tl.store(STATS + token, maximum)
    tl.store(STATS + tokens + token, total)
    tl.store(STATS + 2 * tokens + token, at_label)
    if WHOLE:
        tl.store(LOSSES + token, tl.log(total) + (maximum - at_label))
        tl.store(HITS + token, maximum - at_label <= 0.0)


@triton.jit
def cross_entropy_gradient_kernel(
    LOGITS, LABELS, STATS, WEIGHTS, GRAD, tokens, width, valid, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    # ``GRAD`` may be ``LOGITS``: an element is read before it is overwritten, by the same program
    token = tl.program_id(0)
    start = token.to(tl.int64) * width
    label = tl.load(LABELS + token)
    if WHOLE:
        label = tl.minimum(tl.maximum(label, 0), valid - 1)
    weight = tl.load(WEIGHTS + token)
    maximum = tl.load(STATS + token)
    total = tl.load(STATS + tokens + token)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logits = tl.load(LOGITS + start + column, mask=column < width, other=float("-inf")).to(tl.float32)
        grad = tl.where(column < valid, tl.exp(logits - maximum) / total, 0.0) - tl.where(column == label, 1.0, 0.0)
        tl.store(GRAD + start + column, (grad * weight).to(GRAD.dtype.element_ty), mask=column < width)


def statistics(logits: Tensor, labels: Tensor, valid: int, results: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return fp32 [3, t]; rows of the table from ``valid`` on are padding."""
    # labels are -1 where another rank has them
    # where a rank has the whole table, labels are clamped to it, and ``results`` receive losses, fp32 [t], and whether
    # no logit is larger than the label's, bool [t]
    tokens, width = logits.shape
    stats = torch.empty(3, tokens, dtype=torch.float32, device=logits.device)
    launch(
        cross_entropy_statistics_kernel, (tokens,),
        (logits, labels, stats, *(results or (stats, stats)), tokens, width, valid),
        reads=[logits, labels], writes=[stats, *(results or ())], warps=8, WHOLE=results is not None,
        BLOCK=min(_BLOCK, power_of_2(width)),
    )  # fmt: skip
    return stats


def gradient(
    logits: Tensor, labels: Tensor, stats: Tensor, weights: Tensor, valid: int, dtype: torch.dtype, *,
    whole: bool = False,
) -> Tensor:  # fmt: skip
    """Return weight * d loss / d logits, in the memory of the logits if of their dtype."""
    tokens, width = logits.shape
    grad = logits if dtype == logits.dtype else torch.empty(tokens, width, dtype=dtype, device=logits.device)
    launch(
        cross_entropy_gradient_kernel, (tokens,), (logits, labels, stats, weights, grad, tokens, width, valid),
        reads=[logits, labels, stats, weights], writes=[grad], warps=8, WHOLE=whole,
        BLOCK=min(_BLOCK, power_of_2(width)),
    )  # fmt: skip
    return grad
