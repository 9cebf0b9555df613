"""Rules on the lines of a schedule, before anything runs: mistakes that show from the lines and the model's modules alone.

Each rule is a function of the lines and yields messages. ``apply()`` checks them; ``verify()`` measures what they
cannot see. They never report what could be right in some model.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from math import gcd
from typing import Any

from torch import nn

from megatron_sp.schedule.core.directives import Directive, expand
from megatron_sp.schedule.core.kinds import find_kind, way_out
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.utils.errors import ConfigError

_SPLITS = ("shard", "column", "row", "vocab_parallel")
_PACKED = ("c_attn", "qkv", "query_key_value", "wqkv", "in_proj", "gate_up", "gate_up_proj", "qkv_proj", "kv_proj")
_PLAIN = {"q", "k", "v", "query", "key", "value", "gate", "up", "fc", "ff", "ffn", "mlp", "intermediate", "wi", "w"}
_MLPS = ("mlp", "ffn", "ff", "feed_forward", "feedforward", "intermediate", "shared_experts", "shared_expert")


class Lines:
    """The lines of a schedule, by the modules they are about."""

    def __init__(self, model: nn.Module, directives: list[Directive], mesh: Mesh) -> None:
        self.model, self.directives, self.mesh = model, directives, mesh
        self.size = mesh.tp.size()

    @cached_property
    def each(self) -> list[tuple[Directive, str, nn.Module]]:
        """Each line with each module that it names."""
        return [(d, path, self.model.get_submodule(path)) for d in self.directives for path in expand(self.model, d.on)]

    @cached_property
    def at(self) -> dict[str, list[Directive]]:
        """Lines by the path of the module that they name."""
        found = defaultdict(list)
        for directive, path, _ in self.each:
            found[path].append(directive)
        return found

    def around(self, path: str) -> Iterator[tuple[str, Directive]]:
        """Yield (path, line) of all lines on a module and on the modules that contain it."""
        while True:
            for directive in self.at.get(path, []):
                yield path, directive
            if not path:
                return
            path = path.rpartition(".")[0]

    def of(self, *kinds: str) -> Iterator[tuple[Directive, str, nn.Module]]:
        """Lines of some kinds, with each module that they name."""
        return (item for item in self.each if item[0].do in kinds)

    @cached_property
    def has_hooks(self) -> bool:
        return any(d.do == "hook" for d in self.directives)

    @cached_property
    def sums_elsewhere(self) -> bool:
        # whether some sync sums before a split part, not around it (at a norm, say); only a run shows what it reaches
        for directive, path, _ in self.of("sync"):
            inside = any(
                by_outputs(d, m) for d, p, m in self.each if p == path or p.startswith(f"{path}." if path else "")
            )
            if is_sync(directive) and not inside and _sums(directive.args):
                return True
        return False

    def sums_input_gradient(self, path: str) -> list[tuple[str, Directive]]:
        return [(p, d) for p, d in self.around(path) if is_sync(d) and d.args["mode"] != "fwd_post" and _sums(d.args)]


def is_sync(directive: Directive) -> bool:
    return directive.do == "sync" and directive.args.get("over", "tp") == "tp"


def _sums(args: dict[str, Any]) -> bool:
    # whether a sync sums in backward; a user's function is assumed to
    op = args["op"]
    return (
        callable(op)
        or op == "copy"
        or args["mode"] == "bwd_post"
        or (op == "all_gather" and args.get("grad") != "slice")
    )


def by_outputs(directive: Directive, module: nn.Module) -> bool:
    """Return whether a line splits a linear layer by its outputs and leaves summing its input's gradient to other lines."""
    kind = find_kind(module)
    if kind is None or (kind.product is None and kind.inputs < 2):
        return False
    if directive.do == "column":
        return directive.args.get("input", "copy") == "prepared"
    axis = directive.args.get("axis", 0)
    ndim = getattr(getattr(module, directive.args.get("tensor", ""), None), "ndim", 0)
    return (
        directive.do == "shard"
        and directive.args["tensor"] == kind.main
        and ndim > 0
        and axis % ndim == kind.out_dims.get(kind.main)
    )


Problem = Iterator[str]


def compiled(lines: Lines) -> Problem:
    """E15: a module was compiled, or its parameters sharded by FSDP, before the split."""
    order = "the order is: schedule, apply(), torch.compile, ZeRO"
    seen: dict[str, str] = {}
    for path, module in lines.model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            seen[path] = "is compiled"
        elif type(module).__name__.startswith(("FSDP", "FullyShardedDataParallel")):
            seen[path] = "has its parameters shared out"
    for directive, on, _ in lines.each if seen else ():
        for path, state in seen.items():
            if path in ("", on) or on.startswith(f"{path}."):
                yield f"{directive.do} on {on or 'the model'}: {path or 'the model'} {state} already ({directive.where}): {order} (E15)"


def parameters(lines: Lines) -> Problem:
    """E1: a line names a parameter that the module does not have."""
    for directive, path, module in lines.of("shard", "sum_gradients", "annotate"):
        given = directive.args.get("tensor") or directive.args.get("parameter") or directive.args.get("names") or []
        known = [name for named in (module.named_parameters, module.named_buffers) for name, _ in named()]
        for name in [given] if isinstance(given, str) else given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 3, 0.4)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                has = ", ".join(known[:8]) or "none"
                yield f"{path or 'the model'} has no parameter {name!r}: it has {has}{hint} ({directive.where}, E1)"


def inputs(lines: Lines) -> Problem:
    """E6: a layer is split by its outputs, and no line sums the gradient of its input."""
    for directive, path, module in lines.each if not lines.has_hooks else ():
        if _forgets_bias(lines, directive, path, module):
            continue  # apply() reports it (E4)
        if by_outputs(directive, module) and not _sums_all_inputs(lines, path, module) and not lines.sums_elsewhere:
            parent = path.rpartition(".")[0] or path
            yield (
                f"{path} is split by its outputs ({directive.do} at {directive.where}), so each rank has a part of its input's"
                " gradient only,"
                f" and no line sums it: add s[{parent!r}].sync('fwd_pre', 'copy') (all_gather where the input is cut), or"
                f" .sync('bwd_post', 'all_reduce') here, or use .column(input='copy') (E6)"
            )


def _sums_all_inputs(lines: Lines, path: str, module: nn.Module) -> bool:
    found, kind = lines.sums_input_gradient(path), find_kind(module)
    here = {d.args.get("arg") or 0 for at, d in found if at == path}
    return any(at != path for at, _ in found) or len(here) >= (kind.inputs if kind is not None else 1)


def _forgets_bias(lines: Lines, directive: Directive, path: str, module: nn.Module) -> bool:
    has = module._parameters.get("bias") is not None
    return (
        directive.do == "shard"
        and has
        and not any(d.do == "shard" and d.args["tensor"] == "bias" for d in lines.at[path])
    )


def doubled_inputs(lines: Lines) -> Problem:
    # E5: a sync sums a gradient that every layer inside has already summed
    for directive, path, _ in lines.of("sync"):
        if (
            not is_sync(directive)
            or directive.args["mode"] == "fwd_post"
            or not _sums(directive.args)
            or callable(directive.args["op"])
        ):
            continue
        inside = [(d, p) for d, p, m in lines.of("column", "shard") if p == path or p.startswith(f"{path}.")]
        copies = [(d, p) for d, p in inside if d.do == "column" and d.args.get("input", "copy") == "copy"]
        if copies and len(copies) == len(inside):
            column, at = copies[0]
            yield (
                f"the gradient of the input of {at} is summed in the layer itself (column at {column.where}) and again at {path}"
                f" ({directive.args['op']} at {directive.where}): it would be {lines.size} times too large; use .column(input='prepared'),"
                " or leave the sync out (E5)"
            )


def same_sync(lines: Lines) -> Problem:
    # E5: the same exchange is written twice
    by_module: dict[int, list[tuple[str, Directive]]] = defaultdict(list)  # one with several names is one
    for directive, path, module in lines.of("sync", "sequence"):
        by_module[id(module)].append((path, directive))
    for found in by_module.values():
        seen: dict[str, Directive] = {}
        for path, directive in found:
            key = f"{directive.do} {sorted((k, str(v)) for k, v in directive.args.items())}"
            if key in seen and seen[key] is not directive:
                name = directive.args.get("op", directive.do)
                yield f"{path or 'the model'}: {name} is written twice, at {seen[key].where} and at {directive.where}: leave one out (E5)"
            seen[key] = directive


def reductions(lines: Lines) -> Problem:
    """E3: a layer is split by its inputs, and no line makes the sum; E5: two make it."""
    later = any(
        is_sync(d) and d.args["op"] in ("all_reduce", "reduce_scatter") and d.args["mode"] == "fwd_pre"
        for d in lines.directives
    )
    for directive, path, module in lines.of("shard", "row"):
        kind = find_kind(module)
        if kind is None or kind.product is None:
            continue
        behind = [d for _, d in lines.around(path) if is_sync(d) and d.args["mode"] == "fwd_post"]
        if directive.do == "row":
            again = [d for d in lines.at[path] if d in behind and d.args["op"] in ("all_reduce", "reduce_scatter")]
            for d in again:
                again_at = f"{d.args['op']} at {d.where}"
                yield f"{path} sums over the ranks itself (row at {directive.where}) and again in {again_at}: leave one out (E5)"
            continue
        weight = getattr(module, kind.main, None)
        if (
            directive.args["tensor"] != kind.main
            or weight is None
            or directive.args["axis"] % weight.ndim != kind.in_dims.get(kind.main)
        ):
            continue
        has_bias = module._parameters.get("bias") is not None  # apply() reports the bias, which is worse
        if not behind and not later and not lines.has_hooks and not has_bias:
            yield (
                f"{path} is split by its inputs ({directive.where}), so its result is a partial sum on each rank, and no line completes it:"
                " use .row(), or add .sync('fwd_post', 'all_reduce') or 'reduce_scatter' there (E3)"
            )


def packed(lines: Lines) -> Problem:
    """E8: q, k and v (or gate and up) lie in one matrix, which is cut as if it were one projection."""
    for directive, path, module in lines.of("shard", "column"):
        kind = find_kind(module)
        weight = None if kind is None else getattr(module, kind.main, None)
        if (
            kind is None
            or kind.product is None
            or weight is None
            or weight.ndim != 2
            or directive.args.get("blocks") is not None
        ):
            continue
        dims = [found.get(kind.main, -1) for found in (kind.out_dims, kind.in_dims)]
        if -1 in dims or (directive.do == "shard" and directive.args["axis"] % weight.ndim != dims[0]):
            continue
        if directive.args.get("gather"):
            continue  # the parts are whole again before anybody takes them apart
        out, into = (weight.shape[dim] for dim in dims)
        name = path.rpartition(".")[2]
        if (out == 3 * into and not _is_plain(lines.model, path)) or name.lower() in _PACKED:
            parts = 2 if "gate_up" in name or "kv" == name[:2] else 3
            yield (
                f"{path} has {out} outputs of {into} inputs, as a packed projection has: cut in one piece, rank 0 would get"
                " its first part and"
                f" no share of the others; give blocks={parts} (or the parts' sizes), or blocks=1 if it is not packed"
                f" ({directive.where}, E8)"
            )


def _is_plain(model: nn.Module, path: str) -> bool:
    """Return whether the name of a layer, or of the module around it, marks one projection: an MLP may be three times as wide, too."""
    around, _, name = path.rpartition(".")
    words = set(re.split(r"[_\d]+", name.lower()))
    if any("kv" in word for word in words) or len(words & {"q", "k", "v", "query", "key", "value"}) > 1:
        return False
    has_second = name.endswith("1") and hasattr(model.get_submodule(around), f"{name[:-1]}2")  # linear1 and linear2
    return bool(words & _PLAIN) or around.lower().rpartition(".")[2] in _MLPS or has_second


def heads(lines: Lines) -> Problem:
    """E2: the ranks cannot share the heads evenly."""
    for directive, path, module in lines.of("shard", "column"):
        counts = _heads_around(lines.model, path, module)
        if any(
            d.args.get("replicas")
            for d, p, _ in lines.of("shard", "column")
            if p.rpartition(".")[0] == path.rpartition(".")[0]
        ):
            counts.pop("num_key_value_heads", None)  # there, fewer heads than ranks are fine
        both = gcd(*counts.values()) if counts else 0
        if counts and both % lines.size:
            works = ", ".join(str(n) for n in range(2, both + 1) if both % n == 0) or "1 only"
            told = ", ".join(f"{name} ({n})" for name, n in counts.items())
            yield f"{path}: {told} must be multiples of tp ({lines.size}): tp {works} would work ({directive.where}, E2)"


def _heads_around(model: nn.Module, path: str, module: nn.Module) -> dict[str, int]:
    # the head counts of the attention module around a layer; {} if there is none, or the weight is no matrix
    parent = model.get_submodule(path.rpartition(".")[0])
    if "attention" not in type(parent).__name__.lower() or getattr(getattr(module, "weight", None), "ndim", 0) != 2:
        return {}
    config = getattr(parent, "config", getattr(model, "config", None))
    found = {}
    for name in ("num_attention_heads", "num_key_value_heads"):
        value = getattr(parent, name, getattr(config, name, None))
        if isinstance(value, int) and not isinstance(value, bool):
            found[name] = value
    return found


def regions(lines: Lines) -> Problem:
    """E10: shares of positions that no line creates, or that are gathered where nothing was cut; E5: a region begins or ends twice."""
    sequence = [d for d in lines.directives if d.do == "sequence"]
    scatters = any(is_sync(d) and (callable(d.args["op"]) or d.args["op"] == "scatter") for d in lines.directives)
    for d in sequence:
        if len(expand(lines.model, d.on)) != 1 or len(expand(lines.model, d.args["leave"])) != 1:
            yield f"sequence() enters at one module and leaves at one, not at {d.on!r} and {d.args['leave']!r} ({d.where}, E10)"
    if not sequence and not scatters:
        for d, path, _ in lines.of("sync"):
            scattered = any(
                r.args.get("reduce") == "reduce_scatter" or r.args.get("op") == "reduce_scatter"
                for r in lines.directives
            )
            if (
                is_sync(d)
                and d.args["op"] == "all_gather"
                and d.args["mode"] == "fwd_pre"
                and not scattered
                and not _any_column_outside(lines, path)
            ):
                yield (
                    f"all_gather at the input of {path} ({d.where}), and no line cuts anything before it: add"
                    " .sequence(), or use copy (E10)"
                )
    for ends, what in (([d.on for d in sequence], "enters"), ([d.args["leave"] for d in sequence], "leaves")):
        for end in {end for end in ends if ends.count(end) > 1}:  # an encoder and a decoder have a region each
            places = " and at ".join(d.where for d, e in zip(sequence, ends, strict=True) if e == end)
            yield f"sequence() {what} at {end} {ends.count(end)} times, at {places}: leave one out (E5)"


def _any_column_outside(lines: Lines, path: str) -> bool:
    # whether some layer outside of ``path`` leaves a share of its outputs
    return any(
        d.do in ("column", "shard") and not p.startswith(f"{path}.") and not d.args.get("gather")
        for d, p, _ in lines.each
    )


def owners(lines: Lines) -> Problem:
    """E16: parameters inside a region between ranks, which no line mentions."""
    said = {"shard", "column", "row", "vocab_parallel", "sum_gradients", "replace"}
    for directive, root, module in lines.of("sync"):
        if (
            not is_sync(directive)
            or directive.args["mode"] != "fwd_pre"
            or directive.args["op"] not in ("copy", "all_gather")
        ):
            continue
        if not any(d.do in _SPLITS for d, p, _ in lines.each if p == root or p.startswith(f"{root}.")):
            continue
        for path, inner in module.named_modules(prefix=root):
            own = [name for name, p in inner.named_parameters(recurse=False) if p.requires_grad]
            if own and not any(d.do in said for d in lines.at.get(path, [])) and not _summed_above(lines, path, own):
                yield (
                    f"{path} ({type(inner).__name__}) has {', '.join(own)} and stands in what {directive.args['op']} at {root} opens"
                    f" ({directive.where}), and no line mentions it: {way_out(lines.model, path)} (E16)"
                )


def _summed_above(lines: Lines, path: str, own: list[str]) -> bool:
    for at, directive in lines.around(path):
        inside = path[len(at) + 1 :] if at else path
        names = directive.args.get("names") or [] if directive.do == "sum_gradients" else []
        if all(f"{inside}.{name}" in names for name in own):
            return True
    return False


def once(lines: Lines) -> Problem:
    """E5: a line that can be asked for only once is there twice."""
    for do in ("ulysses", "context", "zero"):
        found = [d for d in lines.directives if d.do == do]
        if len(found) > 1:
            yield f"{_called(lines)}: {do} was asked for twice, at {' and at '.join(d.where for d in found)}: leave one out (E5)"


def of_the_model(lines: Lines) -> Problem:
    # E10: a line about the whole model is written on a part of it
    for d in lines.directives:
        if d.do in ("ulysses", "context", "zero") and d.on:
            yield f"{d.do} is about {_called(lines)} as a whole, but is written on {d.on!r}: give on: '' ({d.where}, E10)"


def cut_over(lines: Lines) -> Problem:
    # E10: sequences are cut over ranks that each have a batch, or parameters, of their own
    for do, own in (("ulysses", "sp"), ("context", "cp")):
        for d in (d for d in lines.directives if d.do == do and d.args.get("axis", own) != own):
            axis: str = d.args["axis"]
            lines.mesh.group(axis)
            why = "have different parameters, whose gradients nobody sums over them"
            why = {
                "dp": "have batches of their own",
                "cp": "are those of context()",
                "sp": "are those of ulysses()",
            }.get(axis, why)
            yield f"{_called(lines)}: {do} cuts sequences over {axis}, whose ranks {why}: leave axis out, it is {own} ({d.where}, E10)"


def spoken_of(lines: Lines) -> Problem:
    # E5: no line cuts anything over sp, or over cp, so its ranks do the same, and their gradients are summed
    size = lines.mesh.cp.size()
    if size > 1 and not any(d.do == "context" for d in lines.directives):
        yield (
            f"{_called(lines)}: no line cuts anything over cp ({size}), so its ranks compute the same, and the gradients of parameters are"
            f" summed over them, {size} times too large: deal sequences with .context(), or give these ranks to dp (E5)"
        )
    size = lines.mesh.sp.size()
    if size > 1 and not any(
        d.do in ("ulysses", "hook") or (d.do == "sync" and d.args.get("over") == "sp") for d in lines.directives
    ):
        yield (
            f"{_called(lines)}: no line cuts anything over sp ({size}), so its ranks compute the same, and the gradients of parameters are"
            f" summed over them, {size} times too large: cut sequences with .ulysses(), or give these ranks to dp (E5)"
        )


def _called(lines: Lines) -> str:
    return f"the model ({type(lines.model).__name__})"


RULES: tuple[Callable[[Lines], Problem], ...] = (
    parameters, cut_over, heads, packed, inputs, same_sync, doubled_inputs, reductions, regions, owners, spoken_of,
)  # fmt: skip
OF_ONE_RANK = (parameters, cut_over, packed, spoken_of)  # one rank computes what the whole model does


def require(model: nn.Module, directives: list[Directive], mesh: Mesh) -> None:
    """Raise ConfigError with the mistakes that the lines alone show, six at most."""
    lines = Lines(model, directives, mesh)
    _raise(problem for rule in (RULES if lines.size > 1 else OF_ONE_RANK) for problem in rule(lines))


def require_in_order(model: nn.Module, directives: list[Directive], mesh: Mesh) -> None:
    """Check what a copy of the model, to which only some of the lines are applied, would not show.

    Raises:
        ConfigError: the model can no longer be split; a line about all of it is written twice, or on a part.
    """
    lines = Lines(model, directives, mesh)
    _raise(problem for rule in (compiled, once, of_the_model) for problem in rule(lines))


def _raise(problems: Problem) -> None:
    found = list(dict.fromkeys(problems))
    if found:
        shown = found[:6] + ([f"... and {len(found) - 6} more"] if len(found) > 6 else [])
        raise ConfigError("\n".join(shown))
