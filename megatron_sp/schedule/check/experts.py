"""Mixture-of-experts modules of transformers: all experts' weights in one module, ``gate_up_proj`` [e, 2f, h] and ``down_proj`` [e, h, f].

Which rows go to which expert depends on values, so a dry run can follow neither the loop over experts nor the grouped
GEMMs that replace it. A row is treated alike by every expert, so the dry run sends all rows to the first one.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def is_experts(module: nn.Module) -> bool:
    """Return whether a module's class is one whose forward transformers replaces (``use_experts_implementation``)."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "has_bias", "_apply_gate", "down_proj"))


def use_first_expert(model: nn.Module) -> None:
    """Send every row to the first expert, in all such modules of a model that is run for its shapes."""
    for module in model.modules():
        if is_experts(module):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *rest: Any) -> Tensor:
    """Run the first expert: [tokens, h] -> [tokens, h], weighted by each token's first router weight."""
    up = "gate_up_proj" if self.has_gate else "up_proj"
    x = _product(self, hidden_states, up)
    x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
    x = _product(self, x, "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        x = self.post_expert_norm(x)
    return x * top_k_weights.reshape(x.shape[0], -1)[:, :1].to(x.dtype)


def _product(module: Any, x: Tensor, name: str) -> Tensor:
    weight = getattr(module, name)[0]
    bias = getattr(module, f"{name}_bias")[0] if module.has_bias else None
    return F.linear(x, weight.transpose(0, 1) if module.is_transposed else weight, bias)
