"""Attention kernels on one GPU, forward and backward: what the choice of kernel is worth.

    python benchmarks/gpu/attention_kernels.py [--head-dims 64 128] [--seq-lengths 2048 ...] [--json docs/benchmarks/gpu_attention.json]

bf16, 16K tokens of 2048 channels (or one sequence, where it is longer): b * s = 16384, n * d = 2048. Kernels: torch's
SDPA with flash, cuDNN and memory-efficient backends; torch's varlen_attn and FlexAttention (compiled); flash-attn,
flash-attn-3 and flash-attn-4 where they are installed. Each works on tensors in the layout it likes best. A kernel that is not there, or
refuses a shape, is left out and the reason printed once.

FLOP are those of the products that must be computed: 4 s^2 d for each head and sequence in forward, half of it where
causal, 2.5 times it in backward (the forward product is computed again). Kernels take turns within each round; a figure
is the median of GPU time between two events over enough calls for a few milliseconds. A kernel is compared with plain
matrix products once before it is timed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from common import Stats, print_table, write_json

TOKENS, CHANNELS = 16384, 2048
HEAD_DIMS, SEQ_LENGTHS = (64, 128), (2048, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class Shape:
    """b sequences of s tokens, n heads of d channels."""

    b: int
    s: int
    n: int
    d: int
    causal: bool

    @property
    def forward_flops(self) -> float:
        return 4.0 * self.b * self.n * self.d * self.s**2 / (2 if self.causal else 1)

    def __str__(self) -> str:
        return f"d{self.d} {'causal' if self.causal else 'full'} {self.b}x{self.s}"


class Kernel:
    """One kernel on one shape: operands in its own layout, made from q, k, v [b, s, n, d]."""

    layout = "bsnd"

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def arrange(self, x: Any) -> Any:
        return x

    def restore(self, out: Any) -> Any:
        """[b, s, n, d] of the result."""
        return out

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        raise NotImplementedError


class SDPA(Kernel):
    """torch's scaled_dot_product_attention held to one backend."""

    backend = ""

    def arrange(self, x: Any) -> Any:
        return x.transpose(1, 2)

    def restore(self, out: Any) -> Any:
        return out.transpose(1, 2)

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal)


class Flash(SDPA):
    backend = "FLASH_ATTENTION"


class CuDNN(SDPA):
    backend = "CUDNN_ATTENTION"


class Efficient(SDPA):
    backend = "EFFICIENT_ATTENTION"


class Math(SDPA):
    backend = "MATH"


class Varlen(Kernel):
    """torch.nn.attention.varlen.varlen_attn on packed sequences."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        import inspect

        import torch
        from torch.nn.attention.varlen import varlen_attn

        self.attend = varlen_attn
        self.ends = torch.arange(0, (shape.b + 1) * shape.s, shape.s, dtype=torch.int32, device="cuda")
        # its way to say "causal" was renamed between torch 2.11 and 2.13
        names = inspect.signature(varlen_attn).parameters
        self.options = (
            {"is_causal": shape.causal}
            if "is_causal" in names
            else {"window_size": (-1, 0) if shape.causal else (-1, -1)}
        )

    def arrange(self, x: Any) -> Any:
        return x.flatten(0, 1)

    def restore(self, out: Any) -> Any:
        return out.view(self.shape.b, self.shape.s, self.shape.n, self.shape.d)

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return self.attend(q, k, v, self.ends, self.ends, self.shape.s, self.shape.s, **self.options)


class Flex(SDPA):
    """FlexAttention, compiled by Triton."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()  # one shape is one compilation; what others left behind does not count against the limit
        self.attend = torch.compile(flex_attention, dynamic=False)
        self.mask = None
        if shape.causal:
            self.mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, shape.s, shape.s, device="cuda")

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return self.attend(q, k, v, block_mask=self.mask)


class FlashAttn(Kernel):
    """The package flash-attn (FlashAttention 2)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from flash_attn import flash_attn_func

        self.attend = flash_attn_func

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        out = self.attend(q, k, v, causal=self.shape.causal)
        return out[0] if isinstance(out, tuple) else out


class FlashAttn3(FlashAttn):
    """The package flash_attn_3 (Hopper)."""

    def __init__(self, shape: Shape) -> None:
        Kernel.__init__(self, shape)
        from flash_attn_interface import flash_attn_func

        self.attend = flash_attn_func


class FlashAttn4(FlashAttn):
    """The package flash-attn-4 (CuTe)."""

    def __init__(self, shape: Shape) -> None:
        Kernel.__init__(self, shape)
        from flash_attn.cute import flash_attn_func

        self.attend = flash_attn_func


KERNELS: dict[str, type[Kernel]] = {
    "sdpa flash": Flash, "sdpa cudnn": CuDNN, "sdpa efficient": Efficient, "varlen": Varlen, "flex": Flex, "flash-attn": FlashAttn,
    "flash-attn-3": FlashAttn3, "flash-attn-4": FlashAttn4,
}  # fmt: skip
SMOKE_KERNELS: dict[str, type[Kernel]] = {"sdpa flash": Flash, "math": Math}


class Contender:
    """A kernel with operands and an output, ready to be timed."""

    def __init__(self, kind: type[Kernel], shape: Shape, device: Any, dtype: Any) -> None:
        import torch

        self.kernel = kind(shape)
        g = torch.Generator(device).manual_seed(1)
        made = [
            torch.randn(shape.b, shape.s, shape.n, shape.d, generator=g, device=device, dtype=dtype) for _ in range(4)
        ]
        self.q, self.k, self.v = (self.kernel.arrange(x).detach().requires_grad_() for x in made[:3])
        self.grad = self.kernel.arrange(made[3])
        self.out = self.forward()
        self.backward()

    def forward(self) -> Any:
        self.out = self.kernel(self.q, self.k, self.v)
        return self.out

    def backward(self) -> Any:
        import torch

        return torch.autograd.grad(self.out, (self.q, self.k, self.v), self.grad, retain_graph=True)

    def error(self) -> float:
        """Largest deviation of the output from plain fp32 products, on the first head of the first sequence, over its largest value."""
        import torch

        shape = self.kernel.shape
        q, k, v = (self.kernel.restore(x)[0, :, 0].detach().float() for x in (self.q, self.k, self.v))
        rows = slice(shape.s - min(shape.s, 512), shape.s)  # the last queries see the most keys
        scores = q[rows] @ k.t() / math.sqrt(shape.d)
        if shape.causal:
            at = torch.arange(shape.s, device=q.device)
            scores = scores.masked_fill(at[None, :] > at[rows, None], -math.inf)
        want = torch.softmax(scores, -1) @ v
        got = self.kernel.restore(self.out)[0, rows, 0].detach().float()
        return float((got - want).abs().max() / want.abs().max())


def timer(device: Any) -> Callable[[Callable[[], Any], int], float]:
    """A function that gives seconds of one call, from ``count`` calls in a row."""
    import torch

    def on_gpu(fn: Callable[[], Any], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    def on_cpu(fn: Callable[[], Any], count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            fn()
        return (time.perf_counter() - began) / count

    return on_gpu if device.type == "cuda" else on_cpu


def measure(
    shape: Shape, kinds: dict[str, type[Kernel]], device: Any, dtype: Any, rounds: int, reasons: dict[str, str]
) -> dict[str, Any]:
    """Seconds of forward and backward for each kernel that works on the shape; ``reasons`` collects why others do not."""
    ready: dict[str, Contender] = {}
    for name, kind in kinds.items():
        try:
            contender = Contender(kind, shape, device, dtype)
            error = contender.error()
        except Exception as why:  # a kernel may refuse a shape in any way it likes
            text = (str(why).strip().splitlines() or [type(why).__name__])[0]
            reasons.setdefault(name, f"{shape}: {type(why).__name__}: {text}"[:200])
            continue
        if not error < 0.03:  # bf16, 2^-9 for each of a few roundings
            reasons.setdefault(name, f"{shape}: wrong by {error:.3f}")
            continue
        ready[name] = contender
    clock = timer(device)
    raw: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in ready}
    counts = {name: [_count(clock, fn) for fn in (c.forward, c.backward)] for name, c in ready.items()}
    for _ in range(rounds):
        for name, c in ready.items():
            raw[name]["forward"].append(clock(c.forward, counts[name][0]))
            raw[name]["backward"].append(clock(c.backward, counts[name][1]))
    return {
        name: {
            "forward_seconds": (forward := Stats.of(times["forward"])).as_dict(),
            "backward_seconds": (backward := Stats.of(times["backward"])).as_dict(),
            "forward_tflops": shape.forward_flops / forward.median / 1e12,
            "backward_tflops": 2.5 * shape.forward_flops / backward.median / 1e12,
        }
        for name, times in raw.items()
    }


def _count(clock: Callable[[Callable[[], Any], int], float], fn: Callable[[], Any], wanted: float = 5e-3) -> int:
    """How many calls take a few milliseconds."""
    fn()
    return max(1, min(100, round(wanted / clock(fn, 1))))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEAD_DIMS))
    parser.add_argument("--seq-lengths", nargs="+", type=int, default=list(SEQ_LENGTHS))
    parser.add_argument("--kernels", nargs="+", choices=tuple(KERNELS), default=list(KERNELS))
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
    kinds = {name: KERNELS[name] for name in options.kernels} if device.type == "cuda" else SMOKE_KERNELS
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    tokens, channels, lengths, rounds = TOKENS, CHANNELS, options.seq_lengths, options.rounds
    if options.smoke:
        tokens, channels, lengths, rounds = 512, 256, [128, 256], 2
    everything: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for d in options.head_dims:
        for causal in (True, False):
            for s in lengths:
                shape = Shape(max(1, tokens // s), s, channels // d, d, causal)
                everything[str(shape)] = measure(shape, kinds, device, dtype, rounds, reasons)
                print(f"{shape}: {', '.join(everything[str(shape)])}", file=sys.stderr)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    rows = []
    for label, found in everything.items():
        best = {way: max((f[f"{way}_tflops"] for f in found.values()), default=0.0) for way in ("forward", "backward")}
        rows.append([label, *(_cell(found.get(kernel), best) for kernel in kinds)])
    notes = [f"{kernel} left out, {reason}" for kernel, reason in reasons.items()]
    cudnn = torch.backends.cudnn.version() if device.type == "cuda" else None
    print_table(f"Attention, TFLOP/s forward / backward (* best) on {name}", ["", *kinds], rows, notes)
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "cudnn": str(cudnn), "gpu": name}
    write_json(options.json, "gpu_attention", {"kernels": everything, "left_out": reasons}, versions)
    return 0 if all(everything.values()) else 1


def _cell(found: dict[str, Any] | None, best: dict[str, float]) -> str:
    if found is None:
        return "-"
    parts = []
    for way in ("forward", "backward"):
        rate = found[f"{way}_tflops"]
        parts.append(f"{rate:.0f}{'*' if rate == best[way] else ''}")
    return " / ".join(parts)


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
