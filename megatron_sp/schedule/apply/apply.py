"""Conversion of a model as its schedule specifies: phases, each of which takes what earlier ones return."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.schedule.apply import edits, guards, zero
from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.apply.context import Context
from megatron_sp.schedule.apply.layers import replace_forwards, without_fast_paths
from megatron_sp.schedule.apply.plan import ApplyJob, plan_splits, shard_specs, split_tensors
from megatron_sp.schedule.apply.randomness import Streams, around, recompute
from megatron_sp.schedule.apply.ulysses import OF_CONTEXT, Ulysses, require_known_of_context
from megatron_sp.schedule.core.directives import Directive, Mesh
from megatron_sp.utils.errors import ConfigError, ReportedError


def apply(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, *, rules: bool = True) -> Applied:
    """Change a model as these lines specify; if anything is raised, the model is left unchanged.

    Args:
        rules: also refuse lines that cannot be meant; False: they have passed ``decide``.
    """
    brought = [d.args["new"] for d in directives if d.do == "replace" and isinstance(d.args["new"], nn.Module)]
    job = ApplyJob(model, directives, mesh, seq_dim)
    with guards.whole_or_not_at_all(model, *brought):
        guards.require_whole(model)
        if rules:
            guards.require_in_order(job)
        edits.replace_modules(job)
        if rules:
            guards.require(job)  # while all sizes are still those of the whole model
        job = replace(job, directives=[*directives, *edits.implied(job)])

        plan = plan_splits(job)
        edits.set_attributes(job)
        if job.directives:
            guards.mark(model)
        split_tensors(model, plan.splits, mesh.tp)
        partial_gradients = replace_forwards(job, plan)

        edits.register_syncs(job, plan)
        region, inside = edits.register_regions(job, plan)
        partial_gradients |= inside | set(edits.summed_by_lines(job))
        edits.annotate_parameters(job)
        _wrap_forwards(job)
        without_fast_paths(job)

        ulysses = _cut_sequences(job)
        specs = shard_specs(model, plan, partial_gradients, mesh.tp)
        line = _line(job, "zero")
        sharded = None if line is None else zero.ZeroTraining(model, mesh, specs, line.args, line.where)
        if (plan.splits and job.tp_size > 1) or (sharded is not None and sharded.comes_and_goes):
            guards.guard_shares(model)
        return Applied(model, mesh, specs, plan.splits, ulysses, sharded, seq_dim, region, job.directives)


def _wrap_forwards(job: ApplyJob) -> None:
    # forwards that draw other random numbers on each rank, then those that are recomputed, which draw the same again
    streams = Streams()
    for line, _, module in job.each("rng"):
        axis = line.args["axis"]
        if axis == "same":
            around(module, streams.same)
            continue
        for name in ("cp", "sp") if axis == "sp" else (axis,):  # both share sequences
            if (group := job.mesh.group(name)).size() > 1:
                around(module, partial(streams.differ, group, axis == "tp"))
    for line, path, module in job.each("checkpoint"):
        recompute(module, path, line.args.get("policy", "full"), line.where, streams)


def _cut_sequences(job: ApplyJob) -> Ulysses | None:
    line, outer, context = _line(job, "ulysses"), _line(job, "context"), None
    if outer is not None:
        options = {name: value for name, value in outer.args.items() if name != "axis"}
        require_known_of_context(options)
        twice = sorted(options.keys() - set(OF_CONTEXT))
        if line is not None and twice:
            both = f"of context() at {outer.where} is an option of ulysses() at {line.where}, too"
            raise ConfigError(f"{', '.join(twice)} {both}: give it there (E10)")
        group = job.mesh.group(outer.args["axis"])
        context = Context(group, options, outer.where) if group.size() > 1 else None
    sp = job.mesh.group(line.args["axis"]) if line is not None else SINGLE_RANK
    line = line or outer
    if line is None or (context is None and sp.size() == 1):
        return None
    # in sequence() tp cuts a share once more
    multiple = sp.size() * (job.tp_size if any(d.do == "sequence" for d in job.directives) else 1)
    return Ulysses(job.model, sp, multiple, job.seq_dim, line.args, line.where, context)


def _line(job: ApplyJob, do: str) -> Directive | None:
    return next((line for line in job.directives if line.do == do), None)


def decide(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int) -> None:
    """Raise ConfigError if lines are impossible, without a run: they are applied to a copy without weight values.

    There is no verdict if the model, or what a line puts into it, cannot be copied so.
    """
    guards.require_whole(model)
    guards.require_in_order(ApplyJob(model, directives, mesh, seq_dim))
    for line in directives:
        if line.do == "zero":
            zero.require(model, line.args, line.where)
            zero.find_blocks(model, line.args.get("blocks"))
    try:
        apply(without_weights(model), [without_weights_in(d) for d in directives if d.do != "zero"], mesh, seq_dim)
    except ReportedError:
        raise
    except Exception:  # a function of the user's own, or a copy that cannot be made
        return


def without_weights(model: nn.Module, buffers: bool = False) -> nn.Module:
    """Return a copy in training mode whose parameters (with ``buffers`` these, too) have shapes only."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = new = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        new.__dict__.update(p.__dict__)
    if buffers:
        memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, memo).train()


def without_weights_in(line: Directive) -> Directive:
    """Return a line for such a copy: a module that it brings is copied, early exchanges are only checked."""
    new = line.args.get("new")
    args = {**line.args, "new": without_weights(new)} if isinstance(new, nn.Module) else line.args
    return replace(line, args={**args, "only_looks": True} if line.do == "ulysses" else args)
