"""Computation of one rank for one micro-batch: matrix products, attention, and memory traffic of elementwise kernels.

All sizes are those that ``estimate/memory.py`` uses for the same layout, so an uneven distribution of heads and the padding of sequence and
vocabulary are included. The rank is the one with most heads. Times follow from a device's rates:

    product      max(FLOPs / rate, bytes / memory rate) + a launch; the rate is lower if the last wave of tiles is not full or the
                 inner dimension is short
    attention    FLOPs of the pairs that the mask leaves, at the kernel's own rate; lower for narrow heads and short sequences
    the rest     bytes / memory rate
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_sp.estimate.flops import seen_share
from megatron_sp.estimate.hardware import Gpu
from megatron_sp.estimate.memory import Form

Product = tuple[int, int, int]  # [m, k] times [k, n], as (m, n, k)

_TILES = ((128, 256, 1.0), (128, 128, 0.88), (64, 128, 0.7))  # of a product's kernels, and what the smaller ones reach
_SHORT_INNER = 96  # inner dimension at which half of the rate is lost to beginning and end of a tile
_SHORT_SEQUENCE = 256  # of attention: sequence at which half of the rate is lost
_NARROW, _WIDE = 64, 128  # of heads


@dataclass(frozen=True)
class Pass:
    """Time in seconds of the forward or backward pass of a part of the model.

    Attributes:
        products, attention, memory: time of matrix products, of attention, and of elementwise kernels.
        weight_products: part of ``products`` for gradients of weights.
        qkv_products, out_products: parts of ``products`` for the projections before and after attention.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    weight_products: float = 0.0
    qkv_products: float = 0.0
    out_products: float = 0.0

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
        form: sizes of the layout.
        gpu: device of the rank.
    """

    def __init__(self, form: Form, gpu: Gpu) -> None:
        self.form, self.gpu = form, gpu
        messages = sum(len(chunk.messages) for chunk in form.chunks)
        self.pieces = max(1, messages)

    # matrix products

    def qkv(self) -> list[Product]:
        """Matrix products of the q, k, v projection."""
        form = self.form
        return [(form.sp_tokens, form.qkv_rows // self.pieces, form.h)] * self.pieces

    def out(self) -> list[Product]:
        """Matrix products of the output projection."""
        form, parts = self.form, len(self.form.chunks)
        return [(form.sp_tokens, form.h, form.proj_columns // parts)] * parts

    def mlp(self) -> list[Product]:
        """Matrix products of the MLP."""
        form, pieces = self.form, self.form.kernels.mlp_chunks
        tokens = -(-form.sp_tokens // pieces)
        return [(tokens, form.ffn_in, form.h), (tokens, form.h, form.ffn)] * pieces

    def _forward(self, products: Sequence[Product]) -> float:
        return sum(product_seconds(self.gpu, product, self.form.e) for product in products)

    def _backward(self, products: Sequence[Product]) -> tuple[float, float]:
        """Return seconds for (gradients of inputs, gradients of weights)."""
        inputs = sum(product_seconds(self.gpu, (m, k, n), self.form.e) for m, n, k in products)
        return inputs, sum(product_seconds(self.gpu, (n, k, m), self.form.e) for m, n, k in products)

    # attention

    def attention(self, backward: bool) -> float:
        """Return the seconds of one block's attention; the reference kernel moves its scores through memory."""
        form, gpu = self.form, self.gpu
        pairs = form.num_queries * form.all_tokens * form.length
        flops = 4.0 * pairs * form.d
        if form.uses_reference:
            moved = pairs * form.wide * (10 if backward else 6)
            return flops * (2 if backward else 1) / (gpu.matmul_tflops * 1e12) + moved / (gpu.memory_gbs * 1e9)
        rate = gpu.attention_backward_tflops if backward else gpu.attention_forward_tflops
        share = 1 - (1 - gpu.narrow_heads) * min(1.0, max(0.0, (_WIDE - form.d) / (_WIDE - _NARROW)))
        share *= form.length / (form.length + _SHORT_SEQUENCE) if gpu.units else 1.0
        return flops * (2.5 if backward else 1) * seen_share(form.model) / (rate * 1e12 * share) + self._calls()

    def _calls(self) -> float:
        return len(self.form.chunks) * self.gpu.launch_us * 1e-6

    # elementwise work

    def block_bytes(self) -> tuple[int, int]:
        """Return the bytes that a block's elementwise kernels read and write in forward: (all, those of the MLP's activation)."""
        form, model = self.form, self.form.model
        norms, sums = 2 * 2 * form.stream, 2 * 3 * form.stream
        dropped = 2 * 4 * form.stream if form.dropout else 0
        activation = (form.ffn_in + form.ffn) * form.sp_tokens * form.e
        heads = form.num_queries * (1 + 1 / form.queries_per_group) * form.all_tokens * form.d * form.e
        rotated = int(4 * heads) if model.position_embedding_type == "rope" else 0
        normed = int(2 * heads) if model.qk_layernorm else 0
        return norms + sums + dropped + activation + rotated + normed, activation

    def _moved(self, num_bytes: float, rate_gbs: float = 0.0) -> float:
        return num_bytes / ((rate_gbs or self.gpu.memory_gbs) * 1e9)

    def _elementwise(self, blocks: float, activations: float) -> float:
        """Return the seconds of ``blocks`` times a block's elementwise traffic except the activation, and ``activations`` times that."""
        every, activation = self.block_bytes()
        return self._moved(blocks * (every - activation)) + self._moved(activations * activation, self.gpu.activation_gbs)

    # passes

    def block_forward(self) -> Pass:
        """Return the forward pass of one block."""
        qkv, out, mlp = self._forward(self.qkv()), self._forward(self.out()), self._forward(self.mlp())
        moved = self._elementwise(1, 1) + 8 * self.gpu.launch_us * 1e-6
        return Pass(qkv + out + mlp, self.attention(False), moved, 0.0, qkv, out)

    def block_backward(self) -> Pass:
        """Return the backward pass of one block: twice the products and bytes, the activation recomputed, attention's backward kernel."""
        parts = [self._backward(part) for part in (self.qkv(), self.out(), self.mlp())]
        weights = sum(weight for _, weight in parts)
        remade = self._forward(self.mlp()[::2]) if self.form.chunked else 0.0  # --mlp-chunks keeps nothing of fc1
        moved = self._elementwise(2, 3) + 14 * self.gpu.launch_us * 1e-6
        qkv, out = (sum(part) for part in parts[:2])
        return Pass(sum(sum(part) for part in parts) + remade, self.attention(True), moved, weights, qkv, out)

    def recomputed(self, granularity: str | None, share: float) -> Pass:
        """Return the recomputation of a block on average; ``share``: share of the blocks that are fully recomputed."""
        if granularity == "selective":
            return Pass(attention=self.attention(False))
        return self.block_forward().times(share) if granularity == "full" else Pass()

    def ends(self) -> Pass:
        """Return embedding, head and loss of a micro-batch; the head runs chunk by chunk, forward and backward together."""
        form = self.form
        sizes = list(self._chunks())
        products = 0.0
        for tokens in sizes:
            one: list[Product] = [(tokens, form.rows, form.h)]
            products += self._forward(one) + sum(self._backward(one))
        logits = form.head_tokens * form.rows * form.wide
        moved = 7 * logits + 8 * form.stream
        return Pass(products, 0.0, self._moved(moved) + len(sizes) * 10 * self.gpu.launch_us * 1e-6)

    def _chunks(self) -> Iterator[int]:
        form = self.form
        yield from [form.head_chunk] * (form.head_tokens // form.head_chunk)
        if form.head_tokens % form.head_chunk:
            yield form.head_tokens % form.head_chunk

    # once a step

    def gradients(self) -> float:
        """Return the seconds of gradient accumulation in a step: the first micro-batch writes, each further one reads and writes."""
        form = self.form
        size = form.zero.num_params * form.wide
        return self._moved(size * (1 + 2 * (form.num_micro_batches - 1)))

    def update(self) -> float:
        """Return the seconds of gradient norm and AdamW on the rank's shard: gradients read twice, weights and moments read and written."""
        form = self.form
        share = form.zero.num_params / form.zero.parts
        return self._moved(share * (8 * form.wide + (form.e if form.is_16_bit else 0)), self.gpu.update_gbs)
