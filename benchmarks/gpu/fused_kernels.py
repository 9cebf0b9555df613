"""AdamW, norms and elementwise operations on one GPU, by torch's kernels, Triton's and NVIDIA apex's: what --fused-kernels is worth.

    python benchmarks/gpu/fused_kernels.py [--elements 134217728] [--tokens 16384] [--widths 1024 4096] [--json FILE]

AdamW: one flat tensor in fp32, as an optimizer step has it; GB/s counts what must be read (four tensors) and written
(three), 28 bytes for each element. Norms: bf16, forward and backward with the gradients of the parameters; GB/s counts
x and y in forward, x and two gradients in backward. Elementwise: bf16; GB/s counts what has to be read and written once.
Each is one op of ours (``ops/``) with all kernels, which take turns within each round; a figure is the median of GPU
time between two events. What is not there is left out, and the reason is printed.
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


def adamw_cases(
    elements: int, device: Any, kernels: list[str]
) -> Iterator[tuple[str, float, dict[str, Callable[[], Any]]]]:
    """(label, bytes, calls by kernel) of one step of AdamW."""
    import torch

    from megatron_sp.ops.adamw import AdamStep, adamw_

    tensors = [torch.rand(elements, device=device) for _ in range(4)]
    step = AdamStep(count=10, lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    calls = {name: lambda name=name: adamw_(*([t] for t in tensors), step, name) for name in kernels}  # type: ignore[misc]
    yield f"AdamW, {elements / 2**20:.4g}M elements", 28.0 * elements, calls


def norm_cases(
    tokens: int, width: int, device: Any, dtype: Any, kernels: list[str]
) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """(label, bytes, calls by kernel) of forward and backward of each norm."""
    import torch

    from megatron_sp.ops.norm import NormSpec, norm_backward, norm_forward

    x, grad = (torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.rand(width, device=device, dtype=dtype) for _ in range(2))
    for kind in ("LayerNorm", "RMSNorm"):
        shift = bias if kind == "LayerNorm" else None
        forward: dict[str, Callable[[], Any]] = {}
        backward: dict[str, Callable[[], Any]] = {}
        for name in kernels:
            spec = NormSpec(kind, 1e-5, kernel="apex" if name == "apex" else "torch")  # type: ignore[arg-type]
            forward[name] = by(name, norm_forward, x, weight, shift, spec)
            need = (True, True, shift is not None)
            backward[name] = by(name, norm_backward, grad, x, weight, shift, forward[name]()[1], spec, need)
        moved = float(x.numel() * x.element_size())
        yield f"{kind} forward, {tokens} x {width}", 2 * moved, forward
        yield f"{kind} backward, {tokens} x {width}", 3 * moved, backward


def elementwise_cases(
    tokens: int, width: int, device: Any, dtype: Any, kernels: list[str]
) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """(label, bytes, calls by kernel) of dropout, activation, rotary and the gradient's packing."""
    import torch

    from megatron_sp.ops.activation import Activation
    from megatron_sp.ops.dropout import DropoutKeys, dropped
    from megatron_sp.ops.rotary import rotary_tables, rotate_

    x, residual = (torch.randn(tokens, 1, width, device=device, dtype=dtype) for _ in range(2))
    u, grad = (torch.randn(tokens, n * width, device=device, dtype=dtype) for n in (8, 4))
    positions = torch.arange(tokens, device=device)
    keys = DropoutKeys.create(1, 2, positions[:1], positions).rows(0, 0)
    tables, heads = (
        rotary_tables(positions, 16, 1e4),
        torch.randn(tokens, width // 16, 3, 16, device=device, dtype=dtype),
    )
    act, one = Activation("swiglu"), float(x.numel() * x.element_size())
    found: list[tuple[str, float, Callable[[], Any]]] = [
        ("dropout and residual", 3 * one, lambda: dropped(x, 0.1, keys.keys, site=keys.site, residual=residual)),
        ("SwiGLU forward", 12 * one, lambda: act.forward(u)),
        ("SwiGLU backward", 20 * one, lambda: act.backward_(grad, u)),
        ("rotary", 4 * one, lambda: rotate_(heads[:, :, :2], *tables)),
    ]
    for label, moved, call in found:
        yield f"{label}, {tokens} x {width}", moved, {name: by(name, call) for name in kernels}


def by(kernel: str, op: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """The call of an op, with Triton's kernels in use or not."""
    from megatron_sp.ops.kernels.launch import using_triton

    def call() -> Any:
        with using_triton(kernel == "triton"):
            return op(*arguments)

    return call


def available_kernels(device: Any, dtype: Any) -> tuple[list[str], list[str]]:
    """(kernels to be timed, why others are not among them)."""
    from megatron_sp.ops.fused_kernels import KernelUse, choose_fused_kernels
    from megatron_sp.ops.norm import NormSpec

    found, lacks = ["torch"], []
    for name in ("triton", "apex"):
        try:
            for kind in ("LayerNorm", "RMSNorm"):
                choose_fused_kernels(name, KernelUse(device, dtype, norm=NormSpec(kind, 1e-5)))  # type: ignore[arg-type]
            found.append(name)
        except RuntimeError as error:
            lacks.append(str(error).partition(". Use ")[0])
    return found, lacks


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=2**27, help="of AdamW's tensor (default: 134217728)")
    parser.add_argument(
        "--tokens", type=int, default=16384, help="rows of the norms and elementwise operations (default: 16384)"
    )
    parser.add_argument(
        "--widths", nargs="+", type=int, default=[1024, 4096, 8192], help="of the norms (default: 1024 4096 8192)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default: 9)")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shapes, on the CPU where there is no GPU: does it run at all?"
    )
    parser.add_argument("--json", help="write the results to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    import torch

    if not torch.cuda.is_available() and not options.smoke:
        print(
            "torch sees no GPU here (`megatron-sp doctor` says why); --smoke runs tiny shapes on the CPU",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    elements, tokens, widths, rounds = options.elements, options.tokens, options.widths, options.rounds
    if options.smoke:
        elements, tokens, widths, rounds = 4096, 64, [32], 2
    kernels, lacks = available_kernels(device, torch.bfloat16)
    of_adamw, elementwise = ([name for name in kernels if name != other] for other in ("triton", "apex"))
    clock = timer(device)
    results: dict[str, dict[str, Any]] = {}
    sources = [adamw_cases(elements, device, of_adamw)]
    for width in widths:
        sources.append(norm_cases(tokens, width, device, torch.bfloat16, kernels))
        sources.append(elementwise_cases(tokens, width, device, torch.bfloat16, elementwise))
    for source in sources:
        for label, moved, calls in source:
            counts = {name: _count(clock, call) for name, call in calls.items()}
            raw: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    raw[name].append(clock(call, counts[name]))
            seconds = {name: Stats.of(times) for name, times in raw.items()}
            results[label] = {
                n: {"seconds": s.as_dict(), "gb_per_s": moved / s.median / 1e9} for n, s in seconds.items()
            }
    rows = [
        [label, *(f"{found[name]['gb_per_s']:,.0f}" if name in found else "" for name in ("torch", "triton", "apex"))]
        for label, found in results.items()
    ]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print_table(f"GB/s on {gpu}", ["", "torch", "triton", "apex"], rows, [f"left out: {lack}" for lack in lacks])
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "gpu": gpu}
    write_json(options.json, "gpu_fused", {"kernels": results, "left_out": lacks}, versions)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
