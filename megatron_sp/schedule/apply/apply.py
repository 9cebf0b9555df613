"""Conversion of a model as its schedule specifies, in one pass over the phases below, each of which takes what earlier ones return.

attributes.replace_modules       other modules in place
(rules on the lines)             while all sizes are still those of the whole model
plan.plan_splits                 which parameters are split, checked
attributes.set_attributes        other values of attributes
splits.split_tensors             parameters and buffers; tied ones together
layers.replace_forwards          forwards of split layers: those of ``megatron_sp.parallel``
exchanges.register_syncs         hooks where tensors enter and leave
exchanges.register_regions
attributes.annotate_parameters   notes
rng, checkpoint                  wrappers around the forwards of the phases above
ulysses, context, zero           last
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.schedule.apply import local_rules
from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.apply.attributes import annotate_parameters, implied, replace_modules, set_attributes
from megatron_sp.schedule.apply.context import Context
from megatron_sp.schedule.apply.exchanges import register_regions, register_syncs, summed_by_lines
from megatron_sp.schedule.apply.guards import guard_shares, mark, require_whole, whole_or_not_at_all
from megatron_sp.schedule.apply.layers import replace_forwards
from megatron_sp.schedule.apply.plan import ApplyJob, WholeModel, plan_splits, without_fast_paths
from megatron_sp.schedule.apply.randomness import Streams, around, recompute
from megatron_sp.schedule.apply.splits import shard_specs, split_tensors
from megatron_sp.schedule.apply.ulysses import Ulysses
from megatron_sp.schedule.apply.ulysses_options import OF_CONTEXT, require_known_of_context
from megatron_sp.schedule.apply.zero import ZeroTraining
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.utils.errors import ConfigError


def apply(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, *, rules: bool = True) -> Applied:
    """Change a model as these lines specify; if anything is raised, the model is left unchanged."""
    brought = [d.args["new"] for d in directives if d.do == "replace" and isinstance(d.args["new"], nn.Module)]
    with whole_or_not_at_all(model, *brought):
        return _convert(ApplyJob(model, directives, mesh, seq_dim), rules=rules)


def _convert(job: ApplyJob, *, rules: bool) -> Applied:
    model, mesh = job.model, job.mesh
    require_whole(model)
    if rules:
        local_rules.require_in_order(model, job.directives, mesh)
    replace_modules(job)
    if rules:
        local_rules.require(model, job.directives, mesh)
    more = implied(model, job.each("shard", "column", "row", "set"), job.tp_size)
    job = replace(job, directives=[*job.directives, *more])

    plan = plan_splits(job)
    whole = WholeModel.of(model, plan)
    set_attributes(job)
    if job.directives:
        mark(model)
    split_tensors(model, plan.splits, job.tp)
    partial_gradients = replace_forwards(job, plan, whole)

    register_syncs(job, plan)
    region, inside = register_regions(job, plan)
    partial_gradients |= inside | summed_by_lines(job)
    annotate_parameters(job)
    _wrap_forwards(job)
    without_fast_paths(model, {path for _, path, _ in job.each("shard", "column", "row", "vocab_parallel")})

    ulysses = _cut_sequences(job)
    specs = shard_specs(model, plan.splits, whole.shapes, partial_gradients, job.tp)
    zero = _shard_parameters(job, specs)
    if (plan.splits and job.tp_size > 1) or (zero is not None and zero.comes_and_goes):
        guard_shares(model)
    return Applied(model, mesh, specs, plan.splits, ulysses, zero, job.seq_dim, region, job.directives)


def _wrap_forwards(job: ApplyJob) -> None:
    """Wrap forwards that draw other random numbers on each rank, then those that are recomputed: a recomputation draws the same again."""
    streams = Streams()
    for line, _, module in job.each("rng"):
        axis = line.args["axis"]
        if axis == "same":
            around(module, streams.same)
            continue
        for each in ("cp", "sp") if axis == "sp" else (axis,):  # both share sequences
            if (group := job.mesh.group(each)).size() > 1:
                around(module, partial(streams.differ, group, axis == "tp"))
    for line, path, module in job.each("checkpoint"):
        recompute(module, path, line.args.get("policy", "full"), line.where, streams)


def _cut_sequences(job: ApplyJob) -> Ulysses | None:
    line, outer = _only_line(job, "ulysses"), _only_line(job, "context")
    sp = job.mesh.group(line.args["axis"]) if line is not None else SINGLE_RANK
    context = _context(job, outer, line)
    if context is None and (line is None or sp.size() == 1):
        return None
    line = line or outer
    assert line is not None
    # in sequence() tp cuts a share once more
    multiple = sp.size() * (job.tp_size if any(d.do == "sequence" for d in job.directives) else 1)
    return Ulysses(job.model, sp, multiple, job.seq_dim, line.args, line.where, context)


def _context(job: ApplyJob, line: Directive | None, inner: Directive | None) -> Context | None:
    if line is None:
        return None
    options = {name: value for name, value in line.args.items() if name != "axis"}
    require_known_of_context(options)
    twice = sorted(options.keys() - set(OF_CONTEXT))
    if inner is not None and twice:
        raise ConfigError(
            f"{', '.join(twice)} of context() at {line.where} is an option of ulysses() at {inner.where}, too: give it there (E10)"
        )
    group = job.mesh.group(line.args["axis"])
    return Context(group, options, line.where) if group.size() > 1 else None


def _shard_parameters(job: ApplyJob, specs: dict[str, ShardSpec]) -> ZeroTraining | None:
    line = _only_line(job, "zero")
    return None if line is None else ZeroTraining(job.model, job.mesh, specs, line.args, line.where)


def _only_line(job: ApplyJob, do: str) -> Directive | None:
    lines = [d for d in job.directives if d.do == do]
    if len(lines) > 1:
        raise ConfigError(f"{do} was asked for twice, at {lines[0].where} and at {lines[1].where}: leave one out (E10)")
    return lines[0] if lines else None
