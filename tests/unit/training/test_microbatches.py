"""The batch plan against a step-by-step simulation and the rule it implements; what the loader is told by --balance-rows."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import BatchConfig, Config
from megatron_sp.data.dataset import Sample
from megatron_sp.training.microbatches import BatchPlan, row_dealer, warning_about_documents
from megatron_sp.utils.errors import ConfigError


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    micro, dp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    unit = micro * dp
    start, increments, increment = (draw(st.integers(1, 4)) * unit, draw(st.integers(1, 6)), draw(st.integers(1, 3)) * unit)
    kind = draw(st.sampled_from(["constant", "ramp", "steps"]))
    if kind == "constant":
        return BatchPlan(micro, dp, start)
    if kind == "steps":
        at = sorted({0, *draw(st.lists(st.integers(1, 300), max_size=4))})
        sizes = [draw(st.integers(1, 5)) * unit for _ in at]
        return BatchPlan(micro, dp, sizes[-1], steps=tuple(zip(at, sizes, strict=True)))
    return BatchPlan(micro, dp, start + increments * increment, start, increment, draw(st.integers(1, 400)))


def rule(plan: BatchPlan, consumed: int) -> int:
    """The ramp in whole numbers: one increment after each equal share of the ramp's samples; of steps the last that has begun."""
    if plan.steps:
        return [size for begin, size in plan.steps if begin <= consumed][-1]
    if plan.ramp_samples == 0:
        return plan.full
    increments = (plan.full - plan.start) // plan.increment
    passed = sum(consumed * increments >= k * plan.ramp_samples for k in range(1, increments + 1))
    return plan.start + passed * plan.increment


@given(plans(), st.integers(0, 600))
@settings(max_examples=150, deadline=None)
def test_size_of_a_batch(plan: BatchPlan, consumed: int) -> None:
    size = plan.global_batch_size(consumed)
    assert size == rule(plan, consumed)
    assert plan.num_microbatches(consumed) * plan.micro_batch_size * plan.dp_size == size


@given(plans(), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_sums_over_steps(plan: BatchPlan, num_steps: int) -> None:
    consumed = 0
    for _ in range(num_steps):
        consumed += plan.global_batch_size(consumed)
    assert plan.samples_after(num_steps) == consumed
    assert plan.steps_for(consumed) == num_steps, "exactly enough"
    if consumed:
        assert plan.steps_for(consumed - 1) == num_steps - 1, "a batch that is not full is dropped"
    assert plan.steps_for(consumed + plan.global_batch_size(consumed) - 1) == num_steps


@given(plans(), st.integers(0, 3000), st.integers(0, 30), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_steps_until_tokens_are_consumed(plan: BatchPlan, tokens: int, before: int, short: int, change: int) -> None:
    def length(step: int) -> int:
        return min(short, 7) if step < change else 7

    step, samples, done = 0, 0, 0
    while step < before or done < tokens:
        if step == before:
            start = (step, samples, done)
        size = plan.global_batch_size(samples)
        step, samples, done = step + 1, samples + size, done + size * length(step + 1)
    if step == before:
        start = (step, samples, done)
    assert before + plan.steps_for_tokens(tokens, length, start) == step


@pytest.mark.parametrize(
    "plan", [BatchPlan(4, 8, 1024, 64, 64, 300_000), BatchPlan(4, 8, 96, steps=((0, 64), (10**9, 1024), (10**11, 32), (10**11 + 7, 96)))]
)
def test_long_runs_are_a_product(plan: BatchPlan) -> None:
    steps = plan.steps_for(10**12)
    assert plan.samples_after(steps) <= 10**12 < plan.samples_after(steps + 1)
    of_tokens = plan.steps_for_tokens(2048 * 10**12, lambda step: 2048 if step > 9 else 64)
    assert steps <= of_tokens <= steps + 10


def test_steps_in_tokens_are_those_of_megatron() -> None:
    """The first size is that of the start; a threshold is rounded down to whole samples, and a step at it has the new size."""
    config = BatchConfig(micro_batch_size=2, global_batch_size=320, step_batch_size_schedule=("0:16 2.4B:320, 1_000.5K:0.048K",))
    plan = BatchPlan.from_config(config, 4, 2048)
    assert plan.steps == ((0, 16), (488, 48), (1_171_875, 320)) and (plan.first, plan.full) == (16, 320)
    assert [plan.global_batch_size(c) for c in (0, 487, 488, 1_171_874, 1_171_875)] == [16, 16, 48, 48, 320]
    assert plan.samples_after(31) == 496 and plan.global_batch_size(480) == 16, "a step that has begun ends with its size"


@pytest.mark.parametrize("dp, size", list(product((1, 2, 4), (None, 8))))
def test_from_config(dp: int, size: int | None) -> None:
    plan = BatchPlan.from_config(BatchConfig(micro_batch_size=2, global_batch_size=size), dp)
    assert plan.global_batch_size(0) == plan.full == plan.evaluation == (size or 2 * dp)


def test_the_ramp_does_not_depend_on_the_ranks() -> None:
    config = BatchConfig(micro_batch_size=1, global_batch_size=32, rampup_batch_size=(8, 8, 100))
    sizes = [[BatchPlan.from_config(config, dp).global_batch_size(c) for c in range(0, 140)] for dp in (1, 2, 4, 8)]
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]
    assert (sizes[0][33], sizes[0][34], sizes[0][99], sizes[0][100]) == (8, 16, 24, 32)


# rows by their attention

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --vocab-size 100 --train-iters 10 --lr 1e-3 --mock-data"
    " --micro-batch-size 2 --global-batch-size 4 --reset-attention-mask"
)
ROWS = [[4, 4], [8], [1] * 8, [6, 2]]


class Rows:
    """Rows of given documents; what the index says of them may be something else."""

    def __init__(self, indexed: list[list[int]] = ROWS) -> None:
        self.indexed = indexed

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: int) -> Sample:
        return {"documents": np.repeat(np.arange(3, 3 + len(ROWS[i])), ROWS[i])}

    def document_lengths(self, i: int) -> np.ndarray:
        return np.array(self.indexed[i])

    def fingerprint(self) -> str:
        return ""

    def where(self, i: int) -> str:
        return ""


def parse(more: str = "", family: str = "gpt") -> Config:
    flags = FLAGS.replace("--reset-attention-mask", "") if family == "bert" else FLAGS
    return config_from_args([*flags.split(), *more.split()], family=family)


def test_what_a_run_deals_by() -> None:
    dealer = row_dealer(parse("--balance-rows --window-size 5"), Rows(), 2)
    assert dealer is not None
    assert (dealer.micro_batch_size, dealer.dp_size, dealer.causal, dealer.window) == (2, 2, True, 5)
    assert dealer.document_lengths(3).tolist() == [6, 2]
    bert = row_dealer(parse("--balance-rows --bert-pack-sequences --bert-no-binary-head", "bert"), Rows(), 2)
    assert bert is not None and not bert.causal and bert.window is None
    assert row_dealer(parse(), Rows(), 2) is None


def test_without_packed_documents_it_has_no_effect() -> None:
    line = "--balance-rows (without --reset-attention-mask or --bert-pack-sequences it has no effect)"
    plain = config_from_args([*FLAGS.split()[:-1], "--balance-rows"])
    assert not plain.parallel.balance_rows and line in plain.ignored_flags
    packed = parse("--balance-rows")
    assert packed.parallel.balance_rows and line not in packed.ignored_flags
    assert parse("--balance-rows --bert-pack-sequences --bert-no-binary-head", "bert").parallel.balance_rows


def test_a_task_whose_data_know_no_documents() -> None:
    class Texts:
        __len__, __getitem__, fingerprint, where = Rows.__len__, Rows.__getitem__, Rows.fingerprint, Rows.where

    with pytest.raises(ConfigError, match="--balance-rows needs rows of packed documents whose lengths an index says"):
        row_dealer(parse("--balance-rows"), Texts(), 2)  # type: ignore[arg-type]
    assert row_dealer(parse(), Texts(), 2) is None  # type: ignore[arg-type]
    assert warning_about_documents(parse("--balance-rows"), Texts()) is None  # type: ignore[arg-type]


def test_an_index_that_knows_other_documents() -> None:
    other = Rows([[4, 4], [7, 1], [1] * 8, [8]])
    warning = warning_about_documents(parse("--balance-rows"), other)
    assert warning is not None and "in 2 of 4 rows looked at" in warning and "--append-eod" in warning
    assert warning_about_documents(parse("--balance-rows"), Rows()) is None
    assert warning_about_documents(parse(), other) is None and warning_about_documents(parse("--balance-rows"), None) is None
