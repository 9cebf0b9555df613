"""Correspondence between regions of our tensors and regions of theirs: one list that serves both directions.

Every weight layout of Megatron, DeepSpeed and Hugging Face is a rearrangement of ours, without any arithmetic. So a
format is described by ``Copy`` records, each of which pairs a region of one of our tensors with the region of one of
theirs that holds the same numbers. Reading gathers our tensors from theirs, writing gathers theirs from ours, with the
same list; ``Correspondence.check`` verifies before a byte is read that the list covers every element of either side
exactly once.

    ours                                  theirs
    View("...linear_qkv.weight",          View("...q_proj.weight",
         (g, n/g + 2, d, h),                   (g, n/g, d, h))
         [:, :n/g])

Tensors are processed one at a time: memory holds the tensor being made, and one of those it is made from.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_sp.checkpoint.stream import TensorInfo
from megatron_sp.models.experts import stored_dtype
from megatron_sp.ops.allocator import empty
from megatron_sp.utils.errors import CheckpointError

Index = tuple[slice | int, ...]


class TensorStore(Protocol):
    """Tensors by name, each read on request."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return shape and dtype of all tensors, by name."""
        ...

    def read(self, name: str) -> Tensor:
        """Read a tensor into CPU memory; the caller must not modify it.

        Raises:
            CheckpointError: it cannot be read.
        """
        ...


@dataclass(frozen=True)
class View:
    """A region of a tensor."""

    name: str
    shape: tuple[int, ...] | None = None  # shape that the tensor is viewed as; None: its own shape
    index: Index = ()  # index that is applied to this view
    order: tuple[int, ...] | None = None  # permutation of the dims of the result
    stored: tuple[int, ...] | None = None  # the tensor's own shape, where it cannot be derived from the region

    def of(self, tensor: Tensor) -> Tensor:
        if self.shape is not None:
            tensor = tensor.view(self.shape)
        if self.index:
            tensor = tensor[self.index]
        return tensor if self.order is None else tensor.permute(self.order)

    def own_shape(self, region: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensor's own shape, given the shape of the region."""
        if self.stored is not None:
            return self.stored
        assert self.shape is None and not self.index, f"{self.name}: its own shape is unknown"
        if self.order is None:
            return region
        return tuple(region[self.order.index(dim)] for dim in range(len(region)))

    @property
    def is_whole(self) -> bool:
        """True if the region is the whole tensor, unchanged."""
        return self.shape is None and not self.index and self.order is None


class Copy(NamedTuple):
    """Two regions with equal shapes and contents."""

    ours: View
    theirs: View
    # another ``Copy`` has the same region of ours already: this one is written, but only compared when reading
    replica: bool = False


@dataclass(frozen=True)
class Correspondence:
    """Correspondence between our tensors and those of another format."""

    ours: dict[str, tuple[int, ...]]
    theirs: dict[str, tuple[int, ...]]
    copies: list[Copy]  # the pairs of equal regions
    # by name of theirs, the number of elements without counterpart: zero when written, ignored when read
    filled: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, ours: dict[str, tuple[int, ...]], copies: Iterable[Copy], filled: dict[str, int] | None = None
    ) -> Correspondence:
        """Make a checked correspondence, with the shapes of theirs derived from the copies."""
        copies = list(copies)
        theirs: dict[str, tuple[int, ...]] = {}
        for copy in copies:
            shape = copy.theirs.own_shape(_shape_of(copy.ours, ours))
            other = theirs.setdefault(copy.theirs.name, shape)
            assert other == shape, f"{copy.theirs.name}: {shape} and {other}"
        correspondence = cls(ours, theirs, copies, filled or {})
        correspondence.check()
        return correspondence

    def check(self) -> None:
        """Check that the copies cover each tensor of either side exactly once.

        Raises:
            AssertionError: they do not; the message names the tensor.
        """
        ours, theirs = (defaultdict[str, int](int) for _ in range(2))
        for copy in self.copies:
            a, b = (_shape_of(view, shapes) for view, shapes in ((copy.ours, self.ours), (copy.theirs, self.theirs)))
            assert a == b, f"{copy.ours.name} {a} against {copy.theirs.name} {b}"
            ours[copy.ours.name] += 0 if copy.replica else math.prod(a)
            theirs[copy.theirs.name] += math.prod(b)
        for name, shape in self.ours.items():
            assert ours[name] == math.prod(shape), f"{name} {shape}: {ours[name]} elements are covered"
        for name, shape in self.theirs.items():
            covered = theirs[name] + self.filled.get(name, 0)
            assert covered == math.prod(shape), f"{name} {shape}: {covered} elements are covered"


def _shape_of(view: View, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    assert view.name in shapes, f"{view.name} is not in the list of tensors"
    return tuple(view.of(torch.empty(shapes[view.name], device="meta")).shape)


def assemble(
    shape: tuple[int, ...], dtype: torch.dtype, parts: Iterable[tuple[View, View]], read: Callable[[str], Tensor]
) -> Tensor:
    """Make a tensor from regions of other tensors.

    Args:
        shape, dtype: those of the new tensor; elements that no part covers are zero.
        parts: pairs (region of the new tensor, region of another).
        read: returns another tensor by name; all parts of one are copied together, so each is read once and then
            released.
    """
    parts = list(parts)
    if len(parts) == 1 and parts[0][0].is_whole and parts[0][1].is_whole:
        found = read(parts[0][1].name)
        return found if found.dtype == dtype else found.to(dtype)
    result = empty(torch.Size(shape), dtype=dtype, device=torch.device("cpu")).zero_()
    by_source: dict[str, list[tuple[View, View]]] = defaultdict(list)
    for to, source in parts:
        by_source[source.name].append((to, source))
    for name, group in by_source.items():
        tensor = read(name)
        for to, source in group:
            to.of(result).copy_(source.of(tensor))
        del tensor
    return result


class Gathered:
    """Our tensors, gathered from a store of theirs on request (a ``TensorStore``)."""

    def __init__(self, correspondence: Correspondence, store: TensorStore) -> None:
        self._store, stored, self._tensors = store, store.tensors(), dict[str, TensorInfo]()
        self._parts: dict[str, list[Copy]] = {name: [] for name in correspondence.ours}
        for copy in correspondence.copies:
            self._parts[copy.ours.name].append(copy)
        for name, shape in correspondence.ours.items():
            dtypes = {stored[copy.theirs.name].dtype for copy in self._parts[name]}
            self._tensors[name] = TensorInfo(shape, widest(dtypes))

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        """Read a tensor into CPU memory and compare its replicas."""
        info, copies = self._tensors[name], self._parts[name]
        gathered = assemble(
            info.shape, info.dtype, [(c.ours, c.theirs) for c in copies if not c.replica], self._store.read
        )
        for copy in copies:
            if not copy.replica:
                continue
            replica = copy.theirs.of(self._store.read(copy.theirs.name))
            if not is_same(copy.ours.of(gathered).to(replica.dtype), replica):
                raise CheckpointError(f"{copy.theirs.name} must be the same on every rank that holds it, and differs"
                                      " from that of another: the ranks of this checkpoint have drifted apart, or its"
                                      " files are of different steps")  # fmt: skip
        return gathered


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether all elements are equal; 0 equals -0, and NaN equals NaN."""
    return bool(torch.equal(a.contiguous(), b.contiguous())) or bool(((a == b) | ((a != a) & (b != b))).all())


class LastRead:
    """A store that caches the tensor read last, for further reads of its parts (a ``TensorStore``)."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._last: tuple[str, Tensor] | None = None

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._store.tensors()

    def read(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # free it before the next one is read
            self._last = (name, self._store.read(name))
        return self._last[1]

    def forget(self) -> None:
        self._last = None


class Scattered:
    """Their tensors, made from a store of ours on request (a ``TensorStore``).

    One of ours is cached, as q, k, v come from the same one: let several ``Scattered`` share a ``LastRead``.
    """

    def __init__(self, correspondence: Correspondence, store: TensorStore, dtype: torch.dtype | None = None) -> None:
        self._store = store if isinstance(store, LastRead) else LastRead(store)
        stored, self._tensors = store.tensors(), dict[str, TensorInfo]()
        self._parts: dict[str, list[Copy]] = {name: [] for name in correspondence.theirs}
        for copy in correspondence.copies:
            self._parts[copy.theirs.name].append(copy)
        for name, shape in correspondence.theirs.items():
            names = {copy.ours.name for copy in self._parts[name]}
            dtypes = {stored_dtype(ours, stored[ours].dtype, dtype) for ours in names}
            self._tensors[name] = TensorInfo(shape, widest(dtypes))

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        info = self._tensors[name]
        return assemble(info.shape, info.dtype, [(c.theirs, c.ours) for c in self._parts[name]], self._store.read)

    def forget(self) -> None:
        """Release the cached tensor; for callers that read from several ``Scattered`` in turn."""
        self._store.forget()


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype that represents the numbers of all; fp32 for fp16 with bf16, and for none."""
    common: torch.dtype | None = None
    for dtype in dtypes:
        common = dtype if common is None else torch.promote_types(common, dtype)
    return torch.float32 if common is None else common
