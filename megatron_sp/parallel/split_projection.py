"""Projections of which a part of the rows or columns at a time is known: the products around the exchanges of Ulysses.

    to the heads     send buffer of rank r = a @ W[rows of rank r].T + b[rows of rank r]    rows of the QKV weight
    from the heads   y = sum over pieces of piece @ W[:, columns of the piece].T            columns of the output's

Weight gradients are computed for the same rows and columns. Nothing here communicates, except that ``project_pieces``
leaves the tensor-parallel region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from megatron_sp.ops.allocator import empty
from megatron_sp.ops.main_grad import MainGrad, add_column_sum, column_sum, put_product, put_weight_grad, weight_product
from megatron_sp.parallel.heads import Message
from megatron_sp.parallel.linear import multiply, project_back, rows_of
from megatron_sp.parallel.tensor_parallel import TensorParallel

HeadColumns = tuple[slice, Tensor]
"""Columns of [tokens, n*d], and what is in them."""


def project_to_ranks(a: Tensor, weight: Tensor, bias: Tensor | None, widths: list[int], out: Tensor) -> None:
    """Compute a @ weight.T + bias for a [tokens, h], with the columns for rank r as the r-th block of ``out``.

    The weight is [sum(widths), h], or the rows of each rank [ranks, width, h]; ``out`` is flat.
    """
    tokens, ranks = a.shape[0], len(widths)
    if len(set(widths)) == 1 and ranks > 1:  # one batched GEMM; ``a`` is not copied for it
        blocks = out.view(ranks, tokens, widths[0])
        by_rank = weight if weight.ndim == 3 else weight.view(ranks, widths[0], -1)
        torch.bmm(a.expand(ranks, *a.shape), by_rank.transpose(1, 2), out=blocks)
        if bias is not None:
            blocks.add_(bias.view(ranks, 1, -1))
        return
    at = column = 0
    for width in widths:
        columns = slice(column, column + width)
        if width:
            block, of_rank = out[at : at + tokens * width].view(tokens, width), None if bias is None else bias[columns]
            multiply(a, weight[columns], of_rank, out=block)
        at, column = at + tokens * width, column + width


def take(weight: Tensor, rows: list[slice]) -> Tensor:
    # rows in order; a view if they are one run
    if len(rows) == 1:
        return weight if rows[0] == slice(0, weight.shape[0]) else weight[rows[0]]
    return torch.cat([weight[run] for run in rows]) if rows else weight[:0]


def take_of_ranks(weight: Tensor, message: Message) -> Tensor:
    # the rows of a message: a view [ranks, width, ...] if the ranks' are as far apart, else as ``take``
    if message.stride is None:
        return take(weight, message.rows)
    first, width, step = message.stride
    stride = weight.stride()
    shape, strides = (len(message.widths), width, *weight.shape[1:]), (step * stride[0], *stride)
    return weight.as_strided(shape, strides, weight.storage_offset() + first * stride[0])


def project_back_to_ranks(grad: Tensor, weight: Tensor, columns: list[slice], out: Tensor) -> None:
    # grad @ weight[:, columns of each rank], one after another in ``out``, flat
    tokens, ranks = grad.shape[0], len(columns)
    starts, widths = [some.start for some in columns], [some.stop - some.start for some in columns]
    step, left = divmod(weight.shape[1], ranks)  # a chunk may be even where the heads as a whole are not
    if left == 0 and len(set(widths)) == 1 and starts == [starts[0] + rank * step for rank in range(ranks)]:
        of_ranks = weight.view(-1, ranks, step)[:, :, starts[0] : starts[0] + widths[0]].transpose(0, 1)
        torch.bmm(grad.expand(ranks, *grad.shape), of_ranks, out=out.view(ranks, tokens, -1))  # without a copy
        return
    at = 0
    for some, width in zip(columns, widths, strict=True):
        if width:
            torch.mm(grad, weight[:, some], out=out[at : at + tokens * width].view(tokens, width))
        at += tokens * width


def project_pieces(
    pieces: Iterator[HeadColumns], proj: tuple[Tensor, Tensor | None], residual: Tensor | None, tp: TensorParallel, *,
    batch: int,
) -> tuple[Tensor, list[HeadColumns]]:  # fmt: skip
    """Compute leave(sum of piece @ weight[:, columns].T) + bias + residual; return it with the pieces, for backward.

    Several pieces, columns of the input [s * b, n*d], are added up as they arrive. The result is [s/parts, b, h].
    """
    (weight, bias), first, second = proj, next(pieces), next(pieces, None)
    columns, out = first
    if second is None:
        return project_back(out.view(-1, batch, out.shape[1]), weight, bias, residual, tp), [first]
    y = empty((out.shape[0] // batch, batch, weight.shape[0]), dtype=out.dtype, device=out.device)
    torch.mm(out, weight[:, columns].t(), out=rows_of(y))
    kept = [first]
    for columns, out in chain([second], pieces):
        torch.addmm(rows_of(y), out, weight[:, columns].t(), out=rows_of(y))
        kept.append((columns, out))
    y = tp.leave_async(y).wait()
    if residual is not None:
        y.add_(residual)
    return (y if bias is None else y.add_(bias)), kept


def put_grad_of_columns(
    main_grad: MainGrad | None, weight: Tensor, grad: Tensor, pieces: Sequence[HeadColumns]
) -> Tensor | None:
    # the weight gradient of ``project_pieces``, grad.T @ piece for each; None if it is in the main_grad
    if len(pieces) == 1:
        return put_weight_grad(main_grad, weight, grad, pieces[0][1])

    def put() -> Tensor | None:
        reserved = main_grad.reserve(weight) if main_grad is not None else None
        view, fresh = (torch.zeros_like(weight), False) if reserved is None else reserved
        for columns, piece in pieces:
            torch.addmm(view[:, columns], grad.t(), piece, beta=0.0 if fresh else 1.0, out=view[:, columns])
        return view if reserved is None else None

    return None if main_grad is not None and main_grad.later(weight, put) else put()


class RowWiseGrad:
    """Gradient of a parameter computed message by message, each for some of its rows."""

    def __init__(self, main_grad: MainGrad | None, param: Tensor, rows_differ: bool) -> None:
        self._main_grad, self._param, self._rows_differ = main_grad, param, rows_differ
        # where gradients are put off, what will be added, until the main_grad asks for it; else None
        self._put_off: list[Callable[[], None]] | None = []
        if main_grad is None or not main_grad.later(param, self._write):
            self._put_off = None
            self._open()

    def _open(self) -> None:
        reserved = self._main_grad.reserve(self._param) if self._main_grad is not None else None
        self._held = reserved is not None
        self._view, fresh = reserved if reserved is not None else (torch.zeros_like(self._param), False)
        if fresh and not self._rows_differ:
            self._view.zero_()
        self._overwrite = fresh and self._rows_differ  # every row comes exactly once

    def put_product(self, grad_out: Tensor, x: Tensor, rows: list[slice]) -> None:
        # add (or write first) grad_out.T @ x, whose rows go to ``rows`` in order
        if self._put_off is not None:
            self._put_off.append(partial(self.put_product, grad_out, x, rows))
        elif len(rows) == 1:
            put_product(self._view[rows[0]], grad_out, x, fresh=self._overwrite)
        else:
            self._put(weight_product(grad_out, x, self._view.dtype), rows)

    def put_column_sum(self, grad_out: Tensor, rows: list[slice]) -> None:
        # add (or write first) the sum over the tokens, in fp32 or wider
        if self._put_off is not None:  # summed at once: what is kept is small
            self._put_off.append(partial(self._put, column_sum(grad_out), rows))
        elif len(rows) == 1:
            add_column_sum(self._view[rows[0]], grad_out, fresh=self._overwrite)
        else:
            self._put(column_sum(grad_out), rows)

    def _put(self, grad: Tensor, rows: list[slice]) -> None:
        start = 0
        for run in rows:
            part = grad[start : start + run.stop - run.start]
            self._view[run].copy_(part) if self._overwrite else self._view[run].add_(part)
            start += run.stop - run.start

    def _write(self) -> None:
        calls, self._put_off = self._put_off or [], None
        self._open()
        for call in calls:
            call()

    def result(self) -> Tensor | None:
        # for autograd; None if the main_grad has it, or will have it
        return None if self._put_off is not None or self._held else self._view
