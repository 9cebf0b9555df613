"""Every op on the GPU against the same op on the CPU, whose own tests compare it with plain formulas: output and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.errors import FP32, FP64, assert_law, law_error
from support.op_checks import PoisonedSink, randn
from torch import Tensor

from megatron_sp.ops.activation import Activation
from megatron_sp.ops.attention import head_row_keys
from megatron_sp.ops.dropout import DropoutKeys, hash_dropout, keep_mask
from megatron_sp.ops.main_grad import put_product
from megatron_sp.ops.norm import NormInFront, NormSpec, norm
from megatron_sp.ops.rotary import apply_rotary, rotary_tables
from megatron_sp.parallel.linear import column_linear, embedding, row_linear
from megatron_sp.parallel.lm_head import default_chunk_tokens, lm_head_loss
from megatron_sp.parallel.split_projection import project_to_ranks

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [(torch.float64, FP64), (torch.float32, FP32), (torch.bfloat16, 2e-2)]  # bf16 rounds at 2^-9, several times in a row
Tensors = dict[str, Tensor]


def both(fn: Callable[[Tensors], Tensor], inputs: Tensors, dtype: torch.dtype, tolerance: float) -> None:
    """Compare fn's output and gradients on the GPU with those in fp64 on the CPU, from the same (rounded) inputs."""
    rounded = {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}
    found = []
    for device, kind in ((CUDA, dtype), (torch.device("cpu"), torch.float64)):
        moved = {
            n: t.detach().to(device, kind, copy=True).requires_grad_() if t.is_floating_point() else t.to(device)
            for n, t in rounded.items()
        }
        out = fn(moved)
        out.backward(randn(1, *out.shape, seed=99)[0].to(dtype).to(device, out.dtype))
        grads = {n: t.grad.cpu().double() for n, t in moved.items() if t.grad is not None}
        found.append({"out": out.detach().cpu().double(), **grads})
    assert_law(found[0], found[1], tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("kind, zero_centered", [("LayerNorm", False), ("LayerNorm", True), ("RMSNorm", False), ("RMSNorm", True)])
def test_norm(kind: Any, zero_centered: bool, dtype: torch.dtype, tolerance: float) -> None:
    spec = NormSpec(kind, 1e-5, zero_centered)
    inputs = {"x": randn(37, 3, 64), "weight": randn(64, seed=1)} | ({"bias": randn(64, seed=2)} if kind == "LayerNorm" else {})
    both(lambda i: norm(i["x"], i["weight"], i.get("bias"), spec), inputs, dtype, tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_column_linear_behind_a_norm(bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    inputs = {"x": randn(24, 3, 32), "w": 0.2 * randn(40, 32), "nw": randn(32, seed=3), "nb": randn(32, seed=4)}
    inputs |= {"b": randn(40, seed=5)} if bias else {}

    def run(i: Tensors) -> Tensor:
        y, x = column_linear(i["x"], i["w"], i.get("b"), norm=NormInFront(NormSpec("LayerNorm", 1e-5), i["nw"], i["nb"]))
        return torch.cat([y, x], dim=-1)  # the residual branch has a gradient too

    both(run, inputs, dtype, tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("name", ["gelu_tanh", "gelu", "swiglu", "squared_relu"])
def test_row_linear_behind_an_activation(name: Any, dtype: torch.dtype, tolerance: float) -> None:
    activation = Activation(name)
    inputs = {"x": randn(24, 3, 32 * activation.width_factor), "w": 0.2 * randn(40, 32), "b": randn(40), "residual": randn(24, 3, 40)}
    both(lambda i: row_linear(i["x"], i["w"], i["b"], activation=activation, residual=i["residual"]), inputs, dtype, tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("chunk", [None, 16])
def test_lm_head(chunk: int | None, dtype: torch.dtype, tolerance: float) -> None:
    g = torch.Generator().manual_seed(3)
    labels, mask = torch.randint(0, 90, (25, 3), generator=g), (torch.rand(25, 3, generator=g) < 0.7).double()
    inputs = {"x": randn(25, 3, 32), "w": 0.3 * randn(96, 32), "labels": labels}

    def run(i: Tensors) -> Tensor:
        loss_mask = mask.to(i["x"].device)
        return lm_head_loss(i["x"], i["w"], i["labels"], loss_mask, vocab_size=90, chunk_tokens=chunk)[0] / 10

    both(run, inputs, dtype, tolerance)


def test_the_lm_head_takes_larger_chunks_than_a_cpu() -> None:
    assert default_chunk_tokens(50304, "cuda") > 4 * default_chunk_tokens(50304, "cpu")


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
def test_embedding(dtype: torch.dtype, tolerance: float) -> None:
    ids = torch.randint(0, 50, (33, 3), generator=torch.Generator().manual_seed(1))
    both(lambda i: embedding(i["ids"], i["w"]), {"w": randn(64, 16), "ids": ids}, dtype, tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("positions", [torch.arange(31), torch.arange(62).view(31, 2)])
def test_rotary(positions: Tensor, dtype: torch.dtype, tolerance: float) -> None:
    def run(i: Tensors) -> Tensor:
        wide = torch.float64 if i["x"].dtype == torch.float64 else torch.float32
        cos, sin = rotary_tables(positions.to(i["x"].device), 8, 1e4, wide)
        return apply_rotary(i["x"].clone(), cos, sin, 12, heads=4, rotated=3)

    both(run, {"x": randn(31, 2, 2 * 4 * 12)}, dtype, tolerance)


def test_dropout_keeps_the_same_elements_as_on_the_cpu() -> None:
    sample_ids, positions = torch.tensor([3, 2**40 + 1]), torch.arange(100)
    keys = [DropoutKeys.create(7, 3, sample_ids.to(d), positions.to(d)).row_keys(2, 1) for d in ("cpu", "cuda")]
    assert torch.equal(keys[0], keys[1].cpu())
    assert torch.equal(head_row_keys(keys[0], 2, 3), head_row_keys(keys[1], 2, 3).cpu())
    masks = [keep_mask(k, 256, 0.1) for k in keys]
    assert torch.equal(masks[0], masks[1].cpu()) and 0.88 < masks[0].double().mean() < 0.92
    x, residual = randn(100, 2, 256, dtype=torch.float32), randn(100, 2, 256, seed=1, dtype=torch.float32)
    assert torch.equal(hash_dropout(x, 0.1, keys[0]), hash_dropout(x.cuda(), 0.1, keys[1]).cpu())
    with_residual = hash_dropout(x.cuda(), 0.1, keys[1], residual=residual.cuda()).cpu()
    assert law_error(with_residual, hash_dropout(x, 0.1, keys[0], residual=residual)) < 1e-6  # one fused multiply-add more or less


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_reach_an_fp32_view_unrounded(dtype: torch.dtype) -> None:
    grad, x = randn(300, 24, dtype=dtype).cuda(), randn(300, 40, seed=1, dtype=dtype).cuda()
    flat = torch.full((24 * 40 + 8,), float("nan"), device=CUDA)
    view = flat[8:].view(24, 40)  # as in a flat buffer: aligned to 16 bytes and no more
    want = grad.double().t() @ x.double()
    put_product(view, grad, x, fresh=True)
    assert law_error(view, want) < 1e-5
    put_product(view, grad, x, fresh=False)
    assert law_error(view, 2 * want) < 1e-5
    assert flat[:8].isnan().all()


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
def test_a_first_gradient_overwrites_what_was_in_the_buffer(dtype: torch.dtype, tolerance: float) -> None:
    x, w = randn(30, 32, dtype=dtype).cuda().requires_grad_(), randn(24, 32, dtype=dtype).cuda().requires_grad_()
    main_grad = PoisonedSink(w, dtype=None if dtype != torch.bfloat16 else torch.float32)
    main_grad.views = {key: view.cuda() for key, view in main_grad.views.items()}
    y, _ = column_linear(x, w, main_grad=main_grad)
    y.backward(torch.ones_like(y))
    assert law_error(main_grad.of(w).cpu(), (torch.ones_like(y).double().t() @ x.double()).cpu()) < tolerance


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("widths", [[24, 24, 24], [24, 16, 0]])
@pytest.mark.parametrize("bias", [True, False])
def test_projection_into_a_send_buffer(widths: list[int], bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    a, weight, b = randn(30, 32, dtype=dtype), randn(sum(widths), 32, dtype=dtype), randn(sum(widths), dtype=dtype)
    out = torch.full((30 * sum(widths),), float("nan"), dtype=dtype, device=CUDA)
    project_to_ranks(a.cuda(), weight.cuda(), b.cuda() if bias else None, widths, out)
    whole = a.double() @ weight.double().t() + (b.double() if bias else 0)
    want = torch.cat([part.reshape(-1) for part in whole.split(widths, dim=1)])
    assert law_error(out.cpu(), want) < tolerance


def test_the_expanded_operand_is_not_copied() -> None:
    ranks, tokens, h = 8, 4096, 512
    a = torch.randn(tokens, h, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(3 * h, h, device=CUDA, dtype=torch.bfloat16)
    out = torch.empty(tokens * 3 * h, device=CUDA, dtype=torch.bfloat16)
    project_to_ranks(a, weight, None, [3 * h // ranks] * ranks, out)  # the library's workspace is there from now on
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    project_to_ranks(a, weight, None, [3 * h // ranks] * ranks, out)
    assert torch.cuda.max_memory_allocated() - before < a.numel() * a.element_size()
