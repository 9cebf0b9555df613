"""Rotary position embedding in Triton; the plain form is ``ops/rotary.py``.

forward     (a, b) -> (a cos - b sin, b cos + a sin)      in place, for the first heads of every group of heads
backward    the opposite; where dQ, dK and dV come apart, on their way into one packed gradient
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_sp.ops.kernels.launch import ceil_div, launch, power_of_2

_TILE = 4096  # elements at a time


@triton.jit
def rotate_kernel(
    X, COS, SIN, turning, rotated, half, batch, per_sequence, stride_s, stride_m, stride_n, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr, BY_SEQUENCE: tl.constexpr,
):  # fmt: skip
    # one position; HEADS of its ``turning`` rotated heads, of which each group has ``rotated``
    position = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    mask = (head < turning) & (channel < half)
    group = (head // rotated).to(tl.int64)
    at = position * stride_s + group * stride_m + (head % rotated).to(tl.int64) * stride_n + channel
    table = position * half + channel
    if BY_SEQUENCE:
        table = (position * batch + group // per_sequence) * half + channel
    cos = tl.load(COS + table, mask=mask, other=0.0)
    sin = tl.load(SIN + table, mask=mask, other=0.0) * sign
    first = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(X + at + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(X + at, (first * cos - second * sin).to(X.dtype.element_ty), mask=mask)
    tl.store(X + at + half, (second * cos + first * sin).to(X.dtype.element_ty), mask=mask)


@triton.jit
def pack_kernel(
    Q, K, V, OUT, COS, SIN, groups, queries, half, dim, batch, per_sequence, q_s, q_m, q_n, k_s, k_m, v_s, v_m,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, ROTATES: tl.constexpr, BY_SEQUENCE: tl.constexpr,
):  # fmt: skip
    # one position; HEADS of its groups * (queries + 2) packed heads. Queries and keys turn back, values are copied
    position = tl.program_id(0).to(tl.int64)
    packed = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    # 64 bits: strides of attention's gradients are long, since the sequence is not outermost
    group = (packed // (queries + 2)).to(tl.int64)
    head = (packed % (queries + 2)).to(tl.int64)
    inside = packed < groups * (queries + 2)
    from_q = Q + position * q_s + group * q_m + head * q_n
    from_k = K + position * k_s + group * k_m
    from_v = V + position * v_s + group * v_m
    to = OUT + (position * groups * (queries + 2) + packed) * dim
    if ROTATES:
        channel = tl.arange(0, HALF)[None, :]
        mask = inside & (channel < half)
        first = _of_head(from_q, from_k, from_v, channel, head, queries, mask)
        second = _of_head(from_q, from_k, from_v, half + channel, head, queries, mask)
        table = position * half + channel
        if BY_SEQUENCE:
            table = (position * batch + group // per_sequence) * half + channel
        turns = mask & (head <= queries)
        cos = tl.load(COS + table, mask=turns, other=1.0)
        sin = tl.load(SIN + table, mask=turns, other=0.0)
        tl.store(to + channel, (first * cos + second * sin).to(OUT.dtype.element_ty), mask=mask)
        tl.store(to + half + channel, (second * cos - first * sin).to(OUT.dtype.element_ty), mask=mask)
    if REST > 0:
        channel = tl.arange(0, REST)[None, :]
        if ROTATES:
            channel += 2 * half
        mask = inside & (channel < dim)
        rest = _of_head(from_q, from_k, from_v, channel, head, queries, mask)
        tl.store(to + channel, rest.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _of_head(from_q, from_k, from_v, channel, head, queries, mask):
    # channels of a packed head, a query, the key or the value of its group: two of the three loads are masked out
    q = tl.load(from_q + channel, mask=mask & (head < queries), other=0.0).to(tl.float32)
    k = tl.load(from_k + channel, mask=mask & (head == queries), other=0.0).to(tl.float32)
    v = tl.load(from_v + channel, mask=mask & (head > queries), other=0.0).to(tl.float32)
    return tl.where(head < queries, q, tl.where(head == queries, k, v))


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> None:
    """Rotate channels of x [s, m, n, d] in place, by fp32 tables [s, half], or [s, b, half] where b divides m."""
    s, m, n, _ = x.shape
    cos, sin, half = cos.contiguous(), sin.contiguous(), cos.shape[-1]
    batch = cos.shape[1] if cos.ndim == 3 else 1
    heads = _heads(half, m * n)
    launch(
        rotate_kernel, (s, ceil_div(m * n, heads)),
        (x, cos, sin, m * n, n, half, batch, m // batch, *x.stride()[:3], -1.0 if back else 1.0),
        reads=[x, cos, sin], writes=[x], HEADS=heads, HALF=power_of_2(half), BY_SEQUENCE=cos.ndim == 3,
    )  # fmt: skip


def pack(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the gradient of the packed heads, [s, m, r + 2, d], turned back where ``rotary`` has turned them."""
    s, m, r, d = grad_q.shape
    grad_q, grad_k, grad_v = (g if g.stride(-1) == 1 else g.contiguous() for g in (grad_q, grad_k, grad_v))
    out = torch.empty(s, m, r + 2, d, dtype=grad_q.dtype, device=grad_q.device)
    tables = () if rotary is None else tuple(t.contiguous() for t in rotary)
    half = tables[0].shape[-1] if tables else 0
    by_sequence = bool(tables) and tables[0].ndim == 3
    batch = tables[0].shape[1] if by_sequence else 1
    heads = _heads(max(half, (d - 2 * half) // 2), m * (r + 2))
    launch(
        pack_kernel, (s, ceil_div(m * (r + 2), heads)),
        (
            grad_q, grad_k, grad_v, out, *(tables or (grad_q, grad_q)), m, r, half, d, batch, m // batch,
            *grad_q.stride()[:3], *grad_k.stride()[:2], *grad_v.stride()[:2],
        ),
        reads=[grad_q, grad_k, grad_v, *tables], writes=[out], HEADS=heads, HALF=power_of_2(half),
        REST=0 if d == 2 * half else power_of_2(d - 2 * half), ROTATES=bool(tables), BY_SEQUENCE=by_sequence,
    )  # fmt: skip
    return out


def _heads(half: int, count: int) -> int:
    return min(max(1, _TILE // (2 * power_of_2(half))), power_of_2(count))
