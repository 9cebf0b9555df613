"""LayerNorm and RMSNorm over the last dim, statistics in fp32 (or wider), weight gradients into the sink.

``norm`` is the op; ``norm_forward`` and ``norm_backward`` are its two halves as plain functions, for ``ops/linear.py``, which can
put a norm in front of a linear layer and compute it again in backward instead of storing its output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_sp.ops.grad_sink import GradSink, put_grad
from megatron_sp.ops.memory import empty


@dataclass(frozen=True)
class NormSpec:
    """Which norm.

    Attributes:
        kind: LayerNorm, (x - mean) / sqrt(var + eps) * weight + bias, or RMSNorm, x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467).
        eps: added to the variance, or to the mean square.
        zero_centered: the stored weight is weight - 1 (--apply-layernorm-1p), so that weight decay pulls to the identity.
    """

    kind: Literal["LayerNorm", "RMSNorm"]
    eps: float
    zero_centered: bool = False


@dataclass(frozen=True)
class NormInFront:
    """A norm with its parameters, [h] each, as an argument of ``linear``."""

    spec: NormSpec
    weight: Tensor
    bias: Tensor | None


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, *, sink: GradSink | None = None) -> Tensor:
    """The norm of x [..., h] over its last dim; ``weight`` and ``bias`` [h], the bias for LayerNorm only."""
    return _Norm.apply(x, weight, bias, spec, sink)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, sink: GradSink | None) -> Tensor:
        y, stats = norm_forward(x, weight, bias, spec)
        ctx.save_for_backward(x, weight, bias, *stats)
        ctx.params = weight, bias  # the sink knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.spec, ctx.sink = spec, sink
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, *stats = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        grad_x, grad_weight, grad_bias = norm_backward(grad, x, weight, bias, tuple(stats), ctx.spec, need)
        if grad_weight is not None:
            grad_weight = put_grad(ctx.sink, ctx.params[0], grad_weight)
        if grad_bias is not None:
            grad_bias = put_grad(ctx.sink, ctx.params[1], grad_bias)
        return grad_x, grad_weight, grad_bias, None, None


def norm_forward(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(the normed x in x's dtype, the statistics that ``norm_backward`` wants)."""
    if spec.kind == "LayerNorm":
        wide, scale, shift = _layer_norm_operands(x, weight, bias, spec.zero_centered)
        y = empty(wide.shape, dtype=wide.dtype, device=wide.device)
        mean, rstd = (torch.empty(*x.shape[:-1], 1, dtype=_widen(scale).dtype, device=x.device) for _ in range(2))
        torch.ops.aten.native_layer_norm.out(wide, (x.shape[-1],), scale, shift, spec.eps, out0=y, out1=mean, out2=rstd)
        return y.to(x.dtype), (mean, rstd)
    wide = _widen(x)
    rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(spec.eps).rsqrt_()
    return (wide * rstd).mul_(_scale(weight, spec.zero_centered)).to(x.dtype), (rstd,)


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: tuple[Tensor, ...], spec: NormSpec, need: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x (in its dtype), weight and bias (in fp32 or wider where they were summed so); None where not needed."""
    if spec.kind == "LayerNorm":
        wide, scale, shift = _layer_norm_operands(x, weight, bias, spec.zero_centered)
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad.contiguous().to(wide.dtype), wide, (x.shape[-1],), *stats, scale, shift, list(need)
        )
        return grad_x.to(x.dtype) if need[0] else None, grad_weight if need[1] else None, grad_bias if need[2] else None
    (rstd,) = stats
    normed, grad_wide = _widen(x) * rstd, _widen(grad)
    grad_weight = (grad_wide * normed).flatten(0, -2).sum(0) if need[1] else None
    if not need[0]:
        return None, grad_weight, None
    # dx = rstd * (g - normed * mean(g * normed)), g = grad * weight
    g = grad_wide * _scale(weight, spec.zero_centered)
    along = (g * normed).mean(-1, keepdim=True)
    return g.sub_(normed.mul_(along)).mul_(rstd).to(x.dtype), grad_weight, None


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    """The factor itself, in fp32 or wider."""
    return _widen(weight) + 1 if zero_centered else _widen(weight)


def _layer_norm_operands(x: Tensor, weight: Tensor, bias: Tensor | None, zero_centered: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, scale and shift as torch's kernel takes them: all wide on the CPU, all of x's dtype on CUDA (which computes wide inside)."""
    scale = _scale(weight, zero_centered)
    if x.is_cuda:
        return x, scale.to(x.dtype), bias
    return _widen(x), scale, None if bias is None else _widen(bias)
