"""Setup of a training process from a validated configuration: device, threads, process group, run folder.

``run_main`` is the outermost frame of every entry point. It turns a ``ReportedError`` into one message and an exit
code, and writes the outcome to ``run_status.json``, because torchrun reports every failure as 1.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_sp.checkpoint.lock import RunLock
from megatron_sp.comm.devices import gpu_of
from megatron_sp.comm.failed_ranks import first_line, is_peer_failure
from megatron_sp.comm.groups import Group, NcclOptions, ParallelGroups, destroy_process_group, init_process_group
from megatron_sp.comm.object_collectives import all_ranks_agree, broadcast_json
from megatron_sp.config.rules import NCCL_ON_CPU, drop_flash, drop_nccl
from megatron_sp.config.schema import Config
from megatron_sp.parallel.parallel_context import NO_EP, ExpertParallel
from megatron_sp.training.kernel_selection import require_attention, require_fused_kernels
from megatron_sp.utils import streams
from megatron_sp.utils.entry_point import first_words, is_out_of_memory, leave
from megatron_sp.utils.errors import (
    EXIT_CONFIG,
    EXIT_OK,
    EXIT_PEER,
    EXIT_PREEMPTED,
    ConfigError,
    DiskError,
    PeerError,
    ReportedError,
)
from megatron_sp.utils.files import atomic_write_json, held_folder
from megatron_sp.utils.host import num_cores
from megatron_sp.utils.launch import Launch
from megatron_sp.utils.run_log import read_status, saved_step


class RunStatus:
    """Status file ``run_status.json``, for scripts to read after torchrun has ended."""

    # other ranks than 0 write failures only, so that the file is right even if rank 0 died

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self.path: Path | None = None
        self.is_made_up = False  # the folder has a name of our own, in runs/
        self.fields: dict[str, Any] = {}
        self.lost: dict[str, str] = {}  # other outputs that could not be written, and why
        self._began = False  # once this attempt has written the file, it no longer describes an earlier one
        # breakdown of a rank's memory, once that is predicted
        self.explain_memory: Callable[[], list[str]] | None = None

    def open(self, run_dir: Path) -> None:
        self.path = run_dir / "run_status.json"
        if (saved := saved_step(run_dir)) is not None:
            self.fields.setdefault("saved_step", saved)  # remains until a newer one is saved

    def report(self, error: ReportedError) -> bool:
        """Write a failure; return False if another rank has told of the same lost one."""
        # a lost rank is no news after a failure of another kind: the rank that failed first says more
        if self.path is None:
            return True
        with held_folder(self.path.parent):
            earlier = read_status(self.path.parent) if isinstance(error, PeerError) else {}
            if earlier.get("status") != "failed":
                self._replace("failed", error.exit_code, str(error))
        return earlier.get("status") != "failed" or earlier.get("exit_code") != EXIT_PEER

    def write(self, status: str, exit_code: int | None = None, message: str = "", **fields: Any) -> None:
        """Replace the file; a disk error is only a warning."""
        # another rank's failure is not overwritten with "running" by a rank 0 that has not noticed it yet
        self.fields.update(fields)
        if self.path is None or (self._rank != 0 and status != "failed"):
            return
        with held_folder(self.path.parent):
            if status != "running" or not self._began or read_status(self.path.parent).get("status") != "failed":
                self._replace(status, exit_code, message)

    def _replace(self, status: str, exit_code: int | None, message: str) -> None:
        assert self.path is not None
        record = {"status": status, "exit_code": exit_code, "message": message, "time": time.time(), **self.fields}
        if lost := {**streams.lost(), **self.lost}:
            record["lost_output"] = lost
        try:
            atomic_write_json(self.path, record)
            self._began = True
        except OSError as error:
            print(f"warning: {self.path} cannot be written: {error}", file=sys.stderr)

    def discard(self) -> bool:
        """Remove a made-up folder in which no run has begun; return whether it is gone."""
        # what this process has not written itself stays, and the folder with it
        if not self.is_made_up or self._rank != 0 or self.path is None:
            return False
        folder = self.path.parent
        with contextlib.suppress(OSError):
            if {path.name for path in folder.iterdir()} - {self.path.name, "tokenizer"}:
                return False
            shutil.rmtree(folder)
            folder.parent.rmdir()  # runs/, if it is empty
        return not folder.exists()


def run_main(body: Callable[[RunStatus], int], launch: Launch) -> NoReturn:
    """Run ``body``, which returns the exit code, and exit the process with it; never returns."""
    streams.survive()
    status = RunStatus(launch.rank)
    held: list[Exception] = []  # until the end: to free its frames would warn about the collectives in flight
    try:
        code = body(status)
    except ReportedError as error:
        held.append(error)
        code = error.exit_code
        if launch.rank == 0 or not error.on_all_ranks:
            prefix = "" if error.on_all_ranks else f"[rank {launch.rank}] "
            is_discarded = error.on_all_ranks and status.discard()
            if is_discarded or status.report(error):
                print(f"{prefix}error: {error}", file=sys.stderr, flush=True)
    except Exception as error:
        held.append(error)
        code = 1
        if is_out_of_memory(error):
            code = EXIT_CONFIG
            message = out_of_memory_message(error, status)
            print(f"[rank {launch.rank}] error: {message}", file=sys.stderr, flush=True)
        else:
            message = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        status.write("failed", code, message)
    # SIGTERM to torchrun's agent, the parent: with --max-restarts it would restart a preempted job. The agent that
    # received the signal ends anyway; those of other hosts would wait for it in vain.
    restarts = os.environ.get("TORCHELASTIC_RUN_ID") and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if code == EXIT_PREEMPTED and restarts:
        os.kill(os.getppid(), signal.SIGTERM)
    if code == EXIT_OK:
        destroy_process_group()
    leave(code, as_usual=not held)


def out_of_memory_message(error: BaseException, status: RunStatus) -> str:
    message = f"out of memory: {first_words(error)}"
    try:
        lines = [] if status.explain_memory is None else status.explain_memory()
    except Exception:  # there may be no memory left for an explanation
        lines = []
    if lines:
        return "\n".join([message, *lines])
    return (
        f"{message}. Lower --micro-batch-size, --seq-length or --train-iters (the order of all samples is held), add"
        " --recompute-granularity full or --bf16, make the model smaller, or use more ranks with"
        " --tensor-model-parallel-size or --sequence-parallel-size"
    )


def choose_device(config: Config, launch: Launch) -> torch.device:
    """Return the device of this rank. Raises ConfigError."""
    choice = config.kernels.device
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() and config.parallel.distributed_backend != "gloo" else "cpu"
    if choice == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU (`megatron-sp doctor` shows why); use --device cpu")
    device = gpu_of(launch.local_rank)
    torch.cuda.set_device(device)
    return device


def set_threads(config: Config, launch: Launch) -> int:
    """Set the number of threads to this process's share of the host's cores, unless it is configured; return it."""
    # OMP_NUM_THREADS counts for a process that is alone: torchrun sets it to 1 for several, leaving cores idle
    cores, asked = num_cores(), 0
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # "4", or of several levels "4,2"
    if launch.local_world_size == 1 and first.isascii() and first.isdigit() and len(first) < 5:
        asked = int(first)
    threads = config.kernels.num_threads or asked or max(1, cores // launch.local_world_size)
    torch.set_num_threads(threads)
    return threads


def join(config: Config, launch: Launch) -> ParallelGroups:
    """Choose the device, join the process group and build the layout. Collective. Raises ConfigError, PeerError."""
    device = choose_device(config, launch)
    if device.type == "cpu" and config.parallel.distributed_backend == "nccl":
        config.parallel.distributed_backend = "gloo"
        config.ignored_flags += (NCCL_ON_CPU,)
    if device.type == "cpu":
        why = "there is no GPU in this run: the ranks talk over gloo"
        config.ignored_flags += (*drop_nccl(config, why), *drop_flash(config))
    if config.kernels.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # else torch fills every empty(): our buffers are written before they are read, and filling is a pass over each
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    require_fused_kernels(config, launch, device)
    require_attention(config, launch, device)
    set_threads(config, launch)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    nccl = _nccl_options(config)
    nccl.of("sp"), nccl.of("dp")  # what NCCL does not know is found out before the ranks wait for each other
    try:
        init_process_group(launch, device, config.parallel.distributed_backend, timeout)
        return layout_groups(config, device, check=config.parallel.check_collectives)
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        host, port = launch.address or ("localhost", 0)
        raise PeerError(
            f"the {launch.world_size} ranks did not find each other at {host}:{port}: {first_line(error)}. Check that"
            " all were started, that the host can be reached, and that no other job has the port (torchrun --standalone"
            " chooses a free one)."
        ) from error


def layout_groups(config: Config, device: torch.device, *, check: bool, control: Group | None = None) -> ParallelGroups:
    """Build a layout's groups. Collective."""
    parallel = config.parallel
    return ParallelGroups.create(
        device, tp_size=parallel.tensor_model_parallel_size, sp_size=parallel.sequence_parallel_size,
        cp_size=parallel.context_parallel_size, pp_size=parallel.pipeline_model_parallel_size,
        timeout=timedelta(minutes=parallel.distributed_timeout_minutes), check=check, nccl=_nccl_options(config),
        control=control,
    )  # fmt: skip


def expert_parallel(config: Config, groups: ParallelGroups) -> ExpertParallel:
    """Make the groups of experts, if the model has any. Collective."""
    parallel = config.parallel
    if not config.model.has_experts:
        return NO_EP
    return ExpertParallel.create(
        groups, parallel.expert_model_parallel_size, tp_seq=parallel.sequence_parallel and groups.tp.size() > 1,
        chunks=parallel.moe_chunks, check=parallel.check_collectives,
    )  # fmt: skip


def _nccl_options(config: Config) -> NcclOptions:
    parallel = config.parallel
    return NcclOptions(parallel.nccl_sp_ctas, parallel.nccl_dp_ctas, parallel.nccl_cta_policy)


def open_run_dir(config: Config, name: str, groups: ParallelGroups) -> Path:
    """Return the run folder, created if absent: --save, or a fresh one named after task and time. Collective."""
    fresh = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    path = Path(broadcast_json(config.checkpoint.save or fresh, groups.control))
    with all_ranks_agree(groups.control):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the run folder {path} cannot be created: {error.strerror}; choose another --save"
            ) from None
    return path


def lock_run_dir(run_dir: Path) -> RunLock:
    """Take the run's lock, on rank 0. Raises LockError, DiskError."""
    try:
        return RunLock(run_dir, job=os.environ.get("TORCHELASTIC_RUN_ID", ""))
    except OSError as error:
        raise DiskError(
            f"the run folder {run_dir} cannot be written: {error.strerror}; choose another --save"
        ) from None


def dtype_of(config: Config) -> torch.dtype:
    """Return the torch dtype of parameters and activations."""
    dtype = getattr(torch, config.precision.params_dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
