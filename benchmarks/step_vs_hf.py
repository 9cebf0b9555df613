"""One training step on the CPU: ours against Hugging Face's class with torch's AdamW, and against bare matrix products.

    python benchmarks/step_vs_hf.py [--model gpt2|bert|llama] [--json docs/benchmarks/step_vs_hf.json]

Same shape, same initial weights, same tokens, same optimizer; the losses of both must agree after every update, or the
benchmark fails. Three processes take turns within each round: our step, the peer's step, the matrix products; figures
are medians over rounds, and ratios are taken within a round. The peer lives in its own environment (setup_peers.sh).

For GPT-2 also the rate of arithmetic: FLOPs of a step, for L layers of width h with MLP 4h, vocabulary V and B
sequences of s tokens, T = B * s: 6 * (12 * L * h^2 + V * h) * T for the matrices, plus attention 12 * L * s * h * T
counted in full, or half of that when only the causal half is counted. The matmul rate is given twice: one large fp32
product, and all matrix products of the step itself, each timed alone (attention not included) and weighted by how often
it occurs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from child import Child, ChildError
from common import REPOSITORY, Stats, child_environment, load_average, print_table, ratios, write_json
from families import FAMILIES

SMOKE = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "vocab_size": 512,
    "batch": 2,
    "seq_length": 32,
    "num_groups": 2,
    "ffn": 96,
}
LARGE_PRODUCT, SMOKE_PRODUCT = 4096, 256
RATES = ("large_product", "step_products")
LOSS_TOLERANCE = 1e-4
TARGETS = {"time_ratio": 0.90, "memory_ratio": 0.60, "matmul_share": 0.69}
GOALS = {"time_ratio": 0.85, "memory_ratio": 0.60, "matmul_share": 0.75}


def step_flops(shape: dict[str, int], *, causal_halved: bool) -> float:
    """FLOPs of forward and backward of one step (formula above)."""
    hidden, tokens = shape["hidden_size"], shape["batch"] * shape["seq_length"]
    matrices = 12 * shape["num_layers"] * hidden**2 + shape["vocab_size"] * hidden
    attention = 12 * shape["num_layers"] * shape["seq_length"] * hidden * tokens
    return 6.0 * matrices * tokens + (attention / 2 if causal_halved else attention)


def step_products(shape: dict[str, int]) -> list[tuple[int, list[int]]]:
    """The matrix products of one step as (how often, [m, k, n]): forward, gradient of the input, gradient of the weight."""
    hidden, tokens, layers = shape["hidden_size"], shape["batch"] * shape["seq_length"], shape["num_layers"]
    matrices = [
        (layers, hidden, 3 * hidden),
        (layers, hidden, hidden),
        (layers, hidden, 4 * hidden),
        (layers, 4 * hidden, hidden),
    ]
    products = []
    for count, inner, outer in [*matrices, (1, hidden, shape["vocab_size"])]:
        products += [(count, [tokens, inner, outer]), (count, [tokens, outer, inner]), (count, [outer, tokens, inner])]
    return products


def product_flops(shapes: list[list[int]]) -> list[float]:
    return [2.0 * m * k * n for m, k, n in shapes]


def measure(options: argparse.Namespace, shape: dict[str, int], peer: str | None) -> dict[str, Any]:
    """Run all rounds; returns every single measurement."""
    script = str(REPOSITORY / "benchmarks" / "contenders.py")
    large = SMOKE_PRODUCT if options.smoke else LARGE_PRODUCT
    products = step_products(shape) if options.model == "gpt2" else []
    asked = [[large, large, large], *(dims for _, dims in products)]
    plain = child_environment(options.threads)
    contenders = {
        "ours": Child(
            "ours",
            [sys.executable, script, "ours", options.model],
            child_environment(options.threads, options.ours_env),
        )
    }
    if peer is not None:
        contenders["hf"] = Child(
            "hf", [peer, script, "hf", options.model], child_environment(options.threads, options.hf_env)
        )
    matmul = Child("matmul", [sys.executable, script, "matmul"], plain)
    raw: dict[str, Any] = {name: {"seconds": [], "losses": []} for name in contenders}
    raw |= {"large_product_rate": [], "step_products_rate": [], "load_average": []}
    try:
        versions = dict(matmul.ask("build", threads=options.threads)["versions"])
        for name, child in contenders.items():
            built = child.ask("build", shape=shape, dropout=options.dropout, threads=options.threads)
            raw[name]["parameters"] = built["parameters"]
            versions |= {
                (k if k != "torch" or name == "ours" else f"torch ({name})"): v for k, v in built["versions"].items()
            }
        for index in range(options.warmup + options.rounds):
            kept = index >= options.warmup
            if index == options.warmup:
                for child in contenders.values():
                    child.ask("forget_peak")
            for name, child in contenders.items():
                answer = child.ask("step", index=index)
                raw[name]["losses"].append(answer["loss"])
                if kept:
                    raw[name]["seconds"].append(answer["seconds"])
            seconds = matmul.ask("multiply", shapes=asked)["seconds"]
            if kept:
                raw["large_product_rate"].append(2.0 * large**3 / seconds[0])
                flops = product_flops(asked[1:])
                total = sum(count * f for (count, _), f in zip(products, flops, strict=True))
                if products:
                    raw["step_products_rate"].append(
                        total / sum(count * s for (count, _), s in zip(products, seconds[1:], strict=True))
                    )
                raw["load_average"].append(load_average())
                _progress(index - options.warmup + 1, options.rounds, raw)
        for name, child in contenders.items():
            raw[name]["memory"] = child.ask("memory")
    finally:
        for child in (*contenders.values(), matmul):
            child.close()
    raw["versions"] = versions
    return raw


def summarise(raw: dict[str, Any], shape: dict[str, int]) -> dict[str, Any]:
    """Medians and ratios of what ``measure`` returned."""
    ours = raw["ours"]
    halved, full = step_flops(shape, causal_halved=True), step_flops(shape, causal_halved=False)
    results: dict[str, Any] = {"shape": shape, "ours_seconds": Stats.of(ours["seconds"]), "ours_memory": ours["memory"]}
    results["tokens_per_s"] = Stats.of(shape["batch"] * shape["seq_length"] / s for s in ours["seconds"])
    for name in RATES if raw["step_products_rate"] else ():
        rate = raw[f"{name}_rate"]
        results[f"{name}_rate"] = Stats.of(rate)
        results[f"share_of_{name}_halved"] = Stats.of(
            halved / s / r for s, r in zip(ours["seconds"], rate, strict=True)
        )
        results[f"share_of_{name}_full"] = Stats.of(full / s / r for s, r in zip(ours["seconds"], rate, strict=True))
    if "hf" in raw:
        hf = raw["hf"]
        results["hf_seconds"], results["hf_memory"] = Stats.of(hf["seconds"]), hf["memory"]
        results["time_ratio"] = ratios(ours["seconds"], hf["seconds"])
        for kind in ("peak_bytes", "steps_peak_bytes"):
            results[f"{kind}_ratio"] = ours["memory"][kind] / hf["memory"][kind]
        above = [m["peak_bytes"] - m["baseline_bytes"] for m in (ours["memory"], hf["memory"])]
        results["above_baseline_ratio"] = above[0] / above[1]
        results["largest_loss_difference"] = max(abs(a - b) for a, b in zip(ours["losses"], hf["losses"], strict=True))
    return results


def report(results: dict[str, Any], raw: dict[str, Any], options: argparse.Namespace) -> None:
    """The table on the terminal."""
    gib = 1 / 2**30
    rows = [["step, ours", results["ours_seconds"].text("s"), ""]]
    memory = [["peak memory, ours", f"{results['ours_memory']['peak_bytes'] * gib:.2f} GiB", ""]]
    if "hf_seconds" in results:
        rows.append(["step, Hugging Face", results["hf_seconds"].text("s"), ""])
        rows.append(["time ratio", results["time_ratio"].text(""), _bounds("time_ratio", "<=")])
        memory.append(["peak memory, Hugging Face", f"{results['hf_memory']['peak_bytes'] * gib:.2f} GiB", ""])
        memory.append(["peak memory ratio", f"{results['peak_bytes_ratio']:.3f}", _bounds("memory_ratio", "<=")])
        memory.append(["  above what imports take", f"{results['above_baseline_ratio']:.3f}", ""])
        memory.append(["  during measured steps", f"{results['steps_peak_bytes_ratio']:.3f}", ""])
    rows += memory
    rows.append(["tokens/s, ours", results["tokens_per_s"].text("", digits=0), ""])
    large = f"{SMOKE_PRODUCT if options.smoke else LARGE_PRODUCT}^3"
    for name, label in zip(RATES, (large, "the step's products"), strict=True):
        if f"{name}_rate" not in results:
            continue
        rows.append([f"matmul rate, {label}", results[f"{name}_rate"].text("GFLOP/s", 1e-9, 0), ""])
        rows.append(["  model FLOP/s of it, causal half", results[f"share_of_{name}_halved"].text(""), ""])
        rows.append(
            ["  model FLOP/s of it, full", results[f"share_of_{name}_full"].text(""), _bounds("matmul_share", ">=")]
        )
    notes = [f"losses, ours: {' '.join(f'{v:.6f}' for v in raw['ours']['losses'])}"]
    if "hf" in raw:
        notes.append(f"losses, peer: {' '.join(f'{v:.6f}' for v in raw['hf']['losses'])}")
    notes.append("peak memory is VmHWM of each process's whole life, nothing subtracted")
    notes.append(f"load average {max(raw['load_average']):.1f} at most; the benchmark itself makes {options.threads}")
    print_table(
        f"One training step of {FAMILIES[options.model].title}, fp32, CPU",
        ["", "median (min-max)", "target"],
        rows,
        notes,
    )


def _bounds(name: str, sign: str) -> str:
    return f"{sign} {TARGETS[name]:.2f}, goal {GOALS[name]:.2f}"


def _progress(done: int, rounds: int, raw: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {raw[name]['seconds'][-1]:.2f} s" for name in ("ours", "hf") if name in raw)
    rate = " and ".join(f"{raw[f'{name}_rate'][-1] / 1e9:.0f}" for name in RATES if raw[f"{name}_rate"]) + " GFLOP/s"
    print(f"round {done}/{rounds}: {times}  matmul {rate}", file=sys.stderr)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(FAMILIES), default="gpt2", help="default: gpt2")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: 7)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them (default: 2)")
    parser.add_argument(
        "--threads", type=int, default=min(2, os.cpu_count() or 1), help="threads of each contender (default: 2)"
    )
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        help="of both contenders, everywhere (default: 0; above it losses are not compared)",
    )
    parser.add_argument("--seq-length", type=int, help="instead of the default shape's")
    parser.add_argument("--batch", type=int, help="sequences, instead of the default shape's")
    parser.add_argument(
        "--peer-python", default=str(REPOSITORY / ".venv-peers" / "bin" / "python"), help="the peer's interpreter"
    )
    parser.add_argument("--no-peer", action="store_true", help="ours and the matrix products alone")
    parser.add_argument(
        "--ours-env", nargs="*", default=[], metavar="KEY=VALUE", help="environment of our process alone"
    )
    parser.add_argument(
        "--hf-env", nargs="*", default=[], metavar="KEY=VALUE", help="environment of the peer's process alone"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny shape: does it run at all?")
    parser.add_argument("--json", help="write results there")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.warmup < 0:
        parser.error(f"--rounds ({options.rounds}) must be at least 1 and --warmup ({options.warmup}) at least 0")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if not options.no_peer and not Path(options.peer_python).exists():
        way_out = "run benchmarks/setup_peers.sh, or use --no-peer"
        print(f"the peer's interpreter {options.peer_python} does not exist: {way_out}", file=sys.stderr)
        return 2
    full = FAMILIES[options.model].shape
    shape = {name: SMOKE[name] for name in full} if options.smoke else dict(full)
    shape |= {name: getattr(options, name) for name in ("seq_length", "batch") if getattr(options, name)}
    try:
        raw = measure(options, shape, None if options.no_peer else options.peer_python)
    except (ChildError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    results = summarise(raw, shape)
    report(results, raw, options)
    difference = results.get("largest_loss_difference", 0.0)
    plain = {k: v.as_dict() if isinstance(v, Stats) else v for k, v in results.items()}
    settings = {k: v for k, v in vars(options).items() if k not in ("json", "peer_python")}
    write_json(options.json, "step_vs_hf", {**plain, "options": settings, "raw": raw}, raw["versions"])
    if options.dropout == 0.0 and difference > LOSS_TOLERANCE:
        print(
            f"the losses differ by {difference:.2g}, more than {LOSS_TOLERANCE:g}: the two did not do the same work",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
