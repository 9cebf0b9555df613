"""Hooks that exchange tensors between ranks where they enter and leave modules, and the gradients that are partial sums because of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from megatron_sp.parallel.regions import gather_from
from megatron_sp.schedule.apply.plan import ApplyJob, SplitPlan, joined, no_parameter, require_axis, sync_args
from megatron_sp.schedule.core.directives import Directive, expand
from megatron_sp.schedule.core.hooks import change_input, change_output, make_change
from megatron_sp.schedule.core.kinds import find_kind
from megatron_sp.schedule.core.records import RegionLength
from megatron_sp.utils.errors import ConfigError


def register_syncs(job: ApplyJob, plan: SplitPlan) -> None:
    """Register syncs and the user's hooks in the order of the lines: a hook may prepare what a sync sends."""
    for line, path, module in job.each("sync", "hook"):
        if line.do == "hook":
            _register_hook(job, line, module)
            continue
        args, where = line.args, line.where
        group = job.mesh.group(args.get("over", "tp"))
        change = make_change(sync_args(job, plan, line, path, module), group, job.seq_dim, path, where)
        if group.size() == 1:
            continue
        if args["mode"] != "fwd_post":
            change_input(module, path, args.get("arg"), change, where)
        elif not _is_folded(plan, line, path, module):
            change_output(module, path, args.get("out"), _along_outputs(job, plan, line, path, module, change), where)


def _register_hook(job: ApplyJob, line: Directive, module: nn.Module) -> None:
    mode, fn = line.args["mode"], line.args["fn"]
    if job.tp_size == 1:
        return
    if mode == "fwd_pre":
        module.register_forward_pre_hook(fn)
    elif mode == "fwd_post":
        module.register_forward_hook(fn)
    else:
        module.register_full_backward_hook(fn)


def _is_folded(plan: SplitPlan, line: Directive, path: str, module: nn.Module) -> bool:
    # whether the sum of a sync after a layer split by rows is made in the layer itself, before its bias
    sums = ("all_reduce",) if isinstance(module, nn.Embedding) else ("all_reduce", "reduce_scatter")
    over_tp = line.args.get("over", "tp") == "tp"  # a row layer's parts lie on the tp ranks
    return over_tp and plan.sums_itself(path, module) and line.args["op"] in sums


def _along_outputs(
    job: ApplyJob, plan: SplitPlan, line: Directive, path: str, module: nn.Module, change: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    # ``change``, checked: an all_gather right after a layer split by its outputs must join along these
    kind, args = find_kind(module), line.args
    first = next(d for d, _, at in job.each("sync", "hook") if at is module and d.args["mode"] == "fwd_post")
    if kind is None or args["op"] != "all_gather" or first is not line or not plan.by_outputs(path, kind):
        return change
    return require_axis(change, args.get("axis", job.seq_dim), kind.out_axis, path, line.where)


def register_regions(job: ApplyJob, plan: SplitPlan) -> tuple[RegionLength, set[str]]:
    """Register the hooks that cut the sequence over tp where a region begins and gather it where the region ends."""
    first, length, found = job.first_names(), RegionLength(), set[str]()
    for line, path, module in job.each("sequence"):
        if job.tp_size == 1:
            continue
        scatter = make_change({"mode": "fwd_pre", "op": "scatter"}, job.tp, job.seq_dim, path, line.where)
        change_input(
            module, path, line.args.get("arg"), partial(_enter_region, length, job.seq_dim, scatter), line.where
        )
        leave = job.model.get_submodule(expand(job.model, line.args["leave"])[0])
        change_output(
            leave, line.args["leave"], None, lambda x: gather_from(x, job.tp, job.seq_dim, "slice"), line.where
        )
        for inside in _modules_inside(job.model, line, path):
            for name, parameter in job.model.get_submodule(inside).named_parameters(prefix=inside):
                if name not in plan.splits:
                    found.add(first.get(id(parameter), name))
    return length, found


def _enter_region(length: RegionLength, seq_dim: int, scatter: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    length.positions = x.shape[seq_dim]
    return scatter(x)


def _modules_inside(model: nn.Module, line: Directive, enter: str) -> list[str]:
    # the modules in a region: those of ``inside=``, or all items of the list that the first belongs to; and the last
    inside = line.args.get("inside", f"{enter.rpartition('.')[0]}.*")
    return [*expand(model, inside), *expand(model, line.args["leave"])]


def summed_by_lines(job: ApplyJob) -> set[str]:
    """Return the parameters of ``sum_gradients`` lines. Raises ConfigError if a module does not have one of them."""
    first, found = job.first_names(), set[str]()
    for line, path, module in job.each("sum_gradients"):
        names = line.args.get("names") or [name for name, _ in module.named_parameters(recurse=False)]
        have = {name for name, _ in module.named_parameters()}
        for name in names:
            if name not in have:
                raise ConfigError(no_parameter(path, module, name, line.where))
        found |= {first.get(id(module.get_parameter(name)), joined(path, name)) for name in names}
    return found
