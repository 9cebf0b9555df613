"""NCCL for the fake device: a stream for each communicator, the rules of its calls, and the list of what each rank calls.

``torch.distributed`` runs on its "fake" backend, whose collectives do nothing; the functions that the package calls are
replaced by ones that check, order and write down (ProcessGroupNCCL.cpp):

- a call waits for the current stream, runs on the communicator's stream, and ``Work.wait()`` makes the current stream
  wait;
- the Work keeps its tensors until it is waited for;
- tensors are contiguous, on the device, of one dtype and of sizes that fit the group.

``calls.py`` compares the lists of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fake_gpu.calls import Call
from fake_gpu.captures import Recording
from fake_gpu.device import Device, is_on_device, place


class Work:
    """A collective or message under way; keeps its tensors until it is waited for."""

    def __init__(self, device: Device, event: int, tensors: list[Tensor], *, is_message: bool) -> None:
        self._device, self._event, self._tensors, self._is_message = device, event, tensors, is_message

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the collective."""
        if not self._device.drops("Work.wait"):
            self._device.wait(self._event)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        """True: nothing takes time here. Of a message it may take for ever, so that what waits for it waits for the other rank."""
        self._device.require_no_capture("a question to an event of NCCL's")
        return not self._is_message


class Nccl:
    """The collectives of one rank.

    Attributes:
        calls: in the order in which the rank has made them.
        broadcasts: what the host of this rank has sent to all others, in order: contents of broadcasts, its part of what
            is gathered.
        gathered: what the host of this rank has given to each gather of all ranks, in order.
        communicators: ranks of each group, in the order of their first call, which is when NCCL creates it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[str, int] = {}  # by name of the group
        self._ranks: dict[str, tuple[int, ...]] = {}
        self.calls: list[Call] = []
        self.broadcasts: list[list[int]] = []
        self.gathered: list[list[int]] = []
        self.communicators: list[tuple[int, ...]] = []

    def run(
        self, group: Any, name: str, reads: list[Tensor], writes: list[Tensor], sizes: Sequence[int], received: Sequence[int] = (),
        *, async_op: bool, pair: tuple[int, int] | None = None,
    ) -> Work | None:  # fmt: skip
        """Call a collective, or send or receive; returns its Work, or None after waiting for it.

        Args:
            pair: ranks of the source and the target of a message. Each pair of a group has a communicator and a stream of its own; its
                ranks here are (source, target, source), which are no collective's.

        Raises:
            RuntimeError, ValueError: NCCL would refuse the call.
        """
        group = group or dist.group.WORLD
        tensors = [*reads, *writes]
        if not all(is_on_device(t) for t in tensors):
            raise RuntimeError(f"{name}: No backend type associated with device type {tensors[0].device.type}")
        if not all(t.is_contiguous() for t in tensors):
            raise ValueError(f"{name}: Tensors must be contiguous")
        if len({t.dtype for t in tensors}) > 1:
            raise ValueError(f"{name}: tensors of one dtype, found {[t.dtype for t in tensors]}")
        device, ranks = self._device, tuple(dist.get_process_group_ranks(group))
        key = group.group_name
        if pair is not None:
            assert set(pair) <= set(ranks), f"{name}: ranks {pair} are not both in the group {ranks}"
            key, ranks = f"{key}, {min(pair)}:{max(pair)}", (*pair, pair[0])
            if self._ranks.get(key, ranks) != ranks:
                raise RuntimeError(
                    f"{name}: messages from {pair[1]} to {pair[0]} share a stream with those the other way, and wait for them"
                )
        if key not in self._streams:
            device.require_no_capture(f"a new communicator, of ranks {list(ranks)}")
            self._streams[key] = device.new_stream(f"NCCL's stream of ranks {list(ranks)}")
            self._ranks[key] = ranks
            self.communicators.append(ranks)
        stream = self._streams[key]
        ready, done = device.new_event(), device.new_event()
        device.record(ready)
        device.wait(ready, stream)
        device.use(stream, reads, writes, name)
        device.count(name, reads, writes)
        device.record(done, stream)
        self._note(device.recording, Call(ranks, name, tuple(sizes), tuple(received), str(tensors[0].dtype), place(2)), stream)
        work = Work(device, done, tensors, is_message=pair is not None)
        if async_op:
            return work
        device.wait(done)
        return None

    def _note(self, recording: Recording | None, call: Call, stream: int) -> None:
        """Write a call down, now or in each replay of a capture."""

        def called() -> None:
            seen = self._device.clocks.seen
            after = tuple((other, seen(stream, self._streams[name])) for name, other in self._ranks.items() if other != call.ranks)
            self.calls.append(replace(call, after=after))

        if recording is None:
            called()
        else:
            recording.entries.append(("call", called, None))


def install(device: Device, received: Sequence[Sequence[int]] = (), gathered: Sequence[Sequence[Sequence[int]]] = ()) -> Nccl:
    """Make this process one rank of a job that is not there; return the list of its calls.

    Groups for the host (gloo) answer as if all ranks were like this one: what it gathers are copies of its own. What
    rank 0 has sent to it is ``received``, in order; ``gathered`` is what each rank has given to the gathers of all ranks in a
    run before this one, for programs in which the ranks' parts must fit each other.
    """
    nccl = Nccl(device)
    coming = iter(received)
    backend_of, new_group, init = dist.get_backend, dist.new_group, dist.init_process_group

    def init_process_group(
        _backend: str, rank: int = 0, world_size: int = 1, device_id: torch.device | None = None, **_: Any
    ) -> None:  # fmt: skip
        if device_id is not None and device_id.index is None:
            raise ValueError("Please use a device_id with index.")
        init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def all_reduce(t: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        if t.device.type == "cpu":
            return _on_host(t.mul_(dist.get_world_size(group)) if op in (None, dist.ReduceOp.SUM) else t, async_op)
        return nccl.run(group, "all_reduce", [t], [t], [t.numel()], async_op=async_op)

    def fill(part: Tensor, values: Sequence[int]) -> None:
        part.view(-1)[: len(values)] = torch.tensor(values[: part.numel()], dtype=part.dtype)

    def gather_list(parts: list[Tensor], x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        assert x.device.type == "cpu", "lists are gathered by the host only"
        for part in parts:
            part.copy_(x)
        if len(parts) == dist.get_world_size():
            for part, theirs in zip(parts, gathered, strict=False):
                fill(part, theirs[len(nccl.gathered)] if len(nccl.gathered) < len(theirs) else ())
            nccl.gathered.append(x.flatten().tolist())
        if dist.get_rank() == 0:
            nccl.broadcasts.append(x.flatten().tolist())
        elif len(parts) == dist.get_world_size():
            fill(parts[0], next(coming))
        return _on_host(x, async_op)

    def all_gather(out: Tensor, x: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if out.numel() != x.numel() * group.size():
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        return nccl.run(group, "all_gather", [x], [out], [x.numel()], async_op=async_op)

    def reduce_scatter(out: Tensor, x: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        if x.numel() != out.numel() * group.size():
            raise ValueError("input tensor must be the same size as output size times world size")
        return nccl.run(group, "reduce_scatter", [x], [out], [out.numel()], async_op=async_op)

    def all_to_all(
        out: Tensor, x: Tensor, receive: Sequence[int] | None = None, send: Sequence[int] | None = None, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        send, receive = (counts or [t.shape[0] // group.size()] * group.size() for counts, t in ((send, x), (receive, out)))
        if sum(receive) != out.shape[0] or sum(send) != x.shape[0]:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        return nccl.run(group, "all_to_all", [x], [out], send, receive, async_op=async_op)

    def broadcast(t: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None) -> Any:
        if t.device.type == "cpu":
            if dist.get_rank(group) == (group_src if src is None else src):
                nccl.broadcasts.append(t.flatten().tolist())
            else:
                t.copy_(torch.tensor(next(coming), dtype=t.dtype).view(t.shape))
            return _on_host(t, async_op)
        return nccl.run(group, f"broadcast from {src if group_src is None else group_src}", [t], [t], [t.numel()], async_op=async_op)

    def isend(x: Tensor, dst: int, group: Any = None) -> Any:
        return nccl.run(group, "message", [x], [], [x.numel()], async_op=True, pair=(dist.get_rank(), dst))

    def irecv(x: Tensor, src: int, group: Any = None) -> Any:
        return nccl.run(group, "message", [], [x], [x.numel()], async_op=True, pair=(src, dist.get_rank()))

    import megatron_sp.comm.collectives as collectives
    import megatron_sp.comm.groups as groups

    dist.init_process_group, dist.all_reduce, dist.all_gather = init_process_group, all_reduce, gather_list
    dist.isend, dist.irecv = isend, irecv
    dist.all_to_all_single, dist.broadcast, dist.barrier = all_to_all, broadcast, lambda *_args, **_kwargs: None
    collectives._all_gather, collectives._reduce_scatter = all_gather, reduce_scatter
    groups.fresh_store = lambda *_args: dist.HashStore()
    groups.require_own_gpu = lambda *_args: None  # the other ranks are not there
    groups._options = lambda *_args, **_kwargs: None  # NCCL's own are not in a CPU wheel
    dist.get_backend = lambda group=None: "nccl" if backend_of(group) == "fake" else backend_of(group)
    dist.new_group = lambda *args, **kwargs: new_group(*args, **{k: v for k, v in kwargs.items() if k not in ("backend", "timeout")})
    return nccl


def _on_host(result: Tensor, async_op: bool) -> Any:
    done = torch.futures.Future()
    done.set_result([result])
    return _HostWork(done) if async_op else None


class _HostWork:
    """A collective of the host, which is complete."""

    def __init__(self, done: Any) -> None:
        self._done = done

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._done

    def is_completed(self) -> bool:
        return True
