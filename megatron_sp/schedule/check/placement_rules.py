"""Table of what each torch function does to placements, with which a dry run follows shares and partial sums through a model.

A function of whole tensors alone needs no rule: it does the same on every rank. If one that gets a share, or a partial sum, is missing
from the table, an error asks for a rule (``teach``); nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_sp.schedule.core.kinds import ONE_FOR_ALL
from megatron_sp.schedule.core.placement_steps import (
    Step,
    broadcast,
    conflict,
    contract,
    cut,
    join,
    refuse_partial,
    require_parts,
    runs,
    summed_over,
    tensors_in,
)
from megatron_sp.schedule.core.placements import Operand, Placement

Rule = Callable[[Step], "Placement | list[Placement]"]
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def _words(text: str) -> list[str]:
    return text.split()


LINEAR = set(
    _words("""
    add sub rsub neg mul rmul truediv div to float double half bfloat16 type type_as contiguous clone detach data
    """)
)
ELEMENTWISE = LINEAR | set(
    _words("""
    pow rpow rdiv floordiv floor_divide remainder mod exp log log2 sqrt rsqrt reciprocal square abs sign sin cos tanh
    sigmoid gelu silu relu relu6 leaky_relu elu selu celu mish softplus softsign hardtanh hardswish hardsigmoid log_sigmoid erf expm1
    log1p tan floor ceil round clamp clamp_min clamp_max clip maximum minimum where masked_fill addcmul addcdiv lerp dropout eq ne
    lt le gt ge and or xor invert logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not isnan isinf isfinite
    nan_to_num zeros_like ones_like full_like empty_like rand_like randn_like requires_grad_ requires_grad long int bool fill zero
    copysign threshold alpha_dropout
    """)
)
EXPANSIONS = set(_words("expand expand_as broadcast_to"))
UNIFORM_FACTORIES = set(
    _words("""
    zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like
    """)
)


def retyped(step: Step) -> Placement:
    """Placement of ``to`` and ``type_as``: of the second argument only the dtype counts."""
    x = step.operands()[0]
    return elementwise(replace(step, args=(x.tensor,), kwargs={})) if x.kind in "SP" else join(step, [x])


def elementwise(step: Step) -> Placement:
    operands = step.operands()
    partial = [o for o in operands if o.kind == "P"]
    if partial:
        others = [o for o in operands if o.kind != "P"]
        sums = step.name in ("add", "sub", "rsub")
        weighs = all(o.neutral or o.kind == "R" for o in others)  # a factor whose gradient is summed later (a router's weight of an expert)
        if step.name not in LINEAR or (others and (sums or not weighs)) or (sums and len(partial) < 2):
            refuse_partial(step, partial[0])
        divided = step.name in ("div", "truediv") and step.operand(0, "input") not in partial
        result = step.result if isinstance(step.result, Tensor) else partial[0].tensor
        rounded = step.kwargs.get("rounding_mode") is not None or not (result.is_floating_point() or result.is_complex())
        if divided or rounded or (len(partial) > 1 and not sums):
            refuse_partial(step, partial[0])
        return partial[0].placement
    ndim = step.result.ndim if isinstance(step.result, Tensor) else max(o.tensor.ndim for o in operands)
    return broadcast(step, operands, ndim)


# moves


def moved(rule: Callable[[Step, Operand], Placement | list[Placement]]) -> Rule:
    """Return a rule for one tensor whose elements are only moved: what is not cut keeps its placement."""

    def of(step: Step) -> Placement | list[Placement]:
        x = step.operands()[0]
        if x.kind == "P" and isinstance(step.result, Tensor) and step.result.dtype != x.tensor.dtype:  # the same bits, read otherwise
            refuse_partial(step, x)
        return rule(step, x) if x.kind == "S" else x.placement

    return of


def reshape(step: Step, x: Operand) -> Placement:
    """Placement after a reshape: a dim is (outer, ranks, run), and the run's position among all elements gives its new dims."""
    placement, old, new = x.placement, tuple(x.tensor.shape), tuple(step.result.shape)
    if step.result.dtype.itemsize != x.tensor.dtype.itemsize:
        return ask(step)
    if placement.blocks:
        for j, n in enumerate(new):
            if n == old[placement.dim] and math.prod(new[j + 1 :]) == math.prod(old[placement.dim + 1 :]):
                return placement.at(j)
        step.fail(f"{x.called} is {placement.describe()} in parts of {list(placement.blocks)}: split it into these parts first", "E8")
    if old == new:
        return placement
    run = old[placement.dim] // placement.outer
    top = run * math.prod(old[placement.dim + 1 :])  # elements of one share that lie in one piece
    whole = step.whole[0] if step.whole else None
    asked = step.args[1] if len(step.args) == 2 else step.args[1:]
    left_open = list(asked).index(-1) if isinstance(asked, (tuple, list)) and -1 in asked else None
    for j in range(len(new)):
        behind = math.prod(new[j + 1 :])
        size_one = new[j] == 1 and behind == top  # a share of one: the whole model tells it from any other dim of one, or a size of -1 does
        if (
            not (behind < top <= behind * new[j] or (size_one and (whole is not None or j == left_open)))
            or top % behind
            or new[j] % (top // behind)
        ):
            continue
        outer = new[j] // (top // behind)
        if whole is None or _is_whole(new, j, step.size // placement.copies, whole):
            return placement.at(j, outer)
        if _is_whole(new, j, step.size, whole):  # heads that several ranks have were repeated for each of their queries
            return replace(placement.at(j, outer), copies=1)
    seen = f"; in the whole model it makes {list(whole)}" if whole else ""
    return step.fail(
        f"{x.called}, {placement.describe()}, becomes {list(new)}, in which no dim is {step.size} times as large in the whole model{seen}:"
        " a size that is written down in the module is the whole model's; divide it, .set('<attribute>', divide='tp')",
        "E11",
    )


def _is_whole(local: tuple[int, ...], dim: int, size: int, whole: tuple[int, ...]) -> bool:
    return len(local) == len(whole) and all(n * (size if i == dim else 1) == w for i, (n, w) in enumerate(zip(local, whole, strict=True)))


def transpose(step: Step, x: Operand) -> Placement:
    ndim = x.tensor.ndim
    if ndim < 2:
        return x.placement
    if step.name in ("t", "T", "mT", "H", "mH", "adjoint"):
        first, second = ndim - 2, ndim - 1
    else:
        words = ("axis0", "axis1") if "axis0" in step.kwargs or "axis1" in step.kwargs else ("dim0", "dim1")
        first, second = (step.arg(i, name) % ndim for i, name in enumerate(words, 1))
    return x.placement.at({first: second, second: first}.get(x.placement.dim, x.placement.dim))


def permute(step: Step, x: Operand) -> Placement:
    order = [d % x.tensor.ndim for d in step.rest(1, "dims")]
    return x.placement.at(order.index(x.placement.dim))


def movedim(step: Step, x: Operand) -> Placement:
    ndim = x.tensor.ndim
    source, target = step.arg(1, "source"), step.arg(2, "destination")
    if not isinstance(source, int) or not isinstance(target, int):
        return ask(step)
    order = [d for d in range(ndim) if d != source % ndim]
    order.insert(target % ndim, source % ndim)
    return x.placement.at(order.index(x.placement.dim))


def unsqueeze(step: Step, x: Operand) -> Placement:
    dim = step.arg(1, "dim") % (x.tensor.ndim + 1)
    return x.placement.at(x.placement.dim + (dim <= x.placement.dim))


def squeeze(step: Step, x: Operand) -> Placement:
    given = step.arg(1, "dim")
    dims = range(x.tensor.ndim) if given is None else [d % x.tensor.ndim for d in ([given] if isinstance(given, int) else given)]
    gone = [d for d in dims if x.tensor.shape[d] == 1]
    if x.placement.dim in gone:
        step.fail(f"{x.called} is {x.placement.describe()}, of which this rank has one and others too: that dim cannot go", "E11")
    return x.placement.at(x.placement.dim - sum(d < x.placement.dim for d in gone))


def expand(step: Step) -> Placement:
    x = step.operands()[0]
    return _expand_share(step, x) if x.kind == "S" else expand_whole(step)


def _expand_share(step: Step, x: Operand) -> Placement:
    """Placement of an expanded share; heads that several ranks have, if repeated for each rank's queries, are then cut along that dim."""
    placement, local = x.placement.at(x.placement.dim + step.result.ndim - x.tensor.ndim), tuple(step.result.shape)
    whole = step.whole[0] if step.whole and placement.copies > 1 else ()
    for j in range(len(local) if len(whole) == len(local) else 0):
        if j == placement.dim or whole[j] != local[j] * placement.copies:
            continue
        if placement.copies < step.size:
            step.fail(f"{x.called}, of which {placement.copies} ranks each have the same share, becomes cut along two dims", "unknown")
        return replace(placement.at(j, 1), copies=1)
    return placement


def expand_whole(step: Step) -> Placement:
    """Placement of a whole tensor repeated to the length of a share (this rank's heads, say): all shares of what is repeated are alike."""
    x, local = step.operands()[0], tuple(step.result.shape)
    whole = step.whole[0] if step.whole else local
    for j, n in enumerate(local if len(local) == len(whole) else ()):
        if n != whole[j] and _is_whole(local, j, step.size, whole) and x.kind != "P":
            made = Placement("S", j, since=f"{step.place} {step.name} to the size of a share")
            require_parts(step, [x], Operand(step.result, made))
            return made
    return x.placement if x.kind in "PU" else join(step, step.operands())


def split(step: Step, x: Operand) -> Placement | list[Placement]:
    """Placement of ``split``: along the cut dim only into the parts that are cut one by one."""
    dim = step.arg(2, "dim", 0) % x.tensor.ndim
    if dim != x.placement.dim:
        return x.placement
    pieces = [piece.shape[dim] for piece in step.result]
    if len(pieces) == 1:
        return x.placement
    if x.placement.blocks:
        if list(x.placement.blocks) == pieces:
            return replace(x.placement, blocks=())
    else:
        run = x.tensor.shape[dim] // x.placement.outer
        if all(n % run == 0 for n in pieces):
            return [x.placement.at(dim, max(1, n // run)) for n in pieces]
    if set(pieces) == {1}:
        step.fail(
            f"{x.called}, {x.placement.describe()}, is taken apart one by one, and each rank has some of them alone, so what is meant for"
            f" each (a norm for every head) meets others: {ONE_FOR_ALL}",
            "E8",
        )
    return step.fail(
        f"{x.called}, {x.placement.describe()}, is taken apart into {pieces} along that dim, so it is a packed projection and each rank has"
        f" some of the parts: shard it with blocks={len(pieces)} (or the parts' sizes), so that each rank has a share of every part",
        "E8",
    )


def unbind(step: Step, x: Operand) -> Placement:
    dim = step.arg(1, "dim", 0) % x.tensor.ndim
    if dim == x.placement.dim:
        conflict(step, [x], "one of a cut dim is taken, which is another one on each rank")
    return x.placement.at(x.placement.dim - (dim < x.placement.dim))


def narrow(step: Step, x: Operand) -> Placement:
    if step.arg(1, "dim") % x.tensor.ndim == x.placement.dim and step.result.shape != x.tensor.shape:
        conflict(step, [x], "part of a cut dim is taken, which is another part on each rank")
    return x.placement


def getitem(step: Step) -> Placement:
    x, named = step.look(step.args[0]), [step.look(i) for i in tensors_in(step.args[1])]
    for i in named:
        if i.kind == "P":
            refuse_partial(step, i)
    if x.kind in "PU":
        return ask(step) if cut(named) else x.placement
    if x.kind != "S":
        return join(step, step.operands())
    index = step.args[1] if isinstance(step.args[1], tuple) else (step.args[1],)
    if any(isinstance(i, (Tensor, list)) for i in index):
        return ask(step)
    used = sum(i is not None and i is not Ellipsis for i in index)
    old = new = 0
    for i in index:
        if i is None:
            new += 1
            continue
        width = x.tensor.ndim - used if i is Ellipsis else 1
        if old <= x.placement.dim < old + width:
            size = x.tensor.shape[x.placement.dim]
            if i is Ellipsis or (isinstance(i, slice) and len(range(*i.indices(size))) == size and i.step in (None, 1)):
                return x.placement.at(new + x.placement.dim - old)
            conflict(step, [x], f"part of a cut dim is taken ({i}), which is another part on each rank")
        old += width
        new += 0 if isinstance(i, int) else width
    return x.placement.at(new + x.placement.dim - old)


def cat(step: Step) -> Placement:
    operands = [o for o in step.operands() if o.tensor.shape != (0,)]  # an empty one joins anything
    if not cut(operands):
        return elementwise_whole(step, operands)
    dim = step.arg(1, "dim", 0) % step.result.ndim
    shares = cut(operands)
    first = next((o for o in shares if not o.placement.as_needed), shares[0])  # what is cut as needed is cut as the others
    for o in operands:
        if o.kind == "P":
            refuse_partial(step, o)
        if o.kind != "U" and (o.kind != "S" or o.placement != first.placement):
            conflict(step, [first, o], "they are cut in different ways")
    if step.name != "stack" and dim == first.placement.dim and len(operands) > 1:
        conflict(step, operands, "joined along the cut dim, each rank's shares would lie between those of others")
    return first.placement.at(first.placement.dim + (step.name == "stack" and dim <= first.placement.dim))


def elementwise_whole(step: Step, operands: list[Operand]) -> Placement:
    for o in operands:
        if o.kind == "P":
            refuse_partial(step, o)
    return join(step, operands)


def repeat_interleave(step: Step, x: Operand) -> Placement:
    dim, times = step.arg(2, "dim"), step.arg(1, "repeats")
    if not isinstance(dim, int):
        return ask(step)
    along = dim % x.tensor.ndim == x.placement.dim  # every element so many times: a share of the whole's, too
    is_one = along and x.placement.copies > 1 and x.tensor.shape[x.placement.dim] == 1 and isinstance(times, int)
    if (
        is_one and step.whole and _is_whole(tuple(step.result.shape), x.placement.dim, step.size, step.whole[0])
    ):  # a head that several ranks have, for their queries
        return replace(x.placement, copies=1)
    return x.placement if not along or (isinstance(times, int) and not x.placement.blocks) else ask(step)


def flip(step: Step, x: Operand) -> Placement:
    return x.placement if x.placement.dim not in [d % x.tensor.ndim for d in step.rest(1, "dims")] else ask(step)


def roll(step: Step, x: Operand) -> Placement:
    dims = step.arg(2, "dims")
    return x.placement if dims is not None and x.placement.dim not in [d % x.tensor.ndim for d in _list(dims)] else ask(step)


def triangle(step: Step, x: Operand) -> Placement:
    return x.placement if x.placement.dim < x.tensor.ndim - 2 else ask(step)


# sums, norms, products


def _list(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


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
        if x.kind == "P" and (not sums or step.name != "sum"):
            refuse_partial(step, x)
        if x.kind != "S":
            return x.placement if x.kind == "P" else join(step, step.operands())
        given = step.arg(place, "dim", least)
        given = None if isinstance(given, bool) else given  # of std: whether it is unbiased
        ndim = x.tensor.ndim
        dims = range(ndim) if given is None or given == () else [d % ndim for d in _list(given)]
        if x.placement.dim in dims:
            if sums:
                return summed_over(step, x)
            if step.name == "mean" and step.axis == "dp":  # of a rank's own rows, as losses are
                return Placement("P", mean=True, since=f"{step.place} mean ({x.placement.since})")
            step.fail(
                f"{x.called} is {x.placement.describe()}, and {step.name} runs over that dim, of which every rank has a share only:"
                " make it whole first (all_gather, or column(gather=True))",
                "E3",
            )
        several = getattr(step.arg(1, "q"), "ndim", 0) if step.name.endswith("quantile") else 0  # one result for each, in front
        kept = keeps or next(tensors_in(step.result)).ndim - several == ndim  # keepdim= has other names and places, too
        return x.placement.at(several + x.placement.dim - (0 if kept else sum(d < x.placement.dim for d in dims)))

    return rule


def norm(step: Step) -> Placement:
    """Placement of layer_norm and rms_norm: over the last dims, then weights."""
    x = step.operands()[0]
    width = len(_list(step.arg(1, "normalized_shape")))
    if x.kind == "P":
        refuse_partial(step, x)
    if x.kind == "S" and x.placement.dim >= x.tensor.ndim - width:
        conflict(step, [x], "the norm runs over a dim of which every rank has a share only")
    return broadcast(step, step.operands(), x.tensor.ndim)


def linear(step: Step) -> Placement:
    x, weight = step.operand(0, "input"), step.operand(1, "weight")
    assert x is not None and weight is not None
    rows, outputs = "abcdefgh"[: x.tensor.ndim - 1], "n"[: weight.tensor.ndim - 1]
    return biased(step, contract(step, [(x, rows + "k"), (weight, outputs + "k")], rows + outputs), step.operand(2, "bias"))


def addmm(step: Step) -> Placement:
    names = ("input", "batch1", "batch2") if step.name == "baddbmm" else ("input", "mat1", "mat2")
    bias, x, weight = (step.operand(i, name) for i, name in enumerate(names))
    assert x is not None and weight is not None
    batch = "b" * (x.tensor.ndim - 2)
    return biased(step, contract(step, [(x, batch + "mk"), (weight, batch + "kn")], batch + "mn"), bias)


def biased(step: Step, product: Placement, bias: Operand | None) -> Placement:
    if bias is None:
        return product
    if product.kind == "P":
        step.fail(
            f"each rank would add {bias.called} to its partial sum, so it counts {step.size} times: the sum must be made in front of the"
            " bias, with .row() or .sync('fwd_post', ...) on the layer itself",
            "E3",
        )
    if product.kind == "S" and bias.kind != "S" and bias.kind != "U":
        last = product.dim == step.result.ndim - 1
        if last and bias.tensor.shape[-1:] != (1,):
            step.fail(f"{bias.called} is whole, and the outputs it is added to are {product.describe()}: split it along", "E4")
        return broadcast(step, [Operand(step.result, product), bias], step.result.ndim)
    if product.kind == "S" and bias.kind == "S":
        return broadcast(step, [Operand(step.result, product), bias], step.result.ndim)
    if bias.kind == "S" and product.kind != "S":
        step.fail(f"{bias.called} is {bias.placement.describe()}, and what it is added to is whole: split the weight along", "E4")
    return product if product.kind == "S" else join(step, [Operand(step.result, product), bias])


def matmul(step: Step) -> Placement:
    x, y = step.operands()[:2]
    if step.name == "rmatmul":
        x, y = y, x
    if x.tensor.ndim < 2 or y.tensor.ndim < 2:
        return ask(step) if cut([x, y]) else elementwise_whole(step, [x, y])
    batch = "abcdefgh"[: max(x.tensor.ndim, y.tensor.ndim) - 2]
    of = (batch[len(batch) - x.tensor.ndim + 2 :] + "mk", batch[len(batch) - y.tensor.ndim + 2 :] + "kn")
    return contract(step, [(x, of[0]), (y, of[1])], batch + "mn")


def einsum(step: Step) -> Placement:
    """Placement of ``einsum``, also with an ellipsis or without an arrow: what they stand for is written out."""
    equation, operands = str(step.args[0]).replace(" ", ""), step.operands()
    left, arrow, out = equation.partition("->")
    names = left.split(",")
    if not arrow:
        out = "..." * ("." in left) + "".join(sorted(c for c in set(left) - set(",.") if left.count(c) == 1))
    free = [c for c in _LETTERS if c not in equation]
    dots = max((o.tensor.ndim - len(n.replace("...", "")) for o, n in zip(operands, names, strict=True) if "..." in n), default=0)
    rest = "".join(free[:dots])
    names = [n.replace("...", rest[dots - (o.tensor.ndim - len(n.replace("...", ""))) :]) for o, n in zip(operands, names, strict=True)]
    return contract(step, list(zip(operands, names, strict=True)), out.replace("...", rest))


def attention(step: Step) -> Placement:
    """Placement of ``scaled_dot_product_attention``, which exchanges nothing between heads or between sequences."""
    q, k, v = (step.operand(i, name) for i, name in enumerate(("query", "key", "value")))
    mask = step.operand(3, "attn_mask")
    assert q is not None and k is not None and v is not None
    for o in (q, k, v):
        if o.kind == "P":
            refuse_partial(step, o)
        if o.kind == "S" and o.placement.dim >= o.tensor.ndim - 2:
            conflict(step, [o], "attention needs all positions and all of a head")
    if not cut([q, k, v]):
        return join(step, step.operands())
    for o in (q, k, v):
        parts = [n * q.tensor.shape[o.placement.dim] for n in runs(o)], [n * o.tensor.shape[o.placement.dim] for n in runs(q)]
        if o.kind != "S" or o.placement.dim != q.placement.dim or parts[0] != parts[1]:
            conflict(step, [q, k, v], "queries, keys and values are cut in different ways")
        if o.placement.copies != q.placement.copies and o.tensor.shape[o.placement.dim] != 1:
            conflict(step, [q, k, v], "queries need other heads than those that are here")
    return broadcast(step, [q] if mask is None else [q, mask], q.tensor.ndim)


def embedding(step: Step) -> Placement:
    ids, weight = step.operands()[:2]
    own = ids.tensor.is_floating_point()
    if own:  # torch's own takes the table first, and no norm
        ids, weight = weight, ids
    if step.name == "embedding":  # not one that is split by words already
        norm = step.kwargs.get("max_norm") if own else step.arg(3, "max_norm")
        if ids.kind == "S" and (norm is not None or step.arg(3 if own else 5, "scale_grad_by_freq")):
            conflict(step, [ids], "max_norm and scale_grad_by_freq need all words that are looked up, and each rank has a part of them")
        if weight.kind == "S" and norm is not None:
            conflict(step, [weight], "max_norm needs whole rows of the table")
    for o in (ids, weight):
        if o.kind == "P":
            refuse_partial(step, o)
    if weight.kind == "S" and weight.placement.dim == 0:
        step.fail(f"{weight.called} is cut along its rows, so a rank finds only some of them: split it with .vocab_parallel()", "E10")
    if weight.kind == "S":
        if ids.kind == "S":
            conflict(step, [ids, weight])
        return weight.placement.at(step.result.ndim - 1)
    if ids.kind == "S":
        require_parts(step, [weight], ids)
        return ids.placement
    return join(step, [ids, weight])


def gather(step: Step) -> Placement:
    """Placement of a gather from a whole tensor with an index that is cut."""
    x, index = step.operand(0, "input"), step.operand(2, "index")
    if x is None or index is None or x.kind in "SP" or index.kind != "S":
        return ask(step)
    require_parts(step, [x], index)
    return index.placement


_OF_CLASSES = ("cross_entropy", "nll_loss")
_DIVIDES_BY_WEIGHTS = (*_OF_CLASSES, "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


def _reduction(step: Step) -> str:
    """Return none, mean, sum or batchmean; torch's internal functions number the first three."""
    given = step.kwargs.get("reduction", next((v for v in step.args[2:] if isinstance(v, str)), None))
    if given is None and step.name in ("kl_div", "binary_cross_entropy_with_logits"):
        given = next((v for v in step.args[2:] if type(v) is int), None)
    return {0: "none", 1: "mean", 2: "sum", None: "mean"}.get(given, str(given))


def loss(step: Step) -> Placement:
    """Placement of a loss: each rank has the losses of its share; their sum is a part of the whole's sum, but their mean is not."""
    for o in step.operands():
        if o.kind == "P":
            refuse_partial(step, o)
    if not cut(step.operands()):
        return join(step, step.operands())
    if any(step.kwargs.get(name) is not None for name in ("size_average", "reduce")) or any(type(v) is bool for v in step.args[2:5]):
        return ask(step)
    rows = (
        _rows_of_classes(step)
        if step.name in _OF_CLASSES
        else broadcast(step, step.operands(), max(o.tensor.ndim for o in step.operands()))
    )
    reduction = _reduction(step)
    if reduction == "none":
        return rows
    mean = reduction == "mean" or (reduction == "batchmean" and rows.dim == 0)
    given = [o for o in step.operands()[2:] if step.name in _DIVIDES_BY_WEIGHTS]
    ignored = step.arg(4, "ignore_index", -100) if step.name in _OF_CLASSES else -100
    if mean and (given or ignored != -100):
        step.fail("the mean over a share counts weights, or labels, of that share: take reduction='sum' and divide by those of all", "E3")
    total = summed_over(step, replace(step.operands()[0], placement=rows))
    return replace(total, mean=mean)


def _rows_of_classes(step: Step) -> Placement:
    """Placement of each row's loss, for losses that need all classes of a row."""
    x, target = step.operand(0, "input"), step.operand(1, "target")
    assert x is not None and target is not None
    classes = 1 if x.tensor.ndim > 1 else 0
    if x.kind == "S" and x.placement.dim == classes:
        step.fail(f"{x.called} is {x.placement.describe()}: this loss needs all classes; gather it first", "E3")
    rows = x.placement.at(x.placement.dim - (x.placement.dim > classes))
    whole = x.placement if target.tensor.ndim == x.tensor.ndim else rows
    others = [o for o in step.operands() if o.tensor is not x.tensor and o.tensor is not target.tensor]
    alike = x.kind == "S" and target.kind == "S" and whole == target.placement and x.placement.as_needed == target.placement.as_needed
    if not alike or x.placement.copies != target.placement.copies or cut(others):
        conflict(step, [x, target, *others], "results and labels are cut in different ways")
    require_parts(step, step.operands(), x)
    return rows


def ask(step: Step) -> Placement:
    """Raise PlacementError: it is not known what the function does to a share."""
    told = "; ".join(f"{o.called} is {o.placement.describe()}" for o in step.operands() if o.kind in "SP")
    return step.fail(
        f"it is not known what this does to shares ({told}): teach it with megatron_sp.schedule.teach({step.name!r}, rule)",
        "unknown",
    )


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(_words("view reshape flatten unflatten view_as reshape_as"), moved(reshape)),
    **dict.fromkeys(_words("transpose swapaxes swapdims t T mT H mH adjoint"), moved(transpose)),
    **dict.fromkeys(_words("softmax log_softmax cumsum logcumsumexp"), over(1, keeps=True)),
    **dict.fromkeys(_words("mean amax amin max min argmax argmin all any prod std var logsumexp"), over(1)),
    **dict.fromkeys(_words("matmul mm bmm rmatmul"), matmul),
    **dict.fromkeys(_words("addmm baddbmm"), addmm),
    **dict.fromkeys(_words("split chunk tensor_split split_with_sizes"), moved(split)),
    **dict.fromkeys(_words("cat concat concatenate stack"), cat),
    **dict.fromkeys(EXPANSIONS, expand),
    **dict.fromkeys(_words("unbind select"), moved(unbind)),
    **dict.fromkeys(_words("layer_norm rms_norm"), norm),
    **dict.fromkeys(_words("tril triu"), moved(triangle)),
    **dict.fromkeys(_words("cross_entropy nll_loss mse_loss l1_loss binary_cross_entropy_with_logits kl_div"), loss),
    "to": retyped, "type_as": retyped, "sum": over(1, sums=True), "permute": moved(permute),
    "movedim": moved(movedim), "unsqueeze": moved(unsqueeze),
    "squeeze": moved(squeeze), "narrow": moved(narrow), "getitem": getitem, "repeat_interleave": moved(repeat_interleave),
    "flip": moved(flip), "roll": moved(roll),
    "linear": linear, "gather": gather,
    "einsum": einsum, "scaled_dot_product_attention": attention, "embedding": embedding,
}  # fmt: skip


def teach(name: str, rule: Rule) -> None:
    """Register the placement rule of a function, by its name without the underscores of in-place and operator spellings.

    Args:
        rule: takes the step, whose operands are its tensors; returns the placement of the result, or one for each, or calls ``step.fail``.
    """
    RULES[name] = rule
