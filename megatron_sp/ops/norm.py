"""LayerNorm and RMSNorm over the last dim, statistics in fp32 (or wider), weight gradients into the sink.

``zero_centered`` (--apply-layernorm-1p) stores weight - 1, so that weight decay and initialisation at zero pull to the
identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.grad_sink import GradSink, put_grad


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, zero_centered: bool = False, sink: GradSink | None = None) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim. x: [..., h]; weight, bias: [h]."""
    return _LayerNorm.apply(x, weight, bias, eps, zero_centered, sink)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False, sink: GradSink | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (arXiv:1910.07467). x: [..., h]; weight: [h]."""
    return _RMSNorm.apply(x, weight, eps, zero_centered, sink)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool, sink: GradSink | None) -> Tensor:
        wide, scale, shift = (_widen_on_cpu(t) for t in (x, weight, bias))
        y, mean, rstd = torch.native_layer_norm(wide, (x.shape[-1],), scale + 1 if zero_centered else scale, shift, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.params = weight, bias  # the sink knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.zero_centered, ctx.sink = zero_centered, sink
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, mean, rstd = ctx.saved_tensors
        wide_grad, wide, scale, shift = (_widen_on_cpu(t) for t in (grad.contiguous(), x, weight, bias))
        scale = scale + 1 if ctx.zero_centered else scale
        need = list(ctx.needs_input_grad[:3])
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            wide_grad, wide, (x.shape[-1],), mean, rstd, scale, shift, need
        )
        grad_x = grad_x.to(x.dtype) if need[0] else None
        grad_weight = put_grad(ctx.sink, ctx.params[0], grad_weight) if need[1] else None
        grad_bias = put_grad(ctx.sink, ctx.params[1], grad_bias) if need[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool, sink: GradSink | None) -> Tensor:
        wide = _widen(x)
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.param = weight
        ctx.zero_centered, ctx.sink = zero_centered, sink
        return (wide * rstd).mul_(_scale(weight, zero_centered)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        normed = _widen(x) * rstd
        grad_wide = _widen(grad)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = put_grad(ctx.sink, ctx.param, (grad_wide * normed).flatten(0, -2).sum(0))
        grad_x = None
        if ctx.needs_input_grad[0]:
            # dx = rstd * (g - normed * mean(g * normed)), g = grad * weight
            g = grad_wide * _scale(weight, ctx.zero_centered)
            along = (g * normed).mean(-1, keepdim=True)
            grad_x = g.sub_(normed.mul_(along)).mul_(rstd).to(x.dtype)
        return grad_x, grad_weight, None, None, None


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _widen_on_cpu(x: Tensor) -> Tensor:
    """fp32 where torch's layer norm would otherwise keep statistics and weight gradients in 16 bits; its CUDA kernel does not."""
    return x if x.is_cuda else _widen(x)


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return _widen(weight) + 1 if zero_centered else _widen(weight)
