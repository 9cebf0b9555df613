"""Base class of GPT and BERT: embedding and blocks, as a list of units; a subclass adds the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from megatron_sp.config.schema import KernelConfig, ModelConfig
from megatron_sp.models.positions import rotary_of
from megatron_sp.models.transformer import SITE_EMBEDDING, TransformerBlock
from megatron_sp.models.unit_order import recompute_plan, unit_order
from megatron_sp.ops.attention import keeps_results
from megatron_sp.ops.dropout import DropoutKeys, hash_dropout
from megatron_sp.ops.lse_kernels import KeptTensors
from megatron_sp.parallel.context_plan import RowMask, plan_context
from megatron_sp.parallel.forward_context import ForwardContext, Unit, UnitEvents, row_mask, unit_boundary
from megatron_sp.parallel.init import WeightInit
from megatron_sp.parallel.layers import Norm, Table, VocabParallelEmbedding
from megatron_sp.parallel.offload import ActivationOffload, OffloadPass
from megatron_sp.parallel.parallel_context import ParallelContext, SequenceCut
from megatron_sp.parallel.recompute import recompute

OnUnit = Callable[["LanguageModel", Unit], None]


class Embedding(nn.Module):
    """Sum of word and position embeddings (in BERT also segment embeddings), followed by a norm if the blocks are post-norm."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        assert config.vocab_size and config.hidden_size
        self.hidden_dropout = config.hidden_dropout
        std, width = config.init_method_std, config.hidden_size
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size, width, WeightInit("embedding.word_embeddings", std, seed, dtype), layout,
            divisible_by=config.make_vocab_size_divisible_by,
        )  # fmt: skip
        self.position_embeddings: Table | None = None
        if config.position_embedding_type == "learned_absolute":
            init = WeightInit("embedding.position_embeddings", std, seed, dtype)
            self.position_embeddings = Table(config.max_positions, width, init, layout)
        self.tokentype_embeddings: Table | None = None
        if config.token_types:
            init = WeightInit("embedding.tokentype_embeddings", std, seed, dtype)
            self.tokentype_embeddings = Table(config.token_types, width, init, layout)
        self.layernorm = Norm(config, config.hidden_size, dtype, layout) if config.norm_placement == "post" else None

    def forward(self, tokens: Tensor, positions: Tensor, ctx: ForwardContext, types: Tensor | None = None) -> Tensor:
        """Embed this rank's positions.

        Args:
            tokens: ids of the tp group's positions, [s, b].
            positions: position ids of this rank, [s/parts] or [s/parts, b].
            ctx: context of the forward pass.
            types: segments of this rank's positions, [s/parts, b].
        Returns:
            [s/parts, b, h].
        """
        x = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            at = self.position_embeddings(positions)
            x = x + (at if positions.ndim == 2 else at[:, None, :])
        if self.tokentype_embeddings is not None and types is not None:
            x = x + self.tokentype_embeddings(types)
        x = x if self.layernorm is None else self.layernorm(x)
        if ctx.local_dropout is None:
            return x
        return hash_dropout(x, self.hidden_dropout, ctx.local_dropout.row_keys(-1, SITE_EMBEDDING))


class Stack(nn.Module):
    """The blocks, which ``LanguageModel`` adds, and the final norm, if the blocks are pre-norm."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        assert config.hidden_size
        self.layers = nn.ModuleList()
        self.final_layernorm = Norm(config, config.hidden_size, dtype, layout) if config.norm_placement == "pre" else None


class LanguageModel(nn.Module):
    """Embedding, blocks and final norm; the subclass adds a head.

    Args:
        config: shape; ``vocab_size`` must be set.
        kernels: recomputation and chunking.
        seed: for the initial weights.
        dtype: dtype of parameters and activations.
        layout: the part of the model and of each sequence that this rank works on; None: all of it.
        on_unit: called with the partly built model and each unit as soon as it is built, so that a unit can be sharded
            (ZeRO) at once and the whole model is never in memory.
    """

    stack_name = "decoder"
    """The blocks' first name in a checkpoint."""

    def __init__(
        self, config: ModelConfig, kernels: KernelConfig, *, seed: int, dtype: torch.dtype, layout: ParallelContext | None = None,
        on_unit: OnUnit | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert config.num_layers and config.vocab_size and config.hidden_size
        self.config, self.kernels, self.layout = config, kernels, layout or ParallelContext()
        self._offload: ActivationOffload | None = None
        tell = on_unit or (lambda model, unit: None)
        self.embedding = Embedding(config, seed, dtype, self.layout)
        tell(self, Unit("embedding", self.embedding))
        self.add_module(self.stack_name, Stack(config, dtype, self.layout))
        for layer in range(config.num_layers):
            self.stack.layers.append(TransformerBlock(config, layer, f"{self.stack_name}.layers.{layer}", seed, dtype, self.layout))
            tell(self, self._block(layer))
        self._build_head(seed, dtype)
        tell(self, self._head())

    @property
    def stack(self) -> Stack:
        """Stack of transformer blocks."""
        return cast("Stack", getattr(self, self.stack_name))

    def _build_head(self, seed: int, dtype: torch.dtype) -> None:
        """Create the head's modules."""
        raise NotImplementedError

    def _head_modules(self) -> dict[str, nn.Module]:
        """Return the head's modules by name, without the final norm."""
        raise NotImplementedError

    @property
    def is_tied(self) -> bool:
        """True if the head uses the embedding's table."""
        raise NotImplementedError

    def _block(self, layer: int) -> Unit:
        return Unit(f"{self.stack_name}.layers.{layer}", self.stack.layers[layer], alike=True)

    def _head(self) -> Unit:
        norm = self.stack.final_layernorm
        return Unit("head", nn.ModuleDict(({} if norm is None else {"final_layernorm": norm}) | self._head_modules()))

    def units(self) -> list[Unit]:
        """Return the model's units in the order of the forward pass; every parameter is in exactly one."""
        return [Unit("embedding", self.embedding), *(self._block(i) for i in range(len(self.stack.layers))), self._head()]

    def unit_order(self, *, backward: bool) -> list[int]:
        """Return the unit indices in the order in which a pass reads their parameters, as it reports them to ``UnitEvents``.

        Args:
            backward: include the backward pass; else the forward pass only.
        """
        layers, again = len(self.stack.layers), self._reads_embedding_again
        return unit_order(self.kernels, layers, tied=self.is_tied, backward=backward, embedding_again=again)

    @property
    def _reads_embedding_again(self) -> bool:
        """True if backward must fetch the embedding again for its norm's weight; with a tied head the embedding is still whole then."""
        return self.embedding.layernorm is not None and not self.is_tied

    def hidden(self, tokens: Tensor, ctx: ForwardContext, events: UnitEvents | None = None, types: Tensor | None = None) -> Tensor:
        """Compute the final hidden states [s/(sp * parts), b, h] of this rank's positions from token ids (and segments) [b, s]."""
        cut = self.cut(tokens, ctx)
        positions = self._positions(tokens, ctx)
        ctx = self._prepare(ctx, positions, cut)
        if events is not None:
            events.before_use(0)
        mine = None if types is None else cut.take(types.t())[cut.tp_seq_slice]
        x = self.embedding(cut.take(tokens.t())[cut.sp_slice], cut.take(positions)[cut.tp_seq_slice], ctx, mine)
        layers = cast("list[TransformerBlock]", list(self.stack.layers))
        offload = self._offload_pass(x, ctx)
        # the unit whose parameters backward reads after those of the layers run next
        below: int | None = 0 if self._reads_embedding_again else None
        for first, last, again in recompute_plan(self.kernels, len(layers)):
            again = again and torch.is_grad_enabled()
            if first == last:
                continue
            x = unit_boundary(x, events, first + 1, below)
            if again:
                run = partial(_recomputed, layers, range(first, last), self._with_kept_attention(ctx, x), events)
                x = run(x) if offload is None else offload.run(run, x, tuple, last=last == len(layers))
            else:
                x = _run_layers(layers, range(first, last), x, ctx, events, offload)
            below = None if again else last
        x = unit_boundary(x, events, len(layers) + 1, below)
        if events is not None:
            events.before_use(len(layers) + 1)
        if self.stack.final_layernorm is not None:
            x = self.stack.final_layernorm(x)
        if ctx.cache is not None:
            ctx.cache.advance(tokens.shape[1])
        return x

    def _with_kept_attention(self, ctx: ForwardContext, x: Tensor) -> ForwardContext:
        """Return the context of recomputed blocks, which keep attention's results where the kernel has them (--recompute-attention)."""
        again, dropout = self.kernels.recompute_attention, 0.0 if ctx.dropout is None else self.config.attention_dropout
        gives_lse = not ctx.repeats_attention and keeps_results(ctx.kernel, x.device, x.dtype, self.config.head_dim, dropout)
        if again == "full" or not (gives_lse or ctx.plan is not None):  # attention in pieces has it from every kernel
            return ctx
        return replace(ctx, kept=KeptTensors(), keeps_received=again == "none" and self.layout.sp.size > 1)

    def cut(self, tokens: Tensor, ctx: ForwardContext) -> SequenceCut:
        """Return this rank's positions of a micro-batch [b, s]; with cp they follow from the mask, alike on all ranks of a replica."""
        length = tokens.shape[1]
        return self.layout.cut(RowMask(length) if self.layout.cp.size == 1 else row_mask(ctx.mask, length, self.config.window_size))

    def _positions(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the position ids of the tokens: [s], or [s, b] if they differ between sequences."""
        if ctx.cache is not None:
            return ctx.cache.positions(tokens.shape[1], tokens.device).t()
        return torch.arange(tokens.shape[1], device=tokens.device) if ctx.positions is None else ctx.positions.t()

    def _offload_pass(self, x: Tensor, ctx: ForwardContext) -> OffloadPass | None:
        """Return the offload of this forward pass, or None unless activations are kept in host memory (--offload-activations)."""
        if not self.kernels.offload_activations or not torch.is_grad_enabled():
            return None
        self._offload = self._offload or ActivationOffload(x.device)
        return self._offload.forward_pass(ctx.rotary or ())

    def _prepare(self, ctx: ForwardContext, positions: Tensor, cut: SequenceCut) -> ForwardContext:
        """Return ``ctx`` with the values that are computed once per forward pass and shared by all layers."""
        dtype = self.embedding.word_embeddings.weight.dtype
        ctx = replace(ctx, length=cut.length, whole_length=cut.whole)
        if self.layout.cp.size > 1:
            if ctx.cache is not None:
                raise RuntimeError("a KV cache holds all positions, and a rank of context parallelism has some: generate with one cp rank")
            ctx = replace(ctx, plan=plan_context(row_mask(ctx.mask, cut.whole, self.config.window_size), cut.shares))
        if ctx.dropout is not None:
            keys = ctx.dropout.token_keys
            ctx = replace(ctx, dropout=DropoutKeys(cut.share(keys)), local_dropout=DropoutKeys(cut.take(keys)[cut.tp_seq_slice]))
        if ctx.rotary is None:
            ctx = replace(ctx, rotary=rotary_of(self.config, cut.share(positions), dtype))
        again = self.kernels.recompute_granularity == "selective" and torch.is_grad_enabled()
        remakes = self.kernels.recompute_qkv and torch.is_grad_enabled()
        return replace(ctx, recompute_core=again, remakes_heads=remakes, mlp_chunks=self.kernels.mlp_chunks)


def _recomputed(layers: list[TransformerBlock], which: range, ctx: ForwardContext, events: UnitEvents | None, x: Tensor) -> Tensor:
    draws_random = layers[which.start].self_attention.draws_random(ctx)
    return recompute(_run_layers, layers, which, x, ctx, events, draws_random=draws_random, kept=ctx.kept)


def _run_layers(
    layers: list[TransformerBlock], which: range, x: Tensor, ctx: ForwardContext, events: UnitEvents | None,
    offload: OffloadPass | None = None,
) -> Tensor:  # fmt: skip
    """Run the blocks ``which``, whose units are numbered from 1; the caller sets the unit boundary before the first."""
    for layer in which:
        if layer > which.start:
            x = unit_boundary(x, events, layer + 1, layer)
        if events is not None:
            events.before_use(layer + 1)
        block = layers[layer]
        x = block(x, ctx) if offload is None else offload.run(partial(block, ctx=ctx), x, block.parameters, last=layer + 1 == len(layers))
    return x
