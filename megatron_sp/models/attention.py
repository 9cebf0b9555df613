"""Attention of a transformer block: projections | plan of the exchange | core.

    projections    a weight that makes q, k and v, whose rows ``FusedQKV`` describes; norms of queries and keys and
                   rotary embedding on what has arrived (``FusedHeads``); and the output projection
    plan           which heads go to which sp rank in which message: ``parallel/heads.py``, from the sections
    core           out [s, m, r, d_v] of q [s, m, r, d], k [s, m, 1, d] and v [s, m, 1, d_v]: ``SoftmaxCore``

Another way of mixing positions is a subclass of ``SelfAttention`` that names its ``core``, and its ``projections`` if
these are others; a model takes it as ``attention=``. Layouts, overlap, recomputation and ZeRO are the same for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec, Sum
from megatron_sp.config.schema import ModelConfig
from megatron_sp.ops.attention import (
    AttentionMask,
    core_attention,
    cut_qkv,
    fold_mask,
    head_row_keys,
    join_qkv,
    lse_kernel,
    split_qkv,
)
from megatron_sp.ops.attention_kernels import KeptTensors, LseKernel
from megatron_sp.ops.dropout import hash_dropout
from megatron_sp.ops.main_grad import MainGrad
from megatron_sp.ops.norm import NormInFront
from megatron_sp.ops.rotary import apply_rotary, rotate_heads
from megatron_sp.parallel.attention_block import attention_block
from megatron_sp.parallel.attention_core import Core, Heads, KernelCall
from megatron_sp.parallel.forward_context import ForwardContext, ResidualDropout
from megatron_sp.parallel.heads import Sections, Share, is_uniform, key_of_each_query
from megatron_sp.parallel.layers import ColumnParallelLinear, Norm, RowParallelLinear, WeightInit, output_std
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.parallel.recompute import recompute
from megatron_sp.parallel.tensor_parallel import TensorParallel
from megatron_sp.parallel.ulysses import ATTENTION, AttentionPlan
from megatron_sp.utils.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sp.parallel.context_plan import ContextPlan

# dropout sites within a layer; the embedding is layer -1
SITE_ATTENTION, SITE_ATTENTION_OUTPUT, SITE_MLP_OUTPUT, SITE_EMBEDDING = 0, 1, 2, 3


class FusedQKV(NamedTuple):
    """The rows of the weight that makes q, k and v, on a tp rank."""

    sections: Sections  # by number of the rank's own rows
    spec: ShardSpec  # which rows of the whole weight [rows, h] these are

    @classmethod
    def in_groups(cls, config: ModelConfig, tp: TensorParallel, v_width: int | None = None) -> FusedQKV:
        """Return those of a weight in group order, [g * (r * d + d + d_v), h], as Megatron-core has it."""
        assert config.hidden_size and config.num_attention_heads
        d, n, g, size = config.head_dim, config.num_attention_heads, config.num_groups, tp.size
        d_v, r, heads = v_width or d, n // g, n // size
        of_group = (r + 1) * d + d_v
        shape = (g * of_group, config.hidden_size)
        if g % size == 0:  # whole groups: a contiguous run of rows
            rows = g // size * of_group
            return cls(Sections.in_groups(r, g // size, d, d_v), ShardSpec.split(shape, 0, ((tp.rank * rows, rows),)))
        # some queries of one group, and the group's key and value, which other ranks hold too
        group, at = divmod(tp.rank * heads, r)
        first = group * of_group
        spec = ShardSpec.split(shape, 0, ((first + at * d, heads * d), (first + r * d, d + d_v)))
        sums, own = (Sum(heads * d, d + d_v, group, g),), heads * d + (d + d_v if at == 0 else 0)
        return cls(Sections.in_groups(heads, 1, d, d_v), replace(spec, sums=sums, counted=((0, own),)))


class SelfAttention(nn.Module):
    """QKV projection, exchange of heads, core, output projection."""

    core: type[FusedHeads]

    def __init__(
        self, config: ModelConfig, layer: int, name: str, seed: int, dtype: torch.dtype, layout: ParallelContext
    ) -> None:
        super().__init__()
        assert config.hidden_size and config.num_attention_heads and config.num_layers  # validate() has seen to it
        if (layout.cp.size > 1 or layout.num_slices > 1) and not self.core.spans_ranks:
            raise ConfigError(
                f"{type(self).__name__} mixes the positions of one rank and one slice of a row: give the ranks of"
                " --context-parallel-size to --sequence-parallel-size, or take another --pipeline-schedule than slices"
            )
        self.layer, self.layout = layer, layout
        self.attention_dropout, self.window = config.attention_dropout, config.window_size
        std, n, d = config.init_method_std, config.num_attention_heads, config.head_dim
        self.first_head = layout.tp.rank * (n // layout.tp.size)
        self.sections, rows = self.projections(config, layout.tp)
        self.queries_per_group, self.v_width = self.sections.queries_per_group, self.sections.v.width
        init = WeightInit(f"{name}.linear_qkv", std, seed, dtype)
        self.linear_qkv = ColumnParallelLinear(rows, init, bias=config.qkv_bias, layout=layout)
        init = WeightInit(f"{name}.linear_proj", output_std(std, config.num_layers), seed, dtype)
        self.linear_proj = RowParallelLinear(
            n * self.v_width, config.hidden_size, init, bias=config.proj_bias, layout=layout
        )
        self.qk_layernorm, self.norms_all_heads = config.qk_layernorm, config.norms_all_heads
        if config.qk_layernorm:
            queries, keys = (n, config.num_groups) if self.norms_all_heads else (1, 1)
            self.q_layernorm = Norm(config, queries * d, dtype, layout, sees="heads")
            self.k_layernorm = Norm(config, keys * d, dtype, layout, sees="heads")
        self.chunks = layout.plan(self.sections, whole=self.norms_all_heads)
        self.main_grad: MainGrad | None = None
        self._plan: AttentionPlan | None = None  # of the pass before

    def projections(self, config: ModelConfig, tp: TensorParallel) -> FusedQKV:
        return FusedQKV.in_groups(config, tp)

    def forward(
        self, x: Tensor, ctx: ForwardContext, norm: NormInFront | None, dropout: ResidualDropout | None
    ) -> tuple[Tensor, Tensor]:
        """Return x + attention(norm(x)), [s, b, h], and x for its other consumers.

        The gradient of that second output is added inside this op, so that of x is complete at once, after all of them.
        """
        plan, layers = self.plan(ctx, add_input=dropout is None), self._modules
        qkv, proj = layers["linear_qkv"].linear(), layers["linear_proj"].linear()  # type: ignore[union-attr, operator]
        out, x = attention_block(x, norm, qkv, proj, self.core(self, ctx), plan, main_grad=self.main_grad)
        return out if dropout is None else dropped_onto(x, out, dropout), x

    def plan(self, ctx: ForwardContext, *, add_input: bool) -> AttentionPlan:
        # that of the pass before, if nothing has changed
        known, heads = self._plan, "remade" if ctx.remakes_heads else "fresh"
        wanted = ctx.length, add_input, heads
        if known is not None and ctx.kept is None and (known.seq_length, known.add_input, known.heads) == wanted:
            return known
        plan = AttentionPlan(
            self.chunks, self.v_width, ctx.length, self.layout.tp, self.layout.sp, add_input=add_input,
            kept=ctx.kept, keeps_received=ctx.keeps_received, heads="remade" if ctx.remakes_heads else "fresh",
        )  # fmt: skip
        if ctx.kept is None:  # what is kept goes with its pass
            self._plan = plan
        return plan

    def draws_random(self, ctx: ForwardContext) -> bool:
        # attention dropout happens inside a kernel, with torch's generator instead of the hash
        return ctx.dropout is not None and self.attention_dropout > 0 and ctx.kernel != "reference"

    def mask(self, ctx: ForwardContext, groups: int) -> AttentionMask:
        if ctx.cache is not None:
            return ctx.cache.mask(groups, self.window)
        mask = fold_mask(ctx.mask, groups)
        return mask if self.window is None else replace(mask, window=self.window)


def dropped_onto(stream: Tensor, branch: Tensor, dropout: ResidualDropout) -> Tensor:
    return hash_dropout(branch, dropout.rate, dropout.rows.keys, site=dropout.rows.site, residual=stream)


class FusedHeads(Core):
    """Heads of a ``FusedQKV`` between the exchanges, for one pass of a layer; a subclass mixes them: ``attend``."""

    # ``attend`` takes into account the positions of other cp ranks and of earlier slices of a row (``ctx.plan``), and a
    # cache of past keys and values (``ctx.cache``)
    spans_ranks = takes_cache = False

    def __init__(self, layer: SelfAttention, ctx: ForwardContext) -> None:
        self.layer, self.ctx = layer, ctx
        self.d, self.d_v, self.r = layer.sections.q.width, layer.sections.v.width, layer.queries_per_group
        if ctx.cache is not None and not self.takes_cache:
            raise ConfigError(f"{type(layer).__name__} has no cache of past positions, which generation needs")
        if layer.qk_layernorm:
            norms = [norm for norm in (layer.q_layernorm, layer.k_layernorm) if norm.main_grad is None]
            self.parameters: Sequence[Tensor] = [p for norm in norms for p in norm.parameters()]

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, share: Share) -> LseKernel | None:
        """Return a kernel that does what ``attend`` does, with a backward that can be called; None: there is none."""
        return None

    def prepare(self, recv_buffers: dict[str, Tensor], share: Share) -> Heads:
        layer, rotary = self.layer, self.ctx.rotary
        q, k, v = self._cut(recv_buffers, share, None if layer.qk_layernorm else rotary)
        if layer.norms_all_heads:
            assert k is not None, "all heads are in one chunk"
            q, k = self._norm_all_heads(q, k, share)
        elif layer.qk_layernorm:
            q, k = layer.q_layernorm(q), None if k is None else layer.k_layernorm(k)
        if layer.qk_layernorm and rotary is not None:
            q, k = self._rotated(q), None if k is None else self._rotated(k)
        if k is None or v is None or is_uniform(share, self.r) or self.ctx.plan is not None:
            return q, k, v
        return q, self._repeated(k, share), self._repeated(v, share)

    def _cut(self, parts: dict[str, Tensor], share: Share, rotary: tuple[Tensor, Tensor] | None) -> Heads:
        d, d_v, queries, groups = self.d, self.d_v, len(share.queries), len(share.keys)
        fused = parts.get("qkv")
        if fused is not None and groups and is_uniform(share, self.r):
            return split_qkv(fused, queries // groups, d, rotary=rotary, v_width=d_v)
        if rotary is not None and d == d_v:  # in place, before others are views of it
            heads = {"qkv": (queries + 2 * groups, queries + groups) if groups else (1, 1), "kv": (2, 1)}
            for part in [part for part in parts if part != "v"]:
                num_heads, num_rotated = heads.get(part, (1, 1))
                parts[part] = self._rotated(parts[part], heads=num_heads, rotated=num_rotated)
        k = v = None
        if "k" in parts:
            q, k, v = parts["q"], parts["k"], parts["v"]
        elif fused is None:  # pairs, as many as the message has: heads that are remade come with others than fresh ones
            q, pairs = parts["q"], parts.get("kv")
            if pairs is not None:
                m = pairs.shape[1] * pairs.shape[2] // (d + d_v)
                k, v = pairs.view(pairs.shape[0], m, d + d_v).split_with_sizes((d, d_v), -1)
        elif groups:  # queries, keys, values, one after another
            q, k, v = parts["qkv"].split_with_sizes([queries * d, groups * d, groups * d_v], -1)
        else:
            q = parts["qkv"]
        if rotary is not None and d != d_v:
            q, k = self._rotated(q.clone()), None if k is None else self._rotated(k.clone())
        if k is None or v is None:
            return self._grouped(q, share), None, None
        return self._grouped(q, share), self._apart(k, d), self._apart(v, d_v)

    def call(
        self, recv_buffers: dict[str, Tensor], share: Share, shared: tuple[Tensor, Tensor] | None
    ) -> KernelCall | None:
        ctx, d, rotary = self.ctx, self.d, self.ctx.rotary
        if self.layer.qk_layernorm or ctx.plan is not None or ctx.recompute_core or ctx.cache is not None:
            return None
        if not is_uniform(share, self.r):
            return None
        fused, queries, groups = recv_buffers.get("qkv"), len(share.queries), len(share.keys)
        if fused is not None and groups:
            q, k, v = cut_qkv(fused, queries // groups, d, None, self.d_v)
        elif fused is not None and shared is not None:
            q, (k, v) = self._grouped(fused, share), shared
        elif "k" in recv_buffers:
            q = self._grouped(recv_buffers["q"], share)
            k, v = self._apart(recv_buffers["k"], d), self._apart(recv_buffers["v"], self.d_v)
        else:
            return None
        kernel = self.kernel(q, k, v, share)
        if kernel is None:  # the buffers are as they were
            return None
        if rotary is not None:
            if fused is not None and groups:
                cut_qkv(fused, queries // groups, d, rotary, self.d_v)
            for part in ("q", "k") if fused is None else () if groups else ("qkv",):
                rotate_heads(recv_buffers[part], *rotary, d)
        return kernel, q, k, v

    def prepare_backward(self, grads: Heads, shapes: dict[str, torch.Size], share: Share) -> dict[str, Tensor]:
        (q, k, v), rotary = grads, self.ctx.rotary
        if k is not None and v is not None and "qkv" in shapes:
            return {"qkv": join_qkv(q, k, v, shapes["qkv"], rotary)}
        by_part = {"qkv": q} if k is None or v is None else {"q": q, "k": k, "v": v}
        gradients = {part: grad.reshape(shapes[part]) for part, grad in by_part.items()}
        for part, grad in gradients.items():
            if rotary is not None and part != "v":
                rotate_heads(grad, *rotary, self.d, back=True)
        return gradients

    def _norm_all_heads(self, q: Tensor, k: Tensor, share: Share) -> tuple[Tensor, Tensor]:
        # norm queries [s, (b g), r, d] and keys [s, (b g), 1, d] over all heads of each token
        from megatron_sp.parallel.all_heads_norm import AllHeadsPlan, HeadRange, norm_all_heads

        layer = self.layer
        tp, sp, norms = layer.layout.tp, layer.layout.sp, (layer.q_layernorm, layer.k_layernorm)
        n, g = (norm.weight.shape[0] // self.d for norm in norms)
        first_key = layer.first_head // (n // g)  # of the tp rank
        # a key head counts on the rank of its first query
        owned = 0
        for key in share.uses:
            first_query = (first_key + key) * (n // g)
            owned += share.queries.start <= key * self.r and first_query >= layer.first_head
        queries = HeadRange(layer.first_head + share.queries.start, len(share.queries), n * self.d)
        ranges = queries, HeadRange(first_key + share.uses.start, owned, g * self.d)

        main_grads, weights = (norms[0].main_grad, norms[1].main_grad), (norms[0].weight, norms[1].weight)
        plan = AllHeadsPlan(ranges, self.d, norms[0].spec, lambda x: sp.all_reduce(tp.all_reduce(x)), main_grads)
        batch = q.shape[1] * q.shape[2] // len(share.queries)
        q_flat, k_flat = (t.reshape(t.shape[0], batch, t.shape[1] // batch * t.shape[2] * self.d) for t in (q, k))
        q_flat, k_flat = norm_all_heads(q_flat, k_flat, weights, plan)
        return q_flat.view(q.shape), k_flat.view(k.shape)

    def _rotated(self, x: Tensor, heads: int = 1, rotated: int = 1) -> Tensor:
        assert self.ctx.rotary is not None
        return apply_rotary(x, *self.ctx.rotary, self.d, heads=heads, rotated=rotated)

    # plain reshapes: every layer of every step comes through here, and einops would take ten times as long as the view;
    # no -1, for there may be no rows
    def _grouped(self, q: Tensor, share: Share) -> Tensor:
        # reshape queries [s, b, (g r d)] to [s, (b g), r, d]; if the groups are uneven, each query is one of its own
        each = len(share.queries) // len(share.uses) if is_uniform(share, self.r) else 1
        return q.reshape(q.shape[0], q.shape[1] * len(share.queries) // each, each, self.d)

    def _apart(self, x: Tensor, width: int) -> Tensor:
        # reshape keys or values [s, b, (g d)] to [s, (b g), 1, d]
        return x.reshape(x.shape[0], x.shape[1] * (x.shape[2] // width), 1, width)

    def _repeated(self, x: Tensor, share: Share) -> Tensor:
        # repeat keys or values [s, (b g), 1, d] to [s, (b queries), 1, d]: one head for each query
        places = key_of_each_query(share, self.r)
        by_group = x.view(x.shape[0], x.shape[1] // len(share.uses), len(share.uses), x.shape[3])
        # not an index: it would have to travel to the GPU each time, and the host to wait for it
        runs = [by_group[:, :, key : key + 1].expand(-1, -1, places.count(key), -1) for key in range(len(share.uses))]
        return torch.cat(runs, dim=2).flatten(1, 2)[:, :, None]


class SoftmaxCore(FusedHeads):
    """softmax(q k^T / sqrt(d)) v under every mask, in one process or over the keys of all cp ranks."""

    spans_ranks = takes_cache = True

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, share: Share) -> LseKernel | None:
        ctx, layer = self.ctx, self.layer
        if ctx.dropout is not None and layer.attention_dropout > 0:
            return None
        kind = layer.window, q.shape, q.stride(), k.shape, v.shape[3]
        if kind not in ctx.lse_kernels:
            mask = layer.mask(ctx, len(share.queries) // q.shape[2])
            ctx.lse_kernels[kind] = lse_kernel(q, k, v, mask, ctx.kernel)
        return ctx.lse_kernels[kind]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Share, kept: KeptTensors | None) -> Tensor:
        if self.ctx.cache is not None:
            k, v = self.ctx.cache.extend(self.layer.layer, k, v)
        # across ranks attention saves no scores, and its exchanges are not repeated
        if self.ctx.recompute_core and self.ctx.plan is None:
            return recompute(self._core, q, k, v, share, None, draws_random=self.layer.draws_random(self.ctx))
        return self._core(q, k, v, share, kept)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, share: Share, kept: KeptTensors | None) -> Tensor:
        ctx, rate, rows = self.ctx, self.layer.attention_dropout, None
        if ctx.dropout is None or rate == 0.0:
            rate = 0.0
        elif ctx.kernel == "reference":  # the others draw
            keys = ctx.dropout.row_keys(self.layer.layer, SITE_ATTENTION)
            groups = len(share.queries) // q.shape[2]
            rows = head_row_keys(keys, groups, q.shape[2], self.layer.first_head + share.queries.start)
        if ctx.plan is not None:
            return self._across_ranks(q, k, v, ctx.plan, share, rate, rows, kept)
        mask = self.layer.mask(ctx, len(share.queries) // q.shape[2])
        return core_attention(q, k, v, mask, kernel=ctx.kernel, dropout=rate, dropout_rows=rows, kept=kept)

    def _across_ranks(
        self, q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, share: Share, rate: float, rows: Tensor | None,
        kept: KeptTensors | None,
    ) -> Tensor:  # fmt: skip
        from megatron_sp.ops.gpu_partial_attention import piece_kernel
        from megatron_sp.parallel.context_parallel import ContextAttention, context_attention, paired

        counts = None if is_uniform(share, self.r) else tuple(Counter(key_of_each_query(share, self.r)).values())
        row_keys = None if rows is None else rows.permute(2, 0, 1)  # [m, r, L] -> [L, m, r]
        row_slice, before = self.ctx.row_slice, None
        if kept is not None and kept.replays:
            out, lse, *received = kept.take("attention")
            before = ContextAttention(out, lse, tuple(received))
        found = context_attention(
            q, paired(k, v), plan, self.layer.layout.cp, piece_kernel(self.ctx.kernel, q, rate, v=v),
            batch=q.shape[1] * q.shape[2] // len(share.queries), counts=counts, row_keys=row_keys, kept=before,
            slices=None if row_slice is None else row_slice.of((self.layer.layer, share.queries.start)),
            cover=self._cover_last_exchange,
        )  # fmt: skip
        if kept is not None and not kept.replays:
            kept.keep("attention", found.out, found.lse, *found.received)
        return found.out

    def _cover_last_exchange(self) -> None:
        tp, main_grad = self.layer.layout.tp, self.layer.main_grad
        if main_grad is not None and self.layer.layout.sp.size == 1:
            tp.mark("mlp")
            main_grad.cover()
            tp.mark(ATTENTION)


SelfAttention.core = SoftmaxCore
