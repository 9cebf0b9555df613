"""Operands of the weights' gradients that a backward pass puts off (``optim/gradients.py :: put_off``), in closed form.

Of each product grad_out.T @ x both stay until the gradient is written: what a linear layer has read, normed or activated again in
backward, and the gradient of what it has made. Sums for biases and norms are small, and stay, too.
"""

from __future__ import annotations

from megatron_sp.config.schema import ModelConfig
from megatron_sp.estimate.memory_attention import AttentionForm
from megatron_sp.estimate.memory_shape import RankShape


class PutOffForm:
    """Operands of a block, in bytes; all are 0 where nothing is put off.

    Attributes:
        activation: output of the MLP's activation.
        mlp: all operands of the MLP: with the activation its gradient before it, the normed input, the gradient of the output.
        heads: gradients of q, k and v by token, beside what arrives from other ranks.
        block: all operands of a block.
    """

    def __init__(self, model: ModelConfig, shape: RankShape, attention: AttentionForm) -> None:
        puts_off = shape.share.puts_off
        tokens = shape.sp_tokens * shape.e * puts_off
        self.normed = shape.whole_stream * puts_off
        self.gathered = shape.gathered * puts_off
        self.activation = tokens * shape.ffn
        self.wide = tokens * shape.ffn_in
        # the branches of a parallel residual have one gradient, unless each has been dropped from or gathered
        is_shared = shape.parallel_residual and not shape.dropout and shape.parts == 1
        self.mlp = self.activation + self.wide + (1 if is_shared else 2) * self.normed
        self.heads = tokens * attention.qkv_rows * (shape.sp > 1)
        sums = 2 * shape.norms * shape.h + model.mlp_bias * (shape.ffn_in + shape.h)
        sums += model.qkv_bias * attention.qkv_rows + model.proj_bias * shape.h
        of_attention = tokens * (attention.qkv_rows + attention.proj_columns) + 2 * self.normed
        self.block = self.mlp + of_attention + sums * shape.wide * puts_off
