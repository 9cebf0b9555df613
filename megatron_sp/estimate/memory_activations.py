"""Activations that blocks save for backward: where they are during backward, with recomputation and with host memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from megatron_sp.estimate.memory_attention import AttentionForm
from megatron_sp.estimate.memory_experts import WHO
from megatron_sp.estimate.memory_plan import Line, merged, total
from megatron_sp.estimate.memory_shape import RankShape
from megatron_sp.models.unit_order import recompute_plan
from megatron_sp.utils.remembered import remembered

FOR_LATER = "keys and values for later slices"
Stage = tuple[int, int, bool]  # (first block, last + 1, recomputed)


class ActivationForm:
    """Activations saved by blocks, in bytes.

    Args:
        shape: sizes of the rank.
        attention: sizes of a block's attention.
    """

    def __init__(self, shape: RankShape, attention: AttentionForm) -> None:
        self.shape, self.attention, self.kernels = shape, attention, shape.kernels

    # of one block

    def remakes_heads(self, *, again: bool) -> bool:
        """Return whether a block makes q, k and v again in backward; ``again``: the block is a recomputed one, in its second pass."""
        return self.kernels.recompute_qkv or (again and self.attention.keeps_results)

    @remembered
    def attention_keeps(self, *, again: bool) -> list[Line]:
        """Return the activations that the attention of a block saves; ``again`` as in ``remakes_heads``."""
        shape, attention = self.shape, self.attention
        joined = attention.out_whole if attention.joins else 0
        keys = 2 * 4 * shape.tp_seq_tokens if shape.dropout and not shape.fused else 0
        heads = 0 if self.remakes_heads(again=again) else sum(attention.recv_buffers) + attention.made_heads
        if not again and heads:
            heads -= attention.kept_keys  # they are parts of what has arrived
        return [
            Line("residual stream", shape.stream), Line("q, k, v", heads),
            Line("attention output", sum(attention.outs)), Line("attention output, all heads of my positions", joined),
            Line("attention kernel's own", attention.kernel_keeps), Line("keys and values of other ranks", attention.received),
            Line("dropout keys", keys), Line(FOR_LATER, attention.kept_keys),
        ]  # fmt: skip

    @remembered
    def mlp_keeps(self, layer: int) -> list[Line]:
        """Return the activations that the MLP of a block saves, or its experts; of both the stream comes first."""
        shape, experts = self.shape, self.shape.experts_of(layer)
        stream = 0 if shape.parallel_residual else shape.stream
        if experts is not None:
            return experts.keeps(stream)
        wide = 0 if shape.chunked else shape.sp_tokens * shape.ffn_in * shape.e
        return [Line("residual stream", stream), Line("MLP, before the activation", wide)]

    @property
    def norm_behind(self) -> Line:
        """Activations saved by the norm after attention or MLP; 0 bytes without one."""
        return Line("inputs of norms", self.shape.stream + self.shape.norm_stats if self.shape.post else 0)

    def block_keeps(self, layer: int, *, again: bool) -> list[Line]:
        """Return the activations that a block saves; ``again`` as in ``remakes_heads``."""
        return [*self.attention_keeps(again=again), self.norm_behind, *self.mlp_keeps(layer), self.norm_behind]

    @remembered
    def _all_of(self, *, experts: bool, again: bool) -> int:
        """Return the bytes that a block saves, with or without experts."""
        has = self.shape.share.experts
        return total(self.block_keeps(has.index(experts) if has else 0, again=again))

    def _block_total(self, layer: int, *, again: bool) -> int:
        return self._all_of(experts=self.shape.experts_of(layer) is not None, again=again)

    @property
    def embedding_norm(self) -> Line:
        """Activations saved by the embedding norm of a post-norm model, held throughout forward and backward."""
        is_there = self.shape.post and self.shape.share.has_embedding
        return Line("embedding norm's input", self.shape.stream + self.shape.norm_stats if is_there else 0)

    # of all blocks

    @remembered
    def kept_by_blocks(self) -> list[Line]:
        """Return the activations of all blocks at the end of the forward pass."""
        recomputed: Sequence[int] = [layer for layer in range(self.shape.layers) if self._is_again(layer)]
        num_recomputed, inputs = len(recomputed), len(self.shape.recomputed)
        first, last, again = self.stages[-1]
        if self.offloads:  # only the last stage is on the device
            inputs, recomputed = int(again), range(first, last) if again else ()
        of_moved = 1 - inputs
        kept = list[Line]()
        for layers in self._alike:
            block_keeps = self.block_keeps(layers[0], again=False)
            here = (
                {line.name for line in block_keeps} - {line.name for line in self._stay_of_block(layers[0])}
                if self.offloads
                else set()
            )
            stored = sum(not self._is_again(layer) for layer in layers)
            mine = (of_moved if self.shape.layers - 1 in layers else 0) if self.offloads else stored
            kept += [
                Line(line.name, (mine if line.name in here else stored) * line.num_bytes)
                for line in merged(block_keeps)
            ]
        inside = [Line("inputs of recomputed blocks", inputs * self.shape.stream), self._results(recomputed)]
        moved = num_recomputed - len(recomputed)
        return [*merged(kept), *inside, Line(FOR_LATER, moved * self.attention.kept_keys), self.embedding_norm]

    @cached_property
    def _alike(self) -> list[list[int]]:
        """Layers that save the same: those without experts, and those with."""
        kinds = [
            [layer for layer in range(self.shape.layers) if (self.shape.experts_of(layer) is not None) is has]
            for has in (False, True)
        ]
        return [layers for layers in kinds if layers] or [[0]]

    def _is_again(self, layer: int) -> bool:
        return layer in self.shape.made_again

    @remembered
    def kept_below(self, layer: int) -> list[Line]:
        """Return the activations of all blocks below one while backward is in that block."""
        if self.offloads:
            return self._left_below(layer)
        chunks = self.shape.recomputed
        recomputed = {i: first for first, last in chunks for i in range(first, last)}
        inputs = sum(first <= layer and first != recomputed.get(layer) for first, _ in chunks)
        stored = sum(self._block_total(i, again=False) for i in range(layer) if i not in recomputed)
        first = recomputed.get(layer, layer)
        remade = sum(
            self._block_total(i, again=True) for i in range(first, layer)
        )  # recomputed blocks of the same chunk
        results = [i for i in range(first) if i in recomputed]
        return [
            Line("blocks below", stored + remade), Line("inputs of recomputed blocks", inputs * self.shape.stream),
            self._results(results),
            Line("output of recomputed blocks", self.shape.stream if layer in recomputed else 0), self.embedding_norm,
        ]  # fmt: skip

    def kept_before(self, layer: int) -> list[Line]:
        """Return the activations of all blocks below one while the forward pass is in that block, with the input of a recomputed one."""
        chunks = [(first, last) for first, last in self.shape.recomputed if first <= layer]
        if not chunks:
            return self.kept_below(layer)
        inside = chunks[-1][0] < layer < chunks[-1][1]  # its input is not the chunk's
        again = [below for below in range(layer + 1) if self._is_again(below)]
        stored = sum(self._block_total(below, again=False) for below in range(layer) if below not in again)
        inputs = min(len(chunks), 2) if self.offloads else len(chunks)  # one is on its way to the host
        results = again[-2:] if self.offloads else again
        return [
            Line("blocks below", 0 if self.offloads else stored),
            Line("inputs of recomputed blocks", (inputs + inside) * self.shape.stream), self._results(results), self.embedding_norm,
        ]  # fmt: skip

    def key_gradients(self, left: int) -> Line:
        """Return the gradients of the keys of all slices of a sequence, whose backward passes run from the last slice to the first.

        Args:
            left: blocks that this slice's backward pass has not left.
        """
        shape = self.shape
        middle = shape.layers if shape.slice < shape.num_slices - 1 else shape.layers - left
        layers = left if shape.slice == 0 and shape.num_slices > 1 else middle
        return Line("gradients of the keys of all slices", layers * self.attention.d_keys)

    def blocks_with_attention(self, layer: int) -> int:
        """Return the blocks whose attention's results this process holds while a pass is in one of them, copies in host memory included."""
        copies = len(self.stages) - 1 if self.kernels.offload_activations and not self.shape.cuda else 0
        return copies + (1 if self.offloads else self._blocks_up_to(layer))

    def _blocks_up_to(self, layer: int) -> int:
        """Return the blocks up to one that keep results of their attention on the device while a pass is in that block."""
        recomputed = {i: first for first, last in self.shape.recomputed for i in range(first, last)}
        if self.attention.keeps_results or layer not in recomputed:
            gone = 0 if self.attention.keeps_results else sum(i in recomputed for i in range(layer))
            return layer + 1 - gone
        return sum(i not in recomputed or recomputed[i] == recomputed[layer] for i in range(layer + 1))

    def _results(self, blocks: Sequence[int]) -> Line:
        """Return what recomputed blocks keep of their attention, and which experts their tokens have chosen."""
        with_experts = [experts for layer in blocks if (experts := self.shape.experts_of(layer)) is not None]
        chosen = sum(experts.choice for experts in with_experts)
        return Line("attention of recomputed blocks", len(blocks) * self.attention.results + chosen)

    # in host memory

    @property
    def offloads(self) -> bool:
        """True if offloaded activations leave the device; a CPU has no other memory, and holds them beside their copies."""
        return self.kernels.offload_activations and self.empties

    @property
    def empties(self) -> bool:
        """True if storages can be emptied while their tensors live on: on GPUs."""
        return self.shape.cuda

    @property
    def host(self) -> int:
        """Bytes of offloaded activations in host memory, allocated for the whole run."""
        return sum(map(self._moves, self.stages[:-1])) if self.kernels.offload_activations else 0

    @property
    def stages(self) -> list[Stage]:
        """Stages that are offloaded as one: single blocks, and chunks of recomputed blocks."""
        found: list[Stage] = []
        for first, last, again in recompute_plan(self.kernels, self.shape.layers):
            found += [(first, last, True)] if again else [(layer, layer + 1, False) for layer in range(first, last)]
        return [stage for stage in found if stage[0] < stage[1]]

    def _stay_of_block(self, layer: int) -> list[Line]:
        return [line for line in self.block_keeps(layer, again=False) if line.name in ("dropout keys", FOR_LATER, WHO)]

    def _moves(self, stage: Stage) -> int:
        """Return the bytes of a stage that are offloaded: what it has saved, but not dropout keys and keys for later slices."""
        first, last, again = stage
        if again:
            return self.shape.stream + (last - first) * (self.attention.results - self.attention.kept_keys)
        return self._block_total(first, again=False) - total(self._stay_of_block(first))

    def _left_below(self, layer: int) -> list[Line]:
        """Return the result of ``kept_below`` with offloading: of the stages below, only the next one is on its way back."""
        index = next(i for i, (first, last, _) in enumerate(self.stages) if first <= layer < last)
        first, _, again = self.stages[index]
        stay = sum(total(self._stay_of_block(below[0])) for below in self.stages[:index] if not below[2])
        stay += sum(last - first for first, last, again in self.stages[:index] if again) * self.attention.kept_keys
        own = sum(self._block_total(i, again=again) for i in range(first, layer)) + (
            self.shape.stream if again and layer > first else 0
        )
        coming = self._moves(self.stages[index - 1]) if index else 0
        return [
            Line("blocks below", own + stay), Line("block below, on its way from the host", coming),
            Line("output of recomputed blocks", self.shape.stream if again else 0), self.embedding_norm,
        ]  # fmt: skip

    def leaving(self) -> Line:
        """Return the activations of the stage before, which are being offloaded while the last stage computes."""
        moves = self._moves(self.stages[-2]) if self.offloads and len(self.stages) > 1 else 0
        return Line("block before, on its way to the host", moves)
