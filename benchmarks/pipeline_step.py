"""A training step through a pipeline: ours in every schedule against torch.distributed.pipelining.

    python benchmarks/pipeline_step.py [--cells 2:loopback 2:1 4:sleep] [--micro-batches 4 8] [--json docs/benchmarks/pipeline_step.json]
    python benchmarks/pipeline_step.py --cells 2:loopback --tokens 8192 --layers 2 --micro-batches 2 --only 1F1B 1f1b slices --rounds 3

Two ranks compute, one core each: four blocks of a GPT (hidden size 512, 8 heads, 512 tokens, one sequence in a
micro-batch), fp32, from random activations to the mean square of the last output; embedding and head would favour
whoever computes them faster. torch runs plain modules of the same mathematics (nn.Linear, SDPA, LayerNorm): its zero
bubble splits gradients on the autograd graph, which custom autograd functions like those of our blocks do not allow.
The update is not part of a step.

With ``--tokens 8192`` attention is half of the time of a block, which is what slices are for: cut by their FLOPs they take about as long
as each other, and the first rank holds the activations of little more than one sequence.

Four ranks cannot compute side by side on two cores: in a cell 4:sleep each action sleeps for a fixed time, and only the
runtime is real.

    / torch    median ratio to the schedule of torch named in ``LIKE``, within a round
    / replay   the median step, of what ``replay`` says for the medians of the run's own action times: a step in which ranks wait
               for nothing but what they need
    floor      the replay with the mean times of F, B and W (without a split of the whole backward pass) for all actions
    host       processor time of the thread that runs a step whose work and messages are a single number each, of rank 0, per
               micro-batch (or slice) and stage: a pass forward and a pass backward
    peak       largest bytes of live storages of a rank in a step, what the contender keeps included
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import Stats, child_environment, load_average, print_table, ratios, write_json
from hosts import HostsError, join, run_workers

SHAPE = {"hidden": 512, "heads": 8, "tokens": 512, "batch": 1, "layers": 4}
SMOKE = {"hidden": 32, "heads": 2, "tokens": 16, "batch": 2, "layers": 4}
OURS = {"1f1b": 1, "interleaved": 2, "zb1p": 1, "zb1p, 2 stages": 2, "zbv": 2, "slices, 4": 1}
TORCH = ("torch 1F1B", "torch interleaved", "torch interleaved zero bubble")
SLEEP = {"F": 0.043, "B": 0.052, "W": 0.034}  # seconds of half of a rank's blocks
LIKE = {
    "1f1b": "torch 1F1B", "interleaved": "torch interleaved", "zb1p": "torch 1F1B", "zb1p, 2 stages": "torch interleaved zero bubble",
    "zbv": "torch interleaved zero bubble", "slices, 4": "torch 1F1B",
}  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["2:loopback", "2:1", "4:sleep"], metavar="RANKS:LINK")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, help="of a sequence")
    parser.add_argument("--layers", type=int, help="of all ranks")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders whose names contain one of these")
    parser.add_argument("--smoke", action="store_true", help="tiny blocks: does it run at all?")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    if argv is None and sys.argv[1:2] == ["--worker"]:
        return worker(json.loads(sys.argv[2]))
    options = parse(argv)
    given = {name: getattr(options, name) for name in ("tokens", "layers") if getattr(options, name) is not None}
    shape = (SMOKE if options.smoke else SHAPE) | given
    everything: dict[str, Any] = {"shape": shape, "rounds": options.rounds, "cells": {}}
    versions: dict[str, str] = {}
    for cell in options.cells:
        ranks, _, link = cell.partition(":")
        names = [f"ours, {name}" for name in OURS] + (list(TORCH) if link != "sleep" else [])
        names = [name for name in names if not options.only or any(part in name for part in options.only)]
        # a stage has a block at least
        names = [
            name for name in names if link == "sleep" or shape["layers"] % (int(ranks) * _stages_per_rank(name)) == 0
        ]
        for count in options.micro_batches:
            task = {
                "shape": shape,
                "names": names,
                "rounds": options.rounds,
                "micro_batches": count,
                "sleeps": link == "sleep",
            }
            try:
                where = "loopback" if link == "sleep" else link
                raw = run_workers(
                    where, str(Path(__file__).resolve()), sys.executable, task, child_environment(1), int(ranks)
                )
            except (HostsError, RuntimeError) as error:
                print(error, file=sys.stderr)
                return 1
            versions = raw.pop("versions")
            everything["cells"][f"{cell}, {count} micro-batches"] = report(cell, count, raw) | {
                "load_average": load_average()
            }
    write_json(options.json, "pipeline_step", everything, versions)
    return 0


def _stages_per_rank(name: str) -> int:
    return OURS[name.removeprefix("ours, ")] if name.startswith("ours") else 1 if "1F1B" in name else 2


def report(cell: str, count: int, raw: dict[str, Any]) -> dict[str, Any]:
    """Print the table of a cell; return its figures."""
    rows, found = [], dict[str, Any]()
    for name, seconds in raw["seconds"].items():
        steps, more = Stats.of(seconds), raw["about"].get(name, {})
        like = LIKE.get(name.removeprefix("ours, "))
        ratio = ratios(seconds, raw["seconds"][like]).median if like in raw["seconds"] else None
        row: dict[str, Any] = {"seconds": steps.as_dict(), "of_torch": ratio, **more}
        if "replay" in more:
            row["of_replay"] = steps.median / more["replay"]
        if name in raw["memory"]:
            row["peak_bytes"] = raw["memory"][name]
        found[name] = row
        rows.append([
            name, steps.text("ms", 1e3, 0), "" if ratio is None else f"{ratio:.3f}", f"{row['of_replay']:.3f}" if "replay" in more else "",
            f"{more['floor'] * 1e3:.0f}" if "floor" in more else "", f"{more['host_s'] * 1e6:.0f}" if more else "",
            f"{more['in_flight']}" if "in_flight" in more else "", f"{raw['memory'][name] / 2**20:.0f}" if name in raw["memory"] else "",
        ])  # fmt: skip
    notes = [f"left out: {name}: {reason}" for name, reason in raw["left_out"].items()]
    header = [
        "",
        "step: median (min-max)",
        "/ torch",
        "/ replay",
        "floor, ms",
        "host, us / part",
        "in flight",
        "peak, MiB",
    ]
    print_table(f"A step through {cell}, {count} micro-batches", header, rows, notes)
    return found


# a rank


def worker(task: dict[str, Any]) -> int:
    """Let every contender take its turns; rank 0 prints one line of JSON."""
    import torch
    import torch.distributed as dist

    sys.stdout, out = sys.stderr, sys.stdout
    join(task)
    contenders: dict[str, Any] = {}
    left_out, memory = dict[str, str](), dict[str, int]()
    for name in task["names"]:
        reason, made = "", None
        try:
            made = Ours(name.removeprefix("ours, "), task) if name.startswith("ours") else Torch(name, task)
            made.step()
            if not task["sleeps"]:
                memory[name] = peak_of(made)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            print(f"{name}: {reason}", file=sys.stderr, flush=True)
        failed = torch.tensor(float(bool(reason)))
        dist.all_reduce(failed)
        if failed:
            left_out[name] = reason or "failed on another rank"
        else:
            contenders[name] = made
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(1 + task["rounds"]):
        for name, contender in contenders.items():
            dist.barrier()
            began = time.perf_counter()
            contender.step()
            dist.barrier()
            if index:
                seconds[name].append(time.perf_counter() - began)
    about = {name: contender.about() for name, contender in contenders.items()}
    largest = {name: torch.tensor(float(size)) for name, size in memory.items() if name in contenders}
    for size in largest.values():
        dist.all_reduce(size, dist.ReduceOp.MAX)
    if task["rank"] == 0:
        answer = {
            "seconds": seconds, "about": about, "left_out": left_out, "memory": {name: int(size) for name, size in largest.items()},
            "versions": {"torch": str(torch.__version__)},
        }  # fmt: skip
        print(json.dumps(answer), file=out, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def peak_of(contender: Any) -> int:
    """Largest bytes of live storages during a step, what the contender keeps included."""
    from storages import StorageCount

    with StorageCount() as count:
        contender.step()
        count.reset_peak()
        contender.step()
    return int(count.peak)


def inputs(task: dict[str, Any]) -> list[Any]:
    """Activations of each micro-batch, [tokens, batch, hidden]."""
    import torch

    shape, generator = task["shape"], torch.Generator().manual_seed(1)
    size = (shape["tokens"], shape["batch"], shape["hidden"])
    return [torch.randn(size, generator=generator) for _ in range(task["micro_batches"])]


class Ours:
    """Our runtime, with our blocks or with actions that sleep (implements ``pipeline.StageWork``)."""

    def __init__(self, name: str, task: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        from megatron_sp.comm.groups import ParallelGroups, pipes
        from megatron_sp.parallel.pipeline import Channels
        from megatron_sp.parallel.pipeline_orders import plan_pipeline
        from megatron_sp.parallel.pipeline_plan import Costs

        self.task, self.rank, p, v = task, dist.get_rank(), dist.get_world_size(), OURS[name]
        kind: Any = name.partition(",")[0]
        num_slices = int(name.rpartition(" ")[2]) if kind == "slices" else 1
        self.plan = plan_pipeline(kind, p, v, task["micro_batches"], num_slices, Costs(86, 105, 68))
        groups = ParallelGroups.create(torch.device("cpu"), pp_size=p)
        of = self.plan.rank_of
        pairs = {pair for a, b in pairwise(of) if a != b for pair in ((a, b), (b, a))}
        self.channels = Channels(pipes(groups.mesh, pairs, groups.device), groups.pp_ranks, self.rank)
        self.inputs = inputs(task)
        self.slices = Slices(task, num_slices)
        self.times: dict[Any, list[float]] = defaultdict(list)
        if not task["sleeps"]:
            self._build(self.plan.stages_of(self.rank), self.plan.num_stages)

    def _build(self, stages: tuple[int, ...], num_stages: int) -> None:
        from megatron_sp.comm.groups import SINGLE_RANK
        from megatron_sp.optim.flat import FlatUnit
        from megatron_sp.optim.gradients import FlatGradients
        from megatron_sp.parallel.layers import attach_main_grad

        each = self.task["shape"]["layers"] // num_stages
        self.blocks = {
            stage: [our_block(self.task, layer, self.slices) for layer in range(stage * each, (stage + 1) * each)]
            for stage in stages
        }
        units, self.units = [], {}
        for stage, blocks in self.blocks.items():
            self.units[stage] = list(range(len(units), len(units) + len(blocks)))
            units += [FlatUnit(f"{stage}.{i}", block.named_parameters()) for i, block in enumerate(blocks)]
        self.gradients = FlatGradients(units, SINGLE_RANK)
        for blocks in self.blocks.values():
            for block in blocks:
                attach_main_grad(block, self.gradients)

    def step(self) -> None:
        from megatron_sp.parallel.pipeline import Timeline, run_pipeline

        timeline = Timeline()
        self.slices.start_step()
        if not self.task["sleeps"]:
            self.gradients.start_step()
        run_pipeline(self.plan, self.channels, self, timeline)
        for action, start, stop in timeline.spans:
            self.times[action].append(stop - start)

    def about(self) -> dict[str, Any]:
        """Replay with all ranks' own times, floor, host time. Collective."""
        import torch.distributed as dist

        from megatron_sp.comm.object_collectives import gather_json
        from megatron_sp.parallel.pipeline_plan import replay

        mine = [[*action, median(times[1:] or times)] for action, times in self.times.items()]
        everybody = gather_json(mine, dist.group.WORLD)
        seconds = {tuple(row[:4]): row[4] for rows in everybody for row in rows}
        kinds: dict[str, list[float]] = defaultdict(list)
        for action, value in seconds.items():
            kinds[action[0]].append(value)
        mean = {kind: sum(values) / len(values) for kind, values in kinds.items()}
        if not self.plan.splits:  # one backward pass: W's part of it is not known
            mean["W"] = 0.0
        return {
            "replay": replay(self.plan, lambda action: seconds[tuple(action)]).time,
            "floor": replay(self.plan, lambda action: mean[action.kind]).time, "mean_s": mean,
            "bubble": replay(self.plan, lambda action: mean[action.kind]).bubble, "in_flight": self.plan.in_flight(0),
            "host_s": self._host_seconds(),
        }  # fmt: skip

    def _host_seconds(self) -> float:
        """Time of the runtime itself for each part of a stage, from a step whose work is nothing."""
        from megatron_sp.parallel.pipeline import run_pipeline

        idle = _Nothing()
        return idle_seconds(
            lambda: run_pipeline(self.plan, self.channels, idle), len(self.plan.actions[self.rank]) // 3
        )

    # StageWork

    def shape(self, action: Any) -> Any:
        x = self.slices.part(self.inputs[action.micro_batch], action)
        return tuple(x.shape), x.dtype, x.device

    def forward(self, action: Any, x: Any) -> Any:
        if self.task["sleeps"]:
            return self._asleep(action, x)
        y = self.slices.part(self.inputs[action.micro_batch], action) if x is None else x
        context = self.slices.context(action)
        for block in self.blocks[action.stage]:
            y = block(y, context)
        return y

    def loss(self, action: Any, y: Any) -> Any:
        return y.square().sum() / self.inputs[action.micro_batch].numel()

    def _asleep(self, action: Any, x: Any) -> Any:
        import torch

        self._sleep("F")
        return torch.zeros(self.shape(action)[0]).requires_grad_() if x is None else x * 1.0

    def _sleep(self, kind: str) -> None:
        time.sleep(SLEEP[kind] * 2 / (self.plan.num_stages // self.plan.num_ranks) / self.plan.num_slices)

    def before_backward(self, action: Any, put_off: Any) -> None:
        if self.task["sleeps"]:
            self._sleep("B")
            if put_off is None:  # one backward pass
                self._sleep("W")
            return
        if put_off is None and action.micro_batch == self.plan.num_micro_batches - 1:
            self.gradients.last_micro_batch(self.units[action.stage])
        self.gradients.more_follows = action.slice > 0
        self.gradients.put_off(put_off, self.units[action.stage])

    def after_backward(self, action: Any) -> None:
        if not self.task["sleeps"]:
            self.gradients.put_off(None)

    def weights(self, action: Any) -> None:
        if not self.plan.splits:
            return
        if self.task["sleeps"]:
            self._sleep("W")
        else:
            self.gradients.catch_up(action)


class _Nothing:
    """Work that takes no time."""

    def __init__(self) -> None:
        import torch

        self._scale = torch.ones((), requires_grad=True)

    def shape(self, action: Any) -> Any:
        import torch

        return (1,), torch.float32, torch.device("cpu")

    def forward(self, action: Any, x: Any) -> Any:
        import torch

        return (torch.ones(1) if x is None else x) * self._scale

    def loss(self, action: Any, y: Any) -> Any:
        return y.sum()

    def before_backward(self, action: Any, put_off: Any) -> None:
        pass

    def after_backward(self, action: Any) -> None:
        pass

    def weights(self, action: Any) -> None:
        pass


def idle_seconds(step: Any, parts: int) -> float:
    """Median processor time of the thread that runs a step in which nothing is to be done, for each of so many parts."""
    took = list[float]()
    for _ in range(30):
        began = time.thread_time()  # without the waits for the other rank
        step()
        took.append((time.thread_time() - began) / parts)
    return median(took[10:])


def our_config(task: dict[str, Any]) -> Any:
    from megatron_sp.config.schema import ModelConfig

    shape = task["shape"]
    return ModelConfig(
        num_layers=shape["layers"], hidden_size=shape["hidden"], num_attention_heads=shape["heads"], seq_length=shape["tokens"],
        vocab_size=128, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip


def our_block(task: dict[str, Any], layer: int, slices: Slices) -> Any:
    import torch

    from megatron_sp.models.transformer import TransformerBlock

    return TransformerBlock(our_config(task), layer, f"decoder.layers.{layer}", 1, torch.float32, slices.layout)


class Slices:
    """Slices of the sequences, if there are several, with the keys that they leave for those to come."""

    def __init__(self, task: dict[str, Any], count: int) -> None:
        from megatron_sp.estimate.flops import pairs_per_position
        from megatron_sp.parallel.parallel_context import ParallelContext
        from megatron_sp.parallel.row_mask import RowMask
        from megatron_sp.parallel.sequence_slices import cut_into_slices

        self.layout = ParallelContext(num_slices=count)
        self._tokens, self._mask = task["shape"]["tokens"], RowMask(task["shape"]["tokens"])
        self._runs = cut_into_slices(self._mask, count, pairs_per_position(our_config(task)))
        self._keys: dict[int, Any] = {}

    def start_step(self) -> None:
        """Nothing is left of the last one."""
        self._keys.clear()

    def part(self, x: Any, action: Any) -> Any:
        """The rows of a slice."""
        start, stop = self._runs[action.slice]
        return x[start:stop]

    def context(self, action: Any) -> Any:
        """What a block needs to know."""
        from megatron_sp.ops.attention import AttentionMask
        from megatron_sp.parallel.context_plan import plan_context
        from megatron_sp.parallel.forward_context import ForwardContext
        from megatron_sp.parallel.sequence_slices import KeysOfSlices, RowSlice

        if len(self._runs) == 1:
            return ForwardContext(AttentionMask(), length=self._tokens, whole_length=self._tokens)
        which = RowSlice(action.slice, self._runs, self._keys.setdefault(action.micro_batch, KeysOfSlices()))
        cut = self.layout.cut(self._mask, which)
        plan = plan_context(self._mask, cut.shares, cut.keys)
        return ForwardContext(AttentionMask(), length=cut.length, whole_length=self._tokens, plan=plan, row_slice=which)


def plain_block(task: dict[str, Any]) -> Any:
    """The same mathematics in torch's own modules."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    h, heads = task["shape"]["hidden"], task["shape"]["heads"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
            self.qkv, self.proj, self.fc1, self.fc2 = (
                nn.Linear(h, 3 * h),
                nn.Linear(h, h),
                nn.Linear(h, 4 * h),
                nn.Linear(4 * h, h),
            )

        def forward(self, x: Any) -> Any:
            b, s, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, heads, h // heads).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(out.transpose(1, 2).reshape(b, s, h))
            return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))

    torch.manual_seed(1)
    return Block()


class Torch:
    """torch.distributed.pipelining."""

    def __init__(self, name: str, task: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn

        self.rank, self.p, self.m = dist.get_rank(), dist.get_world_size(), task["micro_batches"]
        self.name, self.v = name, 1 if "1F1B" in name else 2
        each = task["shape"]["layers"] // (self.p * self.v)
        self.modules = [nn.Sequential(*(plain_block(task) for _ in range(each))) for _ in range(self.v)]
        self.schedule = self._schedule(self.modules)
        self.x = torch.cat([x.transpose(0, 1) for x in inputs(task)])

    def _schedule(self, modules: list[Any]) -> Any:
        import torch
        from torch.distributed import pipelining
        from torch.distributed.pipelining import PipelineStage

        stages = [
            PipelineStage(one, chunk * self.p + self.rank, self.p * self.v, torch.device("cpu"))
            for chunk, one in enumerate(modules)
        ]

        def loss(y: Any, target: Any) -> Any:
            return y.square().mean()

        kinds = {
            "torch 1F1B": "Schedule1F1B", "torch interleaved": "ScheduleInterleaved1F1B",
            "torch interleaved zero bubble": "ScheduleInterleavedZeroBubble",
        }  # fmt: skip
        schedule = getattr(pipelining, kinds[self.name], None) or getattr(pipelining.schedules, kinds[self.name])
        return schedule(stages[0] if self.v == 1 else stages, n_microbatches=self.m, loss_fn=loss)

    def step(self) -> None:
        for module in self.modules:
            module.zero_grad()
        self._run(self.schedule, self.x)

    def _run(self, schedule: Any, x: Any) -> None:
        losses = list[Any]()
        if self.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=losses)

    def about(self) -> dict[str, Any]:
        """Host time. Collective."""
        import torch
        from torch import nn

        class Nothing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(()))

            def forward(self, x: Any) -> Any:
                return x * self.scale

        idle, x = self._schedule([Nothing() for _ in range(self.v)]), torch.ones(self.m, 1)
        return {"host_s": idle_seconds(lambda: self._run(idle, x), self.m * self.v)}


if __name__ == "__main__":
    sys.exit(main())
