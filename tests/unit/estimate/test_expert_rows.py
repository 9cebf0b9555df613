"""Rows of experts in numbers: expectation by counting all choices, and bytes of a row as the exchange has them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import tiny

from megatron_sp.config.schema import BatchConfig, KernelConfig, ParallelConfig, PrecisionConfig
from megatron_sp.estimate.expert_rows import RowBytes, even_rows, ranks_of_token
from megatron_sp.estimate.memory import memory_plan
from megatron_sp.estimate.memory_plan import MemoryPlan
from megatron_sp.estimate.traffic import traffic_plan
from megatron_sp.estimate.workload import Workload
from megatron_sp.parallel.expert_exchange import RowFormat


@pytest.mark.parametrize("experts, k, ep, groups, of_token", [
    (8, 2, 2, 1, 1), (8, 2, 8, 1, 1), (6, 3, 3, 1, 1), (6, 6, 3, 1, 1), (8, 2, 4, 4, 2), (8, 3, 2, 4, 2),
    (12, 2, 3, 2, 1), (12, 2, 6, 3, 2),
])  # fmt: skip
def test_ranks_of_a_token_are_the_mean_over_all_choices(experts: int, k: int, ep: int, groups: int, of_token: int) -> None:
    more = {"moe_router_num_groups": groups, "moe_router_group_topk": of_token} if groups > 1 else {}
    model = tiny.shape(num_experts=experts, moe_router_topk=k, **more)
    size, found = experts // groups, []
    for chosen in itertools.combinations(range(groups), of_token):
        allowed = [expert for expert in range(experts) if expert // size in chosen]
        found += [len({expert // (experts // ep) for expert in some}) for some in itertools.combinations(allowed, k)]
    assert ranks_of_token(model, ep) == pytest.approx(sum(found) / len(found))


def test_rows_of_a_rank() -> None:
    """Of two of eight experts on two ranks, both are on one in three of seven choices."""
    model = tiny.shape(num_experts=8, moe_router_topk=2)
    rows = even_rows(model, 2, 70)
    assert (rows.own, rows.to_others, rows.from_others) == pytest.approx((55, 55, 55))
    assert (rows.choices, rows.most) == (140, 35)
    assert even_rows(model, 1, 70).received == 70, "nothing travels, and all rows are there"


def test_a_worse_load_is_that_of_one_rank() -> None:
    """It gets more, up to all that there is, and sends what it sends."""
    model = tiny.shape(num_experts=8, moe_router_topk=2)
    even, worse, worst = (even_rows(model, 4, 100, load) for load in (1.0, 1.5, 1000.0))
    assert worse.to_others == worst.to_others == even.to_others
    assert worse.received == pytest.approx(1.5 * even.received) and worse.choices == 1.5 * even.choices
    assert worst.received == 400 and worst.choices == 800 and worst.most == 400


@pytest.mark.parametrize("width, k", [(14, 2), (16, 1), (17, 8)])
@pytest.mark.parametrize("dtype, weight", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_bytes_of_a_row_are_those_of_the_exchange(width: int, k: int, dtype: torch.dtype, weight: torch.dtype) -> None:
    form = RowFormat(width, k, dtype, weight)
    sizes = RowBytes.of(width, k, dtype.itemsize, weight.itemsize)
    assert sizes.there == form.elements(numbers=True) * dtype.itemsize and sizes.gradient == form.elements(numbers=False) * dtype.itemsize
    assert sizes.back == width * dtype.itemsize


def workload(parallel: dict[str, Any] | None = None, **model: Any) -> Workload:
    shape = tiny.shape(num_experts=8, seq_length=256, hidden_size=64, kv_channels=None, **model)
    return Workload(shape, ParallelConfig(**(parallel or {})), KernelConfig(), BatchConfig(micro_batch_size=2), PrecisionConfig(), dp=4)


def plan(parallel: dict[str, Any] | None = None, **model: Any) -> MemoryPlan:
    return memory_plan(workload(parallel, **model))


def test_more_ranks_share_the_experts() -> None:
    """What stays is a rank's share of them; with ZeRO each of their elements is on one rank, however they are dealt."""
    experts = {ep: plan({"expert_model_parallel_size": ep}, moe_ffn_hidden_size=1024).resident for ep in (1, 2, 4)}
    each = 3 * 8 * (2 * 64 * 1024 + 1024 + 64) * 4 * 3  # of three layers, with two moments
    assert experts[1] - experts[2] == pytest.approx(each / 2, rel=1e-3) and experts[2] - experts[4] == pytest.approx(each / 4, rel=1e-3)
    sharded = {ep: plan({"expert_model_parallel_size": ep, "zero_stage": 1}).stays for ep in (1, 4)}
    assert sharded[1][3].name == "optimizer state" and sharded[1][3].num_bytes == pytest.approx(sharded[4][3].num_bytes, rel=0.01)


def test_the_worst_load_is_planned_for_on_request() -> None:
    parallel = {"expert_model_parallel_size": 4}
    peaks = [plan(parallel | {"moe_worst_load": load}, moe_ffn_hidden_size=512).peak for load in (1.0, 2.0, 4.0)]
    assert peaks == sorted(set(peaks))
    sent = [traffic_plan(workload(parallel | {"moe_worst_load": load})).num_bytes for load in (1.0, 2.0)]
    assert sent[0] < sent[1]


def test_a_dense_model_has_nothing_of_experts() -> None:
    dense = Workload(tiny.BASE, ParallelConfig(), KernelConfig(), BatchConfig(micro_batch_size=2), PrecisionConfig(), dp=4)
    assert not [flow for flow in traffic_plan(dense).flows if "expert" in flow.kind or flow.group.startswith("ep")]
    assert not [line for moment in memory_plan(dense).moments for line in moment.lines if "expert" in line.name and line.num_bytes]
