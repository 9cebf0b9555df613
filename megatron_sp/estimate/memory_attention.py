"""Sizes of a block's attention: what Ulysses sends and receives, what the kernel saves and allocates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_sp.config.schema import ParallelConfig
from megatron_sp.estimate.context_form import ContextForm, slice_forms
from megatron_sp.estimate.memory_shape import BLOCK_BYTES, RankShape
from megatron_sp.estimate.workload import Workload
from megatron_sp.parallel.heads import HeadChunk, Message, OverlapMode, is_uniform, plan_heads
from megatron_sp.utils.numbers import window_tile

_BATCHED_BYTES = 1 << 15  # as in ops/tiled_attention.py: tiles of so many bytes share a call
_MULTIPROCESSORS = 132  # of an H100; a little fewer or more elsewhere


class RemadeChunk(NamedTuple):
    """A chunk of heads in a backward pass that makes them again; in bytes.

    Attributes:
        heads: q, k and v, with those of the next chunk on their way.
        staying: what is left of ``heads`` when the gradients are sent.
        d_out, d_coming: gradient of the attention's output, and that of the next chunk on its way.
        d_heads, sent: gradient of q, k and v, and what receives its exchange.
        behind: gradients of the chunks before, which have not been waited for.
    """

    heads: int
    staying: int
    d_out: int
    d_coming: int
    d_heads: int
    sent: int
    behind: int


class _OfRank(NamedTuple):
    """A chunk's attention on one cp rank.

    Attributes:
        taken: bytes that it takes.
        fewer: bytes of other ranks' keys that a block of this rank keeps less than one of the rank with most of them.
    """

    taken: int
    fewer: int


class AttentionForm:
    """Attention of one block on sp rank 0; tensors in bytes.

    Attributes:
        queries_per_group: query heads that share a key/value head on this tp rank.
        qkv_rows, proj_columns: output rows of the QKV projection, and input columns of the output projection, of this
            tp rank.
        chunks: the heads that are exchanged together, in order.
        recv_buffers, outs, sent: for each chunk the heads that arrive, the attention's output, and the heads that
            leave.
        out_whole: the output projection's input.
        joins: True if that is a tensor of its own: our CPU kernel alone writes its output as the projection reads it.
        num_queries: query heads that this rank computes.
        remade: the chunks where backward makes them again, the last one first.
        made_heads: heads that are not views of what arrived: repeated for uneven groups, or normed.
        attention_blocks, attention_grad_blocks: what calls of the CPU kernel return, forward and backward; on a GPU what
            the fused kernels allocate inside.
        rotary_makes: what the backward of the rotary embedding allocates.
        kept_keys: with slices of a sequence, keys and values that stay for later slices, where heads are made again.
        d_keys: gradients of the keys and values of all slices, in the dtype of sums.
        received: with --cp-keep-kv, keys and values of other ranks, which are kept for backward by the rank that receives
            most.
    """

    def __init__(self, workload: Workload, shape: RankShape) -> None:
        self.model, self.kernels, self.shape = workload.model, workload.kernels, shape
        model, parallel, tp, d = workload.model, workload.parallel, shape.tp, shape.d
        assert model.num_attention_heads
        n, g = model.num_attention_heads, model.num_groups
        r = n // g
        self.queries_per_group, groups = (r, g // tp) if g % tp == 0 else (n // tp, 1)
        self.qkv_rows = groups * (self.queries_per_group + 2) * d
        self.proj_columns = n // tp * d
        one_chunk = parallel.overlap_mode == "auto" or (parallel.overlap_mode == "chunked" and model.norms_all_heads)
        mode: OverlapMode = "none" if one_chunk else parallel.overlap_mode  # type: ignore[assignment]
        self.chunks: Sequence[HeadChunk] = plan_heads(
            self.queries_per_group,
            groups,
            shape.sp,
            mode,
            parallel.sp_head_chunks or 2,
            pairs=shape.context is not None,
        )
        shares = [chunk.shares[0] for chunk in self.chunks]
        tokens = shape.padded * shape.all_tokens // shape.length
        widths = [[len(message.rows[0]) * d for message in chunk.messages] for chunk in self.chunks]
        self.recv_buffers = [tokens * sum(of_chunk) * shape.e for of_chunk in widths]
        self.outs = [shape.all_tokens * len(share.queries) * d * shape.e for share in shares]
        self.sent = [
            shape.sp_tokens * sum(len(of_rank) * d for message in chunk.messages for of_rank in message.rows) * shape.e
            for chunk in self.chunks
        ]
        self.out_whole = shape.sp_tokens * self.proj_columns * shape.e
        self.joins = (
            shape.sp > 1
            or len(self.chunks) > 1
            or shape.padded > shape.length
            or (self.uses_reference and shape.context is None)
        )
        self.num_queries = sum(len(share.queries) for share in shares)
        across = shape.context is not None  # then nothing is repeated
        repeated = (
            []
            if across
            else [
                2 * len(share.queries)
                for share in shares
                if share.keys and not is_uniform(share, self.queries_per_group)
            ]
        )
        normed = sum(len(share.queries) + len(share.keys) for share in shares) if model.qk_layernorm else 0
        self.remade = self._remade(tokens * d * shape.e)
        self.made_heads = shape.all_tokens * (sum(repeated) + normed) * d * shape.e
        self.attention_blocks, self.attention_grad_blocks = self._kernel_blocks(
            max(len(share.queries) for share in shares)
        )
        self.rotary_makes = max(self._rotary_makes(chunk, tokens * d) for chunk in self.chunks)
        self.kept_keys = self.d_keys = 0
        self.received, self._across_forward, self._across_backward = 0, list[_OfRank](), list[_OfRank]()
        if shape.context is not None:
            self._count_across(
                shape.context, [len(share.uses) for share in shares], [len(share.queries) for share in shares], parallel
            )

    def _count_across(
        self, context: ContextForm, pairs: list[int], queries: list[int], parallel: ParallelConfig
    ) -> None:
        """Count what exchanges over cp take; ``pairs``, ``queries``: key/value and query heads of each chunk."""
        shape, keeps = self.shape, parallel.cp_keep_kv
        widest = max(range(len(pairs)), key=lambda index: (queries[index], pairs[index]))
        head = shape.micro_batch * shape.d * shape.e  # bytes of a head at a position
        row, wide = (
            pairs[widest] * 2 * head,
            shape.wide // shape.e,
        )  # bytes of a row of a message; sums are so many times as wide
        kept = [sum(of_rank) * sum(pairs) * 2 * head * keeps for of_rank in context.received]
        self.received = max(kept)
        columns = queries[widest]

        each, taken = columns * head, 2 * pairs[widest] * head  # of a query; of a key and value
        group = self.queries_per_group * shape.d * shape.e  # bytes of a position in the columns of one group

        all_keys = 0  # of the slices so far, one after another
        if shape.num_slices > 1:
            self.kept_keys = shape.all_tokens * sum(pairs) * 2 * shape.d * shape.e
            whole = max(slice_forms(self.model, parallel)[-1].keys)
            self.d_keys = whole * shape.micro_batch * sum(pairs) * 2 * shape.d * shape.wide
            all_keys = row * max(context.keys) if shape.slice else 0
        pairs_of_all = shape.micro_batch * pairs[widest]

        drops = self.model.attention_dropout > 0
        score_bytes = (4 * shape.wide + drops if drops else 3 * shape.wide, 4 * shape.wide + drops)  # forward, backward

        def calls(rank: int, stage: int, backward: bool) -> float:
            """Bytes that a kernel takes that goes tile by tile: results of the call before, and what a call makes.

            That is its results, or with plain operations a few tensors of scores. Several small tiles are copied together.
            """
            own = (
                backward and stage < 0 and bool(context.shifts)
            )  # computed in two halves, of the heads if there are two
            part = (pairs_of_all + 1) // 2 / pairs_of_all if own and pairs_of_all > 1 else 1.0
            mine = each * part
            results = 2 * mine if backward else 0  # of a key and value, for each query
            sizes, half = (
                [(0.0, 0.0)],
                2 if own and part == 1 else 1,
            )  # of the results of each call, and of all that it makes
            for (n, keys, _), count in self._tiles_of(context, rank, stage).items():
                together = count // half if shape.cuda else min(count // half, max(1, int(BLOCK_BYTES // (n * mine))))
                is_batch = together > 1 and n * mine <= _BATCHED_BYTES
                if is_batch:
                    at_once, repeats = mine, 1
                    gathered = 5 if backward else 3 if stage < 0 else 4  # in later stages also what is continued
                    of_tile = n * mine * gathered + keys * (taken * part + results * (1.5 if backward else 1))
                else:
                    at_once = mine if shape.cuda else min(mine, max(1, BLOCK_BYTES // (max(n, keys) * group)) * group)
                    together, repeats = 1, 2 if at_once < mine or count > 1 else 1
                    of_tile = n * at_once + keys * results * at_once / mine
                made = of_tile
                if self.uses_reference:  # the first gradient it makes is that of the values
                    scores = n * keys * at_once / (shape.d * shape.e) * score_bytes[backward]
                    copied = n * mine * (3 if backward else 1) + keys * taken * part if is_batch else 0
                    made = max(made, copied + scores + keys * results / 2 * at_once / mine)
                sizes += [(of_tile * together, made * together)] * repeats
            return max((before[0] + now[1] for before, now in pairwise(sizes)), default=0.0)

        sums = shape.all_tokens * columns * shape.d * shape.wide if shape.is_16_bit else 0  # else they are the output
        for rank, held in enumerate(context.forward_rows(parallel.num_stages_ahead, keeps=keeps)):
            if shape.cuda and not self.uses_reference:
                makes = (
                    2.0 * shape.all_tokens * columns * shape.d * shape.wide
                )  # results of a stage, and as they are added
            else:
                makes = max(calls(rank, stage, False) for stage in range(-1, len(context.shifts)))
            self._across_forward.append(_OfRank(held * row + sums + int(makes) + all_keys, self.received - kept[rank]))
        gradients = (columns + 2 * pairs[widest]) * shape.all_tokens * shape.d
        of_band = self.model.window_size is not None and shape.is_16_bit
        inside = self._inside_gpu_kernel(columns) if shape.cuda and not self.uses_reference else 0
        rows = context.backward_rows(
            parallel.num_stages_ahead, keeps=keeps, width=wide if of_band else 1.0,
            kernel=None if shape.cuda and not self.uses_reference else lambda rank, stage: calls(rank, stage, True) / row,
        )  # fmt: skip
        inside += gradients * (shape.wide - shape.e) + all_keys
        self._across_backward = [
            _OfRank(int(held * row) + inside, self.received - kept[rank]) for rank, held in enumerate(rows)
        ]

    def across_forward(self, blocks: int) -> int:
        """Return what a chunk takes in forward with cp, beside q, k, v and output: of other ranks, on the way, sums, and the kernel's own.

        A rank that keeps fewer keys of others than ``received`` takes so much less in all blocks; the rank that holds
        most in all is the one that counts.

        Args:
            blocks: blocks that keep their keys of other ranks at this moment.
        """
        return max(of_rank.taken - blocks * of_rank.fewer for of_rank in self._across_forward)

    def across_backward(self, blocks: int) -> int:
        """Return what a chunk takes in backward with cp; everything else as for ``across_forward``."""
        return max(of_rank.taken - blocks * of_rank.fewer for of_rank in self._across_backward)

    def _tiles_of(self, context: ContextForm, rank: int, stage: int) -> Counter[tuple[int, int, str]]:
        """Return (queries, keys, kind) of the tiles of a stage, and how many there are of each; of a band without its ends."""
        window, found = self.model.window_size, Counter[tuple[int, int, str]]()
        for n, keys, kind in context.calls(rank, stage):
            if kind == "band" and window is not None:
                tile = min(n, window_tile(window))
                found[tile, min(keys, window - 1 + tile), kind] += max(1, n // tile - 1)
            else:
                found[n, keys, kind] += 1
        return found

    def _remade(self, head: int) -> list[RemadeChunk]:
        """Return the sizes of the chunks where backward makes them again, which it does from the last to the first.

        Args:
            head: bytes of one head at all positions.
        """
        exchanged = self.shape.sp > 1  # on one rank what is received is what was sent
        padded, of_sent = (
            self.shape.padded / self.shape.length,
            self.shape.sp_tokens * self.shape.d * self.shape.e * exchanged,
        )

        def sizes(messages: Sequence[Message]) -> tuple[int, int]:
            """Bytes on the side of the heads, and on that of the positions."""
            return sum(len(m.rows[0]) for m in messages) * head, sum(
                len(of) for m in messages for of in m.rows
            ) * of_sent

        made, behind, shared = list[RemadeChunk](), 0, 0
        for index in reversed(range(len(self.chunks))):
            chunk, (here, _), (d_here, d_sent) = (
                self.chunks[index],
                sizes(self.chunks[index].again),
                sizes(self.chunks[index].back),
            )
            coming = sum(sizes(self.chunks[index - 1].again)) if index else 0
            d_coming = int(self.outs[index - 1] * padded) * (1 + exchanged) if index else 0
            share = chunk.shares[0]
            # the key and value of a group with several chunks stay until its first one, and so do the sums of their
            # gradients, to which the kernel's are added
            pair = 2 * len(share.uses) * head if shared or not share.keys else 0
            added = pair * (2 if shared else 1)
            staying = coming + (0 if share.keys else here + shared)
            made.append(
                RemadeChunk(
                    here + coming + shared,
                    staying,
                    int(self.outs[index] * padded),
                    d_coming,
                    d_here + added,
                    d_sent,
                    behind,
                )
            )
            behind += d_here + d_sent
            shared = 0 if share.keys else 2 * pair
        return made

    def _rotary_makes(self, chunk: HeadChunk, channels: int) -> int:
        """Return the bytes of the rotary embedding's backward for a chunk: products of half the width, a sine, copies unless packed.

        Args:
            channels: elements of one head at all positions.
        """
        if self.model.position_embedding_type != "rope":
            return 0
        e = self.shape.e
        keys = len(chunk.shares[0].keys)
        widths = {message.part: len(message.rows[0]) for message in chunk.messages if message.part != "v"}
        packed = (
            "qkv" in widths
            and keys
            and is_uniform(chunk.shares[0], self.queries_per_group)
            and not self.model.qk_layernorm
        )
        turned = widths["qkv"] - keys if "qkv" in widths else max(widths.values())
        copied = 0 if packed else sum(widths.values()) * e
        if (
            "kv" in widths
        ):  # while the keys are turned there are also the gradient as it came and the one that joins keys and values
            copied, turned = max(widths["q"], 2 * widths["kv"]) * e, max(widths["q"], keys)
        if self.shape.fused:
            return channels * copied
        # four products in fp32 by promotion, or the first half of the heads as they were
        products = 4 * max(4, self.shape.wide) if self.shape.is_16_bit else e
        turned_back = self.shape.length * self.model.rotary_dim // 2 * max(4, self.shape.wide)  # the sine, negated
        return channels * (copied + turned * products // 2) + turned_back

    def _kernel_blocks(self, widest: int) -> tuple[int, int]:
        """Return ``attention_blocks`` and ``attention_grad_blocks``; ``widest``: query heads of the largest chunk."""
        shape, length = self.shape, self.shape.length
        row = self.queries_per_group * shape.d * shape.e  # bytes of a position in the columns of one group
        most = shape.all_tokens * widest * shape.d * shape.e  # bytes of all positions

        def calls(queries: int, keys: int) -> int:
            return (
                2 * max(1, BLOCK_BYTES // (keys * row)) * row * queries
            )  # the current call, and the results of the previous one

        window = self.model.window_size
        if shape.cuda:
            return 0, self._inside_gpu_kernel(widest)
        if window is None or window >= length:
            forward = min(calls(length, length), most)
            summed = 2 * forward // self.queries_per_group  # gradients of a key and a value that served several queries
            return forward, 3 * forward + (summed if self.queries_per_group > 1 else 0)
        # the first tile sees as many keys as it has queries; the others have fewer queries than keys
        tile = window_tile(window)
        reach = window - 1 + tile
        forward = min(calls(window, window), 2 * most * window // length)
        others = [min(calls(n, reach), 2 * most * n // length) for n in (tile, reach)]
        return forward, max(3 * forward, others[0] + 2 * others[1])

    def _inside_gpu_kernel(self, widest: int) -> int:
        """Return the bytes that the backward of a fused kernel allocates on a GPU; ``widest``: query heads of the largest chunk.

        Keys and values of a group have a gradient for each of its queries, then summed. The kernels of 16-bit types sum
        the gradient of the queries in fp32; with --deterministic-mode once for each block of keys that runs at a time
        (flash_api.cpp :: mha_bwd).
        """
        shape = self.shape
        elements = widest * shape.all_tokens * shape.d
        grouped = 2 * elements * shape.e if self.queries_per_group > 1 else 0
        if not shape.is_16_bit:
            return grouped
        columns = max(1, shape.all_tokens // shape.length * widest)
        sums = -(-_MULTIPROCESSORS // columns) if self.kernels.deterministic_mode else 1
        return grouped + sums * elements * 4

    @property
    def uses_reference(self) -> bool:
        """True if attention is computed by plain operations, which write all scores to memory (``ops/attention_choice.py``)."""
        backend = self.kernels.attention_backend
        if backend in ("unfused", "local"):
            return True
        if self.shape.context is not None and self.model.attention_dropout > 0:
            return True  # across ranks its masks are hashes
        if self.shape.cuda:
            return self.shape.e == 8  # no fused kernel computes in fp64
        return self.model.attention_dropout > 0  # nor with dropout on a CPU

    @property
    def keeps_results(self) -> bool:
        """True if recomputed blocks keep attention's results (``ops/attention.py :: keeps_results``)."""
        shape = self.shape
        if shape.context is not None:  # what continues a softmax has the log of its sums, whatever the kernel
            return self.kernels.recompute_attention != "full"
        gives_lse = not shape.cuda or (shape.is_16_bit and shape.d % 8 == 0 and shape.d <= 256)
        return (
            self.kernels.recompute_attention != "full"
            and gives_lse
            and not self.uses_reference
            and self.model.attention_dropout == 0
        )

    @property
    def keeps_received(self) -> bool:
        """True if they keep what the exchange back has brought, too."""
        return self.keeps_results and self.kernels.recompute_attention == "none" and self.shape.sp > 1

    @property
    def results(self) -> int:
        """Bytes that a recomputed block keeps of its attention beside its input."""
        if not self.keeps_results:
            return self.kept_keys
        return (
            self.kept_keys
            + sum(self.outs)
            + self.kernel_keeps
            + self.received
            + (self.out_whole if self.keeps_received else 0)
        )

    @property
    def kernel_keeps(self) -> int:
        """Bytes that the attention kernel saves for backward beside q, k, v and its output."""
        if self.shape.context is None:  # across ranks nothing but this is saved
            if self.kernels.recompute_granularity == "selective":
                return 0
            if self.uses_reference:
                return self.reference_keeps
        return self.num_queries * self.shape.all_tokens * max(4, self.shape.e)  # log of the sum of exponentials

    @property
    def scores(self) -> int:
        """Bytes of one tensor of attention scores, in fp32 or wider."""
        return self.num_queries * self.shape.all_tokens * self.shape.length * self.shape.wide

    @property
    def reference_keeps(self) -> int:
        """Bytes saved by reference attention: probabilities, dropout's mask and output, keys and values expanded to all queries."""
        shape, elements = self.shape, self.scores // self.shape.wide
        dropped = (
            elements * (1 + shape.e)
            if self.model.attention_dropout > 0
            else elements * shape.e
            if shape.is_16_bit
            else 0
        )
        expanded = 2 * self.num_queries * shape.all_tokens * shape.d * shape.e if self.queries_per_group > 1 else 0
        return self.scores + dropped + shape.length**2 + expanded

    @property
    def reference_makes(self) -> int:
        """Bytes of reference attention's temporaries in the forward pass."""
        return (2 if self.model.attention_dropout > 0 else 1) * self.scores
