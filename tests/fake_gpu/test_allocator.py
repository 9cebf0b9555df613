"""The caching allocator of the fake device, and the fake run of planner/ as on CUDA: it predicts the peak at real shapes.

What is compared is the peak of allocated bytes, storage by storage, with a flash kernel's own buffers; what the allocator
reserves beyond it is fragmentation, which nothing predicts. Not known here: what NCCL, cuBLAS and other kernels
allocate.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, comb

import pytest

from fake_gpu.allocator import EMPTIED, Allocator, Entry, held_at_peak
from fake_gpu.jobs import Job, require_sound, run_rank
from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.planner.fake_run import predict

MIB = 2**20
TOLERANCE = 0.01  # of the peak: labels, statistics of norms, and the allocator's blocks of 512 bytes
TRAINING = "--mock-data --train-iters 2 --micro-batch-size 1 --lr 1e-2 --lr-decay-style constant --eval-iters 0 --vocab-size 32000 --bf16"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
LLAMA = (
    f"{NO_DROPOUT} --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear"
    " --untie-embeddings-and-output-weights"
)
SEVEN = f"{TRAINING} {LLAMA} --num-layers 3 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --seq-length 4096"
ONE = f"{TRAINING} {LLAMA} --num-layers 4 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5504"
GPT = f"{TRAINING} --attention-dropout 0 --hidden-dropout 0.1 --num-layers 3 --hidden-size 2048 --num-attention-heads 16"
SP = f"{ONE} --seq-length 65536 --sequence-parallel-size 8 --sp-overlap-mode"
CHUNKED, TP_SEQ = f"{SP} chunked --sp-overlap-comm", "--tensor-model-parallel-size 2 --sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ATTENTION = "--mlp-chunks 8 --lm-head-chunk-tokens 256 --zero-stage 1"  # attention is the worst moment
MLP = "--lm-head-chunk-tokens 256 --zero-stage 1"  # the MLP is


def large(flags: str, world_size: int = 1, batch: int = 1) -> Job:
    """A job of a model that is never drawn."""
    return Job(f"{flags} --global-batch-size {batch}", world_size, large=True)


CASES = {
    "7B": large(SEVEN), "7B, two micro-batches": large(SEVEN, 1, 2), "7B, full": large(f"{SEVEN} {FULL}"),
    "7B, tp_seq 8": large(f"{SEVEN} --tensor-model-parallel-size 8 --sequence-parallel", 8),
    "7B, stage 1": large(f"{SEVEN} --zero-stage 1", 8, 16), "7B, stage 2": large(f"{SEVEN} --zero-stage 2", 8, 16),
    "7B, stage 3": large(f"{SEVEN} --zero-stage 3", 8, 8), "7B, stage 3, full": large(f"{SEVEN} --zero-stage 3 {FULL}", 8, 8),
    "7B, activations on the host": large(f"{SEVEN} --offload-activations"),
    "64K": large(CHUNKED, 8), "64K, stage 3, full": large(f"{CHUNKED} --zero-stage 3 {FULL}", 8),
    "64K, split": large(f"{SP} split-qkv --sp-overlap-comm", 8),
    "64K, activations on the host": large(f"{CHUNKED} --offload-activations {MLP}", 8),
    "optimizer on the host": large(f"{ONE} --seq-length 4096 --zero-stage 1 --offload-optimizer", 8, 8),
    "groups": large(f"{ONE} --seq-length 16384 --num-query-groups 4"), "GPT": large(f"{GPT} --seq-length 4096"),
    "attention": large(f"{ONE} --seq-length 32768 {ATTENTION}", 8, 8),
    "attention, full": large(f"{ONE} --seq-length 32768 {ATTENTION} {FULL}", 8, 8),
    "attention, selective": large(f"{ONE} --seq-length 32768 {ATTENTION} --recompute-granularity selective", 8, 8),
    "attention, groups": large(f"{ONE} --seq-length 32768 --num-query-groups 4 {ATTENTION} {FULL}", 8, 8),
    "attention, tp_seq": large(f"{ONE} --seq-length 32768 {TP_SEQ} {ATTENTION} {FULL}", 8, 4),
    "attention, GPT": large(f"{GPT} --seq-length 32768 {ATTENTION} {FULL}", 8, 8),
    "attention, sp": large(f"{CHUNKED} {ATTENTION} {FULL}", 8), "attention, sp, no overlap": large(f"{SP} none {ATTENTION} {FULL}", 8),
    "attention, sp, split": large(f"{SP} split-qkv --sp-overlap-comm {ATTENTION} {FULL}", 8),
    "64K, full, activations on the host": large(f"{CHUNKED} --offload-activations {MLP} {FULL}", 8),
    "64K, full": large(f"{CHUNKED} {MLP} {FULL}", 8),
    "64K, full, exchange repeated": large(f"{CHUNKED} {MLP} {FULL} --recompute-attention exchange", 8),
    "64K, full, attention repeated": large(f"{CHUNKED} {MLP} {FULL} --recompute-attention full", 8),
    "window, full": large(f"{ONE} --seq-length 32768 --window-size 4096 {MLP} {FULL}", 8, 8),
    "MLP": large(f"{ONE} --seq-length 32768 {MLP}", 8, 8), "MLP, tp_seq": large(f"{ONE} --seq-length 32768 {TP_SEQ} {MLP}", 8, 4),
    "MLP, GPT": large(f"{GPT} --seq-length 32768 {MLP}", 8, 8),
}  # fmt: skip
OLMOE = f"{ONE} --seq-length 4096 --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1024"
CAPTURED = "--train-iters 3 --cuda-graphs on --cuda-graph-warmup-steps 1"
CASES |= {  # what a capture allocates is what an eager step does
    "7B, captured": large(f"{SEVEN} {CAPTURED}", 1, 2), "7B, stage 2, captured": large(f"{SEVEN} --zero-stage 2 {CAPTURED}", 8, 16),
    "64K, stage 3, full, captured": large(f"{CHUNKED} --zero-stage 3 {FULL} {CAPTURED}", 8),
}  # fmt: skip
MIXTRAL = (
    f"{TRAINING} {LLAMA} --num-layers 2 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --seq-length 4096"
    " --num-experts 8 --moe-router-topk 2"
)


def experts(flags: str, world_size: int = 1, ep: int = 1, chunks: int = 1, tokens: int = 4096) -> Job:
    """A job of a model with experts whose load is even: what each rank sends to each other is the mean."""
    words = flags.split()
    num, k = (int(words[words.index(name) + 1]) for name in ("--num-experts", "--moe-router-topk"))
    share = 1 - comb(num - num // ep, k) / comb(num, k)
    counts = (tokens * k // num // chunks, ceil(tokens * share / chunks))
    return replace(large(f"{flags} --ep-size {ep} --moe-chunks {chunks}", world_size, world_size), counts=counts)


CASES |= {
    "OLMoE": experts(OLMOE), "OLMoE, full": experts(f"{OLMOE} {FULL}"), "OLMoE, ep": experts(f"{OLMOE} --zero-stage 1", 8, 4),
    "OLMoE, ep, chunks": experts(f"{OLMOE} --zero-stage 1 {FULL}", 8, 8, 2),
    "OLMoE, ep, 4 chunks": experts(f"{OLMOE} --zero-stage 1", 8, 8, 4),
    "OLMoE, ep, stage 3": experts(f"{OLMOE} --zero-stage 3", 8, 4), "OLMoE, fp16": experts(OLMOE.replace("--bf16", "--fp16"), 8, 8),
    "experts with biases": experts(f"{GPT} --seq-length 16384 --num-experts 8 --moe-router-topk 4 {MLP}", 8, 2, tokens=16384),
    "Mixtral": experts(MIXTRAL), "Mixtral, 16K": experts(f"{MIXTRAL} --seq-length 16384 {MLP}", 8, 8, tokens=16384),
    "Mixtral, ep, shared": experts(f"{MIXTRAL} --moe-shared-expert-intermediate-size 4096 --zero-stage 1 {FULL}", 8, 8),
}  # fmt: skip
# Triton's kernels have no temporaries
WITHOUT_TRITON = (
    "7B", "7B, stage 3", "64K", "GPT", "attention", "attention, full", "attention, sp", "MLP", "MLP, tp_seq", "MLP, GPT",
    "OLMoE, ep, chunks", "Mixtral, 16K", "experts with biases",
)  # fmt: skip
CASES |= {f"{name}, without Triton": replace(CASES[name], flags=f"{CASES[name].flags} --fused-kernels torch") for name in WITHOUT_TRITON}
IN_EVERY_RUN = ("7B, stage 3, full", "optimizer on the host")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.long) for name in CASES])
def test_a_run_without_contents_predicts_the_peak(name: str) -> None:
    job = CASES[name]
    outcome = run_rank(job)
    require_sound(outcome)
    peak, plan = outcome["peak"], predict(config_from_args(job.flags.split(), world_size=job.world_size), job.world_size, "cuda").memory
    held = "\n".join(f"{num_bytes / MIB:10.1f} MiB of {where}" for where, num_bytes in outcome["held"].items())
    assert plan.peak == pytest.approx(peak, rel=TOLERANCE), f"{plan.text()}\nfound {peak / MIB:.1f} MiB:\n{held}"
    # how much is broken into pieces is not predicted. Most are within 1.12; 7B at stage 3 with Triton's kernels is at 1.22
    assert peak <= outcome["expandable"] < 1.25 * peak, "expandable segments: this much beside the peak"
    assert peak <= outcome["reserved"] < 1.45 * peak, "segments of fixed sizes"


# the allocator's rules


def reserved(*entries: tuple[int, int], expandable: bool = False, stream: int = 0) -> int:
    """Bytes reserved for (key, bytes or 0) on one stream."""
    return Allocator(expandable=expandable).run(Entry(key, size, stream, "") for key, size in entries).reserved


@pytest.mark.parametrize(
    ("entries", "segments"),
    [
        ([(1, 1)], 2), ([(1, MIB), (2, MIB)], 2), ([(1, MIB), (2, MIB), (3, 1)], 4),
        ([(1, MIB + 1)], 20), ([(1, 9 * MIB), (2, 9 * MIB)], 20), ([(1, 9 * MIB), (2, 9 * MIB), (3, 3 * MIB)], 40),
        ([(1, 10 * MIB)], 10), ([(1, 10 * MIB + 1)], 12),
        ([(1, 12 * MIB), (1, 0), (2, 12 * MIB)], 12),  # reused
        ([(1, 12 * MIB), (1, 0), (2, 13 * MIB)], 26),  # too small
        ([(1, 64 * MIB), (2, 12 * MIB), (1, 0), (2, 0), (3, 12 * MIB), (4, 60 * MIB)], 76),  # the smallest that fits
        ([(1, 30 * MIB), (1, 0), (2, 12 * MIB), (3, 18 * MIB)], 30),  # split
        ([(1, 30 * MIB), (1, 0), (2, 29 * MIB), (3, MIB + 1)], 50),  # a rest of 1 MiB is not split off
        ([(1, 30 * MIB), (1, 0), (2, 15 * MIB), (3, 15 * MIB), (2, 0), (3, 0), (4, 30 * MIB)], 30),  # neighbours are merged
    ],
)  # fmt: skip
def test_segments(entries: list[tuple[int, int]], segments: int) -> None:
    assert reserved(*entries) == segments * MIB


def test_a_block_is_taken_on_its_own_stream_alone() -> None:
    allocator = Allocator().run([Entry(1, 12 * MIB, 0, ""), Entry(1, 0, 0, ""), Entry(2, 12 * MIB, 7, "")])
    assert allocator.reserved == 24 * MIB and allocator.peak_allocated == 12 * MIB


@pytest.mark.parametrize(
    ("entries", "mapped"),
    [
        ([(1, 512)], 2), ([(1, 21 * MIB)], 40),
        ([(1, 30 * MIB), (2, 10 * MIB)], 40), ([(1, 12 * MIB), (1, 0), (2, 30 * MIB)], 40),  # it grows at its end
        ([(1, 12 * MIB), (2, 8 * MIB), (1, 0), (3, 30 * MIB)], 60),  # a hole is not at the end
    ],
)  # fmt: skip
def test_expandable_segments(entries: list[tuple[int, int]], mapped: int) -> None:
    assert reserved(*entries, expandable=True) == mapped * MIB


def test_what_is_held_at_the_peak() -> None:
    entries = [Entry(1, 100, 0, "a"), Entry(2, 50, 0, "b"), Entry(1, 0, 0, ""), Entry(3, 70, 0, "a"), Entry(2, 0, 0, "")]
    assert held_at_peak(entries) == {"a": 100, "b": 50}


@pytest.mark.parametrize(("expandable", "left"), [(False, 12), (True, 20)])
def test_an_emptied_cache(expandable: bool, left: int) -> None:
    """Before a capture: what is in use stays, and so does the memory of graphs."""
    entries = [Entry(1, 12 * MIB, 0, ""), Entry(2, 30 * MIB, 0, ""), Entry(2, 0, 0, ""), Entry(3, 12 * MIB, 7, ""), Entry(3, 0, 7, "")]
    of_graph = 20 if expandable else 12
    assert Allocator(expandable=expandable).run([*entries, Entry(EMPTIED, 0, 7, "")]).reserved == (left + of_graph) * MIB
    assert Allocator(expandable=expandable).run([*entries, Entry(EMPTIED, 0, 9, "")]).reserved == left * MIB
