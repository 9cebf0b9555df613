"""Predicted memory of a run, compared with what is available before it starts, and with what some steps needed."""

# A run that cannot fit is refused: on a CPU the system would first slow down and then kill a process, which may be
# another one, without a message. It is refused only for what is certain (``estimate/rough.py :: CERTAIN``); what may
# be too much is a warning, and --allow-oom makes it one in any case. A rough form tells all of that at once. What is
# compared with measurements comes from the program itself, which runs without contents in a child process while
# training goes on.

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_sp.config.schema import Config
from megatron_sp.estimate.memory_plan import CUBLAS_VARIABLE, CUBLAS_WORKSPACES, Device, cublas_workspaces
from megatron_sp.estimate.rough import CERTAIN, HOW_TO_START, copy_bytes, host_need, order_bytes
from megatron_sp.estimate.suggestions import advice, breakdown, plan_of, shortage
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.format import format_bytes
from megatron_sp.utils.host import host_memory_bytes, swap_bytes

_PROGRAM = ("-m", "megatron_sp.planner.fake_run")
STEPS = 10  # after which prediction and measurement are compared


class MemoryEstimate:
    """Predicted memory of one rank; to be created before the model is built."""

    def __init__(
        self, config: Config, overlap: dict[str, Any], world_size: int, local_world_size: int, device: torch.device,
        attention: str = "", *, fused: bool = True, repeats_attention: bool = False, is_own: bool = True,
    ) -> None:  # fmt: skip
        self._config = config = copy.deepcopy(config)
        self.is_own = is_own
        if attention == "reference":
            config.kernels.attention_backend = "unfused"
        if repeats_attention:
            config.kernels.recompute_attention = "full"
        if not fused:
            config.kernels.fused_kernels = "torch"
        parallel = config.parallel
        if parallel.overlap_mode == "auto" and parallel.sequence_parallel_size > 1:
            parallel.sp_overlap_comm, parallel.sp_overlap_mode = False, overlap["mode"]
            parallel.sp_head_chunks = overlap["chunks"] if overlap["mode"] == "chunked" else None
        self._world_size, self._local_world_size, self._device = world_size, local_world_size, device
        self._kind: Device = "cuda" if device.type == "cuda" else "cpu"
        self.memory = plan_of(config, world_size, self._kind)
        if self._kind == "cuda" and torch.cuda.is_available():
            beside = cublas_workspaces(torch.cuda.get_device_capability(device), os.environ.get(CUBLAS_VARIABLE, ""))
            self.memory = replace(self.memory, stays=(*self.memory.stays, beside))
        self._before = resident_bytes()
        self._child: subprocess.Popen[str] | None = None
        self._run: dict[str, int] = {}  # what the child has said

    def begin_run(self) -> None:
        """Run the program without contents in a child process."""
        if not self.is_own or self._child is not None:
            return
        asked = json.dumps({"config": self._config.to_dict(), "world_size": self._world_size, "kind": self._kind})
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        with contextlib.suppress(OSError):
            self._child = subprocess.Popen(
                [sys.executable, *_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True,
            )  # fmt: skip
            assert self._child.stdin is not None
            with self._child.stdin as pipe:
                pipe.write(asked)

    def has_run(self) -> bool:
        """Return whether a run that was begun is over."""
        child = self._child
        if child is None or child.poll() is None:
            return child is None
        if not self._run and child.stdout is not None and not child.stdout.closed:
            with child.stdout as pipe, contextlib.suppress(OSError, ValueError):
                self._run = json.loads(pipe.read())
                beside = self.memory.stays[-1].num_bytes if self.memory.stays[-1].name == CUBLAS_WORKSPACES else 0
                self._run["predicted_bytes"] += beside
        return True

    def close(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.wait()

    def warning(self) -> list[str]:
        """Return log lines if there may be too little memory. Raises ConfigError if there certainly is."""
        if not self.is_own:
            return []
        available, whose = self._available()
        lines = [] if available is None else shortage(self._config, self._world_size, self._kind, available, whose)
        if self._kind == "cpu":
            swap = swap_bytes() // self._local_world_size
            if lines and host_need(self._config, self._world_size) > (available or 0) + swap:
                self._refuse(lines)
            return lines
        if lines and CERTAIN * self.memory.peak > (available or 0):
            self._refuse(lines)
        # what GPUs put into the memory of their host; a save goes without its copy
        host, ranks = host_memory_bytes(), self._local_world_size
        need = self.memory.host + self.memory.optimizer_host - copy_bytes(self._config, self._world_size)
        if host is None or need * ranks <= host:
            return lines
        of_host = (
            f"warning: a rank is predicted to need {format_bytes(need)} of host memory for what it offloads, and"
            f" {format_bytes(host)} are available to {ranks} {'process' if ranks == 1 else 'processes'}: offload less,"
            " or start fewer processes on a host"
        )
        if CERTAIN * need * ranks > host:  # pinned memory cannot be swapped
            self._refuse([of_host])
        return [*lines, of_host]

    def _refuse(self, lines: list[str]) -> None:
        if not self._config.kernels.allow_oom:
            raise ConfigError("\n".join([lines[0].removeprefix("warning: "), *lines[1:], f"  {HOW_TO_START}"]))

    def explain(self) -> list[str]:
        """Return lines with a breakdown of a rank's memory and suggestions."""
        if not self.is_own:
            return []
        available, peak = self._available()[0] or 0, self.memory.peak
        lines = [f"a rank was predicted to need {format_bytes(peak)}: {breakdown(self.memory)}"]
        limit = min(available, int(0.8 * peak))
        if peak < 0.8 * available:
            beside = "beside the program itself, so something else limits it: ulimit -v, a container, other processes"
            lines.append(f"  that is less than the {format_bytes(available)} that are there, {beside}")
            limit = peak
        return lines + advice(self._config, self._world_size, self._kind, limit)

    def _available(self) -> tuple[int | None, str]:
        if self._kind == "cuda":
            return torch.cuda.mem_get_info(self._device)[1], "on this GPU"
        host, ranks = host_memory_bytes(), self._local_world_size
        if host is None:
            return None, ""
        processes = "process" if ranks == 1 else "processes"
        whose = f"for it ({format_bytes(host)} of this host are available to {ranks} {processes})"
        return host // ranks, whose

    def spare_host_bytes(self, kept_for_saves: int) -> int | None:
        """Return the host memory left to this rank, with what is predicted for saves; None if unknown."""
        host = host_memory_bytes()
        if host is None:
            return None
        if self._kind == "cuda":
            to_come = self.memory.host + self.memory.optimizer_host - kept_for_saves
        else:
            to_come = self._before + self.memory.peak - kept_for_saves - resident_bytes()
        return host // self._local_world_size - max(0, to_come)

    def record(self, measured: int, step_s: float, reserved: int = 0, graphs: int = 0) -> dict[str, Any]:
        """Return the record for ``metrics.jsonl``, in bytes and seconds."""
        before = self._before if self._kind == "cpu" else 0
        of_gpu = {"reserved_bytes": reserved, "graphs_bytes": graphs} if self._kind == "cuda" else {}
        return {
            **of_gpu, "predicted_bytes": self.memory.peak, "measured_bytes": measured, "before_model_bytes": before,
            "step_s": step_s, **self._run,
        }  # fmt: skip

    def line(self, measured: int, step_s: float, reserved: int = 0, graphs: int = 0) -> str:
        """Compare the prediction with what was measured, in bytes and seconds, in a log line."""
        if self._kind == "cuda":
            of_graphs = f", {format_bytes(graphs)} of them for captured steps" if graphs else ""
            measurement = (
                f"measured {format_bytes(measured)} allocated and {format_bytes(reserved)} reserved{of_graphs}"
            )
        else:
            before = f", {format_bytes(self._before)} of it before the model was built" if self._before else ""
            measurement = f"measured {format_bytes(measured)} resident (the whole process{before})"
        if not self.is_own:
            return f"memory: {measurement}; a step: {step_s:.3g} s"
        if not self._run:
            return f"memory: predicted roughly {format_bytes(self.memory.peak)}, {measurement}; a step: {step_s:.3g} s"
        sent, share = self._run["sent_bytes"], self._run["can_hide_bytes"] / max(1, self._run["sent_bytes"])
        number = self._run["collectives"]
        moved = f"{format_bytes(sent)} sent in {number:,} collectives, {share:.0%} can run under computation"
        predicted = format_bytes(self._run["predicted_bytes"])
        return (
            f"memory: predicted {predicted}, {measurement}; a step: {step_s:.3g} s, {moved if sent else 'nothing sent'}"
        )


def resident_bytes() -> int:
    # the resident memory of this process; 0 if it cannot be read
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def require_order_fits(config: Config, num_samples: tuple[int, int, int]) -> None:
    """Raise ConfigError if the order of all samples does not fit into the memory, unless --allow-oom is given."""
    need, host = order_bytes(config, sum(num_samples)), host_memory_bytes()
    if not config.kernels.allow_oom and host is not None and need > host + swap_bytes():
        raise ConfigError(
            f"the order of {sum(num_samples):,} samples takes at least {format_bytes(need)}, and {format_bytes(host)}"
            " of this host are available: lower --train-iters, --train-samples or --eval-iters, or raise"
            f" --eval-interval\n  {HOW_TO_START}"
        )
