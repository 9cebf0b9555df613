"""Traffic of one rank of a split model in one step, by exchange and axis, computed without other ranks or weight values.

The split model runs forward once on the meta device, as in ``dry_run.py``, and the bytes of every exchange are
recorded; there is no backward pass, since what an exchange sends there follows from its kind. A recomputed module
repeats the exchanges inside it, up to the last tensor that it saves for backward, where torch's recomputation stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.groups import Group
from megatron_sp.schedule.apply.apply import apply
from megatron_sp.schedule.apply.hf_attention import one_sequence_a_row
from megatron_sp.schedule.check.dry_run import LATER, inputs_of, without_overlap
from megatron_sp.schedule.check.follower import Follower
from megatron_sp.schedule.check.meta_copy import meta_copy, without_weights_in
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.paths import expand
from megatron_sp.schedule.core.placement_steps import tensors_in


@dataclass
class Sent:
    """Bytes that a rank sends in one exchange.

    Attributes:
        path: path of the enclosing module.
        name: name of the exchange in ``exchange_rules.py``.
        axis: axis of the mesh.
        forward, backward: bytes that a rank sends in each pass.
        again: recomputed modules that repeat this exchange.
    """

    path: str
    name: str
    axis: str
    forward: float
    backward: float
    again: list[str]


#: (all of the bytes of its input that leave a rank forward, and backward), in units of (n - 1) / n of them
_SENT: dict[str, Callable[[int, str], tuple[float, float]]] = {
    "copy_to": lambda n, grad: (0, 2),
    "split_column": lambda n, grad: (0, 2),
    "reduce_from": lambda n, grad: (2, 0),
    "split_row": lambda n, grad: (2, 0),
    "split_embedding": lambda n, grad: (2, 0),
    "gather_from": lambda n, grad: (n, 0 if grad == "slice" else n),
    "scatter_to": lambda n, grad: (0, 1),
    "reduce_scatter_to": lambda n, grad: (1, 1),
    "all_to_all": lambda n, grad: (1, 1),
}


def sent(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, batch: Mapping[str, Any]) -> list[Sent]:
    """Return all exchanges over tp and sp of one forward pass, in order.

    Args:
        batch: the model's keyword arguments.
    Raises:
        ConfigError: the split model cannot be run this way, or ``apply`` rejects the lines.
    """
    made, said = meta_copy(model), [without_overlap(d) for d in directives if d.do not in LATER]
    apply(made, [without_weights_in(d) for d in said], Mesh(tp=mesh.tp, sp=mesh.sp), seq_dim, rules=False)
    wire = _Wire(made, {axis: mesh.group(axis) for axis in ("tp", "sp")})
    for d in directives:
        if d.do == "checkpoint":
            for path in expand(made, d.on):
                wire.mark(path, made.get_submodule(path), d.args.get("policy", "full"))
    hooks = torch.autograd.graph.saved_tensors_hooks(wire.keep, lambda t: t)
    with hooks, wire.inside(), one_sequence_a_row():
        made(**inputs_of(batch))
    return wire.sent


class _Wire(Follower):
    """Follower that counts bytes sent and ignores placements."""

    def __init__(self, model: nn.Module, groups: Mapping[str, Group]) -> None:
        super().__init__(model)
        self.groups, self.sent = groups, list[Sent]()
        self._open: list[
            tuple[str, str, list[Sent]]
            # recomputed modules that are running: path, policy, exchanges since the last tensor that they save
        ] = []
        self._parameters = {id(p) for p in model.parameters()}

    def mark(self, path: str, module: nn.Module, policy: str) -> None:
        """Mark a module as recomputed in backward."""
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._open.append((path, policy, []))
            try:
                return inner(*args, **kwargs)
            finally:
                self._open.pop()

        forward.__wrapped__ = inner  # type: ignore[attr-defined]
        module.forward = forward  # type: ignore[method-assign]

    def keep(self, t: Tensor) -> Tensor:
        """Record that a tensor is saved for backward: recomputation repeats the exchanges before it."""
        for path, _, waiting in self._open:
            for each in waiting:
                each.again.append(path)
            waiting.clear()
        return t

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if (counts := _SENT.get(func.__name__)) is not None:
            self._count(func.__name__, counts, (*args, *(kwargs or {}).values()), result)
        return result

    def _count(self, name: str, counts: Callable[[int, str], tuple[float, float]], args: tuple[Any, ...], result: Any) -> None:
        axis = next((axis for axis, group in self.groups.items() for a in args if a is group), None)
        if axis is None:  # a layer whose sums are made elsewhere
            return
        n = self.groups[axis].size()
        x = result if name in ("split_row", "split_embedding") else next(tensors_in(args))
        grad = next((str(a) for a in args if isinstance(a, str)), "")
        forward, backward = (share * (n - 1) / n * x.nbytes for share in counts(n, grad))
        made = Sent(self._path(), name, axis, forward, backward if x.requires_grad or name == "split_column" else 0.0, [])
        self.sent.append(made)
        if name == "split_row":  # its input is saved after the sum
            made.again += [path for path, _, _ in self._open]
            return
        for _, policy, waiting in self._open:
            if forward and not (policy == "keep_gathered" and name == "gather_from"):
                waiting.append(made)


def again(found: list[Sent]) -> Iterator[tuple[str, float]]:
    """Yield (module, bytes that it sends again when it is recomputed)."""
    totals: dict[str, float] = {}
    for each in found:
        for path in each.again:
            totals[path] = totals.get(path, 0.0) + each.forward
    yield from totals.items()
