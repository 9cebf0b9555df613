"""Atomic creation of step folders, and pruning of old ones. Everything here runs on rank 0 alone.

    step-000100.part-UUID/   every rank writes and fsyncs its files; rank 0 adds state.json and MANIFEST.json
    step-000100/             the same folder after one rename; then ``latest`` is replaced
    (older steps)            only then pruned

A step folder is never written into again: folders of this step or later ones, left by another continuation of the run,
are set aside.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from megatron_sp.checkpoint.manifest import MANIFEST_NAME, STATE_NAME, FileRecord, Manifest, is_complete, read_manifest
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.files import atomic_write_text, free_bytes, fsync_dir, write_synced
from megatron_sp.utils.strict_json import read_small_file

logger = logging.getLogger(__name__)

LATEST_NAME = "latest"
SPACE_FACTOR = 1.2  # free space required, relative to the bytes to write
_STEP = re.compile(r"step-([0-9]{6,18})")
_LEFT_OVER = re.compile(r"(step-[0-9]{6,18})\.(part|replaced|abandoned)-[0-9a-f]+")


# Names


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_number(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def left_over(name: str) -> tuple[int, str] | None:
    """Return (step, ``part``, ``replaced`` or ``abandoned``) for the name of a left-over folder."""
    match = _LEFT_OVER.fullmatch(name)
    step = step_number(match[1]) if match else None
    return (step, match[2]) if match and step is not None else None


def list_steps(folder: Path) -> dict[int, Path]:
    """Return the step folders, oldest first, without links."""
    try:
        folders = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    steps = {step: folder / name for name in folders if (step := step_number(name)) is not None}
    return dict(sorted(steps.items()))


def holds_steps(folder: Path) -> bool:
    """Return whether a folder has anything that is or was a step."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(step_number(name) is not None or (left_over(name) or (0, "part"))[1] != "part" for name in names)


def require_no_links(folder: Path, step: int | None = None) -> None:
    # a link's target is not ours to rename or delete, and may vanish; ``step``: look at its folder only
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for name in names if step is None else [step_name(step)]:
        path = folder / name
        if step_number(name) is not None and path.is_symlink():
            raise CheckpointError(
                f"{path} is a symbolic link (to {os.readlink(path)}): a step's folder must lie in its checkpoints"
                " folder itself; move or copy it there, or remove the link and give the folder that it points to"
            )


def read_latest(folder: Path) -> tuple[int | None, str | None]:
    """Read ``latest``, which is only a hint: (step, None), or (None, why it is unusable or None: no such file)."""
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


# Saving. Disk errors are returned as reasons: a full disk must not end the training.


def open_staging(folder: Path, step: int, num_bytes: int, make_room: Callable[[], Any]) -> dict[str, str]:
    # {"staging": its path} or {"failed": why not}
    needed = int(SPACE_FACTOR * num_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if free_bytes(folder) < needed:
            make_room()
        if (free := free_bytes(folder)) < needed:
            space = f"{folder} has {size_words(free)} free, {size_words(needed)} are needed"
            return {"failed": f"{space} ({SPACE_FACTOR} times the tensors)"}
        staging = folder / f"{step_name(step)}.part-{uuid.uuid4().hex[:12]}"
        staging.mkdir()
        return {"staging": str(staging)}
    except OSError as error:
        return {"failed": explain(error, folder)}


def commit_staging(
    staging: Path, step: int, state: bytes, tensors: dict[str, tuple[str, tuple[int, ...]]],
    results: Sequence[dict[str, Any]], fault: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    # {"num_bytes": bytes written by all ranks} or {"failed": why}
    failures = [f"rank {rank}: {result['failed']}" for rank, result in enumerate(results) if "failed" in result]
    try:
        if not failures:
            fault("manifest")
            files = {name: FileRecord(*record) for result in results for name, record in result["files"].items()}
            files[STATE_NAME] = FileRecord(len(state), hashlib.sha256(state).hexdigest())
            manifest = Manifest(step, len(results), files, tensors)
            write_synced(staging / STATE_NAME, state)
            write_synced(staging / MANIFEST_NAME, manifest.encode())
            fsync_dir(staging)
            fault("rename")
            log_notes(_publish(staging, manifest))
            return {"num_bytes": manifest.num_bytes}
    except OSError as error:
        failures = [explain(error, staging)]
    shutil.rmtree(staging, ignore_errors=True)
    return {"failed": "; ".join(failures[:3])}


def _publish(staging: Path, manifest: Manifest) -> list[str]:
    # rename a sealed folder and point ``latest`` at it; returns notes about folders that were in the way
    folder, final = staging.parent, staging.parent / step_name(manifest.step)
    if final.is_symlink():
        raise OSError(errno.EEXIST, "a symbolic link has the step folder's name", str(final))
    notes, same = [], None
    for step, path in reversed(list_steps(folder).items()):
        if step < manifest.step:
            break
        aside = path.with_name(f"{path.name}.{'replaced' if path == final else 'abandoned'}-{uuid.uuid4().hex[:8]}")
        old = read_manifest(path) if path == final and is_complete(path) else None
        if old is not None and {**old.files, STATE_NAME: None} == {**manifest.files, STATE_NAME: None}:
            same = aside  # the same tensors: the only folder that is not kept
        else:  # the next resume would take it for the newest
            left = f"{path.name} was left from another continuation of this run"
            notes.append(f"{left}: now {aside.name}, delete it if you like")
        path.rename(aside)
    staging.rename(final)
    fsync_dir(folder)  # only now is the checkpoint on the disk
    try:
        atomic_write_text(folder / LATEST_NAME, f"{final.name}\n")
        if same is not None:
            shutil.rmtree(same)
    except OSError as error:
        notes.append(f"after {final.name} was saved: {error}")
    return notes


# Cleaning up


def outdated(
    folder: Path, keep_last: int, keep_every: int | None, is_sound: Callable[[Path], bool] = is_complete
) -> list[Path]:
    """Return the steps to delete: those before the ``keep_last`` newest sound ones, but for each ``keep_every``-th."""
    steps, num_sound, oldest_kept = list_steps(folder), 0, -1
    for step, path in reversed(steps.items()):
        num_sound += is_sound(path)
        if num_sound == keep_last:
            oldest_kept = step
            break
    return [path for step, path in steps.items() if step < oldest_kept and not (keep_every and step % keep_every == 0)]


def discard(path: Path) -> None:
    """Delete a step folder."""
    # renamed first, so that a half-deleted folder is never taken for a checkpoint
    dying = path.with_name(f"{path.name.partition('.')[0]}.part-{uuid.uuid4().hex[:12]}")
    path.rename(dying)
    shutil.rmtree(dying)


def prune(
    folder: Path, keep_last: int, keep_every: int | None, before_each: Callable[[], None] = lambda: None
) -> list[str]:
    # an error must not unsave what has just been saved
    removed: list[str] = []
    try:
        for path in outdated(folder, keep_last, keep_every):
            before_each()
            discard(path)
            removed.append(path.name)
        return removed
    except OSError as error:
        logger.warning("old checkpoints could not be deleted: %s", explain(error, folder))
        return []


def sweep(folder: Path) -> list[str]:
    """Clean up after an interrupted save while no one else saves here; return what was done."""
    notes = []
    newest = max(list_steps(folder), default=-1)
    for entry in sorted(os.scandir(folder), key=lambda e: e.name) if folder.is_dir() else []:
        path = folder / entry.name
        step, kind = left_over(entry.name) or (-1, "")
        if kind == "part" and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(path)
            notes.append(f"removed {path}, left over from a save that did not finish")
        elif kind == "replaced" and step > newest:
            path.rename(folder / step_name(step))
            notes.append(f"put {path.name} back as {step_name(step)}: the save that replaced it did not finish")
        elif entry.name.startswith(f".{LATEST_NAME}.") and entry.name.endswith(".tmp"):
            path.unlink()
    if notes:
        fsync_dir(folder)
    return notes


def log_notes(notes: Collection[str]) -> None:
    for note in notes:
        logger.warning("%s", note)


def explain(error: OSError, path: Path) -> str:
    """Return the system's message with the path concerned."""
    return f"{error.strerror or error} ({error.filename or path})"


def size_words(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 1 << 29 else f"{num_bytes / 2**20:.1f} MiB"
