"""Refusals of what would silently give wrong results: lines that cannot be meant, and uses of a split model.

A copy would compute with the layers of the original, a second schedule would split shares again, and transformers' own
methods would take one rank's share for the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import gcd
from typing import Any, NoReturn

from torch import nn

from megatron_sp.schedule.apply.hf_attention import EXCHANGES
from megatron_sp.schedule.apply.plan import ApplyJob
from megatron_sp.schedule.core.directives import expand
from megatron_sp.utils.errors import ConfigError

_SPLIT = "_megatron_sp_split"
_COPY = "copy it before apply(), or give applied.full_state_dict() to a new one"
_INSTEAD = {
    "save_pretrained": "call save_pretrained of the schedule's applied, on every rank: it writes the whole model",
    "push_to_hub": "write the whole model with applied.save_pretrained, and push that",
    "resize_token_embeddings": "do it before apply()",
}
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor


def require_whole(model: nn.Module) -> None:
    """Raise ConfigError if a schedule has been applied to the model, or to a part of it (E15)."""
    if any(_SPLIT in module.__dict__ for module in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} has been split by another schedule already, and its shares would be split again:"
            " write all lines into one schedule, or make the model anew (E15)"
        )


def mark(model: nn.Module, has_shares: bool) -> None:
    """Mark a model as split, and refuse to copy it, or to take this rank's shares for all of it."""
    for module in model.modules():
        state = (module._parameters, module._buffers, module._modules, module._forward_pre_hooks, module._forward_hooks)
        if any(state):  # else it may be an activation that transformers shares between models
            message = f"{type(module).__name__} has been split, and cannot be copied: {_COPY}"
            module.__dict__.update({_SPLIT: True, "__deepcopy__": partial(_refuse, message)})
    for name, instead in _INSTEAD.items() if has_shares else ():
        if callable(getattr(model, name, None)):
            model.__dict__[name] = partial(_refuse, f"{name} of a model of which this rank has a share: {instead}")


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(message)


@contextmanager
def whole_or_not_at_all(*roots: nn.Module) -> Iterator[None]:
    """Restore these modules, and all inside, if anything is raised while they are changed, including an interrupt."""
    modules = list({id(module): module for root in roots for module in root.modules()}.values())
    attributes = [dict(module.__dict__) for module in modules]
    containers = [
        [(value, value.copy()) for value in held.values() if isinstance(value, (dict, list, set))]
        for held in attributes
    ]  # fmt: skip
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}.values()
    states = [(p, p.data, p.grad, p.requires_grad, getattr(p, "grad_dtype", None)) for p in parameters]
    notes = [dict(p.__dict__) for p in parameters]
    hooks = [(p, name, getattr(p, name)) for p in parameters for name in _HOOKS if hasattr(p, name)]
    hooks_before = [None if registry is None else dict(registry) for _, _, registry in hooks]
    exchanges = [EXCHANGES.get(module) for module in modules]
    try:
        yield
    except BaseException:
        for module, held, contents in zip(modules, attributes, containers, strict=True):
            _refill(module.__dict__, held)
            for container, before in contents:  # the same objects, so that handles of earlier hooks still remove them
                _refill(container, before)
        for (p, data, grad, requires_grad, grad_dtype), note in zip(states, notes, strict=True):
            p.grad = None  # its shape may not fit the former contents
            p.data = data
            if grad_dtype is not None and p.grad_dtype != grad_dtype:
                p.grad_dtype = grad_dtype
            p.requires_grad = requires_grad
            p.grad = grad
            _refill(p.__dict__, note)
        for (p, name, registry), entries in zip(hooks, hooks_before, strict=True):
            if getattr(p, name) is not registry:
                setattr(p, name, registry)
            if registry is not None:
                _refill(registry, entries)
        for module, exchange in zip(modules, exchanges, strict=True):
            if exchange is None:
                EXCHANGES.pop(module, None)
            else:
                EXCHANGES[module] = exchange
        raise


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, list):
        container[:] = contents
    else:
        container.clear()
        container.update(contents)


def _raise(problems: Iterable[str]) -> None:
    if messages := list(dict.fromkeys(problems)):
        more = [f"... and {len(messages) - 6} more"] if len(messages) > 6 else []
        raise ConfigError("\n".join(messages[:6] + more))


def require_in_order(job: ApplyJob) -> None:
    """Refuse what a copy of the model, to which only some of the lines are applied, would not show."""
    problems: list[str] = []
    # E15: a module was compiled, or its parameters sharded by FSDP, before the split
    states: dict[str, str] = {}
    for path, module in job.model.named_modules():
        cls = type(module).__name__
        if cls == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            states[path] = "is compiled"
        elif cls.startswith(("FSDP", "FullyShardedDataParallel")):
            states[path] = "has its parameters shared out"
    for line in job.directives if states else ():
        for on in expand(job.model, line.on):
            for path, state in states.items():
                if path in ("", on) or on.startswith(f"{path}."):
                    what = f"{path or 'the model'} {state} already ({line.where})"
                    order = "the order is: schedule, apply(), torch.compile, ZeRO"
                    problems.append(f"{line.do} on {on or 'the model'}: {what}: {order} (E15)")
    # E5, E10: a line about the whole model is there twice, or on a part of it
    model = f"the model ({type(job.model).__name__})"
    for do in ("ulysses", "context", "zero"):
        lines = [line for line in job.directives if line.do == do]
        if len(lines) > 1:
            places = " and at ".join(line.where for line in lines)
            problems.append(f"{model}: {do} was asked for twice, at {places}: leave one out (E5)")
        for line in lines:
            if line.on:
                there = f"but is written on {line.on!r}: give on: ''"
                problems.append(f"{do} is about {model} as a whole, {there} ({line.where}, E10)")
    _raise(problems)


def require(job: ApplyJob) -> None:
    """Refuse lines that cannot be meant. Raises ConfigError with six of them at most."""
    rules = (_axes_of_sequences, _heads, _regions) if job.tp_size > 1 else (_axes_of_sequences,)
    _raise(problem for rule in rules for problem in rule(job))


def _axes_of_sequences(job: ApplyJob) -> Iterator[str]:
    # E10: sequences are cut over ranks that each have a batch, or parameters, of their own
    reasons = {
        "dp": "have batches of their own",
        "cp": "are those of context()",
        "sp": "are those of ulysses()",
        "tp": "have different parameters, whose gradients nobody sums over them",
    }
    for line in job.directives:
        own = {"ulysses": "sp", "context": "cp"}.get(line.do)
        axis = str(line.args.get("axis", own))
        if own is not None and axis != own:
            job.mesh.group(axis)
            what = f"{line.do} cuts sequences over {axis}, whose ranks {reasons[axis]}"
            leave_out = f"leave axis out, it is {own} ({line.where}, E10)"
            yield f"the model ({type(job.model).__name__}): {what}: {leave_out}"
    # E5: no line cuts anything over cp, or sp, so its ranks compute the same, and their gradients are summed
    exchanges = {
        "cp": any(line.do == "context" for line in job.directives),
        "sp": any(line.do in ("ulysses", "hook") or line.args.get("over") == "sp" for line in job.directives),
    }
    ways = {"cp": "deal sequences with .context()", "sp": "cut sequences with .ulysses()"}
    for axis, is_cut in exchanges.items():
        size = job.mesh.group(axis).size()
        if size > 1 and not is_cut:
            yield (
                f"the model ({type(job.model).__name__}): no line cuts anything over {axis} ({size}), so its ranks"
                f" compute the same, and the gradients of parameters are summed over them, {size} times too large:"
                f" {ways[axis]}, or give these ranks to dp (E5)"
            )


def _heads(job: ApplyJob) -> Iterator[str]:
    # E2: the ranks cannot share the heads that the attention module around a layer, or its configuration, counts
    parents = {path: path.rpartition(".")[0] for _, path, _ in job.each("shard", "column")}
    replicated = {parents[path] for line, path, _ in job.each("shard", "column") if line.args.get("replicas")}
    for line, path, module in job.each("shard", "column"):
        parent = job.model.get_submodule(parents[path])
        if "attention" not in type(parent).__name__.lower() or getattr(getattr(module, "weight", None), "ndim", 0) != 2:
            continue
        config = getattr(parent, "config", getattr(job.model, "config", None))
        # with replicas, fewer key/value heads than ranks are fine
        names = ("num_attention_heads", *(() if parents[path] in replicated else ("num_key_value_heads",)))
        values = {name: getattr(parent, name, getattr(config, name, None)) for name in names}
        counts = {name: n for name, n in values.items() if isinstance(n, int) and not isinstance(n, bool)}
        both = gcd(*counts.values()) if counts else 0
        if both % job.tp_size:
            works = ", ".join(str(n) for n in range(2, both + 1) if both % n == 0) or "1 only"
            numbers = ", ".join(f"{name} ({n})" for name, n in counts.items())
            rule = f"must be multiples of tp ({job.tp_size}): tp {works} would work"
            yield f"{path}: {numbers} {rule} ({line.where}, E2)"


def _regions(job: ApplyJob) -> Iterator[str]:
    # E10: a region begins or ends at several modules; E5: two begin or end at the same one
    lines = [line for line in job.directives if line.do == "sequence"]
    for line in lines:
        on, leave = line.on, line.args["leave"]
        if len(expand(job.model, on)) != 1 or len(expand(job.model, leave)) != 1:
            ends = f"enters at one module and leaves at one, not at {on!r} and {leave!r}"
            yield f"sequence() {ends} ({line.where}, E10)"
    for at, what in (([line.on for line in lines], "enters"), ([line.args["leave"] for line in lines], "leaves")):
        for end in {end for end in at if at.count(end) > 1}:  # an encoder and a decoder have a region each
            places = " and at ".join(line.where for line, e in zip(lines, at, strict=True) if e == end)
            yield f"sequence() {what} at {end} {at.count(end)} times, at {places}: leave one out (E5)"
