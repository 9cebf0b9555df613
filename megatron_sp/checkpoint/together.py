"""Work that all ranks do together: either every rank goes on, or every rank raises the same error.

A file that only one host cannot read must not leave the other ranks waiting in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_sp.comm.object_collectives import broadcast_json, gather_json
from megatron_sp.utils.errors import CheckpointError, ReportedError

_KINDS = {kind.__name__: kind for kind in ReportedError.__subclasses__()}


class Together:
    """The ranks that share a checkpoint. ``group`` must support CPU tensors; None means this process alone."""

    def __init__(self, rank: int, world_size: int, group: Any) -> None:
        if group is None and world_size != 1:
            raise ValueError(f"a checkpoint of {world_size} ranks needs a CPU-capable process group (gloo)")
        self.rank = rank
        self.world_size = world_size
        self.group = group

    def each(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on every rank and return all results in rank order (through JSON: tuples come back as lists). Collective.

        Raises:
            ReportedError: on every rank if any raised one, of the kind of the lowest such rank; CheckpointError for an
                OSError or a bug.
            Exception: any other exception that ``work`` raised on this rank, unchanged: a bug keeps its traceback.
        """
        outcome, bug = self._try(work)
        outcomes = gather_json(outcome, self.group)
        if bug is not None:
            raise bug
        self._raise_if_any(outcomes)
        return [o["value"] for o in outcomes]

    def first(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on rank 0 alone and return its result (through JSON) on every rank. Collective; raises as ``each``."""
        outcome, bug = self._try(work) if self.rank == 0 else (None, None)
        outcome = broadcast_json(outcome, self.group)
        if bug is not None:
            raise bug
        self._raise_if_any([outcome])
        return outcome["value"]

    def _try(self, work: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
        try:
            return {"value": work()}, None
        except (ReportedError, OSError) as error:
            return {"error": str(error), "kind": type(error).__name__}, None
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}, error

    def _raise_if_any(self, outcomes: list[dict[str, Any]]) -> None:
        ranks: dict[str, list[int]] = {}
        for rank, outcome in enumerate(outcomes):
            if "error" in outcome:
                ranks.setdefault(outcome["error"], []).append(rank)
        if ranks:
            kind = _KINDS.get(next(o.get("kind", "") for o in outcomes if "error" in o), CheckpointError)
            alone = len(outcomes) == 1 or (len(ranks) == 1 and len(next(iter(ranks.values()))) == len(outcomes))
            raise kind("\n".join(text if alone else f"rank {_span(r)}: {text}" for text, r in ranks.items()))


def _span(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
