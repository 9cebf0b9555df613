"""Atomic creation of step folders, and pruning of old ones.

    step-000100.part-UUID/   all ranks write and fsync their files; rank 0 adds state.json and MANIFEST.json, fsyncs the folder
    step-000100/             the same folder after one rename; the parent is fsynced; then ``latest`` is replaced
    (older steps)            only then pruned: renamed to .part-UUID first, so a half-deleted folder is never taken for a checkpoint

A step folder is never written into again. If the folder of a step to be saved exists already, because the run was
resumed from an older step or because that folder is damaged, it is set aside as ``step-000100.replaced-UUID``; later
steps become ``.abandoned-UUID``, since the next resume would otherwise take them for the newest. They are not deleted,
except a replaced folder with identical tensors. Everything here runs on rank 0 alone and lets OSError propagate.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from megatron_sp.checkpoint.manifest import MANIFEST_NAME, STATE_NAME, Manifest, is_complete, read_manifest
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.files import atomic_write_text, fsync_dir, write_synced
from megatron_sp.utils.strict_json import read_small_file

logger = logging.getLogger(__name__)

LATEST_NAME = "latest"
_STEP = re.compile(r"step-([0-9]{6,18})")
_PART = re.compile(r"step-[0-9]{6,18}\.part-[0-9a-f]+")
_REPLACED = re.compile(r"(step-[0-9]{6,18})\.replaced-[0-9a-f]+")
_LEFT_OVER = re.compile(r"(step-[0-9]{6,18})\.(part|replaced|abandoned)-[0-9a-f]+")


def step_name(step: int) -> str:
    """Return the folder name of a step, such as ``step-000100``."""
    return f"step-{step:06d}"


def step_number(name: str) -> int | None:
    """Return the step that a folder name stands for; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def list_steps(folder: Path) -> dict[int, Path]:
    """Return the step folders in a checkpoints folder, oldest first, ignoring links; empty if there is no such folder."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    steps_by_number = {}
    for entry in entries:
        step = step_number(entry.name)
        if step is not None and entry.is_dir(follow_symlinks=False):
            steps_by_number[step] = folder / entry.name
    return dict(sorted(steps_by_number.items()))


def require_no_links(folder: Path) -> None:
    """Raise CheckpointError if a link has a step folder's name: its target is not ours to rename or delete, and may vanish."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for path in (folder / name for name in names if step_number(name) is not None):
        require_no_link(path)


def require_no_link(path: Path) -> None:
    """Raise CheckpointError if this step folder is a link."""
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link (to {os.readlink(path)}): a step's folder must lie in its checkpoints folder itself; move or copy"
            " it there, or remove the link and give the folder that it points to"
        )


def holds_steps(folder: Path) -> bool:
    """Return whether the folder holds anything that is or was a step: a folder, a link, or a folder that was set aside."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(step_number(name) is not None or (left_over(name) or (0, "part"))[1] != "part" for name in names)


def left_over(name: str) -> tuple[int, str] | None:
    """Return (step, ``part``, ``replaced`` or ``abandoned``) for the name of a left-over folder; None for any other name."""
    match = _LEFT_OVER.fullmatch(name)
    step = step_number(match[1]) if match else None
    return (step, match[2]) if match and step is not None else None


def read_latest(folder: Path) -> tuple[int | None, str | None]:
    """Read ``latest``, which is only a hint: (step, None), or (None, why it is unusable); (None, None) if the file is missing."""
    path = folder / LATEST_NAME
    if not path.exists() and not path.is_symlink():
        return None, None
    try:
        text = read_small_file(path, 100).decode("ascii", "backslashreplace")
    except CheckpointError as error:
        return None, str(error)
    step = step_number(text[:-1]) if text.endswith("\n") else None
    if step is None:
        return None, f"{path} says {text[:40]!r}, which is not a step folder's name"
    if not (folder / step_name(step)).is_dir():
        return None, f"{path} names {step_name(step)}, which is not there"
    return step, None


def staging_dir(folder: Path, step: int) -> Path:
    """Create an empty staging folder for a step."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f"{step_name(step)}.part-{uuid.uuid4().hex[:12]}"
    staging.mkdir()
    return staging


def seal(staging: Path, state: bytes, manifest: Manifest) -> None:
    """Add state.json and MANIFEST.json to a staging folder and fsync them and the folder."""
    write_synced(staging / STATE_NAME, state)
    write_synced(staging / MANIFEST_NAME, manifest.encode())
    fsync_dir(staging)


def publish(staging: Path, manifest: Manifest) -> list[str]:
    """Rename a sealed staging folder to the step's folder, and point ``latest`` at it.

    Returns:
        What happened to folders that were in the way, as sentences for the log.
    """
    folder, final = staging.parent, staging.parent / step_name(manifest.step)
    if final.is_symlink():
        raise OSError(errno.EEXIST, "a symbolic link has the step folder's name", str(final))
    notes, same = [], None
    for step, path in reversed(list_steps(folder).items()):
        if step >= manifest.step:
            aside = path.with_name(f"{path.name}.{'replaced' if path == final else 'abandoned'}-{uuid.uuid4().hex[:8]}")
            if path == final and _same_tensors(path, manifest):
                same = aside
            else:
                notes.append(
                    f"{path.name} was left from another continuation of this run: now {aside.name}, delete it if you like"
                )
            path.rename(aside)
    staging.rename(final)
    fsync_dir(folder)
    try:
        atomic_write_text(folder / LATEST_NAME, f"{final.name}\n")
        if same is not None:
            shutil.rmtree(same)
    except OSError as error:
        notes.append(f"after {final.name} was saved: {error}")
    return notes


def _same_tensors(step_dir: Path, manifest: Manifest) -> bool:
    if not is_complete(step_dir):
        return False
    old = read_manifest(step_dir).files
    return {**old, STATE_NAME: None} == {**manifest.files, STATE_NAME: None}


def outdated(
    folder: Path, keep_last: int, keep_every: int | None, is_sound: Callable[[Path], bool] = is_complete
) -> list[Path]:
    """Return the old steps to delete: all but the ``keep_last`` newest sound ones, anything newer, and multiples of ``keep_every``.

    Args:
        is_sound: called from the newest step on, until ``keep_last`` sound ones are found.
    Returns:
        Step folders, oldest first; none if fewer than ``keep_last`` are sound.
    """
    steps, num_sound, oldest_kept = list_steps(folder), 0, -1
    for step, path in reversed(steps.items()):
        num_sound += is_sound(path)
        if num_sound == keep_last:
            oldest_kept = step
            break
    return [path for step, path in steps.items() if step < oldest_kept and not (keep_every and step % keep_every == 0)]


def discard(path: Path) -> None:
    """Delete a step folder, or one that was set aside; it is renamed first, so a half-deleted one is never taken for a checkpoint."""
    dying = path.with_name(f"{path.name.partition('.')[0]}.part-{uuid.uuid4().hex[:12]}")
    path.rename(dying)
    shutil.rmtree(dying)


def prune(
    folder: Path, keep_last: int, keep_every: int | None, before_each: Callable[[], None] = lambda: None
) -> list[str]:
    """Delete the steps that are ``outdated``. Returns the names of the deleted folders."""
    removed = []
    for path in outdated(folder, keep_last, keep_every):
        before_each()
        discard(path)
        removed.append(path.name)
    return removed


def sweep(folder: Path) -> list[str]:
    """Clean up after an interrupted save or deletion. Only while no one else saves into this folder.

    Returns:
        What was done, as sentences for the log.
    """
    notes = []
    newest = max(list_steps(folder), default=-1)
    for entry in sorted(os.scandir(folder), key=lambda e: e.name) if folder.is_dir() else []:
        path = folder / entry.name
        replaced = _REPLACED.fullmatch(entry.name)
        if _PART.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(path)
            notes.append(f"removed {path}, left over from a save that did not finish")
        elif replaced and (step_number(replaced[1]) or 0) > newest:
            path.rename(folder / replaced[1])
            notes.append(f"put {path.name} back as {replaced[1]}: the save that replaced it did not finish")
        elif entry.name.startswith(f".{LATEST_NAME}.") and entry.name.endswith(".tmp"):
            path.unlink()
    if notes:
        fsync_dir(folder)
    return notes


def log_notes(notes: Collection[str]) -> None:
    """Log notes as warnings; for rank 0."""
    for note in notes:
        logger.warning("%s", note)
