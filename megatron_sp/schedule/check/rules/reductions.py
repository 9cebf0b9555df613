"""Rules of functions that are computed over some dims, each row by itself: sums, means, sorting, norms, fft.

Where the cut dim is among these, a rank has only some of what is needed. A sum is then a partial sum; anything else is
refused.
"""

from __future__ import annotations

from torch import Tensor

from megatron_sp.schedule.check.rules.common import Rule, as_list, same_rule
from megatron_sp.schedule.check.rules.elementwise import elementwise
from megatron_sp.schedule.core.placement_steps import (
    Step,
    broadcast,
    conflict,
    cut,
    join,
    refuse_partial,
    summed_over,
    tensors_in,
)
from megatron_sp.schedule.core.placements import Operand, Placement


def over(place: int, *, keeps: bool = False, sums: bool = False, least: int | None = None) -> Rule:
    """Return the rule of a function that is computed over some dims of a tensor.

    Args:
        place: index of the dims among the arguments.
        keeps: the result has all dims.
        sums: a sum over shares is a partial sum.
        least: default of the dims; None: all.
    """

    def rule(step: Step) -> Placement:
        x = step.operands()[0]
        if isinstance(step.arg(1, "other"), Tensor) and not step.name.endswith("quantile"):  # the larger of two tensors
            return elementwise(step)
        if x.is_partial and (not sums or step.name != "sum"):
            refuse_partial(step, x)
        if not x.is_cut:
            return x.placement if x.is_partial else join(step, step.operands())
        dims = _dims(step, x, place, least)
        if x.dim in dims:
            return _over_cut_dim(step, x, sums=sums)
        several = getattr(step.arg(1, "q"), "ndim", 0) if step.name.endswith("quantile") else 0  # one result for each, in front
        kept = keeps or next(tensors_in(step.result)).ndim - several == x.tensor.ndim  # keepdim= has other names and places, too
        return x.placement.at(several + x.dim - (0 if kept else sum(d < x.dim for d in dims)))

    return rule


def _dims(step: Step, x: Operand, place: int, least: int | None) -> list[int]:
    """Return the dims over which a function is computed."""
    given = step.arg(place, "dim", least)
    given = None if isinstance(given, bool) else given  # in std it is ``unbiased``
    ndim = x.tensor.ndim
    return list(range(ndim)) if given is None or given == () else [d % ndim for d in as_list(given)]


def _over_cut_dim(step: Step, x: Operand, *, sums: bool) -> Placement:
    if sums:
        return summed_over(step, x)
    if step.name == "mean" and step.axis == "dp":  # over a rank's own rows, as losses are
        return Placement("P", mean=True, since=f"{step.place} mean ({x.placement.since})")
    return step.fail(
        f"{x.called} is {x.placement.describe()}, and {step.name} runs over that dim, of which every rank has a share only:"
        " make it whole first (all_gather, or column(gather=True))",
        "E3",
    )


def norm(step: Step) -> Placement:
    """Placement of layer_norm and rms_norm: over the last dims, then weights."""
    x = step.operands()[0]
    width = len(as_list(step.arg(1, "normalized_shape")))
    if x.is_partial:
        refuse_partial(step, x)
    if x.is_cut and x.dim >= x.tensor.ndim - width:
        conflict(step, [x], "the norm runs over a dim of which every rank has a share only")
    return broadcast(step, step.operands(), x.tensor.ndim)


def diff(step: Step) -> Placement:
    """Placement of ``diff``: what is prepended or appended must be cut like the rest."""
    x, *ends = step.operands()
    made = over(2, keeps=True, least=-1)(step)
    assert isinstance(made, Placement)
    for o in ends:
        if o.is_partial:
            refuse_partial(step, o)
        if made.kind == "S" and not o.is_filled and (not o.is_cut or o.placement != made):
            conflict(step, [x, o], "they are cut in different ways")
    if made.kind != "S" and cut(ends):
        conflict(step, [x, *ends], "they are cut in different ways")
    return made


def cosine_similarity(step: Step) -> Placement:
    operands = step.operands()
    ndim = max(o.tensor.ndim for o in operands)
    made = broadcast(step, operands, ndim)
    if made.kind != "S":
        return made
    dim = step.arg(2, "dim", 1) % ndim
    if dim == made.dim:
        conflict(step, operands, "the dim that is compared is cut")
    return made.at(made.dim - (dim < made.dim))


RULES: dict[str, Rule] = {
    "sum": over(1, sums=True),
    **same_rule("nansum count_nonzero", over(1, sums=True)),
    **same_rule("mean amax amin max min argmax argmin all any prod std var logsumexp", over(1)),
    **same_rule("var_mean std_mean median nanmedian nanmean aminmax", over(1)),
    **same_rule("norm linalg_norm linalg_vector_norm quantile nanquantile", over(2)),
    "mode": over(1, least=-1),
    "kthvalue": over(2, least=-1),
    **same_rule("softmax log_softmax cumsum logcumsumexp", over(1, keeps=True)),
    **same_rule("sort argsort cummax cummin cumprod softmin", over(1, keeps=True, least=-1)),
    **same_rule("topk fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", over(2, keeps=True, least=-1)),
    "normalize": over(2, keeps=True, least=1),
    **same_rule("layer_norm rms_norm", norm),
    "diff": diff,
    "cosine_similarity": cosine_similarity,
}
