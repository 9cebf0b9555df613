"""Activations of the MLP in Triton; the plain form is ``ops/activation.py``.

gated      out = act(gate) * up, u = [gate | up]       d gate = d out * up * act'(gate), d up = d out * act(gate)
else       out = act(u)                                d u = d out * act'(u)
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_sp.ops.kernels.launch import ceil_div, launch

_BLOCK = 1024
SILU, GELU, GELU_TANH, RELU, SQUARED_RELU = range(5)
KINDS = {
    "swiglu": SILU, "geglu": GELU, "geglu_tanh": GELU_TANH, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU,
    "squared_relu": SQUARED_RELU,
}  # fmt: skip
"""A gated activation applies its function to the gate."""


@triton.jit
def activation_forward_kernel(U, OUT, width, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    # one row and BLOCK of the output's columns
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    start = row * width
    if GATED:
        gate = tl.load(U + 2 * start + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(U + 2 * start + width + column, mask=mask, other=0.0).to(tl.float32)
        out = value(gate, KIND) * up
    else:
        out = value(tl.load(U + start + column, mask=mask, other=0.0).to(tl.float32), KIND)
    tl.store(OUT + start + column, out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def activation_backward_kernel(
    GRAD, U, GRAD_U, OUT, width, KIND: tl.constexpr, GATED: tl.constexpr, WANTS_OUT: tl.constexpr, BLOCK: tl.constexpr
):
    # ``OUT`` may be ``GRAD``: an element is read before it is overwritten, by the same program
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    start = row * width
    grad = tl.load(GRAD + start + column, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(U + 2 * start + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(U + 2 * start + width + column, mask=mask, other=0.0).to(tl.float32)
        act = value(gate, KIND)
        of_gate = grad * up * slope(gate, KIND)
        tl.store(GRAD_U + 2 * start + column, of_gate.to(GRAD_U.dtype.element_ty), mask=mask)
        tl.store(GRAD_U + 2 * start + width + column, (grad * act).to(GRAD_U.dtype.element_ty), mask=mask)
        if WANTS_OUT:
            tl.store(OUT + start + column, (act * up).to(OUT.dtype.element_ty), mask=mask)
    else:
        u = tl.load(U + start + column, mask=mask, other=0.0).to(tl.float32)
        if KIND == 3:  # no product: an infinite gradient of what is cut off is 0, not NaN
            of_u = tl.where(u <= 0.0, 0.0, grad)
        else:
            of_u = grad * slope(u, KIND)
        tl.store(GRAD_U + start + column, of_u.to(GRAD_U.dtype.element_ty), mask=mask)


@triton.jit
def value(x, KIND: tl.constexpr):
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        y = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
        if KIND == 4:
            y = y * y
        return y


@triton.jit
def slope(x, KIND: tl.constexpr):
    # the derivative; ReLU has none of its own here
    if KIND == 0:
        s = 1.0 / (1.0 + tl.exp(-x))
        return s * (1.0 + x * (1.0 - s))
    elif KIND == 1:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 2:
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
    else:
        return 2.0 * tl.where(x < 0.0, 0.0, x)


@triton.jit
def tanh(x):
    # by an exponential that cannot overflow
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -t, t)


def forward(u: Tensor, name: str, *, gated: bool) -> Tensor:
    """Apply the activation, [..., f] or [..., 2f] with a gate -> [..., f]."""
    u = u.contiguous()
    width = u.shape[-1] // (2 if gated else 1)
    out = torch.empty((*u.shape[:-1], width), dtype=u.dtype, device=u.device)
    grid = (out.numel() // width, ceil_div(width, _BLOCK))
    constants = {"KIND": KINDS[name], "GATED": gated, "BLOCK": _BLOCK}
    launch(activation_forward_kernel, grid, (u, out, width), reads=[u], writes=[out], **constants)
    return out


def backward_(
    grad: Tensor, u: Tensor, name: str, *, gated: bool, wants_out: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of u, and with ``wants_out`` the output of a gated activation, in the memory of ``grad``."""
    assert gated or not wants_out, "there is no memory for the output: the gradient of u takes that of grad"
    grad, u = grad.contiguous(), u.contiguous()
    width = grad.shape[-1]
    grad_u = torch.empty_like(u) if gated else grad
    grid = (grad.numel() // width, ceil_div(width, _BLOCK))
    launch(
        activation_backward_kernel, grid, (grad, u, grad_u, grad, width), reads=[grad, u],
        writes=[grad_u, grad] if wants_out else [grad_u],
        KIND=KINDS[name], GATED=gated, WANTS_OUT=wants_out, BLOCK=_BLOCK,
    )  # fmt: skip
    return grad_u, grad if wants_out else None
