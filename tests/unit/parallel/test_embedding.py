"""Table look-up: values, the gradient by index, and the main_grad."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.errors import FP64, assert_law, law_error
from support.op_checks import PoisonedSink, gradients, leaves, randn

from megatron_sp.parallel.linear import embedding

ROWS, H = 11, 5


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Without the last three rows, and with repetitions."""
    return torch.randint(0, ROWS - 3, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(8, 3), (8,), (), (0,), (2, 3, 4), (200,)])
def test_is_torchs_with_and_without_a_main_grad(shape: tuple[int, ...]) -> None:
    index, grad = ids(*shape), randn(*shape, H, seed=1)
    want = gradients(lambda i: F.embedding(index, i["weight"]), leaves(weight=randn(ROWS, H)), grad)
    assert_law(gradients(lambda i: embedding(index, i["weight"]), leaves(weight=randn(ROWS, H)), grad), want, FP64)
    inputs = leaves(weight=randn(ROWS, H))
    main_grad = PoisonedSink(inputs["weight"])
    got = gradients(lambda i: embedding(index, i["weight"], main_grad=main_grad), inputs, grad)
    assert got["weight"] is None
    assert_law(got | {"weight": main_grad.of(inputs["weight"])}, want, FP64)
    assert not main_grad.of(inputs["weight"])[ROWS - 3 :].any()


def test_micro_batches_add_up_and_the_order_of_writers_does_not_matter() -> None:
    """With a tied head the main_grad's buffer has been written by somebody else first."""
    inputs, total = leaves(weight=randn(ROWS, H)), torch.zeros(ROWS, H, dtype=torch.float64)
    main_grad = PoisonedSink(inputs["weight"])
    view, _ = main_grad.reserve(inputs["weight"])  # type: ignore[misc]
    view.copy_(head := randn(ROWS, H, seed=9))
    for seed in range(3):
        grad = randn(8, 3, H, seed=seed)
        got = gradients(lambda i, seed=seed: embedding(ids(8, 3, seed=seed), i["weight"], main_grad=main_grad), inputs, grad)
        total.index_add_(0, ids(8, 3, seed=seed).flatten(), grad.flatten(0, 1))
        assert got["weight"] is None
    assert law_error(main_grad.of(inputs["weight"]), head + total) <= FP64


@pytest.mark.parametrize("with_main_grad", [True, False])
def test_half_precision_gradients_are_summed_in_fp32(with_main_grad: bool) -> None:
    """A frequent token: 4096 gradients of 1 are 4096, where a bf16 running sum stops at 256."""
    inputs = leaves(weight=randn(ROWS, H, dtype=torch.bfloat16))
    main_grad = PoisonedSink(inputs["weight"], dtype=torch.float32) if with_main_grad else None
    got = gradients(
        lambda i: embedding(torch.full((4096,), 2), i["weight"], main_grad=main_grad), inputs, torch.ones(4096, H, dtype=torch.bfloat16)
    )
    weight_grad = main_grad.of(inputs["weight"]) if main_grad is not None else got["weight"]
    assert weight_grad is not None and (weight_grad[2] == 4096).all() and weight_grad.sum() == 4096 * H
    assert weight_grad.dtype == (torch.float32 if with_main_grad else torch.bfloat16)


def test_strides_of_ids_and_gradient_do_not_matter() -> None:
    index, grad = ids(3, 8).t(), randn(3, H, 8, seed=1).permute(2, 0, 1)
    want = gradients(lambda i: F.embedding(index, i["weight"]), leaves(weight=randn(ROWS, H)), grad)
    assert_law(gradients(lambda i: embedding(index, i["weight"]), leaves(weight=randn(ROWS, H)), grad), want, FP64)


def test_a_frozen_table_needs_no_backward() -> None:
    out = embedding(ids(4), randn(ROWS, H), main_grad=PoisonedSink())
    assert not out.requires_grad


def test_an_id_outside_the_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        embedding(torch.tensor([ROWS]), randn(ROWS, H))
