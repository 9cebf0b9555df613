"""Master weights and optimizer state in host memory (``--offload-optimizer``), after ZeRO-Offload (arXiv:2101.06840).

    device   gradients of a unit, reduced ----copy----> |                                            |  parameters of a unit ---->
    host                                                | clip, AdamW on the shard, round            |----copy----^
    when     during the rest of the last backward pass  | after the norm is known, unit by unit      | during the update of the next unit

The copies run on a stream of their own, between pinned host memory and the device. On a CPU they are plain copies at
the same points, so the same code runs there, with results bitwise equal to those without offload. The update itself is
that of ``optimizer.py``: torch's fused kernels on the host, with the host's rounding; on a GPU the last bits may differ
from those of a run without offload.

The norm is computed from the gradients on the device, as always. They stay there until the next step, so that a bad
step can be inspected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sp.ops.memory import host_empty
from megatron_sp.optim.flat import FlatUnit


class CopyStream:
    """Side stream for in-order copies between a device and the host, concurrent with the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device

    def copy(self, source: Tensor, to: Tensor) -> torch.cuda.Event | None:
        """Start a copy after all work queued on the current stream; neither tensor may change before it has been waited for.

        Returns:
            An event to wait for; None if the copy is complete.
        """
        if self._stream is None:
            to.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def join(self) -> None:
        """Make the current stream wait for all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class HostCopies:
    """Host copies of the gradients of flat units, and the transfer of updated parameters back to the device.

    Args:
        units: flat units with master weights on the host (``FlatUnit(offload=True)``).
    """

    def __init__(self, units: list[FlatUnit]) -> None:
        self.units = units
        self._copies = CopyStream(units[0].device) if units else None
        self._grads: list[Tensor | None] = [None] * len(units)  # memory exists from the first step on
        # rounded on the host: half the bytes on the way
        self._rounded = [host_empty(u.local_params.shape, u.dtype, u.device) if u.is_16_bit else u.master for u in units]
        self._arriving: dict[int, torch.cuda.Event | None] = {}

    def start_step(self) -> None:
        """Start a step: forget fetched gradients that were not used (of a skipped step), so that their device memory can be reused."""
        if self._arriving:  # else the host has waited for all copies to it, and the current stream for all copies from it
            assert self._copies is not None
            self._copies.join()
            self._arriving.clear()

    def fetch(self, index: int) -> None:
        """Start copying this rank's range of the reduced gradients of unit ``index`` to the host."""
        assert self._copies is not None
        unit, grads = self.units[index], self._grads[index]
        if grads is None:
            grads = self._grads[index] = host_empty(unit.master.shape, unit.grad_dtype, unit.device)
        self._arriving[index] = self._copies.copy(unit.grad_shard, grads)

    def grads(self, index: int) -> Tensor:
        """Return the gradients of unit ``index`` on the host, [n / ranks]; waits for their copy."""
        if index not in self._arriving:
            self.fetch(index)
        arrived, grads = self._arriving.pop(index), self._grads[index]
        if arrived is not None:
            arrived.synchronize()
        assert grads is not None
        return grads

    def send(self, index: int) -> None:
        """Round the updated master weights of unit ``index`` and start copying them to this rank's range of the parameters.

        Later work on the current stream waits for the copy. The host need not: it overwrites what is being copied in the next step at
        the earliest, after it has read that step's losses from the current stream.
        """
        assert self._copies is not None
        unit, rounded = self.units[index], self._rounded[index]
        if unit.is_16_bit:
            rounded.copy_(unit.master)
        left = self._copies.copy(rounded, unit.local_params)
        if left is not None:
            torch.cuda.current_stream(unit.device).wait_event(left)
