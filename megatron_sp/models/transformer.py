"""The transformer block, in one of three forms:

    pre-norm    y = x + attention(norm(x)), then y + mlp(norm(y))
    parallel    x + attention(norm(x)) + mlp(norm'(x))
    post-norm   y = norm(x + attention(x)), then norm(y + mlp(y))

Activations are [s, b, h], where s is a rank's share of the positions. Parameter names are Megatron-core's. The ops
write weight gradients into ``self.main_grad`` if one has been attached (``attach_main_grad``); everything that a
forward pass needs besides x is in one ``ForwardContext``. Each layer describes its part of its weights
(``shard_specs``); the process groups are in one ``ParallelContext``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec, Sum
from megatron_sp.config.schema import ModelConfig
from megatron_sp.ops.activation import Activation
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
from megatron_sp.parallel.forward_context import ForwardContext, ResidualDropout, Unit
from megatron_sp.parallel.heads import Share, is_uniform, key_of_each_query
from megatron_sp.parallel.init import WeightInit, output_std
from megatron_sp.parallel.layers import ColumnParallelLinear, Norm, RowParallelLinear
from megatron_sp.parallel.linear import Linear, mlp
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.parallel.recompute import recompute
from megatron_sp.parallel.tensor_parallel import TensorParallel
from megatron_sp.parallel.ulysses import ATTENTION, AttentionPlan

if TYPE_CHECKING:
    from megatron_sp.models.experts import ExpertMLP
    from megatron_sp.parallel.context_plan import ContextPlan

# dropout sites within a layer; the embedding is layer -1
SITE_ATTENTION, SITE_ATTENTION_OUTPUT, SITE_MLP_OUTPUT, SITE_EMBEDDING = 0, 1, 2, 3


class SelfAttention(nn.Module):
    """QKV projection, rotary, attention, output projection; the fused weight has rows [g, n/g + 2, d]."""

    def __init__(
        self, config: ModelConfig, layer: int, name: str, seed: int, dtype: torch.dtype, layout: ParallelContext
    ) -> None:
        super().__init__()
        assert config.hidden_size and config.num_attention_heads and config.num_layers  # validate() has seen to it
        self.layer, self.layout = layer, layout
        self.head_dim = d = config.head_dim
        self.attention_dropout, self.window = config.attention_dropout, config.window_size
        std, n = config.init_method_std, config.num_attention_heads
        self.first_head = layout.tp.rank * (n // layout.tp.size)
        self.queries_per_group, self.num_groups, rows = qkv_rows(config, layout.tp)
        init = WeightInit(f"{name}.linear_qkv", std, seed, dtype)
        self.linear_qkv = ColumnParallelLinear(rows, init, bias=config.qkv_bias, layout=layout)
        init = WeightInit(f"{name}.linear_proj", output_std(std, config.num_layers), seed, dtype)
        self.linear_proj = RowParallelLinear(n * d, config.hidden_size, init, bias=config.proj_bias, layout=layout)
        self.qk_layernorm = config.qk_layernorm
        self.norms_all_heads = config.norms_all_heads
        if config.qk_layernorm:
            queries, keys = (n, config.num_groups) if self.norms_all_heads else (1, 1)
            self.q_layernorm = Norm(config, queries * d, dtype, layout, sees="heads")
            self.k_layernorm = Norm(config, keys * d, dtype, layout, sees="heads")
        self.chunks = layout.plan(self.queries_per_group, self.num_groups, whole=self.norms_all_heads)
        self.main_grad: MainGrad | None = None
        self._plan: AttentionPlan | None = None  # of the pass before

    def forward(
        self, x: Tensor, ctx: ForwardContext, norm: NormInFront | None, dropout: ResidualDropout | None
    ) -> tuple[Tensor, Tensor]:
        """Return x + attention(norm(x)), without a norm x + attention(x), both [s, b, h], and x itself for its other consumers.

        The gradient of that second output is added inside this op, so the gradient of x is complete at once, after all
        its consumers.
        """
        plan, (qkv, proj) = self.plan(ctx, add_input=dropout is None), _linears(self, "linear_qkv", "linear_proj")
        out, x = attention_block(x, norm, qkv, proj, AttentionCore(self, ctx), plan, main_grad=self.main_grad)
        return out if dropout is None else dropped_onto(x, out, dropout), x

    def plan(self, ctx: ForwardContext, *, add_input: bool) -> AttentionPlan:
        """Return the plan of a forward pass; that of the pass before, if nothing has changed."""
        known = self._plan
        is_same = known is not None and (known.seq_length, known.add_input, known.remakes_heads) == (
            ctx.length,
            add_input,
            ctx.remakes_heads,
        )
        if known is not None and is_same and ctx.kept is None:
            return known
        plan = AttentionPlan(
            self.chunks, self.head_dim, ctx.length, self.layout.tp, self.layout.sp, add_input=add_input,
            kept=ctx.kept, keeps_received=ctx.keeps_received, remakes_heads=ctx.remakes_heads,
        )  # fmt: skip
        if ctx.kept is None:  # what is kept goes with its pass
            self._plan = plan
        return plan

    def draws_random(self, ctx: ForwardContext) -> bool:
        """Return whether attention dropout happens inside a kernel, with torch's generator instead of the hash."""
        return ctx.dropout is not None and self.attention_dropout > 0 and ctx.kernel != "reference"

    def mask(self, ctx: ForwardContext, groups: int) -> AttentionMask:
        """Return the attention mask of the forward pass for ``groups`` groups of heads, with this layer's window."""
        if ctx.cache is not None:
            return ctx.cache.mask(groups, self.window)
        mask = fold_mask(ctx.mask, groups)
        return mask if self.window is None else replace(mask, window=self.window)


def qkv_rows(config: ModelConfig, tp: TensorParallel) -> tuple[int, int, ShardSpec]:
    """Return (queries per group, groups, rows of the fused QKV weight [g * (r + 2) * d, h]) of a tp rank.

    With fewer key/value heads than ranks, a rank holds some queries of one group and the group's key and value, which
    others hold too.
    """
    assert config.hidden_size and config.num_attention_heads
    d, n, g = config.head_dim, config.num_attention_heads, config.num_groups
    r, heads = n // g, n // tp.size
    shape = ((n + 2 * g) * d, config.hidden_size)
    if g % tp.size == 0:  # whole groups: a contiguous run of rows
        mine = g // tp.size * (r + 2) * d
        return r, g // tp.size, ShardSpec.split(shape, 0, ((tp.rank * mine, mine),))
    group, at = divmod(tp.rank * heads, r)
    row = group * (r + 2)
    rows = ShardSpec.split(shape, 0, (((row + at) * d, heads * d), ((row + r) * d, 2 * d)))
    sums = (Sum(heads * d, 2 * d, group, g),)
    return heads, 1, replace(rows, sums=sums, counted=((0, (heads + 2 if at == 0 else heads) * d),))


class AttentionCore:
    """Core attention of a layer on the heads that arrive from the exchanges (implements ``parallel.ulysses.Core``)."""

    def __init__(self, layer: SelfAttention, ctx: ForwardContext) -> None:
        self.layer, self.ctx, self.r, self.d = layer, ctx, layer.queries_per_group, layer.head_dim
        self.parameters: Sequence[Tensor] = ()
        if layer.qk_layernorm:
            self.parameters = [
                p
                for norm in (layer.q_layernorm, layer.k_layernorm)
                if norm.main_grad is None
                for p in norm.parameters()
            ]

    def prepare(self, recv_buffers: dict[str, Tensor], share: Share) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return queries, keys and values in the layout of the attention kernels; see ``parallel.ulysses.Core``."""
        queries, groups = len(share.queries), len(share.keys)
        rotates_inside = self.ctx.rotary is not None and not self.layer.qk_layernorm
        fused = recv_buffers.get("qkv")
        if "q" in recv_buffers and "k" not in recv_buffers:
            q, k, v = (
                self._grouped(self._rotated(recv_buffers["q"]) if rotates_inside else recv_buffers["q"], share),
                None,
                None,
            )
            if (pairs := recv_buffers.get("kv")) is not None:
                pairs = self._rotated(pairs, heads=2) if rotates_inside else pairs
                k, v = pairs.view(pairs.shape[0], pairs.shape[1] * (pairs.shape[2] // (2 * self.d)), 2, self.d).split(
                    1, dim=2
                )
        elif fused is None:
            q, k, v = (
                self._rotated(recv_buffers[part]) if rotates_inside and part != "v" else recv_buffers[part]
                for part in "qkv"
            )
            q, k, v = self._grouped(q, share), self._apart(k, groups), self._apart(v, groups)
        elif groups == 0:
            q, k, v = self._grouped(self._rotated(fused) if rotates_inside else fused, share), None, None
        elif is_uniform(share, self.r):
            each = queries // groups
            q, k, v = split_qkv(fused, each, self.d, rotary=self.ctx.rotary if rotates_inside else None)
        else:  # queries, keys, values, one after another
            fused = (
                self._rotated(fused, heads=queries + 2 * groups, rotated=queries + groups) if rotates_inside else fused
            )
            q, k, v = fused.split([queries * self.d, groups * self.d, groups * self.d], dim=-1)
            q, k, v = self._grouped(q, share), self._apart(k, groups), self._apart(v, groups)
        if self.layer.norms_all_heads:
            assert k is not None, "all heads are in one chunk"
            q, k = self._norm_all_heads(q, k, share)
        elif self.layer.qk_layernorm:
            q, k = self.layer.q_layernorm(q), None if k is None else self.layer.k_layernorm(k)
        if self.layer.qk_layernorm and self.ctx.rotary is not None:
            q, k = self._rotated(q), None if k is None else self._rotated(k)
        if k is None or v is None or is_uniform(share, self.r) or self.ctx.plan is not None:
            return q, k, v
        return q, self._repeated(k, share), self._repeated(v, share)

    def call(
        self, recv_buffers: dict[str, Tensor], share: Share, shared: tuple[Tensor, Tensor] | None
    ) -> tuple[LseKernel, Tensor, Tensor, Tensor] | None:  # fmt: skip
        """Return the kernel and its arguments; see ``parallel.ulysses.Core``.

        Autograd differentiates norms of queries and keys, attention across ranks, dropout that a kernel draws, and uneven groups.
        """
        ctx, layer, (rotary, d) = self.ctx, self.layer, (self.ctx.rotary, self.d)
        if (
            layer.qk_layernorm
            or ctx.plan is not None
            or ctx.recompute_core
            or ctx.cache is not None
            or not is_uniform(share, self.r)
        ):
            return None
        if ctx.dropout is not None and layer.attention_dropout > 0:
            return None
        fused, queries, groups = recv_buffers.get("qkv"), len(share.queries), len(share.keys)
        if fused is not None and groups:
            q, k, v = cut_qkv(fused, queries // groups, d, None)
        elif fused is not None and shared is not None:
            q, (k, v) = self._grouped(fused, share), shared
        elif "k" in recv_buffers:
            q, k, v = (
                self._grouped(recv_buffers["q"], share),
                *(self._apart(recv_buffers[part], groups) for part in "kv"),
            )
        else:
            return None
        kind = layer.window, q.shape, q.stride(), k.shape
        if kind not in ctx.lse_kernels:
            ctx.lse_kernels[kind] = lse_kernel(q, k, v, layer.mask(ctx, queries // q.shape[2]), ctx.kernel)
        kernel = ctx.lse_kernels[kind]
        if kernel is not None and rotary is not None:
            if fused is not None and groups:
                cut_qkv(fused, queries // groups, d, rotary)
            else:
                rotate_heads(fused if fused is not None else recv_buffers["q"], *rotary, d)
            if fused is None:
                rotate_heads(recv_buffers["k"], *rotary, d)
        return None if kernel is None else (kernel, q, k, v)

    def prepare_backward(
        self, grads: tuple[Tensor, Tensor | None, Tensor | None], shapes: dict[str, torch.Size], share: Share
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return the gradients of what ``call`` has received; see ``parallel.ulysses.Core``."""
        (q, k, v), rotary = grads, self.ctx.rotary
        if k is not None and v is not None and "qkv" in shapes:
            return {"qkv": join_qkv(q, k, v, shapes["qkv"], rotary)}
        of_parts = {"qkv": q} if k is None else {"q": q, "k": k, "v": v}
        found = {part: grad.reshape(shapes[part]) for part, grad in of_parts.items() if grad is not None}
        for part, grad in found.items():
            if rotary is not None and part != "v":
                rotate_heads(grad, *rotary, self.d, back=True)
        return found

    def _norm_all_heads(self, q: Tensor, k: Tensor, share: Share) -> tuple[Tensor, Tensor]:
        # norm queries [s, (b g), r, d] and keys [s, (b g), 1, d] over all heads of each token
        from megatron_sp.parallel.all_heads_norm import AllHeadsPlan, HeadRange, norm_all_heads

        layer, tp, sp = self.layer, self.layer.layout.tp, self.layer.layout.sp
        n, g = layer.q_layernorm.weight.shape[0] // self.d, layer.k_layernorm.weight.shape[0] // self.d
        key = layer.first_head // (n // g)  # of the tp rank
        # a key head counts on the rank of its first query
        owned = sum(
            share.queries.start <= at * self.r and (key + at) * (n // g) >= layer.first_head for at in share.uses
        )
        ranges = (
            HeadRange(layer.first_head + share.queries.start, len(share.queries), n * self.d),
            HeadRange(key + share.uses.start, owned, g * self.d),
        )  # fmt: skip

        def reduce(x: Tensor) -> Tensor:
            x = tp.all_reduce(x)
            return sp.all_reduce(x)

        norms = layer.q_layernorm, layer.k_layernorm
        plan = AllHeadsPlan(ranges, self.d, norms[0].spec, reduce, (norms[0].main_grad, norms[1].main_grad))
        batch = q.shape[1] * q.shape[2] // len(share.queries)
        q_flat, k_flat = (t.reshape(t.shape[0], batch, t.shape[1] // batch * t.shape[2] * self.d) for t in (q, k))
        q_flat, k_flat = norm_all_heads(q_flat, k_flat, (norms[0].weight, norms[1].weight), plan)
        return q_flat.view(q.shape), k_flat.view(k.shape)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Share, kept: KeptTensors | None) -> Tensor:
        """Compute attention; with a KV cache over the keys and values of all positions so far. See ``parallel.ulysses.Core``."""
        if self.ctx.cache is not None:
            k, v = self.ctx.cache.extend(self.layer.layer, k, v)
        if (
            self.ctx.recompute_core and self.ctx.plan is None
        ):  # across ranks attention saves no scores, and its exchanges are not repeated
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
        self, q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, share: Share, rate: float, rows: Tensor | None, kept: KeptTensors | None
    ) -> Tensor:  # fmt: skip
        from megatron_sp.ops.partial_attention_choice import piece_kernel
        from megatron_sp.parallel.context_parallel import ContextAttention, context_attention, paired

        counts = None if is_uniform(share, self.r) else tuple(Counter(key_of_each_query(share, self.r)).values())
        row_keys = None if rows is None else rows.permute(2, 0, 1)  # [m, r, L] -> [L, m, r]
        before = None
        if kept is not None and kept.replays:
            out, lse, *received = kept.take("attention")
            before = ContextAttention(out, lse, tuple(received))
        found = context_attention(
            q, paired(k, v), plan, self.layer.layout.cp, piece_kernel(self.ctx.kernel, q, rate, v=v),
            batch=q.shape[1] * q.shape[2] // len(share.queries), counts=counts, row_keys=row_keys, kept=before,
            slices=None if self.ctx.row_slice is None else self.ctx.row_slice.of((self.layer.layer, share.queries.start)),
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

    def _rotated(self, x: Tensor, heads: int = 1, rotated: int = 1) -> Tensor:
        assert self.ctx.rotary is not None
        return apply_rotary(x, *self.ctx.rotary, self.d, heads=heads, rotated=rotated)

    # plain reshapes: every layer of every step comes through here, and einops would take ten times as long as the view
    def _grouped(self, q: Tensor, share: Share) -> Tensor:
        """Reshape queries [s, b, (g r d)] to [s, (b g), r, d]; if the groups are uneven, each query is a group of its own."""
        each = len(share.queries) // len(share.uses) if is_uniform(share, self.r) else 1
        return q.reshape(
            q.shape[0], q.shape[1] * len(share.queries) // each, each, self.d
        )  # no -1: there may be no rows

    def _apart(self, x: Tensor, groups: int) -> Tensor:
        # reshape keys or values [s, b, (g d)] to [s, (b g), 1, d]
        return x.reshape(x.shape[0], x.shape[1] * groups, 1, self.d)

    def _repeated(self, x: Tensor, share: Share) -> Tensor:
        # repeat keys or values [s, (b g), 1, d] to [s, (b queries), 1, d]: one head for each query
        places = key_of_each_query(share, self.r)
        by_group = x.view(x.shape[0], x.shape[1] // len(share.uses), len(share.uses), self.d)
        # not an index: it would have to travel to the GPU each time, and the host to wait for it
        runs = [by_group[:, :, key : key + 1].expand(-1, -1, places.count(key), -1) for key in range(len(share.uses))]
        return torch.cat(runs, dim=2).flatten(1, 2)[:, :, None]


class MLP(nn.Module):
    """MLP: fc1, activation, fc2; if it is gated, the rows of fc1 are [gate | up]."""

    def __init__(self, config: ModelConfig, name: str, seed: int, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        assert config.hidden_size and config.num_layers
        std, bias, activation = config.init_method_std, config.mlp_bias, Activation(config.activation)
        ffn, mine = config.ffn_size, config.ffn_size // layout.tp.size
        runs = tuple((half * ffn + layout.tp.rank * mine, mine) for half in range(activation.width_factor))
        rows = ShardSpec.split((ffn * activation.width_factor, config.hidden_size), 0, runs)
        self.linear_fc1 = ColumnParallelLinear(
            rows, WeightInit(f"{name}.linear_fc1", std, seed, dtype), bias=bias, layout=layout
        )
        init = WeightInit(f"{name}.linear_fc2", output_std(std, config.num_layers), seed, dtype)
        self.linear_fc2 = RowParallelLinear(
            ffn, config.hidden_size, init, bias=bias, layout=layout, activation=activation
        )
        self.activation, self.tp = activation, layout.tp
        self.main_grad: MainGrad | None = None

    def forward(
        self,
        x: Tensor,
        norm: NormInFront | None,
        dropout: ResidualDropout | None,
        chunks: int = 1,
        onto: Tensor | None = None,
    ) -> Tensor:
        """Return x + mlp(norm(x)), or without a norm x + mlp(x), [s, b, h], computed in ``chunks`` pieces of the positions.

        Args:
            onto: added to the MLP's output instead of x.
        """
        fc1, fc2 = _linears(self, "linear_fc1", "linear_fc2")
        if chunks > 1:
            from megatron_sp.parallel.chunked_mlp import MLPPlan, chunked_mlp

            rate, rows = dropout or (0.0, None)
            plan = MLPPlan(self.activation, chunks, self.tp, rate)
            return chunked_mlp(x, norm, fc1, fc2, plan, rows=rows, onto=onto, main_grad=self.main_grad)
        inside = dropout is None
        out, x = mlp(
            x,
            norm,
            fc1,
            fc2,
            self.activation,
            onto=onto if inside else None,
            add_input=inside,
            tp=self.tp,
            main_grad=self.main_grad,
        )
        return out if dropout is None else dropped_onto(x if onto is None else onto, out, dropout)


def _linears(module: nn.Module, first: str, second: str) -> tuple[Linear, Linear]:
    layers = module._modules
    return layers[first].linear(), layers[second].linear()  # type: ignore[union-attr, operator]


def delayed_weights(model: nn.Module, tp: TensorParallel) -> list[nn.Parameter]:
    """Return the weights of a model's blocks whose gradients are computed under the exchanges of attention's backward (--delay-wgrad).

    They are the MLP's, since its backward comes before attention's. With several tp ranks fc1's is not: it covers the
    reduction of the gradient of fc1's input.
    """
    mlps = [module for module in model.modules() if isinstance(module, MLP)]
    return [linear.weight for mlp in mlps for linear in (mlp.linear_fc2, *((mlp.linear_fc1,) if tp.size == 1 else ()))]


def dropped_onto(stream: Tensor, branch: Tensor, dropout: ResidualDropout) -> Tensor:
    return hash_dropout(branch, dropout.rate, dropout.rows.keys, site=dropout.rows.site, residual=stream)


class TransformerBlock(nn.Module):
    """One transformer block, with norms before attention and MLP, or (--norm-placement post) after them on the residual stream.

    With --use-parallel-residual the MLP has the same input as attention. Backward still reaches the block's input last:
    the attention op passes its input on to the MLP, and waits for the gradients of both.
    """

    def __init__(
        self, config: ModelConfig, layer: int, name: str, seed: int, dtype: torch.dtype, layout: ParallelContext
    ) -> None:
        super().__init__()
        assert config.hidden_size
        self.layer = layer
        layout = layout.in_layer(layer)
        self.hidden_dropout = config.hidden_dropout
        self.post, self.parallel = config.norm_placement == "post", config.use_parallel_residual
        if not self.post:
            self.input_layernorm = Norm(config, config.hidden_size, dtype, layout)
        self.self_attention = SelfAttention(config, layer, f"{name}.self_attention", seed, dtype, layout)
        if self.post:
            self.post_attention_layernorm = Norm(config, config.hidden_size, dtype, layout)
        else:
            self.pre_mlp_layernorm = Norm(config, config.hidden_size, dtype, layout)
        self.mlp: MLP | ExpertMLP
        if layer in config.expert_layers(config.num_layers or 0):
            from megatron_sp.models.experts import ExpertMLP

            self.mlp = ExpertMLP(config, layer, f"{name}.mlp", seed, dtype, layout)
        else:
            self.mlp = MLP(config, f"{name}.mlp", seed, dtype, layout)
        if self.post:
            self.post_mlp_layernorm = Norm(config, config.hidden_size, dtype, layout)

    def forward(
        self, x: Tensor, ctx: ForwardContext, around_experts: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Apply the block to x [s, b, h]; the result has the same shape.

        Args:
            around_experts: identity on the experts' input, which reports in backward that their gradients are complete.
        """
        if self.post:
            x = self.post_attention_layernorm(
                self.self_attention(x, ctx, None, self._dropout(ctx, SITE_ATTENTION_OUTPUT))[0]
            )
            return self.post_mlp_layernorm(self._mlp(x, None, ctx))
        y, x = self.self_attention(x, ctx, self.input_layernorm.in_front(), self._dropout(ctx, SITE_ATTENTION_OUTPUT))
        norm = self.pre_mlp_layernorm.in_front()
        if around_experts is not None:
            x, y = (around_experts(x), y) if self.parallel else (x, around_experts(y))
        return self._mlp(x, norm, ctx, onto=y) if self.parallel else self._mlp(y, norm, ctx)

    def _mlp(self, x: Tensor, norm: NormInFront | None, ctx: ForwardContext, onto: Tensor | None = None) -> Tensor:
        dropout = self._dropout(ctx, SITE_MLP_OUTPUT)
        if isinstance(self.mlp, MLP):
            return self.mlp(x, norm, dropout, ctx.mlp_chunks, onto)
        out, x = self.mlp(x, norm, ctx, onto=onto if dropout is None else None, add_input=dropout is None)
        return out if dropout is None else dropped_onto(x if onto is None else onto, out, dropout)

    def units(self, name: str) -> list[Unit]:
        """Return the block as units: all of it, or its experts apart, which other ranks may have others of."""
        if isinstance(self.mlp, MLP):
            return [Unit(name, self, "block")]
        others = {child: module for child, module in self.named_children() if child != "mlp"}
        others |= {f"mlp_{child}": module for child, module in self.mlp.named_children() if child != "experts"}
        return [Unit(name, nn.ModuleDict(others), "block"), Unit(f"{name}.mlp.experts", self.mlp.experts, "experts")]

    def _dropout(self, ctx: ForwardContext, site: int) -> ResidualDropout | None:
        if ctx.local_dropout is None or self.hidden_dropout == 0.0:
            return None
        return ResidualDropout(self.hidden_dropout, ctx.local_dropout.rows(self.layer, site))
