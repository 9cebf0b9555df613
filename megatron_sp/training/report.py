"""Report of each step: one line and one record in ``metrics.jsonl`` per log interval."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.data.dataset import step_digest
from megatron_sp.estimate.flops import head_share, peak_tflops, step_flops_per_token
from megatron_sp.optim.flat import squared_norm
from megatron_sp.optim.optimizer import FlatOptimizer
from megatron_sp.training.memory_estimate import STEPS, MemoryEstimate
from megatron_sp.training.metrics import Console, MetricsLog
from megatron_sp.training.setup import dtype_of
from megatron_sp.training.step import StepResult
from megatron_sp.training.train_state import Progress
from megatron_sp.utils.format import format_bytes, format_duration

if TYPE_CHECKING:
    from megatron_sp.training.parts import Run

NO_LOSS_TOKENS = "no loss tokens"

_WORTH_S = 30.0  # of training that is to come: then the program is run without contents beside it


def about_no_loss_tokens(config: Config) -> str:
    masks = [f"--{name.replace('_', '-')}" for name in ("eod_mask_loss",) if getattr(config.data, name)]
    why = "the data mask all of them"
    if masks:
        why = f"{masks[0]} masks all of them: is the id that ends documents the right one (--eod-id)?"
    return f"no token has a loss, so there is none to report: {why}"


class StepReporter:
    """Turns step results into lines and records; rates are over the steps since the last line, without pauses.

    Args:
        flops: (causal, full) FLOPs of a token in sequences of a configuration's length, of a model that is not our own.
    Attributes:
        graphs_bytes: returns the bytes of the pool of captured steps.
    """

    def __init__(
        self, config: Config, groups: ParallelGroups, console: Console, metrics: MetricsLog, train_iters: int,
        memory: MemoryEstimate, flops: Callable[[ModelConfig], tuple[float, float]] | None = None,
    ) -> None:  # fmt: skip
        self._flops = flops
        self.graphs_bytes: Callable[[], int] = lambda: 0
        self._config, self._groups, self._console, self._metrics = config, groups, console, metrics
        self._train_iters, self._memory, self._lengths = train_iters, memory, list[float]()
        self._causal, self._full = 0.0, 0.0  # FLOPs since the last line
        self._peak, self._peak_name = peak_tflops(config.logging.peak_tflops, groups.device, dtype_of(config))
        self._step_began = time.monotonic()
        self._seconds = 0.0
        self._tokens = 0
        self._steps = 0
        self._warned_of_peak = self._warned_of_nothing = self._compared = False
        self._per_token: dict[int, tuple[float, float]] = {}

    def pause_ended(self) -> None:
        """Restart the step timer after a save or a validation, whose time is not to count for the next step."""
        self._step_began = time.monotonic()

    def step(
        self, progress: Progress, result: StepResult, *, lr: float, loss_scale: float, optimizer: FlatOptimizer,
        size: int, length: int,
    ) -> None:  # fmt: skip
        """Report the step that has just ended, with ``size`` sequences of ``length`` tokens."""
        now = time.monotonic()
        self._seconds += now - self._step_began
        left = self._train_iters - progress.step
        if len(self._lengths) < STEPS:
            self._lengths.append(now - self._step_began)
            if len(self._lengths) == 2 and self._groups.rank == 0 and left * self._lengths[1] >= _WORTH_S:
                self._memory.begin_run()
        if len(self._lengths) == STEPS and not self._compared and (self._memory.has_run() or left == 0):
            self._compared = True
            self._compare(progress.step)
        self._step_began = now
        if length not in self._per_token:
            model = dataclasses.replace(self._config.model, seq_length=length)
            if self._flops is None:
                self._per_token[length] = step_flops_per_token(model, head_share(self._config))
            else:
                self._per_token[length] = self._flops(model)
        causal, full = self._per_token[length]
        self._tokens += size * length
        self._causal, self._full = self._causal + size * length * causal, self._full + size * length * full
        self._steps += 1
        rate = self._tokens / self._seconds if self._seconds else 0.0
        seconds_left = (self._train_iters - progress.step) * self._seconds / self._steps
        self._console.progress(progress.step, f"loss {result.losses[0]:.4f}  {rate:,.0f} tokens/s")
        if progress.step % self._config.logging.log_interval and progress.step != self._train_iters:
            return
        record = self._record(progress, result, rate, lr, loss_scale, optimizer, size)
        record |= {} if self._config.batch.seq_length_curriculum is None else {"seq_length": length}
        self._metrics.write("train", **record)
        self._console.line(self._line(record, seconds_left))
        if record["loss"] is None and not self._warned_of_nothing:
            self._warned_of_nothing = True
            self._console.line(f"warning: {about_no_loss_tokens(self._config)}")
        if (record["mfu"] or 0) > 1 and not self._warned_of_peak:
            self._warned_of_peak = True
            self._console.line(
                f"MFU above 100 % is impossible: the assumed peak, that of {self._peak_name}, is lower than what this"
                " device reaches; set --peak-tflops, and compare tokens/s until then"
            )
        self._seconds, self._tokens, self._steps, self._causal, self._full = 0.0, 0, 0, 0.0, 0.0

    def _compare(self, step: int) -> None:
        self._memory.close()
        measured, length = memory_bytes(self._groups.device), statistics.median(self._lengths)
        reserved = torch.cuda.max_memory_reserved(self._groups.device) if self._groups.device.type == "cuda" else 0
        measurements = (measured, length, reserved, self.graphs_bytes())
        self._console.line(self._memory.line(*measurements))
        if self._memory.is_own:
            self._metrics.write("prediction", step=step, **self._memory.record(*measurements))

    def _record(
        self, progress: Progress, result: StepResult, rate: float, lr: float, loss_scale: float,
        optimizer: FlatOptimizer, size: int,
    ) -> dict[str, Any]:  # fmt: skip
        device_seconds = self._seconds * self._groups.world_size
        causal = full = 0.0
        if device_seconds:
            causal, full = (flops / device_seconds / 1e12 for flops in (self._causal, self._full))
        loss = result.losses[0] if result.num_loss_tokens else None
        record: dict[str, Any] = {
            "step": progress.step, "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_tokens, "loss": loss, "loss_hex": None if loss is None else loss.hex(),
            "grad_norm": result.grad_norm, "grad_norm_hex": result.grad_norm.hex(), "lr": lr, "global_batch_size": size,
            "loss_tokens": result.num_loss_tokens, "samples_sha": step_digest(result.sample_digests),
            "skipped_steps": progress.skipped_steps, "loss_scale": loss_scale, "step_s": self._seconds / self._steps,
            "tokens_per_s": rate, "tflops_causal": causal, "tflops_full": full,
            "mfu": causal / self._peak if self._peak else None, "peak": self._peak_name,
            "memory_bytes": memory_bytes(self._groups.device),
        }  # fmt: skip
        record |= {} if result.decoupled_lr is None else {"decoupled_lr": result.decoupled_lr}
        record |= {} if result.routers is None else result.routers.record()
        nothing = torch.zeros((), dtype=torch.float64, device=self._groups.device)
        if self._config.logging.log_params_norm:
            parts = [part for unit in optimizer.counted_units for _, part in unit.counted(unit.master)]
            squares = torch.stack([nothing, *(squared_norm(part).to(nothing) for part in parts)]).sum()
            record["params_norm"] = math.sqrt(float(all_reduce(squares, optimizer.holders)))
        if self._config.logging.log_num_zeros_in_grad:
            parts = [part for unit in optimizer.counted_units for _, part in unit.counted(unit.grad_shard)]
            zeros = torch.stack([nothing, *((part == 0).sum() for part in parts)]).sum()
            record["num_zeros_in_grad"] = int(all_reduce(zeros, optimizer.holders))
        return record

    def _line(self, r: dict[str, Any], seconds_left: float) -> str:
        mfu = f" (MFU {100 * r['mfu']:.1f} % of {self._peak_name})" if r["mfu"] is not None else ""
        extra = f" | skipped {r['skipped_steps']}" if r["skipped_steps"] else ""
        extra += f" | length {r['seq_length']}" if "seq_length" in r else ""
        extra += f" | scale {r['loss_scale']:g}" if self._config.precision.fp16 else ""
        extra += f" | lr of embeddings {r['decoupled_lr']:.3e}" if "decoupled_lr" in r else ""
        if "expert_load_max" in r:
            extra += f" | load {r['expert_load_max']:.2f} of the mean, {r['experts_idle']} idle"
            extra += f", entropy {r['expert_entropy']:.3f}"
        loss = f"loss: {NO_LOSS_TOKENS}" if r["loss"] is None else f"loss {r['loss']:.4f}"
        return (
            f"step {r['step']}/{self._train_iters} | {loss} | lr {r['lr']:.3e} | grad norm {r['grad_norm']:.3f} |"
            f" {r['tokens_per_s']:,.0f} tokens/s | {_tflops(r['tflops_causal'])} TFLOP/s causal,"
            f" {_tflops(r['tflops_full'])} full{mfu} | {format_bytes(r['memory_bytes'])}{extra} |"
            f" {format_duration(seconds_left)} left"
        )


def _tflops(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated on its GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextlib.contextmanager
def profiler(run: Run) -> Iterator[Callable[[], None]]:
    # profile the steps of --profile-step-start/-end with torch's profiler; yields what to call after each step
    logging, rank, done = run.context.config.logging, run.context.launch.rank, run.state.progress.step
    if not logging.profile or rank not in logging.profile_ranks or done >= logging.profile_step_end:
        yield lambda: None
        return
    wait, active = max(logging.profile_step_start - done, 0), logging.profile_step_end - logging.profile_step_start
    warmup = min(wait, 1)
    with warnings.catch_warnings():
        # to profile the very first step is what was asked for
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")
        plan = torch.profiler.schedule(wait=wait - warmup, warmup=warmup, active=max(active, 1), repeat=1)
    path = run.context.run_dir / f"profile-rank{rank}.json"
    with torch.profiler.profile(schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(path))) as profiler:
        yield profiler.step
