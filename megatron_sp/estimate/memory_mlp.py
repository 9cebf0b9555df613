"""Memory of the chunked MLP (``parallel/chunked_mlp.py``) beside the residual stream, in closed form for ``estimate/memory.py``.

forward     the wide activation of a piece, before and after the activation function; the piece's input and output
backward    the same and its gradient; with tp_seq the gathers of the next piece and the reduction of the previous one
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.config.schema_model import ActivationName

Named = tuple[str, int]


def activation_backward(activation: ActivationName, inner: int, block: int) -> int:
    """Return the bytes that the backward of the activation function allocates.

    Args:
        inner: bytes of its output; an activation without a gate works in place.
        block: bytes that a gated activation computes at a time.
    """
    if activation in ("swiglu", "geglu", "geglu_tanh"):
        return 3 * inner + min(inner, block)
    return (2 if activation == "squared_relu" else 1) * inner


def piece_sizes(positions: int, chunks: int) -> list[int]:
    """Return the number of positions of each piece, as in ``MLPPlan.pieces``; a test keeps them consistent."""
    count = max(1, min(chunks, positions))
    return [(i + 1) * positions // count - i * positions // count for i in range(count)]


@dataclass(frozen=True)
class PieceForm:
    """Memory of the largest piece, in bytes.

    Attributes:
        stream: bytes of the residual stream at the piece's positions of this rank.
        parts: number of ranks that shard the stream with tp_seq; 1 without it.
        tp: tensor-parallel size.
        wide, inner: bytes before and after the activation function, at the positions of all parts.
        activation: the activation function.
        dropout: True if dropout follows the MLP.
        receives: True if a reduce_scatter needs a receive buffer (gloo).
        block: bytes that a gated activation computes at a time.
    """

    stream: int
    parts: int
    tp: int
    wide: int
    inner: int
    activation: ActivationName
    dropout: bool
    receives: bool
    block: int

    @property
    def _whole(self) -> int:
        return self.stream * self.parts

    @property
    def _reducing(self) -> int:
        """Bytes of a piece whose output or input gradient is being reduced."""
        if self.parts > 1:
            return self._whole + self.stream + (self._whole if self.receives else 0)
        return self.stream if self.tp > 1 else 0

    def forward(self) -> list[Named]:
        """Buffers of the forward pass of one piece."""
        ahead = self.stream + self._whole if self.parts > 1 else 0
        return [
            ("MLP, a piece", self.wide + self.inner), ("MLP, a piece's input", self._whole),
            ("MLP, pieces on their way", ahead + self._reducing),
        ]  # fmt: skip

    def backward(self) -> list[Named]:
        """Return the memory of backward: the activation is recomputed, then its gradient is computed."""
        made = activation_backward(self.activation, self.inner, self.block)
        entered = self._whole + (self._whole if self.parts > 1 else self.stream if self.dropout else 0)
        dropped = self.stream if self.dropout else 0
        ahead = self.stream + dropped + 2 * self._whole if self.parts > 1 else 0
        return [
            ("MLP, a piece", self.wide + made), ("MLP, a piece's input and gradient", entered),
            ("MLP, pieces on their way", ahead + self._reducing),
        ]  # fmt: skip
