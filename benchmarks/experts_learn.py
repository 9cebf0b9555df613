"""A tiny OLMoE beside a dense model with as many active parameters, on the quickstart's text: which learns more from the same tokens?

    python benchmarks/experts_learn.py [--steps 400] [--out docs/images/experts_learn.png] [--json docs/benchmarks/experts_learn.json]

Both have 4 layers, hidden size 192, RMSNorm, rotary positions and norms of queries and keys over all heads; a dense layer has an MLP of
width 512, one of OLMoE 16 experts of width 128, of which a token takes the best 4. Same batches, same learning rates, two processes: data
parallel, and with experts on both (``--expert-model-parallel-size 2``). Text and tokenizer are made as the quickstart makes them, from
the Python that runs. Reads each run's metrics.jsonl, draws training and validation losses and how even the load is; exits with 1 if the
validation loss with experts ends above that of the dense model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import REPOSITORY, child_environment, print_table, trained, write_json

MODEL = [
    "--num-layers", "4", "--hidden-size", "192", "--num-attention-heads", "4", "--seq-length", "256",
    "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
    "--untie-embeddings-and-output-weights", "--qk-layernorm", "--qk-layernorm-scope", "all", "--hidden-dropout", "0",
    "--attention-dropout", "0", "--split", "96,3,1", "--micro-batch-size", "4", "--global-batch-size", "8",
    "--lr", "3e-3", "--min-lr", "3e-4", "--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.05",
    "--log-interval", "10", "--num-threads", "1", "--device", "cpu", "--no-progress-bar",
]  # fmt: skip
# at first each of the chosen experts has 1/16 of the softmax: times 4 they have 1 together, as a dense MLP has; balanced within each
# sequence they learn less from so short a run
EXPERTS = [
    "--num-experts", "16", "--moe-router-topk", "4", "--moe-ffn-hidden-size", "128", "--moe-router-pre-softmax",
    "--moe-router-topk-scaling-factor", "4", "--moe-aux-loss-coeff", "0.01", "--moe-router-load-balancing-type", "global_aux_loss",
    "--moe-z-loss-coeff", "0.001",
    "--expert-model-parallel-size", "2",
]  # fmt: skip
RUNS = {"dense": ["--ffn-hidden-size", "512"], "experts": ["--ffn-hidden-size", "512", *EXPERTS]}


def prepare(folder: Path, num_bytes: str | None) -> list[str]:
    """Make text, tokenizer and tokens; return the flags that name them."""
    tools, corpus, prefix, model = (
        REPOSITORY / "tools",
        folder / "corpus.jsonl",
        folder / "corpus",
        folder / "tokenizer.model",
    )
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]
    for script, *flags in (
        ["make_corpus.py", "--output", str(corpus), *(["--max-bytes", num_bytes] if num_bytes else [])],
        ["train_tokenizer.py", "--input", str(corpus), "--output", str(model)],
        [
            "preprocess_data.py",
            "--input",
            str(corpus),
            "--output-prefix",
            str(prefix),
            *tokenizer,
            "--append-eod",
            "--workers",
            "2",
        ],
    ):
        subprocess.run(
            [sys.executable, str(tools / script), *flags],
            check=True,
            env=child_environment(1),
            stdout=subprocess.DEVNULL,
        )
    return ["--data-path", f"{prefix}_text_document", *tokenizer]


def curve(records: list[dict[str, Any]], kind: str, name: str = "loss") -> tuple[list[int], list[float]]:
    """(steps, values) of the records of a kind that have this value."""
    found = [(r["step"], r[name]) for r in records if r["kind"] == kind and r.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def draw(runs: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Losses above, the load of the experts below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for color, (name, records) in zip(("tab:gray", "tab:blue"), runs.items(), strict=True):
        above.plot(*curve(records, "train"), color=color, linewidth=0.8, alpha=0.6)
        above.plot(*curve(records, "valid"), color=color, marker="o", markersize=4, label=f"{name}, validation")
    above.set_ylabel("loss")
    above.set_title("A tiny OLMoE and a dense model of as many active parameters")
    above.legend()
    below.plot(*curve(runs["experts"], "train", "expert_load_max"), color="tab:blue", linewidth=0.8)
    below.set_ylabel("largest load of an\nexpert / mean")
    below.set_xlabel("step")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--bytes", help="of the text; default: the quickstart's")
    parser.add_argument("--out", default=str(REPOSITORY / "docs" / "images" / "experts_learn.png"))
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            data = prepare(Path(folder), options.bytes)
            every = max(1, options.steps // 8)
            pace = [
                "--train-iters",
                str(options.steps),
                "--eval-interval",
                str(every),
                "--eval-iters",
                str(min(20, every)),
            ]
            for name, flags in RUNS.items():
                runs[name] = trained(2, [*MODEL, *flags, *pace, *data], Path(folder) / name)
                print(f"{name}: {curve(runs[name], 'valid')[1]}", flush=True)
        except subprocess.CalledProcessError as error:  # it has said why
            return 2 if error.returncode == 1 else error.returncode
    draw(runs, Path(options.out))
    found: dict[str, Any] = {"steps": options.steps}
    for name, records in runs.items():
        steps, losses = curve(records, "valid")
        found[name] = {
            "validation": dict(zip(map(str, steps), losses, strict=True)),
            "last": losses[-1],
            "flags": RUNS[name],
        }
    largest = curve(runs["experts"], "train", "expert_load_max")[1]
    found["experts"] |= {"largest_load_first": largest[0], "largest_load_last": largest[-1]}
    rows = [[name, *(f"{loss:.3f}" for loss in found[name]["validation"].values())] for name in runs]
    print_table("Validation loss", ["", *found["dense"]["validation"]], rows)
    import torch

    write_json(options.json, "experts_learn", found, {"torch": str(torch.__version__)})
    return 0 if found["experts"]["last"] <= found["dense"]["last"] else 1


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
