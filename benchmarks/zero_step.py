"""A GPT training step with ZeRO: ours against torch's DDP with ZeroRedundancyOptimizer, FSDP2 and DeepSpeed.

    python benchmarks/zero_step.py [--cells 2:loopback 4:loopback 2:1] [--json docs/benchmarks/zero_step.json]

The same model code on all sides (``GPTModel``; without a main-gradient buffer its gradients go through autograd), the
same weights and tokens, fp32, one micro-batch, torch's fused AdamW with decay on matrices only, no clipping. Ours
computes the norm of the gradients and the loss over all ranks in every step, as a run does; DeepSpeed computes the norm
too. The peers run with overlap and without it where they have a switch, and the better one is what ours is compared
with. A cell RANKS:LINK is a number of processes with one thread each and what joins them: loopback, or Gbit/s between
two "hosts" (two network namespaces with one core each; more than two ranks share the cores).

All contenders live in the same processes and take turns within each round, a few steps each; what ours still has under
way after its last step (at stages 1 and 2 the gather that would run under the next forward) is waited for within its
turn. Figures are medians over rounds of seconds per step, ratios are taken within a round.

    memory     peak live bytes of a contender on rank 0 in its second step (storages counted by a dispatch mode), what it keeps included
    traffic    bytes that rank 0 sends per parameter and step, as the kernel counts them. Ideal in fp32, times (W-1)/W: stage 1 8 (reduce
               scatter and gather, 4 each), stage 3 12 less what is kept from forward to backward; in bf16 half of that, 4 and 6.
    loss       largest relative difference of a step's loss from that of our stage 1, over all steps
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import REPOSITORY, Stats, child_environment, load_average, print_table, ratios, write_json
from hosts import HostsError, join, run_workers

MODEL = {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 512, "vocab_size": 8192}
SMOKE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 128}
SEQUENCES = 4
OURS = {1: "ours, stage 1", 3: "ours, stage 3"}
# by stage, whom ours is compared with, and what it does with its overlap on and off
PEERS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "DDP + ZeRO": ("DDP + ZeRO", "DDP + ZeRO, one bucket"),
        "DeepSpeed": ("DeepSpeed 1", "DeepSpeed 1, overlap_comm"),
    },
    3: {"FSDP2": ("FSDP2", "FSDP2, asynchronous"), "DeepSpeed": ("DeepSpeed 3", "DeepSpeed 3, overlap_comm")},
}
REFERENCES = ("alone", "DDP")
TARGETS = {"DeepSpeed": {"loopback": 0.85, "1": 0.75}, "torch": {"loopback": 0.95, "1": 0.90}}
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.1
MIB = 2**20


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["2:loopback", "4:loopback", "2:1"], metavar="RANKS:LINK")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default: 9)")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="of a contender's turn (default: 3)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders whose names contain one of these")
    parser.add_argument("--references", action="store_true", help="also plain DDP, and a rank's computation alone")
    parser.add_argument(
        "--peer-python",
        default=str(REPOSITORY / ".venv-peers" / "bin" / "python"),
        help="an interpreter with DeepSpeed",
    )
    parser.add_argument("--no-peer", action="store_true", help="without DeepSpeed, in this interpreter")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: does it run at all?")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for cell in options.cells:
        ranks, colon, link = cell.partition(":")
        if (
            not colon
            or not ranks.isdigit()
            or int(ranks) < 2
            or SEQUENCES % int(ranks)
            or not (link == "loopback" or _is_rate(link))
        ):
            parser.error(
                f"--cells {cell}: expected RANKS:LINK with ranks that divide the batch of {SEQUENCES}, like 2:loopback or 2:1"
            )
    return options


def _is_rate(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


# the parent


def main(argv: list[str] | None = None) -> int:
    if argv is None and sys.argv[1:2] == ["--worker"]:
        return worker(json.loads(sys.argv[2]))
    options = parse(argv)
    model = SMOKE if options.smoke else MODEL
    if not options.no_peer and not Path(options.peer_python).exists():
        print(
            f"{options.peer_python} does not exist: run benchmarks/setup_peers.sh deepspeed, or use --no-peer",
            file=sys.stderr,
        )
        return 2
    names = contender_names(options)
    if not names:
        print(f"--only {' '.join(options.only)}: no such contender", file=sys.stderr)
        return 2
    interpreter = sys.executable if options.no_peer else options.peer_python
    environment = child_environment(1) | {"DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    task = {
        "model": model, "names": names, "rounds": options.rounds, "warmup": options.warmup, "steps": options.steps,
        "deepspeed": not options.no_peer,
    }  # fmt: skip
    everything: dict[str, Any] = {
        "model": model,
        "sequences": SEQUENCES,
        "rounds": options.rounds,
        "steps": options.steps,
        "cells": {},
    }
    versions: dict[str, str] = {}
    for cell in options.cells:
        ranks, _, link = cell.partition(":")
        try:
            raw = run_workers(link, str(Path(__file__).resolve()), interpreter, task, environment, int(ranks))
        except (HostsError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 1
        versions = raw.pop("versions")
        results = summarise(raw, link)
        report(cell, raw, results)
        print(f"load average {load_average():.1f}; the benchmark itself makes {ranks}", file=sys.stderr)
        plain = {k: v.as_dict() if isinstance(v, Stats) else v for k, v in results.items()}
        everything["cells"][cell] = {**plain, "raw": raw, "load_average": load_average()}
    write_json(options.json, "zero_step", everything, versions)
    return 0


def contender_names(options: argparse.Namespace) -> list[str]:
    """Who takes part, in the order of the turns: ours next to those that it is compared with."""
    names = list(REFERENCES) if options.references else []
    for stage, peers in PEERS.items():
        names += [OURS[stage], *(name for variants in peers.values() for name in variants)]
    if options.no_peer:
        names = [name for name in names if not name.startswith("DeepSpeed")]
    if options.only:
        names = [name for name in names if any(part.lower() in name.lower() for part in options.only)]
    return names


def summarise(raw: dict[str, Any], link: str) -> dict[str, Any]:
    """Seconds per step of all, and the comparisons: for each stage and peer its faster variant, our ratio to it, and the target."""
    seconds: dict[str, list[float]] = raw["seconds"]
    results: dict[str, Any] = {f"{name}_seconds": Stats.of(values) for name, values in seconds.items()}
    comparisons = []
    for stage, peers in PEERS.items():
        for peer, variants in peers.items():
            there = [name for name in variants if name in seconds]
            if not there or OURS[stage] not in seconds:
                continue
            best = min(there, key=lambda name: results[f"{name}_seconds"].median)
            least = min(raw["memory"][name] for name in there)
            comparisons.append({
                "stage": stage, "peer": best, "ratio": ratios(seconds[OURS[stage]], seconds[best]),
                "target": TARGETS["DeepSpeed" if peer == "DeepSpeed" else "torch"].get(link),
                "memory_ratio": raw["memory"][OURS[stage]] / least, "memory_target": 1.0,
            })  # fmt: skip
    results["comparisons"] = [{**c, "ratio": c["ratio"].as_dict()} for c in comparisons]
    return results


def report(cell: str, raw: dict[str, Any], results: dict[str, Any]) -> None:
    ranks, _, link = cell.partition(":")
    where = "loopback" if link == "loopback" else f"two hosts, {link} Gbit/s"
    rows = []
    for name in raw["seconds"]:
        sent = raw["bytes"][name]
        difference = raw["loss_difference"].get(name)
        rows.append([
            name, results[f"{name}_seconds"].text("s"), f"{raw['memory'][name] / MIB:.1f}",
            "" if sent is None else f"{sent / raw['parameters']:.2f}", "" if difference is None else f"{difference:.0e}",
        ])  # fmt: skip
    w = int(ranks)
    notes = [
        f"{raw['parameters'] / 1e6:.1f}M parameters; ideal traffic {8 * (w - 1) / w:g} at stage 1, {12 * (w - 1) / w:g} at stage 3"
    ]
    notes += [f"left out: {name}: {reason}" for name, reason in raw["left_out"].items()]
    print_table(
        f"GPT training step, {ranks} processes, {where}",
        ["", "step: median (min-max)", "peak memory, MiB", "bytes sent / parameter", "loss"], rows, notes,
    )  # fmt: skip
    lines = [
        [
            f"stage {c['stage']} / {c['peer']}", "{median:.3f} ({min:.3f}-{max:.3f})".format(**c["ratio"]),
            "" if c["target"] is None else f"<= {c['target']:.2f}", f"{c['memory_ratio']:.3f}", f"<= {c['memory_target']:.2f}",
        ]
        for c in results["comparisons"]
    ]  # fmt: skip
    title = f"Ours, of the better variant of each peer, {ranks} processes, {where}"
    if lines:
        print_table(title, ["", "time", "target", "memory", "target"], lines)


# a rank


def worker(task: dict[str, Any]) -> int:
    """Let every contender take its turns; rank 0 prints one line of JSON."""
    import torch
    import torch.distributed as dist

    sys.stdout, out = sys.stderr, sys.stdout  # what libraries print is not the answer
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 has new names for collectives
    join(task)
    versions = {"torch": str(torch.__version__)}
    if task["deepspeed"]:
        os.environ["LOCAL_RANK"] = str(task["rank"])
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, dist_init_required=False)
        versions["deepspeed"] = deepspeed.__version__
    contenders, memory, left_out = build_all(task)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    sent: dict[str, list[int | None]] = {name: [] for name in contenders}
    for index in range(task["warmup"] + task["rounds"]):
        for name, contender in contenders.items():
            turn = take_turn(contender, task["steps"])
            if index >= task["warmup"]:
                seconds[name].append(turn[0])
                sent[name].append(turn[1])
        if task["rank"] == 0:
            print(
                f"{time.strftime('%H:%M:%S')} round {index + 1} of {task['warmup'] + task['rounds']}",
                file=sys.stderr,
                flush=True,
            )
    losses = {name: contender.global_losses() for name, contender in contenders.items()}
    if task["rank"] == 0:
        answer = {
            "seconds": seconds, "bytes": {name: _median(values) for name, values in sent.items()}, "memory": memory, "losses": losses,
            "loss_difference": differences(losses), "parameters": next(iter(contenders.values())).num_parameters, "left_out": left_out,
            "versions": versions,
        }  # fmt: skip
        print(json.dumps(answer), file=out, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def build_all(task: dict[str, Any]) -> tuple[dict[str, Contender], dict[str, int], dict[str, str]]:
    """The contenders, each after its first two steps; their peak memory in the second; who cannot run here, and why."""
    import torch
    import torch.distributed as dist
    from storages import StorageCount

    contenders, memory, left_out = {}, {}, {}
    for name in task["names"]:
        reason = ""
        with StorageCount() as count:  # each from its beginning, without the others
            try:
                contender = make(name, task["model"])
                contender.step()
                contender.finish()
                count.reset_peak()
                contender.step()
                contender.finish()
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                print(f"{name}: {reason}", file=sys.stderr, flush=True)
        failed = torch.tensor(float(bool(reason)))
        dist.all_reduce(failed)
        if failed:
            left_out[name] = reason or "failed on another rank"
        else:
            contenders[name], memory[name] = contender, count.peak
    if not contenders:
        raise RuntimeError(f"no contender runs: {left_out}")
    return contenders, memory, left_out


def take_turn(contender: Contender, steps: int) -> tuple[float, int | None]:
    """(seconds per step, bytes this rank sent per step)."""
    import torch.distributed as dist
    from wire import bytes_sent

    dist.barrier()
    before = bytes_sent()
    began = time.perf_counter()
    for _ in range(steps):
        contender.step()
    contender.finish()
    dist.barrier()
    seconds = (time.perf_counter() - began) / steps
    after = bytes_sent()
    return seconds, None if before is None or after is None else (after - before) // steps


def differences(losses: dict[str, list[float]]) -> dict[str, float]:
    """The largest relative difference of each contender's losses from those of the first of ours, or of the first at all.

    A rank that trains alone sees other tokens' gradients than all together: it is not compared.
    """
    together = {name: found for name, found in losses.items() if name != "alone"}
    like = next((losses[name] for name in OURS.values() if name in losses), next(iter(together.values()), []))
    return {name: max(abs(a / b - 1) for a, b in zip(found, like, strict=True)) for name, found in together.items()}


def _median(values: list[int | None]) -> int | None:
    known = sorted(v for v in values if v is not None)
    return known[len(known) // 2] if known else None


# the contenders


class Contender:
    """A model that trains; step k works on the same tokens in all of them.

    Args:
        model: its shape.
    """

    num_parameters: int

    def __init__(self, model: dict[str, int]) -> None:
        import torch.distributed as dist

        from megatron_sp.config.schema import ModelConfig

        self.shape = model
        self.config = ModelConfig(
            **model, attention_dropout=0.0, hidden_dropout=0.0, untie_embeddings_and_output_weights=True
        )  # type: ignore[arg-type]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.num_steps = 0
        self.losses: list[float] = []

    def step(self) -> None:
        """One step on this rank's sequences of the batch."""
        import torch

        each = SEQUENCES // self.ranks
        generator = torch.Generator().manual_seed(self.num_steps)
        tokens = torch.randint(self.shape["vocab_size"], (SEQUENCES, self.shape["seq_length"] + 1), generator=generator)
        mine = tokens[self.rank * each : (self.rank + 1) * each]
        self.num_steps += 1
        self.losses.append(self.train(mine[:, :-1].contiguous(), mine[:, 1:].contiguous()))

    def train(self, tokens: Any, labels: Any) -> float:
        """Forward, backward, update; returns the loss per token, of this rank or of all (``global_losses`` knows)."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for what the last step left under way."""

    def global_losses(self) -> list[float]:
        """Of all steps so far, over all ranks."""
        import torch
        import torch.distributed as dist

        found = torch.tensor(self.losses, dtype=torch.float64)
        dist.all_reduce(found)
        return [float(v) / self.ranks for v in found]


class Ours(Contender):
    """Our training step; ``stage`` None: this rank alone, without any communication."""

    def __init__(self, model: dict[str, int], stage: int | None) -> None:
        super().__init__(model)
        import torch

        from megatron_sp.comm.groups import SINGLE_RANK, ParallelGroups
        from megatron_sp.config.schema import Config, OptimizerConfig, ParallelConfig
        from megatron_sp.models.gpt import GPTModel
        from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler
        from megatron_sp.parallel.parallel_context import ParallelContext
        from megatron_sp.training.sharding import build_sharded
        from megatron_sp.training.step import Loss, StepOptions, StepParts, TrainStep

        device = torch.device("cpu")
        settings = OptimizerConfig(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, clip_grad=0.0)
        config = Config(model=self.config, parallel=ParallelConfig(zero_stage=stage or 0), optimizer=settings)
        groups = ParallelGroups.create(device)
        if stage is None:
            groups = replace(
                groups, dp=SINGLE_RANK, cp=SINGLE_RANK, sp=SINGLE_RANK, tp=SINGLE_RANK, dp_cp_sp=SINGLE_RANK, world=SINGLE_RANK,
                control=SINGLE_RANK,
            )  # fmt: skip

        def build(config: Config, layout: ParallelContext, on_unit: Any) -> Any:
            return GPTModel(config.model, config.kernels, seed=1, dtype=torch.float32, layout=layout, on_unit=on_unit)

        sharded = build_sharded(build, config, ParallelContext(), groups, device)
        self.weights = sharded.weights
        self.num_parameters = sum(slot.shape.numel() for unit in sharded.units for slot in unit.slots)

        def sums(model: Any, batch: Any, context: Any, events: Any) -> list[Any]:
            return [model(batch["tokens"], batch["labels"], batch["loss_mask"], context, events)[0]]

        self.train_step = TrainStep(
            StepParts(
                sharded.model, sharded.weights, sharded.gradients, FlatOptimizer(sharded.units, settings, everybody=groups.world),
                LossScaler(enabled=False, fixed=None, initial=1.0, minimum=1.0, window=1, hysteresis=1),
            ),
            Loss(("lm loss",), lambda batch: [batch["loss_mask"].sum()], sums), groups, StepOptions(seed=1, drops=False, kernel="sdpa"),
        )  # fmt: skip

    def train(self, tokens: Any, labels: Any) -> float:
        import torch

        batch = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": torch.ones(tokens.shape),
            "sample_ids": torch.arange(len(tokens)),
        }
        return self.train_step.run([batch], self.num_steps, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY).losses[0]

    def finish(self) -> None:
        self.weights.settle()


class Peer(Contender):
    """The same model whose gradients go through autograd, wrapped by a peer in ``wrap``."""

    model: Any
    optimizer: Any

    def __init__(self, model: dict[str, int]) -> None:
        super().__init__(model)
        import torch

        from megatron_sp.config.schema import KernelConfig
        from megatron_sp.models.gpt import GPTModel
        from megatron_sp.ops.attention import AttentionMask
        from megatron_sp.parallel.forward_context import ForwardContext

        plain = GPTModel(self.config, KernelConfig(), seed=1, dtype=torch.float32)
        self.num_parameters = sum(p.numel() for p in plain.parameters())
        self.ctx = ForwardContext(AttentionMask(), kernel="sdpa")
        self.wrap(plain)

    def wrap(self, plain: Any) -> None:
        raise NotImplementedError

    def loss(self, tokens: Any, labels: Any) -> Any:
        import torch

        return self.model(tokens, labels, torch.ones(tokens.shape), self.ctx)[0] / tokens.numel()

    def train(self, tokens: Any, labels: Any) -> float:
        loss = self.loss(tokens, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def param_groups(model: Any) -> list[dict[str, Any]]:
    """Matrices with weight decay, all others without: as ours does it."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(param_groups(model), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, fused=True)


class DDP(Peer):
    """DistributedDataParallel with all of the optimizer on every rank, or ZeroRedundancyOptimizer.

    Its way to run the update under backward (``overlap_with_ddp``) refuses gloo. One bucket of everything: no overlap.
    """

    zero, bucket_mb = False, 25

    def wrap(self, plain: Any) -> None:
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        if self.zero:
            self.optimizer = ZeroRedundancyOptimizer(
                param_groups(plain), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8,
                fused=True,
            )  # fmt: skip
        else:
            self.optimizer = adamw(plain)
        self.model = DistributedDataParallel(plain, gradient_as_bucket_view=True, bucket_cap_mb=self.bucket_mb)


class DDPZero(DDP):
    zero = True


class DDPZeroOneBucket(DDP):
    zero, bucket_mb = True, 1 << 20


class FSDP2(Peer):
    """``fully_shard`` of each block and of the rest. Asynchronous: the next block's gather is started before this block computes."""

    asynchronous = False

    def wrap(self, plain: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self.ranks,))
        blocks: list[Any] = list(plain.decoder.layers)
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(plain, mesh=mesh)
        if self.asynchronous:
            plain._set_unshard_async_op(True)
            plain.set_modules_to_forward_prefetch(blocks[:1])
            for block, following in pairwise(blocks):
                block.set_modules_to_forward_prefetch([following])
                following.set_modules_to_backward_prefetch([block])
        self.model, self.optimizer = plain, adamw(plain)


class FSDP2Asynchronous(FSDP2):
    asynchronous = True


class DeepSpeed(Peer):
    """DeepSpeed's engine with torch's optimizer. At stage 3 a block is fetched at once, as ours and FSDP2's.

    Its default bucket, 2 GB, would be all of its memory here and would never be full before backward ends.
    """

    stage, overlap, bucket = 1, False, 5_000_000

    def wrap(self, plain: Any) -> None:
        import deepspeed

        from megatron_sp.models.transformer import TransformerBlock

        if self.stage == 3:
            # the blocks hand their parameters to functions instead of calling the layers that hold them
            deepspeed.utils.set_z3_leaf_modules(plain, [TransformerBlock])
        self.model, *_ = deepspeed.initialize(
            model=plain, optimizer=adamw(plain), dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": SEQUENCES // self.ranks, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
                "steps_per_print": 10**9,
                "zero_optimization": {
                    "stage": self.stage, "overlap_comm": self.overlap, "reduce_bucket_size": self.bucket,
                    "allgather_bucket_size": self.bucket, "stage3_prefetch_bucket_size": self.bucket,
                },
            },
        )  # fmt: skip

    def train(self, tokens: Any, labels: Any) -> float:
        loss = self.loss(tokens, labels)
        self.model.backward(loss)
        self.model.step()
        return float(loss.detach())


class DeepSpeedOverlap(DeepSpeed):
    overlap = True


class DeepSpeed3(DeepSpeed):
    stage = 3


class DeepSpeed3Overlap(DeepSpeed):
    stage, overlap = 3, True


KINDS: dict[str, Callable[[dict[str, int]], Contender]] = {
    "alone": lambda model: Ours(model, None),
    "DDP": DDP,
    OURS[1]: lambda model: Ours(model, 1),
    OURS[3]: lambda model: Ours(model, 3),
    "DDP + ZeRO": DDPZero,
    "DDP + ZeRO, one bucket": DDPZeroOneBucket,
    "FSDP2": FSDP2,
    "FSDP2, asynchronous": FSDP2Asynchronous,
    "DeepSpeed 1": DeepSpeed,
    "DeepSpeed 1, overlap_comm": DeepSpeedOverlap,
    "DeepSpeed 3": DeepSpeed3,
    "DeepSpeed 3, overlap_comm": DeepSpeed3Overlap,
}


def make(name: str, model: dict[str, int]) -> Contender:
    return KINDS[name](model)


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
