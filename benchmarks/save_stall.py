"""How long a save stops training: Checkpointer.save of model and AdamW state, on one and on two ranks.

    python benchmarks/save_stall.py [--dir FOLDER] [--json docs/benchmarks/save_stall.json]

Each save goes into a fresh folder on the disk that --dir names. What hashing and fsync cost is measured from inside: the time
spent in hashlib updates and in os.fsync during the save (rank 0's, added up over the threads that write files at the same time,
so the two may exceed the whole). Beside it stands a plain copy of the same bytes to the same disk, with one fsync: what the disk
itself needs.
"""

from __future__ import annotations

import argparse
import hashlib
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
from common import REPOSITORY, Stats, child_environment, print_table, write_json

SIZES = {
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


class Saver:
    """A rank that holds a model with optimizer state; the actions of the measured process."""

    def build(self, size: str, rank: int, world_size: int, port: int, threads: int) -> dict[str, Any]:
        from datetime import timedelta

        import torch

        from megatron_sp.comm.groups import Launch, ParallelGroups, init_process_group
        from megatron_sp.config import KernelConfig, ModelConfig, OptimizerConfig
        from megatron_sp.models.gpt import GPTModel
        from megatron_sp.optim.flat import FlatUnit
        from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler
        from megatron_sp.training.state import TrainingState

        torch.set_num_threads(threads)
        if world_size > 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        init_process_group(Launch(rank, rank, world_size, world_size, 0), torch.device("cpu"), "gloo", timedelta(minutes=5))
        self.rank, self.world_size, self.groups = rank, world_size, ParallelGroups.create(torch.device("cpu"))
        model = GPTModel(ModelConfig(**SIZES[size]), KernelConfig(), seed=1, dtype=torch.float32)  # type: ignore[arg-type]
        names = {id(p): n for n, p in model.named_parameters()}
        units = [FlatUnit(u.name, [(names[id(p)], p) for p in u.module.parameters()]) for u in model.units()]
        optimizer = FlatOptimizer(units, OptimizerConfig(lr=1e-4))
        scaler = LossScaler(enabled=False, fixed=None, initial=1.0, minimum=1.0, window=1, hysteresis=1)
        state = TrainingState(model, units, optimizer, scaler)
        self.tensors = {**state.weights(), **state.optimizer_tensors()}
        return {"bytes": sum(t.pieces[0].tensor.nbytes for t in self.tensors.values()), "versions": {"torch": torch.__version__}}

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
        built = together(ranks, "build", lambda r: {"size": size, "rank": r, "world_size": world_size, "port": port, "threads": threads})
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


def together(ranks: list[Child], action: str, arguments: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Have all ranks do one thing at the same time; returns rank 0's answer."""
    for index, rank in enumerate(ranks):
        rank.send(action, **arguments(index))
    answers = [rank.receive() for rank in ranks]
    return answers[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured saves of each (default: 5)")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["5M", "124M"], help="models (default: 5M 124M)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="numbers of ranks (default: 1 2)")
    parser.add_argument("--dir", type=Path, default=REPOSITORY / "runs", help="where to save; its disk is what is measured (default: runs)")
    parser.add_argument("--smoke", action="store_true", help="one save of a tiny model: does it run at all?")
    parser.add_argument("--json", help="write results there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        saver = Saver()
        serve({"build": saver.build, "save": saver.save, "copy": saver.copy})
        return 0
    sizes, world_sizes, rounds = (["smoke"], [2], 1) if options.smoke else (options.sizes, options.ranks, options.rounds)
    threads = max(1, len(os.sched_getaffinity(0)) // max(world_sizes))
    results: dict[str, Any] = {}
    rows = []
    try:
        options.dir.mkdir(parents=True, exist_ok=True)
        for size in sizes:
            for world_size in world_sizes:
                result = results[f"{size}, {world_size} ranks"] = measure(size, world_size, rounds, options.dir, threads)
                rows.append(_row(size, world_size, result))
    except (ChildError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    header = ["model, ranks", "state", "save", "hashing", "fsync", "plain copy + fsync"]
    print_table(f"Time for which a save stops training, on the disk of {options.dir}", header, rows)
    versions = next(iter(results.values()))["versions"]
    plain = {name: {k: v.as_dict() if isinstance(v, Stats) else v for k, v in r.items()} for name, r in results.items()}
    write_json(options.json, "save_stall", plain, versions)
    return 0


def _row(size: str, world_size: int, result: dict[str, Any]) -> list[str]:
    times = [result[key].text("s", digits=2) for key in ("seconds", "hash_seconds", "fsync_seconds", "copy_seconds")]
    return [f"{size}, {world_size}", f"{result['bytes'] / 2**20:.0f} MiB", *times]


if __name__ == "__main__":
    from megatron_sp.utils.program import run_program

    run_program(main)
