"""Master weights and optimizer state in host memory (--offload-optimizer), after ZeRO-Offload (arXiv:2101.06840)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sp.ops.allocator import host_empty
from megatron_sp.optim.flat import FlatUnit


# device   reduced gradients of a unit ----copy----> |                                       |  parameters ------>
# host                                               | clip, AdamW on the shard, round       | ----copy----^
# when     during the rest of the last backward pass | after the norm is known, unit by unit | under the next unit's
class HostCopies:
    """Gradients on their way to the host, and parameters on their way back."""

    def __init__(self, units: list[FlatUnit]) -> None:
        self.units = units
        self._device = units[0].device if units else torch.device("cpu")
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._grads: list[Tensor | None] = [None] * len(units)  # memory exists from the first step on
        # rounded on the host: half the bytes on the way
        self._rounded: list[Tensor] = []
        for u in units:
            self._rounded.append(host_empty(u.master.shape, u.dtype, u.device) if u.is_16_bit else u.master)
        self._arriving: dict[int, torch.cuda.Event | None] = {}

    def start_step(self) -> None:
        # gradients of a skipped step, fetched and not used: their device memory may be reused only after the copy. Else
        # the host has waited for all copies to it, and the current stream for all copies from it
        if self._arriving:
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._arriving.clear()

    def fetch(self, index: int) -> None:
        unit, grads = self.units[index], self._grads[index]
        if grads is None:
            grads = self._grads[index] = host_empty(unit.master.shape, unit.grad_dtype, unit.device)
        self._arriving[index] = self._copy(unit.grad_shard, grads)

    def grads(self, index: int) -> Tensor:
        # [n / ranks], on the host; waits for their copy
        if index not in self._arriving:
            self.fetch(index)
        arrived, grads = self._arriving.pop(index), self._grads[index]
        if arrived is not None:
            arrived.synchronize()
        assert grads is not None
        return grads

    def send(self, index: int) -> None:
        # round a unit's updated master weights and start copying them to this rank's range of the parameters
        unit, rounded = self.units[index], self._rounded[index]
        if unit.is_16_bit:
            rounded.copy_(unit.master)
        sent = self._copy(rounded, unit.local_params)
        # later work on the current stream waits for the copy. The host need not: it overwrites what is being copied in
        # the next step at the earliest, after it has read that step's losses from the current stream
        if sent is not None:
            torch.cuda.current_stream(unit.device).wait_event(sent)

    def _copy(self, source: Tensor, to: Tensor) -> torch.cuda.Event | None:
        # on the side stream, after all work queued on the current one; neither tensor may change before the event has
        # been waited for (None: the copy is complete)
        if self._stream is None:
            to.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            return self._stream.record_event()
