"""Choice of a run's kernels (--attention-backend, --fused-kernels), the same on all ranks."""

# What cannot be had is refused before the first collective.
#
# With several candidates for attention (``ops/attention_choice.py``) each computes forward and backward of one
# block's attention at the run's own shape for about a second in all, in turn within each round; its time is the
# median over rounds of the slowest rank's. A resumed run keeps the kernel of its checkpoint if layout and flag leave
# it the choice: another one would round differently.
#
# With full recomputation the ranks also agree on whether attention's results are kept: with Ulysses, a rank that
# repeats attention would exchange what another does not.

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_sp.comm.collectives import all_reduce, barrier
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.object_collectives import all_ranks_agree, gather_json
from megatron_sp.config.schema import Config
from megatron_sp.ops.attention import AttentionMask, KernelName, attention
from megatron_sp.ops.attention_choice import (
    AttentionKernel,
    AttentionUse,
    Candidates,
    activate,
    chosen,
    find_candidates,
    why_repeated,
)
from megatron_sp.ops.fused_kernels import FusedKernels, KernelUse, choose_fused_kernels
from megatron_sp.ops.kernels.launch import use_triton
from megatron_sp.ops.norm import NormSpec
from megatron_sp.parallel.layers import norm_spec_of, set_norm_kernel
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.launch import Launch

CHOSEN_HERE = ("auto", "flash")
"""Values of --attention-backend that leave a choice."""
NAMED = ("flash", "flash2", "flash3", "flash4", "cudnn")
"""Values that are an error where they cannot be used."""
_SECONDS = 1.0  # after which no further round begins
_ROUNDS = 20
_MOST_TOKENS = 2**16  # of a timed sequence: longer ones take the kernels' time in the same proportion


@dataclass(frozen=True)
class AttentionChoice:
    """The run's attention kernel."""

    kernel: AttentionKernel  # name and reason
    # of one block's attention, forward and backward, by candidate; empty if nothing was timed
    milliseconds: dict[KernelName, float]
    # with --recompute-granularity full, why the recomputation repeats attention; empty if its results are kept. None:
    # no block is recomputed.
    repeated: str | None = None

    @property
    def recomputation(self) -> str | None:
        """Return what a recomputation does with attention, in words, or None if there is none."""
        if self.repeated is None:
            return None
        if not self.repeated:
            return "keeps attention's output and the log of its sums"
        return f"repeats attention: {self.repeated}"


def require_attention(config: Config, launch: Launch, device: torch.device) -> None:
    """Raise ConfigError, once per host, if a named --attention-backend cannot be used."""
    if config.kernels.attention_backend not in NAMED or config.parallel.verify_parallelism:
        return
    try:
        _find(config, device)
    except ConfigError as error:
        error.on_all_ranks = launch.rank == 0  # another rank's GPU or package may be the only one that lacks it
        raise


def choose_attention(
    config: Config, groups: ParallelGroups, before: Any = None, *, measure: bool = True
) -> AttentionChoice:
    """Choose the kernel of all ranks. Collective. Raises ConfigError.

    Args:
        before: the checkpoint's kernel, if it has the same layout.
        measure: time the candidates; else the first is taken.
    """
    choice = _choose(config, groups, before, measure=measure)
    repeated = _why_repeated(choice.kernel.name, config, groups, measure)
    activate(choice.kernel.name if measure else "sdpa")  # examples have put torch's own back
    return replace(choice, repeated=repeated)


def _why_repeated(name: KernelName, config: Config, groups: ParallelGroups, own_blocks: bool) -> str | None:
    # ``AttentionChoice.repeated``, the same on all ranks. Collective
    kernels = config.kernels
    if kernels.recompute_granularity != "full":
        return None
    if kernels.recompute_attention == "full":
        return "asked for (--recompute-attention full)"
    if not own_blocks:
        return "the blocks are not megatron_sp's"
    of_ranks: list[str] = gather_json(why_repeated(name, use_of(config, groups.device)), groups.control)
    alike = len(set(of_ranks)) == 1
    return of_ranks[0] if alike else next(f"rank {rank}: {reason}" for rank, reason in enumerate(of_ranks) if reason)


def _choose(config: Config, groups: ParallelGroups, before: Any, *, measure: bool) -> AttentionChoice:
    with all_ranks_agree(groups.control):
        candidates = _find(config, groups.device)
    own = [list(candidates.names), candidates.lacks, candidates.reason]
    names, lacks = _common(candidates, gather_json(own, groups.control))
    dropout, milliseconds = config.model.attention_dropout, dict[KernelName, float]()
    reason = candidates.reason
    if names != list(candidates.names):
        reason = f"not used: {'; '.join(f'{name}: {why}' for name, why in lacks.items())}"
    _require_not_plain(config, names, reason)
    if config.kernels.attention_backend in CHOSEN_HERE and before in names:
        return AttentionChoice(chosen(before, "as before the resume", dropout), milliseconds)
    if len(names) > 1 and measure:
        milliseconds, failed = _timed(names, config, groups)
        names = sorted(milliseconds, key=lambda name: milliseconds[name]) or ["reference"]
        listed = ", ".join(f"{name} {milliseconds[name]:.3g} ms" for name in names if name in milliseconds)
        reason = f"the fastest: {listed}" if milliseconds else "no other works at this size"
        unused = {**lacks, **failed}
        reason += "".join(f"; {name}: {why}" for name, why in unused.items())
        _require_not_plain(config, names, reason)
    if isinstance(before, str) and before != names[0]:
        reason += f"; {before} before the resume"
    return AttentionChoice(chosen(names[0], reason, dropout), milliseconds)


def _require_not_plain(config: Config, names: list[KernelName], reason: str) -> None:
    # check that a kernel asked for by name is not replaced by plain products; the same on all ranks. Raises ConfigError
    backend = config.kernels.attention_backend
    if backend in NAMED and names == ["reference"]:
        raise ConfigError(
            f"--attention-backend {backend} cannot be used on all ranks: {reason}. Use --attention-backend auto."
        )


def _find(config: Config, device: torch.device) -> Candidates:
    try:
        return find_candidates(config.kernels.attention_backend, use_of(config, device))
    except RuntimeError as error:
        raise ConfigError(str(error)) from None


def use_of(config: Config, device: torch.device) -> AttentionUse:
    """Return what a configuration asks of its attention kernel."""
    model = config.model
    assert model.num_attention_heads
    window = (
        model.window_size if model.window_size is not None and model.window_size < (model.seq_length or 0) else None
    )
    return AttentionUse(
        device, getattr(torch, config.precision.params_dtype), model.attention_dropout, model.head_dim,
        model.num_attention_heads // model.num_groups, not model.is_bert, window, config.data.reset_attention_mask,
        config.kernels.deterministic_mode,
        config.parallel.context_parallel_size > 1 or config.parallel.num_pipeline_slices > 1,
    )  # fmt: skip


def _common(candidates: Candidates, of_ranks: list[list[Any]]) -> tuple[list[KernelName], dict[str, str]]:
    # the candidates of all ranks, in this rank's order, and why others are not; ``reference`` works everywhere
    names = [name for name in candidates.names if all(name in names_there for names_there, _, _ in of_ranks)]
    lacks: dict[str, str] = {}
    for rank, (names_there, reasons, _) in enumerate(of_ranks):
        for name in {name for others, _, _ in of_ranks for name in others}.difference(names_there):
            lacks.setdefault(name, f"rank {rank}: {reasons.get(name) or f'it takes {names_there[0]}'}")
    everywhere = {name: why for name, why in candidates.lacks.items() if name not in lacks}
    return names or ["reference"], {**lacks, **everywhere}


def _timed(
    names: list[KernelName], config: Config, groups: ParallelGroups
) -> tuple[dict[KernelName, float], dict[str, str]]:
    with all_ranks_agree(groups.control):  # one rank may lack the memory
        block = _Block(config, groups)
    failed: dict[str, str] = {}
    for name in names:  # warm-up, in which some kernels are compiled
        own_error = ""
        try:
            block.run(name)
        except Exception as error:  # foreign code, or too little memory for a kernel
            own_error = f"it fails at this size: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        errors = [error for error in gather_json(own_error, groups.control) if error]
        if errors:
            failed[name] = errors[0]
    left = [name for name in names if name not in failed]

    def run(name: KernelName) -> float:
        barrier(groups.control)
        return slowest(block.run(name), groups)

    rounds = _ROUNDS if len(left) > 1 else 1
    medians = (
        time_in_turns([partial(run, name) for name in left], groups, rounds, _SECONDS, warm_up=False) if left else []
    )
    if groups.device.type == "cuda":
        torch.cuda.empty_cache()  # the model's buffers come next
    return {name: 1e3 * seconds for name, seconds in zip(left, medians, strict=True)}, failed


def slowest(seconds: float, groups: ParallelGroups) -> float:
    """Return the largest of all ranks' times. Collective."""
    return float(all_reduce(torch.tensor([seconds], dtype=torch.float64), groups.control, "max"))


def time_in_turns(
    turns: Sequence[Callable[[], float]], groups: ParallelGroups, rounds: int, limit_s: float, *, warm_up: bool = True
) -> list[float]:
    """Return the median seconds of each turn, as it says itself; no round begins after ``limit_s``. Collective."""
    # in turn within each round, so that a temporary slowdown of the machine affects all of them
    seconds: list[list[float]] = [[] for _ in turns]
    began = time.monotonic()
    for index in range(rounds + warm_up):
        for turn, times in zip(turns, seconds, strict=True):
            took = turn()
            if index >= warm_up:
                times.append(took)
        if index >= warm_up and slowest(time.monotonic() - began, groups) > limit_s:
            break
    return [statistics.median(times) for times in seconds]


class _Block:
    """The attention of one block, as a rank computes it, ready to be timed; of the rank with most heads."""

    def __init__(self, config: Config, groups: ParallelGroups) -> None:
        model, parts = config.model, groups.tp.size() * groups.sp.size()
        assert model.num_attention_heads and model.seq_length
        use = use_of(config, groups.device)
        self.device, self.d, self.dropout = groups.device, model.head_dim, model.attention_dropout
        num_groups = -(-model.num_groups // parts)
        self.r = max(1, -(-model.num_attention_heads // parts) // num_groups)
        s, b = min(model.seq_length, _MOST_TOKENS), config.batch.micro_batch_size
        at = torch.arange(s * b * num_groups * (self.r + 2) * self.d, device=self.device, dtype=torch.float32)
        self.qkv = torch.sin(at * 1.7).view(s, b, -1).to(use.dtype).requires_grad_()
        documents = ((s // 2, s),) * b if use.documents and s > 1 else None
        self.mask = AttentionMask(use.causal, documents=documents, window=use.window)

    def run(self, name: KernelName) -> float:
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        activate(name)
        synchronize()
        began = time.perf_counter()
        out = attention(self.qkv, self.r, self.d, self.mask, kernel=name, dropout=self.dropout)
        torch.autograd.grad(out, self.qkv, out.detach())
        synchronize()
        return time.perf_counter() - began


def require_fused_kernels(config: Config, launch: Launch, device: torch.device) -> None:
    """Raise ConfigError, once per host, if --fused-kernels apex or triton cannot be used."""
    if config.kernels.fused_kernels not in ("apex", "triton"):
        return
    model = config.model
    try:
        _choose_fused(config, device, NormSpec(model.normalization, model.norm_epsilon, model.apply_layernorm_1p))
    except ConfigError as error:
        error.on_all_ranks = launch.rank == 0  # another rank's GPU or package may be the only one that lacks it
        raise


def expects_triton(config: Config, device: torch.device) -> bool:
    """Return whether this rank finds Triton's kernels usable for a model of ours."""
    model = config.model
    kernels = _choose_fused(config, device, NormSpec(model.normalization, model.norm_epsilon, model.apply_layernorm_1p))
    return kernels.elementwise is not None and kernels.elementwise.name == "triton"


def use_fused_kernels(config: Config, model: nn.Module, groups: ParallelGroups) -> FusedKernels:
    """Choose the kernels, and set all but AdamW's, which are for the optimizer. Collective; raises ConfigError."""
    with all_ranks_agree(groups.control):
        kernels = _choose_fused(config, groups.device, norm_spec_of(model))
    kernels = kernels.agreed(gather_json([(kernel.name, kernel.reason) for kernel in kernels.chosen], groups.control))
    use_triton(kernels.elementwise is not None and kernels.elementwise.name == "triton")
    if kernels.norm is not None:
        set_norm_kernel(model, "apex" if kernels.norm.name == "apex" else "torch")
    return kernels


def _choose_fused(config: Config, device: torch.device, norm: NormSpec | None) -> FusedKernels:
    dtype = getattr(torch, config.precision.params_dtype)
    use = KernelUse(
        device, dtype, adamw=config.optimizer.optimizer == "adam", offload=config.parallel.offload_optimizer, norm=norm,
        deterministic=config.kernels.deterministic_mode,
    )  # fmt: skip
    try:
        return choose_fused_kernels(config.kernels.fused_kernels, use)
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
