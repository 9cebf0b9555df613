"""Copies of models that are run for their shapes: parameters have no values, and code that inspects values is replaced."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.schedule.check.experts import use_first_expert
from megatron_sp.schedule.core.directives import Directive


def input_of(value: Tensor) -> Tensor:
    """Copy of an input on the CPU, detached from its graph."""
    return value.detach().cpu().requires_grad_(value.requires_grad)


def without_weights(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters have shapes only; buffers are real."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = new = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        new.__dict__.update(p.__dict__)
    return copy.deepcopy(model, memo)


def meta_copy(model: nn.Module, late: bool = False) -> nn.Module:
    """Return a copy to run, in training mode: the model may be evaluating now and train later, and then dropout counts.

    Args:
        late: floating point buffers have no values either, because results are written into them.
    """
    made = without_weights(model).train()
    for module in made.modules() if late else ():
        module._buffers.update({k: b.to("meta") for k, b in module._buffers.items() if b is not None and b.is_floating_point()})
    _compute_attention_here(made)
    use_first_expert(made)
    return made


def _compute_attention_here(model: nn.Module) -> None:
    """Use SDPA in place of a GPU kernel that a transformers model has chosen and that cannot run here; placements are the same."""
    configs: list[Any] = [getattr(m, "config", None) for m in model.modules()]
    for config in {id(c): c for c in configs}.values():
        if getattr(config, "_attn_implementation", "sdpa") not in ("sdpa", "eager", None):
            config._attn_implementation = "sdpa"


def without_weights_in(directive: Directive) -> Directive:
    """Return a line with a copy of the module that it brings, if any: splitting the copy does not split the real one."""
    new = directive.args.get("new")
    return replace(directive, args={**directive.args, "new": without_weights(new)}) if isinstance(new, nn.Module) else directive
