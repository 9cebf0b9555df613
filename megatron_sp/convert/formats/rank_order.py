"""Whether files of ranks are those that their names say, told by the global rank in the arguments of the run.

Every process of Megatron writes its own number into its file (``args.rank``). However ranks are laid out over tensor parallelism,
stages and data, that number grows along each of them, and so it must grow with the numbers in the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.convert.pickle_tree import Object
from megatron_sp.utils.errors import CheckpointError

WAY_OUT = "files were renamed, or copied from another rank: copy them anew"


class Written(NamedTuple):
    """A file, and the global rank of whoever wrote it; None: not said."""

    path: Path
    rank: int | None


def rank_in(args: Any) -> int | None:
    """What the arguments of a run say."""
    rank = args.attributes.get("rank") if isinstance(args, Object) else None
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 else None


def require_order(files: Mapping[tuple[int, int], Written]) -> None:
    """Refuse files that other ranks wrote than their names say.

    Args:
        files: by two numbers in the name, such as stage and tensor parallel rank.
    Raises:
        CheckpointError: with two of the files.
    """
    if len({file.rank for file in files.values()} - {None}) != len(files):
        return  # not said, or said by one process for all, as tools do that write for ranks which they do not have
    for (a, b), file in files.items():
        for before in (files.get((a - 1, b)), files.get((a, b - 1))):
            if before is not None and (before.rank or 0) > (file.rank or 0):
                raise CheckpointError(f"{before.path} was written by the global rank {before.rank}, and {file.path} by {file.rank}: they"
                                      f" must be in the order of their names; {WAY_OUT}")  # fmt: skip
