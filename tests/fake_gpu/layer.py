"""What a layer and a step cost on a GPU: launches and bytes, counted on the fake device.

A training of three layers minus one of two is a layer, forward and backward; a step is a whole one. A launch is an operation
of torch's or a kernel of ours; bytes are those that it reads and writes. Of a layer products, attention, collectives and the
update are counted apart: what is left is memory-bound, and need not be there.

``python -m fake_gpu.layer [--write]`` (with tests/ on the path) prints the table of docs/benchmarks/gpu_bytes.md, or
writes it.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from fake_gpu.jobs import Job, run_rank

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu_bytes.md"
_LLAMA = (
    "--bf16 --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear"
    " --untie-embeddings-and-output-weights --attention-dropout 0"
)
_GPT = "--bf16 --attention-dropout 0"
_7B = "--hidden-size 4096 --num-attention-heads 32 --seq-length 4096"
_1B = "--hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5504 --seq-length 65536"
_SP8 = "--sequence-parallel-size 8 --sp-overlap-mode chunked --sp-overlap-comm"
_NO_DROPOUT = "--hidden-dropout 0"
_STEP = "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --eval-iters 0 --lr 1e-2 --vocab-size 60 --mock-data"


@dataclass(frozen=True)
class Budget:
    """What a layer may take at most: launches and GB, beside products, attention, collectives and the update."""

    launches: int
    gigabytes: float


@dataclass(frozen=True)
class Case:
    """A layer: flags, ranks, its budget with Triton's kernels and without, and the choices of each of its experts, and rows."""

    flags: str
    world_size: int
    fused: Budget
    plain: Budget
    counts: tuple[int, ...] = ()


CASES = {
    "Llama 7B, 4K": Case(f"{_LLAMA} {_7B} --ffn-hidden-size 11008 {_NO_DROPOUT}", 1, Budget(14, 1.9), Budget(54, 5.0)),
    "Llama 7B, 4K, dropout 0.1": Case(
        f"{_LLAMA} {_7B} --ffn-hidden-size 11008 --hidden-dropout 0.1", 1, Budget(16, 2.1), Budget(178, 9.1)
    ),
    "Llama 1B, 64K, sp 8": Case(f"{_LLAMA} {_1B} {_SP8} {_NO_DROPOUT}", 8, Budget(55, 2.5), Budget(114, 5.8)),
    "GPT 7B, 4K": Case(f"{_GPT} {_7B} {_NO_DROPOUT}", 1, Budget(18, 2.25), Budget(40, 2.3)),
    "GPT 7B, 4K, dropout 0.1": Case(f"{_GPT} {_7B} --hidden-dropout 0.1", 1, Budget(20, 2.45), Budget(162, 6.3)),
    "Llama 7B, 4K, tp 2 with sequence parallelism": Case(
        f"{_LLAMA} {_7B} --ffn-hidden-size 11008 {_NO_DROPOUT} --tensor-model-parallel-size 2 --sequence-parallel", 2,
        Budget(15, 1.0), Budget(54, 2.6),
    ),
    "Llama 7B, 4K, full recomputation": Case(
        f"{_LLAMA} {_7B} --ffn-hidden-size 11008 {_NO_DROPOUT} --recompute-granularity full --recompute-method uniform"
        " --recompute-num-layers 1", 1, Budget(20, 2.6), Budget(74, 6.8),
    ),
    "Llama 7B, 4K, MLP in 4 chunks": Case(
        f"{_LLAMA} {_7B} --ffn-hidden-size 11008 {_NO_DROPOUT} --mlp-chunks 4", 1, Budget(45, 2.0), Budget(120, 5.1)
    ),
    "OLMoE, 64 experts, 4K": Case(
        f"{_LLAMA} --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --ffn-hidden-size 1024 {_NO_DROPOUT}"
        " --num-experts 64 --moe-router-topk 8", 1, Budget(138, 7.0), Budget(240, 9.6), (512, 4096),
    ),
}  # fmt: skip


_124M = (
    "--bf16 --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 --mock-data"
    " --micro-batch-size 16 --global-batch-size 16 --train-iters 2 --eval-iters 0 --lr 1e-2"
)
STEPS = {
    "GPT-2 124M": (f"{_124M} --attention-dropout 0 {_NO_DROPOUT}", 475),
    "GPT-2 124M, dropout 0.1": (f"{_124M} --attention-dropout 0.1 --hidden-dropout 0.1", 500),
}
"""Flags of a training, and the launches that a step with one micro-batch of 16 sequences may take on one GPU."""


@dataclass
class Layer:
    """What one layer does in a step with one micro-batch: launches and bytes of each kind, and of each place of the last one."""

    launches: Counter[str]
    num_bytes: Counter[str]
    places: Counter[tuple[str, str]]  # bytes of (file, operation) of the kind "rest"

    @property
    def gigabytes(self) -> float:
        """Of what need not be there."""
        return self.num_bytes["rest"] / 1e9


def _kind(file: str, op: str) -> str:
    if op.split(".")[0] in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        return "collectives"
    if file.startswith(("optim/", "training/", "ops/adamw.py", "ops/kernels/squares.py")):
        return "update"
    if any(word in op for word in ("mm.", "bmm", "addmm", "grouped_weight")):
        return "products"
    return "attention" if "_attention" in op else "rest"


def layer(case: Case, *, fused: bool) -> Layer:
    """Count a layer."""
    flags = f"{case.flags} {_STEP} --fused-kernels {'auto' if fused else 'torch'}"
    job = Job(flags, case.world_size, large=True, counts=case.counts)
    result = Layer(Counter(), Counter(), Counter())
    for sign, layers in ((-1, 2), (1, 3)):
        outcome = run_rank(replace(job, flags=f"{flags} --num-layers {layers}"))
        assert not outcome["error"] and not outcome["problems"], (outcome["error"], outcome["problems"], outcome["output"][-2000:])
        for file, op, count, num_bytes in outcome["steps"][0]["files"]:
            kind = _kind(file, op)
            result.launches[kind] += sign * count
            result.num_bytes[kind] += sign * num_bytes
            if kind == "rest":
                result.places[file, op] += sign * num_bytes
    return result


_STEP_KINDS = {
    "products": ("mm.", "addmm", "mv."), "attention": ("_attention",), "norms": ("norm_forward", "norm_backward"),
    "dropout": ("dropout", "row_keys"), "activations": ("activation_",),
    "biases": ("add_bias", "column_parts", "finish", "pack"), "copies": ("copy", "clone", "cat", "stack"),
    "fills": ("zero", "fill", "full", "ones", "scalar_tensor", "arange"), "cross entropy": ("cross_entropy",),
    "update": ("adamw", "squares", "vector_norm"),
}  # fmt: skip


def step(flags: str) -> Counter[str]:
    """Count the launches of a whole step, the second of a training, by kind: batch, passes, norm, clipping, update, refresh."""
    outcome = run_rank(Job(f"{flags} --cuda-graphs off", large=True))
    assert not outcome["error"] and not outcome["problems"], (outcome["error"], outcome["problems"], outcome["output"][-2000:])
    found: Counter[str] = Counter()
    for _, op, count, _ in outcome["steps"][-1]["files"]:
        kind = next((kind for kind, words in _STEP_KINDS.items() if any(word in op for word in words)), "others")
        found[kind] += count
    return found


def page() -> str:
    """Return docs/benchmarks/gpu_bytes.md."""
    lines = [
        "# Launches and bytes of a layer on a GPU",
        "",
        "Written by `python -m fake_gpu.layer --write` (with `tests` on the path), without a GPU: a training of three layers minus one",
        "of two, forward and backward of one micro-batch, in bf16, on the [fake device](../design/009-fake-device.md). A launch is an",
        "operation of torch's, which may be several kernels, or a kernel of ours. Bytes are what operations read and write, whatever a",
        "cache saves.",
        "Products, attention, collectives and the update are left out of the first columns. `tests/fake_gpu/test_layer.py` fails where",
        "a layer takes more than its budget.",
        "",
        "| layer | launches | GB | budget | with `--fused-kernels torch` | budget | products, GB | attention, GB | collectives, GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    places = []
    for name, case in CASES.items():
        fused, plain = layer(case, fused=True), layer(case, fused=False)
        others = " | ".join(f"{fused.num_bytes[kind] / 1e9:.2f}" for kind in ("products", "attention", "collectives"))
        lines.append(
            f"| {name} | {fused.launches['rest']} | {fused.gigabytes:.2f} | {case.fused.launches}, {case.fused.gigabytes} |"
            f" {plain.launches['rest']}, {plain.gigabytes:.2f} | {case.plain.launches}, {case.plain.gigabytes} | {others} |"
        )
        shown = [(place, b) for place, b in fused.places.most_common() if b >= 1e6]
        places += ["", f"## {name}", "", "| MB | where | operation |", "|---|---|---|"]
        places += [f"| {b / 1e6:.0f} | `{file}` | `{op}` |" for (file, op), b in shown]
    lines += [
        "",
        "## A whole step",
        "",
        "One micro-batch of 16 x 1024 tokens on one GPU: its batch, forward, loss, backward, norm, clipping, update and 16-bit weights.",
        "",
        "| step | launches | budget | " + " | ".join([*_STEP_KINDS, "others"]) + " |",
        "|---" * (4 + len(_STEP_KINDS)) + "|",
    ]
    for name, (flags, budget) in STEPS.items():
        found = step(flags)
        kinds = " | ".join(str(found[kind]) for kind in (*_STEP_KINDS, "others"))
        lines.append(f"| {name} | {found.total()} | {budget} | {kinds} |")
    return "\n".join([*lines, *places, ""])


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
