"""Decision whether lines are possible for a model, made before it is touched: ``verify()`` and ``apply()`` both begin with it.

The lines are applied to a copy of the model without weight values, exactly as they will be to the model itself.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_sp.schedule.apply import local_rules, units, zero
from megatron_sp.schedule.apply.apply import apply
from megatron_sp.schedule.apply.guards import require_whole
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.utils.errors import ReportedError


def decide(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int) -> None:
    """Check everything that needs no run of the model: each line by itself, the lines together, sizes, heads, options.

    Without a verdict if the model, or what a line puts into it, cannot be tried out without weight values.

    Args:
        model: whole; is not changed.
    Raises:
        ConfigError: the lines are impossible.
    """
    require_whole(model)
    local_rules.require_in_order(model, directives, mesh)
    for line in directives:
        if line.do == "zero":
            zero.require(model, line.args, line.where)
            units.find_blocks(model, line.args.get("blocks"))
    try:
        apply(without_weights(model), [without_weights_in(d) for d in directives if d.do != "zero"], mesh, seq_dim)
    except ReportedError:
        raise
    except Exception:  # a function of the user's own, or a copy that cannot be made
        return


def without_weights(model: nn.Module, buffers: bool = False) -> nn.Module:
    """Return a copy whose parameters have shapes only, in training mode; with ``buffers`` these, too. Tied weights stay tied."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = new = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        new.__dict__.update(p.__dict__)
    if buffers:
        memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, memo).train()


def without_weights_in(line: Directive) -> Directive:
    """Return a line for such a copy: a module that it brings is copied, early exchanges are checked and not started."""
    new = line.args.get("new")
    args = {**line.args, "new": without_weights(new)} if isinstance(new, nn.Module) else line.args
    return replace(line, args={**args, "only_looks": True} if line.do == "ulysses" else args)
