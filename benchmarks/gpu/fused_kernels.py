"""AdamW and norms on one GPU, by torch's kernels and by NVIDIA apex's: what --fused-kernels is worth.

    python benchmarks/gpu/fused_kernels.py [--elements 134217728] [--tokens 16384] [--widths 1024 4096] [--json FILE]

AdamW: one flat tensor in fp32, as an optimizer step has it; GB/s counts what must be read (four tensors) and written
(three), 28 bytes for each element. Norms: bf16, forward and backward with the gradients of the parameters; GB/s counts
x and y in forward, x and two gradients in backward. Each is one op of ours (``ops/adamw.py``, ``ops/norm.py``) with
both kernels, which take turns within each round; a figure is the median of GPU time between two events. Without apex,
torch's are timed alone, and the reason is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from attention_kernels import _count, timer
from common import Stats, print_table, write_json


def adamw_cases(elements: int, device: Any, kernels: list[str]) -> Iterator[tuple[str, float, dict[str, Callable[[], Any]]]]:
    """(label, bytes, calls by kernel) of one step of AdamW."""
    import torch

    from megatron_sp.ops.adamw import AdamStep, adamw_

    tensors = [torch.rand(elements, device=device) for _ in range(4)]
    step = AdamStep(count=10, lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    calls = {name: lambda name=name: adamw_(*tensors, step, name) for name in kernels}  # type: ignore[misc]
    yield f"AdamW, {elements / 2**20:.4g}M elements", 28.0 * elements, calls


def norm_cases(tokens: int, width: int, device: Any, dtype: Any, kernels: list[str]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """(label, bytes, calls by kernel) of forward and backward of each norm."""
    import torch

    from megatron_sp.ops.norm import NormSpec, norm_backward, norm_forward

    x, grad = (torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.rand(width, device=device, dtype=dtype) for _ in range(2))
    for kind in ("LayerNorm", "RMSNorm"):
        shift = bias if kind == "LayerNorm" else None
        specs = {name: NormSpec(kind, 1e-5, kernel=name) for name in kernels}  # type: ignore[arg-type]
        stats = {name: norm_forward(x, weight, shift, spec)[1] for name, spec in specs.items()}
        forward = {name: lambda spec=spec, shift=shift: norm_forward(x, weight, shift, spec) for name, spec in specs.items()}  # type: ignore[misc]
        backward = {
            name: lambda name=name, spec=spec, shift=shift, stats=stats: norm_backward(  # type: ignore[misc]
                grad, x, weight, shift, stats[name], spec, (True, True, shift is not None)
            )
            for name, spec in specs.items()
        }
        moved = float(x.numel() * x.element_size())
        yield f"{kind} forward, {tokens} x {width}", 2 * moved, forward
        yield f"{kind} backward, {tokens} x {width}", 3 * moved, backward


def available_kernels(device: Any, dtype: Any) -> tuple[list[str], str]:
    """(kernels to be timed, why apex is not among them)."""
    from megatron_sp.ops.fused_kernels import KernelUse, choose_fused_kernels
    from megatron_sp.ops.norm import NormSpec

    try:
        for kind in ("LayerNorm", "RMSNorm"):
            choose_fused_kernels("apex", KernelUse(device, dtype, norm=NormSpec(kind, 1e-5)))  # type: ignore[arg-type]
    except RuntimeError as error:
        return ["torch"], str(error).partition(". Use ")[0]
    return ["torch", "apex"], ""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=2**27, help="of AdamW's tensor (default: 134217728)")
    parser.add_argument("--tokens", type=int, default=16384, help="rows of the norms (default: 16384)")
    parser.add_argument("--widths", nargs="+", type=int, default=[1024, 4096, 8192], help="of the norms (default: 1024 4096 8192)")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default: 9)")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU where there is no GPU: does it run at all?")
    parser.add_argument("--json", help="write the results to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    import torch

    if not torch.cuda.is_available() and not options.smoke:
        print("torch sees no GPU here (`megatron-sp doctor` says why); --smoke runs tiny shapes on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    elements, tokens, widths, rounds = options.elements, options.tokens, options.widths, options.rounds
    if options.smoke:
        elements, tokens, widths, rounds = 4096, 64, [32], 2
    kernels, lack = available_kernels(device, torch.bfloat16)
    clock = timer(device)
    results: dict[str, dict[str, Any]] = {}
    for source in (adamw_cases(elements, device, kernels), *(norm_cases(tokens, w, device, torch.bfloat16, kernels) for w in widths)):
        for label, moved, calls in source:
            counts = {name: _count(clock, call) for name, call in calls.items()}
            raw: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    raw[name].append(clock(call, counts[name]))
            seconds = {name: Stats.of(times) for name, times in raw.items()}
            results[label] = {n: {"seconds": s.as_dict(), "gb_per_s": moved / s.median / 1e9} for n, s in seconds.items()}
    rows = [
        [label, *(f"{found[name]['gb_per_s']:,.0f}" if name in found else "" for name in ("torch", "apex"))]
        for label, found in results.items()
    ]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print_table(f"AdamW and norms, GB/s on {gpu}", ["", "torch", "apex"], rows, [f"apex left out: {lack}"] if lack else [])
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "gpu": gpu}
    write_json(options.json, "gpu_fused", {"kernels": results, "left_out": lack}, versions)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
