"""Attention of packed documents, forward and backward, against one causal call over the whole row and against the work that is there.

    python benchmarks/packed_attention.py [--length 4096] [--heads 8] [--head-dim 64] [--json FILE]

A row of tokens is cut into documents in several ways. For each: the time of our packed attention
(``ops/tiled_attention.py``), of one causal call over the whole row by the same kernel, and of a kernel call for each
document with slices and a concatenation under autograd, as one writes it first. The "work" column is what documents
leave of the row's pairs, sum(s_i^2) / s^2: the share of the whole row's time that an ideal kernel would take. The three
are timed one after another, round by round, and the least of each counts.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import print_table, write_json


def mixes(s: int) -> dict[str, list[int]]:
    """Lengths of the documents of a row of ``s`` tokens, by name."""
    made = {f"{n} of {s // n}": [s // n] * n for n in (2, 8, 32, 128, 512) if s // n >= 2}
    random_lengths = random.Random(0)
    for low, high in ((2, 16), (8, s // 8), (s // 16, s // 2)):
        lengths: list[int] = []
        while sum(lengths) < s:
            lengths.append(min(random_lengths.randint(low, high), s - sum(lengths)))
        made[f"{len(lengths)} of {low} to {high}"] = lengths
    few = [s // 2] + [4] * (s // 8)
    made[f"one of {few[0]}, {len(few) - 1} of 4"] = few
    return made


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row (default: 4096)")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: in bf16")
    parser.add_argument("--smoke", action="store_true", help="a short row, one round")
    parser.add_argument("--json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.smoke:
        options.length, options.heads, options.head_dim, options.rounds = 128, 2, 8, 1
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda needs a GPU", file=sys.stderr)
        return 2
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    shape = (options.length, options.heads, 3 * options.head_dim)
    qkv = torch.randn(shape, dtype=torch.float32).to(options.device, dtype).requires_grad_()
    grad = torch.randn(options.length, options.heads, 1, options.head_dim).to(options.device, dtype)
    rows, results = [], dict[str, Any]()
    for name, lengths in mixes(options.length).items():
        ways = ways_of(lengths, options.head_dim)
        times = measure(ways, qkv, grad, options.rounds)
        work = sum(n * n for n in lengths) / options.length**2
        packed, row, first = (times[way] for way in ways)
        results[name] = {"lengths": lengths, "work": work, "seconds": times}
        rows.append([name, f"{1e3 * packed:.2f}", f"{packed / row:.3f}", f"{work:.3f}", f"{first / packed:.1f}"])
    print_table(
        f"Packed attention, row of {options.length} tokens, {options.heads} heads of {options.head_dim}, {options.device}, {dtype}",
        ["documents", "ms", "time / whole row", "work / whole row", "call for each, autograd / ours"], rows,
    )  # fmt: skip
    write_json(
        options.json, "packed_attention", results, {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    )
    return 0


def ways_of(lengths: list[int], head_dim: int) -> dict[str, Callable[[Any], Any]]:
    """Three ways to compute a row's attention from its fused q, k and v."""
    import torch

    from megatron_sp.ops.attention import AttentionMask, core_attention, split_qkv

    ends = tuple(accumulate(lengths))
    kernel: Any = "sdpa"

    def attend(qkv: Any, mask: AttentionMask) -> Any:
        return core_attention(*split_qkv(qkv, 1, head_dim), mask, kernel=kernel)

    def one_by_one(qkv: Any) -> Any:
        q, k, v = split_qkv(qkv, 1, head_dim)
        parts = [
            core_attention(q[a:b], k[a:b], v[a:b], AttentionMask(), kernel=kernel) for a, b in zip((0, *ends), ends, strict=False)
        ]  # fmt: skip
        return torch.cat(parts)

    return {
        "packed": lambda qkv: attend(qkv, AttentionMask(documents=(ends,))), "whole row": lambda qkv: attend(qkv, AttentionMask()),
        "one by one": one_by_one,
    }  # fmt: skip


def measure(ways: dict[str, Callable[[Any], Any]], qkv: Any, grad: Any, rounds: int) -> dict[str, float]:
    """Least seconds of each way, forward and backward, after one round that does not count."""
    import torch

    best: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            qkv.grad = None
            began = time.perf_counter()
            way(qkv).backward(grad)
            if qkv.is_cuda:
                torch.cuda.synchronize()
            if number:
                best[name] = min(best.get(name, float("inf")), time.perf_counter() - began)
    return best


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
