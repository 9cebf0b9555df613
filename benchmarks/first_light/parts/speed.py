"""A whole training step in bf16 on one GPU (``benchmarks/gpu/step.py``): MFU, the matmul rate, and what the planner predicts of it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from common import Stats
from gpu import step

from first_light.fused import available, using
from first_light.prediction import against, config_of, machine_of, predict, with_workspaces
from first_light.records import Context
from megatron_sp.comm.groups import destroy_process_group
from megatron_sp.estimate.flops import peak_tflops, step_flops_per_token
from megatron_sp.planner import fake_run


def run_small(context: Context) -> None:
    """Measure GPT-2 124M, and 350M."""
    for shape in ("smoke",) if context.tiny else ("124M", "350M"):
        _run(context, shape)


def run_large(context: Context) -> None:
    """Measure 1.3 B parameters."""
    _run(context, "smoke" if context.tiny else "1.3B")


def _run(context: Context, label: str) -> None:
    shape, device = step.SHAPES[label], context.torch_device
    predicted = context.attempt("the planner's prediction", label, lambda: _predicted(context, shape))
    for kernel in available(device):
        _compare(context, f"{label}, kernels of {kernel}", shape, device, kernel, predicted)


def _compare(
    context: Context,
    label: str,
    shape: dict[str, int],
    device: torch.device,
    kernel: str,
    predicted: dict[str, Any] | None,
) -> None:
    """Measure a step with somebody's elementwise kernels and hold it against the predictions."""
    with using(kernel):
        measured = context.attempt("a step", label, lambda: _measured(context, shape, device))
    _empty(device)
    if predicted and measured:
        context.record("measured against predicted", label, **against(measured["median_ms"], predicted["predicted_ms"]))
    if measured and context.device == "cuda":
        config = config_of(shape, f"--global-batch-size {shape['batch']} --fused-kernels {kernel}")
        form = with_workspaces(fake_run.predict(config, 1, "cuda").memory).peak
        # less than the form: this loop holds one batch and no totals
        context.record("peak memory against the form", label, peak_bytes=measured["peak_bytes"], form_bytes=form,
                       **{"measured / form": measured["peak_bytes"] / form})  # fmt: skip


def _predicted(context: Context, shape: dict[str, int]) -> dict[str, Any]:
    config = config_of(
        shape, f"--global-batch-size {shape['batch']}" + (" --device cpu" if context.device == "cpu" else "")
    )
    time = predict(config, machine_of(context.device, config))
    parts = {f"{name}_ms": 1e3 * getattr(time, name) for name in ("products", "attention", "memory", "update", "host")}
    return {"predicted_ms": 1e3 * time.seconds, **parts, "message": f"bound by {time.bound}"}


def _measured(context: Context, shape: dict[str, int], device: torch.device) -> dict[str, Any]:
    kernel = ""

    def build() -> step.Step:
        nonlocal kernel
        made, kernel = step.build_ours(shape, device)
        return made

    try:
        found = step.measure_step(
            build, shape, device, warmup=1 if context.tiny else 5, rounds=2 if context.tiny else 15
        )
    finally:
        destroy_process_group()
    _empty(device)
    rate = step.matmul_rate(device, 64 if context.tiny else 8192, 3 if context.tiny else 15).median
    seconds = Stats.of(found["seconds"])
    causal, full = (
        f * shape["batch"] * shape["seq_length"] / max(seconds.median, 1e-12)
        for f in step_flops_per_token(step.model_config(shape))
    )
    peak, name = peak_tflops(None, device, torch.bfloat16)
    mfu = {"MFU causal_share": causal / (peak * 1e12), "MFU full_share": full / (peak * 1e12)} if peak else {}
    return {
        "median_ms": 1e3 * seconds.median, "min_ms": 1e3 * seconds.low, "max_ms": 1e3 * seconds.high,
        "tokens/s": shape["batch"] * shape["seq_length"] / max(seconds.median, 1e-12), **mfu, "model_tflops": causal / 1e12,
        "matmul_tflops": rate / 1e12, "of matmul_share": causal / max(rate, 1e-12), "peak_bytes": found["peak_bytes"],
        "verdict": "ok" if found["last_loss"] == found["last_loss"] else "wrong",
        "message": f"attention by {kernel}; last loss {found['last_loss']:.4f}; peak rate of {name}",
    }  # fmt: skip


def _empty(device: torch.device) -> None:
    gc.collect()  # models hold reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
