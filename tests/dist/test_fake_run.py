"""What the fake run predicts of a step against what a step on gloo ranks holds and sends: the same bytes."""

from __future__ import annotations

import sys
from collections import defaultdict
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
from memory import Layout
from support import memory_cases as forms
from support import traffic_cases as traffic

from megatron_sp.comm import collectives
from megatron_sp.config.schema import BatchConfig, Config, DataConfig, KernelConfig, ModelConfig, PrecisionConfig
from megatron_sp.estimate.rough import RoughRank, rough_memory
from megatron_sp.ops import routing, tiled_attention
from megatron_sp.parallel import pipeline
from megatron_sp.planner import fake_run
from megatron_sp.planner.expert_rows import RoutedRows

TOLERANCE = 0.002  # gloo's thread lets go of a collective's tensors a moment after whoever waited for it has gone on


@pytest.fixture(scope="module", autouse=True)
def _load_dynamo() -> None:
    """A dispatch mode imports it: once, here, instead of in every child."""
    with storages.StorageCount():
        torch.zeros(1)


def few(groups: list[Any], number: int) -> list[Any]:
    """Groups of layouts; the first three of about so many groups, evenly spread, are in every run, the others are long."""
    step = len(groups) // number
    chosen = [group[:3] for group in groups[::step]]
    others = [group[3:] if index % step == 0 else group for index, group in enumerate(groups)]
    return [*chosen, *(pytest.param(group, marks=pytest.mark.long) for group in others if group)]


def config_of(case: Layout, shape: dict[str, Any], batch: int) -> Config:
    """The configuration of a layout."""
    size = BatchConfig(micro_batch_size=batch, global_batch_size=batch * case.micro_batches * case.dp)
    return Config(
        ModelConfig(**{**shape, **case.model}), case.parallel(), KernelConfig(**case.kernels), size,
        precision=PrecisionConfig(bf16=case.bf16), data=DataConfig(mask_prob=1 / memory.EVERY),
    )  # fmt: skip


def choose_evenly(logits: torch.Tensor, spec: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Let tokens take experts in turn, each of them as far from each other as can be: all ranks and experts get as many."""
    first, step = torch.arange(len(logits))[:, None], spec.num_experts // spec.top_k
    return (first + torch.arange(spec.top_k) * step) % spec.num_experts


def rows_taken_evenly(config: Config, ranks: int) -> RoutedRows:
    """The rows that ``choose_evenly`` makes."""
    rank, ep, top_k = RoughRank(config, ranks, "cpu"), config.parallel.expert_model_parallel_size, config.model.moe_router_topk
    tokens = rank.tokens // rank.parts
    own = tokens * min(ep, top_k) / ep
    return RoutedRows(own, own * (ep - 1), own * (ep - 1), tokens * top_k)


class Counted:
    """Every collective of more than one rank, as ``comm/collectives.py`` announces it."""

    def __init__(self) -> None:
        self.found: dict[str, list[int]] = defaultdict(list)
        collectives.announced = self  # type: ignore[assignment]
        pipeline.send_async = self.send

    def __call__(self, group: Any, what: str, x: torch.Tensor, *, send: Any = (), receive: Any = ()) -> Any:
        op, size, ranks = what.split()[0], x.numel() * x.element_size(), group.size()
        if op == "all_to_all":
            self.found[op].append((sum(send) - send[group.rank()]) * x.element_size())
        else:
            once = (size * ranks if op == "all_gather" else size) * (ranks - 1) // ranks
            self.found[op].append(2 * once if op == "all_reduce" else once)
        return group

    def send(self, x: torch.Tensor, group: Any, target: int, what: str) -> Any:
        """Count a message between stages."""
        self.found["send"].append(x.numel() * x.element_size())
        return collectives.send_async(x, group, target, what)


def predicted(case: Layout, shape: dict[str, Any], batch: int, *, evenly: bool = False) -> list[fake_run.RankRun]:
    """The fake run of each rank, with the rows of experts that ``choose_evenly`` makes."""
    config, has = config_of(case, shape, batch), "num_experts" in case.model
    routed = rows_taken_evenly(config, case.ranks) if has and evenly else None
    return [fake_run.run_rank(config, case.ranks, "cpu", rank, routed=routed) for rank in range(case.ranks)]


def compare(cases: list[Layout], want: list[list[dict[str, float]]], evenly: bool) -> None:
    """Compare the memory of a step on this rank."""
    if evenly:
        routing.choose = choose_evenly  # type: ignore[assignment]
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
        [{"resident": run.resident.total(), "peak": run.peak} for run in predicted(case, forms.SHAPE, forms.BATCH, evenly=evenly)]
        for case in cases
    ]
    run_ranks(compare, cases[0].ranks, tmp_path, cases, want, evenly)


@pytest.mark.parametrize("cases", few(forms.CASES, 4), ids=lambda cases: "; ".join(map(str, cases)))
def test_a_step_holds_what_is_predicted(tmp_path: Path, cases: list[Layout]) -> None:
    check(tmp_path, cases, evenly=False)


@pytest.mark.parametrize("cases", few(forms.EXPERT_CASES, 1), ids=lambda cases: "; ".join(map(str, cases)))
def test_a_step_with_experts_holds_what_is_predicted(tmp_path: Path, cases: list[Layout]) -> None:
    check(tmp_path, cases, evenly=True)


def count(cases: list[Layout], want: list[list[dict[str, tuple[float, float]]]], module: Any, evenly: bool) -> None:
    """Compare the collectives of a step on this rank."""
    if evenly:
        routing.choose = choose_evenly  # type: ignore[assignment]
    for case, of_ranks in zip(cases, want, strict=True):
        training = memory.Training(case, module.SHAPE, module.BATCH, "cpu", memory.Counter("cpu"))
        training.step(1)
        counted = Counted()
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


@pytest.mark.parametrize("cases", few(traffic.CASES, 3), ids=lambda cases: "; ".join(map(str, cases)))
def test_a_step_sends_what_is_predicted(tmp_path: Path, cases: list[Layout]) -> None:
    want = [[by_op(run) for run in predicted(case, traffic.SHAPE, traffic.BATCH)] for case in cases]
    run_ranks(count, cases[0].ranks, tmp_path, cases, want, traffic, False)


@pytest.mark.parametrize("cases", few(forms.EXPERT_CASES[1:], 1), ids=lambda cases: "; ".join(map(str, cases)))
def test_a_step_with_experts_sends_what_is_predicted(tmp_path: Path, cases: list[Layout]) -> None:
    want = [[by_op(run) for run in predicted(case, forms.SHAPE, forms.BATCH, evenly=True)] for case in cases]
    run_ranks(count, cases[0].ranks, tmp_path, cases, want, forms, True)


NEAR = [
    Layout(), Layout(sp=2, mode="chunked"), Layout(dp=2, zero=memory.zero(3)), Layout(tp=2, tp_seq=True, model=memory.DROPOUT),
    Layout(kernels=memory.FULL), Layout(dp=2, zero=memory.zero(1), micro_batches=3), Layout(cp=2), forms.pipe(), forms.pipe("zbv"),
    Layout(dp=2, model=forms.EXPERTS, zero=forms.EP), Layout(model=memory.BERT), Layout(model=memory.LLAMA | {"num_query_groups": 2}),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", [case if number % 3 == 0 else pytest.param(case, marks=pytest.mark.long) for number, case in enumerate(NEAR)], ids=str
)
def test_the_rough_form_is_near(case: Layout) -> None:
    """At a size at which activations count; a search runs what it has chosen by it."""
    config = config_of(case, forms.SHAPE | {"hidden_size": 768, "seq_length": 1024, "ffn_hidden_size": 3072}, 2)
    for device in ("cpu", "cuda"):
        peak = fake_run.predict(config, case.ranks, device).memory.peak  # type: ignore[arg-type]
        rough = rough_memory(config, case.ranks, device).peak  # type: ignore[arg-type]
        assert 0.8 < rough / peak < 1.35, (device, rough / 2**20, peak / 2**20)


def test_of_the_ranks_those_are_run_that_hold_most() -> None:
    for case in (Layout(cp=4, model=forms.NARROW), Layout(cp=4, zero={"cp_chunks": 1, "cp_keep_kv": True}), forms.pipe(pp=3)):
        config = config_of(case, forms.SHAPE, forms.BATCH)
        peaks = [fake_run.run_rank(config, case.ranks, "cpu", rank).peak for rank in range(case.ranks)]
        assert max(peaks[rank] for rank in fake_run.ranks_to_run(config, case.ranks)) > 0.95 * max(peaks), str(case)


def test_storages_are_counted_once_and_forgotten() -> None:
    count = storages.StorageCount()
    with count:
        a = torch.zeros(1000)
        assert count.live == 4000
        views = [a.view(10, 100), a.detach(), a[::2].t(), a.add_(1)]
        torch.mul(a, 2, out=a)
        assert count.live == count.peak == 4000
        b = torch.nn.Parameter(torch.ones(1000))
        product = (b * 2).square()  # square saves its input
        del b
        assert count.live == 4 * 4000
        product.sum().backward()
        del product
        assert count.live == 4000 and count.peak >= 5 * 4000
        del a
        assert count.live == 4000
        del views
        assert count.live == 0
        count.reset_peak()
        assert count.peak == 0


def test_storages_that_are_emptied_and_filled_again() -> None:
    plain = torch.UntypedStorage.resize_
    with storages.StorageCount() as count:
        a = torch.zeros(1000)
        a.untyped_storage().resize_(0)
        assert count.live == 0
        a.untyped_storage().resize_(8000)
        assert count.live == count.peak == 8000
        other = torch.zeros(10).untyped_storage()
        with storages.StorageCount():
            other.resize_(80)
            assert count.live == 8080
        del other
        assert count.live == 8000
    assert torch.UntypedStorage.resize_ is plain
