"""Predicted steps beside those that an H200 took: ``docs/benchmarks/gpu.md``."""

from __future__ import annotations

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.planner.fake_run import step_time
from megatron_sp.planner.hardware import GPUS, LINKS
from megatron_sp.planner.machine import Machine
from megatron_sp.planner.timeline import StepTime

H200 = GPUS["h200"]
MORE = "--mock-data --bf16 --lr 1e-4 --train-iters 1 --attention-dropout 0 --hidden-dropout 0"
EAGER = "--cuda-graphs off"  # as they ran that day
GPT_124M = """--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50304
 --micro-batch-size 16 --global-batch-size 16"""
GPT_1_3B = """--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 50304
 --micro-batch-size 8 --global-batch-size 8"""
LLAMA_1B = """--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --num-query-groups 8 --seq-length 8192
 --vocab-size 32000 --micro-batch-size 2 --global-batch-size 2 --swiglu --normalization RMSNorm --position-embedding-type rope
 --disable-bias-linear --untie-embeddings-and-output-weights"""
GPT_1B_64K = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 65536 --vocab-size 50304 --global-batch-size 1 --sp-size 8"
)
GPT_7B_16K = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 16384 --vocab-size 50304 --global-batch-size 1 --sp-size 8"
)


def time_of(flags: str, gpus: int = 1) -> StepTime:
    config = config_from_args(f"{EAGER} {flags} {MORE}".split(), world_size=gpus)
    return step_time(config, Machine(H200, gpus, 1, LINKS[H200.link], None, gpus, H200.memory_bytes))


@pytest.mark.parametrize(("flags", "of_gpu_ms", "step_ms"), [
    (GPT_124M, 37.5, 79.5), (GPT_1_3B, 272.2, 277.3), (LLAMA_1B, 261.6, 268.5),
])  # fmt: skip
def test_steps_of_one_gpu(flags: str, of_gpu_ms: float, step_ms: float) -> None:
    """The GPU's own time is that of a step captured in a graph."""
    time = time_of(flags)
    assert 1e3 * (time.seconds - time.host) == pytest.approx(of_gpu_ms, rel=0.04)
    assert 1e3 * time.seconds == pytest.approx(step_ms, rel=0.06)
    assert time.bound.startswith("Python") == (flags == GPT_124M)


@pytest.mark.parametrize(("flags", "mode", "ms"), [
    (GPT_1B_64K, "none", 475.4), (GPT_1B_64K, "split-qkv", 482.9), (GPT_1B_64K, "chunked --sp-head-chunks 2", 488.2),
    (GPT_7B_16K, "none", 225.1), (GPT_7B_16K, "split-qkv", 259.1), (GPT_7B_16K, "chunked --sp-head-chunks 2", 256.1),
    (GPT_7B_16K, "chunked --sp-head-chunks 4", 325.3),
])  # fmt: skip
def test_micro_batches_of_a_rank_whose_exchanges_are_copies(flags: str, mode: str, ms: float) -> None:
    """At 64K tokens the GPU binds, at 16K Python, which each exchange costs a quarter of a millisecond more."""
    time = time_of(f"{flags} --sp-overlap-mode {mode}", 8)
    computed = time.products + time.attention + time.memory
    assert 1e3 * max(computed, time.python) == pytest.approx(ms, rel=0.07)
    assert (time.python > computed) == (flags == GPT_7B_16K)


@pytest.mark.long
def test_captured_steps_wait_for_no_python() -> None:
    """Where the flags allow a capture; a pipeline is launched by Python."""
    eager, captured = time_of(GPT_124M), time_of(f"{GPT_124M} --cuda-graphs auto")
    assert captured.python == 0 < eager.python and captured.seconds == pytest.approx(eager.seconds - eager.host)
    of_pipeline = GPT_124M.replace("--micro-batch-size 16", "--micro-batch-size 4") + " --pp-size 2 --cuda-graphs auto"
    assert time_of(of_pipeline, 2).python > 0


def test_python_runs_beside_the_gpu() -> None:
    """It is waited for as far as it takes longer, it counts layers and micro-batches, and a repeated forward pass is a third of it."""
    one, two = time_of(GPT_124M), time_of(GPT_124M.replace("--global-batch-size 16", "--global-batch-size 32"))
    assert one.python == pytest.approx(13 * 6.0e-3) and two.python == pytest.approx(2 * one.python)
    assert one.seconds == pytest.approx(one.python), "products, attention and memory run meanwhile"
    again = time_of(f"{GPT_124M} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert again.python == pytest.approx(17 * 6.0e-3)
    assert time_of(GPT_1_3B).host == 0.0


def test_attention_at_64k_tokens() -> None:
    """Six layers took 21.1 ms forward and 60.0 backward by cuDNN; products, with the LM head, 26.5."""
    time = time_of(GPT_1B_64K.replace("--num-layers 24", "--num-layers 6"), 8)
    assert 1e3 * time.attention * H200.sustained == pytest.approx(21.1 + 60.0, rel=0.01)
    assert 1e3 * (time.products + time.attention + time.memory) == pytest.approx(118.4, rel=0.05)
