"""Weight gradients go directly into a flat buffer; without one through autograd."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megatron_sp.ops.kernels.launch import is_fused


class MainGrad(Protocol):
    """Flat gradient buffers as ops see them (``optim/gradients.py``)."""

    defers: bool  # gradients of some parameters are put off now: ``later`` has to be asked
    held: Container[int]  # ids of the parameters that have a buffer

    def reserve(self, param: Tensor) -> tuple[Tensor, bool] | None:
        """Return a view and whether to overwrite it (first of the step); None if not held."""

    # in the forward pass, for an op that computes its gradient there (the LM head): nothing else may write to the view
    # before ``finish``. None if there is a gradient already, or no buffer
    def reserve_ahead(self, param: Tensor) -> Tensor | None: ...

    def finish(self, param: Tensor) -> None: ...

    # keep ``write``, whose operands must not be changed any more, if gradients of ``param`` are put off now
    def later(self, param: Tensor, write: Callable[[], object]) -> bool: ...

    # over parts, now or later (``ops/kernels/biases.py``)
    def put_sums(self, sums: Sequence[tuple[Tensor, tuple[Tensor, bool]]]) -> None: ...

    # write what was put off, as work under an exchange
    def cover(self) -> None: ...


_16_BIT = (torch.bfloat16, torch.float16)


def put_weight_grad(
    main_grad: MainGrad | None, weight: Tensor, grad_out: Tensor, x: Tensor, *, may_defer: bool = True
) -> Tensor | None:  # fmt: skip
    """Compute grad_out.T @ x; None if it went to the main_grad."""
    if main_grad is None:
        return grad_out.t() @ x
    # nothing waits for it but the optimizer: a backward pass can hand on the gradient of its input first (zero-bubble
    # pipelines, arXiv:2401.10241), or have something to compute under an exchange. The order of a parameter's
    # gradients stays the same
    if may_defer and main_grad.defers:
        write = partial(put_weight_grad, main_grad, weight, grad_out, x, may_defer=False)
        if main_grad.later(weight, write):
            return None
    reserved = main_grad.reserve(weight)
    if reserved is None:
        return grad_out.t() @ x
    put_product(reserved[0], grad_out, x, fresh=reserved[1])
    return None


def put_product(view: Tensor, grad_out: Tensor, x: Tensor, *, fresh: bool) -> None:
    """Write (``fresh``) or add grad_out.T @ x."""
    # the tensor cores of a GPU accumulate in fp32: the result goes directly into an fp32 view, without a temporary
    if view.dtype == grad_out.dtype:
        torch.mm(grad_out.t(), x, out=view) if fresh else torch.addmm(view, grad_out.t(), x, out=view)
    elif not x.is_cuda or view.dtype != torch.float32:
        product = weight_product(grad_out, x, view.dtype)
        view.copy_(product) if fresh else view.add_(product)
    elif fresh:
        torch.mm(grad_out.t(), x, out_dtype=torch.float32, out=view)
    else:
        torch.addmm(view, grad_out.t(), x, out_dtype=torch.float32, out=view)


def weight_product(grad_out: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad_out.T @ x for a buffer of ``dtype``."""
    if x.is_cuda and dtype == torch.float32 != x.dtype:
        # the tensor cores accumulate in fp32: keep those bits
        return torch.mm(grad_out.t(), x, out_dtype=torch.float32)
    return grad_out.t() @ x


def put_grad(main_grad: MainGrad | None, param: Tensor, grad: Tensor, *, may_defer: bool = True) -> Tensor | None:
    """Store a gradient; return it if no main_grad holds the parameter."""
    if main_grad is None:
        return grad.to(param.dtype)
    if may_defer and main_grad.defers:
        write = partial(put_grad, main_grad, param, grad, may_defer=False)
        if main_grad.later(param, write):
            return None
    reserved = main_grad.reserve(param)
    if reserved is None:
        return grad.to(param.dtype)
    view, fresh = reserved
    view.copy_(grad) if fresh else view.add_(grad)
    return None


def holds_all(main_grad: MainGrad | None, params: Iterable[Tensor | None]) -> bool:
    """Return whether autograd need not know of these parameters."""
    if main_grad is None:
        return False
    held = main_grad.held  # one that autograd knows has a node, which every backward pass calls with nothing for it
    for param in params:  # noqa: SIM110  # every layer of every step comes by: no generator
        if param is not None and id(param) not in held and param.requires_grad:
            return False
    return True


def put_column_sum(main_grad: MainGrad | None, bias: Tensor, grad_out: Tensor) -> Tensor | None:
    """Sum the rows of a bias's gradient; None if the sum went to the main_grad."""
    if main_grad is None or main_grad.defers:
        return put_grad(main_grad, bias, column_sum(grad_out))
    reserved = main_grad.reserve(bias)
    if reserved is None:
        return column_sum(grad_out).to(bias.dtype)
    add_column_sum(reserved[0], grad_out, fresh=reserved[1], main_grad=main_grad)
    return None


def add_column_sum(view: Tensor, x: Tensor, *, fresh: bool, main_grad: MainGrad | None = None) -> None:
    """Write (``fresh``) or add a sum over rows, by a main_grad perhaps later."""
    wide = torch.float32 if x.dtype in _16_BIT else x.dtype
    if is_fused(x) and view.is_contiguous():
        from megatron_sp.ops.kernels import biases

        parts = biases.column_parts(x)
        if main_grad is None or parts is x:  # which may be changed afterwards
            biases.finish([(parts, (view, fresh))])
        else:
            main_grad.put_sums([(parts, (view, fresh))])
    elif fresh and view.dtype == wide:
        torch.sum(x, 0, dtype=wide, out=view)
    else:
        total = x.sum(0, dtype=wide)
        view.copy_(total) if fresh else view.add_(total)


def column_sum(x: Tensor) -> Tensor:
    """Sum rows in fp32 or wider: [tokens, c] -> [c]."""
    wide = torch.float32 if x.dtype in _16_BIT else x.dtype
    if not is_fused(x):
        return x.sum(0, dtype=wide)
    total = torch.empty(x.shape[1], dtype=wide, device=x.device)
    add_column_sum(total, x, fresh=True)
    return total
