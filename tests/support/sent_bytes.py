"""Count the collectives that really run, below every wrapper, and the bytes that each sends from this rank to others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# share of an op's bytes that leaves a rank of ``w``, by the arithmetic of rings; of an all_to_all with equal parts
_SENT = {
    "allreduce_": lambda size, w: 2 * size * (w - 1) // w, "_allgather_base_": lambda size, w: size * (w - 1),
    "alltoall_base_": lambda size, w: size * (w - 1) // w, "_reduce_scatter_base_": lambda size, w: size * (w - 1) // w,
    "reduce_scatter_": lambda size, w: size * (w - 1) // w, "broadcast_": lambda size, w: size,
}  # fmt: skip


class Wire(TorchDispatchMode):
    """While it is on: ``calls`` and ``num_bytes`` by name of torch's c10d op.

    Args:
        size: of the group over which all of them go.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            assert name in _SENT or name in ("barrier", "monitored_barrier_"), f"{name} is a collective that nobody counts"
            if name in _SENT:
                operand = args[1] if name in ("_allgather_base_", "alltoall_base_", "_reduce_scatter_base_") else args[0]
                operand = operand if isinstance(operand, Tensor) else operand[0]
                self.calls[name] += 1
                splits = args[4] if name == "alltoall_base_" else []
                if splits:  # uneven parts: all but this rank's own
                    group = dist.ProcessGroup.unbox(args[2])
                    apart = sum(splits) - splits[group.rank()]
                    self.num_bytes[name] += operand.numel() // max(1, sum(splits)) * apart * operand.element_size()
                else:
                    self.num_bytes[name] += _SENT[name](operand.numel() * operand.element_size(), self._size)
        return func(*args, **(kwargs or {}))


with Wire(1):  # torch imports its compiler with the first op: here once, and not in every rank of every test
    torch.empty(0)
