"""What the fake run predicts of a step against what a step on gloo ranks holds and sends: the same bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.paths import ROOT
from support.ranks import run_ranks

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import memory
import storages
import test_memory_form as forms
import test_traffic as traffic
from memory import Layout

from megatron_sp.config.schema import BatchConfig, Config, DataConfig, KernelConfig, ModelConfig, PrecisionConfig
from megatron_sp.estimate.workload import workload_of
from megatron_sp.ops import routing, tiled_attention
from megatron_sp.planner import fake_run

TOLERANCE = 0.002  # gloo's thread lets go of a collective's tensors a moment after whoever waited for it has gone on


@pytest.fixture(scope="module", autouse=True)
def _load_dynamo() -> None:
    """A dispatch mode imports it: once, here, instead of in every child."""
    with storages.StorageCount():
        torch.zeros(1)


def few(groups: list[Any], number: int) -> list[Any]:
    """Groups of layouts, of which so many, evenly spread, are in every run; the others are long."""
    step = len(groups) // number
    plain = [group.values[0] if hasattr(group, "values") else group for group in groups]
    return [group if index % step == 0 else pytest.param(group, marks=pytest.mark.long) for index, group in enumerate(plain)]


def config_of(case: Layout, shape: dict[str, Any], batch: int) -> Config:
    """The configuration of a layout."""
    size = BatchConfig(micro_batch_size=batch, global_batch_size=batch * case.micro_batches * case.dp)
    return Config(
        ModelConfig(**{**shape, **case.model}), case.parallel(), KernelConfig(**case.kernels), size,
        precision=PrecisionConfig(bf16=case.bf16), data=DataConfig(mask_prob=1 / memory.EVERY),
    )  # fmt: skip


def predicted(case: Layout, shape: dict[str, Any], batch: int, *, evenly: bool = False) -> list[fake_run.RankRun]:
    """The fake run of each rank, with the rows of experts that ``test_memory_form.choose_evenly`` makes."""
    config, has = config_of(case, shape, batch), "num_experts" in case.model
    routed = forms.rows_taken_evenly(workload_of(config, case.ranks, "cpu")).routed if has and evenly else None
    return [fake_run.run_rank(config, case.ranks, "cpu", rank, routed=routed) for rank in range(case.ranks)]


def compare(cases: list[Layout], want: list[list[dict[str, float]]], evenly: bool) -> None:
    """Compare the memory of a step on this rank."""
    if evenly:
        routing.choose = forms.choose_evenly  # type: ignore[assignment]
    for case, of_ranks in zip(cases, want, strict=True):
        mine, wrong = of_ranks[dist.get_rank()], {}
        for _ in range(3):
            tiled_attention._whole_band.cache_clear()
            got = memory.measure(case, forms.SHAPE, forms.BATCH)
            wrong = {name: (got[name], mine[name]) for name in mine if abs(got[name] / mine[name] - 1) > TOLERANCE}
            bad = torch.tensor(len(wrong))
            dist.all_reduce(bad)
            if not bad:
                break
        assert not wrong, f"{case}, rank {dist.get_rank()}: (measured, predicted) {wrong}"


def check(tmp_path: Path, cases: list[Layout], *, evenly: bool) -> None:
    """Predict in this process, which has no group, and measure in those of the ranks."""
    want = [
        [{"resident": run.stays, "peak": run.peak} for run in predicted(case, forms.SHAPE, forms.BATCH, evenly=evenly)] for case in cases
    ]
    run_ranks(compare, cases[0].ranks, tmp_path, cases, want, evenly)


@pytest.mark.parametrize("cases", few(forms.CASES, 8), ids=lambda cases: "; ".join(map(str, cases)))
def test_a_step_holds_what_is_predicted(tmp_path: Path, cases: list[Layout]) -> None:
    check(tmp_path, cases, evenly=False)


@pytest.mark.parametrize("cases", few(forms.EXPERT_CASES, 2), ids=lambda cases: "; ".join(map(str, cases)))
def test_a_step_with_experts_holds_what_is_predicted(tmp_path: Path, cases: list[Layout]) -> None:
    check(tmp_path, cases, evenly=True)


def count(cases: list[Layout], want: list[list[dict[str, tuple[float, float]]]]) -> None:
    """Compare the collectives of a step on this rank."""
    for case, of_ranks in zip(cases, want, strict=True):
        training = memory.Training(case, traffic.SHAPE, traffic.BATCH, "cpu", memory.Counter("cpu"))
        training.step(1)
        counted = traffic.Counted()
        training.step(2)
        training.train_step.weights.settle()
        got = {op: (len(sizes), sum(sizes)) for op, sizes in counted.found.items() if sizes}
        mine = of_ranks[dist.get_rank()]
        assert got == mine, f"{case}, rank {dist.get_rank()}: {got}, predicted {mine}"


def by_op(run: fake_run.RankRun) -> dict[str, tuple[float, float]]:
    """Number and bytes of each operation."""
    found: dict[str, tuple[float, float]] = {}
    for (_, op, _, _), (number, num_bytes) in run.sent().items():
        before = found.get(op, (0, 0))
        found[op] = before[0] + number, before[1] + num_bytes
    return found


@pytest.mark.parametrize("cases", few(traffic.CASES, 5), ids=lambda cases: "; ".join(map(str, cases)))
def test_a_step_sends_what_is_predicted(tmp_path: Path, cases: list[Layout]) -> None:
    want = [[by_op(run) for run in predicted(case, traffic.SHAPE, traffic.BATCH)] for case in cases]
    run_ranks(count, cases[0].ranks, tmp_path, cases, want)
