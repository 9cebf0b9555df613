"""Rules of tensor products and lookups: linear, matmul, einsum, attention, embedding. What they sum over, if cut, is a partial sum."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_sp.schedule.check.rules.common import Rule, ask, join_complete, same_rule
from megatron_sp.schedule.core.placement_steps import (
    Step,
    broadcast,
    conflict,
    contract,
    cut,
    join,
    refuse_partial,
    refuse_partials,
    require_parts,
    runs,
)
from megatron_sp.schedule.core.placements import Operand, Placement

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


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
    """Placement of a product plus a bias. Raises PlacementError if ranks would add different numbers, or one number several times."""
    if bias is None:
        return product
    if product.kind == "P":
        step.fail(
            f"each rank would add {bias.called} to its partial sum, so it counts {step.size} times: the sum must be made before the"
            " bias, with .row() or .sync('fwd_post', ...) on the layer itself",
            "E3",
        )
    result = Operand(step.result, product)
    if product.kind == "S":
        if not bias.is_cut and not bias.is_filled and product.dim == step.result.ndim - 1 and bias.tensor.shape[-1:] != (1,):
            step.fail(f"{bias.called} is whole, and the outputs it is added to are {product.describe()}: split it along", "E4")
        return product if bias.is_filled else broadcast(step, [result, bias], step.result.ndim)
    if bias.is_cut:
        step.fail(f"{bias.called} is {bias.placement.describe()}, and what it is added to is whole: split the weight along", "E4")
    return join(step, [result, bias])


def matmul(step: Step) -> Placement:
    x, y = step.operands()[:2]
    if step.name == "rmatmul":
        x, y = y, x
    if x.tensor.ndim < 2 or y.tensor.ndim < 2:
        return ask(step) if cut([x, y]) else join_complete(step, [x, y])
    batch = "abcdefgh"[: max(x.tensor.ndim, y.tensor.ndim) - 2]
    letters = (batch[len(batch) - x.tensor.ndim + 2 :] + "mk", batch[len(batch) - y.tensor.ndim + 2 :] + "kn")
    return contract(step, [(x, letters[0]), (y, letters[1])], batch + "mn")


def einsum(step: Step) -> Placement:
    """Placement of ``einsum``, also with an ellipsis or without an arrow: what they stand for is written out."""
    operands = step.operands()
    names, out = written_out(str(step.args[0]).replace(" ", ""), [o.tensor.ndim for o in operands])
    return contract(step, list(zip(operands, names, strict=True)), out)


def written_out(equation: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """Return (letters of each operand, letters of the result) of an einsum equation, for operands with these numbers of dims."""
    left, arrow, out = equation.partition("->")
    names = left.split(",")
    if not arrow:
        out = "..." * ("." in left) + "".join(sorted(c for c in set(left) - set(",.") if left.count(c) == 1))
    free = [c for c in _LETTERS if c not in equation]
    dots = [ndim - len(n.replace("...", "")) if "..." in n else 0 for n, ndim in zip(names, ndims, strict=True)]
    rest = "".join(free[: max(dots, default=0)])
    return [n.replace("...", rest[len(rest) - d :]) for n, d in zip(names, dots, strict=True)], out.replace("...", rest)


def attention(step: Step) -> Placement:
    """Placement of ``scaled_dot_product_attention``, which exchanges nothing between heads or between sequences."""
    q, k, v = (step.operand(i, name) for i, name in enumerate(("query", "key", "value")))
    mask = step.operand(3, "attn_mask")
    assert q is not None and k is not None and v is not None
    for o in (q, k, v):
        if o.is_partial:
            refuse_partial(step, o)
        if o.is_cut and o.dim >= o.tensor.ndim - 2:
            conflict(step, [o], "attention needs all positions and all of a head")
    if not cut([q, k, v]):
        return join(step, step.operands())
    for o in (q, k, v):
        if not o.is_cut or not _parts_in_proportion(o, q):
            conflict(step, [q, k, v], "queries, keys and values are cut in different ways")
        if o.placement.copies != q.placement.copies and o.size != 1:
            conflict(step, [q, k, v], "queries need other heads than those that are here")
    return broadcast(step, [q] if mask is None else [q, mask], q.tensor.ndim)


def _parts_in_proportion(keys: Operand, queries: Operand) -> bool:
    """Return whether shares of heads have parts in the same proportions, along the same dim: several queries may belong to one key."""
    mine, theirs = ([n * other.tensor.shape[keys.dim] for n in runs(o)] for o, other in ((keys, queries), (queries, keys)))
    return keys.dim == queries.dim and mine == theirs


def embedding(step: Step) -> Placement:
    ids, weight = step.operands()[:2]
    own = ids.tensor.is_floating_point()
    if own:  # torch's own takes the table first, and no norm
        ids, weight = weight, ids
    if step.name == "embedding":  # not one that is split by words already
        norm = step.kwargs.get("max_norm") if own else step.arg(3, "max_norm")
        if ids.is_cut and (norm is not None or step.arg(3 if own else 5, "scale_grad_by_freq")):
            conflict(step, [ids], "max_norm and scale_grad_by_freq need all words that are looked up, and each rank has a part of them")
        if weight.is_cut and norm is not None:
            conflict(step, [weight], "max_norm needs whole rows of the table")
    refuse_partials(step, [ids, weight])
    if weight.is_cut and weight.dim == 0:
        step.fail(f"{weight.called} is cut along its rows, so a rank finds only some of them: split it with .vocab_parallel()", "E10")
    if weight.is_cut:
        if ids.is_cut:
            conflict(step, [ids, weight])
        return weight.placement.at(step.result.ndim - 1)
    if ids.is_cut:
        require_parts(step, [weight], ids)
        return ids.placement
    return join(step, [ids, weight])


RULES: dict[str, Rule] = {
    "linear": linear,
    **same_rule("addmm baddbmm", addmm),
    **same_rule("matmul mm bmm rmatmul", matmul),
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
    "embedding": embedding,
}
