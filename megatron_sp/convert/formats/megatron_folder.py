"""Folders of a Megatron checkpoint: that of an iteration, and in it one folder for each rank."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from megatron_sp.convert.folders import require_inside
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import read_small_file

TRACKER, MODEL, OPTIMIZER = "latest_checkpointed_iteration.txt", "model_optim_rng.pt", "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_ITERATION = re.compile(r"iter_(\d{7,})")


class RankFolder(NamedTuple):
    """Folder of one rank of tp x pp, with experts of tp x pp x ep."""

    tp_rank: int
    pp_rank: int
    path: Path
    ep_rank: int = 0


def iteration_folder(path: Path, step: int | None) -> Path | None:
    """Return the folder of one iteration: ``path`` itself, the parent of a rank's folder, or a child; None: there is none.

    Args:
        step: number of the iteration; None: the newest according to the tracker file.
    Raises:
        CheckpointError: there are iterations, but not this one.
    """
    if _RANK.fullmatch(path.name) and (path / MODEL).exists():
        return path.parent
    if rank_folders(path) or (path / ".metadata").exists() or (path / "metadata.json").exists():
        return path
    found = {int(match[1]): child for child in path.iterdir() if (match := _ITERATION.fullmatch(child.name)) and child.is_dir()}
    if (path / "release").is_dir():
        found.setdefault(0, path / "release")
    if not found:
        return None
    wanted = step if step is not None else _noted(path, found)
    if wanted not in found:
        has = ", ".join(child.name for _, child in sorted(found.items())[-5:])
        raise CheckpointError(f"{path} has no iteration {wanted}: it has {has}; give one with --step")
    require_inside(found[wanted], path)
    return found[wanted]


def _noted(path: Path, found: dict[int, Path]) -> int:
    """Return the newest iteration according to the tracker file; without it, the highest."""
    if not (path / TRACKER).exists():
        return max(found)
    text = read_small_file(path / TRACKER, 1000).decode("utf-8", "replace").strip()
    if text == "release":
        return 0
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise CheckpointError(f"{path / TRACKER} must hold the number of an iteration or the word release, found {text[:60]!r}")
    return int(text)


def rank_folders(path: Path) -> list[RankFolder]:
    """Return the complete set of rank folders of one iteration: every tp rank of every stage, and of every share of the experts.

    A single number after that of the tp rank is taken for that of the stage; without stages it is that of the share, which
    only the arguments in the files tell.

    Raises:
        CheckpointError: some are missing.
    """
    if not path.is_dir():
        return []
    found: dict[tuple[int, int, int], Path] = {}
    for child in sorted(path.iterdir()):
        match = _RANK.fullmatch(child.name)
        if match is None or not (child / MODEL).exists():
            continue
        require_inside(child, path)
        found[int(match[1]), int(match[2] or 0), int(match[3] or 0)] = child
    if not found:
        return []
    tp, pp, ep = (1 + max(key[axis] for key in found) for axis in range(3))
    if len(found) != tp * pp * ep:  # a folder's name may claim any number of ranks, so only the first missing ones are listed
        missing = (rank_name(t, p, pp, e, ep) for p in range(pp) for t in range(tp) for e in range(ep) if (t, p, e) not in found)
        sizes, axes = (f"{tp} x {pp}", "tp x pp") if ep == 1 else (f"{tp} x {pp} x {ep}", "tp x pp x ep")
        raise CheckpointError(
            f"{path} has folders of {len(found)} ranks, and {sizes} are expected ({axes}): {', '.join(islice(missing, 8))} missing."
            " Copy all of them to one place"
        )
    return [RankFolder(t, p, found[t, p, e], e) for p in range(pp) for e in range(ep) for t in range(tp)]


def rank_name(tp_rank: int, pp_rank: int, pp: int, ep_rank: int = 0, ep: int = 1) -> str:
    """Return the name of the folder of a rank."""
    return f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "") + (f"_{ep_rank:03d}" if ep > 1 else "")
