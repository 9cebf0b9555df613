"""Base class of GPT and BERT: embedding and blocks, as a list of units; a subclass adds the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from megatron_sp.config.schema import KernelConfig, ModelConfig
from megatron_sp.models.attention import SITE_EMBEDDING, SelfAttention
from megatron_sp.models.transformer import TransformerBlock
from megatron_sp.models.unit_order import ends_recomputed, expand_order, recompute_plan, unit_order
from megatron_sp.ops.attention import why_repeated
from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.ops.dropout import DropoutKeys, hash_dropout
from megatron_sp.ops.rotary import RotaryStretch, rotary_tables
from megatron_sp.parallel.forward_context import (
    TABLE,
    ForwardContext,
    StageInput,
    Unit,
    UnitEvents,
    row_mask,
    unit_boundary,
)
from megatron_sp.parallel.layers import Norm, Table, VocabParallelEmbedding, WeightInit
from megatron_sp.parallel.parallel_context import ParallelContext, SequenceCut
from megatron_sp.parallel.pipeline_stages import Stage, whole_model
from megatron_sp.parallel.recompute import recompute
from megatron_sp.parallel.row_mask import RowMask

if TYPE_CHECKING:
    from megatron_sp.parallel.offload import ActivationOffload, OffloadPass
    from megatron_sp.parallel.router_pass import RouterStep

OnUnit = Callable[["LanguageModel", Unit], None]
_Units = list[tuple[int, ...]]  # of each layer


class Embedding(nn.Module):
    """Sum of word, position and segment embeddings, followed by a norm if the blocks are post-norm.

    ``table_only``: just the words' table, for the head of a stage without an embedding.
    """

    def __init__(
        self, config: ModelConfig, seed: int, dtype: torch.dtype, layout: ParallelContext, *, table_only: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        assert config.vocab_size and config.hidden_size
        self.hidden_dropout = config.hidden_dropout
        std, width = config.init_method_std, config.hidden_size
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size, width, WeightInit("embedding.word_embeddings", std, seed, dtype), layout,
            divisible_by=config.make_vocab_size_divisible_by,
        )  # fmt: skip
        self.position_embeddings: Table | None = None
        if config.position_embedding_type == "learned_absolute" and not table_only:
            init = WeightInit("embedding.position_embeddings", std, seed, dtype)
            self.position_embeddings = Table(config.max_positions, width, init, layout)
        self.tokentype_embeddings: Table | None = None
        if config.token_types and not table_only:
            init = WeightInit("embedding.tokentype_embeddings", std, seed, dtype)
            self.tokentype_embeddings = Table(config.token_types, width, init, layout)
        has_norm = config.norm_placement == "post" and not table_only
        self.layernorm = Norm(config, config.hidden_size, dtype, layout) if has_norm else None

    def forward(self, tokens: Tensor, positions: Tensor, ctx: ForwardContext, types: Tensor | None = None) -> Tensor:
        """Embed tokens [s, b] of the tp group at this rank's positions, [s/parts] or [s/parts, b]: [s/parts, b, h]."""
        x = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            embedded = self.position_embeddings(positions)
            x = x + (embedded if positions.ndim == 2 else embedded[:, None, :])
        if self.tokentype_embeddings is not None and types is not None:
            x = x + self.tokentype_embeddings(types)
        x = x if self.layernorm is None else self.layernorm(x)
        if ctx.local_dropout is None:
            return x
        keys, site = ctx.local_dropout.rows(-1, SITE_EMBEDDING)
        return hash_dropout(x, self.hidden_dropout, keys, site=site)


class Blocks(nn.Module):
    """Blocks by their number in the whole model, of which a pipeline rank has some."""

    def __init__(self) -> None:
        super().__init__()
        self._by_number: dict[int, TransformerBlock] = {}

    def add(self, number: int, block: TransformerBlock) -> None:
        self._by_number[number] = block
        self.add_module(str(number), block)

    def __getitem__(self, number: int) -> TransformerBlock:
        return self._by_number[number]

    def __iter__(self) -> Iterator[TransformerBlock]:
        return iter(self._by_number.values())

    def __len__(self) -> int:
        return len(self._by_number)


class Stack(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, layout: ParallelContext, *, has_head: bool) -> None:
        super().__init__()
        assert config.hidden_size
        self.layers = Blocks()
        has_norm = has_head and config.norm_placement == "pre"
        self.final_layernorm = Norm(config, config.hidden_size, dtype, layout) if has_norm else None


class LanguageModel(nn.Module):
    """Embedding, blocks and final norm; the subclass adds a head.

    Args:
        layout: the part of the model and of each sequence that this rank works on; None: all of it.
        on_unit: called with the partly built model and each unit as soon as it is built, so that a unit can be sharded
            (ZeRO) at once and the whole model is never in memory.
        attention: what mixes the positions of every block (``models/attention.py``).
    """

    stack_name = "decoder"  # the blocks' first name in a checkpoint
    embedding: Embedding  # absent on pipeline ranks that neither embed tokens nor share the table

    def __init__(
        self, config: ModelConfig, kernels: KernelConfig, *, seed: int, dtype: torch.dtype,
        layout: ParallelContext | None = None, on_unit: OnUnit | None = None,
        attention: type[SelfAttention] = SelfAttention,
    ) -> None:  # fmt: skip
        super().__init__()
        assert config.num_layers and config.vocab_size and config.hidden_size
        self.config, self.kernels, self.layout, self.params_dtype = config, kernels, layout or ParallelContext(), dtype
        stages = self.stages = self.layout.stages or (whole_model(config.num_layers),)
        self.has_embedding, self.has_head = stages[0].is_first, stages[-1].is_last
        self.shares_table = self.is_tied and self.has_embedding != self.has_head
        # in backward for its norm's weight; with a tied head the embedding is still whole then
        keeps_table = self.is_tied and len(stages) == 1 and stages[0].num_stages == 1
        self._reads_embedding_again = config.norm_placement == "post" and not keeps_table
        self._offload: ActivationOffload | None = None
        self._units: list[Unit] = []
        self._units_of_layer: dict[int, tuple[int, ...]] = {}  # by the layer's number: its own, and its experts'

        def built(unit: Unit) -> None:
            self._units.append(unit)
            if on_unit is not None:
                on_unit(self, unit)

        if self.has_embedding or self.shares_table:
            self.embedding = Embedding(config, seed, dtype, self.layout, table_only=not self.has_embedding)
        if self.has_embedding:
            own: nn.Module = self.embedding
            if self.shares_table:
                # the head is on another rank, or in another stage: the table is a unit of its own, which both have
                children = self.embedding.named_children()
                own = nn.ModuleDict({name: child for name, child in children if name != "word_embeddings"})
            if any(True for _ in own.parameters()):
                built(Unit("embedding", own))
        self.add_module(self.stack_name, Stack(config, dtype, self.layout, has_head=self.has_head))
        for stage in self.stages:
            for layer in range(stage.start, stage.stop):
                name = f"{self.stack_name}.layers.{layer}"
                block = TransformerBlock(config, layer, name, seed, dtype, self.layout, attention)
                self.stack.layers.add(layer, block)
                units = block.units(name)
                self._units_of_layer[layer] = tuple(range(len(self._units), len(self._units) + len(units)))
                for unit in units:
                    built(unit)
        if self.has_head:
            self._build_head(seed, dtype)
            norm = self.stack.final_layernorm
            modules = ({} if norm is None else {"final_layernorm": norm}) | self._head_modules()
            built(Unit("head", nn.ModuleDict(modules)))
        if self.shares_table:
            built(Unit(TABLE, self.embedding.word_embeddings, "whole"))
        self._index = {unit.name: index for index, unit in enumerate(self._units)}

    @property
    def stack(self) -> Stack:
        return cast("Stack", getattr(self, self.stack_name))

    def _build_head(self, seed: int, dtype: torch.dtype) -> None:
        raise NotImplementedError

    def _head_modules(self) -> dict[str, nn.Module]:
        raise NotImplementedError

    @property
    def is_tied(self) -> bool:
        raise NotImplementedError  # the head uses the embedding's table

    def router_step(self, device: torch.device) -> RouterStep | None:
        if not self.config.has_experts:
            return None
        from megatron_sp.models.experts import router_step

        return router_step(self.config, self.layout.ep, device)

    def update_expert_biases(self, loads: Tensor, skip: Tensor | None = None) -> None:
        """Move the routers' biases by a step's tokens of each expert, [layers with experts, E]."""
        from megatron_sp.models.experts import ExpertMLP

        for block in self.stack.layers:
            if isinstance(block.mlp, ExpertMLP):
                block.mlp.router.update_bias(loads[block.mlp.number], self.config.moe_router_bias_update_rate, skip)

    def units(self) -> list[Unit]:
        return list(self._units)

    def units_together(self) -> list[tuple[int, ...]]:
        # used at the same time: a block and its experts
        return [units for units in self._units_of_layer.values() if len(units) > 1]

    def unit_order(self, *, backward: bool) -> list[int]:
        layers, again = len(self.stack.layers), self._reads_embedding_again
        order = unit_order(self.kernels, layers, tied=self.is_tied, backward=backward, embedding_again=again)
        return expand_order(order, [(0,), *self._units_of_layer.values(), (len(self._units) - 1,)])

    def hidden(
        self, tokens: Tensor, ctx: ForwardContext, events: UnitEvents | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Compute the final hidden states [s/(sp * parts), b, h] of this rank's positions from token ids [b, s].

        With ``ctx.stage`` that stage alone is computed, from what the one before has returned.
        """
        stage, x, part = ctx.stage or StageInput(self.stages[0])
        if part == "head":
            assert x is not None, "a head needs the output of the blocks"
            return self._normed(stage, x, events)
        cut = self.cut(tokens, ctx)
        if ctx.cache is not None:  # [s], or [s, b] if they differ between sequences
            positions = ctx.cache.positions(tokens.shape[1], tokens.device).t()
        elif ctx.positions is not None:
            positions = ctx.positions.t()
        else:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        ctx = self._prepare(ctx, positions, cut)
        if x is None:
            assert stage.is_first, f"stage {stage.number} needs the output of the stage before"
            self.use(events, "embedding")
            self.use(events, TABLE)
            segments = None if types is None else cut.take(types.t())[cut.tp_seq_slice]
            x = self.embedding(cut.take(tokens.t())[cut.sp_slice], cut.take(positions)[cut.tp_seq_slice], ctx, segments)
        blocks = self.stack.layers
        layers = [blocks[layer] for layer in range(stage.start, stage.stop)]
        units = [self._units_of_layer[layer] for layer in range(stage.start, stage.stop)]
        offload: OffloadPass | None = None
        if self.kernels.offload_activations and torch.is_grad_enabled():
            from megatron_sp.parallel.offload import ActivationOffload

            self._offload = self._offload or ActivationOffload(x.device)
            offload = self._offload.forward_pass(ctx.rotary or ())
        # the units whose parameters backward reads after those of the layers run next
        below: tuple[int, ...] = (self._index["embedding"],) if stage.is_first and self._reads_embedding_again else ()
        for first, last, again in recompute_plan(self.kernels, len(layers)):
            again = again and torch.is_grad_enabled()
            if first == last:
                continue
            x = unit_boundary(x, events, units[first][:1], below)
            if again:
                run = partial(_recomputed, layers, range(first, last), units, self._with_kept_attention(ctx, x), events)
                x = run(x) if offload is None else offload.run(run, x, tuple, last=last == len(layers))
            else:
                x = _run_layers(layers, range(first, last), units, x, ctx, events, offload)
            below = () if again else units[last - 1]
        if stage.is_last and part == "all":
            x = self._normed(stage, x, events)
        return x

    def _normed(self, stage: Stage, x: Tensor, events: UnitEvents | None) -> Tensor:
        last = () if ends_recomputed(self.kernels, len(stage)) else self._units_of_layer[stage.stop - 1]
        x = unit_boundary(x, events, (self._index["head"],), last)
        self.use(events, "head")
        return x if self.stack.final_layernorm is None else self.stack.final_layernorm(x)

    def stage_order(self, stage: Stage, *, backward: bool, trained: bool = True) -> list[int]:
        # in which a pass of a stage reads its units; backward begins with the head's forward. Not ``trained``: a
        # backward pass does not follow, and the forward pass has the head
        layers = [self._units_of_layer[layer] for layer in range(stage.start, stage.stop)]
        head = [self._index["head"]] if stage.is_last else []
        head += [self._index[TABLE if self.shares_table else "embedding"]] if stage.is_last and self.is_tied else []
        if not backward:
            first = [self._index[name] for name in ("embedding", TABLE) if stage.is_first and name in self._index]
            return [*first, *chain(*layers), *(() if trained else head)]
        again = stage.is_first and self._reads_embedding_again
        back = unit_order(self.kernels, len(stage), tied=False, backward=True)[len(stage) + 2 :]
        return [*head, *chain(*(layers[unit - 1] for unit in back)), *([self._index["embedding"]] if again else [])]

    def before_backward(self, stage: Stage, events: UnitEvents) -> None:
        # reports which unit backward reads first, unless it is the head, which reports itself
        if not stage.is_last and not ends_recomputed(self.kernels, len(stage)):
            for unit in self._units_of_layer[stage.stop - 1]:
                events.before_use(unit)

    def use(self, events: UnitEvents | None, name: str) -> None:
        # its parameters are about to be read, if this rank has it
        if events is not None and name in self._index:
            events.before_use(self._index[name])

    def use_table(self, events: UnitEvents | None) -> None:
        # a tied head is about to read it
        if self.is_tied:
            self.use(events, TABLE if self.shares_table else "embedding")

    def _with_kept_attention(self, ctx: ForwardContext, x: Tensor) -> ForwardContext:
        again, dropout = self.kernels.recompute_attention, 0.0 if ctx.dropout is None else self.config.attention_dropout
        repeated = ctx.repeats_attention or why_repeated(ctx.kernel, x.device, x.dtype, self.config.head_dim, dropout)
        if again == "full" or (repeated and ctx.plan is None):  # attention in pieces has its lse from every kernel
            return ctx
        return replace(ctx, kept=KeptTensors(), keeps_received=again == "none" and self.layout.sp.size > 1)

    def cut(self, tokens: Tensor, ctx: ForwardContext) -> SequenceCut:
        """Return this rank's positions of a micro-batch [b, s]; with cp they follow from the mask."""
        length = tokens.shape[1]
        whole = self.layout.cp.size == 1 and ctx.row_slice is None
        mask = RowMask(length) if whole else row_mask(ctx.mask, length, self.config.window_size)
        return self.layout.cut(mask, ctx.row_slice)

    def _prepare(self, ctx: ForwardContext, positions: Tensor, cut: SequenceCut) -> ForwardContext:
        # ``ctx`` with the values that are computed once per forward pass and shared by all layers
        ctx = replace(ctx, length=cut.length, whole_length=cut.whole, num_tokens=cut.num_tokens)
        if ctx.routers is not None and ctx.routers.replayed is not None:
            rows = torch.arange(cut.whole, device=ctx.routers.replayed.device)
            ctx.routers.rows = cut.take(rows)[cut.tp_seq_slice][: cut.num_tokens]
        if self.layout.cp.size > 1 or ctx.row_slice is not None:
            if ctx.cache is not None:
                raise RuntimeError(
                    "a KV cache holds all positions, and a rank of context parallelism has some:"
                    " generate with one cp rank"
                )
            from megatron_sp.parallel.context_plan import plan_context

            mask = row_mask(ctx.mask, cut.whole, self.config.window_size)
            ctx = replace(ctx, plan=plan_context(mask, cut.shares, cut.keys))
        if ctx.dropout is not None:
            keys = ctx.dropout.token_keys
            local = DropoutKeys(cut.take(keys)[cut.tp_seq_slice])
            ctx = replace(ctx, dropout=DropoutKeys(cut.share(keys)), local_dropout=local)
        if ctx.rotary is None:
            ctx = replace(ctx, rotary=rotary_of(self.config, cut.share(positions), self.params_dtype))
        again = self.kernels.recompute_granularity == "selective" and torch.is_grad_enabled()
        remakes = self.kernels.recompute_qkv and torch.is_grad_enabled()
        return replace(ctx, recompute_core=again, remakes_heads=remakes, mlp_chunks=self.kernels.mlp_chunks)


def rotary_of(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Return cos and sin for positions, int64 [s] or [s, b], in ``dtype``; None without rotary embedding."""
    if config.position_embedding_type != "rope":
        return None
    stretch = RotaryStretch(config.rotary_seq_len_interpolation_factor)
    if config.use_rope_scaling:
        stretch = RotaryStretch(
            config.rope_scaling_factor, config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor,
            config.rope_scaling_original_length,
        )  # fmt: skip
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return rotary_tables(positions, config.rotary_dim, config.rotary_base, wide, stretch)


def _recomputed(
    layers: list[TransformerBlock], which: range, units: _Units, ctx: ForwardContext, events: UnitEvents | None,
    x: Tensor,
) -> Tensor:  # fmt: skip
    draws_random = layers[which.start].self_attention.draws_random(ctx)
    return recompute(_run_layers, layers, which, units, x, ctx, events, draws_random=draws_random, kept=ctx.kept)


def _run_layers(
    layers: list[TransformerBlock], which: range, units: _Units, x: Tensor, ctx: ForwardContext,
    events: UnitEvents | None, offload: OffloadPass | None = None,
) -> Tensor:  # fmt: skip
    # run the blocks ``which``, whose units are ``units``; the caller sets the unit boundary before the first
    for layer in which:
        if layer > which.start:
            x = unit_boundary(x, events, units[layer][:1], units[layer - 1])
        if events is not None:
            for unit in units[layer]:
                events.before_use(unit)
        block, experts = layers[layer], units[layer][1:]
        # experts are reduced under attention's backward
        around = partial(unit_boundary, events=events, units=experts) if experts and events is not None else None
        if offload is None:
            x = block(x, ctx, around)
        else:
            run = partial(block, ctx=ctx, around_experts=around)
            x = offload.run(run, x, block.parameters, last=layer + 1 == len(layers))
    return x
