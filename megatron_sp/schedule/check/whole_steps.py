"""Steps of the whole model, call by call, with which those of the split model are compared: where sizes differ, a line is missing (E11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch import Tensor, nn

from megatron_sp.schedule.check.call_values import Seen
from megatron_sp.schedule.core.placement_steps import Step, conflict
from megatron_sp.schedule.core.placements import Operand, Placement


class WholeSteps:
    """Calls of the whole model by module, of which the split model's are expected to be the same.

    Args:
        expected: calls by path of the calling module; None: they are not known.
        same_program: the whole model has the same hooks and forwards as the split one.
    """

    def __init__(self, expected: Mapping[str, Sequence[Seen]] | None, *, same_program: bool) -> None:
        self.expected, self.same_program = expected, same_program
        self._done: dict[str, int] = {}
        self._strayed: set[str] = set()  # modules whose steps are no longer those of the whole model

    def next(self, path: str, module: nn.Module, name: str) -> Seen | None:
        """Return the whole model's call that corresponds to the next call in this module, or None if it is unknown."""
        if self.expected is None or path in self._strayed:
            return None
        at, steps = self._done.get(path, 0), self.expected.get(path, [])
        other_forward = "forward" in module.__dict__ and not self.same_program
        if other_forward or at >= len(steps) or steps[at].name != name:
            self._strayed.add(path)
            return None
        self._done[path] = at + 1
        return steps[at]


def require_same_factors(step: Step, whole: Seen | None) -> None:
    """Raise PlacementError if a step computes with another number than the whole model, such as one made of a share's size (E11)."""
    if whole is None or step.axis == "dp":
        return  # over dp each rank has its own rows, and the training loop divides by the number of all
    own = Seen.of(step.name, step.result, step.args, step.kwargs)
    all_alike = step.name != "setitem" and own.shapes == whole.shapes and not any(o.differs for o in step.operands())
    # where all ranks do what the whole model does, sizes are the same, too
    mine, theirs = (own.sizes, whole.sizes) if all_alike else (own.factors, whole.factors)
    if mine == theirs or len(mine) != len(theirs):
        return
    told = ", ".join(f"{a:g} where the whole model has {b:g}" for a, b in zip(mine, theirs, strict=True) if a != b)
    step.fail(
        f"computes with {told}: the number is made of a share's size, or of an attribute that was divided;"
        f" write it down, or multiply it by the {step.size} ranks of {step.axis}",
        "E11",
    )


def require_same_shapes(step: Step, results: Sequence[Tensor], placements: Sequence[Placement]) -> None:
    """Raise PlacementError if a share times the number of ranks does not have the whole model's shape (E11)."""
    for tensor, placement, whole in zip(results, placements, step.whole or [], strict=False):
        if placement.kind == "U":
            continue
        shape = list(tensor.shape)
        if placement.kind == "S":
            shape[placement.dim] *= step.size // placement.copies
        if shape != list(whole):
            told = "; ".join(f"{o.called} is {o.placement.describe()}" for o in step.operands())
            step.fail(
                f"makes {list(tensor.shape)}, that is {shape} over all ranks, and {list(whole)} in the whole model"
                f"{f' ({told})' if told else ''}: the module has a hard-coded size of the whole model, or one taken from a share;"
                f" divide it, .set('<attribute>', divide='{step.axis}')",
                "E11",
            )


def refuse_other_count(step: Step, results: Sequence[Tensor]) -> NoReturn:
    """Raise PlacementError: a step makes another number of tensors than in the whole model (E11)."""
    step.fail(
        f"makes {len(results)} tensors, and {len(step.whole or [])} in the whole model: that number is hard-coded in the module; divide it,"
        f" .set('<attribute>', divide='{step.axis}')",
        "E11",
    )


def explain_failure(step: Step, operands: Sequence[Operand], error: Exception) -> NoReturn:
    """Raise PlacementError for a call that fails in the split model alone, so a size does not fit (E10, E11)."""
    words = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    big = [o for o in operands if o.tensor.ndim and not o.is_filled]
    if any(o.is_cut for o in big) and any(o.placement != big[0].placement for o in big):
        conflict(step, [o for o in big if o.tensor.ndim > 1 or o.is_cut], "sizes do not fit; cut both alike, or make both whole")
    told = "; ".join(f"{o.called} is {o.placement.describe()}" for o in operands)
    step.fail(
        f"{words} ({told}). It works in the whole model, so the module has a hard-coded size of the whole model; divide it,"
        f" .set('<attribute>', divide='{step.axis}')",
        "E11",
    )


def share_of_filled(step: Step, tensor: Tensor, placement: Placement, whole: tuple[int, ...] | None) -> Placement:
    """Return the placement of a result; one filled with one value and as long as a share is S: counts of it, and writes, differ by rank."""
    if placement.kind != "U" or whole is None or len(whole) != tensor.ndim:
        return placement
    other = [dim for dim, n in enumerate(tensor.shape) if n != whole[dim]]
    if len(other) != 1 or not tensor.shape[other[0]] or whole[other[0]] % tensor.shape[other[0]]:
        return placement
    shares = whole[other[0]] // tensor.shape[other[0]]
    if step.size % shares:
        return placement
    return Placement("S", other[0], copies=step.size // shares, as_needed=True, since=f"{step.place} {step.name} of a share's size")
