"""Changes that lines make around the split layers: modules, attributes, notes, and hooks that exchange tensors."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron_sp.parallel.mappings import gather_from
from megatron_sp.schedule.apply.plan import ApplyJob, SplitPlan, joined, no_parameter
from megatron_sp.schedule.core.directives import Directive, expand
from megatron_sp.schedule.core.hooks import Change, change_input, change_output, make_change
from megatron_sp.schedule.core.kinds import find_kind
from megatron_sp.utils.errors import ConfigError

# attributes of an attention module that hold its number of heads, or the width of all of them together
COUNTS = (
    "num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "nheads", "heads",
)  # fmt: skip
WIDTHS = ("all_head_size", "inner_dim", "split_size")


@dataclass
class RegionLength:
    """Positions of this sp rank that entered the region cut over tp in the last pass; 0: there is none."""

    positions: int = 0


def replace_modules(job: ApplyJob) -> None:
    for line, path, module in list(job.each("replace")):
        if not path:
            instead = "begin the schedule of the other model instead"
            raise ConfigError(f"replace on the model itself ({line.where}): {instead}")
        new = line.args["new"]
        parent, _, last = path.rpartition(".")
        setattr(job.model.get_submodule(parent), last, new if isinstance(new, nn.Module) else new(path, module))


def set_attributes(job: ApplyJob) -> None:
    """Set or divide attributes, for ``set`` lines; attach notes to parameters, for ``annotate`` lines."""
    for line, path, module in job.each("set"):
        name, value, where = line.args["attribute"], line.args.get("value"), line.where
        if not hasattr(module, name):
            raise ConfigError(f"{path} has no attribute {name!r} to set ({where})")
        old = getattr(module, name)
        if value is not None and "divide" in line.args:
            raise ConfigError(f"set {name!r} on {path} wants a value, or divide=, and not both ({where})")
        tensors = (module._parameters, module._buffers, module._modules)
        no_setting = name.startswith("__") or any(name in held for held in tensors) or inspect.ismethod(old)
        if no_setting and not callable(value):  # the author of a function knows what the attribute holds
            what = f"{name!r} is a method, a tensor or a module, not a setting"
            raise ConfigError(f"set on {path}: {what}: use .shard() or .replace() for these ({where})")
        if (axis := line.args.get("divide")) is not None:
            size = job.mesh.group(axis).size()
            if not isinstance(old, int) or old % size:
                raise ConfigError(f"{path}.{name} ({old!r}) must be a multiple of {axis} ({size}) ({where})")
            value = old // size
        setattr(module, name, value(old) if callable(value) else value)
    for line, path, module in job.each("annotate"):
        name, key = line.args["parameter"], line.args["key"]
        parameter = module._parameters.get(name)
        if parameter is None:
            raise ConfigError(no_parameter(path, module, name, line.where))
        if key not in parameter.__dict__ and hasattr(parameter, key):
            what = f"every tensor has an attribute {key!r}: choose another name for the note"
            raise ConfigError(f"annotate on {path}: {what} ({line.where})")
        setattr(parameter, key, line.args.get("value"))


def implied(job: ApplyJob) -> list[Directive]:
    """Return lines that set counts and widths of heads, where others say ``heads=`` of a layer inside."""
    lines: dict[tuple[int, str], Directive] = {}
    size, said = job.tp_size, {(id(module), line.args["attribute"]) for line, _, module in job.each("set")}
    for line, path, module in job.each("shard", "column", "row") if size > 1 else ():
        heads = line.args.get("heads")
        few = bool(line.args.get("replicas")) and isinstance(heads, int) and 0 < heads < size and size % heads == 0
        if not path or not isinstance(heads, int) or heads < 1 or (heads % size and not few):
            continue
        around = path.rpartition(".")[0]
        attention, kind, blocks = job.model.get_submodule(around), find_kind(module), line.args.get("blocks")
        weight = None if kind is None else module._parameters.get(kind.main)
        width = 0  # of all heads: the number of outputs of the layer, or of each of its equal blocks; 0: unknown
        if kind is not None and weight is not None and kind.main in kind.out_dims and line.do != "row":
            rows = int(weight.shape[kind.out_dims[kind.main]])
            width = rows // (blocks or 1) if isinstance(blocks, (int, type(None))) else 0
        for name, number in vars(attention).items():
            if type(number) is not int or (id(attention), name) in said:
                continue
            share: dict[str, Any] = {}
            if name in COUNTS and number == heads:
                share = {"value": 1} if few else {"divide": "tp"}  # several ranks have the same head
            elif name in WIDTHS and number == width and width and not few:
                share = {"divide": "tp"}
            if share:
                args = {"attribute": name, **share}
                lines.setdefault((id(attention), name), Directive(around, "set", args, line.where, ("attribute",)))
    return list(lines.values())


def register_syncs(job: ApplyJob, plan: SplitPlan) -> None:
    # in the order of the lines: a hook may prepare what a sync sends
    for line, path, module in job.each("sync", "hook"):
        args, where, mode = line.args, line.where, line.args["mode"]
        if line.do == "hook":
            if job.tp_size > 1:
                fn, is_pre = args["fn"], mode == "fwd_pre"
                after = module.register_forward_hook if mode == "fwd_post" else module.register_full_backward_hook
                (module.register_forward_pre_hook if is_pre else after)(fn)
            continue
        group, over_tp = job.mesh.group(args.get("over", "tp")), args.get("over", "tp") == "tp"
        is_table, op = isinstance(module, nn.Embedding), args["op"]
        # a layer split by rows over tp sums itself, before its bias, and so does a table split by words
        summed = mode == "fwd_post" and job.tp_size > 1 and plan.sums_itself(path, module)
        if summed and is_table and op == "all_gather":
            raise ConfigError(
                f"{path} is split by its words: each rank looks up those it has, and the results are summed; all_gather"
                f" ({where}) would repeat them: use all_reduce, or split axis 1 (E5)"
            )
        # what a table has summed is only cut
        scatters = summed and is_table and op == "reduce_scatter"
        change = make_change({**args, "op": "scatter"} if scatters else args, group, job.seq_dim, path, where)
        if group.size() == 1:
            continue
        if mode != "fwd_post":
            change_input(module, path, args.get("arg"), change, where)
        elif not (summed and over_tp and (op == "all_reduce" or (op == "reduce_scatter" and not is_table))):
            change_output(module, path, args.get("out"), change, where)


def register_regions(job: ApplyJob, plan: SplitPlan) -> tuple[RegionLength, set[str]]:
    """Cut the sequence over tp where regions begin, and gather it where they end.

    Returns the length of what was cut, and the names of whole parameters whose gradients are partial.
    """
    first, length, partial = {id(p): name for name, p in job.model.named_parameters()}, RegionLength(), set[str]()
    tp, seq_dim = job.mesh.tp, job.seq_dim
    for line, path, module in job.each("sequence") if job.tp_size > 1 else ():
        scatter = make_change({"mode": "fwd_pre", "op": "scatter"}, tp, seq_dim, path, line.where)

        def enter(x: Tensor, scatter: Change = scatter) -> Tensor:
            length.positions = x.shape[seq_dim]
            return scatter(x)

        change_input(module, path, line.args.get("arg"), enter, line.where)
        last = job.model.get_submodule(expand(job.model, line.args["leave"])[0])
        change_output(last, line.args["leave"], None, lambda x: gather_from(x, tp, seq_dim, "slice"), line.where)
        # without inside=: all items of the list that the first module belongs to; and the last module
        globs = (line.args.get("inside", f"{path.rpartition('.')[0]}.*"), line.args["leave"])
        for inside in (inside for glob in globs for inside in expand(job.model, glob)):
            named = job.model.get_submodule(inside).named_parameters(prefix=inside)
            partial |= {first.get(id(p), name) for name, p in named if name not in plan.splits}
    for line, path, module in job.each("sum_gradients"):
        parameters = dict(module.named_parameters())
        for name in line.args.get("names") or [name for name, _ in module.named_parameters(recurse=False)]:
            if name not in parameters:
                raise ConfigError(no_parameter(path, module, name, line.where))
            partial.add(first.get(id(parameters[name]), joined(path, name)))
    return length, partial
