"""Time of a generated token: ours eager, captured and several together, beside transformers' generate(), interleaved in one process.

    python benchmarks/generated_tokens.py [--shape host gpt-124M] [--json docs/benchmarks/generated_tokens.json]

Each contender continues prompts of 16 tokens by 64, greedily; the time is that of the whole call for each token, prompt
included. ``host`` is twelve layers of width 64, so that what is timed is Python. On the CPU (fp32, one thread) times are this
thread's own CPU time, so that other work on the machine counts little; on a GPU (bf16) wall time, and there is a row for
captured steps. Ratios are taken within a round, to transformers with as many prompts.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import Stats, print_table, ratios, write_json

SHAPES = {
    "host": {"num_layers": 12, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256},
    "gpt-124M": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 50304},
}
PROMPT, NEW, CONTEXT, TOGETHER = 16, 64, 128, 4
Generate = Callable[[], Any]


def build_ours(shape: dict[str, int], device: Any, dtype: Any) -> dict[str, tuple[int, Generate]]:
    """Our ways to generate, by name, each with its number of prompts."""
    from megatron_sp.config.schema import KernelConfig, ModelConfig
    from megatron_sp.inference.decoder import Capture, Decoder
    from megatron_sp.inference.generation import Sampling, complete
    from megatron_sp.models.gpt import GPTModel
    from megatron_sp.ops.cuda_graphs import CudaGraphs

    config = ModelConfig(**shape, seq_length=CONTEXT)  # type: ignore[arg-type]
    model = GPTModel(config, KernelConfig(), seed=1234, dtype=dtype).to(device).requires_grad_(False)
    captures = {"eager": None} | (
        {"captured": Capture(lambda: CudaGraphs(device), tell=print)} if device.type == "cuda" else {}
    )

    def of(rows: int, capture: Capture | None) -> Generate:
        decoder, prompts = Decoder(model, rows, capture=capture), [[1] * PROMPT] * rows
        return lambda: complete(model, prompts, max_new_tokens=NEW, sampling=Sampling(temperature=0), decoder=decoder)

    return {
        f"ours, {name}, {rows} at once": (rows, of(rows, capture)) for name, capture in captures.items() for rows in (1, TOGETHER)
    }  # fmt: skip


def build_peer(shape: dict[str, int], device: Any, dtype: Any) -> dict[str, tuple[int, Generate]]:
    """transformers' generate(), by name, with its number of prompts."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape["vocab_size"], n_positions=CONTEXT, n_embd=shape["hidden_size"], n_layer=shape["num_layers"],
        n_head=shape["num_attention_heads"], activation_function="gelu_pytorch_tanh", attn_implementation="sdpa", bos_token_id=0,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device=device, dtype=dtype).eval()

    def of(rows: int) -> Generate:
        ids = torch.ones(rows, PROMPT, dtype=torch.int64, device=device)
        mask = torch.ones_like(ids)
        return lambda: model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)

    return {f"transformers, {rows} at once": (rows, of(rows)) for rows in (1, TOGETHER)}


def measure(contenders: dict[str, tuple[int, Generate]], device: Any, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of a token in every round, of each contender; a round before them is not measured."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds + 1):
        for name, (rows, generate) in contenders.items() if index % 2 else reversed(contenders.items()):
            began = clock()
            generate()  # the host has the tokens when it returns
            if index:
                found[name].append(1e3 * (clock() - began) / (rows * NEW))
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), help="default: all")
    parser.add_argument("--rounds", type=int, default=7, help="measured calls of each (default: 7)")
    parser.add_argument("--json", help="write results there")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds ({options.rounds}) must be at least 1")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_num_threads(1)
    has_peer = importlib.util.find_spec("transformers") is not None
    if not has_peer:
        print("note: transformers is not installed here: ours alone", file=sys.stderr)
    rows, results = [], {}
    for shape in options.shape:
        contenders = build_ours(SHAPES[shape], device, dtype) | (
            build_peer(SHAPES[shape], device, dtype) if has_peer else {}
        )
        found = measure(contenders, device, options.rounds)
        for name, times in found.items():
            peer = found.get(f"transformers, {contenders[name][0]} at once")
            ratio = None if peer is None or peer is times else ratios(times, peer)
            rows.append(
                [f"{shape}: {name}", Stats.of(times).text("", 1, 3), "" if ratio is None else ratio.text("", 1, 2)]
            )
            results[f"{shape}: {name}"] = {
                "milliseconds": Stats.of(times).median,
                "ratio": None if ratio is None else ratio.median,
            }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "one CPU thread"
    print_table(f"A token of {NEW} after {PROMPT}, on {name}", ["", "ms for a token", "of transformers"], rows)
    versions = {"torch": torch.__version__, "device": name}
    if has_peer:
        import transformers

        versions["transformers"] = transformers.__version__
    write_json(options.json, "generated_tokens", results, versions)
    return 0


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
