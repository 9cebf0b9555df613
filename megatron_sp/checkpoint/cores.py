"""How many threads of a save go beside those that compute."""

from __future__ import annotations

import torch

from megatron_sp.checkpoint.file_records import cores_of_rank, io_threads


def idle_cores() -> int:
    """Cores of this rank on which torch does not compute."""
    return max(0, cores_of_rank() - torch.get_num_threads())


def threads_beside_training() -> int:
    """Files to write at once while training goes on.

    One on each idle core. Where none is idle, as many as compute: all of those slow down alike then, while a single one would make
    every other wait for the one whose core it shares (docs/design/008-async-save.md has the figures).
    """
    return min(idle_cores() or io_threads(), io_threads())
