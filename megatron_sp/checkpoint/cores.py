"""Number of threads that a save may use while training computes."""

from __future__ import annotations

import torch

from megatron_sp.checkpoint.file_records import cores_of_rank, io_threads


def idle_cores() -> int:
    """Return the number of this rank's cores that torch does not compute on."""
    return max(0, cores_of_rank() - torch.get_num_threads())


def threads_beside_training() -> int:
    """Return the number of files to write at once while training goes on.

    One per idle core. If no core is idle, as many as ``io_threads()``: then all compute threads slow down alike, while
    a single writer would make all of them wait for the one whose core it shares (docs/design/008-async-save.md has the
    figures).
    """
    return min(idle_cores() or io_threads(), io_threads())
