"""Attention of a transformer block as one autograd function: norm, both projections, attention, residual stream.

    x [s/sp, b, h] -> norm -> q, k, v of all heads -> ... -> [s/sp, b, n*d_v] -> projection -> + x

What is between the projections, the exchanges of Ulysses and the attention itself, chunk of heads by chunk, is in
``ulysses.py``. Here are the op's arguments, what it saves, and the phases of its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle
from megatron_sp.ops.allocator import empty
from megatron_sp.ops.main_grad import MainGrad, put_column_sum, put_weight_grad
from megatron_sp.ops.norm import NormInFront, norm_gradients
from megatron_sp.parallel.heads import Message
from megatron_sp.parallel.linear import needed, normed_by, passed_to_autograd, projected_by, rows_of
from megatron_sp.parallel.split_projection import RowWiseGrad, project_pieces, put_grad_of_columns, take
from megatron_sp.parallel.ulysses import (
    OTHER,
    OUTPUT_PROJECTION,
    PROJECTION,
    AttentionPlan,
    Core,
    HeadGrads,
    HeadsPass,
    Projection,
    add,
)


def attention_block(
    x: Tensor, norm: NormInFront | None, qkv: tuple[Tensor, Tensor | None], proj: tuple[Tensor, Tensor | None],
    core: Core, plan: AttentionPlan, *, main_grad: MainGrad | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute proj(attention(qkv(norm(x)))), plus x with ``plan.add_input``, for x [s/(sp * tp parts), b, h].

    ``qkv`` are weight [rows, h] of this tp rank and bias or None, ``proj`` weight [h, n*d_v] and bias. Without a
    ``main_grad`` the parameters' gradients go through autograd. Also returned is x for a residual branch outside, whose
    gradient is added inside this op.
    """
    norm_params: tuple[Tensor | None, Tensor | None] = (None, None) if norm is None else (norm.weight, norm.bias)
    params = _Params(*norm_params, *qkv, *proj)
    passed = passed_to_autograd(main_grad, x, params)
    # whether backward may follow is known here only: inside forward autograd is always off
    options = _Options(norm, params, core, plan, main_grad, torch.is_grad_enabled(), len(passed))
    return _AttentionBlock.apply(options, x, *passed, *core.parameters)


class _Options(NamedTuple):
    norm: NormInFront | None
    params: _Params
    core: Core
    plan: AttentionPlan
    main_grad: MainGrad | None
    train: bool  # a backward pass may follow
    num_passed: int  # how many of ``params`` autograd knows: all or none


class _Params(NamedTuple):
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    w_qkv: Tensor
    b_qkv: Tensor | None
    w_proj: Tensor
    b_proj: Tensor | None


class _AttentionBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: _Options, x: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
        params, plan, train = options.params, options.plan, options.train
        ctx.set_materialize_grads(False)
        plan.sp.mark(PROJECTION)
        run = HeadsPass(plan, options.core, x, train and any(ctx.needs_input_grad))
        if run.replays:
            going = run.results_of_first_pass(x)
        else:
            normed, _ = normed_by(rows_of(x), options.norm)
            a = plan.tp.enter_async(normed).wait()  # [s/sp * b, h]
            del normed
            going = run.forward(a, params.w_qkv, params.b_qkv)
            del a
        residual = x if plan.add_input else None
        proj = params.w_proj, params.b_proj
        y, pieces = project_pieces(run.outputs(going), proj, residual, plan.tp, batch=x.shape[1])
        columns, contents = zip(*pieces, strict=True)
        if plan.kept is not None and plan.keeps_received and not plan.kept.replays:
            plan.kept.keep("received", *contents)
        if train:
            ctx.save_for_backward(x, *contents, *run.release())
        # the main_grad knows parameters by identity; recomputation hands saved tensors back as copies
        ctx.options, ctx.run, ctx.columns = options, run, columns
        plan.sp.mark(OTHER)
        return y, x.view_as(x)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, passed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        options: _Options | None = ctx.options
        if options is None:
            message = "the attention block's backward ran already: its tensors are gone (retain_graph is not supported)"
            raise RuntimeError(message)
        if grad is None:  # only the residual branch was used
            return None, passed, *[None] * (options.num_passed + len(options.core.parameters))
        backward = _Backward(ctx, options)
        ctx.options = ctx.run = None  # masks, tables and keys end with backward, not with the graph
        grads, of_core = backward.run_phases(grad, passed)
        return None, *grads[: 1 + options.num_passed], *of_core


class _Backward:
    def __init__(self, ctx: Any, options: _Options) -> None:
        self.run: HeadsPass = ctx.run
        self.norm, self.params, core, self.plan, self.main_grad, _, num_passed = options
        self.core_params: Sequence[Tensor] = core.parameters
        need_x, *flags = ctx.needs_input_grad[1 : 2 + num_passed]
        self.need_x = need_x
        self.needs: Any = (needs := _Params(*needed(flags, self.params)))  # type: ignore[arg-type]
        # the gradient of the QKV projection's input
        self.needs_normed = need_x or needs.norm_weight or needs.norm_bias
        self.x, *others = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # chunks let go of theirs one by one
        self.pieces = list(zip(ctx.columns, others, strict=False))
        self.run.restore(others[len(self.pieces) :])

    def run_phases(self, grad: Tensor, passed: Tensor | None) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
        self.plan.sp.mark(OUTPUT_PROJECTION)
        grad = grad.contiguous()
        # the input may get two gradients from outside: they meet at the end, so that no sum lives through all of this
        late: Tensor | None = None
        if self.plan.add_input:
            passed, late = (grad, None) if passed is None else (passed, grad)
        b_proj, heads = self._output_projection_and_attention(grad)
        w_qkv = b_qkv = x = norm_weight = norm_bias = None
        if heads.arriving:
            w_qkv, b_qkv, reduced, stats = self._qkv_projection(heads.arriving)
            if reduced is not None:
                x, norm_weight, norm_bias = self._norm(reduced, stats, passed, late)
        self.plan.sp.mark(OTHER)
        return (x, norm_weight, norm_bias, w_qkv, b_qkv, heads.overlapped, b_proj), heads.of_core

    def _output_projection_and_attention(self, grad: Tensor) -> tuple[Tensor | None, HeadGrads]:
        needs, params = self.needs, self.params
        needs_heads = self.needs_normed or needs.w_qkv or needs.b_qkv or any(p.requires_grad for p in self.core_params)
        gathered = self.plan.tp.enter_async(grad)
        remade: Projection | None = None
        if needs_heads and self.run.heads == "remade":
            normed, _ = normed_by(self.x, self.norm)
            remade = Projection(rows_of(self.plan.tp.enter_async(normed).wait()), params.w_qkv, params.b_qkv)
            del normed
        b_proj = None
        if needs.b_proj:
            assert params.b_proj is not None
            b_proj = put_column_sum(self.main_grad, params.b_proj, rows_of(grad))
        grad2 = rows_of(gathered.wait())  # [s/sp * b, h]

        def weight_of_proj() -> Tensor | None:
            return put_grad_of_columns(self.main_grad, params.w_proj, grad2, self.pieces) if needs.w_proj else None

        if needs_heads:
            return b_proj, self.run.backward_to_messages(grad2, params.w_proj, weight_of_proj, remade)
        return b_proj, HeadGrads([], weight_of_proj(), [None] * len(self.core_params))

    def _qkv_projection(
        self, arriving: list[tuple[Message, Handle]]
    ) -> tuple[Tensor | None, Tensor | None, Handle | None, tuple[Tensor, ...]]:
        needs, w_qkv, plan = self.needs, self.params.w_qkv, self.plan
        if self.main_grad is not None and plan.sp.size > 1:  # nothing else is left to do while the messages travel
            plan.sp.mark("mlp")
            self.main_grad.cover()
        plan.sp.mark(PROJECTION)
        normed, stats = normed_by(self.x, self.norm)
        a = plan.tp.enter_async(normed)
        w_grad: Tensor | None = None
        b_grad: Tensor | None = None
        reduced: Handle | None = None
        if len(arriving) == 1 and self.run.is_whole(arriving[0][0]):  # the whole weight at once
            d_heads = arriving[0][1].wait().view(self.run.tokens, -1)
            if self.needs_normed:
                reduced = plan.tp.leave_async(projected_by(d_heads, w_qkv))
            if needs.b_qkv:
                assert self.params.b_qkv is not None
                b_grad = put_column_sum(self.main_grad, self.params.b_qkv, d_heads)
            entered = a.wait()
            if needs.w_qkv:
                w_grad = put_weight_grad(self.main_grad, w_qkv, d_heads, rows_of(entered))
            return w_grad, b_grad, reduced, stats
        a2: Tensor | None = None  # [s/sp * b, h], gathered during the first message's product with the weight
        grad_a: Tensor | None = None
        if self.needs_normed:
            grad_a = empty((self.run.tokens, w_qkv.shape[1]), dtype=w_qkv.dtype, device=w_qkv.device)
        weight_grad = RowWiseGrad(self.main_grad, self.params.w_qkv, self.plan.whole_weight) if needs.w_qkv else None
        bias_grad = None
        if needs.b_qkv:
            assert self.params.b_qkv is not None
            bias_grad = RowWiseGrad(self.main_grad, self.params.b_qkv, self.plan.whole_weight)
        first = True
        for index, (message, handle) in enumerate(arriving):
            pieces = self.run.by_rows(handle.wait(), message)  # of rows of the weight, [s/sp * b, rows]
            if grad_a is not None:
                for rows, d_heads in pieces:
                    torch.addmm(grad_a, d_heads, take(w_qkv, rows), beta=0.0 if first else 1.0, out=grad_a)
                    first = False
                if index == len(arriving) - 1:
                    reduced = plan.tp.leave_async(grad_a)
            for rows, d_heads in pieces:
                if bias_grad is not None:
                    bias_grad.put_column_sum(d_heads, rows)
                if weight_grad is not None:
                    a2 = rows_of(a.wait()) if a2 is None else a2
                    weight_grad.put_product(d_heads, a2, rows)
        if a2 is None:
            a.wait()
        w_grad, b_grad = (None if g is None else g.result() for g in (weight_grad, bias_grad))
        return w_grad, b_grad, reduced, stats

    def _norm(
        self, reduced: Handle, stats: tuple[Tensor, ...], passed: Tensor | None, late: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grad = reduced.wait().view(self.x.shape)
        if self.norm is None:
            return add(add(passed, grad), late), None, None
        need = self.need_x, self.needs.norm_weight, self.needs.norm_bias
        grad_x, *of_norm = norm_gradients(self.norm, grad, self.x, stats, need, passed, main_grad=self.main_grad)
        if late is not None and grad_x is not None:
            grad_x.add_(late)
        return grad_x, *of_norm
