"""The planner against published figures, and against steps measured on this machine's CPU.

python benchmarks/plan_check.py [--parts published arithmetic memory pairs] [--rounds 5] [--json
docs/benchmarks/plan_check.json]

published    tokens per second of other people's runs on A100 and H100, and what ``megatron-sp plan`` predicts for the same model, GPUs
             and layout in this package: other kernels and other code, so this is about the size of the figures, not about digits
arithmetic   times of a layer worked out by hand from rates, and the most that hiding the exchanges of sp can gain
memory       12 layouts on gloo: live bytes of the largest rank in a step, and what the planner says without its reserve
pairs        8 pairs of layouts on 2 and 4 processes: which is faster, predicted with rates measured just before, and measured. Both
             layouts live in the same processes and take turns; medians over rounds of the slowest rank.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import memory
from common import load_average, print_table, write_json
from memory import FULL, LLAMA, SELECTIVE, Layout, zero

PARTS = ("published", "arithmetic", "memory", "pairs")
MEMORY_BOUND, GAP = 0.07, 1.1

# ------------------------------------------------------------------------------------------------------ published

# (layers, hidden size, heads) of the MPT models
MPT = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
LLAMA_8B = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336"
LLAMA_70B = "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672"
LLAMA_3 = (
    " --num-query-groups 8 --vocab-size 128256 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
    " --untie-embeddings-and-output-weights --seq-length 8192"
)


@dataclass(frozen=True)
class Published:
    """One figure of somebody else's.

    Attributes:
        flags: model, layout and batch, for this package.
        per_gpu: tokens per second and GPU.
        kernel: attention rates that replace those of the GPU's table: what those runs had.
    """

    source: str
    what: str
    gpu: str
    gpus: int
    link: str
    flags: str
    per_gpu: float
    kernel: tuple[float, float] | None = None


LONG = 0.25  # share of attention in the predicted time above which a run of 2022 or 2023 says more about its kernel than about the planner
FOUNDRY = "llm-foundry"  # MosaicML's training benchmarks: FSDP, 2023, flash attention in Triton
_HOPPER_2023 = (335.0, 322.0)  # FlashAttention-2's rates on an H100: nothing faster was there


def mpt(gpu: str, model: str, seq: int, gpus: int, micro: int, batch: int, full: bool, per_gpu: float) -> Published:
    """A line of llm-foundry's tables: everything sharded (ZeRO 3), dp alone."""
    layers, hidden, heads = MPT[model]
    flags = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --vocab-size 50368 --disable-bias-linear"
        f" --seq-length {seq} --zero-stage 3 --micro-batch-size {micro} --global-batch-size {batch}"
        + " --recompute-granularity full"
        * full
    )
    link = "ib-200g" if gpu.startswith("a100") else "ib-400g"
    words = f"MPT {model}, {seq} tokens, {gpus} x {gpu}, micro-batch {micro}" + ", recomputed" * full
    return Published(FOUNDRY, words, gpu, gpus, link, flags, per_gpu, _HOPPER_2023 if gpu.startswith("h100") else None)


def megatron(recompute: str, seq_parallel: str, seconds: float) -> Published:
    """22B on one node, as in the paper on selective recomputation and sequence parallelism (arXiv:2205.05198, table 5)."""
    flags = (
        "--num-layers 48 --hidden-size 6144 --num-attention-heads 64 --vocab-size 51200 --seq-length 2048 --tp-size 8"
        f" --micro-batch-size 4 --global-batch-size 4 --recompute-granularity {recompute}{seq_parallel}"
    )
    return Published(
        "Megatron-LM",
        f"GPT 22B, tp 8, {recompute} recomputation",
        "a100-80g",
        8,
        "ib-200g",
        flags,
        4 * 2048 / seconds / 8,
    )


def titan(
    what: str, gpu: str, gpus: int, flags: str, per_gpu: float, kernel: tuple[float, float] | None = None
) -> Published:
    return Published("torchtitan", what, gpu, gpus, "ib-200g", flags + LLAMA_3 + " --zero-stage 3", per_gpu, kernel)


PUBLISHED = [
    mpt("a100-80g", "125m", 2048, 8, 32, 512, False, 141737), mpt("a100-80g", "350m", 2048, 8, 32, 512, False, 58782),
    mpt("a100-80g", "760m", 2048, 8, 24, 384, False, 32434), mpt("a100-80g", "1b", 2048, 8, 14, 448, False, 20513),
    mpt("a100-80g", "1b", 8192, 8, 3, 96, False, 13814), mpt("a100-80g", "1b", 32768, 8, 1, 32, False, 6275),
    mpt("a100-80g", "1b", 65536, 8, 1, 16, True, 3044), mpt("a100-80g", "3b", 2048, 8, 10, 160, False, 10811),
    mpt("a100-80g", "7b", 2048, 8, 6, 96, False, 4641), mpt("a100-80g", "7b", 16384, 8, 4, 64, True, 2453),
    mpt("a100-80g", "13b", 2048, 8, 2, 48, False, 2262), mpt("a100-80g", "30b", 2048, 8, 3, 504, True, 916),
    mpt("a100-80g", "70b", 2048, 64, 8, 2048, True, 410), mpt("a100-40g", "13b", 2048, 16, 10, 160, True, 1993),
    mpt("h100-80g", "1b", 2048, 8, 14, 112, False, 45455), mpt("h100-80g", "1b", 32768, 8, 1, 32, False, 12025),
    mpt("h100-80g", "1b", 65536, 8, 1, 16, True, 5506), mpt("h100-80g", "3b", 2048, 64, 6, 1152, False, 22525),
    mpt("h100-80g", "7b", 2048, 8, 6, 48, False, 10643), mpt("h100-80g", "7b", 8192, 8, 8, 128, True, 6935),
    mpt("h100-80g", "13b", 2048, 8, 2, 16, False, 4792), mpt("h100-80g", "30b", 2048, 32, 14, 1344, True, 2308),
    mpt("h100-80g", "70b", 2048, 64, 8, 2048, True, 1039),
    megatron("full", "", 1.42), megatron("selective", " --sequence-parallel", 1.10),
    titan("Llama 3 70B, 8192 tokens, 64 x a100-80g, micro-batch 1, recomputed", "a100-80g", 64,
          LLAMA_70B + " --micro-batch-size 1 --global-batch-size 64 --recompute-granularity full", 331),
    titan("Llama 3.1 8B, 8192 tokens, 8 x H100 at 500 W, micro-batch 2, compiled", "h100-80g", 8,
          LLAMA_8B + " --micro-batch-size 2 --global-batch-size 16 --recompute-granularity selective", 6667),
]  # fmt: skip


def predict_published(row: Published) -> Any:
    """The planner's time of that step (tokens, StepTime)."""
    from megatron_sp.config.flags.arguments import config_from_args
    from megatron_sp.planner.fake_run import step_time
    from megatron_sp.planner.hardware import GPUS, LINKS
    from megatron_sp.planner.machine import Machine

    more = " --mock-data --bf16 --lr 1e-4 --train-iters 1 --attention-dropout 0 --hidden-dropout 0"
    config = config_from_args((row.flags + more).split(), world_size=row.gpus)
    gpu = replace(GPUS[row.gpu], host_ms=0.0)  # that of our Python says nothing of theirs
    if row.kernel is not None:
        gpu = replace(gpu, attention_forward_tflops=row.kernel[0], attention_backward_tflops=row.kernel[1])
    nodes = max(1, row.gpus // 8)
    machine = Machine(
        gpu, row.gpus, nodes, LINKS[gpu.link], LINKS[row.link] if nodes > 1 else None, 8, gpu.memory_bytes
    )
    assert config.batch.global_batch_size and config.model.seq_length
    return config.batch.global_batch_size * config.model.seq_length, step_time(config, machine)


def published() -> dict[str, Any]:
    rows, kept = [], []
    errors: dict[str, list[float]] = {}
    for row in PUBLISHED:
        tokens, step = predict_published(row)
        per_gpu = tokens / step.seconds / row.gpus
        error, share = per_gpu / row.per_gpu - 1, step.attention / step.seconds
        kind = "attention above a quarter" if share > LONG else "fitted" if row in PUBLISHED[:14] else "not fitted"
        errors.setdefault(kind, []).append(error)
        rows.append(
            [row.source, row.what, f"{row.per_gpu:,.0f}", f"{per_gpu:,.0f}", f"{error:+.0%}", f"{share:.0%}", kind]
        )
        kept.append({"source": row.source, "what": row.what, "flags": row.flags, "published": row.per_gpu, "predicted": per_gpu,
                     "attention_share": share, "kind": kind})  # fmt: skip
    notes = [f"{kind}: {_spread(of_kind)}" for kind, of_kind in errors.items()]
    header = ["source", "run", "published", "predicted", "error", "attention", "rate of training"]
    print_table("Tokens/s of a GPU", header, rows, notes)
    return {"rows": kept, "errors": errors}


def _spread(errors: list[float]) -> str:
    middle = statistics.median(abs(error) for error in errors)
    return f"{len(errors)} runs, median of the errors' sizes {middle:.0%}, {min(errors):+.0%} to {max(errors):+.0%}"


# ----------------------------------------------------------------------------------------------------- arithmetic

SHAPES = {
    "1B, 64K": "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 65536 --vocab-size 50304",
    "7B, 16K": "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 16384 --vocab-size 50304",
}
# ms of a layer on one of eight GPUs (sp 8), worked out from FLOPs and rates: products and attention, forward and
# backward
BY_HAND = {
    ("1B, 64K", "h100-80g"): (4.84, 12.54), ("7B, 16K", "h100-80g"): (1.64, 3.63),
    ("1B, 64K", "a100-80g"): (14.45, 38.68), ("7B, 16K", "a100-80g"): (4.58, 10.38),
}  # fmt: skip
# what hiding all exchanges of sp 8 gains at most over hiding none, H100: (within a node, one GPU on each of 8 nodes
# with ib-400g)
GAINS = {"1B, 64K": (1.040, 1.32), "7B, 16K": (1.066, 1.53)}


def arithmetic() -> dict[str, Any]:
    from megatron_sp.config.flags.arguments import config_from_args
    from megatron_sp.planner.fake_run import step_time
    from megatron_sp.planner.hardware import GPUS, LINKS
    from megatron_sp.planner.machine import Machine

    def config_of(shape: str, mode: str) -> Any:
        more = f" --mock-data --bf16 --lr 1e-4 --train-iters 1 --attention-dropout 0 --hidden-dropout 0 --global-batch-size 16 {mode}"
        return config_from_args((SHAPES[shape] + " --sp-size 8 --zero-stage 1" + more).split(), world_size=8)

    rows, kept = [], []
    for (shape, name), (forward_ms, backward_ms) in BY_HAND.items():
        gpu = GPUS[name]
        machine, c = Machine(gpu, 8, 1, LINKS[gpu.link], None, 8, gpu.memory_bytes), config_of(shape, "")
        more, once = copy.deepcopy(c), copy.deepcopy(c)
        assert c.model.num_layers
        once.model.num_layers, more.model.num_layers = c.model.num_layers, 2 * c.model.num_layers
        times = [step_time(config, machine) for config in (once, more)]
        products, attention = (getattr(times[1], name) - getattr(times[0], name) for name in ("products", "attention"))
        found, by_hand = (
            1e3 * gpu.sustained * (products + attention) / c.model.num_layers / 16,
            forward_ms + backward_ms,
        )
        rows.append([f"{shape}, {name}", f"{by_hand:.2f} ms", f"{found:.2f} ms", f"{found / by_hand - 1:+.0%}"])
        kept.append({"what": rows[-1][0], "by_hand_ms": by_hand, "predicted_ms": found})
    gpu = replace(GPUS["h100-80g"], host_ms=0.0)  # what is hidden on the GPU; at 16K tokens Python takes longer
    for shape, bounds in GAINS.items():
        for nodes, bound in zip((1, 8), bounds, strict=True):
            machine = Machine(
                gpu, 8, nodes, LINKS[gpu.link], LINKS["ib-400g"] if nodes > 1 else None, 8 // nodes, gpu.memory_bytes
            )
            times = [
                step_time(config_of(shape, f"--sp-overlap-mode {mode}"), machine).seconds
                for mode in ("none", "chunked")
            ]
            gain, where = times[0] / times[1], "one node" if nodes == 1 else "8 nodes"
            rows.append([f"{shape}, sp 8 on {where}: chunked over none", f"at most {bound:.2f}", f"{gain:.2f}", ""])
            kept.append({"what": rows[-1][0], "bound": bound, "predicted": gain})
    print_table("A layer, and what overlap gains", ["", "by hand", "predicted", "difference"], rows)
    return {"rows": kept}


# --------------------------------------------------------------------------------------------------------- memory

SHAPE = {
    "num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 4096, "seq_length": 512, "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}  # fmt: skip
MEASURED = [
    Layout(), Layout(dp=2), Layout(dp=2, zero=zero(1), micro_batches=2), Layout(dp=2, zero=zero(3)), Layout(sp=2, mode="chunked"),
    Layout(sp=2, kernels=FULL), Layout(sp=2, kernels=SELECTIVE, zero=zero(2)), Layout(tp=2), Layout(tp=2, tp_seq=True, micro_batches=2),
    Layout(sp=2, tp=2, tp_seq=True, zero=zero(1)), Layout(sp=4, zero=zero(3), kernels=FULL), Layout(dp=2, sp=2, model=LLAMA, zero=zero(2)),
]  # fmt: skip


def peaks(layouts: list[Layout]) -> dict[str, Any]:
    """Live bytes of the largest rank against the plan."""
    rows, kept = [], []
    for layout in layouts:
        measured = max(rank["peak"] for rank in memory.run(layout, SHAPE, 2))
        planned = memory.predict(layout, SHAPE, 2).peak
        rows.append(
            [str(layout), f"{measured / 2**20:.1f}", f"{planned / 2**20:.1f}", f"{planned / measured - 1:+.2%}"]
        )
        kept.append({"layout": str(layout), "measured": measured, "planned": planned})
    worst = max(abs(row["planned"] / row["measured"] - 1) for row in kept)
    note = f"largest difference {worst:.1%}, bound {MEMORY_BOUND:.0%}"
    print_table("Memory of the largest rank, MiB", ["layout", "measured", "planned", "difference"], rows, [note])
    return {"rows": kept, "worst": worst}


# ---------------------------------------------------------------------------------------------------------- pairs


@dataclass(frozen=True)
class Way:
    """One side of a pair: a layout and the sequences of a micro-batch."""

    layout: Layout
    batch: int

    def __str__(self) -> str:
        return f"{self.layout}, micro-batch {self.batch}"


@dataclass(frozen=True)
class Pair:
    """Two ways to train the same batch.

    Attributes:
        what: what decides.
        shape: changes of ``SHAPE``.
    """

    what: str
    one: Way
    other: Way
    shape: dict[str, Any] = field(default_factory=dict)


FEW_TOKENS = {"num_layers": 2, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 64, "vocab_size": 1024}
MANY_TOKENS = {"num_layers": 2, "vocab_size": 512}
PAIRS = [
    Pair("many tokens: activations cost more than gradients", Way(Layout(dp=2), 4), Way(Layout(tp=2), 8), MANY_TOKENS),
    Pair("few tokens: gradients cost more than activations", Way(Layout(dp=2), 1), Way(Layout(tp=2), 2), FEW_TOKENS),
    Pair("everything computed again", Way(Layout(sp=2), 4), Way(Layout(sp=2, kernels=FULL), 4), MANY_TOKENS),
    Pair("parameters gathered for every micro-batch", Way(Layout(dp=2, zero=zero(1), micro_batches=4), 1),
         Way(Layout(dp=2, zero=zero(3), micro_batches=4), 1), FEW_TOKENS),
    Pair("gradients reduced for every micro-batch", Way(Layout(dp=2, zero=zero(2)), 4),
         Way(Layout(dp=2, zero=zero(2), micro_batches=4), 1), FEW_TOKENS),
    Pair("4 processes, many tokens", Way(Layout(dp=4), 2), Way(Layout(tp=4), 8), MANY_TOKENS),
    Pair("4 processes: heads travel instead of activations", Way(Layout(sp=4), 8), Way(Layout(tp=4), 8), MANY_TOKENS),
    Pair("4 processes, few tokens", Way(Layout(dp=4), 1), Way(Layout(tp=4), 4), FEW_TOKENS),
]  # fmt: skip


class _Idle:
    """In the place of ``memory.Counter``: counts nothing."""

    def begin(self) -> None: ...

    def end(self, phase: str) -> None: ...


def run_pair(pair: Pair, rounds: int) -> list[list[float]]:
    """Seconds of a step of the slowest rank, by round, of either side."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_worker, (pair, rounds, folder), nprocs=pair.one.layout.ranks, start_method="fork")
        by_rank = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(pair.one.layout.ranks)]
    return [[max(of_ranks) for of_ranks in zip(*(times[side] for times in by_rank), strict=True)] for side in (0, 1)]


def _worker(rank: int, pair: Pair, rounds: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    ranks = pair.one.layout.ranks
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    try:
        shape = {**SHAPE, **pair.shape}
        counter: Any = _Idle()
        sides = [memory.Training(way.layout, shape, way.batch, "cpu", counter) for way in (pair.one, pair.other)]
        times: list[list[float]] = [[], []]
        for number in range(1, rounds + 2):
            for side, training in enumerate(sides):
                dist.barrier()
                began = time.perf_counter()
                training.step(number)
                training.train_step.weights.settle()
                if number > 1:
                    times[side].append(time.perf_counter() - began)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(times))
    finally:
        dist.destroy_process_group()


def predict_way(way: Way, shape: dict[str, Any], machine: Any) -> Any:
    """StepTime of one side."""
    from megatron_sp.config.rules import normalize
    from megatron_sp.planner.fake_run import step_time

    return step_time(normalize(memory.config_of(way.layout, shape, way.batch)), machine)


def pairs(rounds: int, which: list[Pair]) -> dict[str, Any]:
    from megatron_sp.config.schema import Config, ModelConfig
    from megatron_sp.planner.calibrate import measure_machine

    rows, kept = [], []
    for pair in which:
        shape = {**SHAPE, **pair.shape}
        machine = measure_machine(pair.one.layout.ranks, Config(model=ModelConfig(**shape)), rounds=rounds)
        measured = [statistics.median(times) for times in run_pair(pair, rounds)]
        predicted = [predict_way(way, shape, machine).seconds for way in (pair.one, pair.other)]
        ratios = [side[1] / side[0] for side in (predicted, measured)]
        agrees = (ratios[0] > 1) == (ratios[1] > 1)
        apart = max(ratios[1], 1 / ratios[1]) >= GAP
        rows.append([
            pair.what, f"{pair.one} | {pair.other}", " | ".join(f"{1e3 * s:.0f}" for s in predicted),
            " | ".join(f"{1e3 * s:.0f}" for s in measured), f"{ratios[0]:.2f}", f"{ratios[1]:.2f}",
            ("yes" if agrees else "NO") + ("" if apart else " (too close)"),
        ])  # fmt: skip
        kept.append({"what": pair.what, "sides": [str(pair.one), str(pair.other)], "predicted_s": predicted, "measured_s": measured,
                     "agrees": agrees, "apart": apart})  # fmt: skip
    agreed = sum(row["agrees"] for row in kept)
    header = ["pair", "layouts", "predicted ms", "measured ms", "second/first, predicted", "measured", "agree"]
    print_table(
        "Which of two is faster",
        header,
        rows,
        [f"{agreed} of {len(kept)} agree; load of the machine {load_average():.1f}"],
    )
    return {"rows": kept, "agreed": agreed, "load": load_average()}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, nargs="+", metavar="N", help="these of the pairs, from 1 (default: all)")
    parser.add_argument("--smoke", action="store_true", help="one layout and one pair of a tiny model")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.pairs and not all(1 <= number <= len(PAIRS) for number in options.pairs):
        parser.error(f"--pairs are numbers from 1 to {len(PAIRS)}")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    import torch

    which = [PAIRS[number - 1] for number in options.pairs] if options.pairs else PAIRS
    layouts = MEASURED
    if options.smoke:
        tiny = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 64}
        which, layouts, options.rounds = [replace(PAIRS[0], shape=tiny)], MEASURED[:1], 1
    results: dict[str, Any] = {}
    makers = {
        "published": published,
        "arithmetic": arithmetic,
        "memory": lambda: peaks(layouts),
        "pairs": lambda: pairs(options.rounds, which),
    }
    for part in PARTS:
        if part in options.parts:
            results[part] = makers[part]()
    write_json(options.json, "plan_check", results, {"torch": str(torch.__version__)})
    return 0


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
