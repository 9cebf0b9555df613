"""Computation of one rank for one micro-batch: matrix products, attention, and memory traffic of elementwise kernels.

All sizes are those that ``estimate/memory.py`` uses for the same layout, so an uneven distribution of heads and the
padding of sequence and vocabulary are included. The rank is the one with most heads. Times follow from a device's
rates:

    product      max(FLOPs / rate, bytes / memory rate) + a launch; the rate is lower if the last wave of tiles is not full or the
                 inner dimension is short
    attention    FLOPs of the pairs that the mask leaves, at the kernel's own rate; lower for narrow heads and short sequences; with cp
                 those of the rank that has most, in calls for each rank whose keys it sees, and the results of these merged
    the rest     bytes / memory rate
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_sp.estimate.flops import seen_share
from megatron_sp.estimate.hardware import Gpu
from megatron_sp.estimate.memory_rank import RankForm

Product = tuple[int, int, int]  # [m, k] times [k, n], as (m, n, k)

_TILES = (
    (128, 256, 1.0),
    (128, 128, 0.88),
    (64, 128, 0.7),
)  # tiles of a product's kernels, and the share of the rate that they reach
_SHORT_INNER = 96  # inner dimension at which half of the rate is lost to a tile's start and end
_SHORT_SEQUENCE = 256  # sequence at which attention loses half of its rate
_NARROW, _WIDE = 64, 128  # head widths


@dataclass(frozen=True)
class Pass:
    """Time in seconds of the forward or backward pass of a part of the model.

    Attributes:
        products, attention, memory: time of matrix products, of attention, and of elementwise kernels.
        weight_products: part of ``products`` for gradients of weights.
        delayed: part of ``weight_products`` that --delay-wgrad puts under attention's last exchange.
        qkv_products, out_products: parts of ``products`` for the projections before and after attention.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    weight_products: float = 0.0
    qkv_products: float = 0.0
    out_products: float = 0.0
    delayed: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of the pass."""
        return self.products + self.attention + self.memory

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def times(self, count: float) -> Pass:
        """The pass, so many times."""
        return Pass(*(getattr(self, name) * count for name in self.__dataclass_fields__))


def product_seconds(gpu: Gpu, product: Product, element: int) -> float:
    """Return the seconds of one matrix product."""
    m, n, k = product
    flops, moved = 2.0 * m * n * k, element * (m * k + k * n + m * n)
    rate = gpu.matmul_tflops * 1e12 * _filled(gpu.units, m, n) * (k / (k + _SHORT_INNER) if gpu.units else 1.0)
    return max(flops / rate, moved / (gpu.memory_gbs * 1e9)) + gpu.launch_us * 1e-6


def _filled(units: int, m: int, n: int) -> float:
    """Return the share of a device that a product's tiles keep busy, for the best of the usual tile sizes."""
    if not units:
        return 1.0
    best = 0.0
    for rows, columns, reached in _TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        padded = tiles * rows * columns
        waves = tiles / units
        best = max(best, reached * waves / math.ceil(waves) * (m * n / padded))
    return best


class Work:
    """Times of the parts of a micro-batch on one rank.

    Args:
        form: closed forms of the rank.
        gpu: device of the rank.
    """

    def __init__(self, form: RankForm, gpu: Gpu) -> None:
        self.model, self.shape, self.heads, self.zero, self.gpu = (
            form.workload.model,
            form.shape,
            form.attention,
            form.zero,
            gpu,
        )
        self.kernels, self.ep = form.workload.kernels, form.workload.parallel.expert_model_parallel_size
        messages = sum(len(chunk.messages) for chunk in self.heads.chunks)
        self.pieces = max(1, messages)

    # matrix products

    def qkv(self) -> list[Product]:
        """Matrix products of the q, k, v projection."""
        shape = self.shape
        return [(shape.sp_tokens, self.heads.qkv_rows // self.pieces, shape.h)] * self.pieces

    def out(self) -> list[Product]:
        """Matrix products of the output projection."""
        shape, parts = self.shape, len(self.heads.chunks)
        return [(shape.sp_tokens, shape.h, self.heads.proj_columns // parts)] * parts

    def mlp(self) -> list[Product]:
        """Matrix products of the MLP."""
        shape, pieces = self.shape, self.shape.kernels.mlp_chunks
        tokens = -(-shape.sp_tokens // pieces)
        return [(tokens, shape.ffn_in, shape.h), (tokens, shape.h, shape.ffn)] * pieces

    def experts(self) -> list[tuple[int, Product]]:
        """Return the matrix products of a layer with experts and how many of each: router, experts of even loads, a shared one."""
        shape, experts = self.shape, self.shape.experts
        assert experts is not None
        own = experts.num_experts // self.ep
        rows = max(1, round(experts.rows.choices / own))
        made: list[tuple[int, Product]] = [(1, (experts.tokens, experts.num_experts, shape.h))]
        made += [(own, (rows, experts.ffn_in, shape.h)), (own, (rows, shape.h, experts.ffn))]
        if experts.shared:
            made += [
                (1, (shape.sp_tokens, experts.shared_in, shape.h)),
                (1, (shape.sp_tokens, shape.h, experts.shared)),
            ]
        return made

    def _branch_forward(self, experts: bool) -> float:
        """Return the seconds of the products of an MLP, or of experts."""
        return (
            sum(count * self._forward([product]) for count, product in self.experts())
            if experts
            else self._forward(self.mlp())
        )

    def _branch_backward(self, experts: bool) -> tuple[float, float]:
        """Return ``_backward`` of the products of an MLP, or of experts."""
        if not experts:
            return self._backward(self.mlp())
        each = [(count, self._backward([product])) for count, product in self.experts()]
        return sum(count * inputs for count, (inputs, _) in each), sum(count * weights for count, (_, weights) in each)

    def _forward(self, products: Sequence[Product]) -> float:
        return sum(product_seconds(self.gpu, product, self.shape.e) for product in products)

    def _backward(self, products: Sequence[Product]) -> tuple[float, float]:
        """Return seconds for (gradients of inputs, gradients of weights)."""
        inputs = sum(product_seconds(self.gpu, (m, k, n), self.shape.e) for m, n, k in products)
        return inputs, sum(product_seconds(self.gpu, (n, k, m), self.shape.e) for m, n, k in products)

    # attention

    def attention(self, backward: bool) -> float:
        """Return the seconds of one block's attention; the reference kernel moves its scores through memory."""
        shape, gpu, context = self.shape, self.gpu, self.shape.context
        pairs = self.heads.num_queries * shape.all_tokens * shape.whole_length
        seen: float = pairs * seen_share(self.model)
        if context is not None:
            seen = self.heads.num_queries * shape.micro_batch * max(context.areas)
        if self.heads.uses_reference:
            moved = pairs * shape.wide * (10 if backward else 6)
            flops = 4.0 * pairs * shape.d
            return (
                flops * (2 if backward else 1) / (gpu.matmul_tflops * 1e12)
                + moved / (gpu.memory_gbs * 1e9)
                + self._merges()
            )
        rate = gpu.attention_backward_tflops if backward else gpu.attention_forward_tflops
        rate *= gpu.flash2_share if self._takes_flash2 else 1.0
        share = 1 - (1 - gpu.narrow_heads) * min(1.0, max(0.0, (_WIDE - shape.d) / (_WIDE - _NARROW)))
        length = shape.length if context is None else context.shortest_run
        share *= length / (length + _SHORT_SEQUENCE) if gpu.units else 1.0
        return 4.0 * seen * shape.d * (2.5 if backward else 1) / (rate * 1e12 * share) + self._calls() + self._merges()

    def _merges(self) -> float:
        """Return the seconds in which results of calls with other ranks' keys are added: sums are read and written, results read."""
        shape, context = self.shape, self.shape.context
        if context is None:
            return 0.0
        elements = self.heads.num_queries * shape.all_tokens * shape.d
        return self._moved(len(context.shifts) * elements * (2 * shape.wide + shape.e))

    @property
    def _takes_flash2(self) -> bool:
        """True if the flags leave nothing newer: the others have no dropout, and torch keeps cuDNN out of deterministic runs."""
        backend, dropout = self.kernels.attention_backend, self.model.attention_dropout > 0
        older = backend == "flash2" or (backend == "flash" and dropout)
        return older or (self.kernels.deterministic_mode and (backend == "fused" or (backend == "auto" and dropout)))

    def _calls(self) -> float:
        stages = (
            1 if self.shape.context is None else 2 + len(self.shape.context.shifts)
        )  # own keys are those before, and a diagonal
        return len(self.heads.chunks) * stages * self.gpu.launch_us * 1e-6

    # elementwise work

    def block_bytes(self) -> tuple[int, int]:
        """Return the bytes that a block's elementwise kernels read and write in forward: (all, those of the MLP's activation)."""
        shape, model = self.shape, self.model
        norms, sums = 2 * 2 * shape.stream, 2 * 3 * shape.stream
        dropped = 2 * 4 * shape.stream if shape.dropout else 0
        activation = (shape.ffn_in + shape.ffn) * shape.sp_tokens * shape.e
        heads = self.heads.num_queries * (1 + 1 / self.heads.queries_per_group) * shape.all_tokens * shape.d * shape.e
        rotated = int(4 * heads) if model.position_embedding_type == "rope" else 0
        normed = int(2 * heads) if model.qk_layernorm else 0
        return norms + sums + dropped + activation + rotated + normed, activation

    def expert_bytes(self) -> tuple[int, int]:
        """Return what ``block_bytes`` returns, of a block with experts: rows are taken and results added for each choice."""
        every, activation = self.block_bytes()
        experts = self.shape.experts
        assert experts is not None
        rows = experts.rows
        inner = (
            int(
                rows.choices * (experts.ffn_in + experts.ffn)
                + self.shape.sp_tokens * (experts.shared_in + experts.shared)
            )
            * self.shape.e
        )
        taken = rows.choices * experts.h * (3 * experts.e + 2 * experts.wide)
        travelling = (rows.sent + rows.received) * 2 * experts.row_bytes.there if experts.moves else 0
        ranked = 4 * experts.tokens * experts.num_experts * experts.weight
        return every - activation + inner + int(taken + travelling + ranked), inner

    def _moved(self, num_bytes: float, rate_gbs: float = 0.0) -> float:
        return num_bytes / ((rate_gbs or self.gpu.memory_gbs) * 1e9)

    def _elementwise(self, blocks: float, activations: float, *, experts: bool) -> float:
        """Return the seconds of ``blocks`` times a block's elementwise traffic except the activation, and ``activations`` times that."""
        every, activation = self.expert_bytes() if experts else self.block_bytes()
        return self._moved(blocks * (every - activation)) + self._moved(
            activations * activation, self.gpu.activation_gbs
        )

    # passes

    def _mean(self, of_block: Callable[[bool], Pass]) -> Pass:
        """Return a pass of a block on average over those with experts and those without; ``of_block`` is told which."""
        has = self.shape.share.experts
        share = sum(has) / len(has) if has else 0.0
        if share in (0.0, 1.0):
            return of_block(share == 1.0)
        return of_block(True).times(share) + of_block(False).times(1 - share)

    def block_forward(self) -> Pass:
        """Return the forward pass of one block."""
        return self._mean(self._block_forward)

    def block_backward(self) -> Pass:
        """Return the backward pass of one block: twice the products and bytes, the activation recomputed, attention's backward kernel."""
        return self._mean(self._block_backward)

    def _block_forward(self, experts: bool) -> Pass:
        qkv, out, mlp = self._forward(self.qkv()), self._forward(self.out()), self._branch_forward(experts)
        moved = self._elementwise(1, 1, experts=experts) + 8 * self.gpu.launch_us * 1e-6
        return Pass(qkv + out + mlp, self.attention(False), moved, 0.0, qkv, out)

    def _block_backward(self, experts: bool) -> Pass:
        parts = [self._backward(self.qkv()), self._backward(self.out()), self._branch_backward(experts)]
        weights = sum(weight for _, weight in parts)
        remade = (
            self._forward(self.mlp()[::2]) if self.shape.chunked and not experts else 0.0
        )  # --mlp-chunks saves nothing of fc1
        moved = self._elementwise(2, 3, experts=experts) + 14 * self.gpu.launch_us * 1e-6
        qkv, out = (sum(part) for part in parts[:2])
        mlp = self.mlp()
        delayed = (
            self._backward(mlp if self.shape.tp == 1 else mlp[1::2])[1] if self.shape.delays and not experts else 0.0
        )
        return Pass(sum(sum(part) for part in parts) + remade, self.attention(True), moved, weights, qkv, out, delayed)

    def recomputed(self, granularity: str | None, share: float) -> Pass:
        """Return the recomputation of a block on average; ``share``: share of the blocks that are fully recomputed."""
        if (
            granularity == "selective" and self.shape.context is None
        ):  # across ranks attention saves no scores, and is not repeated
            return Pass(attention=self.attention(False))
        forward = self.block_forward()
        if granularity != "full":
            return (
                Pass(products=forward.qkv_products, qkv_products=forward.qkv_products)
                if self.kernels.recompute_qkv
                else Pass()
            )
        return (replace(forward, attention=0.0) if self.heads.keeps_results else forward).times(share)

    def ends(self) -> Pass:
        """Return embedding, head and loss of a micro-batch; the head runs chunk by chunk, forward and backward together."""
        shape = self.shape
        sizes = list(self._chunks())
        products = 0.0
        for tokens in sizes:
            one: list[Product] = [(tokens, shape.rows, shape.h)]
            products += self._forward(one) + sum(self._backward(one))
        logits = shape.head_tokens * shape.rows * shape.wide
        moved = 7 * logits + 8 * shape.stream
        return Pass(products, 0.0, self._moved(moved) + len(sizes) * 10 * self.gpu.launch_us * 1e-6)

    def _chunks(self) -> Iterator[int]:
        shape = self.shape
        yield from [shape.head_chunk] * (shape.head_tokens // shape.head_chunk)
        if shape.head_tokens % shape.head_chunk:
            yield shape.head_tokens % shape.head_chunk

    # once a step

    def gradients(self) -> float:
        """Return the seconds of gradient accumulation in a step: the first micro-batch writes, each further one reads and writes."""
        shape = self.shape
        size = self.zero.num_params * shape.wide
        return self._moved(size * (1 + 2 * (shape.num_micro_batches - 1)))

    def update(self) -> float:
        """Return the seconds of gradient norm and AdamW on the rank's shard: gradients read twice, weights and moments read and written."""
        shape = self.shape
        share = self.zero.updated_params if self.zero.experts else self.zero.num_params / self.zero.parts
        return self._moved(share * (8 * shape.wide + (shape.e if shape.is_16_bit else 0)), self.gpu.update_gbs)
