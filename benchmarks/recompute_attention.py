"""Full recomputation with attention's results kept, against recomputation that repeats attention, and against none.

    python benchmarks/recompute_attention.py [--length 4096] [--hidden 512] [--layers 2] [--rounds 9] [--json FILE]
    python benchmarks/recompute_attention.py --device cuda [--kernel flash3] --length 65536 --hidden 2048 --heads 16

Forward and backward of transformer blocks without embedding and head, in one process and in turn within each round. The
last column is the share of a forward pass that attention takes: what is kept saves that share of one of the four passes
(forward, recomputation, and backward, which takes two), at most. On a GPU in bf16, between synchronizations, with the first
kernel of --attention-backend auto or the given one; its line says whether the results of that kernel can be kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import Stats, print_table, ratios, write_json

WAYS = {"kept": ("full", "none"), "repeated": ("full", "full"), "no recomputation": (None, "none")}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens of the sequence (default: 4096)")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, help="default: heads 64 wide")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernel", default="auto", help="--attention-backend (default: auto, untimed)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="a short sequence, one round")
    parser.add_argument("--json")
    return parser.parse_args(argv)


def blocks(options: argparse.Namespace) -> dict[str, Any]:
    """The same blocks for each way, by its name."""

    from megatron_sp.config.schema import KernelConfig, ModelConfig
    from megatron_sp.models.gpt import GPTModel

    config = ModelConfig(
        num_layers=options.layers, hidden_size=options.hidden, num_attention_heads=options.heads, seq_length=options.length,
        vocab_size=128, attention_dropout=0.0, hidden_dropout=0.0, position_embedding_type="rope",
    )  # fmt: skip
    made = {}
    for name, (granularity, again) in WAYS.items():
        kernels = KernelConfig(recompute_granularity=granularity, recompute_attention=again)  # type: ignore[arg-type]
        made[name] = GPTModel(config, kernels, seed=1, dtype=dtype_of(options)).to(options.device)
    return made


def dtype_of(options: argparse.Namespace) -> Any:
    import torch

    return torch.bfloat16 if options.device == "cuda" else torch.float32


def find_kernel(options: argparse.Namespace) -> tuple[Any, str]:
    """The kernel's name, and why its results cannot be kept, or nothing; it is ready to be called."""
    import torch

    from megatron_sp.ops.attention_choice import AttentionUse, activate, choose_kernel, why_repeated

    use = AttentionUse(torch.device(options.device), dtype_of(options), head_dim=options.hidden // options.heads)
    name = choose_kernel(options.kernel, options.device, use.dtype, use=use).name
    reason = why_repeated(name, use)
    activate(name)  # the examples put torch's own back
    return name, reason


def measure(options: argparse.Namespace, kernel: Any) -> tuple[dict[str, list[float]], float]:
    """(Seconds of forward and backward by way, one for each round; share of a forward pass that attention takes)."""
    import torch

    from megatron_sp.ops.attention import AttentionMask, core_attention
    from megatron_sp.parallel.forward_context import ForwardContext

    torch.set_num_threads(options.threads)
    models, tokens = blocks(options), (torch.arange(options.length)[None] % 128).to(options.device)
    place = {"device": options.device, "dtype": dtype_of(options)}
    grad = torch.randn(options.length, 1, options.hidden, generator=torch.Generator().manual_seed(2)).to(**place)
    q, k, v = torch.randn(3, options.length, options.heads, 1, options.hidden // options.heads).to(**place)

    def now() -> float:
        if options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def context() -> ForwardContext:
        return ForwardContext(AttentionMask(), kernel=kernel)

    seconds: dict[str, list[float]] = {name: [] for name in (*models, "attention", "forward")}
    for round_ in range(options.rounds + 1):  # the first is a warm-up
        for name, model in models.items():
            begin = now()
            model.hidden(tokens, context()).backward(grad)
            seconds[name].append(now() - begin)
            for parameter in model.parameters():
                parameter.grad = None
        with torch.no_grad():
            begin = now()
            core_attention(q, k, v, AttentionMask(), kernel=kernel)
            middle = now()
            models["kept"].hidden(tokens, context())
            seconds["attention"].append((middle - begin) * options.layers)
            seconds["forward"].append(now() - middle)
        if round_ == 0:
            seconds = {name: [] for name in seconds}
    return seconds, ratios(seconds.pop("attention"), seconds.pop("forward")).median


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.smoke:
        options.length, options.hidden, options.rounds = 128, 64, 1
    options.heads = options.heads or max(1, options.hidden // 64)
    import torch

    kernel, reason = find_kernel(options)
    seconds, share = measure(options, kernel)
    results = {name: Stats.of(values) for name, values in seconds.items()}
    saved = ratios(seconds["kept"], seconds["repeated"])
    what = f"{str(dtype_of(options)).removeprefix('torch.')} on {options.device} with {kernel}"
    rows = [
        [name, stats.text("ms", 1e3, 0), f"{ratios(seconds[name], seconds['repeated']).median:.3f}"]
        for name, stats in results.items()
    ]
    print_table(
        f"{options.layers} blocks, {options.length} tokens, hidden size {options.hidden}, {what}, {options.threads} thread(s);"
        f" attention is {share:.0%} of a forward pass" + (f"; nothing is kept: {reason}" if reason else ""),
        ["attention under full recomputation", "forward and backward", "of repeated"], rows,
    )  # fmt: skip
    values = {name: stats.as_dict() for name, stats in results.items()}
    write_json(
        options.json, "recompute_attention",
        {"seconds": values, "kept_of_repeated": saved.as_dict(), "attention_share": share, "not_kept": reason},
        {"torch": str(torch.__version__), "threads": options.threads, "device": options.device, "kernel": kernel},
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
