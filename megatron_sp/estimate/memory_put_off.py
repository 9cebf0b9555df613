"""Operands of the weights' gradients that a backward pass puts off (``optim/gradients.py :: put_off``) or delays, in closed form.

Of each product grad_out.T @ x both stay until the gradient is written: what a linear layer has read, normed or activated again in
backward, and the gradient of what it has made. Sums for biases and norms are small, and stay, too.

With --delay-wgrad only operands of the MLP's weights stay, until the last exchange of attention's backward. The gradients of a
block without biases then begin that late, too; the form has them from the block's beginning.
"""

from __future__ import annotations

from megatron_sp.config.schema import ModelConfig
from megatron_sp.estimate.memory_attention import AttentionForm
from megatron_sp.estimate.memory_experts import ExpertShape
from megatron_sp.estimate.memory_shape import RankShape


class PutOffForm:
    """Operands of a block, in bytes; all are 0 where nothing is put off.

    Args:
        experts: sizes of the block's experts, whose operands stay like those of an MLP; None: it has none.

    Attributes:
        activation: output of the MLP's activation.
        mlp: all operands of the MLP: with the activation its gradient before it, the normed input, the gradient of the output.
        heads: gradients of q, k and v by token, beside what arrives from other ranks.
        block: all operands of a block.
    """

    def __init__(
        self, model: ModelConfig, shape: RankShape, attention: AttentionForm, experts: ExpertShape | None = None
    ) -> None:
        puts_off = shape.share.puts_off
        of_fc2, of_fc1 = puts_off or shape.delays, puts_off or (shape.delays and shape.tp == 1)
        every = shape.sp_tokens * shape.e
        tokens = every * puts_off
        self.normed = shape.whole_stream * of_fc1
        self.gathered = shape.gathered * of_fc2
        self.activation = every * shape.ffn * of_fc2
        self.wide = every * shape.ffn_in * of_fc1
        # the branches of a parallel residual have one gradient, unless each has been dropped from or gathered
        is_shared = shape.parallel_residual and not shape.dropout and shape.parts == 1
        self.mlp = self.activation + self.wide + self.normed + (0 if is_shared else shape.whole_stream * of_fc2)
        if experts is not None:
            self.gathered = self.activation = self.wide = 0
            self.normed = shape.whole_stream * puts_off
            self.mlp = experts.operands(shape.whole_stream, shape.gathered) * puts_off
        self.heads = tokens * attention.qkv_rows * (shape.sp > 1)
        sums = 2 * shape.norms * shape.h + model.mlp_bias * (shape.ffn_in + shape.h)
        sums += model.qkv_bias * attention.qkv_rows + model.proj_bias * shape.h
        of_attention = every * (attention.qkv_rows + attention.proj_columns) + 2 * shape.whole_stream * of_fc1
        self.block = (self.mlp + of_attention + sums * shape.wide) * puts_off


def operands_of_blocks(model: ModelConfig, shape: RankShape, attention: AttentionForm, first: int = 0) -> int:
    """Return the bytes of the operands of all blocks from one on."""
    forms = {
        has: PutOffForm(model, shape, attention, shape.experts if has else None).block
        for has in set(shape.share.experts) or {False}
    }
    return sum(forms[bool(shape.share.experts) and shape.share.experts[layer]] for layer in range(first, shape.layers))
