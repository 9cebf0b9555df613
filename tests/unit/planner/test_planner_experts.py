"""Planning of models with experts: how many ranks share them, in how many chunks, and memory for uneven loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_sp.commands import cli
from megatron_sp.planner.command import read_model
from megatron_sp.planner.hardware import GPUS, LINKS
from megatron_sp.planner.machine import Machine
from megatron_sp.planner.search import Findings, search

MODEL = """--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 4096 --vocab-size 32000 --swiglu --disable-bias-linear
           --num-experts 12 --moe-router-topk 2 --moe-ffn-hidden-size 2048 --global-batch-size 16"""
SMALL = "--micro-batch-size 1 --zero-stage 1 --recompute-granularity full"
GPU = replace(GPUS["h100-80g"], host_ms=0.0)  # so small a model would wait for Python in every layout


pytestmark = pytest.mark.usefixtures("rough_runs")


def found_for(flags: str, gpus: int = 4) -> Findings:
    base, given, _ = read_model(f"{MODEL} {flags}".split(), gpus, False)
    return search(base, given, Machine(GPU, gpus, 1, LINKS["nvlink4"], None, gpus, GPU.memory_bytes), finalists=2)


def test_all_sizes_are_tried_that_divide_experts_and_ranks() -> None:
    found = found_for(f"{SMALL} --tp-size 1 --sp-size 1 --cp-size 1")
    assert {c.layout.ep for c in found.fitting} == {1, 2, 4} and not found.rejected
    found = found_for(f"{SMALL} --tp-size 1 --sp-size 1 --cp-size 1 --global-batch-size 12", 6)
    assert {c.layout.ep for c in found.fitting} == {1, 2, 3, 6}
    with_tp = found_for(f"{SMALL} --tp-size 2 --sp-size 1 --cp-size 1 --sequence-parallel")
    assert {c.layout.ep for c in with_tp.fitting} == {1, 2, 4}, "tp ranks have different tokens"


def test_a_size_that_is_given_is_the_only_one() -> None:
    found = found_for(f"{SMALL} --ep-size 4")
    assert {c.layout.ep for c in found.fitting} == {4}
    assert {c.layout.axes for c in found.fitting} >= {(1, 1, 1, 1), (1, 4, 1, 1), (1, 1, 4, 1), (2, 1, 1, 1)}
    refused = " ".join(each.why for each in found.rejected)
    assert "expert_model_parallel_size (4) must divide the ranks that have different tokens, sp * cp * dp = 2" in refused, "tp without seq"


def test_of_the_best_layouts_two_chunks_are_tried() -> None:
    alone = f"{SMALL} --tp-size 1 --sp-size 1 --cp-size 1 --ep-size 4"
    found = found_for(alone)
    assert sorted(c.layout.moe_chunks for c in found.candidates) == [1, 2]
    (two,) = (c.layout for c in found.candidates if c.layout.moe_chunks == 2)
    assert two.flags()[1] == "--moe-chunks 2" and "ep 4 in 2 chunks" in two.words(4)
    assert [c.layout.moe_chunks for c in found_for(f"{alone} --moe-chunks 1").candidates] == [1]
    (given,) = found_for(f"{SMALL} --tp-size 1 --sp-size 1 --cp-size 1 --ep-size 2 --moe-chunks 4").candidates
    assert given.config.parallel.moe_chunks == 4 and given.time.seconds > 0
    free = found_for(f"{SMALL} --tp-size 1 --sp-size 1 --cp-size 1 --moe-chunks 4").fitting
    assert {(c.layout.ep, c.config.parallel.moe_chunks) for c in free} == {(1, 1), (2, 4), (4, 4)}


def test_uneven_loads_need_more() -> None:
    flags = "--micro-batch-size 4 --zero-stage 1 --tp-size 1 --sp-size 1 --cp-size 1 --ep-size 4 --moe-chunks 1"
    even, uneven = (found_for(f"{flags} --moe-worst-load {load}").candidates[0] for load in (1, 3))
    assert uneven.memory.peak > even.memory.peak


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--ep-size 5", "num_experts (12) must be a multiple of expert_model_parallel_size (5): each rank has as many; use"),
        ("--ep-size 0", "--expert-model-parallel-size (0) must be at least 1"),
        ("--ep-size 12", "expert_model_parallel_size (12) must divide the ranks that have different tokens, sp * cp * dp = 4"),
    ],
)
def test_sizes_that_cannot_be(flags: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *f"{MODEL} --gpus 4 --gpu h100-80g {flags}".split()]) == 2
    said = capsys.readouterr().err
    assert text in said and "use --ep-size 1\n" not in said
