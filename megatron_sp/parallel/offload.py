"""Offload of tensors that blocks save for backward to host memory (--offload-activations)."""

#     forward     block i computes    | block i+1 computes                   | block i+2 computes
#     copies                          | tensors of block i to the host       | (device memory of block i is free)
#     backward    block i+1           | block i
#     copies      tensors of block i to the device | tensors of block i-1 to the device
#
# At most one block is being copied out, and one in. The last block stays on the device, as backward begins with it.
#
# Storages are moved, not tensors. Saved-tensor hooks record what autograd saves while a block runs, and return the same
# memory; after the block each recorded storage is copied out and freed (``resize_``), and restored before the block's
# backward. So all tensors on it are valid again, also views, tensors saved twice, or those that a function of ours
# holds outside autograd, and a storage moves once. Never moved: parameters, views of flat buffers, tensors that the
# caller declares as shared by the blocks, and a block's output, which the next one needs.
#
# On a GPU the copies use a stream of their own and pinned memory; copies and computation wait for each other through
# events, never on the host, and memory is freed in the order of the compute stream, so ``record_stream`` is not needed.
# On the CPU the copies are made at the same points, and no memory is saved.

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.allocator import host_empty


class ActivationOffload:
    """Host buffers for the activations of one model, and the stream for the copies; reused in every step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[int, list[Tensor]] = {}
        self.num_bytes = 0  # of host memory in all

    def take(self, num_bytes: int) -> Tensor:
        # copies queued on the stream may still use the buffer's earlier contents
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        self.num_bytes += num_bytes
        return host_empty((num_bytes,), torch.uint8, self.device)

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            self._free.setdefault(buffer.numel(), []).append(buffer)

    def forward_pass(self, shared: Iterable[Tensor]) -> OffloadPass:
        """Return the offload of one forward and backward pass; ``shared`` tensors are never moved."""
        return OffloadPass(self, shared)


class _Moved:
    # storages of one block, and the state of their transfer: here, leaving, away, coming, back
    def __init__(self, pool: ActivationOffload, storages: list[torch.UntypedStorage]) -> None:
        self.pool, self.storages = pool, storages
        self.sizes = [storage.nbytes() for storage in storages]
        self.host = [pool.take(size) for size in self.sizes]
        self.event: torch.cuda.Event | None = None
        self.state = "here"
        # a forward pass whose backward pass never comes
        self._finalizer = weakref.finalize(self, pool.give_back, self.host)
        self._finalizer.atexit = False

    def start_out(self) -> None:
        # start the copy to the host, after all work queued on the current stream
        self._copy([(_bytes_of(storage), host) for storage, host in zip(self.storages, self.host, strict=True)])
        self.state = "leaving"

    def finish_out(self) -> None:
        self._join()
        for storage in self.storages:
            if storage.resizable():
                storage.resize_(0)
        self.state = "away"

    def start_in(self) -> None:
        if self.state == "leaving":
            self.finish_out()
        assert self.state == "away"
        for storage, size in zip(self.storages, self.sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)
        self._copy([(host, _bytes_of(storage)) for storage, host in zip(self.storages, self.host, strict=True)])
        self.state = "coming"

    def finish_in(self) -> None:
        self._join()
        self.state, self.storages = "back", []
        self._finalizer()

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        stream = self.pool.stream
        if stream is None:
            for source, to in pairs:
                to.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(stream):
            for source, to in pairs:
                to.copy_(source, non_blocking=True)
            self.event = stream.record_event()

    def _join(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream(self.pool.device).wait_event(self.event)
            self.event = None


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    # the whole storage as a new uint8 tensor, so that autograd does not notice writes to it as changes of saved tensors
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


class OffloadPass:
    """Offload of the blocks of one forward pass, in order."""

    def __init__(self, pool: ActivationOffload, shared: Iterable[Tensor]) -> None:
        self._pool = pool
        self._shared = {tensor.untyped_storage()._cdata for tensor in shared}
        self.blocks: list[_Moved | None] = []

    def run(
        self, block: Callable[[Tensor], Tensor], x: Tensor, parameters: Callable[[], Iterable[Tensor]], *, last: bool
    ) -> Tensor:
        """Run ``block(x)``, and offload what it saves, unless it is the last one.

        ``parameters`` is called after the block, when its parameters are still in the memory that it has read.
        """
        index = len(self.blocks)
        if last:
            y = block(x)
            self.blocks.append(None)
        else:
            with _seeing() as seen:
                y = block(x)
            stays = self._shared | {tensor.untyped_storage()._cdata for tensor in (*parameters(), y)}
            storages = [storage for key, storage in seen.items() if key not in stays]
            seen.clear()  # the hooks live as long as what they packed
            self.blocks.append(_Moved(self._pool, storages) if storages else None)
            del storages
        if index > 0 and (before := self.blocks[index - 1]) is not None:
            before.finish_out()
        if (moving := self.blocks[index]) is not None:
            moving.start_out()
        return _BeforeBackward.apply(y, self.blocks, index) if y.requires_grad else y


@contextmanager
def _seeing() -> Iterator[dict[int, torch.UntypedStorage]]:
    # storages of activations that autograd saves, by identity. Only of floating-point tensors: masks, dropout keys and
    # document lengths are small, and some are shared by all blocks.
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
            seen[storage._cdata] = storage
        # the same memory; detached, since an op that saves its own result would hold itself for ever
        return tensor if tensor.is_leaf else tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield seen


class _BeforeBackward(torch.autograd.Function):
    # the identity on a block's output; its backward restores what the block saved, and starts to fetch what the one
    # before it has saved
    @staticmethod
    def forward(ctx: Any, y: Tensor, blocks: list[_Moved | None], index: int) -> Tensor:
        ctx.blocks, ctx.index = blocks, index
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        blocks, index = ctx.blocks, ctx.index
        if (block := blocks[index]) is not None:
            if block.state != "coming":
                block.start_in()
            block.finish_in()
            blocks[index] = None
        if index > 0 and (below := blocks[index - 1]) is not None and below.state != "coming":
            below.start_in()
        return grad, None, None
