"""The planned traffic of a step against every collective that real steps start, on gloo ranks: how many of which, and bytes on the wire."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.paths import ROOT
from support.ranks import run_ranks

from megatron_sp.comm import collectives
from megatron_sp.config.schema import BatchConfig, KernelConfig, ModelConfig, ParallelConfig, PrecisionConfig
from megatron_sp.estimate.expert_rows import RoutedRows
from megatron_sp.estimate.traffic import TrafficPlan, plans_of_ranks, traffic_plan, wire_bytes
from megatron_sp.estimate.workload import Workload
from megatron_sp.ops import routing
from megatron_sp.ops.routing import choose
from megatron_sp.parallel import pipeline
from megatron_sp.training import sharding, step  # noqa: F401 - here, instead of in every child

sys.path.insert(0, str(ROOT / "benchmarks"))

import memory
import storages
from memory import BERT, FULL, LLAMA, SELECTIVE, Layout, zero

SHAPE = {
    "num_layers": 4, "hidden_size": 24, "num_attention_heads": 6, "ffn_hidden_size": 20, "seq_length": 21, "vocab_size": 50,
    "make_vocab_size_divisible_by": 8, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
BATCH = 3
UNTIED = {"untie_embeddings_and_output_weights": True}
BY_TWO = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
CHUNKS = {"lm_head_chunk_tokens": 10}
PIECES = {"mlp_chunks": 4}  # of 21 positions, of 11 with tp_seq
Counts = dict[str, tuple[int, int]]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")

CASES = [
    [Layout(dp=2, zero=zero(stage), micro_batches=count) for stage in (0, 1, 2, 3) for count in (1, 3)],
    [Layout(dp=2, zero=zero(3, **more), micro_batches=2, model=UNTIED) for more in
     ({}, {"zero3_keep_units": 1}, {"zero3_gather_once": True})],
    [Layout(dp=2, zero=zero(3, **{name: value})) for name, value in (("zero3_fetch", "all_reduce"), ("overlap_param_gather", False))],
    [Layout(dp=2, zero=zero(stage, grad_reduce_in_bf16=True), bf16=True) for stage in (0, 2)],
    [Layout(dp=2, zero=zero(3), kernels=kernels, micro_batches=2) for kernels in (FULL, BY_TWO, SELECTIVE)],
    [Layout(dp=3, zero=zero(stage)) for stage in (1, 3)],
    [Layout(sp=2, mode=mode) for mode in ("none", "split-qkv", "chunked")],
    [Layout(sp=2, mode="chunked", kernels=FULL, zero=zero(2), micro_batches=2), Layout(sp=2, model=LLAMA | {"num_query_groups": 2})],
    [Layout(sp=2, mode="chunked", kernels=FULL | {"recompute_attention": again}) for again in ("exchange", "full")],
    [Layout(sp=2, mode=mode, kernels={"recompute_qkv": True}) for mode in ("none", "split-qkv", "chunked")],
    [Layout(sp=2, mode="chunked", model={"num_query_groups": 2, "num_attention_heads": 12}, kernels=kernels)
     for kernels in ({"recompute_qkv": True}, FULL, {**FULL, "recompute_method": "block", "recompute_num_layers": 3})],
    [Layout(sp=4), Layout(sp=4, mode="split-qkv"), Layout(sp=4, mode="chunked", kernels=BY_TWO)],  # 6 heads: 2, 2, 1, 1
    [Layout(tp=2, kernels=CHUNKS), Layout(tp=2, tp_seq=True, kernels=FULL | CHUNKS), Layout(tp=2, tp_seq=True, micro_batches=2)],
    [Layout(tp=2, kernels=PIECES), Layout(tp=2, tp_seq=True, kernels=FULL | PIECES, micro_batches=2)],
    [Layout(tp=2, model={"num_query_groups": 1, "qk_layernorm": True}), Layout(tp=2, tp_seq=True, model=LLAMA | {"num_query_groups": 1})],
    [Layout(dp=2, tp=2, tp_seq=True, zero=zero(stage), micro_batches=2) for stage in (1, 2, 3)],
    [Layout(tp=2, model=BERT), Layout(tp=2, tp_seq=True, model=BERT | {"norm_placement": "post"}, micro_batches=2, kernels=CHUNKS)],
    [Layout(dp=2, zero=zero(3), model=BERT, micro_batches=2), Layout(sp=2, model=BERT | {"bert_no_binary_head": True})],
    [Layout(cp=2), Layout(cp=2, kernels=FULL, micro_batches=2), Layout(cp=2, kernels=SELECTIVE | {"recompute_qkv": True})],
    [Layout(cp=2, kernels=FULL | {"recompute_attention": again}, zero=keep) for again in ("exchange", "full")
     for keep in ({}, {"cp_keep_kv": True})],
    [Layout(cp=3, model=more) for more in ({"window_size": 5}, {"window_size": 1}, BERT, LLAMA | {"num_query_groups": 2})],
    [Layout(cp=4), Layout(cp=4, zero=zero(3, cp_chunks=3, cp_stages_ahead="all")), Layout(cp=4, model={"seq_length": 3})],
    [Layout(cp=2, sp=2), Layout(cp=2, sp=2, mode="chunked", kernels=FULL, zero=zero(2, cp_keep_kv=True)),
     Layout(cp=2, sp=2, model={"num_query_groups": 2, "num_attention_heads": 12}, mode="chunked", kernels={"recompute_qkv": True})],
    pytest.param([Layout(cp=2, sp=4), Layout(cp=2, sp=4, mode="chunked", kernels=BY_TWO), Layout(cp=2, sp=2, tp=2, tp_seq=True)],
                 marks=pytest.mark.long),
    [Layout(cp=2, tp=2, model=BERT | {"seq_length": 28}),
     Layout(cp=2, tp=2, tp_seq=True, zero=zero(1), model=LLAMA | {"num_query_groups": 1})],
    [Layout(pp=2, schedule=kind, micro_batches=3) for kind in ("1f1b", "interleaved", "zb1p", "zbv")],
    [Layout(pp=2, schedule="slices", slices=2, micro_batches=3, model=model) for model in ({}, UNTIED)],
    [Layout(pp=2, cp=2, schedule="slices", slices=3, micro_batches=2, kernels=kernels) for kernels in ({}, FULL)],
    pytest.param([Layout(pp=2, tp=2, tp_seq=seq, schedule=kind, slices=slices, micro_batches=2, kernels=CHUNKS | PIECES)
                  for seq in (True, False) for kind, slices in (("1f1b", 1), ("zbv", 1), ("slices", 2))], marks=pytest.mark.long),
    pytest.param([Layout(pp=2, sp=2, schedule=kind, slices=slices, micro_batches=2) for kind, slices in (("zb1p", 1), ("slices", 2))],
                 marks=pytest.mark.long),
    pytest.param([Layout(pp=2, dp=2, schedule=kind, slices=slices, micro_batches=3, zero=zero(stage), model=model) for stage in (0, 1, 2)
                  for kind, slices in (("1f1b", 1), ("zb1p", 1), ("zbv", 1), ("slices", 2)) for model in ({}, UNTIED)],
                 marks=pytest.mark.long),
    [Layout(sp=2, tp=2, mode="split-qkv", zero=zero(stage), model=LLAMA | {"num_query_groups": 2}) for stage in (0, 3)],
]  # fmt: skip


EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 10, "moe_router_topk": 3}
SHARED = EXPERTS | {"moe_shared_expert_intermediate_size": 12}
SOME = EXPERTS | {"moe_layer_freq": "[0,1,1,0]"}
SEQUENCE = {"moe_aux_loss_coeff": 0.1}
GLOBAL = SEQUENCE | {"moe_router_load_balancing_type": "global_aux_loss"}
EP = {"expert_model_parallel_size": 2}

ALL_HEADS = LLAMA | {"qk_layernorm": True, "qk_layernorm_scope": "all", "num_query_groups": 2}
KEPT = {"recompute_qkv": True}
CASES += [
    [Layout(sp=2, model=ALL_HEADS, mode=mode, kernels=kernels, micro_batches=2) for mode, kernels in
     (("none", {}), ("split-qkv", FULL), ("chunked", KEPT))],
    [Layout(tp=2, model=ALL_HEADS), Layout(tp=2, tp_seq=True, model=ALL_HEADS, kernels=FULL | {"recompute_attention": "full"}),
     Layout(pp=2, schedule="slices", slices=2, micro_batches=2, model=ALL_HEADS)],
    pytest.param([Layout(tp=2, sp=2, model=ALL_HEADS, kernels=BY_TWO), Layout(cp=2, sp=2, model=ALL_HEADS, kernels=FULL),
                  Layout(cp=2, tp=2, model=ALL_HEADS, kernels=SELECTIVE)], marks=pytest.mark.long),
]  # fmt: skip
EXPERT_CASES = [
    [Layout(dp=2, model=EXPERTS, zero=EP), Layout(dp=2, model=SOME, zero=EP | {"moe_chunks": 3}, micro_batches=3),
     Layout(dp=2, model=SHARED | SEQUENCE, zero=EP, kernels=FULL), Layout(dp=2, model=EXPERTS | GLOBAL, zero=EP, micro_batches=2),
     Layout(dp=2, model=EXPERTS, zero=EP, bf16=True)],
    [Layout(sp=2, model=EXPERTS | GLOBAL | ALL_HEADS | {"seq_length": 20}, zero=EP, micro_batches=2, kernels=FULL)],
    [Layout(dp=2, model=SOME | SEQUENCE, zero=zero(stage, **EP), micro_batches=2) for stage in (0, 3)],
    pytest.param([Layout(dp=2, model=SOME | SEQUENCE, zero=zero(stage, **parallel), micro_batches=2)
                  for stage, parallel in ((0, {}), (1, {}), (1, EP), (2, {}), (2, EP), (3, {}))], marks=pytest.mark.long),
    [Layout(sp=2, model=EXPERTS | SEQUENCE | LLAMA | {"seq_length": 20, "num_query_groups": 2}, zero=EP),
     Layout(tp=2, model=SHARED | SEQUENCE), Layout(tp=2, tp_seq=True, model=SHARED | SEQUENCE | {"seq_length": 20}, zero=EP),
     Layout(tp=2, tp_seq=True, model=EXPERTS | {"seq_length": 20}), Layout(tp=2, model=SOME, kernels=PIECES)],
    pytest.param([Layout(dp=4, model=EXPERTS, zero=EP | zero(1)), Layout(dp=4, model=EXPERTS, zero={"expert_model_parallel_size": 4}),
                  Layout(dp=2, tp=2, tp_seq=True, model=SHARED | {"seq_length": 20}, zero=EP | zero(2)),
                  Layout(dp=2, tp=2, model=SHARED, zero=EP)], marks=pytest.mark.long),
    [Layout(pp=2, dp=2, schedule="zbv", model=EXPERTS | SEQUENCE, zero=EP, micro_batches=2)],
    pytest.param([Layout(pp=2, dp=2, schedule=kind, model=EXPERTS | more, zero=EP, micro_batches=2)
                  for kind, more in (("1f1b", {}), ("1f1b", SEQUENCE), ("zbv", {}))], marks=pytest.mark.long),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _load_dynamo() -> None:
    """An optimizer imports it: once, here, instead of in every child."""
    with storages.StorageCount():
        torch.optim.AdamW([torch.ones(1, requires_grad=True)], fused=True).step()


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
            self.found[op].append(wire_bytes(op, size * ranks if op == "all_gather" else size, ranks))  # type: ignore[arg-type]
        return group

    def send(self, x: torch.Tensor, group: Any, target: int, what: str) -> Any:
        """Count a message between stages."""
        self.found["send"].append(x.numel() * x.element_size())
        return collectives.send_async(x, group, target, what)

    def totals(self, is_mine: bool) -> Counts:
        """(number, bytes) of each operation: those of the rank that starts most, and of the one that sends most.

        Args:
            is_mine: this rank is one of those that are counted.
        """
        most = {}
        for op in OPS:
            counts = torch.tensor([len(self.found[op]), sum(self.found[op])])  # a rank without heads in a chunk exchanges no keys
            counts *= is_mine
            dist.all_reduce(counts, dist.ReduceOp.MAX)
            most[op] = int(counts[0]), int(counts[1])
        return most


def planned(plan: TrafficPlan) -> Counts:
    found = {}
    for op in OPS:
        flows = [flow for flow in plan.flows if flow.op == op]
        found[op] = sum(flow.number for flow in flows), sum(flow.num_bytes for flow in flows)
    return found


def compare(cases: list[Layout]) -> None:
    for case in cases:
        training = memory.Training(case, SHAPE, BATCH, "cpu", memory.Counter("cpu"))
        training.step(1)
        counted = Counted()
        training.step(2)
        training.train_step.weights.settle()
        plans = memory.predict(case, SHAPE, BATCH, what=plans_of_ranks)
        for rank, plan in enumerate(plans):
            got = counted.totals(rank == dist.get_rank() * len(plans) // case.ranks)
            assert got == planned(plan), f"{case}, pipeline rank {rank}: {got}, planned {planned(plan)}\n{plan.flows}"
            assert all(0 <= flow.can_hide <= flow.num_bytes for flow in plan.flows)


@pytest.mark.parametrize("cases", CASES, ids=lambda cases: "; ".join(map(str, cases)))
def test_the_plan_has_every_collective_of_a_step(tmp_path: Path, cases: list[Layout]) -> None:
    assert len({case.ranks for case in cases}) == 1
    run_ranks(compare, cases[0].ranks, tmp_path, cases)


class Choices:
    """What the tokens of this rank choose in the first passes of a step, without the code that sends them."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        routing.choose = self  # type: ignore[assignment]

    def __call__(self, logits: torch.Tensor, *args: Any) -> torch.Tensor:
        chosen = choose(logits, *args)
        self.found.append(chosen)
        return chosen

    def rows(self, num_experts: int, ep: Any) -> RoutedRows:
        """The mean over the passes of the rows between this rank and the others of ``ep``."""
        sent = torch.zeros(ep.size(), ep.size(), dtype=torch.float64)
        for chosen in self.found:
            ranks = chosen // (num_experts // ep.size())
            sent[ep.rank()] += torch.stack([(ranks == rank).any(1).sum() for rank in range(ep.size())]) / len(self.found)
        if ep.size() > 1:
            dist.all_reduce(sent, group=ep)
        own = float(sent[ep.rank(), ep.rank()])
        return RoutedRows(own, float(sent[ep.rank()].sum()) - own, float(sent[:, ep.rank()].sum()) - own, 0, 0)


def compare_experts(cases: list[Layout]) -> None:
    """Each rank's collectives against the plan for the rows that its tokens have chosen, and for those of even choices."""
    for case in cases:
        chosen = Choices()
        training = memory.Training(case, SHAPE, BATCH, "cpu", memory.Counter("cpu"))
        training.step(1)
        training.train_step.weights.settle()
        counted = Counted()
        chosen.found.clear()
        training.step(2)
        training.train_step.weights.settle()
        got = {op: (len(counted.found[op]), sum(counted.found[op])) for op in OPS}
        rows = chosen.rows(8, training.train_step.model.layout.ep.group)  # type: ignore[union-attr]
        plans = memory.predict(case, SHAPE, BATCH, what=lambda workload, rows=rows: plans_of_ranks(replace(workload, routed=rows)))
        plan = plans[dist.get_rank() * len(plans) // case.ranks]
        assert got == planned(plan), f"{case}, rank {dist.get_rank()}: {got}, planned {planned(plan)}\n{plan.flows}"
        even = memory.predict(case, SHAPE, BATCH, what=plans_of_ranks)[dist.get_rank() * len(plans) // case.ranks]
        assert {op: number for op, (number, _) in planned(even).items()} == {op: number for op, (number, _) in got.items()}
        assert all(0 <= flow.can_hide <= flow.num_bytes for flow in plan.flows)


@pytest.mark.parametrize("cases", EXPERT_CASES, ids=lambda cases: "; ".join(map(str, cases)))
def test_the_plan_of_experts_is_what_their_rows_make(tmp_path: Path, cases: list[Layout]) -> None:
    assert len({case.ranks for case in cases}) == 1
    run_ranks(compare_experts, cases[0].ranks, tmp_path, cases)


def plan_of(parallel: dict[str, Any], dp: int = 1, micro_batches: int = 1, **kernels: Any) -> TrafficPlan:
    batch = BatchConfig(micro_batch_size=BATCH, global_batch_size=BATCH * dp * micro_batches)
    settings = ParallelConfig(**parallel), KernelConfig(**kernels), batch, PrecisionConfig()
    return traffic_plan(Workload(ModelConfig(**SHAPE), *settings, dp=dp))  # type: ignore[arg-type]


def test_one_process_sends_nothing() -> None:
    for stage in range(4):
        assert plan_of({"zero_stage": stage}).flows == ()


def test_what_can_hide_follows_the_flags() -> None:
    """Everything of the embedding is exposed: its gradient comes last, its parameters are needed first."""
    n = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    for stage in (1, 3):
        both = {flow.kind: flow for flow in plan_of({"zero_stage": stage}, dp=2).flows}
        neither = {flow.kind: flow for flow in plan_of({"zero_stage": stage, **n}, dp=2).flows}
        for kind in ("gradients", "parameters"):
            assert neither[kind].can_hide == 0 and neither[kind].under == ""
            assert 0.5 < both[kind].can_hide / both[kind].num_bytes < 1 and both[kind].under
    modes = {mode: plan_of({"sequence_parallel_size": 2, "sp_overlap_mode": mode}) for mode in ("none", "split-qkv", "chunked", "auto")}
    shares = {mode: plan.can_hide / plan.num_bytes for mode, plan in modes.items()}
    exchanges = {m: sum(f.can_hide for f in p.flows if f.op == "all_to_all") for m, p in modes.items()}
    assert exchanges["none"] == exchanges["auto"] == 0 and shares["chunked"] > shares["none"]
    everything = sum(f.num_bytes for f in modes["none"].flows if f.op == "all_to_all")
    # of eight equal parts five: q and k on the way in, the output's gradient, those of q and k
    assert exchanges["split-qkv"] == 5 * everything // 8


def test_stage_1_moves_each_parameter_twice_whatever_the_accumulation() -> None:
    one, four = plan_of({"zero_stage": 1}, dp=4), plan_of({"zero_stage": 1}, dp=4, micro_batches=4)
    flows, more = (
        {flow.kind: flow for flow in plan.flows if "digests" not in flow.kind} for plan in (one, four)
    )  # these grow with samples
    assert flows == more
    assert flows["gradients"].num_bytes == flows["parameters"].num_bytes
    assert plan_of({}, dp=4).flows[0].num_bytes <= 2 * flows["gradients"].num_bytes


def rows_of(**parallel: Any) -> dict[str, int]:
    """Bytes over cp of each kind."""
    return {flow.kind: flow.num_bytes for flow in plan_of(parallel).flows if flow.group == "cp"}


def test_keys_and_values_travel_as_the_mask_needs_them() -> None:
    """Of 21 positions the first rank of two has 6 + 5: the other needs the first 6 of them, and it needs all 10 of the other."""
    row = SHAPE["hidden_size"] * 2 * 4 * BATCH * SHAPE["num_layers"]  # type: ignore[operator]
    causal = rows_of(context_parallel_size=2, cp_chunks=2)
    assert causal == {
        "keys and values, forward": 10 * row, "keys and values, backward": 10 * row, "gradients of keys and values": 6 * row,
    }  # fmt: skip
    del causal["keys and values, backward"]
    assert rows_of(context_parallel_size=2, cp_chunks=2, cp_keep_kv=True) == {
        "keys and values, forward": 6 * row, "gradients of keys and values": 10 * row,
    }, "then the other sends most, which has more rows of others than it sends of its own"  # fmt: skip


def test_a_rank_of_context_parallelism_sends_less_over_sp() -> None:
    """All of it hides, except where ranks of Ulysses wait."""
    flows = plan_of({"context_parallel_size": 2, "sequence_parallel_size": 3}).flows
    alone = plan_of({"sequence_parallel_size": 3}).flows
    of_sp, before = (sum(f.num_bytes for f in some if f.group == "sp") for some in (flows, alone))
    assert of_sp * 7 == before * 4, "4 positions of each rank instead of 7"
    assert all(f.can_hide == f.num_bytes for f in flows if f.group == "cp")
    assert {f.group for f in flows if f.kind == "gradients"} == {"dp x cp x sp"}


def test_masks_for_which_nothing_travels() -> None:
    batch, model = BatchConfig(micro_batch_size=BATCH), ModelConfig(**{**SHAPE, "window_size": 1})  # type: ignore[arg-type]
    workload = Workload(model, ParallelConfig(context_parallel_size=2), KernelConfig(), batch, PrecisionConfig())
    assert not [flow for flow in traffic_plan(workload).flows if flow.group == "cp"]
