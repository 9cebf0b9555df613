"""Format-neutral description of a model in files, and its forward pass with the weights of one block in memory at a time.

A block is computed as by tensor-parallel ranks: each shard has its own heads and its share of the MLP, the outputs are
summed, and biases of row-parallel layers are added once. Files that are not split have one shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from einops import rearrange
from torch import Tensor

from megatron_sp.convert.reference.maths import Linear, Rotary, Scale, activate, allowed_pairs, attend, norm, rotate


@dataclass(frozen=True)
class Shape:
    """Hyperparameters that all blocks share.

    Attributes:
        vocab_size: rows of the embedding that represent tokens; None: unknown, as some may be padding.
        positions: maximum sequence length.
        order: pre-norm, post-norm, or attention and MLP in parallel on the same input.
        wide_norms: norms of queries and keys are over all heads together.
        gated: the gate half of the MLP's input projection is activated and multiplied with the other half.
    """

    num_layers: int
    head_dim: int
    vocab_size: int | None
    positions: int
    eps: float
    activation: str
    order: Literal["pre", "post", "parallel"] = "pre"
    causal: bool = True
    rms: bool = False
    gated: bool = False
    rotary: Rotary | None = None
    window: int | None = None
    wide_norms: bool = False


class Shard(NamedTuple):
    """A rank's share of a block: the projections of its heads and its part of the MLP; ``Block`` has the biases of row-parallel layers."""

    query: Linear
    key: Linear
    value: Linear
    out: Tensor  # [h, n * d]
    up: Linear
    down: Tensor  # [h, f]
    gate: Linear | None = None


class Mixture(NamedTuple):
    """The experts of a block, whole.

    Attributes:
        router: [E, h].
        experts: (up [f, h], down [h, f], gate [f, h] or None) of each.
        top_k: experts of a token.
        score: softmax or sigmoid of the router's output.
        sums_to_one: the scores of the chosen experts are divided by their sum.
        scaling: factor of the weights.
        bias: [E], added to the scores for the choice, or None.
        shared: the expert that all tokens take, or None.
    """

    router: Tensor
    experts: list[tuple[Tensor, Tensor, Tensor | None]]
    top_k: int
    score: str = "softmax"
    sums_to_one: bool = True
    scaling: float = 1.0
    bias: Tensor | None = None
    shared: tuple[Tensor, Tensor, Tensor | None] | None = None


class Block(NamedTuple):
    """A layer of the model.

    Attributes:
        norms: in the order of computation.
        shards: the ranks' shares.
        out_bias, down_bias: biases of row-parallel layers.
        head_norms: norms of queries and keys, or None.
        mixture: takes the place of the MLP, or None.
    """

    norms: tuple[Scale, Scale]
    shards: list[Shard]
    out_bias: Tensor | None = None
    down_bias: Tensor | None = None
    head_norms: tuple[Scale, Scale] | None = None
    mixture: Mixture | None = None


class Rows(NamedTuple):
    """Sequences on which models are compared.

    Attributes:
        tokens: int64 [b, s], right-padded.
        lengths: length of each sequence.
        types: int64 [b, s], segment ids, for BERT.
    """

    tokens: Tensor
    lengths: list[int]
    types: Tensor


class Foreign(Protocol):
    """A model that is read from its files."""

    @property
    def shape(self) -> Shape:
        """Hyperparameters."""
        ...

    def embed(self, tokens: Tensor, types: Tensor) -> Tensor:
        """Embed tokens, [b, s] -> [b, s, h], including positions, segments and the embedding norm, where present."""
        ...

    def block(self, layer: int) -> Block:
        """Read the weights of one block."""
        ...

    def outputs(self, x: Tensor) -> dict[str, Tensor]:
        """Compute the outputs of the heads from the last block's output [b, s, h], by the names of ``computed.py``."""
        ...


def run(model: Foreign, rows: Rows) -> Iterator[tuple[str, Tensor]]:
    """Yield the hidden states [b, s, h] after the embedding and each block, then each output, all with their names."""
    shape = model.shape
    x = model.embed(rows.tokens, rows.types)
    yield "embedding", x
    allowed = allowed_pairs(rows.lengths, x.shape[1], causal=shape.causal, window=shape.window)
    angles = None if shape.rotary is None else shape.rotary.angles(x.shape[1], x.dtype)
    for layer in range(shape.num_layers):
        x = run_block(x, model.block(layer), shape, allowed, angles)
        yield f"layer {layer}", x
    yield from model.outputs(x).items()


def run_block(x: Tensor, block: Block, shape: Shape, allowed: Tensor, angles: Tensor | None) -> Tensor:
    """Compute one block, [b, s, h] -> [b, s, h]."""

    def normed(x: Tensor, which: int) -> Tensor:
        return norm(x, block.norms[which], shape.eps, rms=shape.rms)

    def attention(x: Tensor) -> Tensor:
        total = sum((_attention(x, shard, block, shape, allowed, angles) for shard in block.shards), torch.zeros_like(x))
        return total if block.out_bias is None else total + block.out_bias

    def mlp(x: Tensor) -> Tensor:
        if block.mixture is not None:
            return _mixture(x, block.mixture, shape)
        total = sum((_mlp(x, shard, shape) for shard in block.shards), torch.zeros_like(x))
        return total if block.down_bias is None else total + block.down_bias

    if shape.order == "parallel":
        return x + attention(normed(x, 0)) + mlp(normed(x, 1))
    if shape.order == "post":
        x = normed(x + attention(x), 0)
        return normed(x + mlp(x), 1)
    x = x + attention(normed(x, 0))
    return x + mlp(normed(x, 1))


def _attention(x: Tensor, shard: Shard, block: Block, shape: Shape, allowed: Tensor, angles: Tensor | None) -> Tensor:
    wide = [linear(x) for linear in (shard.query, shard.key, shard.value)]
    if block.head_norms is not None and shape.wide_norms:
        wide[:2] = (norm(t, scale, shape.eps, rms=shape.rms) for t, scale in zip(wide, block.head_norms, strict=False))
    q, k, v = (rearrange(t, "... (n d) -> ... n d", d=shape.head_dim) for t in wide)
    if not shape.wide_norms and block.head_norms is not None:
        q, k = (norm(t, scale, shape.eps, rms=shape.rms) for t, scale in zip((q, k), block.head_norms, strict=True))
    if angles is not None and shape.rotary is not None:
        q, k = (rotate(t, angles, neighbours=shape.rotary.neighbours) for t in (q, k))
    return attend(q, k, v, allowed) @ shard.out.T


def _mlp(x: Tensor, shard: Shard, shape: Shape) -> Tensor:
    if shard.gate is None:
        return activate(shape.activation, shard.up(x)) @ shard.down.T
    return (activate(shape.activation, shard.gate(x)) * shard.up(x)) @ shard.down.T


def _mixture(x: Tensor, m: Mixture, shape: Shape) -> Tensor:
    """Compute what the experts make of x [b, s, h]: all of them for all tokens, with a weight of zero where they were not chosen."""
    logits = x @ m.router.T
    scores = logits.softmax(-1) if m.score == "softmax" else torch.sigmoid(logits)
    ranked = scores if m.bias is None else scores + m.bias
    chosen = torch.zeros_like(scores).scatter(-1, ranked.topk(m.top_k, dim=-1).indices, 1.0)
    weights = scores * chosen
    if m.sums_to_one:
        weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        y = y + weights[..., number, None] * m.scaling * _expert(x, expert, shape)
    return y if m.shared is None else y + _expert(x, m.shared, shape)


def _expert(x: Tensor, expert: tuple[Tensor, Tensor, Tensor | None], shape: Shape) -> Tensor:
    up, down, gate = expert
    wide = activate(shape.activation, x @ (up if gate is None else gate).T)
    return (wide if gate is None else wide * (x @ up.T)) @ down.T
