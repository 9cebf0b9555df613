"""When exchanges and computation of the replay ran, by events on their streams; and what a micro-batch's GPU time goes into.

*exposed*: time for which the compute stream waited for a copy that stands for an exchange. *exchange*: how long the
copies took, from being started to being there. *hidden*: 1 - exposed / exchange of the mode without overlap, in which
everything is exposed.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from gpu import ulysses_replay
from gpu.ulysses_replay import MODES, Replay

from first_light.fused import available, using
from first_light.records import Context, NotThereError
from megatron_sp.comm.recorder import WAIT, CudaClock, Recorder, StepTimes, WallClock
from megatron_sp.training.overlap import in_lanes, windows

LABEL = "1B-64K"
_FEW_LAYERS = 6  # of 24: layers are alike
_KINDS = {  # by words in a kernel's name, the first that fits
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "matrix products": ("gemm", "cutlass", "cublas", "nvjet", "::mm", "addmm", "bmm"),
    "copies": ("memcpy", "memset", "copy"), "norms": ("norm",), "reductions": ("reduce", "sum"),
    "elementwise": ("elementwise", "vectorized", "triton", "silu", "gelu"),
}  # fmt: skip


def run(context: Context) -> None:
    """Record a time line of each mode, and the profile of one, with the kernels that a run takes."""
    device = context.torch_device
    with using(available(device)[-1]):
        _run(context, device)


def _run(context: Context, device: torch.device) -> None:
    label = "smoke" if context.tiny else LABEL
    shape = dict(ulysses_replay.SHAPES[label])
    if not context.tiny:
        shape["num_layers"] = _FEW_LAYERS
    alone = {"exposed_ms": 0.0}  # of the mode without overlap
    for name, mode in MODES.items():
        if mode[1] > shape["num_heads"] // ulysses_replay.SP:
            continue

        def measure(mode: Any = mode) -> dict[str, Any]:
            return line(one_step(shape, device, mode, 1 if context.tiny else 3), alone["exposed_ms"])

        found = context.attempt("streams", f"{label}, {shape['num_layers']} layers: {name}", measure)
        if found and name == "none":
            alone["exposed_ms"] = found["exposed_ms"]
        _empty(device)
    _profile(context, shape, device)


def one_step(shape: dict[str, int], device: torch.device, mode: Any, count: int) -> StepTimes:
    """Return the times of the last of some micro-batches."""
    recorder = Recorder(CudaClock(device) if device.type == "cuda" else WallClock(), count)
    replay = Replay(shape, device, mode, recorder=recorder)
    for _ in range(count):
        replay.once()
    return recorder.steps[-1]


def line(step: StepTimes, exposed_alone_ms: float) -> dict[str, Any]:
    """Return sums of a step, and its spans: two layers in the middle, forward and backward."""
    exposed = 1e3 * sum(flight.exposed for flight in step.flights)
    spans: list[tuple[str, str, float, float]] = []
    for window in windows(step):
        for span in window.spans:
            lane = f"{window.direction}: waits" if span.label == WAIT else f"{window.direction}: computes"
            spans.append((lane, span.label, 1e3 * (span.begin - window.begin), 1e3 * (span.end - window.begin)))
        for number, flight in in_lanes(window.flights):
            spans.append((f"{window.direction}: exchanges {number + 1}", flight.name, 1e3 * (flight.begin - window.begin),
                          1e3 * (flight.end - window.begin)))  # fmt: skip
    values = {
        "step_ms": 1e3 * step.seconds, "exchanges": len(step.flights), "exchange_ms": 1e3 * sum(f.end - f.begin for f in step.flights),
        "exposed_ms": exposed, "of the step_share": exposed / max(1e3 * step.seconds, 1e-9),
    }  # fmt: skip
    if exposed_alone_ms > 0:
        values["hidden_share"] = max(0.0, 1 - exposed / exposed_alone_ms)
    return {**values, "spans": spans}


def _profile(context: Context, shape: dict[str, int], device: torch.device) -> None:
    def measure() -> dict[str, Any]:
        replay = Replay(shape, device, MODES["none"])
        replay.once()
        found.update(kernels_of(replay.once, device))
        if not found:
            raise NotThereError("the profiler has seen no kernel: it may need the right to read GPU counters")
        return {
            "kernels": sum(count for _, count in found.values()),
            "busy_ms": sum(us for us, _ in found.values()) / 1e3,
        }

    found: dict[str, tuple[float, int]] = {}
    context.attempt("a micro-batch by torch's profiler", f"{shape['num_layers']} layers", measure)
    kinds: Counter[str] = Counter()
    for name, (us, _) in found.items():
        kinds[kind_of(name)] += us  # type: ignore[assignment]
    whole = max(1e-9, sum(kinds.values()))
    for kind, us in kinds.most_common():
        context.record("where its time goes", kind, sum_ms=us / 1e3, **{"of all_share": us / whole})
    for name, (us, count) in sorted(found.items(), key=lambda item: -item[1][0])[:20]:
        context.record(
            "its longest kernels", name[:120], sum_ms=us / 1e3, launches=count, **{"of all_share": us / whole}
        )
    _empty(device)


def kernels_of(call: Any, device: torch.device) -> dict[str, tuple[float, int]]:
    """Return (microseconds, launches) of each kernel of a call; on a CPU of each operation."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if device.type == "cuda" else ("cpu_op",)
    found: dict[str, tuple[float, int]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in wanted:
            us, count = found.get(event["name"], (0.0, 0))
            found[event["name"]] = us + float(event["dur"]), count + 1
    return found


def kind_of(kernel: str) -> str:
    """Return what a kernel does, by its name."""
    lower = kernel.lower()
    return next((kind for kind, words in _KINDS.items() if any(word in lower for word in words)), "other")


def _empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
