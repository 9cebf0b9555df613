"""Rules of losses: each rank has the losses of its share. Their sum is a part of the whole's sum, but their mean is not."""

from __future__ import annotations

from dataclasses import replace

from megatron_sp.schedule.check.rules.common import Rule, ask, same_rule
from megatron_sp.schedule.core.placement_steps import Step, broadcast, conflict, cut, join, refuse_partials, require_parts, summed_over
from megatron_sp.schedule.core.placements import Placement

_BY_CLASSES = ("cross_entropy", "nll_loss")
_DIVIDES_BY_WEIGHTS = (*_BY_CLASSES, "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


def loss(step: Step) -> Placement:
    operands = step.operands()
    refuse_partials(step, operands)
    if not cut(operands):
        return join(step, operands)
    old_options = any(step.kwargs.get(name) is not None for name in ("size_average", "reduce"))
    if old_options or any(type(v) is bool for v in step.args[2:5]):
        return ask(step)
    by_classes = step.name in _BY_CLASSES
    rows = _rows_by_classes(step) if by_classes else broadcast(step, operands, max(o.tensor.ndim for o in operands))
    reduction = _reduction(step)
    if reduction == "none":
        return rows
    mean = reduction == "mean" or (reduction == "batchmean" and rows.dim == 0)
    has_weights = step.name in _DIVIDES_BY_WEIGHTS and len(operands) > 2
    ignores = by_classes and step.arg(4, "ignore_index", -100) != -100
    if mean and (has_weights or ignores):
        step.fail("the mean over a share counts weights, or labels, of that share: take reduction='sum' and divide by those of all", "E3")
    total = summed_over(step, replace(operands[0], placement=rows))
    return replace(total, mean=mean)


def _reduction(step: Step) -> str:
    """Return none, mean, sum or batchmean; torch's internal functions number the first three."""
    given = step.kwargs.get("reduction", next((v for v in step.args[2:] if isinstance(v, str)), None))
    if given is None and step.name in ("kl_div", "binary_cross_entropy_with_logits"):
        given = next((v for v in step.args[2:] if type(v) is int), None)
    return {0: "none", 1: "mean", 2: "sum", None: "mean"}.get(given, str(given))


def _rows_by_classes(step: Step) -> Placement:
    """Placement of each row's loss, for losses that need all classes of a row."""
    x, target = step.operand(0, "input"), step.operand(1, "target")
    assert x is not None and target is not None
    classes = 1 if x.tensor.ndim > 1 else 0
    if x.is_cut and x.dim == classes:
        step.fail(f"{x.called} is {x.placement.describe()}: this loss needs all classes; gather it first", "E3")
    rows = x.placement.at(x.dim - (x.dim > classes))
    of_target = x.placement if target.tensor.ndim == x.tensor.ndim else rows  # probabilities of all classes, or one class
    alike = x.is_cut and target.is_cut and of_target == target.placement
    alike = alike and (x.placement.as_needed, x.placement.copies) == (target.placement.as_needed, target.placement.copies)
    others = [o for o in step.operands() if o.tensor is not x.tensor and o.tensor is not target.tensor]
    if not alike or cut(others):
        conflict(step, [x, target, *others], "results and labels are cut in different ways")
    require_parts(step, step.operands(), x)
    return rows


def ctc_loss(step: Step) -> Placement:
    """Refuse ``ctc_loss`` unless its input [time, batch, classes] is whole: a row needs all times and classes."""
    x = step.operands()[0]
    return step.fail(
        f"{x.called} is {x.placement.describe()}, and this loss needs all times and classes of a row: make it whole first (all_gather)",
        "E3",
    )


RULES: dict[str, Rule] = {
    **same_rule("cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss", loss),
    **same_rule("binary_cross_entropy binary_cross_entropy_with_logits kl_div", loss),
    "ctc_loss": ctc_loss,
}
