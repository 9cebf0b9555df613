"""Choice of the overlap mode, and of the sizes of sp and cp, by timing one block's attention on the actual link.

--sp-overlap-mode auto    the mode of the exchanges of Ulysses
--cp-comm-type auto       sp and cp, whose product is --context-parallel-size, each with its fastest mode and kernel
"""

# Forward and backward run at the real shape with random weights and a row of one document, the candidates in turn
# within each round, so that a temporary slowdown of the machine affects all of them; the score of a candidate is the
# median over rounds of the slowest rank's time. Collective; all ranks choose alike.

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch

from megatron_sp.comm.collectives import barrier
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.config.rules import violations
from megatron_sp.config.rules_layout import with_split
from megatron_sp.config.schema import Config
from megatron_sp.estimate.layout import row_mask_of
from megatron_sp.models.attention import SelfAttention
from megatron_sp.models.language_model import rotary_of
from megatron_sp.ops.attention import AttentionMask, KernelName
from megatron_sp.ops.attention_choice import activate
from megatron_sp.parallel.context_plan import plan_context
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.heads import OverlapMode
from megatron_sp.parallel.layers import Norm
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.training.kernel_selection import choose_attention, slowest, time_in_turns
from megatron_sp.training.setup import dtype_of, layout_groups

Candidate = tuple[OverlapMode, int]
Split = tuple[int, int]  # sizes of sp and cp

_ROUNDS = 3
_SECONDS = 20.0  # after which no further round begins


def choose_overlap(
    config: Config, groups: ParallelGroups, dtype: torch.dtype, kernel: KernelName = "sdpa"
) -> tuple[OverlapMode, int, str]:  # fmt: skip
    """Time all modes and return the fastest, its chunks, and a line for the log. Collective."""
    choices = candidates(config)
    timers = [_Timer(config, groups, candidate, dtype, kernel) for candidate in choices]
    medians = time_in_turns([timer.run for timer in timers], groups, _ROUNDS, _SECONDS)
    best = min(range(len(choices)), key=lambda i: medians[i])
    listed = ", ".join(f"{words_for(c)} {1e3 * t:.1f} ms" for c, t in zip(choices, medians, strict=True))
    return *choices[best], f"--sp-overlap-mode auto: {words_for(choices[best])} (attention of one block: {listed})"


def choose_split(config: Config, groups: ParallelGroups, dtype: torch.dtype) -> tuple[int, int, str]:
    """Time all (sp, cp) of --context-parallel-size; return the fastest and a line for the log. Collective."""
    tried: list[tuple[Split, _Timer]] = []
    with ExitStack() as closing:
        for sp, cp in splits(config, groups.world_size):
            one = with_split(config, sp, cp)
            its_groups = layout_groups(one, groups.device, check=False, control=groups.control)
            closing.callback(its_groups.destroy)
            kernel = choose_attention(one, its_groups).kernel.name
            for candidate in modes_to_try(one):
                tried.append(((sp, cp), _Timer(one, its_groups, candidate, dtype, kernel)))
        medians = time_in_turns([timer.run for _, timer in tried], groups, _ROUNDS, _SECONDS)
    if groups.device.type == "cuda":
        torch.cuda.empty_cache()  # the model's buffers come next
    best: dict[Split, float] = {}
    for (split, _), seconds in zip(tried, medians, strict=True):
        best[split] = min(seconds, best.get(split, seconds))
    sp, cp = min(best, key=lambda split: best[split])
    listed = ", ".join(f"{words_for_split(split)} {1e3 * seconds:.1f} ms" for split, seconds in best.items())
    return sp, cp, f"--cp-comm-type auto: {words_for_split((sp, cp))} (attention of one block: {listed})"


def settle_split(
    config: Config, groups: ParallelGroups, stored: Any, record: dict[str, Any], tell: Callable[[str], None]
) -> ParallelGroups:
    """Set sp and cp, as in the stored layout if it differs from ``record`` in nothing else; return their groups."""
    ranks, others = config.parallel.context_parallel_size, {k: v for k, v in record.items() if k not in ("sp", "cp")}
    kept = split_from(stored, ranks) if isinstance(stored, dict) and others.items() <= stored.items() else None
    if kept is not None:
        sp, cp = kept
        tell(f"--cp-comm-type auto: {words_for_split(kept)}, as before the resume")
    else:
        sp, cp, report = choose_split(config, groups, dtype_of(config))
        tell(report)
    config.parallel = with_split(config, sp, cp).parallel
    if (sp, cp) == (1, ranks):
        return groups
    groups.destroy()
    check = config.parallel.check_collectives
    return layout_groups(config, groups.device, check=check, control=groups.control)


def splits(config: Config, world_size: int) -> list[Split]:
    """Return the (sp, cp) of --context-parallel-size that break no rule."""
    ranks = config.parallel.context_parallel_size
    all_of_them = ((sp, ranks // sp) for sp in range(1, ranks + 1) if ranks % sp == 0)
    return [split for split in all_of_them if not violations(with_split(config, *split), world_size)]


def words_for_split(split: Split) -> str:
    return f"sp {split[0]} x cp {split[1]}"


def split_from(stored: Any, ranks: int) -> Split | None:
    """Return (sp, cp) of a stored layout of as many ranks."""
    # older checkpoints do not name cp
    sizes = [stored.get("sp"), stored.get("cp", 1)] if isinstance(stored, dict) else []
    are_sizes = bool(sizes) and all(type(size) is int and size > 0 for size in sizes)
    return (sizes[0], sizes[1]) if are_sizes and math.prod(sizes) == ranks else None


def choice_from(stored: Any) -> tuple[str, int]:
    """Return the choice stored in a checkpoint; ("auto", 2) if there is none."""
    if isinstance(stored, dict) and stored.get("mode") in ("none", "split-qkv", "chunked"):
        chunks = stored.get("chunks")
        if isinstance(chunks, int) and not isinstance(chunks, bool) and 1 <= chunks <= 1024:
            return stored["mode"], chunks
    return "auto", 2


def candidates(config: Config) -> list[Candidate]:
    """Return the modes that auto may choose from, with their chunks."""
    assert config.model.num_attention_heads
    parallel = config.parallel
    most = config.model.num_attention_heads // parallel.tensor_model_parallel_size // parallel.sequence_parallel_size
    wanted = [parallel.sp_head_chunks] if parallel.sp_head_chunks is not None else [2, 4]
    chunked: list[Candidate] = [("chunked", n) for n in wanted if n <= max(most, 1)]
    return [("none", 1), ("split-qkv", 1), *chunked]


def modes_to_try(config: Config) -> list[Candidate]:
    parallel = config.parallel
    if parallel.sequence_parallel_size == 1:
        return [("none", 1)]
    if parallel.overlap_mode == "auto":
        return candidates(config)
    chunks = parallel.sp_head_chunks or 2 if parallel.overlap_mode == "chunked" else 1
    return [(cast("OverlapMode", parallel.overlap_mode), chunks)]


def words_for(candidate: Candidate) -> str:
    return f"chunked x{candidate[1]}" if candidate[0] == "chunked" else candidate[0]


class _Timer:
    """Attention of one block in one mode, ready to be timed."""

    def __init__(
        self, config: Config, groups: ParallelGroups, candidate: Candidate, dtype: torch.dtype, kernel: KernelName
    ) -> None:
        model, device = config.model, groups.device
        assert model.seq_length and model.hidden_size
        mode, chunks = candidate
        layout = ParallelContext.of(
            groups, tp_seq=config.parallel.sequence_parallel, mode=mode, num_chunks=chunks, overlap=mode != "none",
            cp_chunks=config.parallel.cp_chunks, cp_stages_ahead=config.parallel.num_stages_ahead,
            cp_keep_kv=config.parallel.cp_keep_kv,
        )  # fmt: skip
        self.groups, self.mode = groups, mode
        self.attention = SelfAttention(model, 0, "probe", 0, dtype, layout).to(device)
        self.norm = Norm(model, model.hidden_size, dtype, layout).to(device)
        mask = row_mask_of(model)
        cut = layout.cut(mask)
        positions = cut.tp_seq_slice.stop - cut.tp_seq_slice.start
        self.x = torch.randn(
            positions, config.batch.micro_batch_size, model.hidden_size, dtype=dtype, device=device, requires_grad=True
        )
        rotary = rotary_of(model, cut.share(torch.arange(model.seq_length, device=device)), dtype)
        plan = plan_context(mask, cut.shares) if layout.cp.size > 1 else None
        self.ctx = ForwardContext(AttentionMask(mask.causal), kernel, cut.length, cut.whole, plan, rotary=rotary)

    def run(self) -> float:
        synchronize = torch.cuda.synchronize if self.groups.device.type == "cuda" else lambda: None
        activate(self.ctx.kernel)
        synchronize()
        barrier(self.groups.control)
        began = time.perf_counter()
        y, _ = self.attention(self.x, self.ctx, self.norm.in_front(), None)
        y.backward(y.detach())
        synchronize()
        return slowest(time.perf_counter() - began, self.groups)
