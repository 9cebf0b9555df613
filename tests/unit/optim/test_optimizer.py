"""The flat optimizer against torch's own, clipping and unscaling, and the loss scale's state machine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.errors import FP64, law_error
from torch import Tensor, nn

from megatron_sp.config.schema import OptimizerConfig
from megatron_sp.optim.flat import FlatUnit, is_decayed
from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler, is_finite

SHAPES = ((3, 5), (7,), (1,), (1, 1), (), (2, 3, 4), (64, 64), (129,))
LR, DECAY = (1e-2, 3e-2, 1e-3, 0.0, 5e-2), 0.1


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=g) for shape in SHAPES]


def two_units(params: list[nn.Parameter]) -> list[FlatUnit]:
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    units = [FlatUnit("first", named[:3]), FlatUnit("frozen", []), FlatUnit("second", named[3:])]
    for unit in units:
        unit.grads.zero_()  # tests without a gradient want one of zero
    return units


def fill(units: list[FlatUnit], params: list[nn.Parameter], grads: list[Tensor], factor: float = 1.0) -> None:
    by_id = {id(p): g for p, g in zip(params, grads, strict=True)}
    for unit in units:
        for slot in unit.slots:
            slot.view(unit.grads).copy_(by_id[id(slot.param)] * factor)


def ours(config: OptimizerConfig, dtype: torch.dtype = torch.float32, steps: int = 5) -> tuple[list[nn.Parameter], list[FlatUnit]]:
    params = parameters(dtype)
    units = two_units(params)
    optimizer = FlatOptimizer(units, config)
    for step in range(steps):
        fill(units, params, gradients(step))
        optimizer.step(LR[step], DECAY, float(optimizer.grad_norm()))
    assert optimizer.num_updates == steps
    return params, units


def torchs(make: Any, steps: int = 5, dtype: torch.dtype = torch.float32, **kwargs: Any) -> list[nn.Parameter]:
    params = parameters(dtype)
    groups = [
        {"params": [p for p in params if is_decayed(p)], "weight_decay": DECAY},
        {"params": [p for p in params if not is_decayed(p)], "weight_decay": 0.0},
    ]
    optimizer = make(groups, lr=1.0, **kwargs)
    for step in range(steps):
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = g.to(dtype)
        for group in optimizer.param_groups:
            group["lr"] = LR[step]
        optimizer.step()
    return params


@pytest.mark.parametrize("beta1, beta2, eps", [(0.9, 0.999, 1e-8), (0.8, 0.95, 1e-3), (0.0, 0.9, 1e-8)])
def test_adamw_is_torchs_fused_one_bit_for_bit(beta1: float, beta2: float, eps: float) -> None:
    got, _ = ours(OptimizerConfig(clip_grad=0.0, adam_beta1=beta1, adam_beta2=beta2, adam_eps=eps))
    for g, w in zip(got, torchs(torch.optim.AdamW, fused=True, betas=(beta1, beta2), eps=eps), strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.0])
def test_sgd_is_torchs(momentum: float) -> None:
    got, _ = ours(OptimizerConfig(optimizer="sgd", clip_grad=0.0, sgd_momentum=momentum))
    for g, w in zip(got, torchs(torch.optim.SGD, fused=True, momentum=momentum), strict=True):
        # the kernel rounds differently in its vector loop and after it, and elements lie elsewhere in a flat buffer
        assert law_error(g, w) <= 1e-6


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_updates_an_fp32_master(optimizer: Any, dtype: torch.dtype) -> None:
    """The master goes the way of an fp32 run that starts from the rounded weights; parameters are the master, rounded."""
    params, units = ours(OptimizerConfig(optimizer=optimizer, clip_grad=0.0), dtype)
    wide = [nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    wide_units = two_units(wide)
    reference = FlatOptimizer(wide_units, OptimizerConfig(optimizer=optimizer, clip_grad=0.0))
    for step in range(5):
        fill(wide_units, wide, gradients(step))
        reference.step(LR[step], DECAY, 1.0)
    for unit, want in zip(units, wide_units, strict=True):
        assert unit.master.dtype == torch.float32
        for slot, wanted in zip(unit.slots, want.slots, strict=True):
            master = slot.view(unit.master)
            assert torch.equal(master, wanted.param) if optimizer == "adam" else law_error(master, wanted.param) <= 1e-6
            assert torch.equal(slot.param, master.to(dtype))
    assert all(p.dtype == dtype for p in params)


@pytest.mark.parametrize("clip, scale", [(0.5, 1.0), (0.5, 1024.0), (1e9, 1024.0), (0.0, 8.0), (1.0, 1.0)])
def test_clipping_and_unscaling_are_one_multiplication(clip: float, scale: float) -> None:
    """Against torch.nn.utils.clip_grad_norm_ on unscaled gradients."""
    params, wanted = parameters(torch.float64), parameters(torch.float64)
    units = two_units(params)
    optimizer = FlatOptimizer(units, OptimizerConfig(optimizer="sgd", clip_grad=clip, sgd_momentum=0.0))
    fill(units, params, gradients(0), scale)
    norm = float(optimizer.grad_norm()) / scale
    optimizer.step(0.1, 0.0, norm, scale)
    for p, g in zip(wanted, gradients(0), strict=True):
        p.grad = g.double()
    if clip > 0:
        torch.nn.utils.clip_grad_norm_(wanted, clip)
    for p, w in zip(params, wanted, strict=True):
        assert law_error(p, w - 0.1 * w.grad) <= FP64  # type: ignore[operator]


def test_gradients_within_the_limit_are_not_touched() -> None:
    params = parameters()
    units = two_units(params)
    fill(units, params, gradients(0), 1e-3)
    before = [u.grads.clone() for u in units]
    optimizer = FlatOptimizer(units, OptimizerConfig(clip_grad=1.0))
    assert float(optimizer.grad_norm()) < 1
    optimizer.step(0.1, 0.0, float(optimizer.grad_norm()))
    assert all(torch.equal(u.grads, b) for u, b in zip(units, before, strict=True))


def scaler(**overrides: Any) -> LossScaler:
    return LossScaler(**{"enabled": True, "fixed": None, "initial": 16.0, "minimum": 2.0, "window": 3, "hysteresis": 2} | overrides)


# (overflow?, scale after the step, ordinary?), from a scale of 16 that may not go below 2
TABLE = [
    (False, 16, None), (False, 16, None), (False, 32, None),  # the window is full: doubled
    (True, 32, True), (False, 32, None),  # hysteresis: the first overflow is free, and a good step does not give it back
    (True, 16, True), (True, 8, True),  # used up: every further overflow halves
    (False, 8, None), (False, 8, None), (True, 4, True),  # an overflow empties the window
    (False, 4, None), (False, 4, None), (False, 8, None),  # a full window gives hysteresis back
    (True, 8, True), (True, 4, True), (True, 2, True),
    (True, 2, False), (True, 2, False),  # at the minimum it is no longer ordinary
    (False, 2, None), (False, 2, None), (False, 4, None),
]  # fmt: skip


def test_the_loss_scale_follows_the_table() -> None:
    s = scaler()
    for step, (overflow, scale, ordinary) in enumerate(TABLE):
        verdict = s.update(overflow)
        assert s.scale == scale, step
        assert ordinary is None or verdict == ordinary, step


def test_the_loss_scale_goes_on_from_its_state() -> None:
    for stop in range(len(TABLE)):
        first, second = scaler(), scaler(initial=2.0**32)
        for overflow, _, _ in TABLE[:stop]:
            first.update(overflow)
        second.load_state(first.state())
        for overflow, scale, _ in TABLE[stop:]:
            second.update(overflow)
            assert second.scale == scale


@pytest.mark.parametrize(
    "overrides, scale", [({"enabled": False}, 1.0), ({"fixed": 128.0}, 128.0), ({"enabled": False, "fixed": 128.0}, 1.0)]
)
def test_a_fixed_scale_never_moves_and_no_overflow_is_ordinary(overrides: dict[str, Any], scale: float) -> None:
    s = scaler(**overrides)
    for overflow, _, _ in TABLE:
        assert s.update(overflow) is False
        assert s.scale == scale
    s.load_state({"scale": 4.0, "good_steps": 1, "hysteresis_left": 1})
    assert s.scale == scale


@pytest.mark.parametrize("overrides", [{"enabled": False}, {"fixed": 1.0}])
def test_a_scale_that_was_not_dynamic_is_not_gone_on_from(overrides: dict[str, Any]) -> None:
    s = scaler()
    s.load_state(scaler(**overrides).state())
    assert s.scale == 16.0 and s.hysteresis_left == 2


def test_is_finite() -> None:
    assert is_finite() and is_finite(1.0, -3.0)
    assert not any(is_finite(1.0, bad) for bad in (math.nan, math.inf, -math.inf))


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_parameters_with_a_rate_of_their_own(kind: str) -> None:
    """Runs of them among others, in one flat buffer: those at its ends, in its middle, and two that follow each other."""
    apart = {"p0", "p5", "p6"}
    params = parameters(torch.float64)
    units = two_units(params)
    config = OptimizerConfig(optimizer=kind, clip_grad=0.0, decoupled_lr=1.0)  # type: ignore[arg-type]
    optimizer, usual = FlatOptimizer(units, config, decoupled=apart), {}
    for step in range(3):
        fill(units, params, gradients(step))
        optimizer.step(LR[step], DECAY, float(optimizer.grad_norm()), decoupled_lr=5 * LR[step])
    for factor in (1, 5):
        own = parameters(torch.float64)
        alone = two_units(own)
        other = FlatOptimizer(alone, OptimizerConfig(optimizer=kind, clip_grad=0.0))  # type: ignore[arg-type]
        for step in range(3):
            fill(alone, own, gradients(step))
            other.step(factor * LR[step], DECAY, float(other.grad_norm()))
        usual[factor] = own
    for number, param in enumerate(params):
        assert law_error(param, usual[5 if f"p{number}" in apart else 1][number]) <= FP64
        assert law_error(param, usual[1 if f"p{number}" in apart else 5][number]) > FP64
