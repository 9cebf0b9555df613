"""Diagnosis of a split model that is not equal to the whole one: the first module that differs, and the missing sum.

Both models run once more, and each tensor that enters or leaves a module, or its gradient, is compared: it may be the
same, a share, a partial sum over some ranks, or a multiple. Lines may want a partial sum, until something that is none
of these is computed from it: then the sum before that point is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.schedule.apply.apply import Applied
from megatron_sp.schedule.core.directives import AXES, Directive, Mesh, expand
from megatron_sp.schedule.core.hooks import parameter_names, tensors_of


@dataclass
class Edge:
    """A tensor that entered (``side`` "input") or left ("output") a module; or, for the backward pass, its gradient."""

    path: str
    side: str
    name: str
    value: Tensor
    tensor: int  # identity: several modules may be given the same one

    @property
    def key(self) -> tuple[str, str, str]:
        return self.path, self.side, self.name

    @property
    def place(self) -> str:
        return self.path or "the model"


class Trace:
    """Edges of one pass in order, and their gradients by place in that list."""

    def __init__(self) -> None:
        self.edges: list[Edge] = []
        self.gradients: dict[int, Tensor] = {}

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        def note(path: str, side: str, value: Any) -> None:
            for name, t in tensors_of(value).items():
                if type(t) not in (Tensor, nn.Parameter) or not t.is_floating_point():
                    continue
                place = len(self.edges)
                self.edges.append(Edge(path, side, name, t.detach().clone(), id(t)))
                if t.requires_grad:
                    t.register_hook(lambda grad, place=place: self.gradients.__setitem__(place, grad.detach().clone()))

        def enter(path: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            names = parameter_names(module)
            given = {names[i] if i < len(names) else str(i): a for i, a in enumerate(args)}
            note(path, "input", {**given, **kwargs})

        def leave(path: str, module: nn.Module, args: Any, result: Any) -> None:
            note(path, "output", result)

        handles = []
        for path, module in model.named_modules():
            # what enters is seen before the hooks of syncs change it, and what leaves after they have
            handles.append(module.register_forward_pre_hook(partial(enter, path), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(leave, path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def backward(self, scale: float = 1.0) -> list[Edge]:  # the edges with gradients as values, in their order
        places = [i for i in reversed(range(len(self.edges))) if i in self.gradients]
        return [replace(self.edges[i], value=self.gradients[i] * scale) for i in places]


class _Relation(NamedTuple):  # of a tensor of the split model to that of the whole one
    # same, share (of it), partial (sum over the ranks of ``axis``), multiple (``factor`` times it), bias (added by each
    # rank), cut (a share with other elements), other
    kind: str
    axis: str = ""
    factor: float = 1.0


_Sums = list[tuple[Edge, _Relation]]


class Diagnosis:
    """Diagnosis on one mesh, collective but for ``explain_failure``; ``tolerance``: error that rounding explains."""

    def __init__(self, whole: nn.Module, applied: Applied, lines: Sequence[Directive], tolerance: float) -> None:
        self.whole, self.applied, self.lines, self.tolerance = whole, applied, lines, tolerance
        self.mesh: Mesh = applied.mesh
        self.first = ""  # module that differs
        self._last_split = ""  # layer whose share was the last to be right, forward
        self._partial_outputs: set[str] = set()  # modules at whose results gradients were partial sums

    def explain(self, whole: Trace, split: Trace) -> str:
        """Return what is wrong, where, and what to write instead; "" if nothing is found. Sets ``first``."""
        forward = self._walk(whole.edges, split.edges, "output")
        return forward or self._walk(whole.backward(), split.backward(self.mesh.dp.size()), "gradient")

    def _walk(self, whole: list[Edge], split: list[Edge], what: str) -> str:
        expected: dict[tuple[str, str, str], list[Edge]] = defaultdict(list)
        for edge in whole:
            expected[edge.key].append(edge)
        sums: _Sums = []  # partial sums that follow each other up to here
        cut: list[tuple[Edge, list[int]]] = []  # other elements than a rank's share in order; shape of the whole
        for edge in split:
            if not expected[edge.key]:
                continue
            reference = expected[edge.key].pop(0)
            relation = self._compare(edge.value, reference.value, what, edge.path)
            if relation.kind in ("same", "share"):
                if what == "output" == edge.side and relation.kind == "share" and self._splits(edge.path):
                    self._last_split = edge.path
                sums.clear()
                cut.clear()
            elif relation.kind == "partial":
                sums.append((edge, relation))
                if what == "gradient" and edge.side == "output":
                    self._partial_outputs.add(edge.path)
            elif relation.kind == "cut":
                cut.append((edge, list(reference.value.shape)))
            else:
                self.first = edge.path or "the model itself"
                return self._blame(edge, relation, sums, cut, what)
        if sums and (what == "gradient" or not sums[-1][0].path):
            first = sums[0][0]
            self.first = first.path or "the model itself"
            inside = f"{first.path}." if first.path else ""
            trained = (name for name, p in self.whole.named_parameters() if p.requires_grad)
            if what == "output" or not all(name.startswith(inside) for name in trained):
                return self._missing_sum(sums, what)
        return ""

    # what a tensor is

    def _compare(self, local: Tensor, whole: Tensor, what: str, path: str) -> _Relation:
        reference, by_tp, by_positions = self._own_part(local, whole)
        if not self._all(reference is not None):
            return _Relation("cut")
        assert reference is not None
        tp = self.mesh.tp.size()
        if what == "gradient" and not by_positions:  # each rank has the part of its rows and positions
            local = local / self.mesh.dp.size()
            for group in self.mesh.replicas:
                all_reduce(local, group)
        is_close = partial(self._is_close, reference, float(whole.abs().max()) if whole.numel() else 0.0)
        if is_close(local):
            return _Relation("share" if by_tp or by_positions else "same")
        for axis in ("tp", "sp", "cp"):
            group = self.mesh.group(axis)
            if group.size() > 1 and is_close(all_reduce(local.clone(memory_format=torch.contiguous_format), group)):
                return _Relation("partial", axis)
        bias = self.whole.get_submodule(path)._parameters.get("bias") if what == "output" and not by_tp else None
        if bias is not None and local.shape[-1:] == bias.shape and is_close(local - (tp - 1) * bias.detach()):
            return _Relation("bias")
        if (factor := self._factor(local, reference)) and is_close(local / factor):
            return _Relation("multiple", factor=factor)
        return _Relation("cut" if by_tp else "other")  # a layer may have several shares, one after another

    def _is_close(self, reference: Tensor, scale: float, x: Tensor) -> bool:
        error = float((x - reference).abs().max()) if x.numel() else 0.0
        return self._all(error <= self.tolerance * scale + 1e-290)

    def _factor(self, local: Tensor, reference: Tensor) -> float:
        # the whole number, or the inverse of one, that a tensor seems to be times its reference on all ranks; 0: none
        squares = float(reference.double().square().sum())
        ratio = float((local.double() * reference).sum()) / squares if squares else 0.0
        large, small = round(max(ratio, 0.0)), round(1 / ratio) if ratio > 1e-3 else 0
        whole = float(large) if large > 1 else 1 / small if small > 1 else 0.0
        return whole if self._all(whole == self._least(whole) and abs(ratio - whole) < 1e-3 * whole) else 0.0

    def _own_part(self, local: Tensor, whole: Tensor) -> tuple[Tensor | None, bool, bool]:
        # the part of the whole tensor that would be this rank's; whether it is cut over tp, and by positions
        by_tp = by_positions = False
        cut, tp = getattr(self.applied.ulysses, "cut", None), self.mesh.tp
        for dim in range(whole.ndim if local.ndim == whole.ndim else 0):
            if local.shape[dim] == whole.shape[dim]:
                continue
            shares = () if cut is None or whole.shape[dim] != cut.length else (cut.local, cut.local // tp.size())
            if local.shape[dim] in shares:
                whole, by_positions = cut.take(whole, dim), True  # type: ignore[union-attr]
            if local.shape[dim] * tp.size() == whole.shape[dim]:
                whole, by_tp = whole.chunk(tp.size(), dim)[tp.rank()], tp.size() > 1
        return (whole if local.shape == whole.shape else None), by_tp, by_positions

    def _least(self, x: float) -> float:  # on any rank
        least = torch.tensor(x, dtype=torch.float64, device=next(self.whole.parameters()).device)
        for axis in AXES:
            all_reduce(least, self.mesh.group(axis), "min")
        return float(least)

    def _all(self, fact: bool) -> bool:
        return bool(self._least(float(fact)))

    # what to say

    def _blame(self, edge: Edge, relation: _Relation, sums: _Sums, cut: list[tuple[Edge, list[int]]], what: str) -> str:
        place, tensor = edge.place, f"the input {edge.name}" if edge.side == "input" else "the output"
        if relation.kind == "bias":
            times = f"{self.mesh.tp.size()} times"
            return f"{place}: every rank adds the bias, and the sum has it {times}: split the layer with .row() (E3)"
        if relation.kind == "multiple":
            tensor = f"the gradient of {tensor}" if what == "gradient" else tensor
            times, near = _times(relation.factor), []
            for line in self.lines:
                op, is_back = line.args.get("op", ""), line.args.get("mode") == "bwd_post"
                if line.do == "sync":
                    on_gradients = is_back or op in ("copy", "all_gather")
                    on_outputs = op in ("all_reduce", "reduce_scatter") and not is_back
                    makes_sums = callable(op) or (on_gradients if what == "gradient" else on_outputs)
                else:
                    by_column = line.do == "column" and line.args.get("input", "copy") == "copy"
                    makes_sums = line.do == "vocab_parallel" or (by_column if what == "gradient" else line.do == "row")
                if makes_sums and self._is_near(line, edge.path):
                    op = op if isinstance(op, str) else getattr(op, "__name__", "function")
                    near.append(f"{line.do} {op}".strip() + f" at {line.where}")
            of_lines = f" of {', '.join(dict.fromkeys(near))}" if near else ""
            why = f"a part of a sum is missing, or divided by the number of ranks{of_lines}"
            if relation.factor > 1:
                also = ", or give an all_gather grad='slice'" if "all_gather" in of_lines else ""
                why = f"it is summed where it is complete already; leave one{of_lines} out{also}"
            return f"{place}: {tensor} is {times} the reference: {why} (E5)"
        if sums:
            return self._missing_sum(sums, what)
        if cut:
            return self._other_share(*(cut[-1] if what == "gradient" else cut[0]), place)
        if what == "gradient":
            return (
                f"{place}: the gradient of {tensor} differs, and what it is computed from does not: a collective inside"
                " has another adjoint than is wanted (grad= of an all_gather), or a gradient is summed for some uses"
                " of a tensor only (E6)"
            )
        return f"{place}: {tensor} differs, and what it is computed from does not{self._numbers(edge.path)}"

    def _other_share(self, edge: Edge, shape: list[int], place: str) -> str:
        # what to say of a share with which something wrong was computed at ``place``
        local, size = list(edge.value.shape), self.mesh.tp.size()
        start = f"{edge.place}: its {edge.side} is {local} of {shape} on each rank, and, as {place} shows,"
        if len(local) == len(shape) and not any(n * size == m for n, m in zip(local, shape, strict=True)):
            return f"{start} no share of that: it is cut twice, or not where it should be (E10)"
        if edge.side == "output" and not self._splits(edge.path):
            why = "the module computes with the length, or the places, of a share"
            return f"{start} not the whole model's numbers: {why} (E11)"
        fused = f", {self._last_split}, " if self._last_split else " "
        numbers = self._numbers(edge.path.rpartition(".")[0])
        return (
            f"{start} other elements than one rank after another would have: give the parts of a fused layer{fused}with"
            f" blocks=, or another axis to cut along (E8, E10){numbers}"
        )

    def _splits(self, path: str) -> list[Directive]:
        kinds = ("column", "row", "shard", "vocab_parallel")
        return [d for d in self.lines if d.do in kinds and path in expand(self.whole, d.on)]

    def _missing_sum(self, sums: _Sums, what: str) -> str:
        edge, axis = sums[0][0], sums[0][1].axis
        over = "" if axis == "tp" else f", over={axis!r}"
        if what == "output":
            return (
                f"{edge.place}: the {edge.side}s of the ranks of {axis} sum to the reference: add"
                f" .sync('fwd_post', 'all_reduce'{over}) after it, or 'reduce_scatter', or split it with .row() (E3)"
            )
        for d in self.lines:
            slices = d.do == "sync" and d.args["op"] == "all_gather" and d.args.get("grad") == "slice"
            if slices and self._is_near(d, edge.path):
                return (
                    f"{edge.place}: the gradients of its {edge.side} on the ranks of {axis} sum to the reference, and"
                    f" all_gather on {d.on or 'the model'} ({d.where}) keeps a slice of each: give it"
                    " grad='reduce_scatter' (E6)"
                )
        # the module whose lines begin there: the outermost one that is given this very tensor
        same = [e for e, _ in sums if e.tensor == edge.tensor and e.side == "input"]
        edge = min(same, key=lambda e: e.path.count(".") if e.path else -1) if same else edge
        names, is_input = parameter_names(self.whole.get_submodule(edge.path)), edge.side == "input"
        arg = f", arg={edge.name!r}" if is_input and names and edge.name != names[0] else ""
        mode, name = ("fwd_pre", f" {edge.name}") if is_input else ("fwd_post", "")
        return (
            f"{edge.place}: the gradients of its {edge.side}{name} on the ranks of {axis} sum to the reference: add"
            f" s[{edge.path!r}].sync({mode!r}, 'copy'{arg}{over}), all_gather where it is cut, or .column(input='copy')"
            " on the layer inside (E6)"
        )

    def _is_near(self, line: Directive, path: str) -> bool:
        # whether one of a line's modules contains the one at ``path``, or is inside of it
        return any(_contains(p, path) or _contains(path, p) for p in expand(self.whole, line.on))

    def _numbers(self, path: str) -> str:
        # advice about the attributes of a module that are multiples of tp
        size, values = self.mesh.tp.size(), vars(self.whole.get_submodule(path)).items()
        numbers = [f"{n} = {v}" for n, v in values if type(v) is int and v > 1 and gcd(v, size) == size and n[0] != "_"]
        if not numbers or size == 1:
            return ""
        advice = "divide that: .set('<attribute>', divide='tp') (E11)"
        return f"; if it computes with a size of the whole model ({', '.join(numbers[:4])}), {advice}"

    # parameters, and models that fail

    def explain_gradient(self, name: str, local: Tensor, whole: Tensor) -> str:
        """Return what is wrong with one parameter's gradient, where all activations have the right ones.

        ``local`` is this rank's, after all sums, with zeros for parts that others have.
        """
        path, _, last = name.rpartition(".")
        self.first = self.first or path or "the model itself"
        line = f"s[{path!r}].sum_gradients({last!r})"
        if self._all(local.shape == whole.shape):
            is_close = partial(self._is_close, whole, float(whole.abs().max()))
            contiguous = local.clone(memory_format=torch.contiguous_format)
            if self.mesh.tp.size() > 1 and is_close(all_reduce(contiguous, self.mesh.tp)):
                if path in self._partial_outputs:
                    return (
                        f"{path or 'the model'}: the gradients of its output on the ranks of tp sum to the reference,"
                        f" as those of {last} do: add s[{path!r}].sync('fwd_post', 'copy'); or {line}, if nothing"
                        " before it needs its gradient (E6)"
                    )
                return (
                    f"{name}: the ranks of tp use it on shares, and their gradients sum to the reference: add {line};"
                    " if it is one module for all heads, each rank may have its own rows instead: .shard('weight', 0)"
                    " (E7)"
                )
            factor = self._factor(local, whole)
            if factor and is_close(local / factor):
                start = f"{name}: its gradient is {_times(factor)} the reference:"
                if factor < 1:
                    return f"{start} it is divided, or some ranks' parts are not summed"
                where = ", ".join(d.where for d in self.lines if d.do in ("sum_gradients", "sequence"))
                lines = f" (lines at {where})" if where else ""
                return f"{start} all ranks have the same, and it is summed{lines}: leave that out (E5)"
        why = "ranks use other rows of it than they have"
        return f"{name}: its gradient differs, and that of what is computed with it does not: {why}"

    def explain_failure(self, path: str, whole: Trace, split: Trace) -> str:
        # why a module fails in the split model only; local, for other ranks may have failed elsewhere
        expected = {e.key: list(e.value.shape) for e in whole.edges}
        inside = [e for e in split.edges if e.key in expected and _contains(path, e.path)]
        entered = [e for e in inside if (e.path, e.side) == (path, "input")]
        numbers = self._numbers(path)
        if next(self.whole.get_submodule(path).children(), None) is not None:
            returned = [e for e in inside if e.side == "output" and e.path.rpartition(".")[0] == path]
            both = [e for e in (*entered, *returned) if e.value.ndim > 1]
            shapes = [f"{list(e.value.shape)} of {expected[e.key]}" for e in both]
            other = next((i for i in reversed(range(len(both))) if shapes[i] != shapes[-1]), None)
            if other is None:
                return numbers.removeprefix("; ")
            sizes = " and ".join(f"the {both[i].side} of {both[i].place} is {shapes[i]}" for i in (other, -1))
            return f"sizes do not fit: {sizes}: cut both alike, or make both whole (E10){numbers}"
        if not entered or not entered[0].value.ndim:
            return ""
        edge, lines, size = entered[0], self._splits(path), self.mesh.tp.size()
        local, whole_shape = list(edge.value.shape), expected[edge.key]
        where = f"{lines[0].do} at {lines[0].where}" if lines else ""
        if local == whole_shape:
            if not lines:
                return numbers.removeprefix("; ")
            return (
                f"its input {edge.name} is whole, {local}, and the module takes a share ({where}): split the layer"
                f" before it by its outputs (.column()), or add s[{path!r}].sync('fwd_pre', 'scatter', axis=-1) (E10)"
            )
        pairs = enumerate(zip(local, whole_shape, strict=False))
        axis = next((dim - len(local) for dim, (n, m) in pairs if n != m), -1)
        share = f", a share of one in {size}" if local[axis] * size == whole_shape[axis] else ""
        ways = ".row() takes shares"
        if axis == -1 and not lines:
            ways = "split it too (.row())"
        elif axis != -1 and lines:
            ways = "cut another axis"
        return (
            f"its input {edge.name} is {local} of {whole_shape}{share}, and the module{f' ({where})' if lines else ''}"
            f" takes all of it: {ways}, or add s[{path!r}].sync('fwd_pre', 'all_gather', axis={axis}) (E10)"
        )


def _contains(path: str, other: str) -> bool:
    return path in ("", other) or other.startswith(f"{path}.")


def _times(factor: float) -> str:
    return f"{factor:.0f} times" if factor > 1 else f"1/{1 / factor:.0f} of"
