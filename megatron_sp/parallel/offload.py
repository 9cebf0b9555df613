"""What blocks save for backward, in host memory while nobody needs it (--offload-activations).

    forward     block i computes | block i+1 computes                                   | block i+2 computes
    copies                       | what block i saved goes to the host | its memory is free |
    backward    block i+1 goes back | block i goes back
    copies      what block i saved comes | what block i-1 saved comes

At most one block is on its way out, and one on its way in. The last block stays: backward begins with it. With full recomputation a "block"
is a run of blocks that keeps its input, and that is what moves.

What moves are storages, not tensors. Hooks on saved tensors see what autograd saves while a block runs, and hand on the very same
memory; behind the block each storage seen is copied out and emptied (``resize_``), and filled again before the block's backward. So every
tensor on it, saved twice, a view, or held by a function of ours beside what it saves (``parallel/ulysses.py`` holds graphs of its own),
is good again, and a storage moves once. Copies made and unpacked by the hooks would leave those others in place. Never moved: parameters
and views of flat buffers, and what the caller names as shared by the blocks. A block does not save its output, which the next one needs.

On a GPU the copies have a stream of their own and pinned memory, and wait by events for the computation and it for them: never the host,
and memory goes back to the allocator in the order of the computing stream, so that nothing has to be recorded. On the CPU the copies are
made at the same places, and the same memory is emptied where torch lets it be; host and device are one there, so nothing is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.memory import host_empty


class ActivationOffload:
    """Host memory for the activations of one model, and the stream of the copies; kept from step to step.

    Args:
        device: of the activations.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[int, list[Tensor]] = {}
        self.num_bytes = 0  # of host memory in all

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] in host memory; what was in it may still be on its way out, in the order of the stream."""
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        self.num_bytes += num_bytes
        return host_empty((num_bytes,), torch.uint8, self.device)

    def give_back(self, buffer: Tensor) -> None:
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def forward_pass(self, shared: Iterable[Tensor]) -> OffloadPass:
        """For one forward pass and its backward pass; ``shared`` never moves."""
        return OffloadPass(self, shared)


class _Moved:
    """Storages of one block, and where their contents are."""

    def __init__(self, pool: ActivationOffload, storages: list[torch.UntypedStorage]) -> None:
        self.pool, self.storages = pool, storages
        self.sizes = [storage.nbytes() for storage in storages]
        self.host = [pool.take(size) for size in self.sizes]
        self.event: torch.cuda.Event | None = None
        self.state = "here"
        # a forward pass whose backward pass never comes
        self._finalizer = weakref.finalize(self, _give_back, pool, self.host)
        self._finalizer.atexit = False

    def start_out(self) -> None:
        """Behind all that the current stream has been given."""
        self._copy([(_bytes_of(storage), host) for storage, host in zip(self.storages, self.host, strict=True)])
        self.state = "leaving"

    def finish_out(self) -> None:
        """The current stream goes on behind the copies, and may use the memory for something else."""
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


def _give_back(pool: ActivationOffload, buffers: list[Tensor]) -> None:
    for buffer in buffers:
        pool.give_back(buffer)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as uint8; a tensor of its own, so that writing does not count as changing what was saved."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


class OffloadPass:
    """The blocks of one forward pass, in order."""

    def __init__(self, pool: ActivationOffload, shared: Iterable[Tensor]) -> None:
        self._pool = pool
        self._shared = {tensor.untyped_storage()._cdata for tensor in shared}
        self._blocks: list[_Moved | None] = []

    def run(self, block: Callable[[Tensor], Tensor], x: Tensor, parameters: Callable[[], Iterable[Tensor]], *, last: bool) -> Tensor:
        """``block(x)``, and what it saves moves to the host.

        Args:
            block: returns what the next block works on.
            x: its input.
            parameters: of the block; asked for behind it, when they are where it read them.
            last: backward begins with this block: it keeps everything.
        """
        index = len(self._blocks)
        if last:
            y = block(x)
            self._blocks.append(None)
        else:
            with _seeing() as seen:
                y = block(x)
            stays = self._shared | {tensor.untyped_storage()._cdata for tensor in (*parameters(), y)}
            mine = [storage for key, storage in seen.items() if key not in stays]
            seen.clear()  # the hooks live as long as what they packed
            self._blocks.append(_Moved(self._pool, mine) if mine else None)
            del mine
        if index > 0 and (before := self._blocks[index - 1]) is not None:
            before.finish_out()
        if (moving := self._blocks[index]) is not None:
            moving.start_out()
        return _BeforeBackward.apply(y, self, index) if y.requires_grad else y

    def backward_begins(self, index: int) -> None:
        """Backward is about to enter block ``index``: its tensors must be there, and those of the block before it are fetched under it."""
        mine = self._blocks[index]
        if mine is not None:
            if mine.state != "coming":
                mine.start_in()
            mine.finish_in()
            self._blocks[index] = None
        if index > 0 and (below := self._blocks[index - 1]) is not None and below.state != "coming":
            below.start_in()


@contextmanager
def _seeing() -> Iterator[dict[int, torch.UntypedStorage]]:
    """Collects the storages of activations that autograd saves meanwhile, by identity.

    Numbers alone: masks, keys of dropout and lengths of documents are small, and some serve all blocks.
    """
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
    """Identity on a block's output; in backward it brings what the block saved."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, run: OffloadPass, index: int) -> Tensor:
        ctx.run, ctx.index = run, index
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.run.backward_begins(ctx.index)
        return grad, None, None
