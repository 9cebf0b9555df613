"""Cost of a schedule for one rank: bytes of parameters and activations, and bytes sent in a step, by exchange.

The split model takes a step on tensors without contents (torch's meta device), whose collectives are counted and do
nothing. Sent bytes are those of ring algorithms over n ranks: an all_reduce of w bytes sends 2 (n-1)/n w, an all_gather
to w bytes, or a reduce_scatter from w bytes, (n-1)/n w.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from megatron_sp.comm.groups import unchecked
from megatron_sp.comm.nobody import count_collectives
from megatron_sp.schedule.apply.apply import Applied, apply, without_weights, without_weights_in
from megatron_sp.schedule.core.directives import AXES, Mesh, expand
from megatron_sp.schedule.core.hooks import tensors_of
from megatron_sp.schedule.verify.verify import default_loss
from megatron_sp.utils.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sp.schedule.schedule import Schedule

_WORDS = {
    "copy_to": "gradients summed", "split_column": "gradients summed", "reduce_from": "parts summed",
    "split_row": "parts summed",
    "split_embedding": "parts summed", "gather_from": "gathered", "scatter_to": "cut",
    "reduce_scatter_to": "parts summed, and cut",
    "all_to_all": "positions and heads exchanged", "own_exchange": "a function of the schedule's writer",
}  # fmt: skip


_EXPERTS = ("is_transposed", "has_gate", "has_bias", "_apply_gate", "down_proj")  # attributes of mixtures


@dataclass
class CollectiveCost:
    """Bytes that a rank sends in modules whose paths differ only in numbers (stars in ``path``)."""

    path: str
    words: str
    calls: int = 0
    forward: float = 0.0
    backward: float = 0.0


@dataclass
class Cost:
    """Cost of one rank, in bytes."""

    places: list[CollectiveCost] = field(default_factory=list)  # the most expensive first
    parameters: int = 0  # of this rank; gradients take as much
    whole_parameters: int = 0  # of the whole model
    gradients: float = 0.0  # sent to sum gradients over tp, sp and dp, once per step
    activations: int = 0  # saved for backward
    notes: list[str] = field(default_factory=list)  # what is not included

    @property
    def sent(self) -> float:
        return self.gradients + sum(p.forward + p.backward for p in self.places)

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "sent": self.sent}

    def __str__(self) -> str:
        lines = [
            f"parameters of a rank: {_in_units(self.parameters)} of {_in_units(self.whole_parameters)}",
            f"activations of a rank: {_in_units(self.activations)}",
            f"sent by a rank in a step: {_in_units(self.sent)}",
        ]
        for p in self.places:
            both = f"{_in_units(p.forward)} forward, {_in_units(p.backward)} backward"
            lines.append(f"  {both}: {p.path or 'the model'}{f' x {p.calls}' if p.calls > 1 else ''}, {p.words}")
        if self.gradients:
            lines.append(f"  {_in_units(self.gradients)}: sums of gradients")
        return "\n".join([*lines, *self.notes])


def _in_units(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def cost(schedule: Schedule, batch: int | Mapping[str, Any], seq: int | None = None) -> Cost:
    """Compute the cost of a schedule; for the arguments see ``Schedule.cost``."""
    if schedule.applied is not None:
        raise ConfigError("cost() looks at the whole model, which is gone after apply(): call it before (E15)")
    if isinstance(batch, int):
        if seq is None or batch < 1 or seq < 1:
            raise ConfigError(f"cost() wants rows and tokens, such as cost(4, 2048), and got batch {batch}, seq {seq}")
        batch = {"input_ids": torch.zeros(batch, seq, dtype=torch.long)}
    model, mesh = without_weights(schedule.model), schedule.mesh
    lines = without_weights_in(schedule.directives, "zero", "rng", "context")
    applied = apply(model, lines, mesh, schedule.seq_dim, rules=False)
    step = _Step(model, mesh)
    step.run(applied, {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in batch.items()})
    result = Cost(gradients=step.gradients, activations=sum(step.saved.values()))
    places: dict[tuple[str, str], CollectiveCost] = {}
    for sent in step.exchanges:
        if sent.forward + sent.backward:
            path = re.sub(r"(?<![^.])\d+(?![^.])", "*", sent.path)
            place = places.setdefault((path, sent.words), CollectiveCost(path, sent.words))
            place.calls += 1
            place.forward += sent.forward
            place.backward += sent.backward
    result.places = sorted(places.values(), key=lambda p: -(p.forward + p.backward))
    for name, p in model.named_parameters():
        result.parameters += p.nbytes
        result.whole_parameters += torch.Size(applied.specs[name].shape).numel() * p.element_size()
    if mesh.cp.size() > 1:
        note = "not in here: keys and values that context() sends over cp, and the cut of activations by it"
        result.notes.append(note)
    return result


class _Step(TorchFunctionMode):
    """A step on the meta device; ids, masks and buffers have values, because models look at them."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self.model, self.axes = model, {id(unchecked(mesh.group(axis))): axis for axis in reversed(AXES)}
        self.exchanges: list[CollectiveCost] = []
        self.gradients = 0.0
        self.saved: dict[int, int] = {}  # bytes saved for backward, by storage
        self._alive: list[Any] = []  # storages are told apart by their addresses, so none may be freed
        self._own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
        self._modules: list[str] = []  # that are running
        self._exchange: CollectiveCost | None = None  # that is running
        self._is_backward = self._is_inside = False  # of the package's functions

    def run(self, applied: Applied, batch: dict[str, Any]) -> None:
        """Take the step. Raises ConfigError: the model does not run without weight values."""
        lines = [d for d in applied.lines if d.do == "checkpoint"]
        recomputed = {path for d in lines for path in expand(self.model, d.on)}
        with ExitStack() as undo:
            for path, module in self.model.named_modules():
                enter = lambda *_, path=path: self._modules.append(path)
                leave = lambda *_: self._modules.__delitem__(-1)
                undo.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                if path in recomputed:
                    undo.callback(module.register_forward_pre_hook(self._save_keywords, with_kwargs=True).remove)
                # a recomputation ends early, by an exception
                undo.callback(module.register_forward_hook(leave, always_call=True).remove)
            for module in self.model.modules():  # transformers' mixtures: who gets which rows depends on values
                if all(hasattr(module, name) for name in _EXPERTS):
                    module.forward = MethodType(_first_expert, module)  # type: ignore[method-assign]
            undo.enter_context(self)
            # what transformers reads from the values of whole rows: packed sequences and padding
            masking, models = (sys.modules.get(f"transformers.{name}") for name in ("masking_utils", "modeling_utils"))
            for holder, name in (
                (masking, "find_packed_sequence_indices"),
                (getattr(models, "PreTrainedModel", None), "warn_if_padding_and_no_attention_mask"),
            ):
                if hasattr(holder, name):
                    undo.callback(setattr, holder, name, getattr(holder, name))
                    setattr(holder, name, lambda *_, **__: None)
            count_collectives(undo, "gloo", self._count)
            try:
                with saved_tensors_hooks(self._save, lambda t: t):
                    outputs = self.model(**batch)
                self._is_inside = True  # what it weighs large results with is without contents, too
                loss = default_loss(outputs)
                self._is_inside, self._is_backward = False, True
                if loss.requires_grad:  # backward() of a tensor would recompute outside of this mode
                    torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))
                self._exchange = None
                applied.finish_backward()
            except ConfigError:
                raise
            except Exception as error:
                place = f"{self._modules[-1]}: " if self._modules and self._modules[-1] else ""
                why = f"{place}{type(error).__name__}: {error}"
                gives = "give cost() its keyword arguments"
                raise ConfigError(f"the model does not run without weight values: {why}; {gives}") from error

    def _save(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in self._own:
            self.saved[storage._cdata] = storage.nbytes()
            self._alive.append(storage)
        return t

    def _save_keywords(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for t in tensors_of(kwargs).values():  # torch keeps these until the recomputation, without saving them
            self._save(t)

    def _count(self, op: str, group: Any, x: Tensor, num_bytes: int) -> Callable[[], None]:
        if self._exchange is None:
            self.gradients += num_bytes
            return lambda: None
        if not self._exchange.words.endswith("again"):
            self._exchange.words = f"{self._exchange.words.partition(' over ')[0]} over {self.axes[id(group)]}"
        if self._is_backward:
            self._exchange.backward += num_bytes
        else:
            self._exchange.forward += num_bytes
        return lambda: None

    def _run_exchange(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, outer = func.__name__, (self._exchange, self._is_inside)
        if name in _WORDS:
            words = "computed again, and sent again" if self._is_backward else _WORDS[name]
            self._exchange = sent = CollectiveCost(self._modules[-1] if self._modules else "", words)
            self.exchanges.append(sent)
        self._is_inside = True
        with self:
            result = func.__wrapped__(*args, **kwargs)
        if name in _WORDS and result is not args[0] and result.grad_fn is not None:
            # the nodes of an exchange run one after another, the last one first
            result.grad_fn.register_prehook(lambda grads: setattr(self, "_exchange", sent))
        self._exchange, self._is_inside = outer
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if hasattr(func, "__wrapped__") and func.__module__.startswith("megatron_sp."):
            return self._run_exchange(func, args, kwargs)
        # a model looks at the values of what it creates for a tensor, so that must have some; the package does not
        knows_device = self._is_inside or (self._is_backward and not self._modules)
        if name == "__get__" and getattr(func.__self__, "__name__", "") == "device" and not knows_device:
            return torch.device("cpu")
        if name in ("to", "cuda", "cpu"):  # only the dtype changes
            given = [*args[1:], *kwargs.values()]
            dtypes = [getattr(v, "dtype", v) for v in given if isinstance(v, (torch.dtype, Tensor))]
            return args[0] if not dtypes or dtypes[0] == args[0].dtype else args[0].to(dtypes[0])
        if kwargs.get("device") is not None and not knows_device:
            kwargs = {**kwargs, "device": None}
        if name == "__get__" or not any(t.is_meta for t in tensors_of([*args, kwargs]).values()):
            return func(*args, **kwargs)
        if name in ("__getitem__", "__setitem__"):  # how many elements a mask without values selects is unknown
            is_mask = lambda i: isinstance(i, Tensor) and i.dtype is torch.bool and not i.is_meta
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            items = [j for i in index for j in (i.nonzero(as_tuple=True) if is_mask(i) else (i,))]
            args = (args[0], tuple(items), *args[2:])
        args, kwargs = tree_map_only(Tensor, lambda t: t if t.is_meta else t.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def _first_expert(self: Any, x: Tensor, indices: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    # all rows go to the first expert, which costs the same: [tokens, h] -> [tokens, h]

    def product(x: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)[0]
        return F.linear(x, weight.transpose(0, 1) if self.is_transposed else weight)

    up = product(x, "gate_up_proj" if self.has_gate else "up_proj")
    down = product(self._apply_gate(up) if self.has_gate else self.act_fn(up), "down_proj")
    return down * weights.reshape(down.shape[0], -1)[:, :1].to(down.dtype)
