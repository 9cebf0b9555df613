"""All layouts of a model on a number of GPUs, as configurations that differ from the given one in a few fields."""

# Fields given on the command line are fixed. The others are varied:
#
#     tp                 divisors of the number of GPUs, up to the GPUs of a node and the number of heads; with and
#                        without --sequence-parallel (tp_seq)
#     sp                 divisors of gpus / tp, up to the number of heads
#     cp                 divisors of gpus / (tp * sp), as long as a rank has 1,024 positions of a sequence, up to 128;
#                        with --cp-comm-type auto that with sp is --context-parallel-size
#     pp                 divisors of the number of nodes, up to 16 and the layers; with the simplest schedule and the
#                        shortest
#     ep                 divisors of the number of experts that divide the ranks that have different tokens; of the best
#                        layouts with tokens in two chunks, too
#     exchanges of sp    none, split-qkv, chunked in 2 and 4
#     micro-batch        1, 2, 4, ... sequences
#     ZeRO stage and recomputation, cheapest in time first

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_sp.config.rules import normalize
from megatron_sp.config.rules_layout import can_delay
from megatron_sp.config.schema import Config
from megatron_sp.estimate.pipeline_choice import allowed_schedules

Given = frozenset[tuple[str, str]]  # (group, field) given on the command line

Axes = tuple[int, int, int, int]  # sizes of tp, sp, cp and pp

Saving = tuple[int, str | None]
"""ZeRO stage and recomputation."""

RECOMPUTE: tuple[str | None, ...] = (None, "selective", "full")
TOKENS = 2**20  # tokens of a step without --global-batch-size
FEWEST_POSITIONS = 1024  # of a sequence on a rank of sp x cp: with less too little is computed under an exchange
MOST_CP = 128
MOST_PP = 16
ENOUGH_TOKENS = 32768  # tokens of a rank at a time beyond which products do not get faster


@dataclass(frozen=True, order=True)
class ParallelPlan:
    """A layout that the planner can choose."""

    tp: int = 1
    tp_seq: bool = False
    sp: int = 1
    mode: str = "none"  # of the sp exchanges: "none", "split-qkv" or "chunked"
    chunks: int = 0  # with "chunked"
    zero: int = 0
    recompute: str | None = None
    micro_batch: int = 1
    cp: int = 1
    pp: int = 1
    schedule: str = ""  # of the pipeline
    ep: int = 1  # ranks that share the experts of a layer
    moe_chunks: int = 1  # parts of a rank's tokens that are sent to them one after another

    @property
    def axes(self) -> Axes:
        # sizes of tp, sp, cp and pp
        return self.tp, self.sp, self.cp, self.pp

    def dp(self, gpus: int) -> int:
        # data-parallel size on so many GPUs
        return gpus // math.prod(self.axes)

    def words(self, gpus: int) -> str:
        # layout as text
        dp, mode = self.dp(gpus), "" if self.mode == "none" else f" {self.mode}"
        chunks = f" in {self.moe_chunks} chunks" if self.moe_chunks > 1 else ""
        parts = {
            f"tp {self.tp}{' + seq' if self.tp_seq else ''}": self.tp > 1,
            f"sp {self.sp}{mode}{f' {self.chunks}' if self.chunks else ''}": self.sp > 1, f"cp {self.cp}": self.cp > 1,
            f"pp {self.pp} {self.schedule}": self.pp > 1, f"dp {dp}": dp > 1 or max(self.axes) == 1,
            f"ep {self.ep}{chunks}": self.ep > 1, f"ZeRO {self.zero}": self.zero,
            f"recompute {self.recompute}": self.recompute, f"micro-batch {self.micro_batch}": True,
        }  # fmt: skip
        return ", ".join(part for part, is_said in parts.items() if is_said)

    def flags(self) -> list[str]:
        # layout as flags of pretrain_gpt.py
        flags = {
            f"--tensor-model-parallel-size {self.tp}": self.tp > 1, "--sequence-parallel": self.tp_seq,
            f"--sequence-parallel-size {self.sp}": self.sp > 1, f"--sp-overlap-mode {self.mode}": self.sp > 1,
            f"--context-parallel-size {self.cp}": self.cp > 1,
            f"--pipeline-model-parallel-size {self.pp} --pipeline-schedule {self.schedule}": self.pp > 1,
            f"--expert-model-parallel-size {self.ep}": self.ep > 1,
            f"--moe-chunks {self.moe_chunks}": self.moe_chunks > 1,
            f"--sp-head-chunks {self.chunks}": self.chunks, f"--zero-stage {self.zero}": self.zero,
            f"--recompute-granularity {self.recompute}": self.recompute, f"--micro-batch-size {self.micro_batch}": True,
        }  # fmt: skip
        return [flag for flag, is_given in flags.items() if is_given]

    def apply(self, base: Config) -> Config:
        # a normalised copy of a configuration with this layout
        config = copy.copy(base)  # unchanged sections are shared: a search makes thousands of copies
        parallel, kernels, batch = copy.copy(base.parallel), copy.copy(base.kernels), copy.copy(base.batch)
        config.parallel, config.kernels, config.batch = parallel, kernels, batch
        parallel.tensor_model_parallel_size, parallel.sequence_parallel = self.tp, self.tp_seq
        parallel.sequence_parallel_size, parallel.context_parallel_size = self.sp, self.cp
        parallel.zero_stage, parallel.cp_comm_type = self.zero, None
        parallel.sp_overlap_comm = parallel.split_qkv_linear = False
        parallel.expert_model_parallel_size, parallel.moe_chunks = self.ep, self.moe_chunks
        parallel.pipeline_model_parallel_size = self.pp
        parallel.pipeline_schedule = self.schedule or None  # type: ignore[assignment]
        parallel.sp_overlap_mode = self.mode if self.sp > 1 else None  # type: ignore[assignment]
        parallel.sp_head_chunks = self.chunks or None
        if self.schedule != "slices":
            parallel.pipeline_slices = None
        if self.pp == 1:  # flags about stages that there are not
            parallel.num_virtual_stages_per_pipeline_rank = parallel.num_layers_per_virtual_pipeline_stage = None
            parallel.decoder_first_pipeline_num_layers = parallel.decoder_last_pipeline_num_layers = None
            parallel.pipeline_model_parallel_layout = None
        if self.cp == 1:  # flags about exchanges that there are not
            parallel.cp_chunks, parallel.cp_stages_ahead, parallel.cp_keep_kv = None, None, False
        parallel.delay_wgrad &= can_delay(parallel)
        if self.recompute != kernels.recompute_granularity:
            kernels.recompute_method = kernels.recompute_num_layers = None
        if self.recompute != "full":
            kernels.recompute_attention = "none"
        kernels.recompute_granularity = self.recompute  # type: ignore[assignment]
        kernels.recompute_activations = False
        config.batch.micro_batch_size = self.micro_batch
        return normalize(config)


def default_batch(config: Config, gpus: int) -> int:
    """Return a global batch size of about a million tokens that most layouts of the GPUs can divide evenly."""
    model, micro = config.model, config.batch.micro_batch_size
    assert model.seq_length and model.num_attention_heads
    wanted = max(1, round(TOKENS / (model.seq_length * micro)))
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    sizes = [round(wanted / n) * n for n in divisors if n <= wanted]
    near = [size for size in sizes if abs(size - wanted) <= wanted / 4]  # the last is that of the largest divisor
    # a sequence each, even with all heads on their own
    ranks = gpus // max(n for n in divisors if n <= model.num_attention_heads)
    if near[-1] % ranks:
        return math.ceil(wanted / gpus) * gpus * micro
    return near[-1] * micro


def frames(base: Config, given: Given, gpus: int, per_node: int) -> Iterator[ParallelPlan]:
    """Yield layouts in pp, tp, tp_seq, sp, cp and overlap mode; all else of them has its default."""
    named = {name for _, name in given}
    nodes, most = gpus // per_node, min(MOST_PP, base.model.num_layers or 1)
    # without the flag a stage has whole nodes, where it is the cheapest cut
    pps = [size for size in range(1, nodes + 1) if nodes % size == 0 and (size == 1 or size <= most)]
    if "pipeline_model_parallel_size" in named:
        pps = [base.parallel.pipeline_model_parallel_size]
    for pp in pps:
        for schedule in _schedules(base, pp) if pp > 1 else ("",):
            for frame in _without_stages(base, given, gpus // pp, per_node):
                # Within a pipeline there are many: cp is for one that a flag asks for, and of the modes with which
                # exchanges overlap the best is about the same as without a pipeline.
                is_worth_it = pp == 1 or all((
                    frame.cp == 1 or named & {"context_parallel_size", "cp_comm_type"},
                    frame.tp == 1 or frame.tp_seq or "sequence_parallel" in named,
                    (frame.mode, frame.chunks) in (("none", 0), ("chunked", 2))
                    or named & {"sp_overlap_mode", "sp_overlap_comm", "sp_head_chunks"},
                ))  # fmt: skip
                if is_worth_it:
                    yield replace(frame, pp=pp, schedule=schedule)


def _schedules(base: Config, pp: int) -> tuple[str, ...]:
    # that of the flags, or of all that they allow the simplest one and the shortest
    parallel = base.parallel
    if parallel.pipeline_schedule not in (None, "auto") or parallel.pipeline_slices is not None:
        return (parallel.pipeline_kind,)
    trial = copy.copy(base)
    trial.parallel = replace(parallel, pipeline_model_parallel_size=pp)
    tried = allowed_schedules(trial, 4 * pp)
    return tuple(dict.fromkeys((tried[0].kind, min(tried, key=lambda one: one.time).kind))) if tried else ()


def _without_stages(base: Config, given: Given, gpus: int, per_node: int) -> Iterator[ParallelPlan]:
    parallel, model = base.parallel, base.model
    named, heads = {name for _, name in given}, model.num_attention_heads or 1
    is_fixed = "context_parallel_size" in named and not parallel.measures_split
    fixed = parallel.context_parallel_size if is_fixed else 1

    def splits(name: str, most: int, of: int) -> list[int]:
        if name in named:
            return [getattr(parallel, name)]
        return [size for size in range(1, min(most, heads) + 1) if of % size == 0]

    for tp in splits("tensor_model_parallel_size", per_node, gpus):
        of_tp = gpus // (tp * fixed)
        for sp in splits("sequence_parallel_size", max(1, of_tp), of_tp):
            of_sp = gpus // (tp * sp)
            most = max(1, min(MOST_CP, (model.seq_length or 1) // (FEWEST_POSITIONS * sp)))
            cps = [size for size in range(1, most + 1) if of_sp % size == 0]
            if parallel.measures_split:
                whole = parallel.context_parallel_size
                cps = [whole // sp] if whole % sp == 0 and of_sp % (whole // sp) == 0 else []
            elif is_fixed:
                cps = [fixed]
            tp_seqs = [True, False] if tp > 1 else [False]
            if tp > 1 and "sequence_parallel" in named:
                tp_seqs = [parallel.sequence_parallel]
            for cp in cps:
                for tp_seq in tp_seqs:
                    for mode, chunks in _modes(base, named, heads // (tp * sp), sp):
                        for ep in _eps(base, named, gpus // tp * (tp if tp_seq else 1)):
                            of_experts = parallel.moe_chunks if ep > 1 else 1
                            yield ParallelPlan(tp, tp_seq, sp, mode, chunks, cp=cp, ep=ep, moe_chunks=of_experts)


def _modes(base: Config, named: set[str], heads: int, sp: int) -> list[tuple[str, int]]:
    # the overlap modes to try, with their numbers of chunks
    if sp == 1:
        return [("none", 0)]
    mode = base.parallel.overlap_mode
    if named & {"sp_overlap_mode", "sp_overlap_comm", "split_qkv_linear", "sp_head_chunks"} and mode != "auto":
        return [(mode, (base.parallel.sp_head_chunks or 2) if mode == "chunked" else 0)]
    return [("none", 0), ("split-qkv", 0), *(("chunked", count) for count in (2, 4) if count <= heads)]


def _eps(base: Config, named: set[str], ranks: int) -> list[int]:
    # the ep sizes to try among so many ranks of a stage that have different tokens
    experts = base.model.num_experts
    if not experts:
        return [1]
    if "expert_model_parallel_size" in named:
        return [base.parallel.expert_model_parallel_size]
    return [size for size in range(1, min(ranks, experts) + 1) if ranks % size == 0 == experts % size]


def micro_batches(base: Config, given: Given, dp: int, shares: int) -> list[int]:
    """Return micro-batch sizes that divide the global batch, up to the first that keeps a rank of ``shares`` busy."""
    if ("batch", "micro_batch_size") in given:
        return [base.batch.micro_batch_size]
    each = max(1, (base.batch.global_batch_size or dp) // max(1, dp))
    tokens = (base.model.seq_length or 1) / shares
    powers = [2**i for i in range(11) if i == 0 or tokens * 2 ** (i - 1) < ENOUGH_TOKENS]
    return [size for size in powers if each % size == 0]


def savings(base: Config, given: Given, ranks: int) -> list[Saving]:
    """Return the ZeRO stages and recomputations to try, cheapest first; ``ranks`` have the same parameters."""
    stages = [base.parallel.zero_stage] if ("parallel", "zero_stage") in given else [1, 0, 2, 3] if ranks > 1 else [0]
    fixed = any(("kernels", name) in given for name in ("recompute_granularity", "recompute_activations"))
    kinds = [base.kernels.recompute_granularity] if fixed else RECOMPUTE
    return [(stage, kind) for kind in kinds for stage in stages]


def most_saving(tries: list[Saving]) -> list[Saving]:
    """Return the candidates for least memory: at all stages, since the buffers of stage 3 may exceed what it saves."""
    return [(stage, kind) for stage, kind in tries if kind == tries[-1][1]]


def saves_no_less(one: Saving, other: Saving) -> bool:
    """Return whether ``other`` costs at least as much time as ``one``, so that it is pointless if ``one`` fits."""
    return other != one and other[0] >= one[0] and RECOMPUTE.index(other[1]) >= RECOMPUTE.index(one[1])
