"""The MLP over pieces as an op: pieces, gradients with and without a main_grad, what is kept, and which inputs need no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.errors import FP64, assert_law, law_error
from support.op_checks import PoisonedSink, gradients, in_blocks, leaves, randn
from torch import Tensor

from megatron_sp.config.schema_model import ActivationName
from megatron_sp.ops.activation import Activation
from megatron_sp.ops.dropout import DropoutKeys, DropoutRows, hash_dropout
from megatron_sp.ops.norm import NormInFront, NormSpec
from megatron_sp.parallel.chunked_mlp import MLPPlan, chunked_mlp
from megatron_sp.parallel.linear import column_linear, row_linear

__all__ = ["in_blocks"]
S, B, H, F = 7, 3, 5, 11
LAYER, RMS = NormSpec("LayerNorm", 1e-5), NormSpec("RMSNorm", 1e-6)
KEYS = DropoutKeys.create(1, 2, torch.arange(B), torch.arange(S)).row_keys(0, 2)


def inputs(activation: ActivationName, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    wide = F * Activation(activation).width_factor
    made = {"x": randn(S, B, H), "norm": randn(H) + 1, "w1": randn(wide, H), "w2": randn(H, F, seed=1)}
    made |= {"norm_bias": randn(H, seed=2), "b1": randn(wide), "b2": randn(H, seed=3)} if bias else {}
    return {name: t.to(dtype) for name, t in made.items()}


def norm_of(t: dict[str, Tensor]) -> NormInFront | None:
    return NormInFront(LAYER if "norm_bias" in t else RMS, t["norm"], t.get("norm_bias")) if "norm" in t else None


def pieces_of(t: dict[str, Tensor], activation: ActivationName, chunks: int, rate: float = 0.0, main_grad: Any = None) -> Tensor:
    norm, fc1, fc2 = norm_of(t), (t["w1"], t.get("b1")), (t["w2"], t.get("b2"))
    plan = MLPPlan(Activation(activation), chunks, rate=rate)
    return chunked_mlp(t["x"], norm, fc1, fc2, plan, rows=DropoutRows(KEYS) if rate else None, onto=t.get("onto"), main_grad=main_grad)


def whole(t: dict[str, Tensor], activation: ActivationName, rate: float = 0.0) -> Tensor:
    wide, x = column_linear(t["x"], t["w1"], t.get("b1"), norm=norm_of(t))
    out = row_linear(wide, t["w2"], t.get("b2"), activation=Activation(activation))
    return hash_dropout(out, rate, KEYS, residual=t.get("onto", x))


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 50])
@pytest.mark.parametrize(
    ("activation", "bias", "rate"), [("gelu_tanh", True, 0.0), ("gelu", True, 0.3), ("swiglu", False, 0.0), ("squared_relu", False, 0.3)]
)
def test_is_the_mlp_in_one_piece(activation: ActivationName, bias: bool, rate: float, chunks: int) -> None:
    tensors, grad = leaves(**inputs(activation, bias=bias)), randn(S, B, H, seed=4)
    want = gradients(lambda t: whole(t, activation, rate), tensors, grad)
    assert_law(gradients(lambda t: pieces_of(t, activation, chunks, rate), tensors, grad), want, FP64)


@pytest.mark.parametrize("frozen", [(), ("x",)])
def test_without_a_norm_in_front(frozen: tuple[str, ...]) -> None:
    tensors, grad = {name: t for name, t in inputs("gelu").items() if "norm" not in name}, randn(S, B, H, seed=4)
    want = gradients(lambda t: whole(t, "gelu", 0.3), leaves(frozen, **tensors), grad)
    assert_law(gradients(lambda t: pieces_of(t, "gelu", 3, 0.3), leaves(frozen, **tensors), grad), want, FP64)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("without", [(), ("norm", "norm_bias")], ids=["norm", "no norm"])
@pytest.mark.parametrize("frozen", [(), ("x",), ("onto",)], ids=str)
def test_onto_another_stream(rate: float, without: tuple[str, ...], frozen: tuple[str, ...]) -> None:
    """The input gets the branch's gradient alone, the other stream what arrives."""
    tensors, grad = {name: t for name, t in inputs("gelu").items() if name not in without}, randn(S, B, H, seed=4)
    tensors["onto"] = randn(S, B, H, seed=5)
    want = gradients(lambda t: whole(t, "gelu", rate), leaves(frozen, **tensors), grad)
    assert_law(gradients(lambda t: pieces_of(t, "gelu", 3, rate), leaves(frozen, **tensors), grad), want, FP64)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_the_main_grad_gets_every_gradient_once_and_adds_the_next(rate: float) -> None:
    """A first piece that adds, or a second that overwrites, would show."""
    tensors, grad = leaves(**inputs("swiglu")), randn(S, B, H, seed=4)
    want = gradients(lambda t: whole(t, "swiglu", rate), leaves(**tensors), grad)
    main_grad = PoisonedSink(*(t for name, t in tensors.items() if name != "x"))
    for times in (1, 2):
        pieces_of(tensors, "swiglu", 3, rate, main_grad).backward(grad)
        assert all(t.grad is None for name, t in tensors.items() if name != "x")
        got = {name: main_grad.views[id(t)] for name, t in tensors.items() if name != "x"}
        assert_law(got, {name: times * want[name] for name in got}, FP64)  # type: ignore[operator]


@pytest.mark.parametrize("frozen", [("x",), ("norm", "norm_bias"), ("x", "norm", "norm_bias"), ("w1", "b2"), ("w2", "b1")], ids=str)
def test_what_needs_no_gradient_gets_none(frozen: tuple[str, ...]) -> None:
    tensors, grad = leaves(frozen, **inputs("gelu")), randn(S, B, H, seed=4)
    want = gradients(lambda t: whole(t, "gelu"), tensors, grad)
    assert_law(gradients(lambda t: pieces_of(t, "gelu", 3), tensors, grad), want, FP64)


def test_pieces_in_16_bits_are_added_up_in_32() -> None:
    """As exact with one piece for each position as with one for all."""
    tensors, grad = inputs("gelu", dtype=torch.bfloat16), randn(S, B, H, seed=4)
    want = gradients(lambda t: whole(t, "gelu"), leaves(**{n: t.double() for n, t in tensors.items()}), grad)
    for main_grad_dtype in (None, torch.float32):
        errors = []
        for chunks in (1, S):
            mine = leaves(**tensors)
            main_grad = PoisonedSink(mine["w1"], mine["w2"], dtype=main_grad_dtype) if main_grad_dtype else None
            pieces_of(mine, "gelu", chunks, 0.0, main_grad).backward(grad.bfloat16())
            got = {n: main_grad.views[id(mine[n])] if main_grad else mine[n].grad for n in ("w1", "w2")}
            errors.append(max(law_error(got[n], want[n]) for n in got))  # type: ignore[arg-type]
        assert errors[1] < 1.5 * errors[0] < 0.03


def test_only_the_stream_is_kept() -> None:
    tensors, kept = leaves(**inputs("swiglu")), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        pieces_of(tensors, "swiglu", 3, 0.3)
    assert sum(t.numel() for t in kept if t.shape[:2] == (S, B) and t.is_floating_point()) == S * B * H


def test_the_largest_wide_tensor_is_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    target = "megatron_sp.parallel.chunked_mlp.empty"
    monkeypatch.setattr(target, lambda shape, **kw: asked.append(tuple(shape)) or torch.empty(shape, **kw))
    pieces_of(leaves(**inputs("gelu")), "gelu", 3).backward(randn(S, B, H))
    assert max(shape[0] for shape in asked if shape[-1] == F) == 3, "7 positions: 2, 2 and 3"


def test_pieces_cover_all_positions_and_are_those_of_the_plan() -> None:
    for positions in (1, 2, 7, 8, 30):
        for chunks in (1, 2, 3, 8, 100):
            runs = MLPPlan(Activation("gelu"), chunks).pieces(positions)
            assert [i for run in runs for i in range(run.start, run.stop)] == list(range(positions))
            sizes = [run.stop - run.start for run in runs]
            assert max(sizes) - min(sizes) <= 1 and len(sizes) == min(chunks, positions)
