"""Collectives over all GPUs of this machine by NCCL: their results, their bandwidth, and layouts against one process.

A trial on a CPU has two ranks of gloo. Bandwidth is that of a rank's link: bytes that it must send, over the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import REPOSITORY, Stats

from first_light.records import Context, failure
from megatron_sp.comm.collectives import all_gather_async, all_reduce_async, all_to_all_async, reduce_scatter_async

_SIZES = (2**20, 2**24, 2**28)
_MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --vocab-size 100 --mock-data --lr 1e-2 --train-iters 1"
    " --micro-batch-size 2 --attention-dropout 0 --verify-parallelism"
)


def run(context: Context) -> None:
    """Record each collective, then each layout."""
    ranks = 2 if context.device == "cpu" else context.num_gpus
    if ranks < 2:
        context.record("NCCL", "all GPUs", "absent", "this machine has one GPU")
        return
    with tempfile.TemporaryDirectory() as folder:
        sizes = (2**12,) if context.tiny else _SIZES
        mp.start_processes(_worker, (ranks, context.device, sizes, folder), nprocs=ranks, start_method="spawn")  # type: ignore[no-untyped-call]
        for row in json.loads((Path(folder) / "found.json").read_text()):
            context.record(f"{'NCCL' if context.device == 'cuda' else 'gloo'}, {ranks} ranks", **row)
    for name, flags in layouts(ranks).items():
        context.attempt(
            "layouts against one process", f"{ranks} ranks: {name}", lambda flags=flags: _verify(context, ranks, flags)
        )  # type: ignore[misc]
        if context.tiny:
            break


def layouts(ranks: int) -> dict[str, str]:
    """Return the flags of layouts of so many ranks, where the heads allow it."""
    found = {"sp, all modes": f"--sequence-parallel-size {ranks} --sp-overlap-comm", "ZeRO 3": "--zero-stage 3"}
    if 8 % ranks == 0:
        found["tp with sequence parallel"] = f"--tensor-model-parallel-size {ranks} --sequence-parallel"
    if ranks % 2 == 0 and ranks > 2:
        found["tp 2, sp"] = f"--tensor-model-parallel-size 2 --sequence-parallel --sequence-parallel-size {ranks // 2}"
    return found


def words_of(flags: str, ranks: int, device: str) -> list[str]:
    """Return the flags of a run that compares a layout with one process."""
    return f"{_MODEL} --global-batch-size {4 * ranks} --device {device} {flags}".split()


def _verify(context: Context, ranks: int, flags: str) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        "-m", "megatron_sp", "pretrain", "gpt",
    ]  # fmt: skip
    words = words_of(flags, ranks, context.device)
    run = subprocess.run(
        [*command, *words], cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    said = [line for line in run.stdout.splitlines() if line.startswith("verify:")]
    return {
        "verdict": "ok" if run.returncode == 0 else "wrong",
        "message": said[-1] if said else f"ended with code {run.returncode}",
    }


def _worker(rank: int, ranks: int, device_type: str, sizes: tuple[int, ...], folder: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=60), device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    try:
        found = [row for size in sizes for row in _measure(rank, ranks, device, size)]
        if rank == 0:
            (Path(folder) / "found.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()
    os._exit(0)  # threads of a backend may outlive their group


def _measure(rank: int, ranks: int, device: torch.device, num_bytes: int) -> list[dict[str, Any]]:
    """Return a record's fields for each collective of tensors of so many bytes."""
    group, each = dist.group.WORLD, num_bytes // 2 // ranks
    assert group is not None
    whole = torch.empty(each * ranks, dtype=torch.bfloat16, device=device)
    part, other = whole.new_empty(each), torch.empty_like(whole)
    counts = [each] * ranks
    # each rank contributes rank + 1; a sum of these is exact
    total, share = ranks * (ranks + 1) / 2, (ranks - 1) / ranks
    cases: dict[str, tuple[float, Callable[[], torch.Tensor], torch.Tensor]] = {
        "all_reduce": (2 * share, lambda: all_reduce_async(whole, group).wait(), torch.full_like(whole, total)),
        "reduce_scatter": (
            share,
            lambda: reduce_scatter_async(whole, group, part).wait(),
            torch.full_like(part, total),
        ),
        "all_gather": (share, lambda: all_gather_async(part, group, other).wait(), _by_rank(ranks, each, device)),
        "all_to_all": (
            share,
            lambda: all_to_all_async(whole, counts, other, counts, group).wait(),
            _by_rank(ranks, each, device),
        ),
    }
    rows = []
    for name, (sent, call, want) in cases.items():
        row: dict[str, Any] = {"row": f"{name}, {num_bytes:,} bytes"}
        try:
            whole.fill_(rank + 1)
            part.fill_(rank + 1)
            good = bool(torch.equal(call(), want))
            times = [_seconds(call, device, group) for _ in range(7)][2:]
            ms = Stats.of(1e3 * t for t in times).median
            row |= {
                "verdict": "ok" if good else "wrong",
                "median_ms": ms,
                "link_gbs": sent * num_bytes / max(ms, 1e-9) / 1e6,
            }
        except RuntimeError as error:
            row |= {"verdict": "failed", "message": failure(error)}
        rows.append(row)
    return rows


def _by_rank(ranks: int, each: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, ranks + 1, device=device).repeat_interleave(each).to(torch.bfloat16)


def _seconds(call: Callable[[], torch.Tensor], device: torch.device, group: Any) -> float:
    dist.barrier(group)
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
