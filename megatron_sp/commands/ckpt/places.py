"""Resolution of a path on the command line to step folders, and to the run they belong to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from megatron_sp.checkpoint import find
from megatron_sp.checkpoint.commit import list_steps
from megatron_sp.commands.ckpt.text import warn
from megatron_sp.utils.errors import CheckpointError

CHECKPOINTS = "checkpoints"


class CheckpointPath(NamedTuple):
    """Meaning of a path on the command line.

    Attributes:
        folder: folder of the step folders.
        run: run folder, with LOCK and metrics.jsonl; None for step folders outside of a run.
        only: the step folder, if the path names a single one; else None.
    """

    folder: Path
    run: Path | None
    only: Path | None = None


def place_of(path: Path) -> CheckpointPath:
    """Resolve a path to a run, its checkpoints folder, or one step folder.

    Raises:
        CheckpointError: the folder does not exist.
    """
    if not path.is_dir():
        find.candidates(path, None)  # its message lists what there is instead
    if find.is_step_folder(path):
        return CheckpointPath(path.parent, _run_of(path.parent), path)
    folder = find.checkpoints_folder(path)
    return CheckpointPath(folder, path if folder != path else _run_of(path))


def places_under(path: Path) -> list[CheckpointPath]:
    """Resolve a path like ``place_of``, and a folder of runs to all of them."""
    place = place_of(path)
    if place.only is None and place.folder == path and not list_steps(path) and path.name != CHECKPOINTS:
        runs = sorted(Path(entry.path) for entry in os.scandir(path) if entry.is_dir() and (Path(entry.path) / CHECKPOINTS).is_dir())
        if runs:
            return [place_of(run) for run in runs]
    return [place]


def step_folder(path: Path, ckpt_step: int | None = None) -> Path:
    """Return the step folder itself, or the newest (or chosen) one of a run, not verified. Raises CheckpointError if there is none."""
    found = find.candidates(path, ckpt_step)
    for warning in found.warnings:
        warn(warning)
    return found.folders[0]


def run_to_change(path: Path) -> CheckpointPath:
    """Return the run whose checkpoints are to be changed; the caller has to take its lock.

    Raises:
        CheckpointError: the path is neither a run nor a run's checkpoints folder.
    """
    place = place_of(path)
    if place.only is not None or place.run is None:
        raise CheckpointError(f"{path} is not a run: give the folder that has {CHECKPOINTS} in it, for that is what its lock is in")
    return place


def _run_of(folder: Path) -> Path | None:
    folder = folder.absolute()
    return folder.parent if folder.name == CHECKPOINTS else None
