"""Products of some rows or columns at a time equal the product of all."""

from __future__ import annotations

import pytest
import torch
from support.errors import FP64, assert_law
from support.op_checks import PoisonedSink, randn
from torch import Tensor

from megatron_sp.parallel.split_projection import HeadColumns, RowWiseGrad, project_pieces, project_to_ranks, put_grad_of_columns, take
from megatron_sp.parallel.tensor_parallel import NO_TP

S, B, H = 3, 2, 5
TOKENS = S * B


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [[4, 4, 4], [6], [5, 0, 3], [2, 4]], ids=str)
def test_each_rank_gets_its_columns_as_one_block(widths: list[int], bias: bool) -> None:
    a, weight, b = randn(TOKENS, H), randn(sum(widths), H), randn(sum(widths)) if bias else None
    out = torch.full((TOKENS * sum(widths),), float("nan"), dtype=a.dtype)
    project_to_ranks(a, weight, b, widths, out)
    y = torch.nn.functional.linear(a, weight, b)
    want = torch.cat([part.reshape(-1) for part in y.split(widths, dim=1)])
    assert_law({"y": out}, {"y": want}, FP64)


def pieces_of(x: Tensor, cuts: list[slice]) -> list[HeadColumns]:
    return [(cut, x[:, cut].contiguous()) for cut in cuts]


CUTS = {"one": [slice(0, 9)], "two": [slice(4, 9), slice(0, 4)], "four": [slice(0, 2), slice(6, 9), slice(2, 3), slice(3, 6)]}


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cuts", CUTS)
def test_pieces_add_up_to_the_product(cuts: str, bias: bool, residual: bool) -> None:
    x, weight, b, r = randn(TOKENS, 9), randn(H, 9), randn(H) if bias else None, randn(S, B, H) if residual else None
    given = pieces_of(x, CUTS[cuts])
    y, kept = project_pieces(iter(given), (weight, b), r, NO_TP, batch=B)
    want = torch.nn.functional.linear(x, weight, b).view(S, B, H) + (0 if r is None else r)
    assert_law({"y": y}, {"y": want}, FP64)
    assert all(a is b for a, b in zip(kept, given, strict=True)) or [c for c, _ in kept] == CUTS[cuts], "backward needs all of them"


@pytest.mark.parametrize("cuts", CUTS)
def test_the_weight_gradient_of_pieces(cuts: str) -> None:
    x, grad, weight = randn(TOKENS, 9), randn(TOKENS, H), randn(H, 9)
    pieces, want = pieces_of(x, CUTS[cuts]), {"w": grad.t() @ x}
    assert_law({"w": put_grad_of_columns(None, weight, grad, pieces)}, want, FP64)
    main_grad = PoisonedSink(weight)
    for times in (1, 2):
        assert put_grad_of_columns(main_grad, weight, grad, pieces) is None
        assert_law({"w": main_grad.views[id(weight)]}, {"w": times * want["w"]}, FP64)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("messages", [[[0, 1, 2], [3, 4, 5]], [[5, 1], [0, 3, 4], [2]], [[0, 1, 4], [4, 5, 2, 3]]], ids=str)
def test_rows_add_up_to_the_gradient(messages: list[list[int]], held: bool) -> None:
    """In the last case row 4 comes twice: both contributions count."""
    weight, x, whole = randn(6, H), randn(TOKENS, H), randn(TOKENS, 6)
    main_grad = PoisonedSink(weight) if held else None
    rows = [row for message in messages for row in message]
    times = torch.tensor([rows.count(row) for row in range(6)], dtype=torch.float64)[:, None]
    for step in (1, 2):
        grad = RowWiseGrad(main_grad, weight, rows_differ=len(set(rows)) == len(rows))
        for message in messages:
            grad.put_product(whole[:, message], x, [slice(row, row + 1) for row in message])
        result = grad.result()
        assert (result is None) == held
        got = result if main_grad is None else main_grad.views[id(weight)]
        assert_law({"w": got}, {"w": (step if held else 1) * times * (whole.t() @ x)}, FP64)


def test_taken_rows_are_a_view_where_they_are_one_run() -> None:
    weight = randn(6, H)
    assert take(weight, [slice(2, 5)]).data_ptr() == weight[2:].data_ptr()
    assert torch.equal(take(weight, [slice(4, 6), slice(0, 1)]), weight[[4, 5, 0]])
    assert take(weight, []).shape == (0, H)
