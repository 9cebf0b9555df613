"""Lengths of the slices of a row that go through a pipeline one after another (``row_slices.py``).

Slices are not of the same length: a late query sees more keys than an early one, and a slice that takes longer than the others
holds up the pipeline. So they are cut to take the same time. Plain numbers; nothing has to divide anything.

Sources: Seq1F1B (arXiv:2406.03488), which cuts by work as here; SlimPipe (arXiv:2504.14519) keeps slices equal, and sends attention's
surplus to ranks that wait.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_sp.parallel.context_plan import areas_before
from megatron_sp.parallel.row_mask import RowMask, Run


@lru_cache(maxsize=64)
def cut_into_slices(mask: RowMask, num_slices: int, pairs_per_position: float) -> tuple[Run, ...]:
    """Return slices of a row that take the same time, each of one position at least.

    Args:
        mask: causal; of the row.
        pairs_per_position: time of all that is not attention at one position of a sequence, in that of a pair of a
            query and a key.
    Raises:
        ValueError: there are fewer positions than slices, or the mask lets queries see later keys.
    """
    s = mask.length
    if not mask.causal:
        raise ValueError("slices of a row go through a pipeline one after another, and queries of this mask see keys of later slices")
    if not 1 <= num_slices <= s:
        raise ValueError(f"a row of {s} positions cannot be cut into {num_slices} slices: at least one position each")
    area = areas_before(mask)

    def time_before(position: int) -> float:
        return area(position) + pairs_per_position * mask.sequences * position

    ends, total = [0], time_before(s)
    for number in range(1, num_slices):
        low, high = ends[-1] + 1, s - (num_slices - number)
        goal = total * number / num_slices
        first, last = low, high
        while first < last:  # the first position with as much before it
            middle = (first + last) // 2
            first, last = (first, middle) if time_before(middle) >= goal else (middle + 1, last)
        if first > low and goal - time_before(first - 1) < time_before(first) - goal:
            first -= 1
        ends.append(first)
    return tuple(zip(ends, (*ends[1:], s), strict=True))
