"""Schedules against the formulas of Megatron's optimizer_param_scheduler.py, from its definitions, to the bit, and against common sense."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_sp.config.schema import BatchConfig, OptimizerConfig
from megatron_sp.optim.lr_schedule import LRSchedule
from megatron_sp.training.microbatches import BatchPlan

GBS = 4
STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD = ("linear", "cosine", "exponential", "minus_sqrt")


def schedule(iters: int = 100, samples: int | None = None, **optimizer: Any) -> LRSchedule:
    config = OptimizerConfig(**{"lr": 1.0, "min_lr": 0.1} | optimizer)
    return LRSchedule.from_config(
        config, BatchConfig(train_iters=None if samples else iters, train_samples=samples), lambda steps: steps * GBS
    )


def megatron(n: int, style: str, wsd: str, warmup: float, horizon: int, anneal: int, init: float) -> float:
    """n, warmup, horizon and anneal in samples."""
    peak, floor = 1.0, 0.1
    if warmup > 0 and n <= warmup:
        return init + (peak - init) * n / warmup
    if style == "constant":
        return peak
    if n > horizon:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * max(warmup, 1) ** 0.5 / max(n, 1) ** 0.5)
    if style == "WSD":
        share = (n - (horizon - anneal)) / anneal
        coefficient = 1.0 if share <= 0 else {
            "linear": 1 - share, "cosine": 0.5 * (math.cos(math.pi * share) + 1), "exponential": 2 * 0.5**share - 1,
            "minus_sqrt": 1 - math.sqrt(max(share, 0)),
        }[wsd]  # fmt: skip
    else:
        ratio = (n - warmup) / (horizon - warmup)
        coefficient = 1 - ratio if style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1)
    return floor + coefficient * (peak - floor)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("wsd", WSD)
@pytest.mark.parametrize("warmup, init", [(0, 0.0), (10, 0.0), (10, 0.3), (1, 0.0), (99, 0.0)])
def test_is_megatrons(style: str, wsd: str, warmup: int, init: float) -> None:
    anneal = 20 if warmup < 80 else 1
    s = schedule(lr_decay_style=style, lr_wsd_decay_style=wsd, lr_warmup_iters=warmup, lr_warmup_init=init, lr_wsd_decay_iters=anneal)
    for n in range(0, 130 * GBS):
        assert s.lr(n) == megatron(n, style, wsd, warmup * GBS, 100 * GBS, anneal * GBS, init), n


def test_steps_and_samples_say_the_same() -> None:
    in_iters = schedule(lr_decay_style="WSD", lr_warmup_iters=10, lr_decay_iters=90, lr_wsd_decay_iters=30)
    in_samples = schedule(
        samples=100 * GBS, lr_decay_style="WSD", lr_warmup_samples=10 * GBS, lr_decay_samples=90 * GBS, lr_wsd_decay_samples=30 * GBS
    )
    assert in_iters == in_samples


@pytest.mark.parametrize("fraction, warmup", [(0.0, 0), (0.1, 10), (0.5, 50)])
def test_warm_up_as_a_share_of_the_horizon(fraction: float, warmup: int) -> None:
    assert schedule(lr_warmup_fraction=fraction) == schedule(lr_warmup_iters=warmup)
    assert schedule(lr_warmup_fraction=fraction, lr_decay_iters=50).warmup == warmup * GBS / 2
    assert schedule(lr_warmup_fraction=fraction, lr_warmup_iters=33).warmup == warmup * GBS  # the fraction wins
    assert schedule(iters=101, lr_warmup_fraction=0.01).warmup == 0.01 * 404, "a share is not rounded to samples"


def test_the_horizon_is_the_run_unless_said_otherwise() -> None:
    assert schedule(iters=70).horizon == 70 * GBS
    assert schedule(iters=70, lr_decay_iters=30).lr(31 * GBS) == 0.1
    assert schedule(samples=123).horizon == 123


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_the_ramp_of_the_weight_decay_is_megatrons(style: str) -> None:
    ramp = {} if style == "constant" else {"start_weight_decay": 0.04}
    s = schedule(weight_decay_incr_style=style, end_weight_decay=0.4, **ramp)
    for n in range(0, 130 * GBS):
        ratio = min(n / (100 * GBS), 1.0)
        share = {"constant": 1.0, "linear": ratio, "cosine": 0.5 * (math.cos(math.pi * (1 - ratio)) + 1)}[style]
        first = ramp.get("start_weight_decay", 0.4)
        assert s.weight_decay(n) == (0.4 if n > 100 * GBS else first + share * (0.4 - first))


def test_the_horizon_of_the_learning_rate_does_not_bend_the_weight_decay() -> None:
    s = schedule(weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=1.0, lr_decay_iters=10)
    assert s.weight_decay(50 * GBS) == pytest.approx(0.5)


def test_it_can_be_stored_and_rebuilt() -> None:
    s = schedule(lr_decay_style="WSD", lr_wsd_decay_iters=7)
    assert LRSchedule(**s.state()) == s


@pytest.mark.parametrize("style", ["linear", "cosine", "WSD"])
def test_steps_are_those_of_the_run_also_while_the_batch_grows(style: str) -> None:
    """Warm-up, the final decay and the run end at the step that the flags say, not after as many full batches."""
    batch = BatchConfig(train_iters=20, global_batch_size=8, micro_batch_size=2, rampup_batch_size=(2, 2, 40))
    plan = BatchPlan.from_config(batch, 1)
    flags = {"lr_warmup_iters": 2, "lr_wsd_decay_iters": 5, "start_weight_decay": 0.0, "end_weight_decay": 1.0}
    config = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style=style, weight_decay_incr_style="linear", **flags)  # type: ignore[arg-type]
    s = LRSchedule.from_config(config, batch, plan.samples_after)
    lr = {steps: s.lr(plan.samples_after(steps)) for steps in range(22)}  # of the step after so many others
    assert lr[0] == 0.0 and lr[1] == 0.5 and lr[2] == 1.0 and lr[20] == pytest.approx(0.1) and lr[21] == 0.1
    assert s.weight_decay(plan.samples_after(20)) == 1.0 > s.weight_decay(plan.samples_after(19))
    if style == "WSD":
        assert lr[15] == 1.0 > lr[16]


@pytest.mark.parametrize("style", STYLES)
def test_a_rate_of_its_own_for_embeddings_has_the_shape_between_its_own_ends(style: str) -> None:
    length: dict[str, Any] = {"lr_wsd_decay_iters": 20} if style == "WSD" else {}
    flags = {"lr_decay_style": style, "lr_warmup_iters": 10, "lr_warmup_init": 0.05, **length}
    both = schedule(decoupled_lr=3.0, decoupled_min_lr=0.2, **flags)
    alone = schedule(lr=3.0, min_lr=0.2, **flags)
    floor_of_all = schedule(decoupled_lr=3.0, **flags)
    for n in range(0, 440, 4):
        assert both.decoupled_lr(n) == alone.lr(n) and both.lr(n) == schedule(**flags).lr(n)
        assert floor_of_all.decoupled_lr(n) == schedule(lr=3.0, **flags).lr(n)
    assert schedule(**flags).decoupled_lr(0) is None
