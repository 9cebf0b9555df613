"""Can these lines be, of this model? Decided here, once, for all who ask: ``check()``, ``verify()`` and ``apply()`` begin with it.

The lines are applied to a copy of the model that has no numbers, exactly as they will be to the model itself, and whatever that refuses is
refused, by all three and before the model is touched. What is left to each: ``check()`` follows placements through the copy, ``verify()``
measures on ranks, ``apply()`` does it.
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
    """Ask all that needs no run of the model: each line by itself, the lines among themselves, sizes, heads, options.

    Args:
        model: whole; is not changed.
    Raises:
        ConfigError: the lines cannot be.
        NotFollowed: the model, or what a line puts into it, cannot be tried out without its numbers, so it is not known.
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
        raise NotFollowed(f"{name} cannot be tried out without its numbers: {type(error).__name__}: {error}") from error


def _without_jobs(line: Directive) -> Directive:
    """Exchanges that start early are looked at, and not begun."""
    return replace(line, args={**line.args, "only_looks": True}) if line.do == "ulysses" else line
