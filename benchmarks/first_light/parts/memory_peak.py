"""Peak memory of a real training step (``benchmarks/memory.py``) against the closed form: within 5 %."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import memory
import torch

from first_light.fused import available, using
from first_light.prediction import with_workspaces
from first_light.records import Context
from megatron_sp.estimate.memory_plan import MemoryPlan

BOUND = 0.05
_SHAPE = {
    "num_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 32000, "seq_length": 4096, "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}  # fmt: skip
_TINY = {**_SHAPE, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 256, "seq_length": 128}
LAYOUTS = {
    "GPT": memory.Layout(), "Llama": memory.Layout(model=memory.LLAMA), "BERT": memory.Layout(model=memory.BERT),
    "recompute selective": memory.Layout(kernels=memory.SELECTIVE), "recompute full": memory.Layout(kernels=memory.FULL),
    "hidden dropout": memory.Layout(model=memory.DROPOUT), "2 micro-batches": memory.Layout(micro_batches=2),
    "ZeRO 3": memory.Layout(zero=memory.zero(3)),
}  # fmt: skip


def run(context: Context) -> None:
    """Record each layout."""
    shape = _TINY if context.tiny else _SHAPE
    names = ("GPT", "Llama") if context.tiny else tuple(LAYOUTS)
    for name in names:
        for kernel in available(context.torch_device):
            with using(kernel):
                row = f"{name}, kernels of {kernel}"
                context.attempt("bytes of a step", row, lambda n=name, k=kernel: _compare(context, n, shape, k))  # type: ignore[misc]


def _layout(name: str, device: str, kernel: str) -> memory.Layout:
    layout = LAYOUTS[name]
    return replace(layout, bf16=device == "cuda", kernels={**layout.kernels, "fused_kernels": kernel})


def form(name: str, shape: dict[str, Any], batch: int, device: str, kernel: str) -> MemoryPlan:
    """Return the closed form of a layout with somebody's elementwise kernels; on a GPU without cuBLAS's workspaces."""
    plan: MemoryPlan = memory.predict(_layout(name, device, kernel), shape, batch, device)
    return plan


def _compare(context: Context, name: str, shape: dict[str, Any], kernel: str) -> dict[str, Any]:
    layout = _layout(name, context.device, kernel)
    batch = 1 if not context.tiny else 2
    gc.collect()  # the model of the layout before holds reference cycles, and would count, too
    if context.device == "cuda":
        torch.cuda.empty_cache()
    (measured,) = memory.run(layout, shape, batch, context.device)
    plan = form(name, shape, batch, context.device, kernel)
    if context.device == "cuda":
        plan = with_workspaces(plan)
    ratio = measured["peak"] / plan.peak
    return {
        "verdict": "ok" if abs(ratio - 1) <= BOUND else "wrong", "peak_bytes": measured["peak"], "form_bytes": plan.peak,
        "measured / form": ratio, "stays_bytes": measured["resident"], "form of what stays_bytes": plan.resident,
        "message": f"the form's worst moment: {plan.worst.phase}, {plan.worst.name}",
    }  # fmt: skip
