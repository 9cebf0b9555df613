"""The loss curves of a small GPT in every layout: they lie on one line.

    python benchmarks/loss_curves.py [--out docs/images/layouts.png]

Trains 20 steps on mock data in each layout with the real program and launcher, reads every run's metrics.jsonl, draws
all curves, and below them how far each is from the one-process run. Exits with 1 if any loss differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import REPOSITORY, trained

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "1 process": (1, []),
    "dp 2": (2, []),
    "tp 2": (2, ["--tp-size", "2"]),
    "tp 2, sequence parallel": (2, ["--tp-size", "2", "--sequence-parallel"]),
    "tp 4": (4, ["--tp-size", "4"]),
    "sp 2": (2, ["--sp-size", "2"]),
    "sp 2, split-qkv": (2, ["--sp-size", "2", "--split-qkv-linear", "--sp-overlap-comm"]),
    "sp 2, chunked": (2, ["--sp-size", "2", "--sp-head-chunks", "2"]),
    "sp 3, chunked": (3, ["--sp-size", "3", "--sp-head-chunks", "2"]),
    "sp 4, recompute": (4, ["--sp-size", "4", "--sp-head-chunks", "2", "--recompute-granularity", "full"]),
    "tp 2, sp 2": (4, ["--tp-size", "2", "--sp-size", "2", "--sequence-parallel", "--sp-head-chunks", "2"]),
    "dp 2, sp 2": (4, ["--sp-size", "2", "--split-qkv-linear", "--sp-overlap-comm"]),
}
MODEL = [
    "--num-layers", "3", "--hidden-size", "64", "--num-attention-heads", "8", "--num-query-groups", "4", "--seq-length", "64",
    "--position-embedding-type", "rope", "--hidden-dropout", "0.1", "--attention-dropout", "0", "--mock-data", "--vocab-size", "512",
    "--micro-batch-size", "2", "--global-batch-size", "16", "--train-iters", "20", "--lr", "5e-3", "--lr-decay-style", "constant",
    "--eval-iters", "0", "--log-interval", "1", "--num-threads", "1", "--device", "cpu", "--no-progress-bar",
]  # fmt: skip
TOLERANCE = 1e-5


def losses(ranks: int, flags: list[str], folder: Path) -> list[float]:
    """Train once; raises CalledProcessError if that fails."""
    return [float.fromhex(r["loss_hex"]) for r in trained(ranks, [*MODEL, *flags], folder) if r["kind"] == "train"]


def draw(curves: dict[str, list[float]], out: Path) -> None:
    """Losses above, distance from the first curve below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    reference = next(iter(curves.values()))
    steps = range(1, len(reference) + 1)
    for index, (name, curve) in enumerate(curves.items()):
        style = (
            {"linewidth": 6, "alpha": 0.25, "color": "black"}
            if index == 0
            else {"linewidth": 1.2, "linestyle": (index, (4, 4))}
        )
        above.plot(steps, curve, label=name, **style)
        if index:
            below.semilogy(
                steps,
                [max(abs(a - b) / b, 1e-9) for a, b in zip(curve, reference, strict=True)],
                linewidth=1,
                label=name,
            )
    above.set_ylabel("training loss")
    above.set_title(f"{len(curves)} layouts of one model, fp32, {len(reference)} steps")
    above.legend(fontsize=8, ncols=2)
    below.axhline(TOLERANCE, color="red", linewidth=0.8)
    below.text(1, TOLERANCE * 1.2, "allowed", color="red", fontsize=8)
    below.set_ylabel("relative distance\nfrom 1 process")
    below.set_xlabel("step")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(REPOSITORY / "docs" / "images" / "layouts.png"))
    options = parser.parse_args(argv)
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, (ranks, flags)) in enumerate(LAYOUTS.items()):
            curves[name] = losses(ranks, flags, Path(folder) / str(index))
            print(f"{name}: {curves[name][0]:.6f} ... {curves[name][-1]:.6f}", flush=True)
    draw(curves, Path(options.out))
    reference = curves["1 process"]
    worst = {name: max(abs(a - b) / b for a, b in zip(curve, reference, strict=True)) for name, curve in curves.items()}
    print(
        f"largest relative difference: {max(worst.values()):.2g} ({max(worst, key=lambda name: worst[name])}); {options.out}"
    )
    return 0 if max(worst.values()) <= TOLERANCE else 1


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
