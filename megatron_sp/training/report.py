"""Reports of a run, as lines and records in ``metrics.jsonl``: at its start, and of the steps of each log interval."""

# The start also promises whether the same processes compute the same numbers again, to the last bit. On a CPU they
# do. On a GPU attention's backward pass adds gradients in whatever order its blocks come to an end, unless
# --deterministic-mode takes kernels that do not; then what is left is how NCCL sums over ranks.

from __future__ import annotations

import contextlib
import math
import os
import platform
import resource
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_sp import __version__
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
from megatron_sp.utils.format import format_bytes, format_count, format_duration, format_parameters

if TYPE_CHECKING:
    from megatron_sp.parallel.router_pass import RouterStep
    from megatron_sp.training.parts import Run
    from megatron_sp.training.step import StepResult
    from megatron_sp.training.train_state import Progress

NO_LOSS_TOKENS = "no loss tokens"

_WORTH_S = 30.0  # of training that is to come: then the program is run without contents beside it


def announce(run: Run) -> None:
    context, plan, kernel, progress = run.context, run.plan, run.attention.kernel, run.state.progress
    config, groups, launch, hosts = context.config, context.groups, context.launch, context.peers.hosts
    num_params = sum(math.prod(spec.shape) for spec in run.state.specs.values())
    active = None
    if run.layout.pipeline is not None or config.model.has_experts:  # of which this rank has a part
        from megatron_sp.estimate.flops import count_active_parameters, count_parameters

        num_params = count_parameters(config.model)
        active = count_active_parameters(config.model) if config.model.has_experts else None
    size, length = plan.batches.global_batch_size(progress.consumed_samples), config.model.seq_length or 0
    now = length if plan.curriculum is None else min(length, plan.curriculum.length(progress.step + 1))
    growth = "" if (size, now) == (plan.batches.full, length) else f" (now {size} x {now})"
    of_token = "" if active is None else f", {format_count(active)} active,"
    context.console.line(
        f"{format_parameters(num_params)} parameters{of_token} in {config.precision.params_dtype}, {groups.world_size}"
        f" x {groups.device.type} (dp {groups.dp_size}{_layout_words(run)}), attention: {kernel.name}"
        f" ({kernel.reason}), global batch {plan.batches.full} x {config.model.seq_length} tokens{growth}, steps"
        f" {progress.step} to {plan.train_iters}, run folder {context.run_dir}"
    )
    if run.attention.recomputation is not None:
        context.console.line(f"recomputation {run.attention.recomputation}")
    if run.fused.chosen:
        context.console.line(f"fused kernels: {run.fused.describe()}")
    if not config.batch.skip_train:
        context.console.line(about_repeats(config, groups.device.type, groups.world_size, kernel.name))
    if groups.device.type == "cuda":
        device = torch.cuda.get_device_name(groups.device)
    else:
        device = processor_name() or platform.machine() or "CPU"
    fused: dict[str, str] = {kernel.op: kernel.name for kernel in run.fused.chosen}
    run.metrics.write(
        "start", step=progress.step, consumed_samples=progress.consumed_samples, attempt=launch.attempt,
        world_size=groups.world_size, num_params=num_params, active_params=active,
        launch_to_ready_s=time.monotonic() - context.started,
        train_iters=plan.train_iters, config=config.to_dict(),
        environment={
            "versions": versions(), "device": device, "hosts": dict(Counter(hosts)),
            "threads": torch.get_num_threads(), "system": f"{platform.system()} {platform.release()}",
            "layout": run.layout.record, "attention": kernel.name, "kernels": fused,
        },
        attention={
            "kernel": kernel.name, "reason": kernel.reason, "ms": run.attention.milliseconds,
            "recomputation": run.attention.recomputation,
        },
    )  # fmt: skip
    context.status.write(
        "running", step=progress.step, train_iters=plan.train_iters, world_size=groups.world_size, hosts=hosts,
        pids=context.peers.pids,
    )  # fmt: skip


def _layout_words(run: Run) -> str:
    groups, layout, words = run.context.groups, run.layout.parallel, ""
    tp_seq = run.context.config.parallel.sequence_parallel
    if run.layout.pipeline is not None:
        layers = "+".join(str(len(stage)) for stage in run.layout.pipeline.stages)
        words += f", pp {groups.pp.size()}: {run.layout.pipeline.kind}, layers {layers}"
    if groups.cp.size() > 1:
        words += f", cp {groups.cp.size()}"
    if groups.sp.size() > 1:
        chunks = f" in {layout.num_chunks} chunks" if layout.mode == "chunked" else ""
        overlap = "overlapped" if layout.sp.overlap else "not overlapped"
        words += f", sp {groups.sp.size()}: {layout.mode}{chunks}, {overlap}"
    if groups.tp.size() > 1:
        words += f", tp {groups.tp.size()}{' with sequence parallel' if tp_seq else ''}"
    return words


_PREFIX = "repeats to the last bit: "


def about_repeats(
    config: Config, device: str, world_size: int, kernel: str, environment: Mapping[str, str] = os.environ
) -> str:
    """Return whether the run repeats, and if not why, as a line."""
    again = "a resume with the same processes has the losses and weights of a run without it"
    if device == "cpu":
        return f"{_PREFIX}yes: {again}"
    if not config.kernels.deterministic_mode:
        who = "kernels of a GPU" if kernel == "reference" else f"attention's backward pass ({kernel})"
        way_out = "--deterministic-mode takes kernels that do not, and is slower"
        return f"{_PREFIX}no: {who} may add in another order each time; {way_out}"
    if world_size > 1 and config.parallel.distributed_backend != "gloo" and not environment.get("NCCL_ALGO"):
        return (
            f"{_PREFIX}as long as NCCL chooses the same algorithms (NCCL_ALGO=Ring leaves it no choice): the kernels do"
        )
    return f"{_PREFIX}yes, with --deterministic-mode: {again}"


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    installed = {"megatron_sp": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.cuda.is_available():
        installed["cuda"] = str(torch.version.cuda or torch.version.hip)
        installed["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return installed


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    # the model name of the first processor; empty if the system does not report it
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")), "")


def about_no_loss_tokens(config: Config) -> str:
    why = "the data mask all of them"
    if config.data.eod_mask_loss:
        why = "--eod-mask-loss masks all of them: is the id that ends documents the right one (--eod-id)?"
    return f"no token has a loss, so there is none to report: {why}"


class StepReporter:
    """Turns step results into lines and records; rates are over the steps since the last line, without pauses."""

    # flops: (causal, full) FLOPs of a token in sequences of a configuration's length, of a model that is not our own

    def __init__(
        self, config: Config, groups: ParallelGroups, console: Console, metrics: MetricsLog, train_iters: int,
        memory: MemoryEstimate, flops: Callable[[ModelConfig], tuple[float, float]] | None = None,
    ) -> None:  # fmt: skip
        self._flops = flops
        self.graphs_bytes: Callable[[], int] = lambda: 0  # of the pool of captured steps
        self._config, self._groups, self._console, self._metrics = config, groups, console, metrics
        self._train_iters, self._memory, self._lengths = train_iters, memory, list[float]()
        self._causal, self._full = 0.0, 0.0  # FLOPs since the last line
        self._peak, self._peak_name = peak_tflops(config.logging.peak_tflops, groups.device, dtype_of(config))
        self._step_began, self._seconds, self._tokens, self._steps = time.monotonic(), 0.0, 0, 0
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
            model = replace(self._config.model, seq_length=length)
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
        of_both = (r["tflops_causal"], r["tflops_full"])
        causal, full = (f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in of_both)
        return (
            f"step {r['step']}/{self._train_iters} | {loss} | lr {r['lr']:.3e} | grad norm {r['grad_norm']:.3f} |"
            f" {r['tokens_per_s']:,.0f} tokens/s | {causal} TFLOP/s causal,"
            f" {full} full{mfu} | {format_bytes(r['memory_bytes'])}{extra} |"
            f" {format_duration(seconds_left)} left"
        )


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated on its GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class RouterReport:
    loads: list[list[int]]  # tokens of each expert, for each layer with experts
    balance: float | None  # balance term, the mean over layers, 1 for even loads; None: there is none
    z: float | None  # z term, the mean over layers; None: there is none

    @classmethod
    def of(cls, routers: RouterStep, values: Sequence[float], sequences: float, tokens: float) -> RouterReport:
        """Build the report from all ranks' counters."""
        layers, experts = routers.loads.shape
        by = tokens**2 if routers.spec.kind == "global" else sequences
        loads = [[int(load) for load in values[2 + i * experts : 2 + (i + 1) * experts]] for i in range(layers)]
        balance = values[0] / max(by, 1.0) / layers if routers.spec.kind != "none" else None
        return cls(loads, balance, values[1] / max(tokens, 1.0) / layers if routers.spec.z else None)

    def record(self) -> dict[str, Any]:
        """Return the balance of a step: largest load by the mean, idle experts, entropy of the loads."""
        largest = [max(layer) * len(layer) / max(1, sum(layer)) for layer in self.loads]
        idle = [layer.count(0) for layer in self.loads]
        shares = []  # entropy of a layer's loads as a share of that of even loads
        for layer in self.loads:
            if sum(layer) and len(layer) > 1:
                entropy = -sum(load / sum(layer) * math.log(load / sum(layer)) for load in layer if load)
                shares.append(entropy / math.log(len(layer)))
        return {
            "expert_load_max": max(largest), "experts_idle": sum(idle),
            "expert_entropy": sum(shares) / len(shares) if shares else 1.0,
            "balance_loss": self.balance, "z_loss": self.z,
            "expert_load_max_by_layer": [round(load, 4) for load in largest], "experts_idle_by_layer": idle,
        }  # fmt: skip


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
