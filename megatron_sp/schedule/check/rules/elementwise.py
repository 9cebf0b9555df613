"""Rules of functions that treat each element by itself, and of gates and comparisons that nearly do.

A share stays a share. A partial sum stays one under linear functions only: f(sum) must be the sum of f.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron_sp.schedule.check.rules.common import Rule, ask, join_complete, names, same_rule, uniform_or_joined
from megatron_sp.schedule.core.placement_steps import Step, broadcast, conflict, refuse_partial, refuse_partials
from megatron_sp.schedule.core.placements import Operand, Placement

LINEAR = names("add sub rsub neg mul rmul truediv div to float double half bfloat16 type type_as contiguous clone detach data")
ELEMENTWISE = LINEAR | names(
    """
    pow rpow rdiv floordiv floor_divide remainder mod exp log log2 sqrt rsqrt reciprocal square abs sign sin cos tanh
    sigmoid gelu silu relu relu6 leaky_relu elu selu celu mish softplus softsign hardtanh hardswish hardsigmoid log_sigmoid erf expm1
    log1p tan floor ceil round clamp clamp_min clamp_max clip maximum minimum where masked_fill addcmul addcdiv lerp dropout eq ne
    lt le gt ge and or xor invert logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not isnan isinf isfinite
    nan_to_num zeros_like ones_like full_like empty_like rand_like randn_like requires_grad_ requires_grad long int bool fill zero
    copysign threshold alpha_dropout
    erfc exp2 atan arctan asin arcsin acos arccos sinh cosh asinh acosh atanh arctanh sgn frac trunc fix fmod hypot atan2 arctan2 logaddexp
    logaddexp2 xlogy logit sinc lgamma digamma positive float_power absolute negative multiply subtract divide true_divide ldexp deg2rad
    rad2deg isclose isposinf isneginf signbit heaviside fmin fmax nextafter i0 erfinv log10 hardshrink softshrink tanhshrink
    _threshold polar complex angle conj conj_physical resolve_conj greater
    greater_equal less less_equal not_equal logical_xor bitwise_xor bitwise_left_shift bitwise_right_shift lshift rshift real imag
    """
)
#: functions that fill a new tensor with one value
UNIFORM_FACTORIES = names("zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like")


def elementwise(step: Step) -> Placement:
    operands = step.operands()
    if any(o.is_partial for o in operands):
        return _of_partial_sums(step, operands)
    ndim = step.result.ndim if isinstance(step.result, Tensor) else max(o.tensor.ndim for o in operands)
    return broadcast(step, operands, ndim)


def _of_partial_sums(step: Step, operands: list[Operand]) -> Placement:
    """Placement of a linear function of partial sums: their sum, or a multiple by what is the same on all ranks."""
    partial = [o for o in operands if o.is_partial]
    others = [o for o in operands if not o.is_partial]
    sums = step.name in ("add", "sub", "rsub")
    weighs = all(o.neutral or o.kind == "R" for o in others)  # a factor whose gradient is summed later (a router's weight of an expert)
    if step.name not in LINEAR or (others and (sums or not weighs)) or (sums and len(partial) < 2):
        refuse_partial(step, partial[0])
    divisor = step.name in ("div", "truediv") and step.operand(0, "input") not in partial
    result = step.result if isinstance(step.result, Tensor) else partial[0].tensor
    rounded = step.kwargs.get("rounding_mode") is not None or not (result.is_floating_point() or result.is_complex())
    product = len(partial) > 1 and not sums
    if divisor or rounded or product:
        refuse_partial(step, partial[0])
    return partial[0].placement


def retyped(step: Step) -> Placement:
    """Placement of ``to`` and ``type_as``: of the second argument only the dtype counts."""
    x = step.operands()[0]
    return elementwise(replace(step, args=(x.tensor,), kwargs={})) if x.differs else join_complete(step, [x])


def broadcast_tensors(step: Step) -> Placement:
    return broadcast(step, step.operands(), step.result[0].ndim)


def glu(step: Step) -> Placement:
    """Placement of ``glu``: if the dim is cut, each of its halves must be cut (a packed projection with blocks=2)."""
    x = step.operands()[0]
    dim = step.arg(1, "dim", -1) % x.tensor.ndim
    if not x.is_cut or x.dim != dim:
        return elementwise(step)
    if x.placement.blocks or x.placement.outer % 2:
        step.fail(f"{x.called}, {x.placement.describe()}, is two parts of which each rank has a piece: shard it with blocks=2", "E8")
    return x.placement.at(dim, x.placement.outer // 2)


def bucketize(step: Step) -> Placement:
    """Placement of ``bucketize``: each number is compared with all boundaries."""
    x, boundaries = step.operand(0, "input"), step.operand(1, "boundaries")
    if x is None or boundaries is None:
        return ask(step)
    refuse_partials(step, [x, boundaries])
    if boundaries.is_cut:
        conflict(step, [x, boundaries], "each number is compared with all boundaries, of which every rank has a share only")
    return x.placement if x.is_cut else uniform_or_joined(step, [x, boundaries])


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **same_rule("to type_as", retyped),
    "broadcast_tensors": broadcast_tensors,
    "glu": glu,
    "bucketize": bucketize,
}
