"""Rank 0's work of an eight-GPU Ulysses run on one GPU (``benchmarks/gpu/ulysses_replay.py``), against the planner's computation."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from common import Stats
from gpu import ulysses_replay

from first_light.fused import available, using
from first_light.prediction import against, config_of, machine_of, predict
from first_light.records import Context


def run_1b_64k(context: Context) -> None:
    """Replay 1B parameters at 64K tokens."""
    _run(context, "1B-64K")


def run_7b_16k(context: Context) -> None:
    """Replay 7B parameters at 16K tokens."""
    _run(context, "7B-16K")


def _run(context: Context, label: str) -> None:
    label = "smoke" if context.tiny else label
    shape, device = ulysses_replay.SHAPES[label], context.torch_device
    predicted = context.attempt("the planner's prediction", label, lambda: _predicted(context, shape))
    kernels = available(device)
    every = [(name, build, kernels[-1]) for name, build in ulysses_replay.contenders(shape, device, peer=False).items()]
    every += [(name, build, "torch") for name, build, _ in every if name == "none" and kernels[-1] != "torch"]
    for name, build, kernel in every:
        row = f"{label}: {name}, kernels of {kernel}"
        with using(kernel):
            found = context.attempt("a micro-batch", row, lambda build=build: _measured(context, build, shape, device))  # type: ignore[misc]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if found and predicted and name in ("none", "no exchange") and kernel == kernels[-1]:
            what = "computation" if name == "no exchange" else "computation, or Python"
            expected = predicted["computed_ms"] if name == "no exchange" else predicted["predicted_ms"]
            context.record("measured against predicted", f"{label}, {what}", **against(found["median_ms"], expected))


def _predicted(context: Context, shape: dict[str, int]) -> dict[str, Any]:
    more = " --device cpu" if context.device == "cpu" else ""
    config = config_of(
        shape, f"--sequence-parallel-size {ulysses_replay.SP} --global-batch-size 1{more}", ulysses_replay.SP
    )
    machine = machine_of(context.device, config, ulysses_replay.SP)
    time = predict(config, machine)
    computed = time.products + time.attention + time.memory
    return {
        "predicted_ms": 1e3 * max(computed, time.python), "computed_ms": 1e3 * computed, "python_ms": 1e3 * time.python,
        "exchanges_ms": 1e3 * time.exposed,
        "message": "forward and backward, on the GPU or in Python; without the exchanges, which stand beside it, and the update",
    }  # fmt: skip


def _measured(
    context: Context, build: Callable[[], Any], shape: dict[str, int], device: torch.device
) -> dict[str, Any]:
    found = ulysses_replay.measure(build, device, warmup=1 if context.tiny else 2, rounds=2 if context.tiny else 7)
    ms = Stats.of(found["ms"])
    return {
        "median_ms": ms.median, "min_ms": ms.low, "max_ms": ms.high, "goal_ms": shape["goal_ms"] or None,
        "tokens/s": shape["seq_length"] // ulysses_replay.SP / max(ms.median, 1e-9) * 1e3, "peak_bytes": found["peak_bytes"],
        "exchanges": found["exchanges"], "received_bytes": found["exchanged_bytes"], "message": f"attention by {found['kernel']}",
    }  # fmt: skip
