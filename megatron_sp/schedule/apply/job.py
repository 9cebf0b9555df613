"""One call of ``apply()``: the model, the lines to apply to it, and the ranks. Every phase takes it; none changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from megatron_sp.comm.groups import Group
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.paths import expand


@dataclass(frozen=True)
class ApplyJob:
    """Input of all phases.

    Attributes:
        model: changed in place, phase by phase.
        directives: the lines, in the order in which they were written.
        mesh: the ranks.
        seq_dim: the dim of activations that runs over positions.
    """

    model: nn.Module
    directives: list[Directive]
    mesh: Mesh
    seq_dim: int

    @property
    def tp(self) -> Group:
        """Group over which parameters are split."""
        return self.mesh.tp

    @property
    def tp_size(self) -> int:
        """Number of ranks that parameters are split over."""
        return self.mesh.tp.size()

    def each(self, *kinds: str) -> Iterator[tuple[Directive, str, nn.Module]]:
        """Yield (line, path, module) for all lines of these kinds; a module with several names once per line, under the first of them."""
        for directive in self.directives:
            if directive.do in kinds:
                found = {path: self.model.get_submodule(path) for path in expand(self.model, directive.on)}
                first = {id(module): path for path, module in reversed(found.items())}
                yield from ((directive, path, module) for path, module in found.items() if first[id(module)] == path)

    def first_names(self) -> dict[int, str]:
        """Return the first name of each parameter, by identity: tied parameters have several names."""
        return {id(p): name for name, p in self.model.named_parameters()}


def joined(path: str, name: str) -> str:
    """Return the full name of a parameter, buffer or child of the module at ``path``."""
    return f"{path}.{name}" if path else name
