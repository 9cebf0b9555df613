"""Head counts of attention modules: where a line gives the heads of a layer, the module around it counts a rank's share of them.

    s["attn.q_proj"].column(heads=32)       # implies .set("num_heads", divide="tp") on attn, if it has such an attribute and it is 32

An attribute that a ``.set()`` line names is left as it is, and so is any number that is not the layer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.kinds import find_kind

COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "nheads", "heads")
WIDTHS = ("all_head_size", "inner_dim", "split_size")  # attributes that hold the width of all heads together

Line = tuple[Directive, str, nn.Module]


def implied(model: nn.Module, lines: Iterable[Line], size: int) -> list[Directive]:
    """Return the lines that set counts and widths of heads, where other lines give the number of heads of a split layer.

    Args:
        lines: (line, path, module) of all lines, in a whole model.
        size: of tp.
    """
    found: dict[tuple[int, str], Directive] = {}
    known = list(lines)
    said = {(id(module), line.args["attribute"]) for line, _, module in known if line.do == "set"}
    for line, path, module in known:
        heads = line.args.get("heads")
        if size == 1 or line.do not in ("shard", "column", "row") or not path or not isinstance(heads, int) or heads < 1:
            continue
        around = path.rpartition(".")[0]
        for attribute, share in _shares(model.get_submodule(around), line, module, heads, size):
            key = id(model.get_submodule(around)), attribute
            if key not in said:
                found.setdefault(key, Directive(around, "set", {"attribute": attribute, **share}, line.where, ("attribute",)))
    return list(found.values())


def _shares(attention: nn.Module, line: Directive, module: nn.Module, heads: int, size: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield (attribute, arguments of its set line) for the module around a layer with this number of heads."""
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
    """Return the width of all heads: the layer's number of outputs, or that of each of its equal blocks; 0: unknown."""
    kind, blocks = find_kind(module), line.args.get("blocks")
    weight = None if kind is None else module._parameters.get(kind.main)
    if kind is None or weight is None or line.do == "row" or not isinstance(blocks, (int, type(None))) or kind.main not in kind.out_dims:
        return 0
    return int(weight.shape[kind.out_dims[kind.main]]) // (blocks or 1)
