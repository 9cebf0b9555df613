"""What the MLP over pieces (``parallel/chunked_mlp.py``) holds beside the residual stream: plain numbers, for ``estimate/memory.py``.

forward     the piece's wide activation, in front of and behind the activation function; what enters and leaves with it
backward    the same and its gradient; with tp_seq the gathers of the piece behind and the reduction of the piece before
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sp.config.schema import ActivationName

Named = tuple[str, int]


def activation_backward(activation: ActivationName, inner: int, block: int) -> int:
    """Bytes that backward through the activation makes.

    Args:
        inner: bytes of its output. A plain one works in place.
        block: bytes that a gated one computes at a time.
    """
    if activation in ("swiglu", "geglu", "geglu_tanh"):
        return 3 * inner + min(inner, block)
    return (2 if activation == "squared_relu" else 1) * inner


def piece_sizes(positions: int, chunks: int) -> list[int]:
    """Positions of each piece, as ``MLPPlan.pieces`` cuts them; a test holds them together."""
    count = max(1, min(chunks, positions))
    return [(i + 1) * positions // count - i * positions // count for i in range(count)]


@dataclass(frozen=True)
class PieceForm:
    """Bytes of the largest piece.

    Attributes:
        stream: of the residual stream, positions of this rank.
        parts: of tp_seq: ranks that cut the stream, 1 without it.
        tp: ranks of the group.
        wide, inner: in front of the activation function and behind it, positions of all parts.
        activation: between the two.
        dropout: behind the MLP.
        receives: a reduce_scatter has a buffer for what arrives (gloo).
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
        """A piece on its way out."""
        if self.parts > 1:
            return self._whole + self.stream + (self._whole if self.receives else 0)
        return self.stream if self.tp > 1 else 0

    def forward(self) -> list[Named]:
        ahead = self.stream + self._whole if self.parts > 1 else 0
        return [
            ("MLP, a piece", self.wide + self.inner), ("MLP, a piece's input", self._whole),
            ("MLP, pieces on their way", ahead + self._reducing),
        ]  # fmt: skip

    def backward(self) -> list[Named]:
        """The activation computed again, then its gradient."""
        made = activation_backward(self.activation, self.inner, self.block)
        entered = self._whole + (self._whole if self.parts > 1 else self.stream if self.dropout else 0)
        dropped = self.stream if self.dropout else 0
        ahead = self.stream + dropped + 2 * self._whole if self.parts > 1 else 0
        return [
            ("MLP, a piece", self.wide + made), ("MLP, a piece's input and gradient", entered),
            ("MLP, pieces on their way", ahead + self._reducing),
        ]  # fmt: skip
