"""Survey of what a schedule does to a model, as data for ``show()``, ``explain()``, the picture and the command line.

The lines are applied to a copy of the model without weight values (meta device), which is then inspected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.apply.apply import apply
from megatron_sp.schedule.apply.decide import decide, without_weights, without_weights_in
from megatron_sp.schedule.apply.splits import Split, tensor_of
from megatron_sp.schedule.core.directives import Directive, expand
from megatron_sp.schedule.core.hooks import input_name
from megatron_sp.utils.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sp.schedule.schedule import Schedule

BACKWARD = {"copy": "all_reduce", "all_reduce": "", "reduce_scatter": "all_gather", "scatter": "all_gather"}
FORWARD = {"copy": "", "scatter": "slice"}


@dataclass(frozen=True)
class Part:
    """Parameter or buffer of a module."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    dim: int | None = None
    runs: tuple[tuple[int, int], ...] = ()
    summed: bool = False
    tied: str = ""


@dataclass(frozen=True)
class Edge:
    """Collective on a tensor that enters or leaves a module."""

    side: str
    tensor: str
    forward: str
    backward: str
    axis: str
    dim: int | None
    why: str
    directive: Directive

    @property
    def words(self) -> str:
        """Description such as ``all_gather dim 1, backward reduce_scatter``."""
        dim = "" if self.dim is None else f" dim {self.dim}"
        if self.forward and self.backward:
            return f"{self.forward}{dim}, backward {self.backward}"
        return (
            f"{self.forward}{dim}" if self.forward else f"backward {self.backward}{dim}" if self.backward else "nothing"
        )


@dataclass
class Node:
    """Module in the surveyed tree."""

    path: str
    name: str
    kind: str
    role: str = ""
    parts: list[Part] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def copies(self) -> int:
        """Number of modules that look like this one."""
        return len(self.paths)

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def signature(self) -> tuple[Any, ...]:
        """Key that is equal for modules that look alike."""
        edges = tuple((e.side, e.tensor, e.forward, e.backward, e.axis, e.dim) for e in self.edges)
        parts = tuple((p.name, p.shape, p.local, p.dim, p.summed, bool(p.tied)) for p in self.parts)
        inside = tuple((child.name, child.signature) for child in self.children)
        return self.kind, self.role, parts, edges, tuple(self.notes), inside


@dataclass
class Survey:
    """Survey of a schedule."""

    root: Node
    mesh: str
    rank: int
    size: int
    directives: list[Directive]
    whole: int = 0
    local: int = 0
    problem: str = ""

    def at(self, path: str) -> Node:
        """Node of a path."""
        return next(node for node in self.root.walk() if node.path == path)

    def folded(self) -> Node:
        """Return the tree with identical neighbours merged."""
        return _folded(self.root)


def survey(schedule: Schedule) -> Survey:
    """Survey a schedule, applied or not. Raises ConfigError: its lines cannot even be tried out."""
    applied, problem = schedule.applied, ""
    if applied is None:
        shapes = {name: tuple(t.shape) for name, t in _tensors(schedule.model)}
        try:
            decide(schedule.model, schedule.directives, schedule.mesh, schedule.seq_dim)
        except ConfigError as error:
            problem = str(error)
        lines = [without_weights_in(d) for d in schedule.directives if d.do not in ("ulysses", "context", "zero")]
        applied = apply(
            without_weights(schedule.model, buffers=True), lines, schedule.mesh, schedule.seq_dim, rules=False
        )
    else:
        shapes = {name: spec.shape for name, spec in applied.specs.items()}
    found = _Look(schedule, applied, shapes).node("", "", applied.model)
    parameters = dict(applied.model.named_parameters())
    whole = sum(torch.Size(applied.specs[name].shape).numel() for name in parameters)
    local = sum(p.numel() for p in parameters.values())
    tp = schedule.mesh.tp
    return Survey(found, str(schedule.mesh), tp.rank(), tp.size(), schedule.directives, whole, local, problem)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers()


class _Look:
    """Builder of the tree."""

    def __init__(self, schedule: Schedule, applied: Applied, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.schedule, self.applied, self.shapes = schedule, applied, shapes
        self.model, self.seq_dim = applied.model, schedule.seq_dim
        self.by_path: dict[str, list[Directive]] = {}
        for directive in [*schedule.directives, *(d for d in applied.lines if d.do == "set" and d.derived)]:
            for path in expand(self.model, directive.on):
                self.by_path.setdefault(path, []).append(directive)
        self.first: dict[int, str] = {}
        self.leaves = {d.args["leave"]: d for d in schedule.directives if d.do == "sequence"}

    def node(self, path: str, name: str, module: nn.Module) -> Node:
        node = Node(path, name, type(module).__name__, paths=[path])
        node.parts = [
            part
            for key in (*module._parameters, *module._buffers)
            if (part := self.part(path, key, module)) is not None
        ]
        self.annotate(node, module)
        for key, child in module.named_children():
            node.children.append(self.node(f"{path}.{key}".lstrip("."), key, child))
        return node

    def part(self, path: str, key: str, module: nn.Module) -> Part | None:
        full = f"{path}.{key}".lstrip(".")
        split = self.applied.splits.get(full)
        tensor = tensor_of(module, key)
        if tensor is None or (key in module._buffers and split is None):
            return None
        before = self.first.setdefault(id(tensor), full)
        spec = self.applied.specs.get(before)
        shape = spec.shape if spec is not None else self.shapes.get(full, tuple(tensor.shape))
        return _part(key, shape, tuple(tensor.shape), split, spec, "" if before == full else before)

    def annotate(self, node: Node, module: nn.Module) -> None:
        split = next((p for p in node.parts if p.dim is not None), None)
        node.role = "split" if split else ""
        syncs = [d for d in self.by_path.get(node.path, []) if d.do == "sync"]
        for directive in self.by_path.get(node.path, []):
            if directive.do in ("column", "row", "vocab_parallel"):
                node.role = {"vocab_parallel": "words"}.get(directive.do, directive.do)
                node.edges += _edges_of_layer(directive, module, self.seq_dim)
            elif directive.do == "sync":
                node.edges.append(_edge_of_sync(directive, module, node.path, self.seq_dim))
            elif directive.do == "sequence":
                node.edges.append(
                    _edge(
                        directive,
                        "in",
                        "scatter",
                        self.seq_dim,
                        _WHY["enter"],
                        tensor=_input(module, node.path, directive),
                    )
                )
            elif directive.do != "shard":
                node.notes.append(_note(directive))
        if node.path in self.leaves:
            node.edges.append(
                _edge(self.leaves[node.path], "out", "all_gather", self.seq_dim, _WHY["leave"], backward="slice")
            )
        if (
            split is not None
            and isinstance(module, nn.Embedding)
            and split.dim == 0
            and not node.edges
            and not node.notes
        ):
            line = next(d for d in self.by_path[node.path] if d.do == "shard")
            node.edges.append(_edge(line, "out", "all_reduce", None, _WHY["words"]))
        if (
            split is not None
            and node.role == "split"
            and split.dim is not None
            and not syncs
            and isinstance(module, nn.Embedding)
        ):
            node.role = "words"


def _part(
    key: str, shape: tuple[int, ...], local: tuple[int, ...], split: Split | None, spec: ShardSpec | None, tied: str
) -> Part:  # fmt: skip
    if split is None:
        return Part(key, shape, local, summed=bool(spec and spec.sums), tied=tied)
    return Part(key, shape, local, split.dim, spec.runs if spec else (), bool(spec and spec.sums), tied)


_WHY = {
    "copy": "every rank uses all of the input for its own share of the work, so each has a part of the input's gradient, and their sum is"
    " the whole",
    "row": "every rank has a share of the inputs, so its result is a part of a sum; the bias is added after it, once",
    "row_scatter": "every rank has a share of the inputs, so its result is a part of a sum, of which each rank goes on with a share of the"
    " positions; the bias is added after it, and its gradient is summed over tp",
    "gather": "what follows wants all outputs, and every rank goes on alike, so each takes its own slice of the gradient",
    "words": "every rank looks up the words that it has and leaves zeros for the others: the sum is the whole lookup",
    "logits": "every rank has the logits of its words, and what follows looks at all of them, on all ranks alike, so each takes its slice"
    " of the gradient",
    "enter": "from here on every rank works on its share of the positions",
    "leave": "what follows works on all positions, on every rank alike, so each takes its own slice of the gradient",
    "all_gather_slice": "every rank has a share, and what follows wants all of it and does the same everywhere, so each takes its slice of"
    " the gradient",
    "all_gather_reduce_scatter": "every rank has a share, and what follows wants all of it and goes on differently on each rank, so the"
    " gradients are summed, and each keeps its share",
    "all_reduce": "every rank has a part of a sum, and what follows wants all of it",
    "reduce_scatter": "every rank has a part of a sum, and goes on with a share of it",
    "scatter": "all ranks have the same, and each goes on with a share of it",
    "function": "a function of the schedule's writer",
}


def _edge(
    directive: Directive, side: str, op: str, dim: int | None, why: str, *, tensor: str = "", backward: str | None = None
) -> Edge:  # fmt: skip
    back = BACKWARD.get(op, "") if backward is None else backward
    return Edge(side, tensor, FORWARD.get(op, op), back, directive.args.get("over", "tp"), dim, why, directive)


def _edges_of_layer(directive: Directive, module: nn.Module, seq_dim: int) -> list[Edge]:
    args, is_table = directive.args, isinstance(module, nn.Embedding)
    if directive.do == "row":
        scatter = args.get("reduce") == "reduce_scatter"
        dim = (seq_dim if args.get("axis") is None else args["axis"]) if scatter else None
        return [
            _edge(directive, "out", args.get("reduce", "all_reduce"), dim, _WHY["row_scatter" if scatter else "row"])
        ]
    if directive.do == "vocab_parallel":
        if is_table:
            return [_edge(directive, "out", "all_reduce", None, _WHY["words"])]
        return [
            _edge(directive, "in", "copy", None, _WHY["copy"]),
            _edge(directive, "out", "all_gather", -1, _WHY["logits"], backward="slice"),
        ]
    edges = [_edge(directive, "in", "copy", None, _WHY["copy"])] if args.get("input", "copy") == "copy" else []
    if args.get("gather"):
        edges.append(_edge(directive, "out", "all_gather", -1, _WHY["gather"], backward="slice"))
    return edges


def _edge_of_sync(directive: Directive, module: nn.Module, path: str, seq_dim: int) -> Edge:
    args = directive.args
    op, side = args["op"], "out" if args["mode"] == "fwd_post" else "in"
    tensor = _input(module, path, directive) if side == "in" else str(args.get("out", ""))
    if callable(op):
        words = f"{getattr(op, '__name__', 'a function')}{' ' + args['layouts'] if args.get('layouts') else ''}"
        return _edge(directive, side, words, None, _WHY["function"], tensor=tensor)
    if args["mode"] == "bwd_post":
        op = "copy"
    dim = None if op in ("copy", "all_reduce") else args.get("axis", seq_dim)
    if op != "all_gather":
        return _edge(directive, side, op, dim, _WHY[op], tensor=tensor)
    grad = args.get("grad") or ("reduce_scatter" if side == "in" else "slice")
    return _edge(directive, side, op, dim, _WHY[f"all_gather_{grad}"], tensor=tensor, backward=grad)


def _input(module: nn.Module, path: str, directive: Directive) -> str:
    return input_name(module, path, directive.args.get("arg"), directive.where)


def _note(directive: Directive) -> str:
    words = ", ".join(
        str(v) if k in ("stage", "axis", "policy", "attribute") else f"{k} {_value(v)}"
        for k, v in directive.args.items()
        if v is not False
    )
    return f"{directive.do} {words}".strip()


def _value(value: Any) -> str:
    if callable(value):
        return str(getattr(value, "__name__", type(value).__name__))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _folded(node: Node) -> Node:
    made: list[Node] = []
    for child in map(_folded, node.children):
        last = made[-1] if made else None
        if (
            last is not None
            and child.children
            and last.name.partition("-")[0].isdigit()
            and last.signature == child.signature
        ):
            last.paths += child.paths
            last.name = f"{last.name.partition('-')[0]}-{child.name}"
        else:
            made.append(child)
    fields = {name: getattr(node, name) for name in ("role", "parts", "edges", "notes")}
    return Node(node.path, node.name, node.kind, children=made, paths=list(node.paths), **fields)
