"""Changes of a model that split nothing: other modules, other values of attributes, notes on parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

from torch import nn

from megatron_sp.schedule.apply.plan import ApplyJob, no_parameter
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.kinds import find_kind
from megatron_sp.utils.errors import ConfigError


def replace_modules(job: ApplyJob) -> None:
    """Put other modules in place, for ``replace`` lines. Raises ConfigError for the model itself."""
    for directive, path, module in list(job.each("replace")):
        if not path:
            raise ConfigError(
                f"replace on the model itself ({directive.where}): begin the schedule of the other model instead"
            )
        new = directive.args["new"]
        new = new if isinstance(new, nn.Module) else new(path, module)
        parent, _, last = path.rpartition(".")
        setattr(job.model.get_submodule(parent), last, new)


def set_attributes(job: ApplyJob) -> None:
    """Set or divide attributes, for ``set`` lines."""
    for directive, path, module in job.each("set"):
        attribute, where = directive.args["attribute"], directive.where
        if not hasattr(module, attribute):
            raise ConfigError(f"{path} has no attribute {attribute!r} to set ({where})")
        old, value = getattr(module, attribute), directive.args.get("value")
        _require_settable(path, module, directive)
        if (axis := directive.args.get("divide")) is not None:
            size = job.mesh.group(axis).size()
            if not isinstance(old, int) or old % size:
                raise ConfigError(f"{path}.{attribute} ({old!r}) must be a multiple of {axis} ({size}) ({where})")
            value = old // size
        setattr(module, attribute, value(old) if callable(value) else value)


def _require_settable(path: str, module: nn.Module, line: Directive) -> None:
    attribute, value = line.args["attribute"], line.args.get("value")
    if value is not None and "divide" in line.args:
        raise ConfigError(f"set {attribute!r} on {path} wants a value, or divide=, and not both ({line.where})")
    if callable(value):  # the author of a function knows what the attribute holds
        return
    is_tensor = any(attribute in named for named in (module._parameters, module._buffers, module._modules))
    if attribute.startswith("__") or is_tensor or inspect.ismethod(getattr(module, attribute)):
        raise ConfigError(
            f"set on {path}: {attribute!r} is a method, a tensor or a module, not a setting: use .shard() or .replace() for these"
            f" ({line.where})"
        )


def annotate_parameters(job: ApplyJob) -> None:
    """Attach notes to parameters, for ``annotate`` lines. Raises ConfigError if a tensor has an attribute of that name anyway."""
    for directive, path, module in job.each("annotate"):
        name, key = directive.args["parameter"], directive.args["key"]
        parameter = module._parameters.get(name)
        if parameter is None:
            raise ConfigError(no_parameter(path, module, name, directive.where))
        if key not in parameter.__dict__ and hasattr(parameter, key):
            raise ConfigError(
                f"annotate on {path}: every tensor has an attribute {key!r}: choose another name for the note ({directive.where})"
            )
        setattr(parameter, key, directive.args.get("value"))


COUNTS = (
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "nheads",
    "heads",
)
WIDTHS = ("all_head_size", "inner_dim", "split_size")  # attributes that hold the width of all heads together

Line = tuple[Directive, str, nn.Module]


def implied(model: nn.Module, lines: Iterable[Line], size: int) -> list[Directive]:
    """Return the lines that set counts and widths of heads, where other lines give the number of heads of a split layer."""
    found: dict[tuple[int, str], Directive] = {}
    known = list(lines)
    said = {(id(module), line.args["attribute"]) for line, _, module in known if line.do == "set"}
    for line, path, module in known:
        heads = line.args.get("heads")
        if (
            size == 1
            or line.do not in ("shard", "column", "row")
            or not path
            or not isinstance(heads, int)
            or heads < 1
        ):
            continue
        around = path.rpartition(".")[0]
        for attribute, share in _shares(model.get_submodule(around), line, module, heads, size):
            key = id(model.get_submodule(around)), attribute
            if key not in said:
                found.setdefault(
                    key, Directive(around, "set", {"attribute": attribute, **share}, line.where, ("attribute",))
                )
    return list(found.values())


def _shares(
    attention: nn.Module, line: Directive, module: nn.Module, heads: int, size: int
) -> Iterator[tuple[str, dict[str, object]]]:
    numbers = {name: value for name, value in vars(attention).items() if type(value) is int}
    few = bool(line.args.get("replicas")) and heads < size and size % heads == 0  # several ranks have the same head
    if heads % size and not few:
        return
    for name in COUNTS:
        if numbers.get(name) == heads:
            yield name, {"value": 1} if few else {"divide": "tp"}
    width = _width(line, module)
    for name in WIDTHS:
        if width and numbers.get(name) == width and not few:
            yield name, {"divide": "tp"}


def _width(line: Directive, module: nn.Module) -> int:
    # the width of all heads: the layer's number of outputs, or that of each of its equal blocks; 0: unknown
    kind, blocks = find_kind(module), line.args.get("blocks")
    weight = None if kind is None else module._parameters.get(kind.main)
    if (
        kind is None
        or weight is None
        or line.do == "row"
        or not isinstance(blocks, (int, type(None)))
        or kind.main not in kind.out_dims
    ):
        return 0
    return int(weight.shape[kind.out_dims[kind.main]]) // (blocks or 1)
