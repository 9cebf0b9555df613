"""Correspondence between regions of our tensors and regions of theirs: one list that serves both directions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_sp.checkpoint.stream import TensorInfo
from megatron_sp.models.experts import stored_dtype
from megatron_sp.ops.allocator import empty
from megatron_sp.utils.errors import CheckpointError

# A format is a list of ``Copy``: a region of one of our tensors, and the region of one of theirs that holds the same
# numbers, for every layout is a rearrangement of ours without any arithmetic. Reading gathers our tensors from theirs,
# writing gathers theirs from ours, with the same list. Memory holds the tensor being made, and one it is made from.
#
#     ours                                  theirs
#     View("...linear_qkv.weight",          View("...q_proj.weight",
#          (g, n/g + 2, d, h),                   (g, n/g, d, h))
#          [:, :n/g])
Index = tuple[slice | int, ...]
Shape = tuple[int, ...]


class TensorStore(Protocol):
    """Tensors by name, each read into CPU memory on request; not to be modified."""

    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def read(self, name: str) -> Tensor: ...


class Store:
    """A ``TensorStore`` made of descriptions and a function."""

    def __init__(self, described: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> None:
        self._described, self._read = described, read

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._described

    def read(self, name: str) -> Tensor:
        return self._read(name)


@dataclass(frozen=True)
class View:
    """A region of a tensor."""

    name: str
    shape: Shape | None = None  # shape that the tensor is viewed as; None: its own shape
    index: Index = ()  # index that is applied to this view
    order: tuple[int, ...] | None = None  # permutation of the dims of the result
    stored: Shape | None = None  # the tensor's own shape, where it cannot be derived from the region

    def of(self, tensor: Tensor) -> Tensor:
        """Return the region, which shares the tensor's memory."""
        if self.shape is not None:
            tensor = tensor.view(self.shape)
        if self.index:
            tensor = tensor[self.index]
        return tensor if self.order is None else tensor.permute(self.order)


class Copy(NamedTuple):
    """Two regions with equal shapes and contents."""

    ours: View
    theirs: View
    # another ``Copy`` has the same region of ours already: this one is written, but only compared when reading
    replica: bool = False


@dataclass(frozen=True)
class Correspondence:
    """Our tensors, theirs, and the copies between them."""

    ours: dict[str, Shape]
    theirs: dict[str, Shape]
    copies: list[Copy]  # the pairs of equal regions

    @classmethod
    def of(
        cls, ours: dict[str, Shape], copies: Iterable[Copy], filled: Mapping[str, int] | None = None
    ) -> Correspondence:
        """Make a correspondence; AssertionError unless the copies cover every tensor exactly once."""
        # the shapes of theirs follow from the copies; ``filled`` is the number of elements of theirs without
        # counterpart, by name: zero when written, ignored when read
        copies, theirs = list(copies), dict[str, Shape]()
        covered: dict[tuple[str, str], int] = defaultdict(int, {("theirs", n): k for n, k in (filled or {}).items()})
        for copy in copies:
            assert copy.ours.name in ours, f"{copy.ours.name} is not in the list of tensors"
            region, view = _shape_of(copy.ours, ours[copy.ours.name]), copy.theirs
            shape = view.stored
            if shape is None:  # the region is then the whole tensor, perhaps with its dims in another order
                assert view.shape is None and not view.index, f"{view.name}: its own shape is unknown"
                shape = region if view.order is None else tuple(region[view.order.index(d)] for d in range(len(region)))
            other = theirs.setdefault(view.name, shape)
            assert other == shape, f"{view.name}: {shape} and {other}"
            facing = _shape_of(view, shape)
            assert region == facing, f"{copy.ours.name} {region} against {view.name} {facing}"
            covered["ours", copy.ours.name] += 0 if copy.replica else math.prod(region)
            covered["theirs", view.name] += math.prod(region)
        for side, shapes in (("ours", ours), ("theirs", theirs)):
            for name, shape in shapes.items():
                count = covered[side, name]
                assert count == math.prod(shape), f"{name} {shape}: {count} elements are covered"
        return cls(ours, theirs, copies)


def _shape_of(view: View, shape: Shape) -> Shape:
    return tuple(view.of(torch.empty(shape, device="meta")).shape)


def assemble(
    shape: Shape, dtype: torch.dtype, parts: Iterable[tuple[View, View]], read: Callable[[str], Tensor]
) -> Tensor:
    """Make a tensor from pairs (region of it, region of another one); the rest is zero."""
    parts = list(parts)
    if len(parts) == 1 and parts[0] == (View(parts[0][0].name), View(parts[0][1].name)):  # a whole one is not copied
        return read(parts[0][1].name).to(dtype)
    result = empty(torch.Size(shape), dtype=dtype, device=torch.device("cpu")).zero_()
    by_source: dict[str, list[tuple[View, View]]] = defaultdict(list)
    for to, source in parts:
        by_source[source.name].append((to, source))
    for name, group in by_source.items():
        tensor = read(name)
        for to, source in group:
            to.of(result).copy_(source.of(tensor))
        del tensor  # released before the next one is read
    return result


class Gathered(Store):
    """Our tensors, gathered from a store of theirs; replicas are compared."""

    def __init__(self, correspondence: Correspondence, store: TensorStore) -> None:
        described, stored = dict[str, TensorInfo](), store.tensors()
        self._source, self._copies = store, {name: list[Copy]() for name in correspondence.ours}
        for copy in correspondence.copies:
            self._copies[copy.ours.name].append(copy)
        for name, shape in correspondence.ours.items():
            dtypes = {stored[copy.theirs.name].dtype for copy in self._copies[name]}
            described[name] = TensorInfo(shape, widest(dtypes))
        super().__init__(described, self._gather)

    def _gather(self, name: str) -> Tensor:
        info, copies = self._described[name], self._copies[name]
        parts = [(copy.ours, copy.theirs) for copy in copies if not copy.replica]
        gathered = assemble(info.shape, info.dtype, parts, self._source.read)
        for copy in copies:
            if not copy.replica:
                continue
            replica = copy.theirs.of(self._source.read(copy.theirs.name))
            if not is_same(copy.ours.of(gathered).to(replica.dtype), replica):
                raise CheckpointError(f"{copy.theirs.name} must be the same on every rank that holds it, and differs"
                                      " from that of another: the ranks of this checkpoint have drifted apart, or its"
                                      " files are of different steps")  # fmt: skip
        return gathered


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether all elements are equal, also NaN and NaN."""
    return bool(torch.equal(a.contiguous(), b.contiguous())) or bool(((a == b) | ((a != a) & (b != b))).all())


class LastRead(Store):
    """A store that keeps the tensor read last."""

    def __init__(self, store: TensorStore) -> None:
        super().__init__(store.tensors(), store.read)
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # free it before the next one is read
            self._last = (name, super().read(name))
        return self._last[1]

    def forget(self) -> None:
        self._last = None


class Scattered(Store):
    """Their tensors, made from a store of ours."""

    def __init__(self, correspondence: Correspondence, store: TensorStore, dtype: torch.dtype | None = None) -> None:
        # q, k, v come from the same one of ours: several of these may share a cache
        source = store if isinstance(store, LastRead) else LastRead(store)
        self.forget = source.forget
        described, stored = dict[str, TensorInfo](), store.tensors()
        copies: dict[str, list[Copy]] = {name: [] for name in correspondence.theirs}
        for copy in correspondence.copies:
            copies[copy.theirs.name].append(copy)
        for name, shape in correspondence.theirs.items():
            dtypes = {stored_dtype(c.ours.name, stored[c.ours.name].dtype, dtype) for c in copies[name]}
            described[name] = TensorInfo(shape, widest(dtypes))

        def make(name: str) -> Tensor:
            info = described[name]
            return assemble(info.shape, info.dtype, [(c.theirs, c.ours) for c in copies[name]], source.read)

        super().__init__(described, make)


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype for the numbers of all, fp32 for none."""
    common: torch.dtype | None = None
    for dtype in dtypes:
        common = dtype if common is None else torch.promote_types(common, dtype)
    return torch.float32 if common is None else common
