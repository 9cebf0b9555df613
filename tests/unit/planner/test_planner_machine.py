"""The planner's arithmetic: hardware tables, groups on nodes, times of products, attention and collectives."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config
from megatron_sp.planner.fake_run import step_time, takes_flash2
from megatron_sp.planner.hardware import GPUS, LINKS, find_gpu, find_link
from megatron_sp.planner.machine import Machine, reserve
from megatron_sp.planner.timeline import Product, StepTime
from megatron_sp.utils.errors import ConfigError

H100 = replace(GPUS["h100-80g"], host_ms=0.0)  # the GPU's own time
MODEL = (
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 8192 --vocab-size 32000 --mock-data --bf16 --lr 1e-4"
    " --train-iters 1 --attention-dropout 0 --hidden-dropout 0 --global-batch-size 16"
)


def machine(gpus: int = 8, nodes: int = 1, link: str = "ib-400g", **changes: Any) -> Machine:
    made = Machine(H100, gpus, nodes, LINKS["nvlink4"], LINKS[link] if nodes > 1 else None, gpus // nodes, H100.memory_bytes)
    return replace(made, **changes)


def config_of(flags: str = "", gpus: int = 8) -> Config:
    return config_from_args(f"{MODEL} {flags}".split(), world_size=gpus)


def time_of(flags: str = "", where: Machine | None = None) -> StepTime:
    where = where or machine()
    return step_time(config_of(flags, where.gpus), where)


def test_every_gpu_reaches_less_than_it_promises_and_has_a_link() -> None:
    for name, gpu in GPUS.items():
        assert name == gpu.name and gpu.source and 0.4 < gpu.matmul_tflops / gpu.peak_tflops < 1
        assert gpu.attention_backward_tflops < gpu.attention_forward_tflops < gpu.peak_tflops
        assert not LINKS[gpu.link].between_nodes
    for name, link in LINKS.items():
        assert name == link.name and link.source and 0.5 < link.achieved < 1 and link.gbs < link.peak_gbs


@pytest.mark.parametrize(("name", "expected"), [("h100", "h100-80g"), ("a100_80g", "a100-80g"), ("H200", "h200"), ("cpu", "cpu-core")])
def test_an_unknown_gpu_is_answered_with_the_nearest(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpu {name} is unknown: did you mean .*{expected}"):
        find_gpu(name)


def test_links_are_of_two_kinds() -> None:
    with pytest.raises(ConfigError, match="--link nvlink4 does not join nodes: use one of ib-200g"):
        find_link("nvlink4", "--link", between_nodes=True)
    with pytest.raises(ConfigError, match="--link ib400 is unknown: did you mean ib-400g"):
        find_link("ib400", "--link", between_nodes=True)


def test_who_is_whose_neighbour() -> None:
    """16 GPUs on 2 nodes, tp 4: sp 2 stays inside, sp 4 does not, dp x sp has two ranks of a node."""
    two = machine(16, 2)
    assert two.ranks_on_node("tp", 4, 4) == 4 and not two.crosses("sp", 2, 4) and two.crosses("sp", 4, 4)
    assert two.ranks_on_node("dp x sp", 4, 4) == 2
    assert two.link_of("tp", 4, 4).name == "nvlink4" and two.link_of("dp x sp", 4, 4).name == "ib-400g"
    assert machine(16, 16).crosses("tp", 2, 2)
    assert two.ranks_on_node("dp x cp x sp", 4, 4) == 2
    assert not two.crosses("cp", 4, 1, 2) and two.crosses("cp", 4, 1, 4) and two.ranks_on_node("cp", 4, 1, 4) == 2
    assert two.ranks_on_node("cp", 2, 4, 4) == 1, "a cp rank is tp * sp ranks away from the next"


def test_a_ring_uses_all_cards_of_its_ranks_on_a_node() -> None:
    """8 ranks a node with a card each: the ring goes at NVLink's rate; one rank a node has one card; all_to_all only its own."""
    far, size = machine(64, 8), 1e9

    def rate(op: str, group: str, ranks: int, tp: int) -> float:
        return size / (far.seconds(op, group, ranks, tp, 1, size) - far.seconds(op, group, ranks, tp, 1, 0))

    card, inside = LINKS["ib-400g"].gbs * 1e9, LINKS["nvlink4"].gbs * 1e9
    assert rate("all_gather", "dp x sp", 64, 1) == pytest.approx(min(inside, 8 * card))
    assert rate("all_gather", "dp x sp", 16, 4) == pytest.approx(2 * card)
    assert rate("all_gather", "dp x sp", 8, 8) == pytest.approx(card)
    assert rate("all_to_all", "sp", 16, 1) == pytest.approx(card * 15 / 8), "8 of 15 receivers are on the other node"
    one = replace(far, cards=1)
    assert one.seconds("all_gather", "dp x sp", 64, 1, 1, size) > 6 * far.seconds("all_gather", "dp x sp", 64, 1, 1, size)


def test_latency_counts_collectives_and_ranks() -> None:
    here = machine()
    small = here.seconds("all_gather", "tp", 2, 1, 1, 0)
    assert here.seconds("all_gather", "tp", 2, 1, 10, 0) == pytest.approx(10 * small)
    assert here.seconds("all_gather", "dp x sp", 8, 1, 1, 0) > small and here.seconds("all_gather", "tp", 1, 1, 5, 0) == 0


def test_the_reserve_grows_with_groups_and_tensors_unless_it_is_given() -> None:
    here = machine()
    assert reserve(here, 0, 0) < reserve(here, 0, 2) < reserve(here, 2**36, 2)
    assert reserve(replace(here, reserve_gib=3.0), 2**36, 2) == 3 * 2**30
    older = replace(here, gpu=GPUS["a100-80g"])
    assert here.gpu.capability == (9, 0) and reserve(here, 0, 0) - reserve(older, 0, 0) == 2 * (32 - 8.125) * 2**20, "cuBLAS's workspaces"


def test_products() -> None:
    """A large one goes at the rate of the table, a thin one at that of the memory; 133 tiles take as long as 264 on 132 units."""
    large = Product(32768, 8192, 8192, 1, 2).seconds(H100)
    assert 0.9 < 2 * 32768 * 8192 * 8192 / large / (H100.matmul_tflops * 1e12) <= 1
    thin = Product(1, 8192, 8192, 1, 2).seconds(H100)
    assert thin > 0.9 * 2 * 8192 * 8192 / (H100.memory_gbs * 1e9)
    tall = replace(H100, launch_us=0.0)
    assert Product(128 * 133, 256, 8192, 1, 2).seconds(tall) == pytest.approx(Product(128 * 264, 256, 8192, 1, 2).seconds(tall), rel=0.35)


def test_attention_grows_with_the_square_and_a_mask_halves_it() -> None:
    once, long = time_of().attention, time_of("--seq-length 16384").attention
    assert 3.8 < long / once < 4.1
    everybody = time_of("--model-family bert --seq-length 8192")
    assert everybody.attention == pytest.approx(2 * once, rel=0.02)
    assert time_of("--sp-size 8 --sp-overlap-mode none").attention == pytest.approx(once, rel=0.05), "of fewer heads of more sequences"
    assert time_of("--num-attention-heads 32").attention == pytest.approx(once / H100.narrow_heads, rel=0.02)
    plain = time_of("--attention-backend unfused")
    assert plain.attention == 0 and plain.memory > 3 * time_of().memory, "scores go through memory"


@pytest.mark.parametrize("flags, is_older", [
    ("--attention-backend flash2", True), ("--attention-backend flash --attention-dropout 0.1", True),
    ("--attention-backend fused --deterministic-mode", True), ("--deterministic-mode", False), ("--attention-dropout 0.1", False),
])  # fmt: skip
def test_an_older_attention_kernel_is_slower(flags: str, is_older: bool) -> None:
    """On a Hopper; on an A100 nothing is faster."""
    assert takes_flash2(config_of(flags)) is is_older
    if is_older:
        one = machine(gpu=replace(H100, flash2_share=1.0))
        assert time_of(flags).attention == pytest.approx(time_of(flags, one).attention / H100.flash2_share, rel=0.01)


def test_bytes_between_the_products_follow_the_model() -> None:
    plain = time_of().memory
    for flags in ("--hidden-dropout 0.1", "--position-embedding-type rope", "--qk-layernorm", "--swiglu --ffn-hidden-size 8192"):
        assert time_of(flags).memory > plain, flags
    assert time_of("--tp-size 2 --sequence-parallel").memory < time_of("--tp-size 2").memory


def test_a_step_is_the_sum_of_its_parts_and_names_the_largest() -> None:
    time = time_of("--sp-size 2 --sp-overlap-mode none --zero-stage 1")
    parts = time.products + time.attention + time.memory + time.update + time.host + time.overlap + sum(e.exposed for e in time.exchanges)
    assert time.seconds == pytest.approx(parts) and time.bound.startswith("matrix products")
    assert all(0 <= exchange.hidden <= exchange.seconds for exchange in time.exchanges)
    assert time_of("--seq-length 131072").bound.startswith("attention")
    slow = machine(8, 8, "eth-1g")
    assert time_of("--sp-size 8 --zero-stage 1", slow).bound.startswith("eth-1g: ")


def test_recomputation_costs_what_it_computes_again() -> None:
    none, selective, full = (
        time_of(f"--sp-size 2{flag}") for flag in ("", " --recompute-granularity selective", " --recompute-granularity full")
    )
    assert none.recompute == 0 < selective.recompute < full.recompute
    assert none.seconds < selective.seconds < full.seconds
    half = time_of("--sp-size 2 --recompute-granularity full --recompute-method block --recompute-num-layers 2")
    assert half.recompute == pytest.approx(full.recompute / 2)
    assert full.products > 1.25 * none.products


def test_overlap_hides_what_it_can_and_no_more() -> None:
    flags = "--sp-size 8 --seq-length 65536 --sp-overlap-mode"
    none, split, chunked = (time_of(f"{flags} {mode}") for mode in ("none", "split-qkv", "chunked"))

    def exposed(time: StepTime) -> float:
        return sum(e.exposed for e in time.exchanges if e.flow.group == "sp")

    assert exposed(none) > exposed(split) > exposed(chunked) > 0
    assert none.overlap < split.overlap < chunked.overlap and chunked.seconds < none.seconds
    slow = machine(8, 8, "eth-1g")
    over = [time_of(f"--sp-size 8 --sp-overlap-mode {mode}", slow).seconds for mode in ("none", "chunked")]
    assert 0.9 < over[1] / over[0] < 1.01, "there is not enough computation above it"


def test_stage_3_gathers_for_every_micro_batch_and_accumulation_is_not_free() -> None:
    far = machine(16, 16, "eth-25g")
    one, three = (time_of(f"--global-batch-size 256 --zero-stage {stage}", far) for stage in (1, 3))
    assert three.exposed > 3 * one.exposed
    assert time_of("--global-batch-size 64").memory > 4 * time_of("--micro-batch-size 2").memory


def test_smaller_models_wait_for_python() -> None:
    here = machine(gpu=GPUS["h100-80g"])
    shapes = ("--hidden-size 128 --num-attention-heads 2 --seq-length 128", "--seq-length 65536")
    tiny, long = (time_of(f"{flags} --cuda-graphs off", here) for flags in shapes)
    assert tiny.host > 0 and tiny.bound.startswith("Python") and long.host == 0 < long.python


@pytest.mark.long
def test_a_run_does_not_reach_its_kernels_rates() -> None:
    ideal = machine(gpu=replace(H100, sustained=1.0))
    assert time_of().products == pytest.approx(time_of(where=ideal).products / H100.sustained)
    assert math.isclose(time_of().update, time_of(where=ideal).update)


def test_bert_sees_both_ways() -> None:
    """Twice the attention of a GPT of the same shape."""
    gpt, bert = config_of(), config_of()
    bert.model.model_family = "bert"
    times = [step_time(config, machine()) for config in (gpt, bert)]
    assert times[1].attention == pytest.approx(2 * times[0].attention, rel=0.01) and times[1].products >= times[0].products


def test_an_mlp_in_pieces_computes_its_first_layer_again() -> None:
    whole, pieces = time_of(), time_of("--mlp-chunks 2")
    assert 1.08 * whole.products < pieces.products < 1.25 * whole.products


@pytest.mark.long
def test_fewer_multiprocessors_for_nccl_slow_down_what_they_carry_and_not_what_hides_it() -> None:
    """An H100's NCCL takes 0.15 of 132 by itself; half of that costs half, and moves half."""

    def stepped(flags: str, **parallel: int) -> StepTime:
        config = config_of(f"{flags} --sp-overlap-mode chunked --zero-stage 1 --sp-size 2")
        for name, value in parallel.items():
            setattr(config.parallel, name, value)
        return step_time(config, machine())

    free, same = stepped(""), stepped("", nccl_sp_ctas=64, nccl_dp_ctas=20)
    assert same == free, "as many as it takes anyway"
    for name, group in (("nccl_sp_ctas", "sp"), ("nccl_dp_ctas", "dp x sp")):
        few = stepped("", **{name: 5})
        share = 5 / (0.15 * 132)
        for before, after in zip(free.exchanges, few.exchanges, strict=True):
            if before.flow.group == group:
                least = before.flow.num_bytes / (share * LINKS["nvlink4"].gbs * 1e9)
                assert after.seconds == pytest.approx(max(before.seconds, least), rel=0.02)
            else:
                assert after.seconds == before.seconds
        cost = sum(0.15 * (share if e.flow.group == group else 1.0) * e.hidden for e in few.exchanges)
        assert few.overlap == pytest.approx(cost, rel=0.02) and few.overlap != free.overlap
