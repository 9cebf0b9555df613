"""What a step of ZeRO 3 fetches, by asking ``Residency`` use after use, each looking at all that follow."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_sp.optim.residency import Pool, Residency


def list_fetches(pools: Sequence[Pool], order: Sequence[int], num_micro_batches: int, *, ahead: bool = True) -> list[tuple[int, bool]]:
    """Return (unit, whether it was fetched while another one was in use) in order."""
    residency, uses, fetched = Residency(pools), list(order) * num_micro_batches, list[tuple[int, bool]]()
    for use, unit in enumerate(uses):
        upcoming = uses[use + 1 :]
        for other in residency.passing(unit, upcoming):
            residency.leave(other)
        if unit not in residency.place:
            residency.take(unit, upcoming)
            fetched.append((unit, False))
        following = upcoming[0] if ahead and upcoming else unit
        if following not in residency.place and residency.admit(following, upcoming, (unit,)) is not None:
            fetched.append((following, True))
    return fetched
