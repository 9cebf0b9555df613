"""Where weight gradients go: straight into a flat buffer when there is one, through autograd when there is none.

Every op of ours that owns a weight takes an optional ``MainGrad``. With a main_grad its backward writes the weight's gradient
into the main_grad's view and returns None for it, so that a gradient is produced once, at its final place and in its final
dtype: no temporary of the weight's size, no zero-fill before the first micro-batch, no copy into a bucket afterwards.
Without a main_grad (unit tests, foreign code) the same backward returns an ordinary gradient.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class MainGrad(Protocol):
    """What an op needs to know of the flat gradient buffers (``optim/flat.py`` implements it)."""

    def reserve(self, param: Tensor) -> tuple[Tensor, bool] | None:
        """The buffer view for ``param`` and whether this is the step's first gradient for it (then overwrite, else add).

        None: the parameter is not held by the main_grad; return its gradient to autograd instead.
        """

    def reserve_ahead(self, param: Tensor) -> Tensor | None:
        """As ``reserve``, already in the forward pass, for an op that knows its gradient then (the LM head).

        Nobody else may write to the view before the op's backward has finished the gradient and called ``finish``.

        Returns:
            The view, to be overwritten; None: there is a gradient in it already, or the main_grad does not hold it. Use a buffer then.
        """

    def finish(self, param: Tensor) -> None:
        """The gradient reserved ahead is complete."""


def put_weight_grad(main_grad: MainGrad | None, weight: Tensor, grad_out: Tensor, x: Tensor) -> Tensor | None:
    """Weight gradient of ``y = x @ weight.T``: grad_out.T @ x.

    Args:
        weight: [out, in].
        grad_out: [tokens, out].
        x: [tokens, in].
    Returns:
        None if the main_grad took it, else the gradient [out, in].
    """
    reserved = main_grad.reserve(weight) if main_grad is not None else None
    if reserved is None:
        return grad_out.t() @ x
    view, fresh = reserved
    put_product(view, grad_out, x, fresh=fresh)
    return None


def put_product(view: Tensor, grad_out: Tensor, x: Tensor, *, fresh: bool) -> None:
    """Write (``fresh``) or add grad_out.T @ x, [tokens, out] and [tokens, in], into ``view`` [out, in], which may be wider than they.

    The tensor cores of a GPU accumulate in fp32: those bits go straight into an fp32 view, with no product of the weight's size beside it.
    """
    if view.dtype == grad_out.dtype:
        torch.addmm(view, grad_out.t(), x, beta=0.0 if fresh else 1.0, out=view)
    elif not x.is_cuda or view.dtype != torch.float32:
        product = weight_product(grad_out, x, view.dtype)
        view.copy_(product) if fresh else view.add_(product)
    elif fresh:
        torch.mm(grad_out.t(), x, out_dtype=torch.float32, out=view)
    else:
        torch.addmm(view, grad_out.t(), x, out_dtype=torch.float32, out=view)


def weight_product(grad_out: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """grad_out.T @ x, [tokens, out] and [tokens, in] -> [out, in], on its way into a buffer of ``dtype``."""
    if x.is_cuda and dtype == torch.float32 != x.dtype:
        return torch.mm(grad_out.t(), x, out_dtype=torch.float32)  # the tensor cores accumulate in fp32: keep those bits
    return grad_out.t() @ x


def put_grad(main_grad: MainGrad | None, param: Tensor, grad: Tensor) -> Tensor | None:
    """Hand over a gradient that has been computed already (biases, norms); returns it if there is no main_grad for it."""
    reserved = main_grad.reserve(param) if main_grad is not None else None
    if reserved is None:
        return grad.to(param.dtype)
    view, fresh = reserved
    view.copy_(grad) if fresh else view.add_(grad)
    return None
