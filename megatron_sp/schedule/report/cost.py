"""Cost of a schedule for one rank: bytes of its parameters and activations, and bytes that it sends in one step, by exchange.

The split model runs forward once on the meta device, without other ranks. What an exchange sends in backward follows
from its kind, and a recomputed module repeats those inside it up to the last tensor that it saves, where torch's
recomputation stops. Sent bytes are those of ring algorithms over n ranks: an all_reduce of w bytes sends 2 (n-1)/n w; an
all_gather to w bytes, or a reduce_scatter from w bytes, (n-1)/n w.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_sp.comm.groups import Group
from megatron_sp.schedule.apply.apply import apply
from megatron_sp.schedule.apply.decide import without_weights, without_weights_in
from megatron_sp.schedule.apply.hf_attention import one_sequence_a_row
from megatron_sp.schedule.core.directives import expand
from megatron_sp.schedule.core.mesh import Mesh
from megatron_sp.schedule.core.records import tensors_of
from megatron_sp.schedule.core.sequences import take_share
from megatron_sp.utils.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sp.schedule.schedule import Schedule


@dataclass
class CollectiveCost:
    """Cost of the collectives at modules whose paths differ only in numbers.

    Attributes:
        forward, backward: bytes that a rank sends in one step, at all of these modules together.
    """

    path: str  # path of the modules, with a star for each number
    words: str
    calls: int = 0
    forward: float = 0.0
    backward: float = 0.0


@dataclass
class Cost:
    """Cost of one rank."""

    places: list[CollectiveCost] = field(default_factory=list)  # the collectives, the most expensive first
    parameters: int = 0  # bytes of its parameters; gradients take as much
    whole_parameters: int = 0  # bytes of the whole model's parameters
    gradients: float = 0.0  # bytes that it sends to sum gradients over tp, sp and dp, once per step
    activations: int = 0  # bytes that it saves for backward
    notes: list[str] = field(default_factory=list)  # remarks on what is not included

    @property
    def sent(self) -> float:
        """Bytes sent in a step of one micro-batch."""
        return self.gradients + sum(p.forward + p.backward for p in self.places)

    def record(self) -> dict[str, Any]:
        """Return the cost as a JSON-serialisable dict."""
        return {**asdict(self), "sent": self.sent}

    def __str__(self) -> str:
        lines = [
            f"parameters of a rank: {show_bytes(self.parameters)} of {show_bytes(self.whole_parameters)}",
            f"activations of a rank: {show_bytes(self.activations)}",
            f"sent by a rank in a step: {show_bytes(self.sent)}",
        ]
        for p in self.places:
            both = f"{show_bytes(p.forward)} forward, {show_bytes(p.backward)} backward"
            lines.append(f"  {both}: {p.path or 'the model'}{f' x {p.calls}' if p.calls > 1 else ''}, {p.words}")
        if self.gradients:
            lines.append(f"  {show_bytes(self.gradients)}: sums of gradients")
        return "\n".join([*lines, *self.notes])


def show_bytes(count: float) -> str:
    # format a number of bytes, such as ``1.5 MiB``
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def cost(schedule: Schedule, batch: int | Mapping[str, Any], seq: int | None = None) -> Cost:
    """Compute the cost of a schedule."""
    if schedule.applied is not None:
        raise ConfigError("cost() looks at the whole model, which is gone after apply(): call it before (E15)")
    if isinstance(batch, int):
        if seq is None or batch < 1 or seq < 1:
            raise ConfigError(f"cost() wants rows and tokens, such as cost(4, 2048), and got batch {batch}, seq {seq}")
        batch = {"input_ids": torch.zeros(batch, seq, dtype=torch.long)}
    mesh, made = schedule.mesh, Cost()
    model = without_weights(schedule.model)
    lines = [without_weights_in(d) for d in schedule.directives if d.do not in ("zero", "rng", "checkpoint", "context")]
    applied = apply(model, lines, Mesh(tp=mesh.tp, sp=mesh.sp), schedule.seq_dim, rules=False)
    meter = _Meter(model, {axis: mesh.group(axis) for axis in ("tp", "sp")})
    for d in schedule.directives:
        if d.do == "checkpoint":
            for path in expand(model, d.on):
                meter.mark(path, model.get_submodule(path), d.args.get("policy", "full"))
    meter.run({name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in batch.items()})
    for each in meter.sent:
        if each.forward + each.backward:
            _add(made, each.path, f"{_WORDS[each.name][2]} over {each.axis}", each.forward, each.backward)
        for path in each.again:
            _add(made, path, "computed again, and sent again", 0.0, each.forward)
    made.places.sort(key=lambda p: -(p.forward + p.backward))
    made.activations = sum(meter.kept.values())
    n, copies = mesh.tp.size(), mesh.dp_sp.size()
    for name, p in model.named_parameters():
        spec = applied.specs[name]
        made.parameters += p.nbytes
        made.whole_parameters += torch.Size(spec.shape).numel() * p.element_size()
        made.gradients += 2 * p.nbytes * ((n - 1) / n * bool(spec.sums) + (copies - 1) / copies)
    if mesh.cp.size() > 1:
        made.notes.append("not in here: keys and values that context() sends over cp, and the cut of activations by it")
    return made


def _add(made: Cost, path: str, words: str, forward: float, backward: float) -> None:
    star = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
    place = next((p for p in made.places if (p.path, p.words) == (star, words)), None)
    if place is None:
        made.places.append(place := CollectiveCost(star, words))
    place.calls += 1
    place.forward += forward
    place.backward += backward


@dataclass
class _Sent:
    """Bytes that a rank sends in one exchange, and the recomputed modules that repeat it."""

    path: str
    name: str
    axis: str
    forward: float
    backward: float
    again: list[str] = field(default_factory=list)


#: (all of the bytes that leave a rank forward, and backward, in units of (n - 1) / n of its input's; words); n: the ranks
_WORDS: dict[str, tuple[Callable[[int], int], Callable[[int], int], str]] = {
    "copy_to": (lambda n: 0, lambda n: 2, "gradients summed"),
    "split_column": (lambda n: 0, lambda n: 2, "gradients summed"),
    "reduce_from": (lambda n: 2, lambda n: 0, "parts summed"),
    "split_row": (lambda n: 2, lambda n: 0, "parts summed"),
    "split_embedding": (lambda n: 2, lambda n: 0, "parts summed"),
    "gather_from": (lambda n: n, lambda n: n, "gathered"),
    "scatter_to": (lambda n: 0, lambda n: 1, "cut"),
    "reduce_scatter_to": (lambda n: 1, lambda n: 1, "parts summed, and cut"),
    "all_to_all": (lambda n: 1, lambda n: 1, "positions and heads exchanged"),
}


class _Meter(TorchFunctionMode):
    """Mode in which a split model runs on the meta device: exchanges have results of the right shape, and are counted.

    Ids, masks and buffers have values, because models look at them; what is computed with a parameter has none.

    Attributes:
        sent: all exchanges, in order.
        kept: bytes of the tensors that are saved for backward, by storage.
    """

    def __init__(self, model: nn.Module, groups: Mapping[str, Group]) -> None:
        super().__init__()
        self.model, self.groups = model, groups
        self.sent: list[_Sent] = []
        self.kept: dict[int, int] = {}
        self._alive: list[Any] = []  # storages are told apart by their places, so none may be freed
        self._modules: list[str] = []
        # recomputed modules that are running: path, policy, exchanges since the last tensor that they save
        self._open: list[tuple[str, str, list[_Sent]]] = []
        self._own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}

    def run(self, batch: dict[str, Any]) -> None:
        # run the model. Raises ConfigError: it does not run without weight values
        handles = []
        for path, module in self.model.named_modules():
            handles.append(
                module.register_forward_pre_hook(lambda *_, path=path: self._modules.append(path), prepend=True)
            )
            handles.append(module.register_forward_hook(lambda *_: self._modules.pop() and None))
        _use_one_expert(self.model)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t), self, one_sequence_a_row():
                self.model(**batch)
        except ConfigError:
            raise
        except Exception as error:
            place = f"{self._modules[-1]}: " if self._modules and self._modules[-1] else ""
            raise ConfigError(
                f"the model does not run without weight values: {place}{type(error).__name__}: {error}; give cost() its keyword arguments"
            ) from error
        finally:
            for handle in handles:
                handle.remove()

    def mark(self, path: str, module: nn.Module, policy: str) -> None:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            for t in tensors_of([*args, *kwargs.values()]).values():
                self._keep(t)
            self._open.append((path, policy, []))
            try:
                return inner(*args, **kwargs)
            finally:
                self._open.pop()

        forward.__wrapped__ = inner  # type: ignore[attr-defined]
        module.forward = forward  # type: ignore[method-assign]

    def _keep(self, t: Tensor) -> Tensor:
        # note that a tensor is saved for backward: recomputation repeats the exchanges before it, and saves it itself
        for path, _, waiting in self._open:
            for each in waiting:
                each.again.append(path)
            waiting.clear()
        storage = t.untyped_storage()
        if not self._open and storage._cdata not in self._own:
            self.kept[storage._cdata] = storage.nbytes()
            self._alive.append(storage)
        return t

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__" and getattr(func.__self__, "__name__", "") == "device":
            return torch.device("cpu")  # also for a tensor without values: what is created for it must have some
        if name in _SHAPED or name in _WORDS:
            args = _on_meta(args) if any(t.is_meta for t in tensors_of(args).values()) else args
            result = _shaped(name, args)
            if name in _WORDS:
                self._count(name, args, result)
            return result
        if name in ("to", "cuda", "cpu"):
            return _converted(args, kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": None}
        if name == "__get__" or not any(t.is_meta for t in tensors_of([*args, kwargs]).values()):
            return func(*args, **kwargs)
        if name in ("__getitem__", "__setitem__"):  # how many elements a mask without values selects is unknown
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            items = [j for i in index for j in (i.nonzero(as_tuple=True) if _is_mask(i) else (i,))]
            args = (args[0], tuple(items), *args[2:])
        return func(*_on_meta(args), **_on_meta(kwargs))

    def _count(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        axis = next((axis for axis, group in self.groups.items() for a in args if a is group), None)
        if axis is None:  # a layer whose sums are made elsewhere
            return
        n, (forward, backward, _) = self.groups[axis].size(), _WORDS[name]
        x = result if name in ("split_row", "split_embedding") else args[0]
        unit = (n - 1) / n * x.nbytes
        has_gradient = (x.requires_grad or name == "split_column") and "slice" not in args
        made = _Sent(
            self._modules[-1] if self._modules else "", name, axis, forward(n) * unit, backward(n) * unit * has_gradient
        )
        self.sent.append(made)
        if name == "split_row":  # its input is saved after the sum
            made.again += [path for path, _, _ in self._open]
            return
        for _, policy, waiting in self._open:
            if made.forward and not (policy == "keep_gathered" and name == "gather_from"):
                waiting.append(made)


_SHAPED = ("share_of_gradient", "weighed", "take_share", "repeated_heads", "share_of_labels", "own_exchange")


def _shaped(name: str, args: tuple[Any, ...]) -> Tensor:
    """Return the result of an exchange without other ranks: only its shape is right. Raises ValueError if a dim cannot be cut evenly."""
    x: Tensor = args[0]
    if name in ("copy_to", "reduce_from", "share_of_gradient", "weighed"):
        return x.view_as(x)
    if name == "take_share":
        return take_share(*args)
    if name == "repeated_heads":
        return x.repeat_interleave(args[1], args[2])
    if name == "share_of_labels":
        return torch.ones((), dtype=torch.float64)
    if name in ("split_column", "split_row"):
        return F.linear(x, args[1], args[2])
    if name == "split_embedding":
        return F.embedding(x, args[1])
    size = args[1].size()
    if name == "gather_from":
        return torch.cat([x] * size, args[2])
    if name == "own_exchange":
        sides = [re.search(r"-?\d+", side) for side in str(args[3] or "").split("->")]
        if len(sides) != 2:
            raise ConfigError(
                "cost() does not know what a function in sync() does: give it as layouts='S(1)->R' or 'P->I'"
            )
        y = x.view_as(x) if sides[0] is None else torch.cat([x] * size, int(sides[0][0]))
        return y if sides[1] is None else y.narrow(int(sides[1][0]), 0, y.shape[int(sides[1][0])] // size).clone()
    cut = args[2]
    if x.shape[cut] % size:
        raise ValueError(f"dim {cut} of {list(x.shape)} must be a multiple of the group's size ({size})")
    share = x.narrow(cut, 0, x.shape[cut] // size)
    return torch.cat([share] * size, args[3]) if name == "all_to_all" else share.clone()


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.is_meta else value.to("meta")
    if isinstance(value, (tuple, list)):
        items = [_on_meta(v) for v in value]
        return (
            type(value)(*items)
            if hasattr(value, "_fields")
            else type(value)(items)
            if type(value) in (tuple, list)
            else tuple(items)
        )
    return {k: _on_meta(v) for k, v in value.items()} if isinstance(value, dict) else value


def _converted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    # the tensor of ``x.to(...)`` with only its dtype changed
    given = [*args[1:], *kwargs.values()]
    dtype = next(
        (v for v in given if isinstance(v, torch.dtype)), next((v.dtype for v in given if isinstance(v, Tensor)), None)
    )
    x: Tensor = args[0]
    return x if dtype is None or dtype == x.dtype else x.to(dtype)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype is torch.bool and not item.is_meta


def _use_one_expert(model: nn.Module) -> None:
    """Send every row to the first expert of transformers' mixtures: which expert gets which rows depends on values, and costs the same."""
    for module in model.modules():
        if all(hasattr(module, name) for name in ("is_transposed", "has_gate", "has_bias", "_apply_gate", "down_proj")):
            module.forward = MethodType(_first_expert, module)  # type: ignore[method-assign]


def _first_expert(self: Any, x: Tensor, indices: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    # run the first expert: [tokens, h] -> [tokens, h]

    def product(x: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)[0]
        return F.linear(x, weight.transpose(0, 1) if self.is_transposed else weight)

    up = product(x, "gate_up_proj" if self.has_gate else "up_proj")
    down = product(self._apply_gate(up) if self.has_gate else self.act_fn(up), "down_proj")
    return down * weights.reshape(down.shape[0], -1)[:, :1].to(down.dtype)
