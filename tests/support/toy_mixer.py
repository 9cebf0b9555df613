"""Two mixers that are no part of the package, plugged in by its seam alone (``models/attention.py``).

``DecayMixer`` is no attention: out_t = sum over u <= t of decay^(t - u) (q_t k_u) v_u, with a decay for each head (retention,
arXiv:2307.08621). Its values are wider than its keys, and its projections have rows in an order of their own, all values, all
queries, all keys. ``WideValues`` is attention whose values are of another width.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.config.schema import ModelConfig
from megatron_sp.models.attention import FusedHeads, FusedQKV, SelfAttention
from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.parallel.heads import Section, Sections, Share
from megatron_sp.parallel.tensor_parallel import TensorParallel

V_WIDTH = 10  # keys are six wide


def decays(first_head: int, count: int) -> Tensor:
    """One for each head."""
    return 1 - 0.5 ** (1 + torch.arange(first_head, first_head + count, dtype=torch.float64))


class DecayCore(FusedHeads):
    """As matrices, on the heads of one chunk."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Share, kept: KeptTensors | None) -> Tensor:
        assert self.ctx.mask.causal and self.ctx.mask.documents is None and self.ctx.mask.key_lengths is None
        (m, r), at = q.shape[1:3], torch.arange(q.shape[0])
        of_head = decays(self.layer.first_head + share.queries.start, len(share.queries)).view(-1, r)
        decay = of_head.repeat(m // len(of_head), 1)[..., None, None]  # [m, r, 1, 1]
        distance = at[:, None] - at
        weights = torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0).to(q.dtype)
        scores = torch.einsum("smrd,tmd->mrst", q, k[:, :, 0]) * weights
        return torch.einsum("mrst,tme->smre", scores, v[:, :, 0])


class DecayMixer(SelfAttention):
    core = DecayCore

    def projections(self, config: ModelConfig, tp: TensorParallel) -> FusedQKV:
        assert config.hidden_size and config.num_attention_heads
        counts, widths = (config.num_groups, config.num_attention_heads, config.num_groups), (V_WIDTH, config.head_dim, config.head_dim)
        sizes = [count * width for count, width in zip(counts, widths, strict=True)]
        of_rank = [size // tp.size for size in sizes]
        runs = tuple((start + tp.rank * rows, rows) for start, rows in zip((0, *accumulate(sizes)), of_rank, strict=False))
        starts = (0, *accumulate(of_rank))
        v, q, k = (Section(w, tuple(range(a, b, w))) for w, a, b in zip(widths, starts, starts[1:], strict=False))
        return FusedQKV(Sections(q, k, v), ShardSpec.split((sum(sizes), config.hidden_size), 0, runs))


class WideValues(SelfAttention):
    def projections(self, config: ModelConfig, tp: TensorParallel) -> FusedQKV:
        return FusedQKV.in_groups(config, tp, V_WIDTH)
