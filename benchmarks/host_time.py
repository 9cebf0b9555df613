"""What the host needs for a step whose arithmetic is next to nothing: ours beside transformers in eager mode, interleaved in one process.

    python benchmarks/host_time.py [--model gpt|llama] [--sp-chunks 4] [--json docs/benchmarks/host_time.json]

Twelve layers of width 64 and 64 tokens: what is timed is Python, autograd and the calls of operations, which a GPU has to wait
for in a small model. On the CPU (fp32, one thread) times are this thread's own CPU time, so that other work on the machine
counts little; on a GPU (bf16, the peer under autocast) wall time to the end of the step. Ratios are taken within a round.

Beside them Python calls, counted by ``sys.setprofile`` in one step: they repeat exactly, and
``tests/unit/project/test_host_calls.py`` holds those of a layer to a budget.

Then what ``--sp-overlap-comm chunked`` costs the host: a rank of two that share sequences of twice the length, in chunks and
without overlap, with copies in place of the exchanges.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import Stats, print_table, ratios, write_json
from gpu.step import Parts, build_ours, build_peer, synchronize

SHAPES = {
    "gpt": {"num_layers": 12, "hidden_size": 64, "num_heads": 4, "vocab_size": 256, "batch": 1, "seq_length": 64},
    "llama": {
        "num_layers": 12, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 128, "vocab_size": 256, "batch": 1,
        "seq_length": 64,
    },
}  # fmt: skip
SP_SHAPE = {"num_layers": 12, "hidden_size": 64, "num_heads": 8, "vocab_size": 256, "batch": 1, "seq_length": 128}
PARTS = ("forward", "backward", "update")
GOAL, SP_GOAL = 0.80, 1.15


class Calls(NamedTuple):
    """Calls of Python functions in each part of a step."""

    forward: int
    backward: int
    update: int


def count_calls(parts: Parts, tokens: Any) -> Calls:
    """Return the calls of Python functions in a step."""
    found: list[int] = []

    def counted(run: Callable[..., Any], *arguments: Any) -> Any:
        calls = 0

        def saw(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(saw)
        try:
            return run(*arguments)
        finally:
            sys.setprofile(None)
            found.append(calls)

    counted(parts.backward, counted(parts.forward, tokens))
    counted(parts.update)
    return Calls(*found)


def calls_of_a_layer(shape: dict[str, int], build: Callable[[dict[str, int]], Parts]) -> Calls:
    """Return the calls of a step with four layers less those of one with two, halved."""
    import torch

    tokens = torch.randint(
        0, shape["vocab_size"], (shape["batch"], shape["seq_length"]), generator=torch.Generator().manual_seed(1)
    )
    both = []
    for layers in (2, 4):
        parts = build({**shape, "num_layers": layers})
        for _ in range(2):  # tables are made in the first step
            parts(tokens, 0)
        both.append(count_calls(parts, tokens))
    return Calls(*((more - less) // 2 for less, more in zip(*both, strict=True)))


def one_of_two(chunks: int) -> Any:
    """The layout of a rank of two that share sequences, whose exchanges are copies of what it sends itself."""
    import torch

    from megatron_sp.comm.collectives import Handle, done
    from megatron_sp.comm.groups import SINGLE_RANK
    from megatron_sp.parallel.parallel_context import ParallelContext, SequenceParallel

    class Copies(SequenceParallel):
        size, rank = 2, 0  # type: ignore[assignment]

        def exchange_async(self, name: str, send: Any, send_counts: list[int], receive_counts: list[int]) -> Handle:
            return done(torch.empty(sum(receive_counts), dtype=send.dtype, device=send.device).copy_(send))

    return ParallelContext(
        sp=Copies(SINGLE_RANK, overlap=True), mode="chunked" if chunks > 1 else "none", num_chunks=chunks
    )


def measure(contenders: dict[str, Parts], tokens: Any, rounds: int, warmup: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of every round, of each contender and part."""
    device = tokens.device
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    seconds: dict[str, dict[str, list[float]]] = {name: {part: [] for part in (*PARTS, "step")} for name in contenders}
    for index in range(warmup + rounds):
        for name, parts in contenders.items() if index % 2 else reversed(contenders.items()):
            synchronize(device)
            marks = [clock()]
            loss = parts.forward(tokens)
            marks.append(clock())
            parts.backward(loss)
            marks.append(clock())
            parts.update()
            synchronize(device)
            marks.append(clock())
            if index >= warmup:
                for part, start, end in zip(PARTS, marks, marks[1:], strict=False):
                    seconds[name][part].append(end - start)
                seconds[name]["step"].append(marks[-1] - marks[0])
    return seconds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SHAPES), help="default: all")
    parser.add_argument(
        "--sp-chunks", type=int, default=4, help="chunks of a rank's heads beside no overlap; 1: none (default: 4)"
    )
    parser.add_argument("--rounds", type=int, default=60, help="measured steps of each (default: 60)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default: 5)")
    parser.add_argument("--json", help="write results there")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.warmup < 2 or not 1 <= options.sp_chunks <= 4:
        found = f"--rounds ({options.rounds}), --warmup ({options.warmup}), --sp-chunks ({options.sp_chunks})"
        parser.error(f"{found}: they must be at least 1, at least 2, and from 1 to 4")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    import torch

    from megatron_sp.comm.groups import destroy_process_group

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    torch.set_num_threads(1)
    has_peer = importlib.util.find_spec("transformers") is not None
    if not has_peer:
        print("note: transformers is not installed here: ours alone", file=sys.stderr)
    rows, results = [], {}
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for model in [*([options.model] if options.model else SHAPES), *(["sp 2"] if options.sp_chunks > 1 else [])]:
        shape, goal = SHAPES.get(model, SP_SHAPE), GOAL
        if model in SHAPES:
            contenders = {"ours": build_ours(shape, device, dtype)[0]}
            if has_peer:
                contenders["transformers"] = build_peer(shape, device, compiled=False, autocast=on_gpu)
        else:
            goal, contenders = SP_GOAL, {}
            for chunks, name in ((options.sp_chunks, f"chunked x{options.sp_chunks}"), (1, "no overlap")):
                contenders[name] = build_ours(shape, device, dtype, one_of_two(chunks))[0]
                destroy_process_group()
        tokens = torch.randint(0, shape["vocab_size"], (shape["batch"], shape["seq_length"]), device=device)
        seconds = measure(contenders, tokens, options.rounds, options.warmup)
        calls = {name: count_calls(parts, tokens) for name, parts in contenders.items()}
        for name, of_parts in seconds.items():
            per_layer = Stats.of(s / shape["num_layers"] for s in of_parts["step"])
            of_step = [Stats.of(of_parts[part]).text("", 1e3, 2) for part in (*PARTS, "step")]
            rows.append(
                [f"{model}, {name}", *of_step, per_layer.text("", 1e3, 2), " / ".join(f"{c:,}" for c in calls[name])]
            )
            results[f"{model}, {name}"] = {
                "milliseconds": 1e3 * Stats.of(of_parts["step"]).median,
                "calls": calls[name]._asdict(),
            }
        if len(seconds) == 2:
            mine, other = seconds.values()
            found = [ratios(mine[part], other[part]) for part in (*PARTS, "step")]
            rows.append([f"{model}, ratio", *(f"{ratio.median:.2f}" for ratio in found), f"goal {goal:.2f}", ""])
            results[f"{model}, ratio"] = {
                part: ratio.median for part, ratio in zip((*PARTS, "step"), found, strict=True)
            }
        destroy_process_group()
    header = ["", "forward, ms", "backward, ms", "update, ms", "step, ms", "of a layer, ms", "Python calls"]
    name = torch.cuda.get_device_name(device) if on_gpu else "one CPU thread"
    print_table(f"Host time of a step of 64 tokens, 12 layers of width 64, on {name}", header, rows)
    versions = {"torch": torch.__version__, "device": name}
    if has_peer:
        import transformers

        versions["transformers"] = transformers.__version__
    write_json(options.json, "host_time", results, versions)
    return 0


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
