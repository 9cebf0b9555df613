"""How long a save stops training, and what it takes from the steps beside it: saves that are waited for, and saves in the background.

    python benchmarks/save_stall.py [--dir FOLDER] [--json docs/benchmarks/save_stall.json]     124M, some 12 minutes on a quiet machine
    python benchmarks/save_stall.py --sizes 124M 1.3B --rounds 5                                the longer one

Real steps are taken (forward, backward, AdamW on flat buffers, fp32), in turns of a few: without a save, with saves
that are waited for, with saves in the background, one as soon as the one before has ended. Each round has one turn of
each, and what is compared comes from the same round. On one thread of two cores a core is free for the save; on two
both compute.

    stall       for which training stands still for one save: all of it, or the check for nan and the copy alone
    added       what one save adds to a turn, stall included; the quotient of the two kinds is the last column
    slow-down   of the steps while a save is under way: what a turn takes beyond stalls and the turn without a save, over the time in
                which saves were under way (a step of 256 tokens is 15 % update, which memory bounds; more tokens, less of it)

The second table is a save taken apart, on one and on two ranks: the time spent in hashlib updates and in os.fsync (rank
0's, added up over the threads that write files at the same time, so the two may exceed the whole), and beside it a
plain copy of the same bytes to the same disk with one fsync. 1.3B is cut to as many layers as fit into memory twice.
Bars: a stall of at most 0.1 s per GB, a slow-down of at most 3 % where a core is free, added at most 0.85 of what a
save adds that is waited for where none is.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from child import Child, ChildError, serve
from common import REPOSITORY, Stats, child_environment, load_average, print_table, write_json

GIB = 2**30
BARS = {"stall_s_per_gb": 0.1, "slow_down": 0.03, "added": 0.85}
SIZES = {
    "1.3B": {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 1024, "vocab_size": 50304},
    "5M": {"num_layers": 6, "hidden_size": 192, "num_attention_heads": 6, "seq_length": 256, "vocab_size": 8192},
    "124M": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024, "vocab_size": 50304},
    "smoke": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 128},
}


class Clock:
    """Adds up the time spent in a function that it stands in for, over all threads."""

    def __init__(self, function: Any) -> None:
        self.function, self.seconds = function, 0.0
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - start


class TimedHash:
    """A SHA-256 whose updates are timed."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    def update(self, data: Any) -> None:
        self._clock(self._inner.update, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def shape_of(size: str) -> dict[str, int]:
    """A model; of the large one as many layers as fit with gradients and a copy of all that is saved (28 bytes a parameter)."""
    shape = dict(SIZES[size])
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    h = shape["hidden_size"]
    room = 0.75 * pages / 28 - (shape["vocab_size"] + shape["seq_length"]) * h
    return {**shape, "num_layers": max(1, min(shape["num_layers"], int(room / (12 * h * h))))}


class Saver:
    """A rank that holds a model with optimizer state; the actions of the measured process."""

    def build(self, size: str, rank: int, world_size: int, port: int, threads: int) -> dict[str, Any]:
        from datetime import timedelta

        import torch

        from megatron_sp.comm.groups import ParallelGroups, init_process_group
        from megatron_sp.config.schema import KernelConfig, ModelConfig, OptimizerConfig
        from megatron_sp.models.gpt import GPTModel
        from megatron_sp.optim.flat import FlatUnit
        from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler
        from megatron_sp.training.train_state import TrainState
        from megatron_sp.utils.launch import Launch

        torch.set_num_threads(threads)
        launch = Launch(rank, rank, world_size, world_size, 0, ("127.0.0.1", port))
        init_process_group(launch, torch.device("cpu"), "gloo", timedelta(minutes=5))
        self.rank, self.world_size, self.groups = rank, world_size, ParallelGroups.create(torch.device("cpu"))
        shape = shape_of(size)
        model = GPTModel(ModelConfig(**shape), KernelConfig(), seed=1, dtype=torch.float32)  # type: ignore[arg-type]
        names = {id(p): n for n, p in model.named_parameters()}
        units = [FlatUnit(u.name, [(names[id(p)], p) for p in u.module.parameters()]) for u in model.units()]
        optimizer = FlatOptimizer(units, OptimizerConfig(lr=1e-4))
        scaler = LossScaler(enabled=False, fixed=None, initial=1.0, minimum=1.0, window=1, hysteresis=1)
        state = TrainState(model, units, optimizer, scaler)
        self.tensors = {**state.weights(), **state.optimizer_tensors()}
        self.model, self.units, self.optimizer, self.shape = model, units, optimizer, shape
        return {
            "bytes": sum(t.pieces[0].tensor.nbytes for t in self.tensors.values()), "layers": shape["num_layers"],
            "versions": {"torch": torch.__version__},
        }  # fmt: skip

    def prepare_steps(self, tokens: int) -> dict[str, Any]:
        """Make ready for ``turn``: gradients, a batch, the memory for copies; take two steps."""
        import torch

        from megatron_sp.optim.gradients import FlatGradients
        from megatron_sp.optim.weights import UnitWork, WholeWeights
        from megatron_sp.parallel.layers import attach_main_grad

        self.gradients = FlatGradients(self.units, self.groups.dp_cp_sp)
        self.events = UnitWork(WholeWeights(self.units), self.gradients)
        attach_main_grad(self.model, self.gradients)
        length = min(tokens, self.shape["seq_length"])
        self.batch = torch.randint(self.shape["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))
        began = time.perf_counter()
        for _ in range(2):
            self._step()
        return {"step_seconds": (time.perf_counter() - began) / 2}

    def _step(self) -> None:
        import torch

        from megatron_sp.ops.attention import AttentionMask
        from megatron_sp.ops.attention_choice import choose_kernel
        from megatron_sp.parallel.forward_context import ForwardContext

        kernel = choose_kernel("auto", "cpu", torch.float32, 0.0).name
        self.gradients.start_step()
        self.gradients.last_micro_batch()
        context = ForwardContext(AttentionMask(causal=True), kernel=kernel, dropout=None)
        loss, _ = self.model(self.batch, self.batch.roll(-1, 1), torch.ones(self.batch.shape), context, self.events)
        (loss / self.batch.numel()).backward()
        self.gradients.finish_step()
        self.optimizer.step(1e-5, 0.1, self.optimizer.grad_norm().item())

    def turn(self, kind: str, steps: int, folder: str) -> dict[str, Any]:
        """Take some steps; with saves, if ``kind`` says so: "waited" two of them, "background" as many as fit."""
        from megatron_sp.checkpoint.background import BackgroundSaves
        from megatron_sp.checkpoint.checkpointer import Checkpointer

        checkpointer, background = Checkpointer(folder), None
        checkpointer.prepare()
        if kind == "background":
            background = BackgroundSaves(checkpointer)
            if problem := background.reserve(self.tensors):
                raise RuntimeError(problem)
        stalls: list[float] = []
        written: list[float] = []
        lengths: list[float] = []
        began = time.perf_counter()
        for index in range(steps):
            if kind == "waited" and index in (steps // 3, 2 * steps // 3):
                start = time.perf_counter()
                self._require_finite()
                if not (report := checkpointer.save(index + 1, self.tensors, {})).saved:
                    raise RuntimeError(report.reason)
                stalls.append(time.perf_counter() - start)
            if background is not None and not background.in_flight:
                left = (steps - index) * (sum(lengths) / len(lengths)) if lengths else math.inf
                if left > 1.1 * (written[-1] if written else 0):  # it ends within the turn
                    start = time.perf_counter()
                    self._require_finite()
                    background.start(index + 1, self.tensors, {})
                    stalls.append(time.perf_counter() - start)
            start = time.perf_counter()
            self._step()
            lengths.append(time.perf_counter() - start)
            if background is not None and (report := background.poll()) is not None:
                written.append(report.seconds)
        seconds = time.perf_counter() - began
        if background is not None and (report := background.wait()) is not None:
            written.append(report.seconds)
        return {
            "seconds": seconds,
            "stalls": stalls,
            "written": written,
            "in_flight": min(sum(written), seconds),
            "steps": lengths,
        }

    def _require_finite(self) -> None:
        """As training does before each save."""
        from megatron_sp.training.nan_checks import require_finite_weights

        require_finite_weights((unit.master for unit in self.units), self.groups, 1)

    def save(self, folder: str) -> dict[str, Any]:
        """Save into a new run folder and take it away again."""
        from megatron_sp.checkpoint.checkpointer import Checkpointer

        checkpointer = Checkpointer(folder, rank=self.rank, world_size=self.world_size, group=self.groups.control)
        checkpointer.prepare()
        hashing, syncing = Clock(lambda update, data: update(data)), Clock(os.fsync)
        sha256 = hashlib.sha256
        hashlib.sha256 = lambda *args, **kwargs: TimedHash(sha256(*args, **kwargs), hashing)  # type: ignore[assignment, misc]
        os.fsync = syncing
        try:
            start = time.perf_counter()
            report = checkpointer.save(1, self.tensors, {"consumed_samples": 0})
            seconds = time.perf_counter() - start
        finally:
            hashlib.sha256, os.fsync = sha256, syncing.function  # type: ignore[misc]
        if not report.saved:
            raise RuntimeError(f"nothing was saved: {report.reason}")
        return {"seconds": seconds, "hash_seconds": hashing.seconds, "fsync_seconds": syncing.seconds}

    def copy(self, folder: str) -> dict[str, Any]:
        """Write the same tensors into one file with one fsync, without a hash."""
        start = time.perf_counter()
        with open(Path(folder) / "plain", "wb", buffering=0) as file:
            for tensor in self.tensors.values():
                file.write(memoryview(tensor.pieces[0].tensor.contiguous().numpy()).cast("B"))
            os.fsync(file.fileno())
        return {"seconds": time.perf_counter() - start}


def measure(size: str, world_size: int, rounds: int, folder: Path, threads: int) -> dict[str, Any]:
    """Saves of one model on ``world_size`` ranks; the first of several is a warm-up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, environment = [sys.executable, __file__, "--child"], child_environment(threads)
    ranks = [Child(f"rank {r}", command, environment) for r in range(world_size)]
    saves: list[dict[str, Any]] = []
    copies: list[float] = []
    try:
        built = together(
            ranks,
            "build",
            lambda r: {"size": size, "rank": r, "world_size": world_size, "port": port, "threads": threads},
        )
        for index in range(rounds + (rounds > 1)):
            target = tempfile.mkdtemp(dir=folder)
            try:
                saved = together(ranks, "save", lambda _, target=target: {"folder": target})
                copied = ranks[0].ask("copy", folder=target)
            finally:
                shutil.rmtree(target)
            if index or rounds == 1:
                saves.append(saved)
                copies.append(copied["seconds"])
    finally:
        for child in ranks:
            child.close()
    times = {key: Stats.of(save[key] for save in saves) for key in ("seconds", "hash_seconds", "fsync_seconds")}
    return {"bytes": built["bytes"], "versions": built["versions"], "copy_seconds": Stats.of(copies), **times}


def beside(size: str, threads: int, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Steps without a save, with saves that are waited for, with saves in the background, on one rank of so many threads."""
    child = Child(f"{threads} threads", [sys.executable, __file__, "--child"], child_environment(threads))
    turns: dict[str, list[dict[str, Any]]] = {"none": [], "waited": [], "background": []}
    try:
        built = child.ask("build", size=size, rank=0, world_size=1, port=0, threads=threads)
        child.ask("prepare_steps", tokens=256)
        for index in range(rounds + 1):
            for kind, found in turns.items():
                target = tempfile.mkdtemp(dir=folder)
                try:
                    turn = child.ask("turn", kind=kind, steps=steps, folder=target)
                finally:
                    shutil.rmtree(target)
                if index:  # the first round is a warm-up
                    found.append(turn)
    finally:
        child.close()
    both = [*zip(turns["none"], turns["waited"], turns["background"], strict=True)]
    added = [(w["seconds"] - n["seconds"]) / len(w["stalls"]) for n, w, _ in both]
    of_background = [(b["seconds"] - n["seconds"]) / len(b["stalls"]) for n, _, b in both]
    slow = [(b["seconds"] - sum(b["stalls"]) - n["seconds"]) / b["in_flight"] for n, _, b in both]
    return {
        "bytes": built["bytes"], "layers": built["layers"], "versions": built["versions"], "threads": threads,
        "step_seconds": Stats.of(s for n in turns["none"] for s in n["steps"]),
        "waited_stall_seconds": Stats.of(s for w in turns["waited"] for s in w["stalls"]),
        "stall_seconds": Stats.of(s for b in turns["background"] for s in b["stalls"]),
        "written_seconds": Stats.of(s for b in turns["background"] for s in b["written"]),
        "slow_down": Stats.of(slow), "waited_added_seconds": Stats.of(added), "added_seconds": Stats.of(of_background),
        "added_ratio": Stats.of(b / w for b, w in zip(of_background, added, strict=True)),
    }  # fmt: skip


def together(ranks: list[Child], action: str, arguments: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Have all ranks do one thing at the same time; returns rank 0's answer."""
    for index, rank in enumerate(ranks):
        rank.send(action, **arguments(index))
    answers = [rank.receive() for rank in ranks]
    return answers[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each (default: 3)")
    parser.add_argument("--steps", type=int, default=8, help="of a turn (default: 8)")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["124M"], help="models (default: 124M)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="threads that compute (default: 1 2)")
    parser.add_argument(
        "--ranks", nargs="*", type=int, default=[1, 2], help="numbers of ranks for the second table (default: 1 2)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=REPOSITORY / "runs",
        help="where to save; its disk is what is measured (default: runs)",
    )
    parser.add_argument("--smoke", action="store_true", help="one save of a tiny model: does it run at all?")
    parser.add_argument("--json", help="write results there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        saver = Saver()
        serve({
            "build": saver.build, "save": saver.save, "copy": saver.copy, "prepare_steps": saver.prepare_steps, "turn": saver.turn,
        })  # fmt: skip
        return 0
    if options.smoke:
        options.sizes, options.ranks, options.threads, options.rounds, options.steps = ["smoke"], [2], [1], 1, 4
    results: dict[str, Any] = {"bars": BARS}
    try:
        options.dir.mkdir(parents=True, exist_ok=True)
        _measure_all(options, results)
    except (ChildError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"load average {load_average():.1f}; the benchmark itself makes up to {max(options.threads)}", file=sys.stderr
    )
    versions = next(iter(r for r in results.values() if "versions" in r))["versions"]
    plain = {name: {k: v.as_dict() if isinstance(v, Stats) else v for k, v in r.items()} for name, r in results.items()}
    write_json(options.json, "save_stall", {**plain, "load_average": load_average()}, versions)
    return 0


def _measure_all(options: argparse.Namespace, results: dict[str, Any]) -> None:
    rows, apart = [], []
    for size in options.sizes:
        for threads in options.threads:
            found = results[f"{size}, {threads} threads"] = beside(
                size, threads, options.rounds, options.steps, options.dir
            )
            rows.append(_row_beside(size, found))
    cores = len(os.sched_getaffinity(0))
    header = [
        "model",
        "threads",
        "saved",
        "step",
        "stall, waited",
        "stall, background",
        "per GB",
        "slow-down",
        "added, waited",
        "added",
    ]
    print_table(
        f"Saves and the steps beside them, {cores} cores, on the disk of {options.dir}", [*header, "ratio"], rows
    )
    for size in options.sizes:
        for world_size in options.ranks if size != "1.3B" else ():
            threads = max(1, cores // max(options.ranks))
            result = results[f"{size}, {world_size} ranks"] = measure(
                size, world_size, options.rounds, options.dir, threads
            )
            apart.append(_row(size, world_size, result))
    if apart:
        header = ["model, ranks", "state", "save", "hashing", "fsync", "plain copy + fsync"]
        print_table("A save that is waited for, taken apart", header, apart)


def _row_beside(size: str, found: dict[str, Any]) -> list[str]:
    per_gb = found["stall_seconds"].median / (found["bytes"] / 1e9)
    return [
        f"{size} ({found['layers']} layers)", str(found["threads"]), f"{found['bytes'] / GIB:.2f} GiB",
        found["step_seconds"].text("s", digits=2), found["waited_stall_seconds"].text("s", digits=2),
        found["stall_seconds"].text("s", digits=3), f"{per_gb:.3f} s", found["slow_down"].text("%", 100, 1),
        found["waited_added_seconds"].text("s", digits=2), found["added_seconds"].text("s", digits=2),
        found["added_ratio"].text("", digits=2),
    ]  # fmt: skip


def _row(size: str, world_size: int, result: dict[str, Any]) -> list[str]:
    times = [result[key].text("s", digits=2) for key in ("seconds", "hash_seconds", "fsync_seconds", "copy_seconds")]
    return [f"{size}, {world_size}", f"{result['bytes'] / 2**20:.0f} MiB", *times]


if __name__ == "__main__":
    from megatron_sp.utils.entry_point import run_program

    run_program(main)
