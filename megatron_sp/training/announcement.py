"""Report of a run's start, to the user, ``metrics.jsonl`` and ``run_status.json``: layout, versions, device, hosts."""

# It also promises whether the same processes compute the same numbers again, to the last bit. On a CPU they do. On a
# GPU attention's backward pass adds gradients in whatever order its blocks come to an end, unless
# --deterministic-mode takes kernels that do not; then what is left is how NCCL sums over ranks.

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_sp import __version__
from megatron_sp.config.schema import Config
from megatron_sp.utils.format import format_count, format_parameters

if TYPE_CHECKING:
    from megatron_sp.training.parts import Run


def announce(run: Run) -> None:
    context, plan, kernel, progress = run.context, run.plan, run.attention.kernel, run.state.progress
    config, groups, launch, hosts = context.config, context.groups, context.launch, context.peers.hosts
    num_params = run.state.num_parameters()
    active = None
    if run.layout.pipeline is not None or config.model.has_experts:  # of which this rank has a part
        from megatron_sp.estimate.flops import count_active_parameters, count_parameters

        num_params = count_parameters(config.model)
        active = count_active_parameters(config.model) if config.model.has_experts else None
    of_token = "" if active is None else f", {format_count(active)} active,"
    context.console.line(
        f"{format_parameters(num_params)} parameters{of_token} in {config.precision.params_dtype}, {groups.world_size}"
        f" x {groups.device.type} (dp {groups.dp_size}{_layout_words(run)}), attention: {kernel.name}"
        f" ({kernel.reason}), global batch {plan.batches.full} x {config.model.seq_length} tokens{_growth(run)}, steps"
        f" {progress.step} to {plan.train_iters}, run folder {context.run_dir}"
    )
    if run.attention.recomputation is not None:
        context.console.line(f"recomputation {run.attention.recomputation}")
    if run.fused.chosen:
        context.console.line(f"fused kernels: {run.fused.describe()}")
    if not config.batch.skip_train:
        context.console.line(about_repeats(config, groups.device.type, groups.world_size, kernel.name))
    fused: dict[str, str] = {kernel.op: kernel.name for kernel in run.fused.chosen}
    run.metrics.write(
        "start", step=progress.step, consumed_samples=progress.consumed_samples, attempt=launch.attempt,
        world_size=groups.world_size, num_params=num_params, active_params=active,
        launch_to_ready_s=time.monotonic() - context.started,
        train_iters=plan.train_iters, config=config.to_dict(),
        environment=environment(groups.device, hosts, run.layout.record, kernel.name, fused),
        attention={
            "kernel": kernel.name, "reason": kernel.reason, "ms": run.attention.milliseconds,
            "recomputation": run.attention.recomputation,
        },
    )  # fmt: skip
    context.status.write(
        "running", step=progress.step, train_iters=plan.train_iters, world_size=groups.world_size, hosts=hosts,
        pids=context.peers.pids,
    )  # fmt: skip


def _growth(run: Run) -> str:
    plan, progress = run.plan, run.state.progress
    size, length = plan.batches.global_batch_size(progress.consumed_samples), run.context.config.model.seq_length or 0
    now = length if plan.curriculum is None else min(length, plan.curriculum.length(progress.step + 1))
    return "" if (size, now) == (plan.batches.full, length) else f" (now {size} x {now})"


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


def environment(
    device: torch.device, hosts: Sequence[str], layout: dict[str, Any], attention: str, kernels: dict[str, str]
) -> dict[str, Any]:
    """Return the description of the environment for ``metrics.jsonl``."""
    return {
        "versions": versions(), "device": device_name(device), "hosts": dict(Counter(hosts)),
        "threads": torch.get_num_threads(), "system": f"{platform.system()} {platform.release()}", "layout": layout,
        "attention": attention, "kernels": kernels,
    }  # fmt: skip


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name() or platform.machine() or "CPU"


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    # the model name of the first processor; empty if the system does not report it
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")), "")
