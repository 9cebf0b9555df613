"""Rules of functions on [b, c, ...]: convolutions, pooling, norms by channel. Nothing may be cut along the dims after the channels."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from megatron_sp.schedule.check.rules.common import Rule, ask, of_one, same_rule
from megatron_sp.schedule.check.rules.elementwise import elementwise
from megatron_sp.schedule.core.placement_steps import Step, broadcast, conflict, contract, cut, join, refuse_partial, require_parts, runs
from megatron_sp.schedule.core.placements import Operand, Placement


def convolution(step: Step) -> Placement:
    """Placement of functional convolutions: outputs are a dim of the weight, and so are inputs."""
    x, weight, bias = (step.operand(i, name) for i, name in enumerate(("input", "weight", "bias")))
    if x is None or weight is None or x.tensor.ndim != weight.tensor.ndim:
        return ask(step)
    transposed, groups = "transpose" in step.name, step.arg(6, "groups", 1)
    if x.tensor.shape[1] != (weight.tensor.shape[0] if transposed else weight.tensor.shape[1] * groups):
        step.fail(f"{x.tensor.shape[1]} channels meet a weight of {list(weight.tensor.shape)} and groups={groups}", "E11")
    for o in (x, weight):
        if o.is_cut and o.dim > 1:
            conflict(step, [o], "a kernel reaches over the ends of a share")
    if groups == 1:
        space = "uvw"[: x.tensor.ndim - 2]
        inner = space.upper()  # positions before and after a kernel are not the same dim
        product = contract(step, [(x, "bc" + space), (weight, ("co" if transposed else "oc") + inner)], "bo" + space)
    else:
        product = _by_groups(step, x, weight, groups)
    return _with_bias(step, x, product, bias)


def _with_bias(step: Step, x: Operand, product: Placement, bias: Operand | None) -> Placement:
    if bias is None:
        return product
    if product.kind not in "SP":
        return join(step, [Operand(step.result, product), bias])
    if product.kind == "P":
        step.fail(f"each rank would add {bias.called} to its partial sum: split the layer with .row(), which adds it after the sum", "E3")
    if product.dim == 1 and not bias.is_cut:
        step.fail(f"{bias.called} is whole, and the outputs it is added to are {product.describe()}: split it along", "E4")
    return broadcast(step, [Operand(step.result, product), _by_channel(bias, x)], x.tensor.ndim)


def _by_groups(step: Step, x: Operand, weight: Operand, groups: int) -> Placement:
    """Placement of a grouped convolution: each group has outputs of its own, so a rank needs whole groups and their part of the weight."""
    shares = cut([x, weight])
    if shares and all(o is x and x.dim == 0 for o in shares):
        require_parts(step, [weight], x)
        return x.placement
    if [o.dim for o in shares] != [1, 0]:
        conflict(step, [x, weight], "groups are shared by cutting both the channels and the weight's outputs")
    made = _whole_groups(step, x, groups)
    channels, outputs, rows = x.tensor.shape[1], step.result.shape[1], weight.tensor.shape[0]
    if [n * rows for n in runs(x)] != [n * channels for n in runs(weight)] or x.placement.copies != weight.placement.copies:
        conflict(step, [x, weight], "channels and the weight's outputs are cut in different ways")
    blocks = tuple(n * outputs // channels for n in made.blocks)
    return replace(made, blocks=blocks, as_needed=made.as_needed and weight.placement.as_needed)


def _whole_groups(step: Step, x: Operand, groups: int) -> Placement:
    """Return the placement of cut channels. Raises PlacementError if a rank's are not whole groups (E10, E11)."""
    size = x.tensor.shape[1] // groups
    if not size or x.tensor.shape[1] % groups:
        step.fail(f"{x.tensor.shape[1]} channels are no {groups} groups: divide the number of groups, too", "E11")
    if any(n % size for n in runs(x)):
        conflict(step, [x], f"groups of {size} channels are put together from parts that do not lie side by side in the whole")
    return x.placement


def _by_channel(o: Operand, x: Operand) -> Operand:
    """Reshape one number per channel so that it broadcasts with ``x``."""
    return replace(o, tensor=o.tensor.reshape(-1, *[1] * (x.tensor.ndim - 2))) if o.tensor.ndim == 1 and x.tensor.ndim > 1 else o


def norm_by_channel(step: Step) -> Placement:
    """Placement of norms and running statistics by channel; batch_norm looks at all rows, so these must not be cut."""
    x, *others = step.operands()
    if x.is_partial:
        refuse_partial(step, x)
    of_layer = isinstance(step.module, nn.GroupNorm) and others and all(o.name and o.is_cut for o in others)
    if step.name == "group_norm" and not of_layer:
        return ask(step)  # how many groups a rank must have is known only for a layer that is split itself
    if not x.is_cut or (x.dim == 0 and step.name == "batch_norm") or x.dim > 1:
        conflict(step, step.operands(), "each channel is normed by itself, over everything else: cut it along channels")
    if x.dim == 1 and any(not o.is_cut for o in others):
        conflict(step, step.operands(), "channels are cut and their weights are not")
    if x.dim == 1 and step.name == "group_norm":
        _whole_groups(step, x, step.arg(1, "num_groups"))
    return broadcast(step, [x, *(_by_channel(o, x) for o in others)], x.tensor.ndim)


def prelu(step: Step) -> Placement:
    """Placement of ``prelu``, with one slope or one for each channel."""
    x, weight = step.operands()[:2]
    if x.is_partial:
        refuse_partial(step, x)
    slopes = _by_channel(weight, x) if weight.tensor.numel() > 1 or weight.is_cut else weight
    return broadcast(step, [x, slopes], x.tensor.ndim)


def pool(step: Step, x: Operand) -> Placement:
    """Placement of pooling: the digit in the name is the number of dims of a window; there may be no batch dim."""
    if x.is_partial:
        if "max" in step.name:
            refuse_partial(step, x)
        return x.placement
    window = int(step.name[-2]) if step.name.endswith("d") else x.tensor.ndim - 2
    if x.dim >= x.tensor.ndim - window:
        conflict(step, [x], "a window reaches over the ends of a share")
    return x.placement


def channel_dropout(step: Step) -> Placement:
    """Placement of dropout of whole channels (the first one or two dims): ranks with other positions would each drop different channels."""
    x = step.operands()[0]
    unbatched = {"dropout1d": 2, "dropout3d": 4}.get(step.name) == x.tensor.ndim
    active = float(step.arg(1, "p", 0.5)) > 0 and bool(step.arg(2, "training", True))
    if active and x.is_cut and x.dim >= 2 - unbatched:
        conflict(step, [x], "a channel is dropped as a whole, and each rank has a part of all channels")
    return elementwise(step)


RULES: dict[str, Rule] = {
    **same_rule("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", convolution),
    **same_rule("batch_norm instance_norm group_norm", norm_by_channel),
    "prelu": prelu,
    **same_rule("avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d interpolate", of_one(pool)),
    **same_rule("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d", of_one(pool)),
    **same_rule("dropout1d dropout2d dropout3d feature_alpha_dropout", channel_dropout),
}
