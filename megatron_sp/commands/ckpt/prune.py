"""``ckpt prune``: delete old checkpoints and leftover folders of a run, under its lock; the newest sound checkpoint is never deleted.

Every checkpoint to keep is read in full first: a damaged one does not count as kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from megatron_sp.checkpoint import commit
from megatron_sp.checkpoint.commit import list_steps
from megatron_sp.checkpoint.lock import RunLock
from megatron_sp.commands.ckpt.places import CheckpointPath, run_to_change
from megatron_sp.commands.ckpt.survey import survey
from megatron_sp.commands.ckpt.text import plural, warn
from megatron_sp.commands.ckpt.verify import is_sound
from megatron_sp.utils.errors import CheckpointError, ConfigError, DiskError
from megatron_sp.utils.files import fsync_dir
from megatron_sp.utils.format import format_bytes


def run(path: Path, *, keep_last: int | None, keep_every: int | None, leftovers: bool, dry_run: bool) -> int:
    """Delete checkpoints and print what was deleted.

    Args:
        keep_last: number of sound checkpoints to keep; None: no step is deleted.
        keep_every: also keep multiples of this step number.
        leftovers: also delete unfinished and set-aside folders.
        dry_run: delete nothing.
    Raises:
        ConfigError: the flags request nothing, or are out of range.
        LockError: a job is writing to this run.
        CheckpointError: the path is not a run, there is no sound checkpoint to keep, or a leftover folder may still be
            needed.
        DiskError: a folder cannot be deleted.
    """
    _check_flags(keep_last, keep_every, leftovers)
    place = run_to_change(path)
    assert place.run is not None
    try:
        with nullcontext() if dry_run else RunLock(place.run):
            _prune(place, keep_last, keep_every, leftovers, dry_run)
    except OSError as error:
        from megatron_sp.checkpoint.saving import explain  # imports torch, which nothing else here needs

        raise DiskError(f"not everything could be deleted: {explain(error, place.folder)}") from None
    return 0


def _check_flags(keep_last: int | None, keep_every: int | None, leftovers: bool) -> None:
    if keep_last is None and not leftovers:
        raise ConfigError("nothing to delete: give --keep-last N for old checkpoints, --leftovers for left-over folders, or both")
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"--keep-last ({keep_last}) must be at least 1: the newest sound checkpoint is never deleted")
    if keep_every is not None and (keep_every < 1 or keep_last is None):
        raise ConfigError(f"--keep-every ({keep_every}) must be at least 1 and goes with --keep-last: it adds to what that keeps")


def _prune(place: CheckpointPath, keep_last: int | None, keep_every: int | None, leftovers: bool, dry_run: bool) -> None:
    seen: dict[Path, bool] = {}

    def sound(step_dir: Path) -> bool:
        if step_dir not in seen:
            seen[step_dir] = is_sound(step_dir)
            if not seen[step_dir]:
                warn(f"{step_dir} is damaged and does not count as kept (megatron-sp ckpt verify {step_dir} says how)")
        return seen[step_dir]

    if dry_run and (found := survey(place)).is_written and found.writer:
        warn(f"a job is writing here ({found.writer.who}): nothing can be deleted until it ends")
    old = [] if keep_last is None else commit.outdated(place.folder, keep_last, keep_every, sound)
    if keep_last is not None and not old:
        kept = sum(seen.values())
        print(f"no step to delete: {plural(kept, 'sound checkpoint')} of the {keep_last} to keep, and none older than those")
    freed = sum(_delete(step_dir, dry_run) for step_dir in old)
    if leftovers:
        freed += _delete_leftovers(place.folder, sound, dry_run)
    if not dry_run:
        fsync_dir(place.folder)
    print(f"{'would free' if dry_run else 'freed'} {format_bytes(freed)}")


def _delete_leftovers(folder: Path, sound: Callable[[Path], bool], dry_run: bool) -> int:
    """Delete unfinished and set-aside folders, but no links or files; return the freed bytes. Refuses if one may still be needed."""
    names = [entry.name for entry in os.scandir(folder) if commit.left_over(entry.name) and entry.is_dir(follow_symlinks=False)]
    names.sort()
    if not names:
        print("nothing is left over")
        return 0
    newest = max(list_steps(folder), default=-1)
    back = [name for name in names if "replaced" in name and _left(name)[0] > newest]
    if back:
        raise CheckpointError(
            f"{folder / back[-1]} is newer than every step: the save that replaced it was cut short, and the next job puts it back;"
            f" rename it to {back[-1].partition('.')[0]} yourself, or start that job, before left-over folders are deleted"
        )
    aside = [name for name in names if _left(name)[1] != "part"]
    if aside and not any(sound(path) for path in reversed(list_steps(folder).values())):
        raise CheckpointError(f"{folder} has no sound step: {', '.join(aside)} may hold all that is left of this run and is not deleted")
    return sum(_delete(folder / name, dry_run) for name in names)


def _left(name: str) -> tuple[int, str]:
    left = commit.left_over(name)
    assert left is not None
    return left


def _delete(path: Path, dry_run: bool) -> int:
    size = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    if not dry_run:
        commit.discard(path)
    print(f"{'would delete' if dry_run else 'deleted'} {path} ({format_bytes(size)})", flush=True)
    return size
