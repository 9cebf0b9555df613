"""Choice of the overlap mode (--sp-overlap-mode auto): time one block's attention in every mode on the actual link, take the fastest.

Forward and backward run at the real shape with random weights, the modes in turn within each round, so that a temporary
slowdown of the machine affects all of them; the score of a mode is the median over rounds of the slowest rank's time.
Collective; all ranks choose alike.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from megatron_sp.comm.collectives import all_reduce, barrier
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.config.schema import Config
from megatron_sp.models.positions import rotary_of
from megatron_sp.models.transformer import SelfAttention
from megatron_sp.ops.attention import AttentionMask, KernelName
from megatron_sp.parallel.context_plan import RowMask, plan_context
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.heads import OverlapMode
from megatron_sp.parallel.layers import Norm
from megatron_sp.parallel.parallel_context import ParallelContext

Candidate = tuple[OverlapMode, int]

_ROUNDS = 3
_SECONDS = 20.0  # after which no further round begins


def choose_overlap(
    config: Config, groups: ParallelGroups, dtype: torch.dtype, kernel: KernelName = "sdpa"
) -> tuple[OverlapMode, int, str]:  # fmt: skip
    """Time all modes with the attention kernel ``kernel`` and choose the fastest. Collective.

    Returns:
        (mode, number of chunks, a line for the log).
    """
    choices = candidates(config)
    timers = [_Timer(config, groups, candidate, dtype, kernel) for candidate in choices]
    seconds: list[list[float]] = [[] for _ in choices]
    began = time.monotonic()
    for index in range(1 + _ROUNDS):
        for timer, times in zip(timers, seconds, strict=True):
            spent = timer.run()
            if index > 0:  # the first round is for warm-up
                times.append(spent)
        if index > 0 and _max_over_ranks(time.monotonic() - began, groups) > _SECONDS:
            break
    medians = [statistics.median(times) for times in seconds]
    best = min(range(len(choices)), key=lambda i: medians[i])
    listed = ", ".join(f"{words_for(c)} {1e3 * t:.1f} ms" for c, t in zip(choices, medians, strict=True))
    return *choices[best], f"--sp-overlap-mode auto: {words_for(choices[best])} (attention of one block: {listed})"


def choice_from(stored: Any) -> tuple[str, int]:
    """Return the choice stored in a checkpoint of the same layout; ("auto", 2) if there is none."""
    if isinstance(stored, dict) and stored.get("mode") in ("none", "split-qkv", "chunked"):
        chunks = stored.get("chunks")
        if isinstance(chunks, int) and not isinstance(chunks, bool) and 1 <= chunks <= 1024:
            return stored["mode"], chunks
    return "auto", 2


def candidates(config: Config) -> list[Candidate]:
    """Return the modes that auto may choose from, with their numbers of chunks."""
    assert config.model.num_attention_heads
    parallel = config.parallel
    most = config.model.num_attention_heads // parallel.tensor_model_parallel_size // parallel.sequence_parallel_size
    wanted = [parallel.sp_head_chunks] if parallel.sp_head_chunks is not None else [2, 4]
    chunked: list[Candidate] = [("chunked", n) for n in wanted if n <= max(most, 1)]
    return [("none", 1), ("split-qkv", 1), *chunked]


def words_for(candidate: Candidate) -> str:
    """Return the name of a mode in the log."""
    return f"chunked x{candidate[1]}" if candidate[0] == "chunked" else candidate[0]


def _max_over_ranks(seconds: float, groups: ParallelGroups) -> float:
    """Return the maximum over all ranks. Collective."""
    return float(all_reduce(torch.tensor([seconds], dtype=torch.float64), groups.control, "max"))


class _Timer:
    """Attention of one block in one mode, ready to be timed."""

    def __init__(self, config: Config, groups: ParallelGroups, candidate: Candidate, dtype: torch.dtype, kernel: KernelName) -> None:
        model, device = config.model, groups.device
        assert model.seq_length and model.hidden_size
        mode, chunks = candidate
        layout = ParallelContext.of(
            groups, tp_seq=config.parallel.sequence_parallel, mode=mode, num_chunks=chunks, overlap=mode != "none",
            cp_chunks=config.parallel.cp_chunks, cp_stages_ahead=config.parallel.num_stages_ahead, cp_keep_kv=config.parallel.cp_keep_kv,
        )  # fmt: skip
        self.groups = groups
        self.attention = SelfAttention(model, 0, "probe", 0, dtype, layout).to(device)
        self.norm = Norm(model, model.hidden_size, dtype, layout).to(device)
        mask = RowMask(model.seq_length)
        cut = layout.cut(mask)
        positions = cut.tp_seq_slice.stop - cut.tp_seq_slice.start
        self.x = torch.randn(positions, config.batch.micro_batch_size, model.hidden_size, dtype=dtype, device=device, requires_grad=True)
        rotary = rotary_of(model, cut.share(torch.arange(model.seq_length, device=device)), dtype)
        plan = plan_context(mask, cut.shares) if layout.cp.size > 1 else None
        self.ctx = ForwardContext(AttentionMask(), kernel, cut.length, cut.whole, plan, rotary=rotary)

    def run(self) -> float:
        """Return the seconds of one forward and backward pass on the slowest rank."""
        self._synchronize()
        barrier(self.groups.control)
        began = time.perf_counter()
        y, _ = self.attention(self.x, self.ctx, self.norm.in_front(), None)
        y.backward(y.detach())
        self._synchronize()
        return _max_over_ranks(time.perf_counter() - began, self.groups)

    def _synchronize(self) -> None:
        if self.groups.device.type == "cuda":
            torch.cuda.synchronize()
