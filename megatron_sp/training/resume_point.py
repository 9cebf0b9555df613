"""Starting point of a run: the checkpoint that --load, --save and --auto-resume select together, or a fresh start.

The run and its dry run share this code. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_sp.checkpoint import find
from megatron_sp.checkpoint.commit import holds_steps
from megatron_sp.checkpoint.manifest import missing_or_cut, read_manifest, require_none
from megatron_sp.config.rules import has_shape
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import CheckpointError, ConfigError, DiskError
from megatron_sp.utils.run_log import saved_step


class ResumePoint(NamedTuple):
    """The checkpoint to load, if any."""

    source: Path | None  # a run, a checkpoints folder or a step folder; None: a fresh start
    ckpt_step: int | None = None  # step to load instead of the newest
    goes_on: bool = False  # the run resumes from its own checkpoint, so all state is loaded
    continues_own: bool = False  # the records in the run folder are also this run's own
    note: str = ""  # a line for the log if the fresh start is not obvious from the flags; else empty


def find_resume_point(
    config: Config, run_dir: Path | None, *, has_checkpoint: Callable[[Path], bool], is_vacant: Callable[[Path], bool],
    attempt: int = 0,
) -> ResumePoint:  # fmt: skip
    """Determine the starting point of a run. Raises CheckpointError."""
    # A resumed run (--auto-resume, or a restart by torchrun) prefers its own checkpoints to --load, and the newest of
    # them: --ckpt-step belongs to --load if that names another run. Scripts name the same folder as --load and --save
    # while it is still empty: their first run starts afresh, but only if nothing there looks like any checkpoint.
    checkpoint = config.checkpoint
    load = None if checkpoint.load is None else Path(checkpoint.load)
    own = None if run_dir is None else run_dir.resolve()
    loads_own = load is not None and own is not None and own in (load / "_").resolve().parents
    has_own = checkpoint.save is not None and run_dir is not None and has_checkpoint(run_dir)
    if (checkpoint.auto_resume or attempt > 0) and has_own:
        return ResumePoint(
            run_dir, checkpoint.ckpt_step if load is None or loads_own else None, goes_on=True, continues_own=True
        )
    if has_own and not loads_own:
        raise CheckpointError(
            f"{run_dir} already holds checkpoints, and this would write another run beside them: add --auto-resume (or"
            f" --load {run_dir}) to go on from them, or choose another --save"
        )
    if load is None:
        return ResumePoint(None)
    is_first_run = checkpoint.save is not None and own is not None and load.resolve() in (own, own / "checkpoints")
    asks_for_one = checkpoint.exit_on_missing_checkpoint or checkpoint.ckpt_step is not None or config.batch.skip_train
    if not is_first_run or asks_for_one or not is_vacant(load):
        return ResumePoint(load, checkpoint.ckpt_step, continues_own=has_own and loads_own and not checkpoint.finetune)
    if not has_shape(config):
        raise CheckpointError(
            f"{load} has no checkpoint yet, to take the model's shape from (--use-checkpoint-args): give the shape"
        )
    return ResumePoint(
        None,
        note=f"{load} has no checkpoint yet: starting from scratch (--exit-on-missing-checkpoint makes this an error)",
    )


def require_own_checkpoint(config: Config) -> None:
    """Raise CheckpointError, before anything is created, if --load holds another program's checkpoint."""
    # a run that has checkpoints of its own goes on from those, or is refused later
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is not None and not (save is not None and find.has_steps(Path(save))):
        find.require_own(Path(load), config.checkpoint.ckpt_step)


def require_kept_steps(run_dir: Path) -> None:
    """Raise CheckpointError if a run that has saved has no checkpoints: it must not silently start afresh."""
    saved, folder = saved_step(run_dir), run_dir / "checkpoints"
    if saved is not None and not holds_steps(folder):
        what = "holds no step" if folder.is_dir() else "is missing"
        raise CheckpointError(
            f"{run_dir / 'run_status.json'} says that step {saved} was saved, but {folder} {what} (is a disk not"
            " mounted?): bring it back; or, to begin anew, choose another --save or delete run_status.json"
        )


def check_on_paper(config: Config) -> ResumePoint:
    """Check --load and --save as a run would, without creating anything or reading files in full."""
    save = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    if save is not None:
        _can_be_written(save)
        require_kept_steps(save)
    point = find_resume_point(config, save, has_checkpoint=find.has_steps, is_vacant=find.is_vacant)
    if point.source is None:
        return point
    problems = []
    for folder in find.candidates(point.source, point.ckpt_step).folders:
        try:
            require_none(folder, missing_or_cut(folder, read_manifest(folder)))
            return point._replace(source=folder)
        except CheckpointError as error:
            problems.append(f"{error}\n{find.way_out(folder)}")
            if not config.checkpoint.resume_fallback:
                break
    raise CheckpointError("\n".join(problems))


def _can_be_written(folder: Path) -> None:
    # check that a run could create this folder, or write to it; raises ConfigError or DiskError
    there = folder.absolute()
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"the run folder {folder} cannot be created: {there} is not a folder; choose another --save")
    if os.access(there, os.W_OK | os.X_OK):
        return
    if there == folder.absolute():
        raise DiskError(f"the run folder {folder} cannot be written: Permission denied; choose another --save")
    raise ConfigError(f"the run folder {folder} cannot be created: Permission denied; choose another --save")
