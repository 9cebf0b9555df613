"""Dry run (--dry-run): memory and communication of every rank for any number of processes, without starting any.

Both are those of the program itself, which runs on tensors without contents (``planner/fake_run.py``); tests compare
them with real steps. Absurd sizes have their memory by the rough form, and so has what makes the program stumble.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_sp.config.schema import Config
from megatron_sp.estimate import rough
from megatron_sp.estimate.flops import count_active_parameters, count_parameters
from megatron_sp.estimate.layout import layers_of_stages
from megatron_sp.estimate.memory_plan import Device, Line, MemoryPlan
from megatron_sp.estimate.pipeline_choice import settle_schedule
from megatron_sp.estimate.rough import RoughRank
from megatron_sp.estimate.suggestions import find_suggestions, plan_of, with_saves
from megatron_sp.planner.forecast import ASSUMED_GPU, machine_for, settle_overlap
from megatron_sp.planner.timeline import TrafficPlan
from megatron_sp.training.resume import check_model, find_tokenizer, keep_gelu, keep_null_vocabulary, take_model
from megatron_sp.training.resume_point import check_on_paper
from megatron_sp.utils.format import format_bytes, format_count, format_parameters
from megatron_sp.utils.host import host_memory_bytes, swap_bytes

# of the head's tokens, for each of which there are operators; and of processes
_MOST_CHUNKS, _MOST_RANKS = 2**11, 2**16
_PHASES = ("forward", "backward", "update")


@dataclass(frozen=True)
class RunPlan:
    """Predicted needs of a run."""

    config: Config
    world_size: int
    device: Device
    num_params: int  # of the whole model, without rows that pad the vocabulary
    active_params: int  # of these, that a token uses
    params_of_rank: int  # elements in the flat buffers of one tp rank, unsharded
    kept_params: int  # of these, that a rank holds
    num_micro_batches: int
    memory: MemoryPlan
    traffic: TrafficPlan
    remedies: list[tuple[str, int]]  # changes that lower the peak, and the peak with each
    copy_of_saves: int = 0  # bytes of host memory for the copy of --async-save; on CPUs included in ``memory``
    notes: tuple[str, ...] = ()  # ignored flags, and the starting point of the run if that is not obvious
    overlap: str = ""  # mode that --sp-overlap-mode auto counts as, on GPUs; empty: the mode is given
    launches: int = 0  # operators and kernels of a step on a rank's device; 0: not known

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON, in bytes and plain numbers."""
        parallel = self.config.parallel
        layout = {
            "pp": parallel.pipeline_model_parallel_size, "dp": parallel.dp_size(self.world_size),
            "cp": parallel.context_parallel_size, "sp": parallel.sequence_parallel_size,
            "tp": parallel.tensor_model_parallel_size, "tp_seq": parallel.sequence_parallel,
            "zero_stage": parallel.zero_stage,
        }  # fmt: skip
        active = {"active": self.active_params} if self.config.model.has_experts else {}
        layout |= {"ep": parallel.expert_model_parallel_size} if active else {}
        of_rank = {"per_tp_rank": self.params_of_rank, "kept_per_rank": self.kept_params}
        return {
            "world_size": self.world_size, "device": self.device, "layout": layout,
            "micro_batches": self.num_micro_batches, "parameters": {"model": self.num_params, **active, **of_rank},
            "memory": self.memory.as_dict(), "traffic": self.traffic.as_dict(),
            "remedies": [{"flags": flags, "peak": peak} for flags, peak in self.remedies],
            "copy_of_saves": self.copy_of_saves, "launches": self.launches, "notes": list(self.notes),
        }  # fmt: skip

    def text(self) -> str:
        """Return the plan as text."""
        config, memory, parallel = self.config, self.memory, self.config.parallel
        sp, cp, pp = (
            parallel.sequence_parallel_size,
            parallel.context_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
        axes = [f"dp {parallel.dp_size(self.world_size)}"]
        if pp > 1:
            layers = "+".join(map(str, layers_of_stages(config.model, parallel)))
            axes.append(f"pp {pp} ({parallel.pipeline_kind}, layers {layers})")
        tp_seq = " with sequence parallel" if parallel.sequence_parallel else ""
        for name, size, words in (
            ("cp", cp, ""), ("sp", sp, ""), ("tp", parallel.tensor_model_parallel_size, tp_seq),
            ("ep", parallel.expert_model_parallel_size, ""),
        ):  # fmt: skip
            axes += [f"{name} {size}{words}"] if size > 1 else []
        where = f"{'process' if self.world_size == 1 else 'processes'} on {'GPUs' if self.device == 'cuda' else 'CPUs'}"
        tokens, count = f"{config.batch.micro_batch_size} x {config.model.seq_length}", self.num_micro_batches
        micro_batches = f"{count} micro-batch{'' if count == 1 else 'es'} of {tokens} tokens in a step"
        active = f", {format_count(self.active_params)} active" if config.model.has_experts else ""
        peaks = ", ".join(f"{phase} {format_bytes(memory.peak_of(phase))}" for phase in _PHASES)
        worst = f"({memory.worst.phase}: {memory.worst.name}) {format_bytes(memory.worst.num_bytes)} more"
        lines = [
            f"dry run: {self.world_size} {where}: {', '.join(axes)}, ZeRO stage {parallel.zero_stage},"
            f" {config.precision.params_dtype}, {micro_batches}",
            f"parameters: {format_parameters(self.num_params)}{active}; a rank works with"
            f" {format_count(self.params_of_rank)} and keeps {format_count(self.kept_params)}",
            f"memory of a rank: {format_bytes(memory.resident)} stay",
            *_rows(memory.stays),
            f"and at the worst moment {worst}",
            *_rows(memory.worst.lines),
            f"peak: {format_bytes(memory.peak)} ({peaks}); tensors alone: NCCL, the allocator and the program come on"
            " top",
            *self._of_host(), *self._of_traffic(),
        ]  # fmt: skip
        if parallel.overlap_mode == "auto" and sp > 1:
            what = f"{self.overlap}, the fastest by prediction on {ASSUMED_GPU}"
            what = what if self.overlap else "none: on CPUs exchanges and computation share the cores"
            lines.append(f"--sp-overlap-mode auto is resolved by timing when the run starts; here it counts as {what}")
        if parallel.measures_split:
            lines.append(
                "--cp-comm-type auto is resolved by timing when the run starts; here all these ranks count as cp (name"
                " other sizes with --sequence-parallel-size and --context-parallel-size)"
            )
        if self.remedies:
            remedies = (f"{flags}: peak about {format_bytes(peak)}" for flags, peak in self.remedies)
            lines.append(f"less memory: {'; '.join(remedies)}")
        return "\n".join([*lines, *self.notes])

    def _of_host(self) -> list[str]:
        # host memory, and the pool of captured steps
        memory, on_gpu, lines = self.memory, self.device == "cuda", list[str]()
        if self.config.kernels.offload_activations:
            beside = "" if on_gpu else ", which on a CPU is the same memory: nothing is saved"
            activations = format_bytes(memory.host - (self.copy_of_saves if on_gpu else 0))
            lines.append(f"activations in host memory: {activations} of each rank{beside}")
        if memory.graphs:
            pool = "of it in the pool of captured steps, which nothing else uses (--cuda-graphs)"
            lines.append(f"  {pool}: {format_bytes(memory.graphs)}")
        if memory.optimizer_host:
            lines.append(f"the optimizer in host memory: {format_bytes(memory.optimizer_host)} of each rank")
        if self.copy_of_saves:
            where = "host memory, pinned" if on_gpu else "memory, counted above"
            lines.append(
                f"saving in the background: {format_bytes(self.copy_of_saves)} of {where}, are kept on each rank for"
                " the copy (--no-async-save: none, and training waits)"
            )
        return lines

    def _of_traffic(self) -> list[str]:
        traffic, cp, data, lines = self.traffic, self.config.parallel.context_parallel_size, self.config.data, []
        if self.launches:
            lines.append(f"launches of a rank and step: {self.launches:,} operators and kernels")
        if self.world_size == 1:
            lines.append("traffic: none, there is one process")
        elif traffic.flows:
            share = traffic.can_hide / max(traffic.num_bytes, 1)
            lines.append(
                f"traffic of a rank and step: {traffic.number:,} collectives, {format_bytes(traffic.num_bytes)} sent,"
                f" of which {format_bytes(traffic.can_hide)} ({share:.0%}) can run under computation"
            )
        for flow in traffic.flows if self.world_size > 1 else ():
            hides = f"{flow.can_hide / flow.num_bytes:.0%} under {flow.under}" if flow.can_hide else "exposed"
            lines.append(
                f"  {format_bytes(flow.num_bytes):>10}  {flow.number:>7,} x {flow.op} between {flow.ranks}"
                f" ({flow.group}): {flow.kind}; {hides}"
            )
        if cp > 1 and traffic.flows and not any(flow.group == "cp" for flow in traffic.flows):
            lines.append(f"the {cp} cp ranks exchange no keys and values: with this mask a token sees itself alone")
        elif cp > 1 and (data.reset_attention_mask or data.bert_pack_sequences):
            lines.append(
                "over cp each row is counted as one document: what the documents in it do not see is not sent, so a run"
                " sends less"
            )
        return lines


def _rows(lines: Sequence[Line]) -> list[str]:
    held = sorted((line for line in lines if line.num_bytes), key=lambda line: -line.num_bytes)
    return [f"  {format_bytes(line.num_bytes):>10}  {line.name}" for line in held]


def plan_run(config: Config, world_size: int) -> RunPlan:
    """Return the plan of a run whose configuration has been validated for ``world_size`` processes.

    Raises:
        ReportedError: the tokenizer or the checkpoint that determines the model's shape cannot be read.
    """
    notes = complete(config, world_size)
    choice = settle_schedule(config, world_size)
    is_cpu = config.kernels.device == "cpu" or config.parallel.distributed_backend == "gloo"
    device: Device = "cpu" if is_cpu else "cuda"
    settled, overlap = settle_overlap(config, machine_for(world_size)) if device == "cuda" else (config, "")
    rank = max(rough.rough_ranks(settled, world_size, device), key=lambda rank: rank.num_params)
    memory, traffic, launches, why_not = _run(settled, world_size, device, rank)
    kept_params = rank.shard if settled.parallel.zero_stage == 3 else rank.num_params
    # by the rough form, in proportion to what it says of the configuration itself
    share = memory.peak / plan_of(settled, world_size, device).peak
    remedies = [(one.flags, round(share * one.peak)) for one in find_suggestions(settled, world_size, device)]
    notes = [*config.remarks, *notes, choice, why_not, _refused_here(config, world_size, device)]
    return RunPlan(
        config, world_size, device, count_parameters(config.model), count_active_parameters(config.model),
        round(rank.num_params), round(kept_params), rank.count, memory, traffic, remedies,
        rough.copy_bytes(config, world_size), tuple(filter(None, notes)), overlap, launches,
    )  # fmt: skip


def _run(config: Config, world_size: int, device: Device, rank: RoughRank) -> tuple[MemoryPlan, TrafficPlan, int, str]:
    # memory and traffic, how many operators and kernels a step launches (0: not known), and a note
    why_not = ""
    if rank.tokens / min(rank.head_tokens, rank.tokens) > _MOST_CHUNKS or world_size > _MOST_RANKS:
        why_not = "its sizes are too large"
    else:
        from megatron_sp.planner.fake_run import predict  # torch takes a second

        try:
            found = predict(config, world_size, device)
            return with_saves(found.memory, config, world_size, device), found.traffic, found.launches, ""
        except (RuntimeError, TypeError) as error:  # some torch's operator does without contents in another way
            why_not = next(iter(str(error).splitlines()), type(error).__name__)[:160]
    why_not = f"memory is that of a rough form: a step cannot be tried on tensors without contents ({why_not})"
    return plan_of(config, world_size, device), TrafficPlan(()), 0, why_not


def _refused_here(config: Config, world_size: int, device: Device) -> str:
    # a line if this host has too little memory to start all processes of the run; of GPUs nothing is known
    available = host_memory_bytes()
    if available is None or config.kernels.allow_oom or config.batch.skip_train:
        return ""
    order = rough.order_bytes(config, rough.num_samples_of(config))
    need = order + (round(rough.host_need(config, world_size)) * world_size if device == "cpu" else 0)
    if max(need - order, order) <= available + swap_bytes():
        return ""
    return (
        f"this host would refuse to start all of it: {format_bytes(need)} are certainly needed,"
        f" {format_bytes(available)} are available ({rough.HOW_TO_START})"
    )


def complete(config: Config, world_size: int) -> list[str]:
    """Fill in the settings that a run would take from a checkpoint or a tokenizer, and check --load and --save.

    Returns:
        A line about a fresh start that is not obvious from the flags, and about each change of the checkpoint's model.
    Raises:
        ReportedError: checkpoint or tokenizer cannot be read, or the checkpoint's model is another one.
    """
    point = check_on_paper(config)
    stored, notes, is_adopted = None, [point.note] if point.note else [], False
    finetunes = config.checkpoint.finetune and not point.goes_on
    if point.source is not None:
        from megatron_sp.checkpoint.checkpointer import Checkpointer

        stored = Checkpointer(None).read_state(point.source)
        notes += keep_null_vocabulary(stored, config)
    if config.checkpoint.use_checkpoint_args:
        is_adopted = take_model(stored, config, world_size)
    if stored is not None and point.source is not None:
        notes += keep_gelu(stored, config)
        goes_on = not config.batch.skip_train and not finetunes
        find_tokenizer(config.data, stored, point.source, goes_on=goes_on, is_adopted=is_adopted, tell=lambda _: None)
    if config.model.vocab_size is None:
        from megatron_sp.data.tokenizers import build_tokenizer

        config.model.vocab_size = build_tokenizer(config.data).vocab_size
    if stored is not None:
        changes = check_model(stored, config, finetunes=finetunes)
        notes += [f"changed since the checkpoint: {change}" for change in changes if change.startswith("model.")]
    return notes


def dry_run(config: Config, world_size: int, kind: str) -> str:
    """Return the report of a dry run; ``kind`` is "text" or "json"."""
    plan = plan_run(config, world_size)
    return json.dumps(plan.as_dict(), indent=1) if kind == "json" else plan.text()
