"""Flat buffers: parameters, gradients and optimizer state of a unit in one tensor each (ZeRO, arXiv:1910.02054).

One collective, one norm and one fused kernel handle a whole unit: parameters and gradients are views of two buffers.
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
from megatron_sp.ops.allocator import empty, host_empty
from megatron_sp.ops.kernels.launch import is_fused
from megatron_sp.utils.numbers import round_up

_ALIGN_BYTES = 64  # a vector register: the fused optimizer rounds elements after the last full one differently


# stage 0   every rank has everything
# stage 1   master weights and optimizer state: this rank's range; parameters and, until reduced, gradients: full
# stage 2   the same; gradients are reduced to the ranges in every micro-batch, so that few units have full ones
# stage 3   parameters too: a rank keeps its range; ``optim/weights.py`` gathers a unit for as long as it is used
@dataclass(frozen=True)
class Zero:
    """ZeRO stage, 0 to 3, and the group over which units are sharded: rank r keeps the r-th range of every unit."""

    stage: int = 0
    group: Group = field(default=SINGLE_RANK)

    def of(self, alike: str) -> Zero:
        # of a unit, by its ``Unit.alike``. "whole" are small parameters of all blocks, and a table that the ends of a
        # pipeline use at different times: a gather in every micro-batch would have one of them wait for the other
        return replace(self, stage=min(self.stage, 1)) if alike == "whole" else self


NOT_SHARDED = Zero()


@dataclass(frozen=True)
class Slot:
    """A parameter's elements in the flat buffers of its unit."""

    name: str
    param: nn.Parameter
    shape: torch.Size  # the parameter itself may be away (stage 3)
    start: int
    stop: int
    decayed: bool
    spec: ShardSpec

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.shape)


def is_decayed(param: Tensor, spec: ShardSpec | None = None) -> bool:
    """Return whether a parameter has weight decay: matrices do, stacked or not."""
    return param.ndim - (0 if spec is None else spec.stacked) >= 2


class FlatLayout:
    """Places of parameters in a flat buffer."""

    def __init__(
        self, params: list[tuple[str, nn.Parameter]], specs: Mapping[str, ShardSpec], zero: Zero, dtype: torch.dtype
    ) -> None:  # fmt: skip
        decayed = {name: is_decayed(param, specs.get(name)) for name, param in params}
        # the optimizer updates those with weight decay, which come first, in one slice, the others in another
        ordered = [(n, p) for n, p in params if decayed[n]] + [(n, p) for n, p in params if not decayed[n]]
        align = _ALIGN_BYTES // dtype.itemsize
        self.slots: list[Slot] = []
        self.num_decayed = end = 0
        for name, param in ordered:
            spec = specs.get(name) or ShardSpec.whole(tuple(param.shape), 0, 1)
            self.slots.append(Slot(name, param, param.shape, end, end + param.numel(), decayed[name], spec))
            end += round_up(param.numel(), align)
            if decayed[name]:
                self.num_decayed = end
        self.ids = [id(slot.param) for slot in self.slots]
        num_shards, rank = (zero.group.size(), zero.group.rank()) if zero.stage > 0 else (1, 0)
        self.numel = round_up(end, align * num_shards)  # ranges of the same size; the padding stays zero
        shard_size = self.numel // num_shards
        self.shard = range(rank * shard_size, (rank + 1) * shard_size)
        self._views: dict[int, list[Tensor]] = {}  # by the address of a buffer that lives as long as the run
        self._nothing: Tensor | None = None

        self.padding: list[range] = []
        self._runs: list[int] = []  # lengths of padding and parameters, as they follow each other
        self._places: list[int] = []  # indices of the parameters among them
        starts, stops = [*(slot.start for slot in self.slots), self.numel], [0, *(slot.stop for slot in self.slots)]
        for index, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            if start > stop:
                self.padding.append(range(stop, start))
                self._runs.append(start - stop)
            if index < len(self.slots):
                self._places.append(len(self._runs))
                self._runs.append(self.slots[index].stop - start)

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split_with_sizes(self._runs)  # made together, they cost the host a third
        return [
            parts[place] if len(slot.shape) == 1 else parts[place].view(slot.shape)
            for slot, place in zip(self.slots, self._places, strict=True)
        ]

    def bind(self, flat: Tensor, *, lasting: bool = True) -> None:
        # if the buffer is kept for the whole run, the views are cached
        views = self._views.get(flat.data_ptr()) if lasting else None
        if views is None:
            views = self.views(flat)
            if lasting:
                self._views[flat.data_ptr()] = views
        for slot, view in zip(self.slots, views, strict=True):
            slot.param.data = view

    def unbind(self) -> None:
        # so that using one is an error instead of reading other weights
        if not self.slots:
            return
        if self._nothing is None:
            self._nothing = self.slots[0].param.new_empty(0)
        for slot in self.slots:
            slot.param.data = self._nothing


class KeptGrads(NamedTuple):
    """A unit's gradient buffers, for a captured graph."""

    grads: Tensor | None
    views: dict[int, Tensor]
    shard: Tensor | None


class FlatUnit:
    """Flat buffers of one unit: parameters, gradients, and the master weights that the optimizer updates.

    Frozen parameters stay outside; only at stage 3 they are sharded too, in a buffer of their own.
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
        sharded = held if zero.stage == 3 else trainable
        for param_name, param in sharded:
            assert param.dtype == self.dtype, f"{param_name} is {param.dtype}, the unit {self.dtype}"
        self.is_16_bit = self.dtype in (torch.bfloat16, torch.float16)
        self.grad_dtype = wide = torch.float32 if self.is_16_bit else self.dtype
        self.layout = layout = FlatLayout(trainable, specs, zero, self.dtype)
        self.slots, self.numel = layout.slots, layout.numel
        self.num_decayed, self.shard = layout.num_decayed, layout.shard
        # [n] in the model's dtype, of which the model's parameters are views, and this rank's range [n / ranks];
        # at stage 3 the range alone
        self.params: Tensor | None
        self.params, self.local_params = self._keep(layout, like)
        self.frozen: FlatLayout | None = None
        self.local_frozen: Tensor | None = None
        if zero.stage == 3 and len(trainable) < len(held):
            self.frozen = FlatLayout([(n, p) for n, p in held if not p.requires_grad], specs, zero, self.dtype)
            _, self.local_frozen = self._keep(self.frozen, like)
        for slot in self.slots:
            if self.is_16_bit and hasattr(slot.param, "grad_dtype"):
                slot.param.grad_dtype = wide  # what autograd leaves in p.grad (foreign ops) adds up in fp32 too
        self._grads: Tensor | None = None
        self.grad_views: dict[int, Tensor] = {}  # by the parameter's id, once ``grad_of`` has made them
        self._grad_shard: Tensor | None = None
        # what the optimizer updates, [n / ranks]: the parameters, or of 16-bit ones an fp32 copy
        self.master = self.local_params.to(wide) if self.is_16_bit and not offload else self.local_params
        if offload:
            shape, host = self.local_params.shape, torch.device("cpu")
            if self.is_16_bit:  # what travels is the rounded copy (optim/offload.py), and pinned memory is scarce
                self.master = empty(shape, dtype=wide, device=host)
            else:
                self.master = host_empty(shape, wide, self.device)
            self.master.copy_(self.local_params)

    def _keep(self, layout: FlatLayout, like: Tensor) -> tuple[Tensor | None, Tensor]:
        flat = torch.zeros(layout.numel, dtype=like.dtype, device=like.device)
        for slot, view in zip(layout.slots, layout.views(flat), strict=True):
            view.copy_(slot.param.detach())
        shard = flat[layout.shard.start : layout.shard.stop]
        if self.zero.stage == 3:
            layout.unbind()
            return None, shard.clone()  # a view would keep the whole buffer
        layout.bind(flat)
        return flat, shard

    @property
    def grads(self) -> Tensor:
        # fp32 or wider; allocated from the first gradient until the reduction
        if self._grads is None:
            self._grads = empty((self.numel,), dtype=self.grad_dtype, device=self.device)
            for part in self.layout.padding:  # it goes into the norm, and the optimizer updates it
                self._grads[part.start : part.stop].zero_()
        return self._grads

    def grad_of(self, key: int) -> Tensor:
        # a view of the flat buffer, by the parameter's id
        if not self.grad_views:
            self.grad_views = dict(zip(self.layout.ids, self.layout.views(self.grads), strict=True))
        return self.grad_views[key]

    @property
    def grad_shard(self) -> Tensor:
        # this rank's range, after the reduction
        if self.zero.stage == 0:
            return self.grads
        assert self._grad_shard is not None, f"the gradients of {self.name} have not been reduced"
        return self._grad_shard

    def add_to_shard(self, reduced: Tensor) -> None:
        self._grads, self.grad_views = None, {}
        if self._grad_shard is None:
            self._grad_shard = reduced
        else:
            self._grad_shard.add_(reduced)

    def kept_grads(self) -> KeptGrads:
        return KeptGrads(self._grads, self.grad_views, self._grad_shard)

    def put_grads(self, kept: KeptGrads | None = None) -> None:
        # take back buffers, with what has been written into them since, or free them
        self._grads, self.grad_views, self._grad_shard = kept or (None, {}, None)

    def gathered(self, flat: Tensor) -> Tensor:
        """Gather all ranks' ranges. Collective."""
        return all_gather_async(flat, self.zero.group).wait() if self.zero.stage > 0 else flat

    def counted(self, flat: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """Yield (slot, part of ``flat``) to add to a sum over all ranks, in which each element counts on one rank."""
        for slot in self.slots:
            row = slot.shape[1:].numel()
            for first, length in slot.spec.counted:
                elements = range(slot.start, slot.stop)
                if slot.shape and slot.spec.dim == 0:  # along another dim it is always all of it
                    elements = elements[first * row : (first + length) * row]
                part = within(elements, self.shard)
                if part:
                    yield slot, flat[part.start : part.stop]

    def refresh_master(self) -> None:
        # after loading a checkpoint without master weights
        if self.master is not self.local_params:
            self.master.copy_(self.local_params)


def refresh_params(units: Sequence[FlatUnit]) -> None:
    """Round master weights into this rank's ranges of 16-bit parameters, in one launch."""
    rounded = [unit for unit in units if unit.is_16_bit]
    if rounded:
        torch._foreach_copy_([unit.local_params for unit in rounded], [unit.master for unit in rounded])


def within(elements: range, shard: range) -> range:
    """Intersect the two ranges, relative to the start of ``shard``."""
    start, stop = max(elements.start, shard.start), min(elements.stop, shard.stop)
    return range(start - shard.start, max(start, stop) - shard.start)


def squared_norm(*parts: Tensor) -> Tensor:
    """Sum the squares of flat tensors: an fp64 scalar, accurate to 1e-7; fp32 beyond 1e17 may give infinity."""
    if not parts:
        raise ValueError("a sum of squares needs at least one tensor, which says on which device it is")
    if is_fused(parts[0]):
        from megatron_sp.ops.kernels import squares

        if all(map(squares.takes, parts)):
            return squares.squares(parts).sum(dtype=torch.float64)
    # sums of some thousand elements keep fp32 accurate; fp64 for all would be slow on a GPU. One launch for each tensor
    block, norms = 4096, list[Tensor]()
    for x in parts:
        full = x.numel() // block * block
        if full:
            norms.append(torch.linalg.vector_norm(x[:full].view(-1, block), dim=1))
        if full < x.numel():
            norms.append(torch.linalg.vector_norm(x[full:]).view(1))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=parts[0].device)
    return torch.cat(norms).double().square_().sum()
