"""Conversion of a model as its schedule specifies, in phases that build on each other; and its result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.parallel.mappings import gather_from
from megatron_sp.schedule.apply import edits, guards, zero
from megatron_sp.schedule.apply.context import Context
from megatron_sp.schedule.apply.layers import replace_forwards, without_fast_paths
from megatron_sp.schedule.apply.plan import (
    ApplyJob,
    Split,
    names_of,
    plan_splits,
    put,
    replaced,
    shard_specs,
    split_tensors,
    take,
)
from megatron_sp.schedule.apply.randomness import Streams, around, recompute
from megatron_sp.schedule.apply.ulysses import CONTEXT_OPTIONS, OF_CONTEXT, Ulysses, require_known
from megatron_sp.schedule.core.directives import Directive, Mesh
from megatron_sp.schedule.core.hooks import HEADS, HIDDEN, change_records
from megatron_sp.utils.errors import ConfigError, ReportedError


@dataclass
class Applied:
    """A model to which a schedule has been applied."""

    model: nn.Module
    mesh: Mesh  # over which it is split
    # where each parameter lies in the whole one, by its first name; with ``sums`` if its gradient is summed over tp
    specs: dict[str, ShardSpec]
    splits: dict[str, Split]  # by name, under all names of split parameters
    ulysses: Ulysses | None  # how sequences are cut over sp; None: they are not
    zero: zero.ZeroTraining | None  # owner of parameters, gradients, optimizer state; None: the modules own them
    seq_dim: int  # the dim of activations that runs over positions
    region: edits.RegionLength  # length of the sequence that was cut over tp
    lines: list[Directive]  # all that were applied, including those that others imply

    def complete(self, result: Any) -> Any:
        """Return the model's result with all positions, where this rank has its own only. Collective over sp and tp.

        A loss of the whole result, the same on all ranks, has the right gradients; one of this rank's share is a part
        of it, and cheaper. Raises ConfigError if a plain tuple (``return_dict=False``) holds shares of records.
        """
        if self.ulysses is not None:  # all heads of this tp rank
            sp, grad = self.ulysses.group, self.ulysses.grad_of_whole
            change_records(result, HEADS, lambda t: gather_from(t, sp, 1, grad))
        tp, dim, length = self.mesh.tp, self.seq_dim, self.region.positions
        size, heads = tp.size(), getattr(getattr(self.model, "config", None), "num_attention_heads", None)

        def is_share(t: Any) -> bool:  # [b, s/tp, h] of a region, or [b, n/tp, s, s] of attention
            if not isinstance(t, Tensor) or t.ndim != 4:
                return isinstance(t, Tensor) and t.ndim == 3 and length > 0 and t.shape[dim] * size == length
            return t.shape[1] * size == heads and t.shape[2] == t.shape[3]

        for place, value in enumerate(result) if size > 1 and type(result) in (tuple, list) else ():
            shares = [t for t in value if is_share(t)] if isinstance(value, (tuple, list)) else []
            if shares:  # only names distinguish them from other records
                raise ConfigError(
                    f"result {place} is a plain tuple of records, of which this rank has shares"
                    f" ({list(shares[0].shape)}), and no name tells what they are: call the model with"
                    " return_dict=True, or without output_hidden_states and output_attentions"
                )
        if size > 1:

            def whole(t: Tensor, along: int, of_all: int | None) -> Tensor:
                return gather_from(t, tp, along, "slice") if t.shape[along] * size == of_all else t

            change_records(result, HEADS, lambda t: whole(t, 1, heads))
            change_records(result, HIDDEN, lambda t: whole(t, dim, length))
        return result if self.ulysses is None else self.ulysses.complete(result)

    def finish_backward(self) -> None:
        """Sum gradients that are partial over tp, and all over dp and sp, once after a step's last backward pass.

        The loss is divided by the number of tokens of all ranks. The project's own loop and ZeRO do it themselves.
        """
        if self.zero is not None:
            self.zero.finish()
            return
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            parameter.grad = self.summed(name, parameter.grad)
            for group in self.mesh.replicas:
                all_reduce(parameter.grad, group)

    def summed(self, name: str, grad: Tensor) -> Tensor:
        """Return the gradient of one parameter, summed over tp. Collective."""
        spec = self.specs[name]
        grad = grad.clone() if spec.sums else grad
        for part in spec.sums:
            view = grad.narrow(spec.dim, part.start, part.length) if grad.ndim else grad
            places = view.new_zeros([part.num_slots, *view.shape])  # ranks that hold other rows leave zeros here
            places[part.slot] = view
            view.copy_(all_reduce(places, self.mesh.tp)[part.slot])
        return grad

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of each gradient, after ``finish_backward``. Collective with ZeRO."""
        if self.zero is not None:
            self.zero.finish()
            return self.zero.gathered("grad_shard")
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Gather a whole tensor from the tp ranks' parts of a parameter, or of its gradient. Collective."""
        spec = self.specs[name]
        whole = torch.zeros(spec.shape, dtype=local.dtype, device=local.device)
        if name not in self.splits:
            return whole.copy_(local)
        for offsets, piece in spec.pieces(local) if spec.counted else ():  # only one of several copies counts
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))] = piece
        return all_reduce(whole, self.mesh.tp)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole state dict, as before ``apply()``. Collective over tp; with ZeRO over all ranks."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        state, gathered = {}, dict[int, Tensor]()  # tied parameters are gathered once
        sharded = {} if self.zero is None else self.zero.gathered("local_params")
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in names:
                if id(tensor) not in gathered:
                    first = names[id(tensor)]
                    gathered[id(tensor)] = self.whole(first, sharded.get(first, tensor.detach()))
                state[name] = gathered[id(tensor)]
            else:
                state[name] = self.whole(name, tensor.detach()) if name in self.splits else tensor.detach()
        return state

    def load_full(self, state: dict[str, Tensor]) -> None:
        """Load whole tensors; what is on the meta device is created here. Raises ConfigError: they do not fit."""
        if self.zero is not None:
            raise ConfigError("load weights before ZeRO takes the parameters: give them to the model before apply()")

        def part(name: str) -> Tensor:
            split = self.splits.get(name)
            return state[name] if split is None else take(state[name], self.specs[name], split, self.mesh.tp.size())

        names = names_of(self.model)
        for name, parameter in list(self.model.named_parameters()):
            shape = self.specs[name].shape
            if name not in state or tuple(state[name].shape) != shape:
                is_now = list(state[name].shape) if name in state else "missing"
                raise ConfigError(f"{name} must be {list(shape)}, and is {is_now}")
            if parameter.is_meta:
                new = replaced(parameter, part(name).detach().to(parameter.dtype).clone())
                for alias in names[id(parameter)]:
                    put(self.model, alias, new)
            else:
                with torch.no_grad():
                    parameter.copy_(part(name))
        for name, buffer in list(self.model.named_buffers()):
            if name not in state and buffer.is_meta:
                raise ConfigError(
                    f"{name} is a buffer on the meta device, and no state has it, so its numbers are lost: make the"
                    " model with its buffers (schedule.slapo.init_empty_weights() leaves them, torch.device('meta')"
                    " does not)"
                )
            if buffer.is_meta:
                put(self.model, name, part(name).to(buffer.dtype).clone())
            elif name in state:
                buffer.copy_(part(name))

    def save_pretrained(self, folder: str | Path, **more: Any) -> None:
        """Write the whole model for transformers' ``from_pretrained``. Collective over all ranks; rank 0 writes."""
        name, save = type(self.model).__name__, getattr(type(self.model), "save_pretrained", None)
        if save is None:
            instead = "it is not a model of transformers; save full_state_dict() instead"
            raise ConfigError(f"{name} has no save_pretrained: {instead}")
        state = self.full_state_dict()
        if self.mesh.tp.rank() == 0 and self.mesh.dp_sp.rank() == 0:
            # it may remove entries from the dict it is given
            save(self.model, folder, state_dict=dict(state), **more)
        for group in (self.mesh.dp_sp, self.mesh.tp):  # no rank goes on before the files are written
            all_reduce(torch.zeros((), device=next(iter(state.values())).device), group)


def apply(model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, *, rules: bool = True) -> Applied:
    """Change a model as these lines specify; if anything is raised, the model is left unchanged.

    ``rules``: refuse lines that cannot be meant; False: they have passed ``decide``.
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
        split_tensors(model, plan.splits, mesh.tp)
        partial_gradients = replace_forwards(job, plan)

        edits.register_syncs(job, plan)
        region, summed = edits.register_regions(job, plan)
        _wrap_forwards(job)
        without_fast_paths(job)

        ulysses = _cut_sequences(job)
        specs = shard_specs(model, plan, partial_gradients | summed, mesh.tp)
        line = _line(job, "zero")
        sharded = None if line is None else zero.ZeroTraining(model, mesh, specs, line.args, line.where)
        if job.directives:
            has_shares = plan.splits and job.tp_size > 1
            guards.mark(model, bool(has_shares or (sharded is not None and sharded.comes_and_goes)))
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
        require_known("context", options, CONTEXT_OPTIONS)
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
    """Raise ConfigError if lines are impossible: they are applied to a copy without weight values.

    There is no verdict if the model, or what a line puts into it, cannot be copied so.
    """
    guards.require_whole(model)
    guards.require_in_order(ApplyJob(model, directives, mesh, seq_dim))
    for line in directives:
        if line.do == "zero":
            zero.require(model, line.args, line.where)
            zero.find_blocks(model, line.args.get("blocks"))
    try:
        apply(without_weights(model), without_weights_in(directives, "zero"), mesh, seq_dim)
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


def for_copies(lines: list[Directive], copied: Callable[[nn.Module], nn.Module]) -> list[Directive]:
    """Return lines for a copy of the model: apply() would split the modules that they bring."""
    new = [line.args.get("new") for line in lines]
    return [
        replace(line, args={**line.args, "new": copied(module)}) if isinstance(module, nn.Module) else line
        for line, module in zip(lines, new, strict=True)
    ]


def without_weights_in(lines: list[Directive], *left_out: str) -> list[Directive]:
    """Return lines for a copy without weights, but for some kinds; early exchanges are only checked."""
    kept = for_copies([line for line in lines if line.do not in left_out], without_weights)
    return [replace(d, args={**d.args, "only_looks": True}) if d.do == "ulysses" else d for d in kept]
