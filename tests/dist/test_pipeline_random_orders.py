"""Random schedules on real ranks: what the checker lets pass ends, and has the gradients of one process to the bit."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support import layouts
from support.layouts import Case
from support.random_plans import any_plan, late_weights, odd_plan
from support.ranks import run_ranks
from torch import Tensor

from megatron_sp.comm.groups import ParallelGroups, pipes
from megatron_sp.parallel.pipeline import Channels, run_pipeline
from megatron_sp.parallel.pipeline_plan import SAME_COSTS, Action, PipelinePlan, PlanError, check_plan
from megatron_sp.training import pipelined

ROWS, WIDTH = 3, 5  # rows of the first micro-batch; each has one more than the one before
Shape = tuple[tuple[int, ...], torch.dtype, torch.device]


class _Product(torch.autograd.Function):
    """x @ w, whose gradient of w is handed to the stages."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, stages: ToyStages, stage: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        ctx.stages, ctx.stage = stages, stage
        return x @ w

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        ctx.stages.product(ctx.stage, x, dy)
        return dy @ w.t(), None, None, None


class ToyStages:
    """A product and a tanh in each stage (implements ``pipeline.StageWork``); what is put off is kept, and made by W."""

    def __init__(self, plan: PipelinePlan) -> None:
        g = torch.Generator().manual_seed(3)
        draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
        self.plan, self.w = plan, [draw(WIDTH, WIDTH) for _ in range(plan.num_stages)]
        parts = [(i, j) for i in range(plan.num_micro_batches) for j in range(plan.num_slices)]
        self.x, self.target = ({(i, j): draw(ROWS + i, WIDTH) for i, j in parts} for _ in range(2))
        self.grads = [torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for _ in self.w]
        self.put_off: Action | None = None
        self.operands: dict[Action, tuple[Tensor, Tensor]] = {}
        self.ran: list[Action] = []

    def product(self, stage: int, x: Tensor, dy: Tensor) -> None:
        if self.put_off is None:
            self.grads[stage] += x.t() @ dy
        else:
            self.operands[self.put_off] = x, dy

    def shape(self, action: Action) -> Shape:
        return (ROWS + action.micro_batch, WIDTH), torch.float64, torch.device("cpu")

    def forward(self, action: Action, x: Tensor | None) -> Tensor:
        self.ran.append(action)
        first = self.x[action.micro_batch, action.slice].clone().requires_grad_() if x is None else x
        return torch.tanh(_Product.apply(first, self.w[action.stage], self, action.stage))

    def loss(self, action: Action, y: Tensor) -> Tensor:
        return (y * self.target[action.micro_batch, action.slice]).sum()

    def before_backward(self, action: Action, put_off: Action | None) -> None:
        self.put_off = put_off

    def after_backward(self, action: Action) -> None:
        self.ran.append(action)

    def weights(self, action: Action) -> None:
        self.ran.append(action)
        if self.plan.splits:
            x, dy = self.operands.pop(action)
            self.grads[action.stage] += x.t() @ dy

    def alone(self) -> list[Tensor]:
        """The gradients of one process, which goes through all stages of a slice, forward and back."""
        for i in range(self.plan.num_micro_batches):
            for j in reversed(range(self.plan.num_slices)):
                x: Tensor | None = None
                for stage in range(self.plan.num_stages):
                    x = self.forward(Action("F", stage, i, j), x)
                assert x is not None
                self.loss(Action("F", 0, i, j), x).backward()  # type: ignore[no-untyped-call]
        return self.grads


def _run_all(plans: list[PipelinePlan]) -> None:
    groups = ParallelGroups.create(torch.device("cpu"), pp_size=plans[0].num_ranks)
    me, size = groups.pp_rank, groups.pp.size()
    pairs = {(a, b) for a in range(size) for b in range(size) if a != b}
    channels = Channels(pipes(groups.mesh, pairs, groups.device), groups.pp_ranks, me)
    for number, plan in enumerate(plans):
        work, want = ToyStages(plan), ToyStages(plan).alone()
        run_pipeline(plan, channels, work)
        assert work.ran == list(plan.actions[me]) and not work.operands
        assert channels.position.action is None
        for stage in plan.stages_of(me):
            assert torch.equal(work.grads[stage], want[stage]), f"plan {number}, stage {stage}\n{plan.text()}"


def passing(rng: random.Random, p: int, count: int) -> list[PipelinePlan]:
    """So many random plans: of those in any order the ones that the checker lets pass, and odd ones."""
    found: list[PipelinePlan] = []
    while len(found) < count // 2:
        plan = any_plan(rng, p, rng.randint(1, 2), rng.randint(1, 4), rng.choice((1, 1, 2)))
        try:
            check_plan(plan)
        except PlanError:  # is never run
            continue
        found.append(plan)
    while len(found) < count:
        rank_of = rng.sample(list(range(p)) * (v := rng.randint(1, 3)), p * v)
        found.append(odd_plan(rng, rank_of, rng.randint(1, 6), rng.choice((1, 1, 2, 3)), splits=rng.random() < 0.7))
        check_plan(found[-1])
    return found


@pytest.mark.parametrize(("p", "seed", "count"), [(3, 1, 40), *(pytest.param(p, 10 + p, 250, marks=pytest.mark.long) for p in (2, 3, 4))])
def test_random_orders_have_the_gradients_of_one_process(p: int, seed: int, count: int, tmp_path: Path) -> None:
    run_ranks(_run_all, p, tmp_path, passing(random.Random(seed), p, count))


def test_what_the_checker_refuses_is_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    monkeypatch.setattr(pipelined, "plan_pipeline", lambda kind, p, v, m, n, costs: any_plan(rng, p, 2, m, n))
    pipelined._checked.cache_clear()
    try:
        for _ in range(20):
            with pytest.raises(PlanError):
                pipelined._checked("1f1b", 4, 2, 4, 1, SAME_COSTS)
    finally:
        pipelined._checked.cache_clear()


EIGHT, TIED = {"num_layers": 8, "untie_embeddings_and_output_weights": True}, {"num_layers": 8}
LLAMA = {"swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True, "position_embedding_type": "rope"}
FULL = {"recompute_granularity": "full"}


def odd(case: Case, seed: int, *, splits: bool = True) -> tuple[Case, PipelinePlan]:
    """A case with an odd order of its stages."""
    kind = {"1f1b": 1}.get(case.schedule, 2)
    rank_of = pipelined.plan_pipeline(case.schedule, case.pp, kind, 1).rank_of
    return case, odd_plan(random.Random(seed), rank_of, case.micro_batches, splits=splits)


def _taken(case: Case, plan: PipelinePlan) -> Case:
    """The case, whose pipeline takes this plan from now on."""
    groups = layouts._groups(layouts.CPU, case.tp, case.sp, case.cp, case.pp)
    pipeline = layouts._pipeline(groups, case.schedule, case.stages, case.slices)
    pipeline.plan = lambda count: plan  # type: ignore[method-assign]
    return case


def _check_all(cases: list[tuple[Case, PipelinePlan]]) -> None:
    for case, plan in cases:
        try:
            layouts.check(_taken(case, plan))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}\n{plan.text()}") from None


def models(pp: int, count: int, seed: int) -> list[tuple[Case, PipelinePlan]]:
    """So many cases with odd orders: every kind of stages, models and ZeRO stages in turn."""
    found = []
    for number in range(count):
        rng = random.Random(f"{seed}/{pp}/{number}")
        case = Case(
            pp=pp, schedule=("1f1b", "zbv", "interleaved")[number % 3], micro_batches=rng.randint(2, 5), zero=rng.choice((0, 1, 2, 3)),
            model=rng.choice((TIED, EIGHT, EIGHT | LLAMA, TIED | {"hidden_dropout": 0.2})),
            kernels=rng.choice(({}, FULL, {"mlp_chunks": 2})), steps=1,
        )  # fmt: skip
        found.append(odd(case, number, splits=rng.random() < 0.75))
        check_plan(found[-1][1])
        layouts.alone(case)
    return found


@pytest.mark.often("2-6-0")
@pytest.mark.parametrize(("pp", "count", "seed"), [
    (2, 6, 0), *(pytest.param(pp, 40, 2, marks=pytest.mark.long) for pp in (2, 3, 4)),
])  # fmt: skip
def test_odd_orders_of_a_model_have_the_gradients_of_one_process(pp: int, count: int, seed: int, tmp_path: Path) -> None:
    run_ranks(_check_all, pp, tmp_path, models(pp, count, seed))


def _bits(cases: list[tuple[Case, PipelinePlan]]) -> None:
    known: dict[str, str] = {}
    for case, plan in cases:
        sharded = layouts.Sharded(_taken(case, plan), layouts.alone(case).whole)
        found = {"loss": sharded.step(), **sharded.grads()}
        bits = {name: hashlib.sha256(grad.numpy().tobytes()).hexdigest() for name, grad in found.items()}
        known = known or bits
        assert bits == known, f"{case}: {[name for name in bits if bits[name] != known[name]]}\n{plan.text()}"


@pytest.mark.often("2-1f1b-1-4")
@pytest.mark.parametrize(("pp", "schedule", "slices", "count"), [
    (2, "1f1b", 1, 4), (2, "slices", 2, 2), *(pytest.param(*each, marks=pytest.mark.long) for each in (
        (2, "slices", 3, 10), (4, "1f1b", 1, 10), (2, "interleaved", 1, 20), (2, "zbv", 1, 20),
    )),
])  # fmt: skip
def test_weights_that_are_put_off_have_the_bits_of_those_that_are_not(
    pp: int, schedule: Any, slices: int, count: int, tmp_path: Path
) -> None:  # fmt: skip
    """The first plan of each case is the schedule's own, with one backward pass for B and W where it has that."""
    for zero, more, kernels in ((0, TIED, {}), (2, EIGHT | LLAMA, FULL)):
        case = Case(pp=pp, schedule=schedule, slices=slices, micro_batches=4, zero=zero, model=more, kernels=kernels)
        plan = pipelined.plan_pipeline(schedule, pp, len(case.stages) // pp, 4, slices)
        plans = [plan, *(late_weights(random.Random(seed), plan) for seed in range(count))]
        for each in plans:
            check_plan(each)
        layouts.alone(case)
        run_ranks(_bits, pp, tmp_path, [(case, each) for each in plans])
