"""Moments in a layer with experts, in closed form: what it needs beside what it keeps (``parallel/experts.py``).

Sizes are those of the mean chunk of a rank's tokens, and of the expert that has most choices, or where the products of all experts
are one, of all choices.
"""

from __future__ import annotations

from math import ceil

from megatron_sp.config.schema_model import ActivationName
from megatron_sp.estimate.memory_experts import ExpertShape
from megatron_sp.estimate.memory_mlp import activation_backward
from megatron_sp.estimate.memory_plan import Line, total
from megatron_sp.estimate.memory_shape import BLOCK_BYTES, RankShape

_PUT_OFF = "operands of gradients that are put off"
Moments = list[tuple[str, list[Line]]]


def experts_forward(experts: ExpertShape, shape: RankShape) -> list[Line]:
    """Return what the forward pass needs at its worst moment: in the router, in an expert, or as results travel."""
    rows, form = experts.rows, experts
    normed = 0 if shape.post else shape.stream
    weights = form.tokens * form.top_k * form.weight
    sums = form.tokens * form.h * form.wide if form.wide != form.e else 0
    result = ceil(rows.received / form.parts) * form.h * form.wide if form.moves else 0
    back = ceil(rows.sent / form.parts) * form.h * form.e if form.moves else 0  # results that come back
    rounded = result * form.e // form.wide if form.wide != form.e else 0
    ahead = ceil(rows.sent / form.parts) * form.row_bytes.there if form.parts > 1 else 0
    others = back + (rounded or result) if form.parts > 1 else 0
    most = ceil(rows.most / form.parts) * form.e
    # the results of the expert before are there until this one's are
    one = most * max(2 * form.h + form.ffn, 3 * form.h if form.bias else 0) + (
        most // form.e * form.h * form.wide if sums else 0
    )
    if form.grouped:
        one = _grouped_forward(form)
    ranked = form.tokens * form.num_experts * (form.weight + 8) + (form.tokens * form.h * form.wide if sums else 0)
    fixed = [Line("norm's output", normed), Line("weights of experts", weights)]
    y = [Line("block's output", shape.stream), Line("experts' results", sums)]
    kept_later = [line for line in form.keeps(0) if line.name != "router"]
    return max(
        [*fixed, Line("choice of experts", ranked), Line("experts, not there yet", -total(kept_later))],
        [*fixed, *y, Line("an expert", one), Line("rows' results", result), Line("rows on their way", _under_way(form, ahead, others))],
        [*fixed, *y, Line("rows' results", result), Line("rows on their way", back + rounded)],
        key=total,
    )  # fmt: skip


def experts_backward(
    experts: ExpertShape, shape: RankShape, activation: ActivationName, behind: list[Line], put_off: int
) -> Moments:
    """Return the moments of the backward pass, in their order, as (name, what it needs).

    Args:
        behind: what the norm's backward needs.
        put_off: operands that stay, where gradients are put off.
    """
    form, rows = experts, experts.rows
    normed = Line("norm's output", 0 if shape.post else shape.stream)
    weights = Line("weights of experts", form.tokens * form.top_k * form.weight)
    grad_row, grad_x = (
        form.h * form.e,
        Line("gradient of the norm's output, of experts", form.tokens * form.h * form.wide),
    )
    sent, received = (ceil(count / form.parts) if form.moves else 0 for count in (rows.sent, rows.received))
    arrived = received * grad_row
    ahead = (sent + received) * grad_row if form.parts > 1 else 0
    moments = Moments()
    reduced = 0
    if form.shared:
        inner = form.sp_tokens * form.shared * form.e
        entered = Line("gradient of the stream and norm's output, gathered", shape.gathered)
        coming = Line("gradients of results, on their way", (sent + received) * grad_row)
        made = activation_backward(
            activation, inner, 0 if shape.fused else min(inner, BLOCK_BYTES) if not shape.cuda else inner
        )
        wide = form.sp_tokens * form.shared_in * form.e
        reduced = shape.stream
        moments.append(("shared expert", [normed, weights, coming, entered, Line("shared expert, inside", made)]))
        product = Line("gradient of the norm's output", shape.whole_stream + shape.scattering)
        moments.append(
            (
                "shared expert's first layer",
                [normed, weights, coming, entered, Line("gradient of the shared expert, inside", wide), product],
            )
        )
    fixed = [
        normed,
        weights,
        Line("gradients of weights", weights.num_bytes),
        grad_x,
        Line("gradient of the norm's output", reduced),
    ]
    of_rows = received * form.h * form.wide
    most = ceil(rows.most / form.parts)
    inner, wide = most * form.ffn * form.e, most * form.ffn_in * form.e
    block = 0 if shape.fused else min(inner, BLOCK_BYTES) if not shape.cuda else inner
    row = most * grad_row
    of_choices = ceil(rows.choices / form.parts) * form.weight
    # the gradient inside the expert before is there until this one's is
    one = max(
        row + 3 * inner + wide, row + 2 * inner + wide + (row if form.bias else 0),
        row + inner + activation_backward(activation, inner, block) + wide,
        2 * row + inner + wide + (inner if wide > inner else 0),
        wide + row + (row * form.wide // form.e if form.wide != form.e else 0),
    )  # fmt: skip
    if form.grouped:
        one = _grouped_backward(form, activation, block=0 if shape.fused else 1)
    widened = form.h * form.ffn_in * form.e if shape.is_16_bit and not shape.cuda else 0
    moving = form.row_bytes.gradient * (sent + received) if form.parts > 1 else 0
    held = [
        *fixed,
        Line("gradients of rows", of_rows),
        Line("gradients of choices", of_choices),
        Line(_PUT_OFF, put_off),
    ]
    inside = [
        Line("gradients of results", arrived),
        Line("an expert", one + widened),
        Line("gradients on their way", _under_way(form, ahead, moving)),
    ]
    moments.append(("experts", [*held, *inside]))
    left = [
        *held, Line("gradients of results", arrived), Line("gradients of rows, on their way", form.row_bytes.gradient * sent),
        Line("gradients of choices, by row", (received if form.moves else form.tokens) * form.top_k * form.weight),
    ]  # fmt: skip
    moments.append(
        (
            "gradients of rows, on their way",
            [*left, Line("gradients of rows, sent", form.row_bytes.gradient * received)],
        )
    )
    logits = form.tokens * form.num_experts * form.weight
    through = Line("gradient through the router", form.tokens * form.h * form.weight)
    moments.append(("router", [*left, Line("gradient of the logits", 3 * logits), through]))
    own = Line("gradient of the norm's output", 0 if reduced else shape.stream)
    moments.append(("norm before the experts", [*left, own, *behind]))
    return moments


def _under_way(form: ExpertShape, ahead: int, behind: int) -> int:
    """Return the bytes of what travels while a chunk is computed: of the chunk after it, and of the one before it, of two never both."""
    return max(ahead, behind) if form.parts == 2 else ahead + behind


def _choices(form: ExpertShape) -> int:
    """Return the choices of a chunk, of all experts of the rank."""
    return ceil(form.rows.choices / form.parts)


def _added(form: ExpertShape) -> int:
    """Return the bytes of the rows of a chunk to which the results of one choice of each are added."""
    return (ceil(form.rows.received / form.parts) if form.moves else form.tokens) * form.h * form.e


def _grouped_forward(form: ExpertShape) -> int:
    """Return what the products of all experts need in the forward pass, beside the inputs of the activation (``_grouped_forward``)."""
    count = _choices(form)
    row, inner = count * form.h * form.e, count * form.ffn * form.e
    bias = max(count * form.ffn_in * form.e, row) if form.bias else 0
    return row + max(inner, _added(form), bias)


def _grouped_backward(form: ExpertShape, activation: ActivationName, block: int) -> int:
    """Return what they need in the backward pass (``_grouped_backward``); ``block``: copies of the gradient inside that a gate needs."""
    count = _choices(form)
    row, inner, wide = count * form.h * form.e, count * form.ffn * form.e, count * form.ffn_in * form.e
    made = wide if form.ffn_in > form.ffn or activation == "squared_relu" else 0
    copies = block * inner if form.ffn_in > form.ffn else 0
    return max(
        row + 2 * inner + max(inner, 2 * row if form.bias else 0),  # gradients of the weights
        inner + made + copies,
        wide + ceil(form.rows.most / form.parts) * form.h * form.e,  # gradients of fc1
        wide + row + _added(form),
    )
