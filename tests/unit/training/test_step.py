"""A training step on one process: what it computes, compared with plain PyTorch, and in which order it does what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.tiny import BASE, Batch, loss_of, make_batch
from torch import Tensor

from megatron_sp.comm.collectives import Handle
from megatron_sp.comm.groups import SINGLE_RANK, ParallelGroups
from megatron_sp.config.schema import Config, KernelConfig, OptimizerConfig
from megatron_sp.models.gpt import GPTModel
from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.tasks.gpt import GPT
from megatron_sp.training.sharding import build_sharded
from megatron_sp.training.step import Losses, StepOptions, StepParts, StepResult, TrainStep, evaluate_batches
from megatron_sp.utils.faults import FAULT_VARIABLE, FaultPlan

ALONE = cast(
    "ParallelGroups",
    SimpleNamespace(rank=0, world=SINGLE_RANK, tp_rank=0, dp_rank=0, dp_size=1, is_first_of_replica=True, cp=SINGLE_RANK, pp=SINGLE_RANK),
)  # fmt: skip
EPS = 1.0  # so large that the size of a gradient shows in Adam's first update, and with it a wrong clip or scale
BATCHES = [make_batch(seed=1), make_batch(seed=2, mask=0.3)]


def build_model(config: Config, layout: ParallelContext, on_unit: Any = None) -> GPTModel:
    return GPTModel(BASE, KernelConfig(), seed=5, dtype=torch.float64, layout=layout, on_unit=on_unit)


def make_scaler(enabled: bool = False, initial: float = 8.0) -> LossScaler:
    return LossScaler(enabled=enabled, fixed=None, initial=initial, minimum=1.0, window=100, hysteresis=1)


def make_step(
    *, clip: float = 0.0, scaler: LossScaler | None = None, options: StepOptions | None = None, faults: FaultPlan | None = None
) -> TrainStep:  # fmt: skip
    sharded = build_sharded(build_model, Config(), ParallelContext(), None, torch.device("cpu"))
    optimizer = FlatOptimizer(sharded.units, OptimizerConfig(adam_eps=EPS, clip_grad=clip))
    parts = StepParts(sharded.model, sharded.weights, sharded.gradients, optimizer, scaler or make_scaler())
    return TrainStep(parts, GPT.loss, ALONE, options or StepOptions(7, False, "sdpa"), faults or FaultPlan())


def run(step: TrainStep, number: int = 1, batches: list[Batch] = BATCHES, **more: Any) -> StepResult:
    return step.run([dict(batch) for batch in batches], number, lr=0.1, weight_decay=0.0, **more)


def weights_of(step: TrainStep) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in step.model.named_parameters()}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys() and [name for name in want if not torch.equal(got[name], want[name])] == []


def planned(monkeypatch: pytest.MonkeyPatch, plan: str) -> FaultPlan:
    monkeypatch.setenv(FAULT_VARIABLE, plan)
    return FaultPlan.from_env(True, 0)


def plain_step(clip: float) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and new weights by torch alone: one backward of the mean over all loss tokens."""
    model = build_model(Config(), ParallelContext())
    loss = sum(loss_of(model, batch) for batch in BATCHES) / sum(batch["loss_mask"].sum() for batch in BATCHES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.999), eps=EPS, weight_decay=0.0)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)
    optimizer.step()
    return float(loss), float(norm), {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_step_is_one_update_by_the_mean_over_all_loss_tokens(clip: float) -> None:
    """Not a mean of the micro-batches' means: theirs have different numbers of loss tokens."""
    step = make_step(clip=clip)
    result = run(step)
    loss, norm, weights = plain_step(clip)
    assert norm > 0.1, "or nothing would be clipped"
    assert result.losses == pytest.approx([loss], rel=1e-12) and result.grad_norm == pytest.approx(norm, rel=1e-10)
    assert result.updated and not result.overflow and not result.stop_requested
    assert result.num_loss_tokens == pytest.approx(float(sum(batch["loss_mask"].sum() for batch in BATCHES)))
    for name, got in weights_of(step).items():
        torch.testing.assert_close(got, weights[name], rtol=0, atol=1e-9, msg=name)  # clipping adds 1e-6 to the norm, as torch's does


@pytest.fixture(params=[True, False], ids=["update on the device", "update by the host"])
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the update is queued before the host knows that it takes place."""
    if not request.param:
        monkeypatch.setattr(FlatOptimizer, "updates_on_device", False)
    return bool(request.param)


def test_what_happens_in_which_order(on_device: bool) -> None:
    """Counts before any forward; a unit may be reduced under the last backward only; nobody reads weights while they are updated."""
    step, log = make_step(), list[str]()

    def spy(owner: Any, name: str, label: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def called(*args: Any, **named: Any) -> Any:
            log.append(label)
            return original(*args, **named)

        object.__setattr__(owner, name, called)

    step.loss = replace(GPT.loss)
    spy(step.loss, "counts", "count")
    spy(step.loss, "sums", "forward")
    for name in ("start_step", "last_micro_batch", "finish_micro_batch", "finish_step"):
        spy(step.gradients, name, f"gradients.{name}")
    for name in ("start_step", "forget"):
        spy(step.weights, name, f"weights.{name}")
    spy(step.optimizer, "grad_norm", "norm")
    spy(step.scaler, "update", "scaler")
    spy(step, "before_update", "before_update")
    spy(step.optimizer, "step_on_device" if on_device else "step", "optimizer")
    run(step)
    update = ["before_update", "optimizer", "scaler"] if on_device else ["scaler", "before_update", "optimizer"]
    assert log == [
        "count", "count",
        "gradients.start_step", "weights.start_step",
        "forward", "gradients.finish_micro_batch",
        "forward", "gradients.last_micro_batch", "gradients.finish_micro_batch",
        "gradients.finish_step", "norm", *update, "weights.forget",
    ]  # fmt: skip


@pytest.mark.parametrize("place", ["loss", "grad"])
def test_a_step_that_is_not_finite_changes_nothing(monkeypatch: pytest.MonkeyPatch, place: str, on_device: bool) -> None:
    step = make_step(faults=planned(monkeypatch, f"nan:at={place}:step=1"))
    before, copies = weights_of(step), list[int]()
    step.before_update = lambda: copies.append(1)
    result = run(step, 1)
    assert not result.updated and not result.overflow and copies == [1] * on_device and step.optimizer.num_updates == 0
    assert not any(t.any() for state in step.optimizer.states for t in (state.exp_avg, state.exp_avg_sq) if t is not None)
    assert result.grad_norm != result.grad_norm, "NaN is reported as it is"
    assert_equal(weights_of(step), before)
    again, fresh = run(step, 2), make_step()
    assert again.updated and copies == [1] * (1 + on_device) and again.losses == run(fresh, 2).losses
    assert_equal(weights_of(step), weights_of(fresh))


def test_an_infinite_loss_is_skipped_even_if_its_gradients_are_finite(on_device: bool) -> None:
    def sums(*given: Any) -> list[Tensor]:
        return [term + float("inf") for term in GPT.loss.sums(*given)]

    step = make_step()
    step.loss, before = replace(GPT.loss, sums=sums), weights_of(step)
    result = run(step)
    assert result.losses == [float("inf")] and result.grad_norm < float("inf") and not result.updated
    assert_equal(weights_of(step), before)


@pytest.mark.parametrize(("place", "is_ordinary"), [("grad", True), ("loss", False)])
def test_an_overflow_of_fp16_lowers_the_scale_and_only_of_gradients_is_ordinary(
    monkeypatch: pytest.MonkeyPatch, place: str, is_ordinary: bool, on_device: bool
) -> None:
    step = make_step(scaler=make_scaler(enabled=True), faults=planned(monkeypatch, f"nan:at={place}"))
    result = run(step)
    assert not result.updated and result.overflow is is_ordinary and step.scaler.scale == 4.0


def test_a_term_without_tokens_that_is_not_finite_does_not_count(on_device: bool) -> None:
    """Its loss is 0 on the host; the device must not leave out a step that the host takes for updated."""

    def counts(batch: Any) -> list[Tensor]:
        return [*GPT.loss.counts(batch), torch.zeros((), dtype=torch.float64)]

    def sums(*given: Any) -> list[Tensor]:
        return [*GPT.loss.sums(*given), torch.full((), float("inf"), dtype=torch.float64)]

    step = make_step()
    step.loss, before = replace(GPT.loss, names=("loss", "none"), counts=counts, sums=sums), weights_of(step)
    result = run(step)
    assert result.losses[1] == 0.0 and result.updated == (result.grad_norm < float("inf"))
    assert result.updated == any(not torch.equal(t, before[name]) for name, t in weights_of(step).items())


def test_both_ways_of_an_update_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipped or not, to the last bit."""
    for clip in (0.0, 0.05, 1e6):
        device, host = make_step(clip=clip), make_step(clip=clip)
        monkeypatch.setattr(FlatOptimizer, "updates_on_device", True)
        for number in (1, 2):
            run(device, number)
        monkeypatch.setattr(FlatOptimizer, "updates_on_device", False)
        for number in (1, 2):
            run(host, number)
        assert_equal(weights_of(device), weights_of(host))


def test_clipping_in_fp64_is_not_rounded_to_fp32(on_device: bool) -> None:
    """The first moment is a multiple of the clipped gradients: it is in proportion to the bound."""
    changes = []
    for clip in (1e-3, 0.7310585786e-3):
        step = make_step(clip=clip)
        assert run(step).grad_norm > 10 * clip
        changes.append(moments_of(step))
    for name, first in changes[0].items():
        torch.testing.assert_close(first * 0.7310585786, changes[1][name], rtol=1e-12, atol=0, msg=name)


def moments_of(step: TrainStep) -> dict[str, Tensor]:
    """Adam's first moment of each unit."""
    return {str(i): state.exp_avg.clone() for i, state in enumerate(step.optimizer.states)}


def test_the_loss_scale_cancels(on_device: bool) -> None:
    """A power of two is exact: norm and update are those of scale 1, to the last bit."""
    scaled, plain = make_step(clip=0.05, scaler=make_scaler(enabled=True)), make_step(clip=0.05)
    a, b = run(scaled), run(plain)
    assert (a.losses, a.grad_norm) == (b.losses, b.grad_norm)
    for name, got in weights_of(scaled).items():
        torch.testing.assert_close(got, weights_of(plain)[name], rtol=0, atol=1e-15, msg=name)


def test_micro_batches_without_loss_tokens_count_for_nothing() -> None:
    empty = {**BATCHES[0], "loss_mask": torch.zeros_like(BATCHES[0]["loss_mask"])}
    both, one = make_step(), make_step()
    assert run(both, batches=[empty, BATCHES[1]]).losses == run(one, batches=[BATCHES[1]]).losses
    nothing = run(make_step(), batches=[empty])
    assert (nothing.losses, nothing.grad_norm, nothing.num_loss_tokens, nothing.updated) == ([0.0], 0.0, 0.0, True)


def test_a_wish_to_stop_and_digests_come_back_with_the_totals() -> None:
    digests = [torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.tensor([4.0, 5.0, 2.0**53 - 1], dtype=torch.float64)]
    places = [torch.tensor([0, 2, 5]), torch.tensor([1, 4, 3])]
    result = run(make_step(), stop=True, digests=digests, places=places)
    assert result.stop_requested and result.sample_digests == [1, 4, 2, 2**53 - 1, 5, 3]
    assert run(make_step()).sample_digests == []


def test_what_draws_from_torchs_generator_is_keyed_by_seed_and_step() -> None:
    def seed_after(options: StepOptions, number: int) -> int:
        torch.manual_seed(99)
        run(make_step(options=options), number)
        return torch.initial_seed()

    keyed = StepOptions(7, True, "sdpa")
    assert seed_after(keyed, 1) == seed_after(keyed, 1) != seed_after(keyed, 2)
    assert seed_after(keyed, 1) != seed_after(StepOptions(8, True, "sdpa"), 1)
    assert seed_after(StepOptions(7, False, "sdpa"), 1) == 99, "without dropout nothing is drawn"
    assert seed_after(StepOptions(7, True, "reference"), 1) == 99, "our own masks are keyed by position"
    assert seed_after(StepOptions(7, True, "reference", torch_dropout=True), 1) != 99


def test_an_evaluation_sums_and_leaves_no_gradients() -> None:
    step = make_step()
    before = weights_of(step)
    found = evaluate_batches(step.model, GPT.loss, [dict(batch) for batch in BATCHES], "sdpa", ALONE, step.weights)
    loss, _, _ = plain_step(0.0)
    assert found.dtype == torch.float64 and float(found[0] / found[1]) == pytest.approx(loss, rel=1e-12)
    assert all(p.grad is None for p in step.model.parameters()) and not found.requires_grad
    assert_equal(weights_of(step), before)


@pytest.mark.parametrize("has_head", [False, True])
def test_totals_have_arrived_when_the_sums_are_read(has_head: bool) -> None:
    """A rank of a pipeline without the head adds up no losses, but the totals are read there, too."""
    totals = torch.zeros(2, dtype=torch.float64)
    arrive = lambda: totals.copy_(torch.tensor([4.0, 1.0]))
    losses = Losses(1, totals, Handle(None, totals, "totals", arrive), 1.0)
    if has_head:
        assert losses.add([torch.tensor(6.0)]).item() == 1.5
    assert losses.finish().tolist() == [6.0 if has_head else 0.0]
    assert totals.tolist() == [4.0, 1.0]
