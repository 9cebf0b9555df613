"""Activations of the MLP as pairs of plain functions, forward and backward.

They are not autograd functions: ``ops/linear.py`` calls them inside its own, keeps only the input of the activation and
computes the activation again in backward (one elementwise pass) instead of storing it: a quarter of a block's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.config import ActivationName
from megatron_sp.ops.memory import empty


@dataclass(frozen=True)
class Activation:
    """One activation; ``width_factor`` is how many times wider its input is than its output."""

    name: ActivationName

    @property
    def width_factor(self) -> int:
        return 2 if self._is_gated else 1

    @property
    def _is_gated(self) -> bool:
        return self.name in ("swiglu", "geglu", "geglu_tanh")

    @property
    def _approximate(self) -> str:
        """Which GELU, as torch calls it."""
        return "tanh" if self.name.endswith("_tanh") else "none"

    def forward(self, u: Tensor) -> Tensor:
        """[..., width_factor * f] -> [..., f]; the input of a gated one is [gate | up]."""
        if self._is_gated:
            gate, up = u.chunk(2, dim=-1)
            return self._gate(gate).mul_(up)
        if self.name == "squared_relu":
            return F.relu(u).square_()
        out = empty(u.shape, dtype=u.dtype, device=u.device)
        if self.name == "relu":
            return torch.clamp_min(u, 0, out=out)
        return torch.ops.aten.gelu.out(u, approximate=self._approximate, out=out)

    def _gate(self, gate: Tensor) -> Tensor:
        """What the gate lets through."""
        return F.silu(gate) if self.name == "swiglu" else F.gelu(gate, approximate=self._approximate)

    def backward_(self, grad: Tensor, u: Tensor) -> Tensor:
        """Gradient of the input, from the gradient of the output, whose memory may be reused, and the input."""
        if self._is_gated:
            gate, up = u.chunk(2, dim=-1)
            grad_u = torch.empty_like(u)
            grad_gate, grad_up = grad_u.chunk(2, dim=-1)
            torch.mul(grad, self._gate(gate), out=grad_up)
            grad_gate.copy_(self._gate_backward(grad * up, gate))
            return grad_u
        if self.name == "squared_relu":
            return F.relu(u).mul_(2).mul_(grad)
        if self.name == "relu":
            return torch.ops.aten.threshold_backward.grad_input(grad, u, 0, grad_input=grad)
        return torch.ops.aten.gelu_backward.grad_input(grad, u, approximate=self._approximate, grad_input=grad)

    def _gate_backward(self, grad: Tensor, gate: Tensor) -> Tensor:
        if self.name == "swiglu":
            return torch.ops.aten.silu_backward(grad, gate)
        return torch.ops.aten.gelu_backward(grad, gate, approximate=self._approximate)
