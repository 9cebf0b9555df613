"""Activation functions of the MLP as plain functions, forward and backward: one kernel each where Triton is there.

Callers save only the input and compute the output again: a quarter less memory for a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_sp.config.schema_model import ActivationName
from megatron_sp.ops.allocator import blocks, empty
from megatron_sp.ops.kernels.launch import is_fused


@dataclass(frozen=True)
class Activation:
    """One activation function; the input of a gated one is [gate | up]."""

    name: ActivationName

    @cached_property
    def width_factor(self) -> int:
        return 2 if self._is_gated else 1

    @cached_property
    def _is_gated(self) -> bool:
        return self.name in ("swiglu", "geglu", "geglu_tanh")

    @cached_property
    def _approximate(self) -> str:
        return "tanh" if self.name.endswith("_tanh") else "none"

    def forward(self, u: Tensor) -> Tensor:
        """Apply the activation: [..., width_factor * f] -> [..., f]."""
        if is_fused(u):
            from megatron_sp.ops.kernels import activations

            return activations.forward(u, self.name, gated=self._is_gated)
        if self._is_gated:
            width = u.shape[-1] // 2
            out = empty((*u.shape[:-1], width), dtype=u.dtype, device=u.device)
            rows, out_rows = u.reshape(-1, 2 * width), out.view(-1, width)
            for block in blocks(len(rows), width * u.element_size(), u.device):  # intermediate values stay in the cache
                gate, up = rows[block].chunk(2, dim=-1)
                self._gate(gate, out_rows[block]).mul_(up)
            return out
        if self.name == "squared_relu":
            return F.relu(u).square_()
        out = empty(u.shape, dtype=u.dtype, device=u.device)
        if self.name == "relu":
            return torch.clamp_min(u, 0, out=out)
        return torch.ops.aten.gelu.out(u, approximate=self._approximate, out=out)

    def backward_(self, grad: Tensor, u: Tensor) -> Tensor:
        """Return the gradient of ``u``, perhaps in the memory of ``grad``."""
        if is_fused(u):
            from megatron_sp.ops.kernels import activations

            return activations.backward_(grad, u, self.name, gated=self._is_gated)[0]
        if self._is_gated:
            width = u.shape[-1] // 2
            grad_u = empty(u.shape, dtype=u.dtype, device=u.device)
            rows, grads, grad_rows = u.reshape(-1, 2 * width), grad.reshape(-1, width), grad_u.view(-1, 2 * width)
            for block in blocks(len(rows), width * u.element_size(), u.device):
                (gate, up), (grad_gate, grad_up) = rows[block].chunk(2, dim=-1), grad_rows[block].chunk(2, dim=-1)
                self._gate(gate, grad_up).mul_(grads[block])
                self._gate_backward(grads[block] * up, gate, grad_gate)
            return grad_u
        if self.name == "squared_relu":
            return F.relu(u).mul_(2).mul_(grad)
        if self.name == "relu":
            return torch.ops.aten.threshold_backward.grad_input(grad, u, 0, grad_input=grad)
        return torch.ops.aten.gelu_backward.grad_input(grad, u, approximate=self._approximate, grad_input=grad)

    def makes_output_in_backward(self, u: Tensor) -> bool:
        return self._is_gated and is_fused(u)

    def backward_with_output_(self, grad: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        # the input's gradient and, in the memory of ``grad``, the output: one pass instead of two
        from megatron_sp.ops.kernels import activations

        grad_u, out = activations.backward_(grad, u, self.name, gated=True, wants_out=True)
        assert out is not None
        return grad_u, out

    def weighted_backward_(self, grad: Tensor, u: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Backward of weights [n, 1] * activation(u): gradient of u, product [n, f], gradient of the weights [n]."""
        if is_fused(u) or not self._is_gated:
            out = self.forward(u)
            of_weights = (grad * out).sum(1, dtype=weights.dtype)
            out.mul_(weights)
            return self.backward_(grad.mul_(weights), u), out, of_weights
        # the same with the gate's activation computed once
        grad_u, out = (empty(x.shape, dtype=u.dtype, device=u.device) for x in (u, grad))
        width = u.shape[-1] // 2
        of_weights = torch.empty(len(u), dtype=weights.dtype, device=u.device)
        for block in blocks(len(u), width * u.element_size(), u.device):
            (gate, up), (grad_gate, grad_up) = u[block].chunk(2, dim=-1), grad_u[block].chunk(2, dim=-1)
            torch.mul(self._gate(gate, grad_up), up, out=out[block])
            torch.sum(grad[block] * out[block], 1, dtype=weights.dtype, out=of_weights[block])
            out[block].mul_(weights[block])
            grad_up.mul_(grad[block].mul_(weights[block]))
            self._gate_backward(grad[block] * up, gate, grad_gate)
        return grad_u, out, of_weights

    def _gate(self, gate: Tensor, out: Tensor) -> Tensor:
        if self.name == "swiglu":
            return torch.ops.aten.silu.out(gate, out=out)
        return torch.ops.aten.gelu.out(gate, approximate=self._approximate, out=out)

    def _gate_backward(self, grad: Tensor, gate: Tensor, out: Tensor) -> None:
        if self.name == "swiglu":
            torch.ops.aten.silu_backward.grad_input(grad, gate, grad_input=out)
        else:
            torch.ops.aten.gelu_backward.grad_input(grad, gate, approximate=self._approximate, grad_input=out)
