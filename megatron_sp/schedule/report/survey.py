"""Survey of what a schedule does to a model: a tree of data for text, picture and JSON (``show.py``).

The lines are applied to a copy of the model without weight values (meta device), which is then inspected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_sp.schedule.apply.apply import apply, decide, without_weights, without_weights_in
from megatron_sp.schedule.apply.plan import tensor_of
from megatron_sp.schedule.core.directives import Directive, expand
from megatron_sp.schedule.core.hooks import input_name
from megatron_sp.utils.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sp.schedule.schedule import Schedule

_BACKWARD = {"copy": "all_reduce", "all_reduce": "", "reduce_scatter": "all_gather", "scatter": "all_gather"}
_FORWARD = {"copy": "", "scatter": "slice"}


@dataclass(frozen=True)
class Part:
    """Parameter or buffer of a module."""

    name: str
    shape: tuple[int, ...]  # of the whole
    local: tuple[int, ...]  # of this rank's share
    dim: int | None = None  # along which it is split
    runs: tuple[tuple[int, int], ...] = ()  # (start, length) of this rank's rows along it
    summed: bool = False  # ranks use it on shares, so its gradient is summed over tp
    tied: str = ""  # name under which the same parameter came before


@dataclass(frozen=True)
class Edge:
    """Collective on a tensor that enters (``side`` in) or leaves (out) a module."""

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
        backward = f"backward {self.backward}{dim}" if self.backward else "nothing"
        return f"{self.forward}{dim}" if self.forward else backward


@dataclass
class Node:
    """Module; ``paths`` are those of all modules that look like it."""

    path: str
    name: str
    kind: str
    role: str = ""
    parts: list[Part] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def signature(self) -> tuple[Any, ...]:
        edges = tuple((e.side, e.tensor, e.forward, e.backward, e.axis, e.dim) for e in self.edges)
        parts = tuple((p.name, p.shape, p.local, p.dim, p.summed, bool(p.tied)) for p in self.parts)
        inside = tuple((child.name, child.signature) for child in self.children)
        return self.kind, self.role, parts, edges, tuple(self.notes), inside

    def folded(self) -> Node:
        merged: list[Node] = []
        for child in [child.folded() for child in self.children]:
            last = merged[-1] if merged else None
            first_number = "" if last is None else last.name.partition("-")[0]
            if last and child.children and first_number.isdigit() and last.signature == child.signature:
                last.paths += child.paths
                last.name = f"{first_number}-{child.name}"
            else:
                merged.append(child)
        return replace(self, children=merged, paths=list(self.paths))


@dataclass
class Survey:
    root: Node
    mesh: str
    rank: int  # of tp
    size: int  # of tp
    directives: list[Directive]
    whole: int = 0  # parameters of the model
    local: int = 0  # parameters of the rank
    problem: str = ""  # for which apply() refuses the lines

    def at(self, path: str) -> Node:
        return next(node for node in self.root.walk() if node.path == path)


def survey(schedule: Schedule) -> Survey:
    """Survey a schedule, applied or not. Raises ConfigError: its lines cannot even be tried out."""
    applied, problem, mesh = schedule.applied, "", schedule.mesh
    tensors = (*schedule.model.named_parameters(remove_duplicate=False), *schedule.model.named_buffers())
    shapes = {name: tuple(t.shape) for name, t in tensors}
    if applied is None:
        try:
            decide(schedule.model, schedule.directives, mesh, schedule.seq_dim)
        except ConfigError as error:
            problem = str(error)
        lines = without_weights_in(schedule.directives, "ulysses", "context", "zero")
        copied = without_weights(schedule.model, buffers=True)
        applied = apply(copied, lines, mesh, schedule.seq_dim, rules=False)
    else:
        shapes |= {name: spec.shape for name, spec in applied.specs.items()}
    by_path: dict[str, list[Directive]] = {}
    for line in [*schedule.directives, *(d for d in applied.lines if d.do == "set" and d.derived)]:
        for path in expand(applied.model, line.on):
            by_path.setdefault(path, []).append(line)
    leaves = {d.args["leave"]: d for d in schedule.directives if d.do == "sequence"}
    first_names: dict[int, str] = {}

    def look(path: str, name: str, module: nn.Module) -> Node:
        node = Node(path, name, type(module).__name__, paths=[path])
        for key in (*module._parameters, *module._buffers):
            full, tensor = f"{path}.{key}".lstrip("."), tensor_of(module, key)
            split = applied.splits.get(full)
            if tensor is None or (key in module._buffers and split is None):
                continue
            first = first_names.setdefault(id(tensor), full)
            spec = applied.specs.get(first)
            shape = shapes.get(full, tuple(tensor.shape)) if spec is None else spec.shape
            dim, runs = (None, ()) if split is None else (split.dim, spec.runs if spec else ())
            tied = "" if first == full else first
            node.parts.append(Part(key, shape, tuple(tensor.shape), dim, runs, bool(spec and spec.sums), tied))
        _annotate(node, module, by_path.get(path, []), schedule.seq_dim)
        if path in leaves:
            node.edges.append(_edge(leaves[path], "out", "all_gather", schedule.seq_dim, "leave", back="slice"))
        node.children = [look(f"{path}.{key}".lstrip("."), key, child) for key, child in module.named_children()]
        return node

    root = look("", "", applied.model)
    parameters = dict(applied.model.named_parameters())
    whole = sum(torch.Size(applied.specs[name].shape).numel() for name in parameters)
    local = sum(p.numel() for p in parameters.values())
    return Survey(root, str(mesh), mesh.tp.rank(), mesh.tp.size(), schedule.directives, whole, local, problem)


_WHY = {
    "copy": (
        "every rank uses all of the input for its own share of the work, so each has a part of the input's "
        "gradient, and their sum is the whole"
    ),
    "row": "every rank has a share of the inputs, so its result is a part of a sum; the bias is added after it, once",
    "row_scatter": (
        "every rank has a share of the inputs, so its result is a part of a sum, of which each rank goes on with "
        "a share of the positions; the bias is added after it, and its gradient is summed over tp"
    ),
    "gather": (
        "what follows wants all outputs, and every rank goes on alike, so each takes its own slice of the gradient"
    ),
    "words": "every rank looks up the words that it has and leaves zeros for the others: the sum is the whole lookup",
    "logits": (
        "every rank has the logits of its words, and what follows looks at all of them, on all ranks alike, so "
        "each takes its slice of the gradient"
    ),
    "enter": "from here on every rank works on its share of the positions",
    "leave": "what follows works on all positions, on every rank alike, so each takes its own slice of the gradient",
    "all_gather_slice": (
        "every rank has a share, and what follows wants all of it and does the same everywhere, so each takes its "
        "slice of the gradient"
    ),
    "all_gather_reduce_scatter": (
        "every rank has a share, and what follows wants all of it and goes on differently on each rank, so the "
        "gradients are summed, and each keeps its share"
    ),
    "all_reduce": "every rank has a part of a sum, and what follows wants all of it",
    "reduce_scatter": "every rank has a part of a sum, and goes on with a share of it",
    "scatter": "all ranks have the same, and each goes on with a share of it",
    "function": "a function of the schedule's writer",
}


def _edge(line: Directive, side: str, op: str, dim: int | None, why: str, tensor: str = "", back: Any = None) -> Edge:
    backward = _BACKWARD.get(op, "") if back is None else back
    return Edge(side, tensor, _FORWARD.get(op, op), backward, line.args.get("over", "tp"), dim, _WHY[why], line)


def _annotate(node: Node, module: nn.Module, lines: list[Directive], seq_dim: int) -> None:
    split = next((p for p in node.parts if p.dim is not None), None)
    node.role = "split" if split else ""
    is_table = isinstance(module, nn.Embedding)
    for line in lines:
        args, add = line.args, node.edges.append
        if line.do == "column":
            node.role = "column"
            if args.get("input", "copy") == "copy":
                add(_edge(line, "in", "copy", None, "copy"))
            if args.get("gather"):
                add(_edge(line, "out", "all_gather", -1, "gather", back="slice"))
        elif line.do == "row":
            node.role = "row"
            scatters = args.get("reduce") == "reduce_scatter"
            dim = args.get("axis") if args.get("axis") is not None else seq_dim
            why = "row_scatter" if scatters else "row"
            add(_edge(line, "out", args.get("reduce", "all_reduce"), dim if scatters else None, why))
        elif line.do == "vocab_parallel":
            node.role = "words"
            if is_table:
                add(_edge(line, "out", "all_reduce", None, "words"))
            else:
                add(_edge(line, "in", "copy", None, "copy"))
                add(_edge(line, "out", "all_gather", -1, "logits", back="slice"))
        elif line.do == "sync":
            add(_edge_of_sync(line, module, node.path, seq_dim))
        elif line.do == "sequence":
            tensor = input_name(module, node.path, args.get("arg"), line.where)
            add(_edge(line, "in", "scatter", seq_dim, "enter", tensor=tensor))
        elif line.do != "shard":
            words = []
            for key, value in args.items():
                if callable(value):
                    value = getattr(value, "__name__", type(value).__name__)
                text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
                if value is not False:
                    words.append(text if key in ("stage", "axis", "policy", "attribute") else f"{key} {text}")
            node.notes.append(f"{line.do} {', '.join(words)}".strip())
    if split is not None and is_table:
        if split.dim == 0 and not node.edges and not node.notes:
            line = next(d for d in lines if d.do == "shard")
            node.edges.append(_edge(line, "out", "all_reduce", None, "words"))
        if node.role == "split" and not any(d.do == "sync" for d in lines):
            node.role = "words"


def _edge_of_sync(line: Directive, module: nn.Module, path: str, seq_dim: int) -> Edge:
    args, op = line.args, line.args["op"]
    side = "out" if args["mode"] == "fwd_post" else "in"
    tensor = str(args.get("out", "")) if side == "out" else input_name(module, path, args.get("arg"), line.where)
    if callable(op):
        layouts = f" {args['layouts']}" if args.get("layouts") else ""
        return _edge(line, side, f"{getattr(op, '__name__', 'a function')}{layouts}", None, "function", tensor=tensor)
    if args["mode"] == "bwd_post":
        op = "copy"
    dim = None if op in ("copy", "all_reduce") else args.get("axis", seq_dim)
    if op != "all_gather":
        return _edge(line, side, op, dim, op, tensor=tensor)
    grad = args.get("grad") or ("reduce_scatter" if side == "in" else "slice")
    return _edge(line, side, op, dim, f"all_gather_{grad}", tensor=tensor, back=grad)
