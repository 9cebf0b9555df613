"""The longest sequence on which one process can train within a given memory, with and without what saves memory.

    python benchmarks/longest_sequence.py [--gib 4] [--confirm] [--json docs/benchmarks/longest_sequence.json]

A GPT of 2 blocks, h 128, f 512, 8000 words as in the quickstart (rotary positions, fp32, one sequence, AdamW): nothing
but activations counts. For each setting a run without contents (``megatron_sp/planner/fake_run.py``, which tests hold against
real steps) is asked by bisection for the longest sequence, a multiple of 1024, whose peak stays within the memory.
Settings are added one after another, so that each shows its own share:

    nothing                 logits of the whole sequence, activations of both blocks, MLPs in one piece
    + chunked LM head       --lm-head-chunk-tokens, the default
    + recomputation         --recompute-granularity full
    + MLP in pieces         --mlp-chunks

With --confirm the first and the last of these lengths are trained for two steps, each in a process of its own, whose
live tensors are counted by a dispatch mode (``benchmarks/storages.py``) and whose growth of resident memory is read
beside it. The tokens are packed documents of 1024: attention over half a million positions would take hours, and its
memory is the same. --offload-activations is left out: a CPU has no other memory.

Then, with all settings, --context-parallel-size 1, 2 and 4, each process with as much memory: for a causal row, and for
one with a sliding window of 1024, which is what --confirm trains, for the reason above.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import print_table, write_json
from memory import Layout, predict

STEP = 1024  # tokens: of the bisection, and of a document
SHAPE = {
    "num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "ffn_hidden_size": 512, "vocab_size": 8000, "attention_dropout": 0.0,
    "hidden_dropout": 0.0, "position_embedding_type": "rope", "seq_length": STEP,
}  # fmt: skip
GIB = 2**30
PROCESSES = (1, 2, 4)


def settings(seq_length: int, pieces: int) -> dict[str, dict[str, Any]]:
    """Name of each setting, and its flags."""
    full = {"recompute_granularity": "full"}
    return {
        "nothing": {"lm_head_chunk_tokens": seq_length}, "+ chunked LM head": {}, "+ recomputation": full,
        "+ MLP in pieces": {**full, "mlp_chunks": pieces},
    }  # fmt: skip


def layout_of(name: str, seq_length: int, pieces: int, cp: int = 1, window: int | None = None) -> Layout:
    model = {"seq_length": seq_length} | ({} if window is None else {"window_size": window})
    return Layout(kernels=settings(seq_length, pieces)[name], model=model, cp=cp)


def longest(name: str, limit: int, pieces: int, cp: int = 1, window: int | None = None) -> int:
    """The longest sequence whose predicted peak is within ``limit`` bytes on each process."""

    def fits(steps: int) -> bool:
        return predict(layout_of(name, steps * STEP, pieces, cp, window), SHAPE, 1).peak <= limit

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * STEP


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="memory of the process (default: 4)")
    parser.add_argument("--pieces", type=int, default=32, help="--mlp-chunks (default: 32)")
    parser.add_argument("--confirm", action="store_true", help="train at the first and the last length, and count")
    parser.add_argument("--smoke", action="store_true", help="128 MiB, and confirm")
    parser.add_argument(
        "--one",
        nargs=7,
        metavar=("SETTING", "TOKENS", "LIMIT", "CP", "RANK", "STORE", "WINDOW"),
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.one:
        name, tokens, limit, cp, rank, store, window = options.one
        whole = layout_of(name, int(tokens), options.pieces, int(cp), int(window) or None)
        print(json.dumps(train(whole, int(limit), int(rank), store)))
        return 0
    limit = int(options.gib * GIB) if not options.smoke else GIB // 8
    names = list(settings(STEP, options.pieces))
    rows, results = [], {"limit_bytes": limit, "shape": SHAPE, "settings": dict[str, Any]()}
    found = {name: longest(name, limit, options.pieces) for name in names}
    for name, tokens in found.items():
        plan = predict(layout_of(name, tokens, options.pieces), SHAPE, 1)
        record: dict[str, Any] = {"tokens": tokens, "factor": tokens / found["nothing"], "predicted_bytes": plan.peak}
        row = [name, f"{tokens:,}", f"{tokens / found['nothing']:.2f}", f"{plan.peak / limit:.3f}", plan.worst.name]
        if (options.confirm or options.smoke) and name in (names[0], names[-1]):
            record["measured"] = measured = confirm(name, tokens, limit, options.pieces, 1, None)
            row += (
                [f"{measured['peak'] / limit:.3f}", f"{measured['resident_beyond_program'] / limit:.3f}"]
                if measured["peak"]
                else []
            )
        rows.append(row + ["", ""][: 7 - len(row)])
        results["settings"][name] = record
    print_table(
        f"Longest sequence within {limit / GIB:.3g} GiB, one process, fp32",
        ["setting", "tokens", "factor", "predicted / limit", "worst moment", "counted / limit", "resident / limit"], rows,
    )  # fmt: skip
    results["processes"] = by_processes(names[-1], limit, options)
    write_json(options.json, "longest_sequence", results, {"mlp_chunks": options.pieces})
    return 0


def by_processes(name: str, limit: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The longest sequences with cp over several processes, in one setting."""
    rows, results = [], dict[str, dict[str, Any]]()
    first: dict[int | None, int] = {}
    for cp in PROCESSES:
        record: dict[str, Any] = {}
        row = [str(cp)]
        for kind, window in (("causal", None), ("window", STEP)):
            tokens = longest(name, limit, options.pieces, cp, window)
            record[kind] = {"tokens": tokens, "factor": tokens / first.setdefault(window, tokens)}
            row += [f"{tokens:,}", f"{tokens / first[window]:.2f}"]
        if options.confirm or options.smoke:
            measured = confirm(name, record["window"]["tokens"], limit, options.pieces, cp, STEP)
            record["window"]["measured"] = measured
            row += (
                [f"{measured['peak'] / limit:.3f}", f"{measured['resident_beyond_program'] / limit:.3f}"]
                if measured["peak"]
                else []
            )
        rows.append(row + ["", ""][: 7 - len(row)])
        results[str(cp)] = record
    print_table(
        f"Longest sequence within {limit / GIB:.3g} GiB for each process, --context-parallel-size",
        ["processes", "causal", "factor", f"window {STEP}", "factor", "counted / limit", "resident / limit"], rows,
    )  # fmt: skip
    return results


def confirm(name: str, tokens: int, limit: int, pieces: int, cp: int, window: int | None) -> dict[str, Any]:
    """Train at this length in processes of their own; of each figure the largest."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--pieces",
            str(pieces),
            "--one",
            name,
            str(tokens),
            str(limit),
            str(cp),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
        of_ranks = [[*command, str(rank), f"{folder}/store", str(window or 0)] for rank in range(cp)]
        started = [subprocess.Popen(words, **piped) for words in of_ranks]
        said = [process.communicate() for process in started]
    if any(process.returncode for process in started):
        errors = [line for _, error in said for line in error.strip().splitlines()]
        return {"tokens": tokens, "peak": None, "error": (errors or ["died"])[-1][:80]}
    found: list[dict[str, Any]] = [json.loads(out.splitlines()[-1]) for out, _ in said]
    return {
        "tokens": tokens,
        **{figure: max(one[figure] for one in found) for figure in ("peak", "resident_beyond_program", "seconds")},
    }


def train(layout: Layout, limit: int, rank: int, store: str) -> dict[str, Any]:
    """Two steps, counted, and what was resident at most beyond what the program itself takes."""
    import resource

    import memory
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, layout.cp), rank=rank, world_size=layout.cp)
    counter = memory.Counter("cpu")
    began = time.monotonic()
    with counter.mode:
        torch.optim.AdamW([torch.ones(1, requires_grad=True)], fused=True).step()  # what an optimizer imports
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        training = memory.Training(layout, SHAPE, 1, "cpu", counter)
        if "window_size" not in layout.model:
            pack(training.train_step)
        for number in (1, 2):
            training.step(number)
    dist.destroy_process_group()
    return {
        "peak": max(counter.phases.values()), "fits": max(counter.phases.values()) <= limit,
        "resident_beyond_program": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "seconds": time.monotonic() - began,
    }  # fmt: skip


def pack(train_step: Any) -> None:
    """Make its batches rows of documents of ``STEP`` tokens that do not see each other."""
    import torch

    run = train_step.run

    def with_documents(batches: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
        for batch in batches:
            batch["documents"] = (torch.arange(batch["tokens"].shape[1], dtype=torch.int32) // STEP)[None]
        return run(batches, *args, **kwargs)

    train_step.run = with_documents


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
