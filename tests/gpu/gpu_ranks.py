"""Run a test's function on several ranks with GPUs: spawned processes, since CUDA does not survive a fork."""

from __future__ import annotations

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


def _worker(rank: int, fn: Callable[..., None], backend: str, world_size: int, run_dir: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend, init_method=f"file://{run_dir}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=90),
            device_id=device if backend == "nccl" else None,
        )  # fmt: skip
        fn(device, *args)
        torch.cuda.synchronize(device)
    except BaseException:
        (run_dir / f"{time.time_ns()}.rank{rank}").write_text(traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_gpu_ranks(fn: Callable[..., None], world_size: int, tmp_path: Path, *args: Any, backend: str = "nccl") -> None:
    """Call ``fn(device, *args)`` on ``world_size`` ranks, rank r on GPU r modulo their number; see ``ranks.run_ranks``."""
    run_dir = Path(tempfile.mkdtemp(dir=tmp_path))
    try:
        mp.start_processes(_worker, (fn, backend, world_size, run_dir, args), nprocs=world_size, start_method="spawn")
    except (mp.ProcessRaisedException, mp.ProcessExitedException):
        reports = sorted(run_dir.glob("*.rank*"))
        if not reports:
            raise
        raise AssertionError(f"{reports[0].suffix[1:]} failed first\n{reports[0].read_text()}") from None
