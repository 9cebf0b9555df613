"""Observer of a model that runs without weight values: how each tensor lies over the ranks of an axis, at every step (``dry_run.py``).

Every torch function and every exchange passes through ``Follower``, a ``TorchFunctionMode``. There is no backward pass: R and I stand for
what it would do (``placements.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from megatron_sp.comm.groups import Group
from megatron_sp.schedule.check import exchange_rules
from megatron_sp.schedule.check.call_values import (
    Seen,
    converted,
    in_place,
    integers,
    named,
    numbered,
    on_meta,
    plain,
)  # fmt: skip
from megatron_sp.schedule.check.rules.common import Rule, ask
from megatron_sp.schedule.check.rules.elementwise import ELEMENTWISE, UNIFORM_FACTORIES
from megatron_sp.schedule.check.rules.indexing import part_of
from megatron_sp.schedule.check.rules.moves import EXPANSIONS
from megatron_sp.schedule.check.rules.table import RULES
from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.core.placement_steps import Step, conflict, join, tensors_in
from megatron_sp.schedule.core.placements import UNIFORM, WHOLE, Choice, NotFollowed, Operand, Placement, PlacementError
from megatron_sp.schedule.core.records import HEADS, HIDDEN
from megatron_sp.utils.errors import ConfigError

_DESCRIPTORS = ("T", "mT", "H", "mH", "data", "real", "imag")
_AUGMENTED = ("__iand__", "__ior__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
_BY_ROWS = {*ELEMENTWISE, "linear", "split_column", "split_row", "copy_to", "reduce_from"}
_MOVES = (
    "view",
    "reshape",
    "expand",
    "flatten",
    "unsqueeze",
    "squeeze",
    "transpose",
    "permute",
    "getitem",
    "expand_as",
    "swapaxes",
    "swapdims",
    "t",
)


@dataclass
class Flow:
    """Findings of a dry run.

    Attributes:
        inputs, outputs: placements of the tensors that enter and leave each module, by path and then by name or index.
        choices: adjoints of all_gathers that were not given, with what decided them, by index of the line and path.
        forks: modules with dropout on shares: path -> function.
        alike: modules with dropout on what every rank has whole.
        notes: other remarks.
    """

    inputs: dict[str, dict[str, Placement]] = field(default_factory=dict)
    outputs: dict[str, dict[str, Placement]] = field(default_factory=dict)
    choices: dict[tuple[int, str], Choice] = field(default_factory=dict)
    forks: dict[str, str] = field(default_factory=dict)
    alike: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Axis:
    """The axis along which placements are followed.

    Attributes:
        name: of the axis.
        group: its ranks.
        line: the line that cuts sequences over it, for messages.
        same_program: the reference run has the same hooks and forwards.
    """

    name: str
    group: Group
    line: str = ""
    same_program: bool = False


def _share_of_filled(step: Step, tensor: Tensor, placement: Placement, whole: tuple[int, ...] | None) -> Placement:
    """Return the placement of a result; one filled with one value and as long as a share is S: counts of it, and writes, differ by rank."""
    if placement.kind != "U" or whole is None or len(whole) != tensor.ndim:
        return placement
    other = [dim for dim, n in enumerate(tensor.shape) if n != whole[dim]]
    if len(other) != 1 or not tensor.shape[other[0]] or whole[other[0]] % tensor.shape[other[0]]:
        return placement
    shares = whole[other[0]] // tensor.shape[other[0]]
    if step.size % shares:
        return placement
    return Placement("S", other[0], copies=step.size // shares, as_needed=True, since=f"{step.place} {step.name} of a share's size")


class WrittenLater(NotFollowed):
    """A result that depends on weights is written into a tensor that was created with values."""


class Follower(TorchFunctionMode):
    """Mode that observes every call. Without an axis it only records calls and shapes; with one it follows placements."""

    def __init__(
        self, model: nn.Module, axis: Axis | None = None, lines: Mapping[str, list[tuple[int, Directive]]] | None = None,
        expected: Mapping[str, list[Seen]] | None = None, parameters: Mapping[str, Placement] | None = None, late: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.late = late
        self.model, self.axis, self.lines, self.expected = model, axis, lines or {}, expected
        self.modules: list[tuple[str, nn.Module]] = []
        self.record: dict[str, list[Seen]] = defaultdict(list)
        self.strayed: set[str] = set()  # modules whose steps are no longer those of the whole model
        self.known: Any = WeakIdKeyDictionary()
        self.views: Any = WeakIdKeyDictionary()  # of what is filled with one value: (it, index)
        self.names = {id(t): name for named in (model.named_buffers, model.named_parameters) for name, t in named()}
        self.parameters = parameters or {}
        self.flow = Flow()

    # where we are

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Enter this mode, with hooks that record which module runs."""
        handles = []
        for path, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(path), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(path)))
        try:
            with self:
                yield
        except ConfigError:
            raise
        except Exception as error:
            which = "whole" if self.axis is None else "split"
            raise NotFollowed(
                f"the {which} model cannot be run without its numbers: {self.place()}: {type(error).__name__}: {error};"
                " verify() can tell, on ranks"
            ) from error
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if self.axis is not None:
                self.flow.inputs[path] = self._placements({**{str(i): a for i, a in enumerate(args)}, **kwargs})
            self.modules.append((path, module))

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            if self.axis is not None:
                self.flow.outputs[path] = self._placements(result)
            self.modules.pop()

        return hook

    def _placements(self, value: Any) -> dict[str, Placement]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else [(0, value)]
        return {str(name): self.known.get(t, WHOLE) for name, item in items for t in tensors_in(item)}

    def place(self) -> str:
        """Path and class of the module that is running."""
        path, module = self.modules[-1] if self.modules else ("", self.model)
        return f"{path or 'the model'} ({type(module).__name__})"

    # calls

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
            if name == "device":
                return torch.device("cpu")  # of a tensor without numbers too: what is made for it must have some
            if name not in _DESCRIPTORS:
                return func(*args, **kwargs)
        name = plain(name)
        if self.axis is None:
            if name in exchange_rules.RULES:
                return exchange_rules.shaped(name, on_meta(args) if any(t.is_meta for t in tensors_in(args)) else args)
            result = self._call(func, name, args, kwargs)
            if name == "setitem" or any(True for _ in tensors_in(result)):
                shown = part_of(args[0], args[1]) if name == "setitem" else result
                self.record[self._path()].append(Seen.of(name, shown, args, kwargs))
            return result
        return self._follow(func, name, args, kwargs)

    def _path(self) -> str:
        return self.modules[-1][0] if self.modules else ""

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": None}
        if name in ("to", "cuda", "cpu"):
            return converted(args, kwargs)
        if name == "ctc_loss" and args[0].is_meta:  # torch has none for tensors without numbers
            reduction = kwargs.get("reduction", args[5] if len(args) > 5 else "mean")
            return args[0].sum((0, -1)) if reduction == "none" else args[0].sum()
        if any(t.is_meta for t in tensors_in((args, kwargs))):
            if func.__name__ in _AUGMENTED and not args[0].is_meta:
                func = getattr(Tensor, f"__{func.__name__[3:]}")  # a &= b gives a another value, and this one may be without numbers
            elif (in_place(func) or name == "setitem") and not args[0].is_meta:
                raise WrittenLater(
                    f"{self.place()}: {name}: numbers that the model looks at depend on weights; verify() can tell (unknown)"
                )
            if name in ("getitem", "setitem"):
                args = (args[0], numbered(args[1], tuple(args[0].shape)), *args[2:])
            args, kwargs = on_meta(args), on_meta(kwargs)
        result = func(*args, **kwargs)
        if self.late and name in UNIFORM_FACTORIES and result.is_floating_point():
            return result.to("meta")
        return result

    def _follow(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.axis is not None
        size = self.axis.group.size()
        step = Step(name, args, kwargs, None, self.look, self.place(), size, lines=self._said(), axis=self.axis.name)
        step.choose, step.hint = self._choose, lambda: self._hint(args)
        step.module = self.modules[-1][1] if self.modules else self.model
        if name in exchange_rules.RULES:
            return self._exchange(step)
        operands = step.operands()
        if in_place(func) and name in _MOVES:  # which changes the shape that the rule asks for
            before = args[0].detach()
            self.known[before] = operands[0].placement
            step.args = (before.requires_grad_(args[0].requires_grad), *args[1:])
        try:
            result = self._call(func, name, args, kwargs)
        except PlacementError:
            raise
        except Exception as error:
            self._explain(step, operands, error)
        results = list(tensors_in(result))
        if not results:
            if name == "setitem":
                seen = self._next(name)
                step.whole = seen.shapes if seen else None
                self._require_factors(step, seen)
                placement = RULES[name](step)
                assert isinstance(placement, Placement)
                self._written(step, operands[0], placement)
                self.known[args[0]] = placement
            return result
        step.result, seen = result, self._next(name)
        step.whole = seen.shapes if seen else None
        if step.whole is not None and len(step.whole) != len(results):
            if name == "split":
                self._rule(step, operands)  # it may know what is meant
            step.fail(
                f"makes {len(results)} tensors, and {len(step.whole)} in the whole model: a size that is written down there; divide it,"
                f" .set('<attribute>', divide='{step.axis}')",
                "E11",
            )
        self._require_factors(step, seen)
        made = self._in_order(step, operands, self._rule(step, operands))
        placements = made if isinstance(made, list) else [made] * len(results)
        placements = [*map(partial(_share_of_filled, step), results, placements, step.whole or repeat(None))]
        if func.__name__ in _AUGMENTED and results[0] is not args[0] and placements[0].kind in "RSP":
            step.fail("what has numbers takes in a share that has none; verify() can tell", "unknown")
        if len(results) == 1 and args and results[0] is args[0]:
            self._written(step, operands[0], placements[0])
        for tensor, placement in zip(results, placements, strict=True):
            self.known[tensor] = placement
        if name == "getitem" and results[0]._base is not None and (placements[0].kind == "U" or placements[0].as_needed):
            self.views[results[0]] = args
        self._require_shapes(step, results, placements)
        self._note_dropout(step)
        return result

    def _written(self, step: Step, before: Operand, after: Placement) -> None:
        """Update the placement of the base that an in-place call has written to through a view. Raises NotFollowed if it is unknown."""
        base = before.tensor._base
        everywhere = base is None or (after.kind == "U" and base.numel() == before.tensor.numel())
        if base is not None and not everywhere and after.kind in "IU" and self.known.get(base, WHOLE).kind == "U":
            self.known[base] = WHOLE  # one value here, another there
        takes_parts = before.placement.as_needed and not after.as_needed
        if base is None or (after.kind == before.kind and not takes_parts) or (before.neutral and after.kind in "IU"):
            return
        base, index = self.views.get(before.tensor, (None, None))
        if base is None or base._base is not None:
            step.fail(
                f"{before.called}, a part of another tensor, was {before.placement.describe()} and is now"
                f" {after.describe()}; verify() can tell",
                "unknown",
            )
        written = replace(step, name="setitem", args=(base, index, before.tensor), kwargs={})
        written.look = lambda t: Operand(t, after) if t is before.tensor else self.look(t)
        made = RULES["setitem"](written)
        assert isinstance(made, Placement)
        self.known[base] = made

    def _rule(self, step: Step, operands: list[Operand]) -> Placement | list[Placement]:
        kinds = {o.kind for o in operands}
        if step.name in UNIFORM_FACTORIES and (not kinds & {"S", "P"} or step.name.startswith("new_")):
            return UNIFORM
        random = "rand" in step.name or "dropout" in step.name
        if kinds == {"U"} and not random and (step.name in ELEMENTWISE or step.name in _MOVES):
            return UNIFORM
        if not kinds & {"S", "P"} and step.name not in EXPANSIONS:
            return join(step, operands)
        rule: Rule = RULES.get(step.name, ask)
        return rule(step)

    def _exchange(self, step: Step) -> Any:
        """Run an exchange for its shape and its placement; over another axis placements are unchanged."""
        assert self.axis is not None
        args, placement = step.args, None
        elsewhere = exchange_rules.is_elsewhere(step, self.axis.group)
        step.lines = step.lines or self.axis.line
        every = on_meta(args) if any(t.is_meta for t in tensors_in(args)) else args
        try:
            if not elsewhere and step.name != "split_row":  # mistakes are told better before shapes are looked at; a bias needs the result
                placement = exchange_rules.RULES[step.name](step)
            step.result = exchange_rules.shaped(step.name, every)
            placement = exchange_rules.elsewhere(step) if elsewhere else placement or exchange_rules.RULES[step.name](step)
        except (PlacementError, ValueError):
            raise
        except Exception as error:
            self._explain(step, step.operands(), error)
        self.known[step.result] = placement if elsewhere else self._in_order(step, step.operands(), placement)
        return step.result

    def _in_order(self, step: Step, operands: list[Operand], made: Any) -> Any:
        """Return ``made`` with its row order. Raises PlacementError unless the step treats rows gathered out of order one by one (E10)."""
        rows = next((o.placement.shuffled for o in operands if o.placement.shuffled > 1), 1)
        if rows == 1 or step.name == "reduce_scatter_to":
            return made
        alike = all(o.placement.shuffled == rows or o.name or o.tensor.ndim < 2 for o in operands)
        if not alike or step.name not in _BY_ROWS or isinstance(made, list):
            conflict(
                step,
                operands,
                "rows of a flattened batch were gathered rank by rank, so they are out of order until they are scattered again",
            )
        return replace(made, shuffled=rows)

    def look(self, tensor: Tensor) -> Operand:
        """Return a tensor with its placement. Raises NotFollowed if the dry run could not follow it."""
        name = self.names.get(id(tensor), "")
        if name:
            return Operand(tensor, self.parameters.get(name, WHOLE), name)
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            inside = self.look(torch._C._functorch.get_unwrapped(tensor))
            if inside.kind in "RSP":
                raise NotFollowed(
                    f"{self.place()}: inside of torch.func (vmap) dims are hidden, and {inside.called} is {inside.placement.describe()};"
                    " verify() can tell (unknown)"
                )
        placement = self.known.get(tensor)
        if placement is UNIFORM and tensor in self.views and self.look(self.views[tensor][0]).kind in "RSP":
            raise NotFollowed(f"{self.place()}: a view of what was written to since; verify() can tell (unknown)")
        if placement is not None and placement.as_needed and tensor in self.views:
            base = self.look(self.views[tensor][0]).placement
            placement = placement if base.as_needed else replace(base, dim=placement.dim)
        hidden = placement is None and tensor.requires_grad and tensor.grad_fn is not None
        # of a function with a backward of its own only the forward was seen, which is enough for what is whole
        hidden = hidden or (placement is not None and placement.kind in "RSP" and isinstance(tensor.grad_fn, BackwardCFunction))
        if hidden and self.axis is not None:
            raise NotFollowed(
                f"{self.place()}: a tensor of {list(tensor.shape)} comes from {type(tensor.grad_fn).__name__}, in which the"
                " dry run cannot look:"
                " make it overridable (megatron_sp.parallel.regions.overridable) and teach it, or rely on verify() (unknown)"
            )
        return Operand(tensor, placement or WHOLE)

    # the whole model's steps

    def _next(self, name: str) -> Seen | None:
        """Return the same call in the whole model, or None if it is unknown."""
        path, module = self.modules[-1] if self.modules else ("", self.model)
        if self.expected is None or path in self.strayed:
            return None
        at, steps = len(self.record[path]), self.expected.get(path, [])
        assert self.axis is not None
        if ("forward" in module.__dict__ and not self.axis.same_program) or at >= len(steps) or steps[at].name != name:
            self.strayed.add(path)
            return None
        self.record[path].append(Seen(name, [], [], []))
        return steps[at]

    def _require_factors(self, step: Step, whole: Seen | None) -> None:
        """Raise PlacementError if the step computes with another number than the whole model, such as one made of a share's size (E11)."""
        now = Seen.of(step.name, step.result, step.args, step.kwargs)
        mine = now.factors
        alike = (
            whole is not None and step.name != "setitem" and now.shapes == whole.shapes and not any(o.kind in "SP" for o in step.operands())
        )
        if alike and whole is not None:  # all ranks do what the whole model does
            mine, whole = now.sizes, whole._replace(factors=whole.sizes)
        if whole is None or mine == whole.factors or len(mine) != len(whole.factors) or step.axis == "dp":
            return  # over dp each rank has rows of its own, and whoever trains divides by all
        told = ", ".join(f"{a:g} where the whole model has {b:g}" for a, b in zip(mine, whole.factors, strict=True) if a != b)
        step.fail(
            f"computes with {told}: the number is made of a share's size, or of an attribute that was divided;"
            f" write it down, or multiply it by the {step.size} ranks of {step.axis}",
            "E11",
        )

    def _require_shapes(self, step: Step, results: list[Tensor], placements: list[Placement]) -> None:
        """Raise PlacementError if a share times the number of ranks does not have the whole model's shape (E11)."""
        for tensor, placement, whole in zip(results, placements, step.whole or [], strict=False):
            shape = list(tensor.shape)
            if placement.kind == "U":
                continue
            if placement.kind == "S":
                shape[placement.dim] *= step.size // placement.copies
            if shape != list(whole):
                told = "; ".join(f"{o.called} is {o.placement.describe()}" for o in step.operands())
                step.fail(
                    f"makes {list(tensor.shape)}, that is {shape} over all ranks, and {list(whole)} in the whole model"
                    f"{f' ({told})' if told else ''}: a size that is written down in the module is the whole model's, or is"
                    " taken from a share;"
                    f" divide it, .set('<attribute>', divide='{step.axis}')",
                    "E11",
                )

    def _explain(self, step: Step, operands: list[Operand], error: Exception) -> None:
        """Raise PlacementError for a call that fails in the split model alone, so a size does not fit (E10, E11)."""
        words = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        big = [o for o in operands if o.tensor.ndim and o.kind != "U"]
        if any(o.kind == "S" for o in big) and any(o.placement != big[0].placement for o in big):
            conflict(step, [o for o in big if o.tensor.ndim > 1 or o.kind == "S"], "sizes do not fit; cut both alike, or make both whole")
        told = "; ".join(f"{o.called} is {o.placement.describe()}" for o in operands)
        step.fail(
            f"{words} ({told}). It works in the whole model: a size that is written down in the module is the whole model's; divide it,"
            f" .set('<attribute>', divide='{step.axis}')",
            "E11",
        )

    # words

    def _said(self) -> str:
        lines = [d for _, d in self.lines.get(self._path(), [])]
        if self.axis is not None and self.axis.name != "tp":
            lines = [d for d in lines if d.args.get("over") == self.axis.name or (d.do == "ulysses" and self.axis.name == "sp")]
        return ", ".join(f"{d.do} at {d.where}" for d in lines)

    def _choose(self) -> Choice | None:
        for place, directive in self.lines.get(self._path(), []):
            over = self.axis is not None and directive.args.get("over", "tp") == self.axis.name
            if directive.do == "sync" and over and directive.args["op"] == "all_gather" and "grad" not in directive.args:
                key = (place, self._path())
                return self.flow.choices.setdefault(key, Choice(self._path()))
        return None

    def _hint(self, args: Any) -> str:
        """Return attributes of the surrounding modules that hold one of these numbers, for messages."""
        numbers = {n for n in integers(args) if n > 1}
        found = [
            f"{path}.{name} = {value}"
            for path, module in self.modules[:0:-1][:3]
            for name, value in vars(module).items()
            if isinstance(value, int) and not isinstance(value, bool) and value in numbers
        ]
        return f"; {', '.join(found)}" if found else ""

    def _note_dropout(self, step: Step) -> None:
        if "dropout" in step.name and step.name != "scaled_dot_product_attention":
            active = float(step.arg(1, "p", 0.5)) > 0 and bool(step.arg(2, "training", True))
        else:
            active = step.name == "scaled_dot_product_attention" and float(step.arg(4, "dropout_p", 0.0)) > 0
        active = active or step.name in ("rand_like", "randn_like")
        if active and any(o.kind == "S" for o in step.operands()):
            self.flow.forks.setdefault(self._path(), step.name)
        elif active:
            self.flow.alike.add(self._path())

    def finish(self, result: Any) -> None:
        """Check the results of the model. Raises PlacementError if one is a partial sum, or its gradient would be summed again."""
        assert self.axis is not None
        for name, tensor in named(result):
            operand, place = self.look(tensor), f"the model ({type(self.model).__name__})"
            step = Step(f"result {name}", (tensor,), {}, None, self.look, place, self.axis.group.size(), axis=self.axis.name)
            if operand.kind == "P" and self.axis.name != "dp":
                step.fail(
                    f"leaves the model as {operand.placement.describe()}: complete it with .sync('fwd_post', 'all_reduce'{step.over})", "E3"
                )
            if operand.kind == "R" and not operand.neutral and self.axis.name == "sp":
                step.fail(
                    f"all ranks of sp ({step.size}) compute it alike, and the gradients of parameters are summed over them,"
                    f" {step.size} times too large: cut sequences with .ulysses(), or give these ranks to dp",
                    "E5",
                )
            if operand.kind == "R" and not operand.neutral:
                step.fail(
                    f"is {operand.placement.describe()}: from here on all ranks use it alike, and the sum of the gradient would make"
                    f" it {step.size} times"
                    " too large; leave that line out, or give it grad='slice'",
                    "E5",
                )
            if operand.kind == "?" and operand.placement.choice is not None:
                operand.placement.choice.decide("I", "the model's result")
            if operand.placement.shuffled > 1:
                conflict(step, [operand], "its rows are out of order: they were gathered rank by rank")
            whole = name.partition(".")[0] in (*HIDDEN, *HEADS)
            if operand.kind == "S" and self.axis.name != "dp" and (whole or not self.axis.line):  # what else ulysses leaves cut is known
                words = "applied.complete(result) makes it whole" if whole else "whoever uses it must know"
                self.flow.notes.append(f"result {name} is {operand.placement.describe()}: {words}")
