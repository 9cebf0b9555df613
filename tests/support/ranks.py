"""Run a test's function on several gloo ranks: forked processes on this machine, one thread each."""

from __future__ import annotations

import contextlib
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support.waiting import PATIENCE_S


def _worker(rank: int, fn: Callable[..., None], world_size: int, run_dir: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # before anything else: OpenMP with more threads hangs after a fork
    torch.manual_seed(1234)  # every rank draws the same full tensors, then takes its share
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{run_dir}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=PATIENCE_S),  # a missing collective fails instead of hanging
        )
        fn(*args)
        with contextlib.suppress(RuntimeError):  # some tests end ranks
            dist.barrier()  # a rank that ends breaks the connections that others are still making
    except BaseException:
        (run_dir / f"{time.time_ns()}.rank{rank}").write_text(traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(fn: Callable[..., None], world_size: int, tmp_path: Path, *args: Any) -> None:
    """Call ``fn(*args)`` on ``world_size`` ranks; an AssertionError carries the traceback of the rank that failed first."""
    run_dir = Path(tempfile.mkdtemp(dir=tmp_path))  # a store file must never be used twice
    try:
        mp.start_processes(_worker, (fn, world_size, run_dir, args), nprocs=world_size, start_method="fork")
    except (mp.ProcessRaisedException, mp.ProcessExitedException):
        reports = sorted(run_dir.glob("*.rank*"))  # torch names whoever ended first; the earliest traceback is the cause
        if not reports:
            raise
        raise AssertionError(f"{reports[0].suffix[1:]} failed first\n{reports[0].read_text()}") from None
