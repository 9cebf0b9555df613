"""A mixture-of-experts MLP as one autograd function, from the norm before it to the residual stream after it."""

#     a = norm(x); logits = a @ router.T in fp32 (or wider); the top k experts of each token, with weights
#     y = x + shared(a) + sum over the chosen experts of weight * expert(a)
#
# Rows travel to the ranks of their experts and back (``expert_exchange.py``), in ``chunks`` parts of the tokens, one
# ahead:
#
#     compute     | router | shared fc1 | shared fc2 | experts 0 | experts 1 | add 0 |     | add 1
#     exchanges           |-- counts --| |- rows 0 -||- rows 1 -||-results 0-||-results 1-|
#
# Backward mirrors forward; for it x, the logits, rows from other ranks and the inputs of the activations are kept, no
# output. Source: arXiv:2101.03961 (routing), arXiv:2401.06066 (shared experts), arXiv:2211.15841 (no capacity, nothing
# is dropped).

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.allocator import empty
from megatron_sp.ops.expert_mlp import Choices, ExpertGrads, ExpertWeights, experts_backward, experts_forward, sum_dtype
from megatron_sp.ops.main_grad import MainGrad, put_column_sum, put_weight_grad
from megatron_sp.ops.norm import NormInFront, NormSpec, norm_gradients
from megatron_sp.ops.routing import RoutingSpec, logits_backward, route
from megatron_sp.parallel.expert_exchange import Counts, Journey, RowExchange, RowFormat
from megatron_sp.parallel.linear import multiply, norm_in_front, normed_by, rows_of
from megatron_sp.parallel.parallel_context import NO_EP, ExpertParallel
from megatron_sp.parallel.router_pass import FirstPass, RouterPass
from megatron_sp.parallel.tensor_parallel import NO_TP, TensorParallel

Grads = tuple[Tensor | None, ...]


class Router(NamedTuple):
    """The router's tensors."""

    weight: Tensor  # [E, h], replicated on all ranks
    bias: Tensor | None = None  # [E], added for the choice only (loss-free balance), or None


@dataclass(frozen=True)
class ExpertPlan:
    """Options of a mixture of experts."""

    routing: RoutingSpec
    activation: Activation  # of all experts, the shared one included
    ep: ExpertParallel = NO_EP
    tp: TensorParallel = NO_TP
    router_dtype: torch.dtype | None = None  # of the logits; None: fp32, of an fp64 model fp64
    rows: int | None = None  # rows [positions, b] that choose experts, the first ones; None: all
    place: tuple[int, int] = (0, 0)  # number of the layer in the model, and slice of the sequence
    layer: int = 0  # its number among the layers with experts


def expert_mlp(
    x: Tensor, norm: NormInFront | None, router: Router, experts: ExpertWeights, plan: ExpertPlan, *,
    shared: ExpertWeights | None = None, residual: Tensor | None = None, add_input: bool = True,
    main_grad: MainGrad | None = None, routers: RouterPass | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute residual + experts(norm(x)), [s/parts, b, h]; return also x for its other consumers. Collective over ep.

    Args:
        norm: before router and experts, with weights replicated on all ranks.
        experts: this rank's, stacked. tp does not split them: its ranks have other tokens (tp_seq) or compute alike.
        shared: this tp rank's part of a shared expert, [f/tp, h], [f/tp], [h, f/tp], [h].
        residual: of the shape of x; None: x is added, with ``add_input``.
        main_grad: receives the gradients of all parameters; if None, they go through autograd.
        routers: counts choices, and has the weights of the terms that keep them even.
    """
    is_training = torch.is_grad_enabled()  # inside the op it never is
    first = routers.first.pop(plan.place, None) if routers is not None and is_training else None
    norm_params: tuple[Tensor | None, Tensor | None] = (None, None) if norm is None else (norm.weight, norm.bias)
    of_shared = (None, None, None, None) if shared is None else shared
    params = _Params(*norm_params, router.weight, *experts, *of_shared)
    norm_spec, add_input = None if norm is None else norm.spec, add_input and residual is None
    options = _Options(norm_spec, plan, router.bias, add_input, main_grad, routers, first, not is_training)
    return _ExpertMLP.apply(options, x, residual, *params)


class _Options(NamedTuple):
    # arguments of the op that have no gradient
    norm_spec: NormSpec | None
    plan: ExpertPlan
    router_bias: Tensor | None
    add_input: bool
    main_grad: MainGrad | None
    routers: RouterPass | None
    first: FirstPass | None  # the first pass, if this is a recomputation
    comes_again: bool  # this may be the first of two


class _Params(NamedTuple):
    """The parameters, in the order of the op's arguments."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    router: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    shared_w1: Tensor | None
    shared_b1: Tensor | None
    shared_w2: Tensor | None
    shared_b2: Tensor | None

    @property
    def experts(self) -> ExpertWeights:
        return ExpertWeights(self.w1, self.b1, self.w2, self.b2)


# a chunk of tokens as backward needs it: where its rows went, and who has chosen whom
_Trip = tuple[Journey, Choices]


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: _Options, x: Tensor, residual: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        params, plan = _Params._make(tensors), options.plan
        ctx.params, ctx.options, ctx.has_residual = params, options, residual is not None
        ctx.set_materialize_grads(False)
        plan.tp.mark("experts")
        state = _Forward(options, params, x, residual)
        y = state.run()
        # parameters are seen through autograd, which has them as recomputation hands them back
        of_chunks = *state.rows, *state.wide
        ctx.save_for_backward(x, state.logits, state.routed.chosen, *params, state.shared_wide, *of_chunks)
        ctx.trips = state.trips
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> Grads:  # type: ignore[override]
        if grad is None:
            return None, passed, None, *[None] * len(_Params._fields)
        return None, *_Backward(ctx, grad.contiguous(), passed).run()


class _Forward:
    def __init__(self, options: _Options, params: _Params, x: Tensor, residual: Tensor | None) -> None:
        self.options, self.plan, self.params = options, options.plan, params
        self.x, self.stream = x, residual if residual is not None else x if options.add_input else None
        self.shared_wide: Tensor | None = None  # input of the shared expert's activation
        self.rows: list[Tensor] = []  # of each chunk, the rows that came
        self.wide: list[Tensor] = []  # of each chunk, the inputs of the experts' activation
        self.trips: list[_Trip] = []

    def run(self) -> Tensor:
        plan, params, routers = self.plan, self.params, self.options.routers
        norm = norm_in_front(self.options.norm_spec, params.norm_weight, params.norm_bias)
        normed, _ = normed_by(self.x, norm)
        entered = plan.tp.enter_async(normed) if params.shared_w1 is not None else None
        a = rows_of(normed)[: plan.rows]
        wide = plan.router_dtype or sum_dtype(a.dtype)
        self.logits = a.to(wide) @ params.router.to(wide).t()
        first = self.options.first
        chosen = first.chosen if first is not None else routers.given(plan.layer) if routers is not None else None
        self.routed = route(self.logits, plan.routing, self.options.router_bias, chosen)
        own = len(params.w1)
        # contiguous parts of the tokens, whose lengths differ by at most one; as many on every rank
        tokens, num_chunks = len(a), plan.ep.chunks if plan.ep.size > 1 else 1
        chunks = [slice(i * tokens // num_chunks, (i + 1) * tokens // num_chunks) for i in range(num_chunks)]
        counts = Counts(plan.ep, self.routed.chosen, plan.routing.num_experts, chunks, first and first.numbers)
        if routers is not None and first is None:
            routers.observe(plan.layer, self.logits, self.routed.chosen, self.options.router_bias)
        inner: Tensor | None = None  # of the shared expert, whose first layer runs while the counts travel
        if entered is not None:
            assert params.shared_w1 is not None
            a_shared = entered.wait()
            shape = (*a_shared.shape[:-1], params.shared_w1.shape[0])
            self.shared_wide = empty(shape, dtype=a.dtype, device=a.device)
            multiply(rows_of(a_shared), params.shared_w1, params.shared_b1, out=rows_of(self.shared_wide))
            del a_shared
            inner = plan.activation.forward(self.shared_wide)
        journeys, of_experts = counts.read()
        if routers is not None and self.options.comes_again:
            assert counts.numbers is not None, "they have been read"
            if not routers.step.is_counting:
                routers.first[plan.place] = FirstPass(self.routed.chosen, counts.numbers)
        exchange = RowExchange(plan.ep, _format(a, self.logits, plan), own)
        coming = [exchange.send_rows(a, self.routed, journeys[0])]
        y = self._begin(inner)
        del normed, inner
        wide = sum_dtype(a.dtype)
        total = rows_of(y)[: plan.rows] if wide == a.dtype else torch.zeros(a.shape, dtype=wide, device=a.device)
        under_way: tuple[Handle, Journey] | None = None
        for index, (journey, numbers) in enumerate(zip(journeys, of_experts, strict=True)):
            arrived = coming.pop().wait()
            if index + 1 < len(journeys):
                coming.append(exchange.send_rows(a, self.routed, journeys[index + 1]))
            rows, choices = exchange.received_rows(arrived, self.routed, journey, numbers)
            results = exchange.place_for(total, journey)
            self.wide.append(experts_forward(rows, choices, params.experts, plan.activation, results))
            # on one rank they are computed again, with the norm; a view of nothing would keep them
            self.rows.append(arrived if plan.ep.size > 1 else arrived.new_empty(0))
            self.trips.append((journey, choices))
            if under_way is not None:
                exchange.add_results(under_way[0].wait(), under_way[1], total)
            under_way = exchange.send_results(results, journey), journey
            del arrived, rows, results
        assert under_way is not None
        exchange.add_results(under_way[0].wait(), under_way[1], total)
        if wide != a.dtype:
            rows_of(y)[: plan.rows] += total
        return y

    def _begin(self, inner: Tensor | None) -> Tensor:
        # the residual stream, if it is added, with the shared expert's output: [s/parts, b, h], a tensor of its own
        x, stream, params, tp = self.x, self.stream, self.params, self.plan.tp
        y = empty(x.shape, dtype=x.dtype, device=x.device)
        if inner is None:
            return y.zero_() if stream is None else y.copy_(stream)
        assert params.shared_w2 is not None
        if tp.size == 1:
            added = None if stream is None else rows_of(stream)
            multiply(rows_of(inner), params.shared_w2, params.shared_b2, added, out=rows_of(y))
            return y
        part = empty((*inner.shape[:-1], x.shape[-1]), dtype=x.dtype, device=x.device)
        multiply(rows_of(inner), params.shared_w2, None, out=rows_of(part))
        left = tp.leave_async(part).wait()
        if params.shared_b2 is not None:
            left.add_(params.shared_b2)
        return y.copy_(left) if stream is None else torch.add(left, stream, out=y)


def _format(a: Tensor, logits: Tensor, plan: ExpertPlan) -> RowFormat:
    return RowFormat(a.shape[1], plan.routing.top_k, a.dtype, logits.dtype)


class _Backward:
    def __init__(self, ctx: Any, grad: Tensor, passed: Tensor | None) -> None:
        saved: Iterator[Tensor] = iter(ctx.saved_tensors)
        self.x, self.logits, chosen = next(saved), next(saved), next(saved)
        self.values = _Params._make(next(saved) for _ in _Params._fields)
        self.shared_wide: Tensor | None = next(saved)
        self.trips: list[_Trip] = ctx.trips
        self.rows, self.wide = [next(saved) for _ in self.trips], [next(saved) for _ in self.trips]
        options: _Options = ctx.options
        self.options, self.plan, self.params, self.main_grad = options, options.plan, ctx.params, options.main_grad
        self.need_x, self.need_residual, *needs = ctx.needs_input_grad[1:]
        self.need: Any = _Params._make(needs)  # flags of the parameters
        self.grad, self.passed, self.has_residual = grad, passed, ctx.has_residual
        self.routed = route(self.logits, self.plan.routing, chosen=chosen)

    def run(self) -> Grads:
        plan, values = self.plan, self.values
        plan.tp.mark("experts")
        norm = norm_in_front(self.options.norm_spec, self.params.norm_weight, self.params.norm_bias)
        grad2 = rows_of(self.grad)[: plan.rows]
        exchange = RowExchange(plan.ep, _format(grad2, self.logits, plan), len(values.w1))
        coming = [exchange.send_grads(grad2, self.trips[0][0])]
        normed, stats = normed_by(self.x, norm)
        of_shared, reduced = self._shared(normed)
        a = rows_of(normed)[: plan.rows]
        grad_a = torch.zeros(a.shape, dtype=sum_dtype(a.dtype), device=a.device)
        grad_weights = torch.zeros_like(self.routed.weights)
        need = (self.need.w1, self.need.b1, self.need.w2, self.need.b2)
        grads = ExpertGrads(self.params.experts, need, self.main_grad)
        under_way: tuple[Handle, Journey] | None = None
        for index, (journey, choices) in enumerate(self.trips):
            arrived = coming.pop().wait().view(-1, grad2.shape[1])
            if index + 1 < len(self.trips):
                coming.append(exchange.send_grads(grad2, self.trips[index + 1][0]))
            rows = exchange.rows_of(self.rows[index], a, journey)
            row_grads = exchange.place_for(grad_a, journey)
            wide, experts = self.wide[index], values.experts
            of_choices = experts_backward(arrived, rows, wide, choices, experts, plan.activation, grads, row_grads)
            top_k = plan.routing.top_k
            of_rows = torch.zeros(len(rows) * top_k, dtype=of_choices.dtype, device=of_choices.device)
            of_rows[choices.places] = of_choices
            if under_way is not None:
                exchange.add_row_grads(under_way[0].wait(), under_way[1], grad_a, grad_weights)
            under_way = exchange.send_row_grads(row_grads, of_rows.view(len(rows), top_k), journey), journey
        of_experts = grads.results()  # under the last exchange
        assert under_way is not None
        exchange.add_row_grads(under_way[0].wait(), under_way[1], grad_a, grad_weights)
        router = self._router(a, grad_weights, grad_a)
        return self._input(norm, stats, grad_a, reduced, router, of_experts, of_shared)

    def _router(self, a: Tensor, grad_weights: Tensor, grad_a: Tensor) -> Tensor | None:
        # add the gradient that comes through the router to ``grad_a``; return that of its weight if autograd is to have
        # it
        plan, routers = self.plan, self.options.routers
        of_scores, z = (None, None) if routers is None else routers.gradients(plan.layer, len(a), self.logits.dtype)
        grad = logits_backward(self.logits, self.routed, plan.routing, grad_weights, of_scores, z)
        grad_a += (grad @ self.values.router.to(grad.dtype)).to(grad_a.dtype)
        if not self.need.router:
            return None
        main_grad, param = self.main_grad, self.params.router
        if main_grad is not None and main_grad.later(param, partial(_put_router_grad, main_grad, param, grad, a)):
            return None
        return _put_router_grad(main_grad, param, grad, a)

    def _shared(self, normed: Tensor) -> tuple[list[Tensor | None], Handle | None]:
        # gradients of the shared expert's parameters for autograd, and that of its input on its way
        wide, values, params, need = self.shared_wide, self.values, self.params, self.need
        tp, main_grad = self.plan.tp, self.main_grad
        if wide is None:
            return [None] * 4, None
        assert values.shared_w1 is not None and values.shared_w2 is not None
        w1 = b1 = w2 = b2 = None
        entered_grad, entered = tp.enter_async(self.grad), tp.enter_async(normed)
        if need.shared_b2:
            b2 = put_column_sum(main_grad, params.shared_b2, rows_of(self.grad))
        grad = entered_grad.wait()
        grad2, activation = rows_of(grad), self.plan.activation
        if need.shared_w2:
            w2 = put_weight_grad(main_grad, params.shared_w2, grad2, rows_of(activation.forward(wide)))
        grad_inner = (grad2 @ values.shared_w2).view(*grad.shape[:-1], values.shared_w2.shape[1])
        grad_wide = activation.backward_(grad_inner, wide)
        del grad_inner
        part = empty(grad.shape, dtype=grad.dtype, device=grad.device)
        torch.mm(rows_of(grad_wide), values.shared_w1, out=rows_of(part))
        reduced = tp.leave_async(part)
        del part
        if need.shared_b1:
            b1 = put_column_sum(main_grad, params.shared_b1, rows_of(grad_wide))
        a = entered.wait()
        if need.shared_w1:
            w1 = put_weight_grad(main_grad, params.shared_w1, rows_of(grad_wide), rows_of(a))
        return [w1, b1, w2, b2], reduced

    def _input(
        self, norm: NormInFront | None, stats: tuple[Tensor, ...], grad_a: Tensor, reduced: Handle | None,
        router: Tensor | None, of_experts: Grads, of_shared: list[Tensor | None],
    ) -> Grads:  # fmt: skip
        grad, passed = self.grad, self.passed
        if self.options.add_input:
            passed = grad if passed is None else passed + grad
        grad_normed = torch.zeros_like(self.x) if reduced is None else reduced.wait()
        rows = rows_of(grad_normed)[: self.plan.rows]
        rows.add_(grad_a) if rows.dtype == grad_a.dtype else rows.copy_(rows + grad_a)
        grad_x = of_weight = of_bias = None
        if norm is None:
            grad_x = grad_normed if passed is None else grad_normed.add_(passed)
        else:
            need = self.need_x, self.need.norm_weight, self.need.norm_bias
            of_norm = norm_gradients(norm, grad_normed, self.x, stats, need, passed, main_grad=self.main_grad)
            grad_x, of_weight, of_bias = of_norm
        of_residual = grad if self.has_residual and self.need_residual else None
        return grad_x, of_residual, of_weight, of_bias, router, *of_experts, *of_shared


def _put_router_grad(main_grad: MainGrad | None, weight: Tensor, grad: Tensor, a: Tensor) -> Tensor | None:
    # computed in the dtype of the logits; None if the main_grad holds the weight
    of_weight = put_weight_grad(main_grad, weight, grad, a.to(grad.dtype), may_defer=False)
    return None if of_weight is None else of_weight.to(weight.dtype)
