"""Flat buffers: all parameters, gradients and optimizer state of a unit in one tensor each, full or sharded (ZeRO, arXiv:1910.02054).

A parameter of the model is a view of its unit's parameter buffer, its gradient a view of the gradient buffer. So one
collective, one norm and one fused optimizer kernel handle a whole unit. Order within a unit: parameters with weight
decay first, then those without, each aligned to 64 bytes; the unit is padded so that it can be sharded into ranges of
the same size. Padding stays zero.

    stage 0   every rank has everything
    stage 1   master weights and optimizer state: this rank's range; parameters and, until they are reduced, gradients: full
    stage 2   the same; gradients are reduced to the ranges in every micro-batch, so that few units have full gradients at a time
    stage 3   parameters too: a rank keeps its range; ``optim/weights.py`` gathers a unit for as long as it is used

Gradients of bf16 and fp16 parameters are accumulated in fp32; the fp32 master copy is what the optimizer updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_gather_async
from megatron_sp.comm.groups import SINGLE_RANK, Group
from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.ops.kernels.launch import is_fused
from megatron_sp.ops.memory import empty, host_empty
from megatron_sp.utils.numbers import round_up

_ALIGN_BYTES = 64  # a vector register: the fused optimizer rounds elements after the last full one differently


@dataclass(frozen=True)
class Zero:
    """ZeRO stage, and the group over which units are sharded.

    Attributes:
        stage: 0 to 3.
        group: the ranks with the same parameters; rank r keeps the r-th range of every unit.
    """

    stage: int = 0
    group: Group = field(default=SINGLE_RANK)

    def of(self, alike: str) -> Zero:
        """Return the sharding of a unit, by its ``Unit.alike``.

        Units that are "whole" are at stage 1 at most: a table that the ends of a pipeline share, which use it at different times, so
        that a gather or a reduction in every micro-batch would have one of them wait for the other; and small parameters of all blocks.
        """
        return replace(self, stage=min(self.stage, 1)) if alike == "whole" else self

    @property
    def parts(self) -> int:
        """Number of ranges of a unit."""
        return self.group.size() if self.stage > 0 else 1

    @property
    def part(self) -> int:
        """Index of this rank's range."""
        return self.group.rank() if self.stage > 0 else 0


NOT_SHARDED = Zero()


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its unit's buffers."""

    name: str
    param: nn.Parameter
    shape: torch.Size  # the parameter itself may be away (stage 3)
    start: int
    decayed: bool
    spec: ShardSpec

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return self.shape.numel()

    @property
    def stop(self) -> int:
        """End of the parameter in the flat buffer."""
        return self.start + self.numel

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's view in a full buffer."""
        return flat[self.start : self.stop].view(self.shape)

    def counted(self) -> Iterator[range]:
        """Yield the elements this tp rank adds to a sum over tp ranks, as ranges of a full buffer; each element is counted on one rank."""
        if not self.shape:
            yield range(self.start, self.stop if self.spec.counted else self.start)
            return
        for first, length in self.spec.counted:
            # along another dim than the first it is always all of it
            size = length * (self.numel // self.shape[0] if self.shape[0] else 0) if self.spec.dim == 0 else self.numel
            begin = self.start + (first * (self.numel // self.shape[0]) if self.spec.dim == 0 and self.shape[0] else 0)
            yield range(begin, begin + size)


def is_decayed(param: Tensor, spec: ShardSpec | None = None) -> bool:
    """Return whether a parameter has weight decay: matrices do, biases and norm weights do not, stacked or not."""
    return param.ndim - (0 if spec is None else spec.stacked) >= 2


class FlatLayout:
    """Layout of the parameters in a flat buffer.

    Attributes:
        slots: places of the parameters, in order.
        ids: of the parameters.
        num_decayed: elements before this index have weight decay.
        numel: number of elements of the full buffer, with padding.
        shard: this rank's range.
    """

    def __init__(
        self, params: list[tuple[str, nn.Parameter]], specs: Mapping[str, ShardSpec], zero: Zero, dtype: torch.dtype
    ) -> None:  # fmt: skip
        decayed = {name: is_decayed(param, specs.get(name)) for name, param in params}
        ordered = [(n, p) for n, p in params if decayed[n]] + [(n, p) for n, p in params if not decayed[n]]
        self.align = align = _ALIGN_BYTES // dtype.itemsize
        self.slots: list[Slot] = []
        self.num_decayed = end = 0
        for name, param in ordered:
            spec = specs.get(name) or ShardSpec.whole(tuple(param.shape), 0, 1)
            self.slots.append(Slot(name, param, param.shape, end, decayed[name], spec))
            end += round_up(param.numel(), align)
            if decayed[name]:
                self.num_decayed = end
        self.ids = [id(slot.param) for slot in self.slots]
        self.numel = round_up(end, align * zero.parts)
        each = self.numel // zero.parts
        self.shard = range(zero.part * each, (zero.part + 1) * each)
        self._views: dict[int, list[Tensor]] = {}  # by the address of a buffer that lives as long as the run
        self._nothing: Tensor | None = None

        starts, stops = [*(slot.start for slot in self.slots), self.numel], [0, *(slot.stop for slot in self.slots)]
        self._padding = [range(stop, start) for start, stop in zip(starts, stops, strict=True) if start > stop]
        self._runs: list[int] = []  # lengths of padding and parameters, as they follow each other
        self._places: list[int] = []  # of the parameters among them
        for slot, stop in zip(self.slots, stops, strict=False):
            self._runs += [slot.start - stop] if slot.start > stop else []
            self._places.append(len(self._runs))
            self._runs.append(slot.numel)
        self._runs += [self.numel - stops[-1]] if self.numel > stops[-1] else []

    def zero_padding(self, flat: Tensor) -> None:
        """Zero the padding of a full buffer."""
        for part in self._padding:
            flat[part.start : part.stop].zero_()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the views of all slots in a full buffer: made together, they cost the host a third."""
        parts = flat.split_with_sizes(self._runs)
        return [
            parts[place] if len(slot.shape) == 1 else parts[place].view(slot.shape)
            for slot, place in zip(self.slots, self._places, strict=True)
        ]

    def filled(self, like: Tensor) -> Tensor:
        """Return a new full buffer with the parameters' values and zero padding."""
        flat = torch.zeros(self.numel, dtype=like.dtype, device=like.device)
        for slot, view in zip(self.slots, self.views(flat), strict=True):
            view.copy_(slot.param.detach())
        return flat

    def bind(self, flat: Tensor, *, lasting: bool = True) -> None:
        """Make the parameters views of a full buffer; with ``lasting`` (a buffer kept for the whole run) the views are cached."""
        views = self._views.get(flat.data_ptr()) if lasting else None
        if views is None:
            views = self.views(flat)
            if lasting:
                self._views[flat.data_ptr()] = views
        for slot, view in zip(self.slots, views, strict=True):
            slot.param.data = view

    def unbind(self) -> None:
        """Leave the parameters empty, so that using one is an error instead of reading other weights."""
        if not self.slots:
            return
        if self._nothing is None:
            self._nothing = self.slots[0].param.new_empty(0)
        for slot in self.slots:
            slot.param.data = self._nothing


class KeptGrads(NamedTuple):
    """Buffers of a unit's gradients."""

    grads: Tensor | None
    views: dict[int, Tensor]
    shard: Tensor | None


class FlatUnit:
    """Flat buffers of one unit.

    Frozen parameters (``requires_grad`` False) have no gradient and no state. They stay outside the buffers; only at
    stage 3 they are sharded too, in a buffer of their own.

    Args:
        name: name of the unit.
        named_params: its parameters.
        specs: tensor-parallel placement of the parameters, by name; a parameter without one is not split.
        zero: sharding.
        offload: keep master weights in host memory (``optim/offload.py``).

    Attributes:
        layout: layout of the buffers; ``slots``, ``numel``, ``num_decayed`` and ``shard`` are its attributes.
        params: [n], in the model's dtype; the model's parameters are views of it. None at stage 3.
        local_params: [n / ranks], this rank's range of the parameters.
        master: [n / ranks], what the optimizer updates: ``local_params`` itself, or an fp32 copy of 16-bit parameters;
            with ``offload`` always a copy, on the host.
        grads: [n], fp32 (fp64 for an fp64 model); allocated from the first gradient until the reduction, at stage 0
            until the next step.
        grad_views: its views for the parameters, by id, once ``grad_of`` has made them.
        grad_shard: [n / ranks], the step's reduced gradients.
        frozen, local_frozen: layout and local range of the frozen parameters, at stage 3; else None.
    """

    def __init__(
        self, name: str, named_params: Iterable[tuple[str, nn.Parameter]], specs: Mapping[str, ShardSpec] | None = None,
        zero: Zero = NOT_SHARDED, offload: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.zero = name, zero
        specs, held = specs or {}, list(named_params)
        trainable = [(n, p) for n, p in held if p.requires_grad]
        first = trainable or held
        like = first[0][1] if first else torch.empty(0)  # a frozen unit has buffers of length 0
        self.dtype, self.device = like.dtype, like.device
        for param_name, param in trainable:
            assert param.dtype == self.dtype, f"{param_name} is {param.dtype}, the unit {self.dtype}"
        self.is_16_bit = self.dtype in (torch.bfloat16, torch.float16)
        self.grad_dtype = wide = torch.float32 if self.is_16_bit else self.dtype
        self.layout = FlatLayout(trainable, specs, zero, self.dtype)
        self.params: Tensor | None
        self.params, self.local_params = self._keep(self.layout, like)
        self.frozen: FlatLayout | None = None
        self.local_frozen: Tensor | None = None
        if zero.stage == 3 and len(trainable) < len(held):
            frozen = [(n, p) for n, p in held if not p.requires_grad]
            for param_name, param in frozen:
                assert param.dtype == self.dtype, f"{param_name} is {param.dtype}, the unit {self.dtype}"
            self.frozen = FlatLayout(frozen, specs, zero, self.dtype)
            _, self.local_frozen = self._keep(self.frozen, like)
        for slot in self.slots:
            if self.is_16_bit and hasattr(slot.param, "grad_dtype"):
                slot.param.grad_dtype = wide  # what autograd leaves in p.grad (ops that are not ours) adds up in fp32 too
        self._grads: Tensor | None = None
        self.grad_views: dict[int, Tensor] = {}
        self._grad_shard: Tensor | None = None
        if offload:
            # in 16 bits what travels is the rounded copy (optim/offload.py), and pinned memory is scarce
            shape, host = self.local_params.shape, torch.device("cpu")
            pinned = not self.is_16_bit
            self.master = host_empty(shape, wide, self.device) if pinned else empty(shape, dtype=wide, device=host)
            self.master.copy_(self.local_params)
        else:
            self.master = self.local_params.to(wide) if self.is_16_bit else self.local_params

    def _keep(self, layout: FlatLayout, like: Tensor) -> tuple[Tensor | None, Tensor]:
        whole = layout.filled(like)
        if self.zero.stage == 3:
            mine = whole[layout.shard.start : layout.shard.stop].clone()
            layout.unbind()
            return None, mine
        layout.bind(whole)
        return whole, whole[layout.shard.start : layout.shard.stop]

    @property
    def slots(self) -> list[Slot]:
        """Places of the parameters."""
        return self.layout.slots

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return self.layout.numel

    @property
    def num_decayed(self) -> int:
        """Number of elements with weight decay; they come first."""
        return self.layout.num_decayed

    @property
    def shard(self) -> range:
        """Range of the flat buffer that this rank keeps."""
        return self.layout.shard

    @property
    def grads(self) -> Tensor:
        """Flat gradient buffer; taken at the first use."""
        if self._grads is None:
            self._grads = empty((self.numel,), dtype=self.grad_dtype, device=self.device)
            self.layout.zero_padding(self._grads)
        return self._grads

    def grad_of(self, key: int) -> Tensor:
        """Return the gradient of a parameter, a view of the flat buffer, by the parameter's id."""
        if not self.grad_views:
            self.grad_views = dict(zip(self.layout.ids, self.layout.views(self.grads), strict=True))
        return self.grad_views[key]

    @property
    def grad_shard(self) -> Tensor:
        """This rank's range of the gradients, after their reduction."""
        if self.zero.stage == 0:
            return self.grads
        assert self._grad_shard is not None, f"the gradients of {self.name} have not been reduced"
        return self._grad_shard

    def add_to_shard(self, reduced: Tensor) -> None:
        """Accumulate newly reduced gradients into ``grad_shard``, and free the full gradients."""
        self._grads, self.grad_views = None, {}
        if self._grad_shard is None:
            self._grad_shard = reduced
        else:
            self._grad_shard.add_(reduced)

    def release_grads(self) -> None:
        """Free the gradients.

        So a step holds activations at the end of forward and gradients at the end of backward, which frees the former
        while it produces the latter, instead of both at once.
        """
        self._grads, self.grad_views, self._grad_shard = None, {}, None

    def kept_grads(self) -> KeptGrads:
        """Return the buffers of the gradients, for ``put_grads``: a captured graph writes into them in every step."""
        return KeptGrads(self._grads, self.grad_views, self._grad_shard)

    def put_grads(self, kept: KeptGrads) -> None:
        """Take back buffers, with what has been written into them since."""
        self._grads, self.grad_views, self._grad_shard = kept

    def gathered(self, flat: Tensor) -> Tensor:
        """Gather all ranks' ranges into one full buffer. Collective."""
        return all_gather_async(flat, self.zero.group).wait() if self.zero.stage > 0 else flat

    def counted(self, flat: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """Yield (slot, part of ``flat``, this rank's range) to add to a sum over all ranks, in which each element must count once."""
        for slot in self.slots:
            for elements in slot.counted():
                part = within(elements, self.shard)
                if part:
                    yield slot, flat[part.start : part.stop]

    def refresh_params(self) -> None:
        """Copy the master weights, rounded, into this rank's range of 16-bit parameters."""
        if self.is_16_bit:
            self.local_params.copy_(self.master)

    def refresh_master(self) -> None:
        """Copy the model's parameters to the master weights (after loading a checkpoint without master weights)."""
        if self.master is not self.local_params:
            self.master.copy_(self.local_params)


def refresh_params(units: Sequence[FlatUnit]) -> None:
    """Do what ``FlatUnit.refresh_params`` does for several units, in one launch."""
    rounded = [unit for unit in units if unit.is_16_bit]
    if rounded:
        torch._foreach_copy_([unit.local_params for unit in rounded], [unit.master for unit in rounded])


def within(elements: range, shard: range) -> range:
    """Return the intersection of the two ranges, relative to the start of ``shard``."""
    start, stop = max(elements.start, shard.start), min(elements.stop, shard.stop)
    return range(start - shard.start, max(start, stop) - shard.start)


def squared_norm(*parts: Tensor) -> Tensor:
    """Return the sum of squares of flat tensors as an fp64 scalar; sums of some thousand elements keep fp32 input accurate to about 1e-7.

    fp32 elements beyond 1e17 may give infinity: gradients that large count as non-finite. One launch for each tensor, for some of them
    where Triton's kernels are in use, and few for all of them together.

    Raises:
        ValueError: there is no tensor.
    """
    if not parts:
        raise ValueError("a sum of squares needs at least one tensor, which says on which device it is")
    if is_fused(parts[0]):
        from megatron_sp.ops.kernels import squares

        if all(map(squares.takes, parts)):
            return squares.squares(parts).sum(dtype=torch.float64)
    block, norms = 4096, list[Tensor]()
    for x in parts:
        whole = x.numel() // block * block
        if whole:
            norms.append(torch.linalg.vector_norm(x[:whole].view(-1, block), dim=1))
        if whole < x.numel():
            norms.append(torch.linalg.vector_norm(x[whole:]).view(1))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=parts[0].device)
    return torch.cat(norms).double().square_().sum()
