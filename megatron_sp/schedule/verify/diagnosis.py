"""Diagnosis of a split model that computes something else than the whole one: the first module that differs, and the sum that is missing.

Both models run once more, and every tensor that enters or leaves a module is kept, with its gradient. Each of the split
model's is compared with the whole model's: it may be the same, a share, a partial sum over some ranks, or a multiple. A
partial sum is what the lines may want, until something is computed from it that is none of these: then the sum before
that point is missing. Forward this finds results, and in the order of the backward pass gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.core.directives import Directive, expand
from megatron_sp.schedule.core.hooks import parameter_names
from megatron_sp.schedule.core.mesh import AXES, Mesh
from megatron_sp.schedule.core.records import tensors_of


@dataclass
class Edge:
    """A tensor that entered (``side`` "input") or left ("output") a module; ``value`` is replaced by the gradient for the backward pass."""

    path: str
    side: str
    name: str
    value: Tensor
    tensor: int  # identity: several modules may be given the same one

    @property
    def key(self) -> tuple[str, str, str]:
        """Name of the edge, the same in both models."""
        return self.path, self.side, self.name


@dataclass
class Trace:
    """All edges of one pass, in the order of the computation; and their gradients, by place in that list."""

    edges: list[Edge] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Record the passes of a model inside."""
        handles = []
        for path, module in model.named_modules():
            # what enters is seen before the hooks of syncs change it, and what leaves after they have
            handles.append(module.register_forward_pre_hook(self._enter(path), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.running.append(path)
            names = parameter_names(module)
            given = {names[i] if i < len(names) else str(i): a for i, a in enumerate(args)}
            self._note(path, "input", {**given, **kwargs})

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            self._note(path, "output", result)
            self.running.pop()

        return hook

    def _note(self, path: str, side: str, value: Any) -> None:
        for name, t in tensors_of(value).items():
            if type(t) not in (Tensor, nn.Parameter) or not t.is_floating_point():
                continue
            place = len(self.edges)
            self.edges.append(Edge(path, side, name, t.detach().clone(), id(t)))
            if t.requires_grad:
                t.register_hook(lambda grad, place=place: self.gradients.__setitem__(place, grad.detach().clone()))

    def backward(self, scale: float = 1.0) -> list[Edge]:
        """Return the edges with their gradients as values, in the order of the backward pass."""
        made = [
            Edge(e.path, e.side, e.name, self.gradients[i] * scale, e.tensor)
            for i, e in enumerate(self.edges)
            if i in self.gradients
        ]
        return made[::-1]


@dataclass(frozen=True)
class _Found:
    """Result of a comparison with the whole model's tensor."""

    # same, share (of it), partial (sum over the ranks of ``axis``), multiple (``factor`` times it), bias (added by each
    # rank), cut (a share with other elements), other
    kind: str
    axis: str = ""
    factor: float = 1.0


class Diagnosis:
    """Diagnosis on one mesh. All methods are collective, unless they say otherwise.

    Args:
        whole: the whole model.
        applied: the split one.
        lines: the lines of the schedule.
        tolerance: relative error that rounding explains.
    """

    def __init__(self, whole: nn.Module, applied: Applied, lines: Sequence[Directive], tolerance: float) -> None:
        self.whole, self.applied, self.lines, self.tolerance = whole, applied, lines, tolerance
        self.mesh: Mesh = applied.mesh
        self.first = ""  # module that differs
        self._last_split = ""  # layer whose share was the last to be right, forward
        self._partial_outputs: set[str] = set()  # modules at whose results gradients were partial sums

    def explain(self, whole: Trace, split: Trace) -> str:
        """Return what is wrong, where, and what to write instead; "" if nothing is found. Sets ``first``."""
        return self._walk(whole.edges, split.edges, "output") or self._walk(
            whole.backward(), split.backward(self.mesh.dp.size()), "gradient"
        )

    def _walk(self, whole: list[Edge], split: list[Edge], what: str) -> str:
        expected: dict[tuple[str, str, str], list[Edge]] = defaultdict(list)
        for edge in whole:
            expected[edge.key].append(edge)
        sums: list[tuple[Edge, _Found]] = []  # partial sums that follow each other up to here
        cut: list[
            tuple[Edge, list[int]]
        ] = []  # with other elements than a rank's share in order; and the shape of the whole
        for edge in split:
            if not expected[edge.key]:
                continue
            reference = expected[edge.key].pop(0)
            found = self._compare(edge.value, reference.value, what, edge.path)
            if found.kind in ("same", "share"):
                if what == "output" and edge.side == "output" and found.kind == "share" and self._splits(edge.path):
                    self._last_split = edge.path
                sums.clear()
                cut.clear()
            elif found.kind == "partial":
                sums.append((edge, found))
                if what == "gradient" and edge.side == "output":
                    self._partial_outputs.add(edge.path)
            elif found.kind == "cut":
                cut.append((edge, list(reference.value.shape)))
            else:
                self.first = edge.path or "the model itself"
                return self._blame(edge, found, sums, cut, what)
        if sums and (what == "gradient" or not sums[-1][0].path):
            self.first = sums[0][0].path or "the model itself"
            return (
                "" if what == "gradient" and not self._reaches_parameters(sums[0][0]) else self._missing_sum(sums, what)
            )
        return ""

    def _reaches_parameters(self, edge: Edge) -> bool:
        inside = f"{edge.path}." if edge.path else ""
        return any(p.requires_grad and not name.startswith(inside) for name, p in self.whole.named_parameters())

    # what a tensor is

    def _compare(self, made: Tensor, whole: Tensor, what: str, path: str) -> _Found:
        reference, by_tp, by_positions = self._own_part(made, whole)
        if not self._all(reference is not None):
            return _Found("cut")
        assert reference is not None
        if what == "gradient" and not by_positions:  # each rank has the part of its rows and positions
            made = made / self.mesh.dp.size()
            for group in self.mesh.replicas:
                all_reduce(made, group)
        is_close = partial(self._is_close, reference, float(whole.abs().max()) if whole.numel() else 0.0)
        if is_close(made):
            return _Found("share" if by_tp or by_positions else "same")
        for axis in ("tp", "sp", "cp"):
            group = self.mesh.group(axis)
            if group.size() > 1 and is_close(all_reduce(made.clone(memory_format=torch.contiguous_format), group)):
                return _Found("partial", axis)
        bias = self.whole.get_submodule(path)._parameters.get("bias") if what == "output" and not by_tp else None
        if (
            bias is not None
            and made.shape[-1:] == bias.shape
            and is_close(made - (self.mesh.tp.size() - 1) * bias.detach())
        ):
            return _Found("bias")
        if (factor := self._factor(made, reference)) and is_close(made / factor):
            return _Found("multiple", factor=factor)
        return _Found("cut" if by_tp else "other")  # a layer may have several shares, one after another

    def _is_close(self, reference: Tensor, scale: float, x: Tensor) -> bool:
        error = (x - reference).abs().max().double() if x.numel() else torch.zeros((), dtype=torch.float64)
        return self._all(float(error) <= self.tolerance * scale + 1e-290)

    def _factor(self, made: Tensor, reference: Tensor) -> float:
        # the whole number, or the inverse of one, that a tensor seems to be times its reference on all ranks; 0: none
        squares = float(reference.double().square().sum())
        ratio = float((made.double() * reference).sum()) / squares if squares else 0.0
        large, small = round(max(ratio, 0.0)), round(1 / ratio) if ratio > 1e-3 else 0
        whole = float(large) if large > 1 else 1 / small if small > 1 else 0.0
        least = -float(self._everywhere(torch.tensor(-whole, dtype=torch.float64), "max"))
        return whole if self._all(whole == least and abs(ratio - whole) < 1e-3 * whole) else 0.0

    def _own_part(self, made: Tensor, whole: Tensor) -> tuple[Tensor | None, bool, bool]:
        by_tp = by_positions = False
        cut, tp = getattr(self.applied.ulysses, "cut", None), self.mesh.tp
        for dim in range(whole.ndim if made.ndim == whole.ndim else 0):
            if made.shape[dim] == whole.shape[dim]:
                continue
            if (
                cut is not None
                and whole.shape[dim] == cut.length
                and made.shape[dim] in (cut.local, cut.local // tp.size())
            ):
                whole, by_positions = cut.take(whole, dim), True
            if made.shape[dim] * tp.size() == whole.shape[dim]:
                whole, by_tp = whole.chunk(tp.size(), dim)[tp.rank()], tp.size() > 1
        return (whole if made.shape == whole.shape else None), by_tp, by_positions

    def _everywhere(self, x: Tensor, op: Literal["sum", "max", "min"]) -> Tensor:
        x = x.to(next(self.whole.parameters()).device)
        for axis in AXES:
            all_reduce(x, self.mesh.group(axis), op)
        return x

    def _all(self, fact: bool) -> bool:
        return bool(self._everywhere(torch.tensor(float(fact)), "min"))

    # what to say

    def _blame(
        self, edge: Edge, found: _Found, sums: list[tuple[Edge, _Found]], cut: list[tuple[Edge, list[int]]], what: str
    ) -> str:
        place, it = edge.path or "the model", f"the {edge.side} {edge.name}" if edge.side == "input" else "the output"
        if found.kind == "bias":
            return f"{place}: every rank adds the bias, and the sum has it {self.mesh.tp.size()} times: split the layer with .row() (E3)"
        if found.kind == "multiple":
            of = f"the gradient of {it}" if what == "gradient" else it
            return (
                f"{place}: {of} is {_times(found.factor)} the reference: {self._twice(edge, found.factor, what)} (E5)"
            )
        if sums:
            return self._missing_sum(sums, what)
        if cut:
            return self._other_share(*(cut[-1] if what == "gradient" else cut[0]), place)
        if what == "gradient":
            return (
                f"{place}: the gradient of {it} differs, and what it is computed from does not: a collective inside has another adjoint"
                " than is wanted (grad= of an all_gather), or a gradient is summed for some uses of a tensor only (E6)"
            )
        return f"{place}: {it} differs, and what it is computed from does not{self._numbers(edge.path)}"

    def _other_share(self, edge: Edge, shape: list[int], place: str) -> str:
        # what to say of a share with which something wrong was computed at ``place``
        made, size = list(edge.value.shape), self.mesh.tp.size()
        told = f"{edge.path or 'the model'}: its {edge.side} is {made} of {shape} on each rank, and, as {place} shows,"
        if len(made) == len(shape) and not any(n * size == m for n, m in zip(made, shape, strict=True)):
            return f"{told} no share of that: it is cut twice, or not where it should be (E10)"
        if edge.side == "output" and not self._splits(edge.path):
            return f"{told} not the whole model's numbers: the module computes with the length, or the places, of a share (E11)"
        fused = f", {self._last_split}, " if self._last_split else " "
        numbers = self._numbers(edge.path.rpartition(".")[0])
        return (
            f"{told} other elements than one rank after another would have: give the parts of a fused layer{fused}with blocks=, or another"
            f" axis to cut along (E8, E10){numbers}"
        )

    def _splits(self, path: str) -> list[Directive]:
        return [
            d
            for d in self.lines
            if d.do in ("column", "row", "shard", "vocab_parallel") and path in expand(self.whole, d.on)
        ]

    def _missing_sum(self, sums: list[tuple[Edge, _Found]], what: str) -> str:
        if what == "output":
            (edge, found), over = sums[0], self._over(sums[0][1].axis)
            return (
                f"{edge.path or 'the model'}: the {edge.side}s of the ranks of {found.axis} sum to the reference: add"
                f" .sync('fwd_post', 'all_reduce'{over}) after it, or 'reduce_scatter', or split it with .row() (E3)"
            )
        edge, found = sums[0]
        for d in self.lines:
            if (
                d.do == "sync"
                and d.args["op"] == "all_gather"
                and d.args.get("grad") == "slice"
                and self._is_near(d, edge.path)
            ):
                return (
                    f"{edge.path or 'the model'}: the gradients of its {edge.side} on the ranks of {found.axis} sum to the reference, and"
                    f" all_gather on {d.on or 'the model'} ({d.where}) keeps a slice of each: give it grad='reduce_scatter' (E6)"
                )
        # the module whose lines begin there: the outermost one that is given this very tensor
        same = [e for e, _ in sums if e.tensor == edge.tensor and e.side == "input"]
        edge = min(same, key=lambda e: e.path.count(".") if e.path else -1) if same else edge
        module = self.whole.get_submodule(edge.path)
        names = parameter_names(module)
        arg = f", arg={edge.name!r}" if edge.side == "input" and names and edge.name != names[0] else ""
        mode = "fwd_pre" if edge.side == "input" else "fwd_post"
        return (
            f"{edge.path or 'the model'}: the gradients of its {edge.side}{f' {edge.name}' if edge.side == 'input' else ''} on the ranks"
            f" of {found.axis} sum to the reference: add s[{edge.path!r}].sync({mode!r}, 'copy'{arg}{self._over(found.axis)}), all_gather"
            " where it is cut, or .column(input='copy') on the layer inside (E6)"
        )

    def _over(self, axis: str) -> str:
        return "" if axis == "tp" else f", over={axis!r}"

    def _twice(self, edge: Edge, factor: float, what: str) -> str:
        near = [f"{_name(d)} at {d.where}" for d in self.lines if _sums(d, what) and self._is_near(d, edge.path)]
        lines = f" of {', '.join(dict.fromkeys(near))}" if near else ""
        if factor < 1:
            return f"a part of a sum is missing, or divided by the number of ranks{lines}"
        also = ", or give an all_gather grad='slice'" if "all_gather" in lines else ""
        return f"it is summed where it is complete already; leave one{lines} out{also}"

    def _is_near(self, line: Directive, path: str) -> bool:
        # whether one of a line's modules contains the one at ``path``, or is inside of it
        return any(_contains(p, path) or _contains(path, p) for p in expand(self.whole, line.on))

    def _numbers(self, path: str) -> str:
        size = self.mesh.tp.size()
        module = self.whole.get_submodule(path) if path else self.whole
        found = [
            f"{n} = {v}"
            for n, v in vars(module).items()
            if type(v) is int and v > 1 and gcd(v, size) == size and n[0] != "_"
        ]
        if not found or size == 1:
            return ""
        shown = ", ".join(found[:4])
        return f"; if it computes with a size of the whole model ({shown}), divide that: .set('<attribute>', divide='tp') (E11)"

    # parameters, and models that fail

    def explain_gradient(self, name: str, local: Tensor, whole: Tensor) -> str:
        """Return what is wrong with the gradient of one parameter, where all activations have the right ones.

        Args:
            local: this rank's, after all sums, with zeros for parts that others have.
        """
        path, _, last = name.rpartition(".")
        self.first = self.first or path or "the model itself"
        found = self._compare_gradient(local, whole)
        said = f"s[{path!r}].sum_gradients({last!r})"
        if found.kind == "partial" and path in self._partial_outputs:
            return (
                f"{path or 'the model'}: the gradients of its output on the ranks of tp sum to the reference, as those of {last} do:"
                f" add s[{path!r}].sync('fwd_post', 'copy'); or {said}, if nothing before it needs its gradient (E6)"
            )
        if found.kind == "partial":
            return (
                f"{name}: the ranks of tp use it on shares, and their gradients sum to the reference: add {said}; if it is one module for"
                " all heads, each rank may have its own rows instead: .shard('weight', 0) (E7)"
            )
        if found.kind == "multiple" and found.factor > 1:
            where = ", ".join(d.where for d in self.lines if d.do in ("sum_gradients", "sequence"))
            return (
                f"{name}: its gradient is {_times(found.factor)} the reference: all ranks have the same, and it is summed"
                f"{f' (lines at {where})' if where else ''}: leave that out (E5)"
            )
        if found.kind == "multiple":
            return f"{name}: its gradient is {_times(found.factor)} the reference: it is divided, or some ranks' parts are not summed"
        return f"{name}: its gradient differs, and that of what is computed with it does not: ranks use other rows of it than they have"

    def _compare_gradient(self, local: Tensor, whole: Tensor) -> _Found:
        if not self._all(local.shape == whole.shape):
            return _Found("other")
        is_close = partial(self._is_close, whole, float(whole.abs().max()))
        if self.mesh.tp.size() > 1 and is_close(
            all_reduce(local.clone(memory_format=torch.contiguous_format), self.mesh.tp)
        ):
            return _Found("partial", "tp")
        factor = self._factor(local, whole)
        return _Found("multiple", factor=factor) if factor and is_close(local / factor) else _Found("other")

    def explain_failure(self, path: str, whole: Trace, split: Trace) -> str:
        """Return why a module of the split model fails where the whole one does not. Local: other ranks may have failed elsewhere."""
        expected = {e.key: list(e.value.shape) for e in whole.edges}
        inside = [e for e in split.edges if e.key in expected and _contains(path, e.path)]
        entered = [e for e in inside if (e.path, e.side) == (path, "input")]
        module, size = self.whole.get_submodule(path), self.mesh.tp.size()
        if next(module.children(), None) is not None:
            returned = [e for e in inside if e.side == "output" and e.path.rpartition(".")[0] == path]
            parts = [
                (e, f"{list(e.value.shape)} of {expected[e.key]}") for e in (*entered, *returned) if e.value.ndim > 1
            ]
            other = next((part for part in reversed(parts) if part[1] != parts[-1][1]), None) if parts else None
            if other is not None:
                told = " and ".join(
                    f"the {e.side} of {e.path or 'the model'} is {text}" for e, text in (other, parts[-1])
                )
                return f"sizes do not fit: {told}: cut both alike, or make both whole (E10){self._numbers(path)}"
            return self._numbers(path).removeprefix("; ")
        edge = next(iter(entered), None)
        if edge is None or not edge.value.ndim:
            return ""
        made, before = list(edge.value.shape), expected[edge.key]
        lines = self._splits(path)
        if made == before:
            if not lines:
                return self._numbers(path).removeprefix("; ")
            return (
                f"its input {edge.name} is whole, {made}, and the module takes a share ({lines[0].do} at {lines[0].where}): split the layer"
                f" before it by its outputs (.column()), or add s[{path!r}].sync('fwd_pre', 'scatter', axis=-1) (E10)"
            )
        axis = next((dim - len(made) for dim, (n, m) in enumerate(zip(made, before, strict=False)) if n != m), -1)
        here = f" ({lines[0].do} at {lines[0].where})" if lines else ""
        ways = (
            "split it too (.row())"
            if axis == -1 and not lines
            else "cut another axis"
            if lines and axis != -1
            else ".row() takes shares"
        )
        return (
            f"its input {edge.name} is {made} of {before}{f', a share of one in {size}' if made[axis] * size == before[axis] else ''}, and"
            f" the module{here} takes all of it: {ways}, or add s[{path!r}].sync('fwd_pre', 'all_gather', axis={axis}) (E10)"
        )


def _contains(path: str, other: str) -> bool:
    return path in ("", other) or other.startswith(f"{path}.")


def _name(line: Directive) -> str:
    op = line.args.get("op", "")
    return f"{line.do} {op if isinstance(op, str) else getattr(op, '__name__', 'function')}".strip()


def _sums(line: Directive, what: str) -> bool:
    if line.do == "sync":
        op = line.args["op"]
        back = op in ("copy", "all_gather") or line.args["mode"] == "bwd_post"
        return callable(op) or (
            back if what == "gradient" else op in ("all_reduce", "reduce_scatter") and line.args["mode"] != "bwd_post"
        )
    if what == "gradient":
        return (line.do == "column" and line.args.get("input", "copy") == "copy") or line.do == "vocab_parallel"
    return line.do in ("row", "vocab_parallel")


def _times(factor: float) -> str:
    return f"{factor:.0f} times" if factor > 1 else f"1/{1 / factor:.0f} of"
