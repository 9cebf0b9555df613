"""Attention kernels (``benchmarks/gpu/attention_kernels.py``) on shapes of the replay and shorter ones."""

from __future__ import annotations

import torch
from gpu import attention_kernels
from gpu.attention_kernels import CHANNELS, KERNELS, SMOKE_KERNELS, TOKENS, Shape

from first_light.records import Context

_LENGTHS = (4096, 16384, 65536)


def run(context: Context) -> None:
    """Record TFLOP/s of each kernel, forward and backward, and why one is left out."""
    device, dtype = context.torch_device, torch.bfloat16 if context.device == "cuda" else torch.float32
    kinds = SMOKE_KERNELS if context.tiny else KERNELS
    tokens, channels, lengths = (256, 64, (64,)) if context.tiny else (TOKENS, CHANNELS, _LENGTHS)
    reasons: dict[str, str] = {}
    for s in lengths:
        for d in (32,) if context.tiny else (128, 64):
            shape = Shape(max(1, tokens // s), s, channels // d, d, True)
            found = attention_kernels.measure(shape, kinds, device, dtype, 2 if context.tiny else 5, reasons)
            for name, rates in found.items():
                values = {
                    f"{way}{unit}": rates[f"{way}{unit}"] for way in ("forward", "backward") for unit in ("_tflops",)
                }
                times = {f"{way}_ms": 1e3 * rates[f"{way}_seconds"]["median"] for way in ("forward", "backward")}
                context.record("causal, bf16", f"{shape}: {name}", "ok", **values, **times)
            if context.device == "cuda":
                torch.cuda.empty_cache()
    for name, reason in reasons.items():
        context.record("left out", name, "wrong" if ": wrong by " in reason else "absent", reason)
