"""Conversion of a model as its schedule specifies: parameters split, forwards replaced, hooks registered. Done once, in a fixed order:

replace, set     other modules and attributes
split            parameters; tied ones together
forwards         of split layers: those of ``megatron_sp.parallel``
syncs, regions   hooks where tensors enter and leave
rng, checkpoint  wrappers around the forwards of the steps above
ulysses, zero    last
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.parallel.regions import gather_from
from megatron_sp.schedule.apply import forwards
from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.apply.guards import guard_shares, mark, require_whole
from megatron_sp.schedule.apply.head_counts import implied
from megatron_sp.schedule.apply.randomness import Streams, around
from megatron_sp.schedule.apply.recompute import recompute
from megatron_sp.schedule.apply.splits import Split, check_tied, collect, make_split, names_of, put, replaced, spec_of, take, tensor_of
from megatron_sp.schedule.apply.ulysses import Ulysses
from megatron_sp.schedule.apply.undo import whole_or_not_at_all
from megatron_sp.schedule.apply.zero import ZeroTraining
from megatron_sp.schedule.check import local_rules
from megatron_sp.schedule.check.preconditions import no_parameter, require_axis, require_plain, require_splittable, without_fast_paths
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.hooks import change_input, change_output
from megatron_sp.schedule.core.kinds import Kind, find_kind, kind_of
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.paths import expand
from megatron_sp.schedule.core.records import RegionLength
from megatron_sp.schedule.core.syncs import make_change
from megatron_sp.utils.errors import ConfigError


class _Compiler:
    """State of one ``apply``."""

    def __init__(
        self, model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, *, rules: bool, multiple: int | None = None
    ) -> None:
        self.rules, self.multiple = rules, multiple
        self.model, self.directives, self.mesh, self.seq_dim = model, directives, mesh, seq_dim
        self.group, self.size = mesh.tp, mesh.tp.size()
        self.splits: dict[str, Split] = {}
        self.summed: set[str] = set()
        self.streams = Streams()
        self.length = RegionLength()

    def first_names(self) -> dict[int, str]:
        """Return the first name of each parameter, which may have several, by identity."""
        return {id(p): name for name, p in self.model.named_parameters()}

    def each(self, *kinds: str) -> Iterator[tuple[Directive, str, nn.Module]]:
        """Yield (line, path, module) for all lines of these kinds; a module with several names once per line."""
        for directive in self.directives:
            if directive.do in kinds:
                found = {path: self.model.get_submodule(path) for path in expand(self.model, directive.on)}
                once = {id(module): path for path, module in reversed(found.items())}  # a module may have several names: the first
                yield from ((directive, path, module) for path, module in found.items() if once[id(module)] == path)

    def run(self) -> Applied:
        require_whole(self.model)
        if self.rules:
            local_rules.require_in_order(self.model, self.directives, self.mesh)
        self.replace()
        # what is asked looks at the model's numbers, so all of it comes before any number is another
        if self.rules:
            local_rules.require(self.model, self.directives, self.mesh)
        self.directives = [*self.directives, *implied(self.model, self.each("shard", "column", "row", "set"), self.size)]
        counts = self.counts()
        asked = list(self.asked())
        self.splits = collect(asked)
        self.extend_to_aliases()
        check_tied(self.model, self.splits)
        whole_shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters(remove_duplicate=False)}
        whole_shapes |= {name: tuple(b.shape) for name, b in self.model.named_buffers() if name in self.splits}
        self.check_biases()
        self.check_layers()
        self.set_attributes()
        if self.directives:
            mark(self.model)
        self.split()
        self.exchange_forwards(whole_shapes, counts)
        self.put_syncs()
        self.put_regions()
        self.find_summed()
        self.annotate()
        self.put_random()
        self.put_checkpoints()
        without_fast_paths(self.model, {path for _, path, _ in self.each("shard", "column", "row", "vocab_parallel")})
        ulysses = self.cut_sequences()
        specs = self.specs(whole_shapes)
        zero = self.shard(specs)
        made = Applied(self.model, self.mesh, specs, self.splits, ulysses, zero, self.seq_dim, self.length, self.directives)
        if (self.splits and self.size > 1) or (made.zero is not None and made.zero.comes_and_goes):
            guard_shares(self.model)
        return made

    def shard(self, specs: dict[str, ShardSpec]) -> ZeroTraining | None:
        lines = [d for d in self.directives if d.do == "zero"]
        if len(lines) > 1:
            raise ConfigError(f"zero was asked for twice, at {lines[0].where} and at {lines[1].where}: leave one out (E10)")
        return ZeroTraining(self.model, self.mesh, specs, lines[0].args, lines[0].where) if lines else None

    def cut_sequences(self) -> Ulysses | None:
        lines = [d for d in self.directives if d.do == "ulysses"]
        if len(lines) > 1:
            raise ConfigError(f"ulysses was asked for twice, at {lines[0].where} and at {lines[1].where}: leave one out (E10)")
        group = self.mesh.group(lines[0].args["axis"]) if lines else None
        if group is None or (group.size() == 1 and self.multiple is None):
            return None
        multiple = self.multiple or length_multiple(self.directives, group.size(), self.size)
        return Ulysses(self.model, group, multiple, self.seq_dim, lines[0].args, lines[0].where)

    # other modules, attributes

    def replace(self) -> None:
        for directive, path, module in list(self.each("replace")):
            if not path:
                raise ConfigError(f"replace on the model itself ({directive.where}): begin the schedule of the other model instead")
            new = directive.args["new"]
            new = new if isinstance(new, nn.Module) else new(path, module)
            parent, _, last = path.rpartition(".")
            setattr(self.model.get_submodule(parent), last, new)

    def set_attributes(self) -> None:
        for directive, path, module in self.each("set"):
            attribute, where = directive.args["attribute"], directive.where
            if not hasattr(module, attribute):
                raise ConfigError(f"{path} has no attribute {attribute!r} to set ({where})")
            old, value = getattr(module, attribute), directive.args.get("value")
            self.require_settable(path, module, directive)
            if (axis := directive.args.get("divide")) is not None:
                size = self.mesh.group(axis).size()
                if not isinstance(old, int) or old % size:
                    raise ConfigError(f"{path}.{attribute} ({old!r}) must be a multiple of {axis} ({size}) ({where})")
                value = old // size
            setattr(module, attribute, value(old) if callable(value) else value)

    def require_settable(self, path: str, module: nn.Module, line: Directive) -> None:
        """Raise ConfigError if a line has two values, or its attribute is a method, a tensor, a module or a dunder attribute."""
        attribute, value = line.args["attribute"], line.args.get("value")
        if value is not None and "divide" in line.args:
            raise ConfigError(f"set {attribute!r} on {path} wants a value, or divide=, and not both ({line.where})")
        if callable(value):  # code that knows what it puts there
            return
        is_tensor = any(attribute in named for named in (module._parameters, module._buffers, module._modules))
        if attribute.startswith("__") or is_tensor or inspect.ismethod(getattr(module, attribute)):
            raise ConfigError(
                f"set on {path}: {attribute!r} is a method, a tensor or a module, and no setting: .shard() and .replace() are for these"
                f" ({line.where})"
            )

    # parameters

    def asked(self) -> Iterator[Split]:
        """Yield all splits that lines ask for."""
        for directive, path, module in self.each("shard", "column", "row", "vocab_parallel"):
            args, where = directive.args, directive.where
            if directive.do == "shard":
                yield self.one(path, module, args["tensor"], args["axis"], args, where)
            else:
                yield from self.layer(directive, path, module)

    def layer(self, directive: Directive, path: str, module: nn.Module) -> Iterator[Split]:
        """Yield the splits of a whole layer."""
        kind, args, where = kind_of(module, path), directive.args, directive.where
        main = module._parameters.get(kind.main)
        if main is None and kind.main not in module._buffers:
            raise ConfigError(no_parameter(path, module, kind.main, where))
        is_head = kind.product is not None and kind.main == "weight" and getattr(main, "ndim", 0) == 2
        if directive.do == "vocab_parallel" and not isinstance(module, nn.Embedding) and not is_head:
            name = type(module).__name__
            raise ConfigError(f"{path} is a {name}: vocab_parallel is for an embedding, or the layer over the vocabulary ({where})")
        if directive.do == "column":
            dims = kind.out_dims
        elif directive.do == "row":
            dims = kind.in_dims
            if kind.product is None:
                raise ConfigError(f"{path} is a {type(module).__name__}, which cannot be split by rows ({where})")
        else:
            dims = kind.in_dims if isinstance(module, nn.Embedding) else kind.out_dims
        for name, dim in dims.items():
            if tensor_of(module, name) is not None:
                yield self.one(path, module, name, dim, args, where, padded=directive.do == "vocab_parallel")

    def one(self, path: str, module: nn.Module, name: str, axis: int, args: dict[str, Any], where: str, *, padded: bool = False) -> Split:
        full = _joined(path, name)
        parameter = tensor_of(module, name)
        if parameter is None:
            raise ConfigError(no_parameter(path, module, name, where))
        require_splittable(path, module, name, axis, self.size, where)
        shape, replicas = tuple(parameter.shape), bool(args.get("replicas"))
        return make_split(full, shape, axis, args.get("blocks"), args.get("heads"), self.size, where, padded=padded, replicas=replicas)

    def extend_to_aliases(self) -> None:
        """Split the other names of a split parameter along with it, in modules that compute nothing with it themselves."""
        for names in names_of(self.model).values():
            chosen = [self.splits[name] for name in names if name in self.splits]
            for name in names:
                owner = self.model.get_submodule(name.rpartition(".")[0])
                same = any(owner is self.model.get_submodule(split.name.rpartition(".")[0]) for split in chosen)
                if chosen and name not in self.splits and (same or find_kind(owner) is None):
                    self.splits[name] = Split(
                        name, *[getattr(chosen[0], f) for f in ("dim", "blocks", "heads", "padded", "where", "copies")]
                    )

    def check_biases(self) -> None:
        """Raise ConfigError if outputs are split and the bias that is added to them is not (E4)."""
        for name, split in self.splits.items():
            path, _, last = name.rpartition(".")
            module = self.model.get_submodule(path)
            kind = find_kind(module)
            if kind is None or kind.out_dims.get(last) != split.dim:
                continue
            for other, dim in kind.out_dims.items():
                if tensor_of(module, other) is not None and not self.is_split(path, other, dim):
                    raise ConfigError(
                        f"{name} is split along its outputs and {_joined(path, other)} is not ({split.where}): add"
                        f' .shard("{other}", axis={dim}), or use .column() (E4)'
                    )

    def check_layers(self) -> None:
        """Raise ConfigError if a layer computes more than the forward that replaces its own, or a sum is repeated (E5)."""
        heads = {id(module) for _, _, module in self.each("vocab_parallel")}
        for path, module in self.model.named_modules():
            kind = find_kind(module)
            if isinstance(module, nn.Embedding):
                continue  # it keeps a forward of its own, around the lookup
            if kind is not None and self.size > 1 and (self.has_own_sum(path, module) or id(module) in heads):
                require_plain(path, module, kind, self.splits[_joined(path, kind.main)].where)
        for directive, path, module in self.each("sync"):
            self.of_table(directive.args, path, module, directive.where)

    def split(self) -> None:
        """Replace each split parameter, under all its names, and each split buffer by this rank's part."""
        by_id = names_of(self.model)
        for names in by_id.values():
            split = self.splits.get(names[0])
            if split is None:
                continue
            path, _, last = names[0].rpartition(".")
            old = self.model.get_submodule(path)._parameters[last]
            assert old is not None
            new = replaced(old, take(old.detach(), spec_of(split, tuple(old.shape), self.group), split, self.size))
            for name in names:
                put(self.model, name, new)
        for name, buffer in list(self.model.named_buffers()):
            if name in self.splits:
                path, _, last = name.rpartition(".")
                spec = spec_of(self.splits[name], tuple(buffer.shape), self.group)
                self.model.get_submodule(path)._buffers[last] = take(buffer, spec, self.splits[name], self.size)

    def is_split(self, path: str, name: str, dim: int) -> bool:
        split = self.splits.get(_joined(path, name))
        return split is not None and split.dim == dim

    # layers

    def counts(self) -> dict[tuple[int, str], int]:
        """Return the whole model's attributes that count what is split (groups, channels), by (id of the module, name)."""
        kinds = {id(module): (module, find_kind(module)) for module in self.model.modules()}
        return {(key, name): getattr(m, name) for key, (m, kind) in kinds.items() if kind is not None for name in kind.divided}

    def exchange_forwards(self, shapes: dict[str, tuple[int, ...]], counts: dict[tuple[int, str], int]) -> None:
        """Replace the forwards of split layers; ``shapes`` and ``counts`` are those of the whole model."""
        options = {id(module): (d.do, d.args) for d, _, module in self.each("column", "row", "vocab_parallel")}
        hooked = {id(module) for _, _, module in self.each("hook")}
        for path, module in self.model.named_modules():
            kind = find_kind(module)
            if kind is None or self.size == 1 or kind.main not in module._parameters:
                continue
            do, args = options.get(id(module), ("", {}))
            rows_out = self.is_split(path, kind.main, kind.out_dims.get(kind.main, -1))
            rows_in = self.is_split(path, kind.main, kind.in_dims.get(kind.main, -1))
            if rows_in and isinstance(module, nn.Embedding) and id(module) in hooked:
                self.follow(module, kind, kind.in_attribute, kind.in_dims[kind.main])  # its hooks look after the words of other ranks
            elif rows_in and isinstance(module, nn.Embedding):
                module.forward = forwards.vocab_embedding(module, self.group, shapes[_joined(path, "weight")][0])  # type: ignore[method-assign,assignment]
            elif rows_in:
                self.make_row(path, module, kind, args)
            elif rows_out and do == "vocab_parallel":
                rows = shapes[_joined(path, "weight")][kind.out_dims["weight"]]
                module.forward = forwards.vocab_head(module, kind, self.group, rows)  # type: ignore[method-assign]
            elif rows_out:
                for name in kind.divided:
                    setattr(module, name, counts[id(module), name] // self.size)
                self.make_column(path, module, kind, args, asked=do == "column")

    def make_column(self, path: str, module: nn.Module, kind: Kind, args: dict[str, Any], *, asked: bool) -> None:
        self.follow(module, kind, kind.out_attribute, kind.out_dims[kind.main])
        copies, gathers = asked and args.get("input", "copy") == "copy" and not kind.by_channel, bool(args.get("gather"))
        if gathers and self.splits[_joined(path, kind.main)].copies > 1:
            raise ConfigError(f"{path}: gather joins every rank's heads, and here ranks have copies of the same: leave gather out")
        if forwards.is_matrix(module, kind) and (asked or gathers):
            module.forward = forwards.column(module, kind, self.group, copies=copies, gathers=gathers)  # type: ignore[method-assign]
        elif copies or gathers:
            module.forward = forwards.other_column(module, kind, self.group, copies=copies, gathers=gathers)  # type: ignore[method-assign]

    def make_row(self, path: str, module: nn.Module, kind: Kind, args: dict[str, Any]) -> None:
        where = self.splits[_joined(path, kind.main)].where
        self.follow(module, kind, kind.in_attribute, kind.in_dims[kind.main])
        reduce, axis = args.get("reduce"), args.get("axis")
        if reduce is None:
            sync = next((d for d, _, at in self.each("sync") if at is module and d.args["mode"] == "fwd_post"), None)
            if sync is not None and sync.args["op"] in ("all_reduce", "reduce_scatter"):
                reduce, axis = sync.args["op"], sync.args.get("axis")
            elif module._parameters.get("bias") is not None:
                raise ConfigError(
                    f"{path} is split along its inputs, so each of tp ({self.size}) ranks would add its bias: say where the sum is made,"
                    f" with .row() or .sync('fwd_post', 'all_reduce') on the layer itself ({where}, E3)"
                )
            else:
                return  # a partial sum, which a sync behind it completes
        if reduce not in ("all_reduce", "reduce_scatter"):
            raise ConfigError(f"{path}: reduce must be all_reduce or reduce_scatter, not {reduce!r}")
        if reduce == "reduce_scatter" and module._parameters.get("bias") is not None:
            self.summed.add(_joined(path, "bias"))  # each rank adds it to a share of the result
        axis = self.seq_dim if axis is None else axis
        if forwards.is_matrix(module, kind):
            module.forward = forwards.row(module, kind, self.group, reduce, axis, path, where)  # type: ignore[method-assign]
        else:
            module.forward = forwards.other_row(module, kind, self.group, reduce, axis)  # type: ignore[method-assign]

    def follow(self, module: nn.Module, kind: Kind, attribute: str | None, dim: int) -> None:
        """Set an attribute that holds a size to this rank's size."""
        weight = module._parameters[kind.main]
        if weight is not None and attribute is not None and isinstance(getattr(module, attribute, None), int):
            setattr(module, attribute, weight.shape[dim])

    # hooks

    def put_syncs(self) -> None:
        """Register syncs and hooks in the order of the lines: a hook may prepare what a sync sends."""
        for directive, path, module in self.each("sync", "hook"):
            if directive.do == "hook":
                self.put_hook(directive, module)
                continue
            args, where = directive.args, directive.where
            group = self.mesh.group(args.get("over", "tp"))
            change = make_change(self.of_table(args, path, module, where), group, self.seq_dim, path, where)
            if group.size() == 1:
                continue
            if args["mode"] != "fwd_post":
                change_input(module, path, args.get("arg"), change, where)
            elif not self.is_folded(directive, path, module):
                change_output(module, path, args.get("out"), self.along_outputs(directive, path, module, change), where)

    def along_outputs(
        self, directive: Directive, path: str, module: nn.Module, change: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return ``change``, checked: an all_gather right behind a layer split by its outputs must join along these."""
        kind, args = find_kind(module), directive.args
        first = next(d for d, _, at in self.each("sync", "hook") if at is module and d.args["mode"] == "fwd_post")
        by_outputs = kind is not None and self.is_split(path, kind.main, kind.out_dims.get(kind.main, -1))
        if kind is None or args["op"] != "all_gather" or first is not directive or not by_outputs:
            return change
        return require_axis(change, args.get("axis", self.seq_dim), kind.out_axis, path, directive.where)

    def has_own_sum(self, path: str, module: nn.Module) -> bool:
        """Return whether a layer is split by rows and its forward sums; an embedding leaves the sum to hooks if it has any."""
        kind = find_kind(module)
        hooked = isinstance(module, nn.Embedding) and any(at is module for _, _, at in self.each("hook"))
        return kind is not None and not hooked and self.is_split(path, kind.main, kind.in_dims.get(kind.main, -1))

    def of_table(self, args: dict[str, Any], path: str, module: nn.Module, where: str) -> dict[str, Any]:
        """Return the arguments of a sync; behind an embedding split by words, which has summed already, reduce_scatter becomes scatter."""
        if args["mode"] != "fwd_post" or not isinstance(module, nn.Embedding) or self.size == 1 or not self.has_own_sum(path, module):
            return args
        if args["op"] == "all_gather":
            raise ConfigError(
                f"{path} is split by its words, so every rank finds some of them and the results are summed; all_gather ({where}) would"
                " repeat them: say all_reduce, or split axis 1 (E5)"
            )
        return {**args, "op": "scatter"} if args["op"] == "reduce_scatter" else args

    def is_folded(self, directive: Directive, path: str, module: nn.Module) -> bool:
        """Return whether the sum of a sync behind a layer split by rows is made in the layer itself, in front of its bias."""
        return self.has_own_sum(path, module) and directive.args["op"] in (
            ("all_reduce",) if isinstance(module, nn.Embedding) else ("all_reduce", "reduce_scatter")
        )

    def put_hook(self, directive: Directive, module: nn.Module) -> None:
        mode, fn = directive.args["mode"], directive.args["fn"]
        if self.size == 1:
            return
        if mode == "fwd_pre":
            module.register_forward_pre_hook(fn)
        elif mode == "fwd_post":
            module.register_forward_hook(fn)
        else:
            module.register_full_backward_hook(fn)

    def put_regions(self) -> None:
        first = self.first_names()
        for directive, path, module in self.each("sequence"):
            args, where = directive.args, directive.where
            if self.size == 1:
                continue
            scatter = make_change({"mode": "fwd_pre", "op": "scatter"}, self.group, self.seq_dim, path, where)
            change_input(module, path, args.get("arg"), partial(self.enter_region, scatter), where)
            leave = self.model.get_submodule(expand(self.model, args["leave"])[0])
            change_output(leave, args["leave"], None, lambda x: gather_from(x, self.group, self.seq_dim, "slice"), where)
            for inside in self.region(directive, path):
                for name, parameter in self.model.get_submodule(inside).named_parameters(prefix=inside):
                    if name not in self.splits:
                        self.summed.add(first.get(id(parameter), name))

    def enter_region(self, scatter: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self.length.positions = x.shape[self.seq_dim]
        return scatter(x)

    def region(self, directive: Directive, enter: str) -> list[str]:
        """Return the modules in a region: those of ``inside``, or all that stand in one list with the first, and the last."""
        globs = [directive.args["inside"]] if "inside" in directive.args else [f"{enter.rpartition('.')[0]}.*"]
        return [*(path for glob in globs for path in expand(self.model, glob)), *expand(self.model, directive.args["leave"])]

    def find_summed(self) -> None:
        first = self.first_names()
        for directive, path, module in self.each("sum_gradients"):
            names = directive.args.get("names") or [name for name, _ in module.named_parameters(recurse=False)]
            have = {name for name, _ in module.named_parameters()}
            for name in names:
                if name not in have:
                    raise ConfigError(no_parameter(path, module, name, directive.where))
            self.summed |= {first.get(id(module.get_parameter(name)), _joined(path, name)) for name in names}

    # notes, random numbers, recomputation

    def annotate(self) -> None:
        for directive, path, module in self.each("annotate"):
            name, key = directive.args["parameter"], directive.args["key"]
            parameter = module._parameters.get(name)
            if parameter is None:
                raise ConfigError(no_parameter(path, module, name, directive.where))
            if key not in parameter.__dict__ and hasattr(parameter, key):
                raise ConfigError(
                    f"annotate on {path}: {key!r} is something that every tensor has: a note needs a name of its own ({directive.where})"
                )
            setattr(parameter, key, directive.args.get("value"))

    def put_random(self) -> None:
        for directive, _, module in self.each("rng"):
            axis = directive.args["axis"]
            if axis == "same":
                around(module, self.streams.same)
            elif (group := self.mesh.group(axis)).size() > 1:
                around(module, partial(self.streams.differ, group, axis == "tp"))

    def put_checkpoints(self) -> None:
        for directive, path, module in self.each("checkpoint"):
            recompute(module, path, directive.args.get("policy", "full"), directive.where, self.streams)

    def specs(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, ShardSpec]:
        found, rank = {}, self.group.rank()
        buffers = [(name, b) for name, b in self.model.named_buffers() if name in self.splits]
        for name, _ in (*self.model.named_parameters(), *buffers):
            split = self.splits.get(name)
            if split is not None:
                found[name] = spec_of(split, shapes[name], self.group)
            else:
                found[name] = ShardSpec.whole(shapes[name], rank, self.size, summed=name in self.summed)
        return found


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def length_multiple(directives: list[Directive], sp: int, tp: int) -> int:
    """Return the multiple to which a sequence cut over sp is padded: in ``sequence()`` tp cuts it once more."""
    return sp * (tp if any(d.do == "sequence" for d in directives) else 1)


def apply(
    model: nn.Module, directives: list[Directive], mesh: Mesh, seq_dim: int, *, rules: bool = True, multiple: int | None = None
) -> Applied:
    """Change a model as these lines specify; if anything is raised, the model is left unchanged.

    Args:
        rules: check the rules on the lines; callers that apply some of the lines only, or measure wrong ones, do not.
        multiple: apply ``ulysses()`` on one rank, too, and pad lengths to a multiple of this: the reference that a run on several ranks is
            compared with, step by step (default: one rank does nothing).
    Raises:
        ConfigError: an impossible line.
    """
    brought = [d.args["new"] for d in directives if d.do == "replace" and isinstance(d.args["new"], nn.Module)]
    with whole_or_not_at_all(model, *brought):
        return _Compiler(model, directives, mesh, seq_dim, rules=rules, multiple=multiple).run()
