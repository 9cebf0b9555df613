"""Observer of a model that runs without weight values: how each tensor lies over the ranks of an axis, at every step (``dry_run.py``).

Every torch function and every exchange passes through ``Follower``, a ``TorchFunctionMode``. There is no backward pass:
R and I stand for what it would do (``placements.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NoReturn

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
from megatron_sp.schedule.check.rules.common import ask
from megatron_sp.schedule.check.rules.elementwise import ELEMENTWISE, UNIFORM_FACTORIES
from megatron_sp.schedule.check.rules.indexing import part_of
from megatron_sp.schedule.check.rules.moves import EXPANSIONS
from megatron_sp.schedule.check.rules.table import RULES
from megatron_sp.schedule.check.whole_steps import (
    WholeSteps,
    explain_failure,
    refuse_other_count,
    require_same_factors,
    require_same_shapes,
    share_of_filled,
)
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


def _is_hidden(tensor: Tensor, placement: Placement | None) -> bool:
    """Return whether a tensor comes from an autograd function, of which only the forward was seen: enough for what is whole."""
    if placement is None:
        return tensor.requires_grad and tensor.grad_fn is not None
    return placement.kind in "RSP" and isinstance(tensor.grad_fn, BackwardCFunction)


def _all_on_meta(args: tuple[Any, ...]) -> Any:
    """Move all tensors to the meta device if one of them is there."""
    return on_meta(args) if any(t.is_meta for t in tensors_in(args)) else args


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
        self.model, self.axis, self.lines = model, axis, lines or {}
        self.modules: list[tuple[str, nn.Module]] = []  # that are running, the innermost last
        self.record: dict[str, list[Seen]] = defaultdict(list)
        self.whole_steps = WholeSteps(expected, same_program=axis is not None and axis.same_program)
        self.known: Any = WeakIdKeyDictionary()  # placements, by tensor
        self.views: Any = WeakIdKeyDictionary()  # of tensors that were filled with one value: (the tensor, index)
        # weak: a model may put another buffer in the place of its own, whose id is then that of another tensor
        self.names: Any = WeakIdKeyDictionary({t: name for name, t in (*model.named_buffers(), *model.named_parameters())})
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
                f"the {which} model cannot be run without weight values: {self.place()}: {type(error).__name__}: {error};"
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
        return f"{self._path() or 'the model'} ({type(self._module()).__name__})"

    # calls

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
            if name == "device":
                return torch.device("cpu")  # also for a tensor without values: what is created for it must have some
            if name not in _DESCRIPTORS:
                return func(*args, **kwargs)
        name = plain(name)
        if self.axis is None:
            return self._record(func, name, args, kwargs)
        step = self._step(self.axis, name, args, kwargs)
        return self._exchange(step, self.axis) if name in exchange_rules.RULES else self._follow(step, func)

    def _record(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the whole model, and record it."""
        if name in exchange_rules.RULES:
            return exchange_rules.shaped(name, _all_on_meta(args))
        result = self._call(func, name, args, kwargs)
        if name == "setitem" or any(True for _ in tensors_in(result)):
            shown = part_of(args[0], args[1]) if name == "setitem" else result
            self.record[self._path()].append(Seen.of(name, shown, args, kwargs))
        return result

    def _step(self, axis: Axis, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        step = Step(name, args, kwargs, None, self.look, self.place(), axis.group.size(), lines=self._said(), axis=axis.name)
        step.choose, step.hint = self._choose, lambda: self._hint(args)
        step.module = self._module()
        return step

    def _path(self) -> str:
        return self.modules[-1][0] if self.modules else ""

    def _module(self) -> nn.Module:
        return self.modules[-1][1] if self.modules else self.model

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function, on the meta device if one of its tensors is there."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": None}
        if name in ("to", "cuda", "cpu"):
            return converted(args, kwargs)
        if name == "ctc_loss" and args[0].is_meta:  # torch has none for tensors without values
            reduction = kwargs.get("reduction", args[5] if len(args) > 5 else "mean")
            return args[0].sum((0, -1)) if reduction == "none" else args[0].sum()
        if any(t.is_meta for t in tensors_in((args, kwargs))):
            func, args, kwargs = self._without_values(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if self.late and name in UNIFORM_FACTORIES and result.is_floating_point():
            return result.to("meta")
        return result

    def _without_values(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return a call on the meta device. Raises WrittenLater if it would write into a tensor that has values."""
        if func.__name__ in _AUGMENTED and not args[0].is_meta:
            func = getattr(Tensor, f"__{func.__name__[3:]}")  # a &= b gives a another value, and this one may be without values
        elif (in_place(func) or name == "setitem") and not args[0].is_meta:
            raise WrittenLater(f"{self.place()}: {name}: numbers that the model looks at depend on weights; verify() can tell (unknown)")
        if name in ("getitem", "setitem"):
            args = (args[0], numbered(args[1], tuple(args[0].shape)), *args[2:])
        return func, on_meta(args), on_meta(kwargs)

    # a torch function: run it, find the placements of its results, compare with the whole model

    def _follow(self, step: Step, func: Any) -> Any:
        """Run a torch function, and note the placements of its results. Raises PlacementError if something does not fit."""
        args, kwargs, operands = step.args, step.kwargs, step.operands()
        if in_place(func) and step.name in _MOVES:
            step.args = (self._with_former_shape(args[0], operands[0].placement), *args[1:])
        try:
            result = self._call(func, step.name, args, kwargs)
        except PlacementError:
            raise
        except Exception as error:
            explain_failure(step, operands, error)
        results = list(tensors_in(result))
        if results:
            step.result = result
            self._note_results(step, func, args, operands, results)
        elif step.name == "setitem":
            self._note_write(step, operands[0])
        return result

    def _with_former_shape(self, tensor: Tensor, placement: Placement) -> Tensor:
        """Return a view of a tensor that keeps the shape it has now, for the rule of a call that changes it in place."""
        before = tensor.detach()
        self.known[before] = placement
        return before.requires_grad_(tensor.requires_grad)

    def _note_write(self, step: Step, before: Operand) -> None:
        """Note the placement of a tensor after ``x[index] = value``."""
        self._compare(step)
        placement = RULES[step.name](step)
        assert isinstance(placement, Placement)
        self._written(step, before, placement)
        self.known[step.args[0]] = placement

    def _note_results(self, step: Step, func: Any, args: tuple[Any, ...], operands: list[Operand], results: list[Tensor]) -> None:
        """Note the placements of the results of a call with these arguments."""
        seen = self._compare(step, results, operands)
        made = self._in_order(step, operands, self._apply_rule(step, operands))
        placements = made if isinstance(made, list) else [made] * len(results)
        placements = [share_of_filled(step, *each) for each in zip(results, placements, seen or repeat(None), strict=False)]
        if func.__name__ in _AUGMENTED and results[0] is not args[0] and placements[0].kind in "RSP":
            step.fail("a tensor that has values takes in a share that has none; verify() can tell", "unknown")
        if len(results) == 1 and args and results[0] is args[0]:
            self._written(step, operands[0], placements[0])
        for tensor, placement in zip(results, placements, strict=True):
            self.known[tensor] = placement
        if step.name == "getitem" and results[0]._base is not None and (placements[0].kind == "U" or placements[0].as_needed):
            self.views[results[0]] = args
        require_same_shapes(step, results, placements)
        self._note_dropout(step)

    def _compare(self, step: Step, results: Sequence[Tensor] = (), operands: Sequence[Operand] = ()) -> list[tuple[int, ...]] | None:
        """Find the same step of the whole model, if it is known, and return the shapes of its results.

        Raises:
            PlacementError: it makes another number of tensors, or computes with other numbers (E11).
        """
        seen = self.whole_steps.next(self._path(), self._module(), step.name)
        step.whole = seen.shapes if seen else None
        if step.whole is not None and results and len(step.whole) != len(results):
            if step.name == "split":
                self._apply_rule(step, operands)  # its rule may know what is meant
            refuse_other_count(step, results)
        require_same_factors(step, seen)
        return step.whole

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

    def _apply_rule(self, step: Step, operands: Sequence[Operand]) -> Placement | list[Placement]:
        kinds = {o.kind for o in operands}
        if step.name in UNIFORM_FACTORIES and (not kinds & {"S", "P"} or step.name.startswith("new_")):
            return UNIFORM
        random = "rand" in step.name or "dropout" in step.name
        if kinds == {"U"} and not random and (step.name in ELEMENTWISE or step.name in _MOVES):
            return UNIFORM
        if not kinds & {"S", "P"} and step.name not in EXPANSIONS:
            return join(step, operands)
        return RULES.get(step.name, ask)(step)

    # an exchange between ranks

    def _exchange(self, step: Step, axis: Axis) -> Any:
        """Run an exchange for its shape and its placement; over another axis placements are unchanged."""
        rule, placement = exchange_rules.RULES[step.name], None
        elsewhere = exchange_rules.is_elsewhere(step, axis.group)
        step.lines = step.lines or axis.line
        every = _all_on_meta(step.args)
        try:
            if not elsewhere and step.name != "split_row":  # a rule explains mistakes better than shapes do; that of a row needs the result
                placement = rule(step)
            step.result = exchange_rules.shaped(step.name, every)
            placement = exchange_rules.elsewhere(step) if elsewhere else placement or rule(step)
        except (PlacementError, ValueError):
            raise
        except Exception as error:
            explain_failure(step, step.operands(), error)
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

    # placements of tensors

    def look(self, tensor: Tensor) -> Operand:
        """Return a tensor with its placement. Raises NotFollowed if the dry run could not follow it."""
        name = self.names.get(tensor, "")
        if name:
            return Operand(tensor, self.parameters.get(name, WHOLE), name)
        self._require_no_vmap(tensor)
        placement = self._placement_of_view(tensor)
        if self.axis is not None and _is_hidden(tensor, placement):
            raise NotFollowed(
                f"{self.place()}: a tensor of {list(tensor.shape)} comes from {type(tensor.grad_fn).__name__}, in which the"
                " dry run cannot look:"
                " make it overridable (megatron_sp.parallel.regions.overridable) and teach it, or rely on verify() (unknown)"
            )
        return Operand(tensor, placement or WHOLE)

    def _require_no_vmap(self, tensor: Tensor) -> None:
        """Raise NotFollowed inside of torch.func, where dims are hidden, for a tensor that is not the same on all ranks."""
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return
        inside = self.look(torch._C._functorch.get_unwrapped(tensor))
        if inside.kind in "RSP":
            raise NotFollowed(
                f"{self.place()}: inside of torch.func (vmap) dims are hidden, and {inside.called} is {inside.placement.describe()};"
                " verify() can tell (unknown)"
            )

    def _placement_of_view(self, tensor: Tensor) -> Placement | None:
        """Return the placement of a tensor, None: unknown; a view of what was filled follows what has been written to it since."""
        placement = self.known.get(tensor)
        if tensor not in self.views or placement is None or not (placement is UNIFORM or placement.as_needed):
            return placement
        base = self.look(self.views[tensor][0])
        if placement is UNIFORM and base.kind in "RSP":
            raise NotFollowed(f"{self.place()}: a view of a tensor that was written to since; verify() can tell (unknown)")
        if placement.as_needed and not base.placement.as_needed:
            return replace(base.placement, dim=placement.dim)
        return placement

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
            place = f"the model ({type(self.model).__name__})"
            step = Step(f"result {name}", (tensor,), {}, None, self.look, place, self.axis.group.size(), axis=self.axis.name)
            operand = self.look(tensor)
            self._finish_one(step, operand)
            is_record = name.partition(".")[0] in (*HIDDEN, *HEADS)
            if operand.is_cut and self.axis.name != "dp" and (is_record or not self.axis.line):  # what else ulysses leaves cut is known
                words = "applied.complete(result) makes it whole" if is_record else "whoever uses it must know"
                self.flow.notes.append(f"result {name} is {operand.placement.describe()}: {words}")

    def _finish_one(self, step: Step, result: Operand) -> None:
        """Check one result of the model."""
        if result.is_partial and step.axis != "dp":
            step.fail(
                f"leaves the model as {result.placement.describe()}: complete it with .sync('fwd_post', 'all_reduce'{step.over})", "E3"
            )
        if result.kind == "R" and not result.neutral:
            self._refuse_summed_again(step, result)
        result.decide("I", "the model's result")
        if result.placement.shuffled > 1:
            conflict(step, [result], "its rows are out of order: they were gathered rank by rank")

    def _refuse_summed_again(self, step: Step, result: Operand) -> NoReturn:
        if step.axis == "sp":
            step.fail(
                f"all ranks of sp ({step.size}) compute it alike, and the gradients of parameters are summed over them,"
                f" {step.size} times too large: cut sequences with .ulysses(), or give these ranks to dp",
                "E5",
            )
        step.fail(
            f"is {result.placement.describe()}: from here on all ranks use it alike, and the sum of the gradient would make"
            f" it {step.size} times too large; leave that line out, or give it grad='slice'",
            "E5",
        )
