"""Moments of the forward and the backward pass of a model, or of a stage of a pipeline, in closed form."""

from __future__ import annotations

from megatron_sp.estimate.memory_block import BlockMoments, place_of
from megatron_sp.estimate.memory_head import HeadMoments
from megatron_sp.estimate.memory_plan import Line, Moment
from megatron_sp.estimate.memory_rank import RankForm
from megatron_sp.estimate.memory_zero import gradient_lines


class PassMoments:
    """Moments of a micro-batch's passes.

    Args:
        form: sizes of the rank, or of one of its stages.
    """

    def __init__(self, form: RankForm) -> None:
        self._form, self._head = form, HeadMoments(form)
        self._block = BlockMoments(form, self._head.params())

    def forward(self) -> list[Moment]:
        """Return the moments of the blocks' forward pass."""
        return self._block.forward()

    def head(self) -> list[Moment]:
        """Return the moments in which the head computes the loss, with its gradient."""
        return self._head.forward() if self._form.shape.share.has_head else []

    def backward(self) -> list[Moment]:
        """Return the moments of the backward pass, from the head to the embedding, and of the reductions after it."""
        form, shape, gradients = self._form, self._form.shape, self._form.gradients
        moments = self._head.backward() if shape.share.has_head else []
        for layer in telling_layers(form):
            moments += self._block.backward(layer)
        if shape.share.has_embedding:
            # or, of the same width, a copy without other ranks' rows
            widened = Line(
                "table's gradient, widened",
                shape.sp_tokens * shape.h * shape.wide if shape.is_16_bit or shape.tp > 1 else 0,
            )
            lines = *gradient_lines(gradients.at(0)), *self._block.stream_gradients(), widened, *self._left(0)
            moments.append(Moment("backward", "embedding", lines))
        return moments + self._reductions()

    def _left(self, blocks: int) -> list[Line]:
        """Return what backward has left behind when it has not left so many blocks: operands, and gradients of other slices' keys."""
        put_off = Line("operands of gradients that are put off", self._block.put_off_from(blocks))
        return [put_off, self._form.activations.key_gradients(blocks)]

    def weights(self) -> list[Moment]:
        """Return the moments in which gradients that backward has put off are written; their operands are counted elsewhere."""
        form, shape = self._form, self._form.shape
        made = list[Moment]()
        for layer in telling_layers(form):
            name = f"{place_of(layer, shape.layers)} block, gradients that were put off"
            moments = [
                (layer + 1, form.gradients.at(layer + 1)),
                *((layer, held) for held in form.gradients.reducing(layer + 1)),
            ]
            for first, held in moments:
                written = Line("operands of gradients that have been written", -self._block.put_off_from(first))
                made.append(Moment("backward", name, (*gradient_lines(held), written)))
        return made

    def _reductions(self) -> list[Moment]:
        """Return the moments of gradient reductions: when backward leaves a unit, and after the backward pass."""
        form, shape, gradients, layers = self._form, self._form.shape, self._form.gradients, self._form.shape.layers
        packed = [
            Line("what tp ranks sum, packed", form.shared_gradients(unit) * shape.wide) for unit in range(layers + 2)
        ]
        stream = [Line("gradient of the stream", shape.stream), Line("gradient of the head's input", shape.head_stream)]
        blocks = form.activations.kept_by_blocks()
        made = [
            Moment(
                "backward",
                "reduction of the head",
                (*gradient_lines(held), self._head.params(), *blocks, *self._left(layers), *stream),
            )
            for held in (gradients.reducing(layers + 1) if shape.share.has_head else ())
        ]
        for layer in telling_layers(form):
            kept = form.activations.kept_below(layer)
            for held in gradients.reducing(layer + 1):
                lines = (*gradient_lines(held), *kept, *stream, packed[layer + 1], *self._left(layer))
                made.append(Moment("backward", f"{place_of(layer, layers)} block, reduction", lines))
        if shape.share.has_embedding:
            for held in gradients.reducing(0):
                lines = *gradient_lines(held), packed[0], *self._left(0)
                made.append(Moment("backward", "reductions after the backward pass", lines))
        return made


def telling_layers(form: RankForm) -> list[int]:
    """Return the layers, last first, that can be at the peak: memory that changes evenly from block to block is largest at an end."""
    layers, recomputed = form.shape.layers, form.shape.recomputed
    chunks = {last - first for first, last in recomputed}
    even = (not chunks or (chunks == {1} and len(recomputed) == layers)) and len(set(form.shape.share.experts)) < 2
    ends = {0, 1, layers - 2, layers - 1} if even else set(range(layers))
    return sorted((layer for layer in ends if 0 <= layer < layers), reverse=True)
