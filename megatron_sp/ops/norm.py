"""LayerNorm and RMSNorm over the last dim, statistics in fp32 (or wider), weight gradients into the main_grad.

``norm_forward`` and ``norm_backward`` are the two halves of ``norm`` as plain functions, for a norm that is fused with
the linear layer after it. On a GPU Triton's kernels compute it, or apex's where a spec asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_sp.ops import availability
from megatron_sp.ops.allocator import blocks, empty, is_small
from megatron_sp.ops.kernels import launch
from megatron_sp.ops.kernels.launch import is_fused
from megatron_sp.ops.main_grad import MainGrad, put_grad

_Need = tuple[bool, bool, bool]  # whether x, weight and bias need a gradient
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # theirs


@dataclass(frozen=True)
class NormSpec:
    """Kind and options of a norm."""

    # (x - mean) / sqrt(var + eps) * weight + bias, or x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467)
    kind: Literal["LayerNorm", "RMSNorm"]
    eps: float
    # the parameter is weight - 1 (--apply-layernorm-1p), so that weight decay pulls towards the identity
    zero_centered: bool = False
    kernel: Literal["torch", "apex"] = "torch"  # Triton's go before torch's where they are in use


@dataclass(frozen=True)
class NormInFront:
    """A norm before a linear layer, with its parameters [h]."""

    spec: NormSpec
    weight: Tensor
    bias: Tensor | None


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, *, main_grad: MainGrad | None = None
) -> Tensor:
    """Normalize x [..., h] over its last dim; ``weight`` and ``bias`` are [h]."""
    return _Norm.apply(x, weight, bias, spec, main_grad)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, main_grad: MainGrad | None
    ) -> Tensor:
        y, stats = norm_forward(x, weight, bias, spec)
        ctx.save_for_backward(x, *stats)
        # the main_grad knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.norm, ctx.main_grad = NormInFront(spec, weight, bias), main_grad
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *stats = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        return *norm_gradients(ctx.norm, grad, x, tuple(stats), need, None, main_grad=ctx.main_grad), None, None


def norm_forward(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (the normalized x, the statistics for ``norm_backward``)."""
    if spec.kernel == "apex" and _is_for_apex(x):
        kernels, params = availability.load("fused_layer_norm_cuda"), _apex_parameters(x, weight, bias, spec)
        forward = kernels.forward_affine if spec.kind == "LayerNorm" else kernels.rms_forward_affine
        # x keeps its shape: a result that is a view could not be changed in place afterwards (rotation of q and k)
        y, *statistics = forward(x.contiguous(), (x.shape[-1],), *params, spec.eps)
        return y, tuple(statistics)
    if is_fused(x):
        from megatron_sp.ops.kernels import norms

        centered = spec.kind == "LayerNorm"
        y, stats = norms.forward(x, weight, bias, spec.eps, centered=centered, zero_centered=spec.zero_centered)
        return y, (stats,)
    if spec.kind == "RMSNorm" and _is_for_torchs_rms_norm(x, spec):
        return _torchs_rms_norm(x.contiguous(), _scale(weight, spec.zero_centered).to(x.dtype), spec.eps)
    if spec.kind == "LayerNorm":
        if is_small(x):
            wide, scale, shift = _layer_norm_operands(x, weight, bias, spec.zero_centered)
            y, mean, rstd = torch.native_layer_norm(wide, (x.shape[-1],), scale, shift, spec.eps)
            return y if y.dtype == x.dtype else y.to(x.dtype), (mean, rstd)
        x2 = x.reshape(-1, x.shape[-1])
        y = empty(x.shape, dtype=x.dtype, device=x.device)
        y2 = y.view(x2.shape)
        mean, rstd = torch.empty(2, x2.shape[0], 1, dtype=_widen(x2[:0]).dtype, device=x.device)
        for rows in blocks(x2.shape[0], x2.element_size() * x2.shape[1], x.device):
            wide, scale, shift = _layer_norm_operands(x2[rows], weight, bias, spec.zero_centered)
            y2[rows], mean[rows], rstd[rows] = torch.native_layer_norm(wide, (x.shape[-1],), scale, shift, spec.eps)
        return y, (mean, rstd)
    return _rms_norm(x, _scale(weight, spec.zero_centered), spec.eps)


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: tuple[Tensor, ...], spec: NormSpec,
    need: _Need, add: Tensor | None = None,
) -> _Gradients:  # fmt: skip
    """Return the gradients of x, plus ``add``, weight and bias (in fp32 or wider if summed so), where needed."""
    if spec.kernel == "apex" and _is_for_apex(x):
        return _apex_backward(grad, x, weight, bias, stats, spec, need, add)
    if is_fused(x):
        from megatron_sp.ops.kernels import norms

        return norms.backward(grad, x, weight, stats[0], need, add, zero_centered=spec.zero_centered)
    if spec.kind == "RMSNorm" and _is_for_torchs_rms_norm(x, spec):
        scale = _scale(weight, spec.zero_centered).to(x.dtype)
        grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
            grad.contiguous(), x.contiguous(), (x.shape[-1],), stats[0], scale, [need[0], need[1]]
        )
        if need[0] and add is not None:
            grad_x.add_(add)
        return grad_x if need[0] else None, grad_weight if need[1] else None, None
    if spec.kind == "LayerNorm":
        return _layer_norm_backward(grad, x, weight, bias, (stats[0], stats[1]), spec, need, add)
    return (*_rms_norm_backward(grad, x, _scale(weight, spec.zero_centered), stats[0], need, add), None)


def norm_gradients(
    norm: NormInFront, grad: Tensor, x: Tensor, stats: tuple[Tensor, ...], need: _Need, passed: Tensor | None, *,
    main_grad: MainGrad | None,
) -> _Gradients:  # fmt: skip
    """Return what autograd needs of a norm's gradients; those of its parameters go to the main_grad.

    ``passed``: another gradient of x, from the residual branch, which is added.
    """
    spec = norm.spec
    by_apex = spec.kernel == "apex" and _is_for_apex(x)
    if main_grad is not None and not main_grad.defers and is_fused(x) and not by_apex:
        from megatron_sp.ops.kernels import norms

        of_weight = main_grad.reserve(norm.weight) if need[1] else None
        of_bias = main_grad.reserve(norm.bias) if need[2] and norm.bias is not None else None
        zero_centered, put = spec.zero_centered, main_grad.put_sums
        operands = grad, x, norm.weight, stats[0], need, passed
        into = of_weight, of_bias
        grad_x, weight, bias = norms.backward(*operands, zero_centered=zero_centered, into=into, put=put)
    else:
        grad_x, weight, bias = norm_backward(grad, x, norm.weight, norm.bias, stats, spec, need, passed)
    if weight is not None:
        weight = put_grad(main_grad, norm.weight, weight)
    if bias is not None and norm.bias is not None:
        bias = put_grad(main_grad, norm.bias, bias)
    return grad_x, weight, bias


def _rms_norm(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    width = x.shape[-1]
    if is_small(x):
        wide = _widen(x)
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        y = (wide * rstd).mul_(scale)
        return y if y.dtype == x.dtype else y.to(x.dtype), (rstd,)
    y, x2 = empty(x.shape, dtype=x.dtype, device=x.device), x.reshape(-1, width)
    y2, rstd = y.view(x2.shape), torch.empty(x2.shape[0], 1, dtype=scale.dtype, device=x.device)
    for rows in blocks(x2.shape[0], scale.element_size() * width, x.device):
        wide = _widen(x2[rows])
        rstd[rows] = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        if wide.dtype == y.dtype:
            torch.mul(wide, rstd[rows], out=y2[rows]).mul_(scale)
        else:
            y2[rows] = (wide * rstd[rows]).mul_(scale)
    return y, (rstd,)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, scale: Tensor, rstd: Tensor, need: _Need, add: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    # dx = rstd * (g - normed * mean(g * normed)), where g = grad * scale, and the gradient of scale
    width = x.shape[-1]
    if is_small(x):
        normed, g = _widen(x) * rstd, _widen(grad)
        grad_scale = (g * normed).reshape(-1, width).sum(0) if need[1] else None
        if not need[0]:
            return None, grad_scale
        g = g * scale
        g.sub_(normed.mul_((g * normed).mean(-1, keepdim=True))).mul_(rstd)
        g = g if add is None else g.add_(add)
        return g if g.dtype == x.dtype else g.to(x.dtype), grad_scale
    grad2, x2, add2 = grad.reshape(-1, width), x.reshape(-1, width), None if add is None else add.reshape(-1, width)
    grad_x = empty(x.shape, dtype=x.dtype, device=x.device) if need[0] else None
    grad_x2 = None if grad_x is None else grad_x.view(x2.shape)
    grad_scale = torch.zeros(width, dtype=scale.dtype, device=x.device) if need[1] else None
    for rows in blocks(x2.shape[0], scale.element_size() * width, x.device):
        normed, g = _widen(x2[rows]) * rstd[rows], _widen(grad2[rows])
        if grad_scale is not None:
            grad_scale += (g * normed).sum(0)
        if grad_x2 is None:
            continue
        g = g * scale
        g.sub_(normed.mul_((g * normed).mean(-1, keepdim=True))).mul_(rstd[rows])
        grad_x2[rows] = g if add2 is None else g.add_(add2[rows])
    return grad_x, grad_scale


def _layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: tuple[Tensor, Tensor], spec: NormSpec,
    need: _Need, add: Tensor | None,
) -> _Gradients:  # fmt: skip
    width, (mean, rstd) = x.shape[-1], stats
    if is_small(x) and x.numel():
        wide, scale, shift = _layer_norm_operands(x, weight, bias, spec.zero_centered)
        grad = grad if grad.dtype == wide.dtype else grad.to(wide.dtype)
        backward = torch.ops.aten.native_layer_norm_backward.default
        of_x, *of_params = backward(grad, wide, (width,), mean, rstd, scale, shift, need)
        if need[0]:
            of_x = of_x if add is None else of_x.add_(add)
            of_x = of_x if of_x.dtype == x.dtype else of_x.to(x.dtype)
        return of_x if need[0] else None, of_params[0], of_params[1]
    grad2, x2, add2 = grad.reshape(-1, width), x.reshape(-1, width), None if add is None else add.reshape(-1, width)
    grad_x = empty(x2.shape, dtype=x.dtype, device=x.device) if need[0] else None
    sums: list[Tensor | None] = [None, None]
    for rows in blocks(x2.shape[0], x2.element_size() * width, x.device):
        wide, scale, shift = _layer_norm_operands(x2[rows], weight, bias, spec.zero_centered)
        part, *part_sums = torch.ops.aten.native_layer_norm_backward(
            grad2[rows].to(wide.dtype), wide, (width,), mean[rows], rstd[rows], scale, shift, list(need)
        )
        if grad_x is not None:
            grad_x[rows] = part if add2 is None else part + add2[rows]
        for i in range(2):
            total = sums[i]
            if need[1 + i]:
                sums[i] = part_sums[i] if total is None else total.add_(part_sums[i])
    if x2.shape[0] == 0:
        params = zip((weight, bias), need[1:], strict=True)
        sums = [torch.zeros_like(param) if param is not None and is_needed else None for param, is_needed in params]
    return None if grad_x is None else grad_x.view(x.shape), sums[0], sums[1]


def _is_for_torchs_rms_norm(x: Tensor, spec: NormSpec) -> bool:
    # torch's own kernel, on a GPU from torch 2.10 on, adds nothing to the gradient, and gives that of a 16-bit weight
    # in 16 bits. A 16-bit 1 + weight would lose what the weight learns: then several kernels of torch's compute the
    # norm in fp32
    rounds = spec.zero_centered and x.dtype != torch.float32
    return x.is_cuda and x.dtype in launch.DTYPES and x.numel() > 0 and not rounds


def _torchs_rms_norm(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    # by itself, since the fake device of the tests stands in for it
    y, rstd = torch.ops.aten._fused_rms_norm(x, (x.shape[-1],), scale, eps)
    return y, (rstd,)


def _is_for_apex(x: Tensor) -> bool:
    # the same in forward and backward, whose statistics differ in shape; apex has indices of 32 bits, and a launch
    # without rows is an error
    fits = x.dtype in launch.DTYPES and 0 < x.numel() < 2**31
    return fits and x.device.type == availability.APEX_DEVICE


def _apex_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: tuple[Tensor, ...], spec: NormSpec,
    need: _Need, add: Tensor | None,
) -> _Gradients:  # fmt: skip
    kernels, params = availability.load("fused_layer_norm_cuda"), _apex_parameters(x, weight, bias, spec)
    backward = kernels.backward_affine if spec.kind == "LayerNorm" else kernels.rms_backward_affine
    grad = grad.to(x.dtype).contiguous()
    from_output = False  # (memory_efficient) would divide by the weight
    grad_x, *sums = backward(grad, *stats, x.contiguous(), (x.shape[-1],), *params, spec.eps, from_output)
    if add is not None:
        grad_x.add_(add)
    grad_weight, grad_bias = (*sums, None)[:2]
    return grad_x if need[0] else None, grad_weight if need[1] else None, grad_bias if need[2] else None


def _apex_parameters(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor, ...]:
    # scale and shift (LayerNorm alone has one) as apex takes them: contiguous, in x's dtype
    params = (_scale(weight, spec.zero_centered),) if bias is None else (_scale(weight, spec.zero_centered), bias)
    return tuple(p.to(x.dtype).contiguous() for p in params)


_16_BIT = (torch.bfloat16, torch.float16)


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _16_BIT else x


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return _widen(weight) + 1 if zero_centered else _widen(weight)


def _layer_norm_operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    # for torch's kernel: in fp32 or wider on the CPU, in x's dtype on CUDA (which computes in fp32 inside)
    if not zero_centered and weight.dtype == x.dtype and x.dtype not in _16_BIT:
        return x, weight, bias
    scale = _scale(weight, zero_centered)
    if x.is_cuda:
        return x, scale.to(x.dtype), bias
    return _widen(x), scale, None if bias is None else _widen(bias)
