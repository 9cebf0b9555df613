"""Activations of the MLP as pairs of plain functions, forward and backward.

They are not autograd functions: ``ops/linear.py`` calls them inside its own, keeps only the input of the activation and
computes the activation again in backward (one elementwise pass) instead of storing it: a quarter of a block's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.ops.memory import empty

ActivationName = Literal["gelu_tanh", "gelu", "swiglu", "squared_relu"]


@dataclass(frozen=True)
class Activation:
    """One activation; ``width_factor`` is how many times wider its input is than its output."""

    name: ActivationName

    @property
    def width_factor(self) -> int:
        return 2 if self.name == "swiglu" else 1

    def forward(self, u: Tensor) -> Tensor:
        """[..., width_factor * f] -> [..., f]; swiglu's input is [gate | up]."""
        if self.name == "swiglu":
            gate, up = u.chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        if self.name == "squared_relu":
            return F.relu(u).square_()
        out = empty(u.shape, dtype=u.dtype, device=u.device)
        return torch.ops.aten.gelu.out(u, approximate="tanh" if self.name == "gelu_tanh" else "none", out=out)

    def backward_(self, grad: Tensor, u: Tensor) -> Tensor:
        """Gradient of the input, from the gradient of the output, whose memory may be reused, and the input."""
        if self.name == "swiglu":
            gate, up = u.chunk(2, dim=-1)
            grad_u = torch.empty_like(u)
            grad_gate, grad_up = grad_u.chunk(2, dim=-1)
            torch.mul(grad, F.silu(gate), out=grad_up)
            grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
            return grad_u
        if self.name == "squared_relu":
            return F.relu(u).mul_(2).mul_(grad)
        approximate = "tanh" if self.name == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward.grad_input(grad, u, approximate=approximate, grad_input=grad)
