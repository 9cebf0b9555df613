"""Decision whether lines are possible for a model, made once for ``check()``, ``verify()`` and ``apply()``, which all begin with it.

The lines are applied to a copy of the model without weight values, exactly as they will be to the model itself.
Whatever that refuses is refused by all three, before the model is touched. Then ``check()`` follows placements through
a copy, ``verify()`` measures on ranks, and ``apply()`` changes the model.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from megatron_sp.schedule.apply import units, zero
from megatron_sp.schedule.apply.apply import apply
from megatron_sp.schedule.apply.guards import require_whole
from megatron_sp.schedule.check import local_rules
from megatron_sp.schedule.check.meta_copy import meta_copy, without_weights_in
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.placements import NotFollowed
from megatron_sp.utils.errors import ReportedError


def decide(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int) -> None:
    """Check everything that needs no run of the model: each line by itself, the lines together, sizes, heads, options.

    Args:
        model: whole; is not changed.
    Raises:
        ConfigError: the lines are impossible.
        NotFollowed: the model, or what a line puts into it, cannot be tried out without weight values, so there is no
            verdict.
    """
    require_whole(model)
    local_rules.require_in_order(model, directives, mesh)
    for line in directives:
        if line.do == "zero":
            zero.require(model, line.args, line.where)
            units.find_blocks(model, line.args.get("blocks"))
    try:
        apply(meta_copy(model), [_without_jobs(without_weights_in(d)) for d in directives if d.do != "zero"], mesh, seq_dim)
    except ReportedError:
        raise
    except Exception as error:  # a function of the user's own, or a copy that cannot be made
        name = type(model).__name__
        raise NotFollowed(f"{name} cannot be tried out without weight values: {type(error).__name__}: {error}") from error


def _without_jobs(line: Directive) -> Directive:
    """Return a line whose early exchanges are only checked, not started."""
    return replace(line, args={**line.args, "only_looks": True}) if line.do == "ulysses" else line
