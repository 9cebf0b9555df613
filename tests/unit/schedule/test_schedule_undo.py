"""apply() changes a model whole or not at all: whatever refuses, and wherever something breaks, everything is as it was."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.schedule_toys import Toy, write
from torch import nn

from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.apply.apply import apply, decide
from megatron_sp.schedule.verify.derive import as_said
from megatron_sp.utils.errors import ConfigError

PACKAGE = "megatron_sp"


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything that can be told of a model: identities and contents of modules, parameters, buffers, hooks, attributes."""
    found: list[Any] = []
    for path, module in model.named_modules(remove_duplicate=False):
        found.append((path, id(module), type(module), module.training))
        for name, value in module.__dict__.items():
            found.append((path, name, id(value), _contents(value)))
    for name, p in model.named_parameters(remove_duplicate=False):
        hooks = [(id(h), None if h is None else list(h.items())) for h in (p._backward_hooks, p._post_accumulate_grad_hooks)]
        tensors = [(id(p), p.data_ptr(), tuple(p.shape), p.stride(), p.dtype, p.requires_grad, p.tolist()), id(p.grad)]
        found.append((name, tensors, hooks, list(p.__dict__.items()), getattr(p, "grad_dtype", None)))
    for name, b in model.named_buffers(remove_duplicate=False):
        found.append((name, id(b), b.data_ptr(), tuple(b.shape), b.tolist()))
    return found


def _contents(value: Any) -> Any:
    if isinstance(value, dict):
        return [(k, id(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [id(v) for v in value]
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else None


class Many(Toy):
    """A model that has something for every kind of line."""

    def __init__(self) -> None:
        super().__init__(tied=True, layers=2, dropout=0.1)
        self.register_buffer("table", torch.arange(8.0))
        self.norm.register_forward_hook(lambda *_: None)
        self.norm.weight.noted = "mine"  # type: ignore[attr-defined]
        self.head.weight.register_hook(lambda g: g)
        self.embed.weight.register_post_accumulate_grad_hook(lambda p: None)
        self.norm.bias.grad = torch.ones_like(self.norm.bias)


def lines(s: Schedule, seq: bool = False) -> Schedule:
    """Every kind of line, all of them right."""
    write(s, seq)
    s["{embed,head}"].vocab_parallel()
    s["blocks.*.attention"].rng("tp")
    s["blocks.1"].checkpoint()
    s["norm"].annotate("weight", "key", 3)
    s["blocks.0.mlp"].replace(type(s.model.get_submodule("blocks.0.mlp"))())
    s[""].shard("table", 0)
    s["norm"].set("eps", 1e-4).hook("fwd_post", lambda *_: None)
    return s


class Injected(BaseException):
    """What is raised in the middle: no Exception, as an interrupt is none."""


class At:
    """Raises at the n-th line of the package that is executed inside, and counts them; ``places``: when each was executed."""

    def __init__(self, n: int) -> None:
        self.n, self.seen = n, 0
        self.places: dict[tuple[str, int], list[int]] = {}

    def __enter__(self) -> At:
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return self._line if PACKAGE in name and "undo.py" not in name else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        self.seen += event == "line"
        if self.n == 0 and event == "line":
            self.places.setdefault((frame.f_code.co_filename, frame.f_lineno), []).append(self.seen)
        if self.seen == self.n and event == "line":
            raise Injected
        return self._line


def broken(s: Schedule, n: int) -> At:
    """Break at the n-th line (0: nowhere), and look at the model, and at modules that lines bring."""
    roots = [s.model, *(m for d in s.directives if isinstance(m := d.args.get("new"), nn.Module))]
    before = [fingerprint(m) for m in roots]
    with At(n) as at, suppress(Injected):
        apply(s.model, s.directives, s.mesh, s.seq_dim)
    assert n == 0 or at.seen >= n
    assert n == 0 or [fingerprint(m) for m in roots] == before, f"line {n} of the change"
    return at


def all_kinds(kind: str) -> Schedule:
    s = lines(schedule(Many(), Mesh.sizes(tp=2)), seq=kind == "sequence")
    return s.zero(int(kind[-1])) if kind.startswith("zero") else s


@pytest.mark.parametrize("kind, every", [("sequence", 601), ("zero 3", 701)])
def test_broken_in_the_middle(kind: str, every: int) -> None:
    """At lines all over the change, each a place where something may be raised."""
    places = broken(all_kinds(kind), 0).seen
    s = all_kinds(kind)
    assert places > 2000
    for n in range(1, places, every):
        broken(s, n)
    s.apply(verify=False)  # and it still can be


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "sequence", "zero 0", "zero 1", "zero 2", "zero 3"])
def test_broken_at_every_line(kind: str) -> None:
    """Where each line of the package is executed for the first time, for the second and the last, and halfway."""
    s, found = all_kinds(kind), broken(all_kinds(kind), 0).places.values()
    times = {n for at in found for n in (at[0], at[min(1, len(at) - 1)], at[len(at) // 2], at[-1])}
    assert len(found) > 300
    for n in sorted(times):
        broken(s, n)


def test_a_schedule_without_lines_splits_nothing() -> None:
    model = Many()
    before = fingerprint(model)
    for do in (lambda: schedule(model, Mesh.sizes(tp=2)).check(), lambda: schedule(model, Mesh.sizes(tp=2)).apply()):
        do()
        assert fingerprint(model) == before
    copy.deepcopy(model)
    write(schedule(model, Mesh.sizes(tp=2))).check()  # it is whole as before


Write = Callable[[Schedule], Any]


#: what is refused, by its number: lines beside those that are right, or on another model
REFUSED: dict[str, tuple[Write, dict[str, Any]]] = {
    "E2": (lambda s: s["blocks.*.mlp.up"].set("out_features", divide="tp"), {"tp": 3}),
    "E5": (lambda s: s.zero(1).zero(1), {}),
    "E9": (lambda s: s["embed"].shard("weight", 1), {}),
    "E13": (lambda s: s["blocks.0.mlp"].sync("fwd_pre", "copy", arg="nothing"), {}),
    "E15": (lambda s: s.model.norm.__dict__.update(_compiled_call_impl=len) or s["norm"].sum_gradients(), {}),  # type: ignore[func-returns-value, union-attr]
    "checkpoint": (lambda s: s["norm"].checkpoint("some"), {}),
    "set": (lambda s: s["norm"].set("forward", 1), {}),
    "zero": (lambda s: s.zero(7), {}),
    "dtypes": (lambda s: s.zero(1) and s.model.norm.bfloat16(), {}),  # type: ignore[union-attr, operator]
    "replace": (lambda s: s[""].replace(nn.Identity()), {}),
    "its function": (lambda s: s["norm"].replace(lambda path, module: 1 / 0), {}),
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_is_refused_leaves_the_model_as_it_was(code: str) -> None:
    add, more = REFUSED[code]
    s = write(schedule(Many(), Mesh.sizes(tp=more.get("tp", 2))))
    add(s)
    before = fingerprint(s.model)
    with pytest.raises((ConfigError, ZeroDivisionError)) as error:
        s.apply()
    assert f"{code})" in str(error.value) or not code.startswith("E"), str(error.value)
    assert fingerprint(s.model) == before and s.applied is None
    if code != "its function":
        with pytest.raises(ConfigError):
            decide(s.model, as_said(s.directives), s.mesh, s.seq_dim)
    assert fingerprint(s.model) == before
