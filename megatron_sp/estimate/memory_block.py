"""Moments of a step in the blocks, in closed form: the end of the forward pass, and a block's backward from its last op to its first."""

from __future__ import annotations

from megatron_sp.estimate.memory_activations import FOR_LATER
from megatron_sp.estimate.memory_expert_moments import experts_backward, experts_forward
from megatron_sp.estimate.memory_mlp import PieceForm, activation_backward
from megatron_sp.estimate.memory_plan import Line, Moment, total
from megatron_sp.estimate.memory_put_off import PutOffForm
from megatron_sp.estimate.memory_rank import RankForm
from megatron_sp.estimate.memory_shape import BLOCK_BYTES
from megatron_sp.estimate.memory_zero import gradient_lines
from megatron_sp.utils.remembered import remembered

_GATHERED = "gradient of the stream, gathered"
_PUT_OFF = "operands of gradients that are put off"
_ALL_ATTENTION = ("q, k, v", "attention output", "attention kernel's own", "keys and values of other ranks", FOR_LATER)


def place_of(layer: int, layers: int) -> str:
    """Return the words for a block in the name of a moment."""
    return "last" if layer == layers - 1 else "first" if layer == 0 else f"number {layer}"


class BlockMoments:
    """Memory in the forward pass of the last block, and in the backward of any block.

    Args:
        form: sizes of the rank.
        head_params: buffer of the head's parameters, which exists from the last block's forward pass on.
    """

    def __init__(self, form: RankForm, head_params: Line) -> None:
        self.model, self.kernels, self.head_params = form.workload.model, form.workload.kernels, head_params
        self.shape, self.attention, self.activations, self.gradients = (
            form.shape,
            form.attention,
            form.activations,
            form.gradients,
        )
        self._put_off = {
            has: PutOffForm(self.model, self.shape, self.attention, self.shape.experts if has else None)
            for has in (False, True)
        }
        self.piece = self._largest_piece()

    def forward(self) -> list[Moment]:
        """Return the moments of the last block's forward pass: in its attention, and at its end."""
        return [self._attention_forward(), self._end_of_forward(), *self._experts_before()]

    def backward(self, layer: int) -> list[Moment]:
        """Return the moments of a block's backward, in their order."""
        return [
            *self._norm_behind_backward(layer), *self._branch_backward(layer), *self._attention_backward(layer),
        ]  # fmt: skip

    def stream_gradients(self) -> list[Line]:
        """Return the gradients held throughout backward: of the stream (with dropout also of the branch), and of the head's input."""
        shape = self.shape
        return [
            Line("gradient of the stream", (2 if shape.dropout else 1) * shape.stream), Line(_GATHERED, shape.gathered),
            Line("gradient of the head's input", shape.head_stream),
        ]  # fmt: skip

    def put_off_of(self, layer: int) -> PutOffForm:
        """Return the operands of a block that are put off."""
        return self._put_off[self.shape.experts_of(layer) is not None]

    @remembered
    def put_off_from(self, first: int) -> int:
        """Return the bytes of the operands of all blocks from one on."""
        return sum(self.put_off_of(layer).block for layer in range(first, self.shape.layers))

    # forward

    def _own_input(self) -> int:
        """Return the last block's input where it is not that of the blocks which are recomputed together."""
        recomputed = self.shape.recomputed
        return self.shape.stream if recomputed and recomputed[-1][1] - recomputed[-1][0] > 1 else 0

    def _attention_forward(self) -> Moment:
        """Return the moment of the forward pass in the attention of the last block."""
        shape, attention, recomputed = self.shape, self.attention, self.shape.recomputed
        mlp = (
            0
            if recomputed
            else -total([*self.activations.mlp_keeps(shape.layers - 1), *[self.activations.norm_behind] * 2])
        )
        keeps = total(self.activations.attention_keeps(again=False)) - attention.results if recomputed else 0
        keeps += self._own_input()
        if self.kernels.recompute_qkv:
            keeps += max(chunk.heads for chunk in attention.remade)
        makes = attention.attention_blocks
        if shape.context is not None:
            makes = attention.across_forward(self.activations.blocks_with_attention(shape.layers - 1))
            makes += shape.whole_stream if shape.num_slices > 1 else 0  # the norm's output
        elif attention.uses_reference:
            # without gradients the mask is freed before the last product
            dropped = self.model.attention_dropout > 0 and self.kernels.recompute_granularity
            mask = attention.scores // shape.wide if dropped else 0
            makes = (
                attention.reference_makes
                + attention.reference_keeps
                - mask
                - (0 if recomputed else attention.kernel_keeps)
            )
            keeps -= attention.kernel_keeps if recomputed else 0
        return Moment(
            "forward", "attention of the last block",
            (
                *gradient_lines(self.gradients.forward()), self.head_params, *self.activations.kept_by_blocks(),
                Line("MLP, not there yet", mlp), self.activations.leaving(), Line("of a recomputed block", keeps),
                Line("attention kernel's temporaries", makes),
            ),
        )  # fmt: skip

    def _end_of_forward(self) -> Moment:
        """Return the moment at the end of the last block's forward pass: the MLP's activation and the block's output."""
        shape, experts = self.shape, self.shape.experts_of(self.shape.layers - 1)
        inside = self._own_input() + (total(self.activations.mlp_keeps(shape.layers - 1)) if shape.recomputed else 0)
        if experts is not None:
            made = experts_forward(experts, shape)
        elif shape.chunked:
            made = [*(Line(*named) for named in self.piece.forward()), Line("block's output", shape.stream)]
        else:
            made = [
                Line("MLP, after the activation", shape.sp_tokens * shape.ffn * shape.e),
                Line("block's output", shape.whole_stream),
            ]
            made.append(Line("block's output, scattered", shape.scattering))
        if not shape.recomputed:
            made.append(Line("norm after the MLP, not there yet", -self.activations.norm_behind.num_bytes))
        # a parallel residual does not save it: the MLP reads attention's input
        made.append(Line("sum after attention", shape.stream if shape.parallel_residual else 0))
        return Moment(
            "forward", "last block",
            (
                *gradient_lines(self.gradients.forward()), self.head_params, *self.activations.kept_by_blocks(),
                Line("of a recomputed block", inside), *made, self.activations.leaving(),
            ),
        )  # fmt: skip

    def _experts_before(self) -> list[Moment]:
        """Return the moment of the forward pass in the last layer with experts if that is not the last layer."""
        shape, layers = (
            self.shape,
            [layer for layer in range(self.shape.layers) if self.shape.experts_of(layer) is not None],
        )
        if not layers or layers[-1] == shape.layers - 1:
            return []
        assert shape.experts is not None
        again = self._is_again(layers[-1])  # then what its experts keep is there until they are done
        kept = (
            self.activations.mlp_keeps(layers[-1]) if again else self.activations.block_keeps(layers[-1], again=False)
        )
        lines = (
            *gradient_lines(self.gradients.forward()), *self.activations.kept_before(layers[-1]), *kept,
            *experts_forward(shape.experts, shape), Line("sum after attention", shape.stream if shape.parallel_residual else 0),
        )  # fmt: skip
        return [Moment("forward", f"{place_of(layers[-1], shape.layers)} block", lines)]

    # backward

    def _is_again(self, layer: int) -> bool:
        """Return whether a block is a recomputed one."""
        return layer in self.shape.made_again

    def _attention_keeps(self, layer: int) -> list[Line]:
        return self.activations.attention_keeps(again=self._is_again(layer))

    def _moment(self, layer: int, name: str, *lines: Line) -> Moment:
        place = place_of(layer, self.shape.layers)
        return Moment("backward", f"{place} block, {name}", (*self._held_throughout(layer), *lines))

    @remembered
    def _held_throughout(self, layer: int) -> tuple[Line, ...]:
        """Return the memory held throughout a block's backward: gradients, and the activations of the blocks below."""
        put_off = self.put_off_from(layer + 1)
        return (
            *gradient_lines(self.gradients.at(layer + 1)), *self.activations.kept_below(layer), Line(_PUT_OFF, put_off),
            self.activations.key_gradients(layer + 1),
        )  # fmt: skip

    def _from_outside(self, layer: int, attention: bool = False) -> Line:
        """Return the gradient of the output of a chunk of recomputed blocks; after the chunk's first op the stream's is another."""
        ends = {i: last for first, last in self.shape.recomputed for i in range(first, last)}
        apart = layer in ends and (attention or layer + 1 < ends[layer])
        # put off, it is an operand of the last of these blocks, and counted there
        apart &= not self.shape.share.puts_off or self.shape.dropout or self.shape.post or self.shape.parts > 1
        return Line("gradient of the recomputed blocks' output", self.shape.stream if apart else 0)

    def _local_gradients(self) -> list[Line]:
        """Return ``stream_gradients`` where nothing is gathered."""
        return [line for line in self.stream_gradients() if line.name != _GATHERED]

    def _norm_backward(self, *, adds: bool = True) -> list[Line]:
        """Return the memory of a norm's backward.

        Args:
            adds: another gradient of its input is added.
        """
        shape = self.shape
        sum_of_two = shape.norm_temporaries // 2 if shape.norms == 2 and not shape.fused and not adds else 0
        temporaries = Line("norm's temporaries", shape.norm_temporaries - sum_of_two)
        return [Line("gradient of the norm's input", shape.stream), temporaries]

    def _behind_product(self) -> list[Line]:
        """Return what comes after a projection's product with its weight: its norm; without one two gradients are added, in place."""
        return [] if self.shape.post else self._norm_backward()

    def _norm_behind_backward(self, layer: int) -> list[Moment]:
        """Return the moment in the norm after the MLP, with which the backward of a post-norm block begins; none without it."""
        if not self.shape.post:
            return []
        lines = (
            *self.activations.block_keeps(layer, again=self._is_again(layer)),
            *self._local_gradients(),
            *self._norm_backward(adds=False),
        )
        return [self._moment(layer, "norm after the MLP", *lines)]

    def _branch_backward(self, layer: int) -> list[Moment]:
        """Return the moments of the MLP's backward, or of that of experts."""
        experts = self.shape.experts_of(layer)
        if experts is None:
            return [self._mlp_backward(layer), *self._fc1_backward(layer)]
        kept = [*self._attention_keeps(layer), self.activations.norm_behind, *self.activations.mlp_keeps(layer)]
        held = [*kept, *self.stream_gradients(), self._from_outside(layer)]
        moments = experts_backward(
            experts, self.shape, self.model.activation, self._behind_product(), self.put_off_of(layer).mlp
        )
        # the block's own parameters are written from the router on, but for a shared expert and a norm behind the MLP
        late = 0 if experts.shared or self.shape.post else self.gradients.not_begun(layer + 1)
        absent, before = (
            Line("gradients of the block, not there yet", -late),
            [name for name, _ in moments].index("router"),
        )
        return [
            self._moment(layer, name, *held, *lines, *([absent] if index < before else ()))
            for index, (name, lines) in enumerate(moments)
        ]

    def _mlp_backward(self, layer: int) -> Moment:
        """Return the moment in the MLP's second linear layer: activation recomputed, and its gradient. Chunked: in the whole MLP."""
        shape, activations = self.shape, self.activations
        keeps = [*self._attention_keeps(layer), activations.norm_behind, *activations.mlp_keeps(layer)]
        if shape.chunked:
            stream = [
                Line("gradient of the stream", 2 * shape.stream),
                Line("gradient of the head's input", shape.head_stream),
            ]
            pieces = [Line(*named) for named in self.piece.backward()]
            pieces.append(Line(_PUT_OFF, self._put_off_in_pieces()))
            return self._moment(layer, "MLP", *keeps, *stream, self._from_outside(layer), *pieces)
        one = shape.sp_tokens * shape.ffn * shape.e
        made = Line("MLP, inside", activation_backward(self.model.activation, one, shape.gate_block))
        kept = Line(_PUT_OFF, 0 if shape.fused and shape.ffn_in > shape.ffn else self._put_off[False].activation)
        return self._moment(layer, "MLP", *keeps, *self.stream_gradients(), self._from_outside(layer), made, kept)

    def _put_off_in_pieces(self) -> int:
        """Return what the pieces of a chunked MLP have put off when the largest one is computed last."""
        share = max(self.shape.mlp_pieces) / self.shape.tp_seq_tokens
        others = int(
            (self._put_off[False].mlp - self._put_off[False].normed + self._put_off[False].gathered) * (1 - share)
        )
        return others + int(self._put_off[False].activation * share)

    def _fc1_backward(self, layer: int) -> list[Moment]:
        """Return the moments in the MLP's first linear layer: the second one's activations are freed."""
        shape, activations = self.shape, self.activations
        if shape.chunked:
            return []
        kept = [*self._attention_keeps(layer), activations.norm_behind, activations.mlp_keeps(layer)[0]]
        stream = [*self._local_gradients(), self._from_outside(layer)]
        wide = Line("gradient of the MLP, inside", shape.sp_tokens * shape.ffn_in * shape.e)
        product = [
            Line("norm's output", 0 if shape.post else shape.stream), Line("norm's output, gathered", shape.gathered),
            Line("gradient of the norm's output", shape.whole_stream + shape.scattering),
        ]  # fmt: skip
        norm = [
            Line("gradient of the norm's output", shape.stream),
            *self._behind_product(),
            Line(_PUT_OFF, self._put_off[False].normed),
        ]
        second = Line(_PUT_OFF, self._put_off[False].activation + self._put_off[False].gathered)
        return [
            self._moment(layer, "first linear layer", *kept, *stream, wide, second, *more) for more in (product, norm)
        ]

    def _attention_backward(self, layer: int) -> list[Moment]:
        """Return the moments from the attention's output to the norm before it."""
        attention = self.attention
        moments = [*self._core_backward(layer), *self._qkv_backward(layer)]
        if (
            attention.uses_reference
            and self.shape.context is None
            and (self.shape.recomputed or self.kernels.recompute_granularity)
        ):
            makes = attention.reference_makes + attention.reference_keeps - attention.kernel_keeps
            lines = (*self._at_attention(layer), Line("attention kernel's temporaries", makes))
            moments.append(self._moment(layer, "attention, made again", *self._attention_keeps(layer), *lines))
        return moments

    def _at_attention(self, layer: int, *, delayed: bool = True) -> list[Line]:
        """Return the gradients of streams while backward is in attention, and the operands of gradients that are put off.

        With a parallel residual the gradient of the MLP's input is held beside the block's own; with dropout the two
        are already summed.

        Args:
            delayed: what --delay-wgrad delays has not been computed yet.
        """
        waits = self.shape.parallel_residual and not self.shape.dropout
        waiting = Line("gradient of the MLP's input", self.shape.stream if waits else 0)
        put_off = Line(_PUT_OFF, self.put_off_of(layer).mlp if delayed or self.shape.share.puts_off else 0)
        begins = (
            0 < self.shape.slice == self.shape.num_slices - 1
        )  # with the last slice, whose backward pass is the first
        of_keys = Line("gradients of the keys of all slices", self.attention.d_keys if begins else 0)
        return [*self.stream_gradients(), waiting, self._from_outside(layer, attention=not waits), put_off, of_keys]

    def _core_backward(self, layer: int) -> list[Moment]:
        """Return the moments at the largest chunk of heads: in the kernel, in the rotary embedding, and as its gradient is sent."""
        shape, attention = self.shape, self.attention
        first, count = max(range(len(attention.chunks)), key=lambda i: attention.recv_buffers[i]), len(attention.chunks)
        d_out = attention.outs[first] * shape.padded // shape.length
        received = d_out if shape.sp > 1 else 0
        # with several chunks the next one's gradient is already on its way, and the last one's has not been received
        ahead = 2 * d_out if count > 1 and shape.sp > 1 else d_out if count > 1 else 0
        selective = self.kernels.recompute_granularity == "selective" and shape.context is None
        kernel = attention.scores if attention.uses_reference else attention.attention_grad_blocks
        if shape.context is not None:
            kernel = attention.across_backward(self.activations.blocks_with_attention(layer))
        if selective:  # recomputed
            log_sums = attention.num_queries * shape.all_tokens * max(4, shape.e)
            kernel += attention.outs[first] + (attention.reference_keeps if attention.uses_reference else log_sums)
        # recomputation and a GPU's kernels return three separate gradients; the fused projection needs them in one tensor
        apart = (
            (selective or shape.cuda) and attention.chunks[0].messages[0].part == "qkv" and not attention.uses_reference
        )
        if self.activations.remakes_heads(again=self._is_again(layer)):
            return self._remade_backward(layer, kernel, apart)
        base = [*self._attention_keeps(layer), *self._at_attention(layer)]
        after = [*self._attention_keeps(layer), *self._at_attention(layer, delayed=shape.sp > 1)]
        out, d_qkv = Line("gradient of the attention's output", d_out + ahead), attention.recv_buffers[first]
        of_all_slices = attention.kept_keys if not shape.is_16_bit else 0  # in the gradients of the keys of all slices
        return [
            self._moment(
                layer, "attention", *base, Line("gradient of the attention's output", max(d_out + ahead, received)),
                Line("gradient of q, k, v", d_qkv - of_all_slices), Line("attention kernel's temporaries", kernel),
            ),
            self._moment(
                layer, "rotary embedding", *after, out, Line("gradient of q, k, v", d_qkv - of_all_slices),
                Line("gradients of q, k and v, apart", d_qkv if apart else 0),
                Line("gradient of q, k, v, turned back", attention.rotary_makes),
            ),
            self._moment(
                layer, "exchange of the gradient of q, k, v", *after, out,
                Line("gradient of q, k, v", d_qkv + (attention.sent[first] if shape.sp > 1 else 0)),
            ),
        ]  # fmt: skip

    def _remade_backward(self, layer: int, kernel: int, apart: bool) -> list[Moment]:
        """Return the moments of ``_core_backward`` where q, k and v are made again, for each chunk; arguments as computed there."""
        attention, moments = self.attention, list[Moment]()
        base = [*self._attention_keeps(layer), *self._at_attention(layer)]
        for left, chunk in zip(reversed(range(len(attention.remade))), attention.remade, strict=True):
            heads = Line("q, k, v", chunk.heads)
            lines = [
                *base, Line("norm's output, for heads to come", self.shape.whole_stream if left > 1 else 0),
                Line("gradient of the attention's output", chunk.d_out + chunk.d_coming),
                Line("gradient of q, k, v, as it arrives", chunk.behind), Line("gradient of q, k, v", chunk.d_heads),
            ]  # fmt: skip
            turned = Line("gradient of q, k, v, turned back", (chunk.d_heads if apart else 0) + attention.rotary_makes)
            moments += [
                self._moment(layer, "attention", *lines, heads, Line("attention kernel's temporaries", kernel)),
                self._moment(layer, "rotary embedding", *lines, heads, turned),
                self._moment(
                    layer,
                    "exchange of the gradient of q, k, v",
                    *lines,
                    Line("q, k, v", chunk.staying),
                    Line("its exchange", chunk.sent),
                ),
            ]
        return moments

    def _qkv_backward(self, layer: int) -> list[Moment]:
        """Return the moments in the QKV projection and in the norm before it, with the gradients of all chunks."""
        shape, attention = self.shape, self.attention
        kept = [line for line in self._attention_keeps(layer) if line.name not in _ALL_ATTENTION]
        if not attention.joins:
            kept.append(Line("attention output", sum(attention.outs)))
        heads = sum(len(of_rank) for of_rank in attention.chunks[0].messages[0].rows)
        product = [
            *kept, *self._at_attention(layer, delayed=False),
            Line("gradient of q, k, v, as it arrives", sum(attention.sent)),
            Line("gradient of q, k, v, by token", heads * shape.d * shape.sp_tokens * shape.e if shape.sp > 1 else 0),
            Line("gradient of the norm's output", shape.whole_stream),
        ]  # fmt: skip
        normed = Line("norm's output, for all", shape.gathered if shape.post else shape.whole_stream)
        left = [normed] if shape.share.puts_off else []  # an operand of the weight's gradient, which is put off
        norm_output = Line("norm's output", shape.stream if shape.parts > 1 else 0)
        scattering = Line("gradient of the norm's output, scattered", shape.scattering)
        scattered = Line("gradient of the norm's output, scattered", shape.stream if shape.parts > 1 else 0)
        return [
            self._moment(layer, "QKV projection", *product, normed, norm_output, scattering),
            self._moment(layer, "norm before QKV", *product, *left, scattered, *self._behind_product()),
        ]

    def _largest_piece(self) -> PieceForm:
        """Return the form of the largest piece of a chunked MLP."""
        shape = self.shape
        tokens = max(shape.mlp_pieces)
        inside = tokens * shape.parts * shape.e
        return PieceForm(
            tokens * shape.h * shape.e, shape.parts, shape.tp, inside * shape.ffn_in, inside * shape.ffn, self.model.activation,
            shape.dropout, not shape.cuda, BLOCK_BYTES if not shape.cuda else inside * shape.ffn,
        )  # fmt: skip
