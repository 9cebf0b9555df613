"""Flat buffers: all parameters, gradients and optimizer state of a unit in one tensor each.

A parameter of the model is a view of its unit's parameter buffer, its gradient a view of the gradient buffer. One
collective, one norm and one fused optimizer kernel then serve a whole unit, and a later shard of it is a slice. Order within a
unit: parameters with weight decay first, then those without, each aligned to 16 bytes; padding stays zero.

Gradients of bf16 and fp16 parameters are accumulated in fp32; the fp32 master copy is what the optimizer updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import Handle, all_reduce, all_reduce_async
from megatron_sp.comm.groups import ALONE, Group
from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.ops.memory import empty
from megatron_sp.utils.numbers import round_up

_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its unit's buffers."""

    name: str
    param: nn.Parameter
    start: int
    decayed: bool
    spec: ShardSpec

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.param.numel()].view(self.param.shape)


def is_decayed(param: Tensor) -> bool:
    """Weight decay is for matrices; biases and norm weights go without."""
    return param.ndim >= 2


class FlatUnit:
    """The buffers of one unit.

    Frozen parameters (``requires_grad`` False) stay where they are, outside.

    Args:
        name: of the unit.
        named_params: its parameters.
        specs: where they lie in the whole parameters; one that is missing is whole here.

    Attributes:
        params: [n], the model's dtype; the model's parameters are views of it.
        grads: [n], fp32 (fp64 for an fp64 model); memory exists from the first gradient of a step to ``release_grads``.
        master: [n], what the optimizer updates: ``params`` itself, or an fp32 copy of 16-bit parameters.
        num_decayed: elements before this index are decayed.
    """

    def __init__(self, name: str, named_params: Iterable[tuple[str, nn.Parameter]], specs: Mapping[str, ShardSpec] | None = None) -> None:
        self.name = name
        specs = specs or {}
        held = list(named_params)
        trainable = [(n, p) for n, p in held if p.requires_grad]
        ordered = [(n, p) for n, p in trainable if is_decayed(p)] + [(n, p) for n, p in trainable if not is_decayed(p)]
        like = ordered[0][1] if ordered else held[0][1] if held else torch.empty(0)  # a frozen unit has buffers of length 0
        dtype, device = like.dtype, like.device
        self.align = align = _ALIGN_BYTES // dtype.itemsize
        self.slots: list[Slot] = []
        self.num_decayed = end = 0
        for param_name, param in ordered:
            assert param.dtype == dtype, f"{param_name} is {param.dtype}, the unit {dtype}"
            spec = specs.get(param_name) or ShardSpec.whole(tuple(param.shape), 0, 1)
            self.slots.append(Slot(param_name, param, end, is_decayed(param), spec))
            end += round_up(param.numel(), align)
            if is_decayed(param):
                self.num_decayed = end
        self.params = torch.zeros(end, dtype=dtype, device=device)
        for slot in self.slots:
            view = slot.view(self.params)
            view.copy_(slot.param.detach())
            slot.param.data = view
        self.is_16_bit = dtype in (torch.bfloat16, torch.float16)
        self.grad_dtype = wide = torch.float32 if self.is_16_bit else dtype
        for slot in self.slots:
            if self.is_16_bit and hasattr(slot.param, "grad_dtype"):
                slot.param.grad_dtype = wide  # what autograd leaves in p.grad (ops that are not ours) adds up in fp32 too
        self._grads: Tensor | None = None
        self.master = self.params.to(wide) if self.is_16_bit else self.params

    @property
    def grads(self) -> Tensor:
        if self._grads is None:
            self._grads = empty((self.params.numel(),), dtype=self.grad_dtype, device=self.params.device)
            for slot in self.slots:
                end = slot.start + slot.param.numel()
                self._grads[end : round_up(end, self.align)].zero_()  # the padding behind each parameter
        return self._grads

    def release_grads(self) -> None:
        """Give the gradients' memory back.

        A step then holds activations at the end of its forward passes and gradients at the end of its backward passes, each
        backward freeing the ones while it makes the others, instead of both at once.
        """
        self._grads = None

    def counted(self, flat: Tensor) -> Iterator[Tensor]:
        """The parts of a buffer that this tp rank adds to a sum: over all tp ranks every element of the whole parameters once."""
        for slot in self.slots:
            yield from slot.spec.counted_views(slot.view(flat))

    def refresh_params(self) -> None:
        """Round the master weights into the model's parameters."""
        if self.is_16_bit:
            self.params.copy_(self.master)

    def refresh_master(self) -> None:
        """Take the model's parameters as the master weights (after loading a checkpoint without optimizer state)."""
        if self.is_16_bit:
            self.master.copy_(self.params)


class FlatGradients:
    """The gradient sink of a model: routes weight gradients into flat buffers and sums them over the ranks.

    ``start_step`` opens a step; ops ``claim`` views; when the last micro-batch's backward leaves a unit, ``unit_done`` starts
    the unit's all_reduce under the rest of backward; ``finish_step`` waits for all of them. Gradients are summed over ``group``,
    never averaged: the loss was divided by the global token count already. What tp ranks hold in common but use on different positions or
    heads (``ShardSpec.sums``) is summed over ``tp`` before.
    """

    def __init__(self, units: list[FlatUnit], group: Group, *, tp: Group = ALONE, overlap: bool = True) -> None:
        self.units, self.group, self.tp, self.overlap = units, group, tp, overlap
        self._slots = {id(slot.param): (unit, slot) for unit in units for slot in unit.slots}
        self._written: set[int] = set()
        self._ahead: set[int] = set()
        self._handles: dict[int, Handle] = {}
        self._last_micro_batch = False

    def start_step(self) -> None:
        """Forget the previous step's gradients; the first write to each buffer overwrites it."""
        assert not self._handles, "finish_step() was not called"
        self._written.clear()
        self._ahead.clear()
        self._last_micro_batch = False
        for unit in self.units:
            unit.release_grads()
            for slot in unit.slots:
                slot.param.grad = None

    def last_micro_batch(self) -> None:
        """The next backward is the step's last: units may be reduced as they complete."""
        self._last_micro_batch = True

    def claim(self, param: Tensor) -> tuple[Tensor, bool] | None:
        if id(param) not in self._slots:
            return None
        assert id(param) not in self._ahead, "a gradient claimed ahead was not settled: its backward has not run"
        unit, slot = self._slots[id(param)]
        fresh = id(param) not in self._written
        self._written.add(id(param))
        return slot.view(unit.grads), fresh

    def claim_ahead(self, param: Tensor) -> Tensor | None:
        if id(param) not in self._slots or id(param) in self._written:
            return None
        unit, slot = self._slots[id(param)]
        self._written.add(id(param))
        self._ahead.add(id(param))
        return slot.view(unit.grads)

    def settle(self, param: Tensor) -> None:
        self._ahead.remove(id(param))

    def unit_done(self, index: int) -> None:
        """All gradients of unit ``index`` of this micro-batch are there."""
        if self._last_micro_batch and self.overlap:
            self._reduce(index)

    def finish_step(self) -> None:
        """Reduce what has not been reduced yet and wait for everything."""
        for index in range(len(self.units)):
            if index not in self._handles:
                self._reduce(index)
        for handle in self._handles.values():
            handle.wait()
        self._handles.clear()

    def _reduce(self, index: int) -> None:
        unit = self.units[index]
        assert index not in self._handles, f"unit {unit.name} was completed twice in one backward pass"
        for slot in unit.slots:
            self._collect(slot)
        self._sum_over_tp(unit)
        self._handles[index] = all_reduce_async(unit.grads, self.group)

    def _sum_over_tp(self, unit: FlatUnit) -> None:
        """One all_reduce for all rows that need it, each at its own place: ranks that hold other rows leave zeros there."""
        if self.tp.size() == 1:
            return
        parts = [(s, slot.view(unit.grads).narrow(slot.spec.dim, s.start, s.length)) for slot in unit.slots for s in slot.spec.sums]
        if not parts:
            return
        packed = unit.grads.new_zeros(sum(s.num_slots * view.numel() for s, view in parts))
        places, at = [], 0
        for s, view in parts:
            places.append(packed[at + s.slot * view.numel() : at + (s.slot + 1) * view.numel()].view(view.shape))
            at += s.num_slots * view.numel()
        for (_, view), place in zip(parts, places, strict=True):
            place.copy_(view)
        all_reduce(packed, self.tp)
        for (_, view), place in zip(parts, places, strict=True):
            view.copy_(place)

    def _collect(self, slot: Slot) -> None:
        """Take in what autograd left in ``p.grad`` (ops that are not ours); zero what got no gradient in this step."""
        key = id(slot.param)
        view = slot.view(self._slots[key][0].grads)
        if slot.param.grad is not None:
            view.copy_(slot.param.grad) if key not in self._written else view.add_(slot.param.grad)
            slot.param.grad = None
        elif key not in self._written:
            view.zero_()
        self._written.add(key)


def squared_norm(x: Tensor) -> Tensor:
    """Sum of squares as an fp64 scalar tensor; partial sums of 4096 elements keep fp32 input exact to about 1e-7.

    fp32 elements beyond 1e17 give infinity: gradients that large count as non-finite.
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=x.device)
    block = 4096
    whole = x.numel() // block * block
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    if whole:
        total += torch.linalg.vector_norm(x[:whole].view(-1, block), dim=1).double().square_().sum()
    if whole < x.numel():
        total += torch.linalg.vector_norm(x[whole:]).double().square_()
    return total
