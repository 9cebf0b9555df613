"""Moments of a step at the LM head, in closed form: forward and backward together, one chunk of logits at a time."""

from __future__ import annotations

from megatron_sp.estimate.memory_plan import Line, Moment
from megatron_sp.estimate.memory_rank import RankForm
from megatron_sp.estimate.memory_zero import gradient_lines

_LOGITS, _GRADIENT = "one chunk of logits", "its gradient"
_PRODUCT = "gradient of the table, one chunk"
_WEIGHTED = "head's input of a chunk, weighted, or the last chunk's logits"


class HeadMoments:
    """Memory while the head computes the loss and its gradient, and while its own backward runs.

    Args:
        form: sizes of the rank.
    """

    def __init__(self, form: RankForm) -> None:
        self.model, self.shape, self.activations = form.workload.model, form.shape, form.activations
        self.zero, self.gradients = form.zero, form.gradients

    def params(self) -> Line:
        """Return the buffer of the head's parameters, which exists from the last block's forward pass on."""
        return Line("buffer for the head's parameters", self.zero.head_buffer * self.shape.e)

    def forward(self) -> list[Moment]:
        """Return the moment at a chunk of logits, and the last one, at which the reduction of the input's gradient starts."""
        lines = self._lines()
        return [Moment("forward", "LM head", tuple(lines)), self._end(lines)]

    def backward(self) -> list[Moment]:
        """Return the moments of the head's backward: before waiting for the reduction, and after it, when the gradient is scaled."""
        shape = self.shape
        table = Line("gradient of the table", self._table_gradient())
        base = [*gradient_lines(self.gradients.at_head()), self.params(), *self._kept_by_all(), table]
        if self.model.is_bert:
            return [self._bert_backward(base)]
        waiting = Line("gradient of the head's input", shape.whole_stream + shape.scattering)
        times = shape.stream * shape.wide // shape.e + (shape.stream if shape.is_16_bit else 0)
        scaled = [
            Line("gradient of the head's input", shape.stream),
            Line("gradient of the head's input, times what arrives", times),
        ]
        return [Moment("backward", "LM head begins", (*base, waiting)), Moment("backward", "LM head", (*base, *scaled))]

    def _lines(self) -> list[Line]:
        """Return the memory at a chunk of logits."""
        shape, tokens, bert = self.shape, self.shape.head_tokens, self.model.is_bert
        chunk = min(tokens, shape.head_chunk)
        # a last chunk that is shorter gets logits of its own while the others' still exist
        rest = tokens % chunk * shape.rows * shape.wide
        weighted = max(chunk * shape.h * shape.e, rest)
        if shape.cuda and shape.is_16_bit and not shape.fused:
            weighted = 0  # neither exists while the gradient is divided in fp32, which takes more
        divided = 0 if shape.fused else shape.wide
        more = chunk * shape.rows * (divided + shape.e) if shape.is_16_bit else 0  # divided, and rounded
        if shape.fused:  # by the time of the last chunk's logits the gradient of the others is gone
            weighted = max(chunk * shape.h * shape.e, rest - more)
        product = (
            shape.rows * shape.h * shape.e if shape.is_16_bit and not shape.cuda else 0
        )  # a GPU accumulates it in fp32, in place
        entering = tokens * shape.h * shape.e if bert else shape.stream
        return [
            *gradient_lines(self.gradients.at_head()), self.params(), *self._kept_by_all(), Line("head's input", entering),
            Line("head's input, gathered", 0 if bert else shape.gathered), Line("gradient of the head's input", tokens * shape.h * shape.e),
            Line(_LOGITS, chunk * shape.rows * shape.wide), Line(_GRADIENT, more), Line(_PRODUCT, product),
            Line("gradient of the table", self._table_gradient()), Line(_WEIGHTED, weighted),
            Line("labels, masks", shape.sp_tokens * 16 + chunk * 20),
            Line("labels of the masked tokens", tokens * 21 if bert else 0),
        ]  # fmt: skip

    def _end(self, lines: list[Line]) -> Moment:
        """Return the moment at the end: the reduction of the input's gradient starts while the last chunk of logits still exists."""
        shape = self.shape
        kept = [line for line in lines if line.name not in (_WEIGHTED, _PRODUCT, _GRADIENT)]
        chunk = min(shape.head_tokens, shape.head_chunk)
        last = shape.head_tokens % chunk
        if last:  # its logits have replaced those of the full chunks
            kept = [
                Line(line.name, round(line.num_bytes * (last / chunk))) if line.name == _LOGITS else line
                for line in kept
            ]
        scattered = Line("gradient of the head's input, scattered", 0 if self.model.is_bert else shape.scattering)
        return Moment("forward", "end of the LM head", (*kept, scattered))

    def _bert_backward(self, base: list[Line]) -> Moment:
        """Return the moment at which BERT's head scatters gradients from the masked positions to all; the order head has its own."""
        both = 2 if self.model.has_order_head else 1
        spread = Line("gradient of the head's input, at all positions", both * self.shape.whole_stream)
        return Moment(
            "backward", "LM head", (*base, Line("gradient of the head's input", 2 * self.shape.head_stream), spread)
        )

    def _kept_by_all(self) -> list[Line]:
        """Return the activations saved at the end of the forward pass: by all blocks, norms outside them, and BERT's head."""
        shape = self.shape
        final = Line("final norm's input", 0 if shape.post else shape.stream + shape.norm_stats)
        # the inputs of its linear layer, activation and norm
        bert = [Line("BERT's head", 3 * shape.head_tokens * shape.h * shape.e)] if self.model.is_bert else []
        return [*self.activations.kept_by_blocks(), self.activations.key_gradients(self.shape.layers), final, *bert]

    def _table_gradient(self) -> int:
        """Return the bytes of the table's gradient beside that of earlier micro-batches in the flat buffer; stages 2 and 3 reduce that."""
        return self.shape.rows * self.shape.h * self.shape.wide if self.gradients.table_is_apart else 0
