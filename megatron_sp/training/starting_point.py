"""Where a run starts: which checkpoint --load, --save and --auto-resume mean together, and when a fresh start is meant.

One answer for the run and for its dry run. Nothing here loads torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_sp.checkpoint import find
from megatron_sp.checkpoint.commit import holds_steps
from megatron_sp.checkpoint.manifest import read_manifest
from megatron_sp.checkpoint.verify import missing_or_cut, require_none
from megatron_sp.config.concessions import has_shape
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import CheckpointError, ConfigError, DiskError
from megatron_sp.utils.run_log import saved_step


class StartingPoint(NamedTuple):
    """What to load.

    Attributes:
        source: a run, a checkpoints folder or a step folder; None: a fresh start.
        ckpt_step: the step to take instead of the newest.
        goes_on: it is the run's own, so everything is taken over.
        continues_own: its records are those of this run, too.
        note: one line for the log, where a fresh start is not plain from the flags.
    """

    source: Path | None
    ckpt_step: int | None = None
    goes_on: bool = False
    continues_own: bool = False
    note: str = ""


def starting_point(
    config: Config, run_dir: Path | None, *, has_checkpoint: Callable[[Path], bool], is_vacant: Callable[[Path], bool], attempt: int = 0
) -> StartingPoint:
    """Decide it.

    A run that goes on (--auto-resume, or a restart by torchrun) prefers its own checkpoints to --load, and then the newest of them:
    --ckpt-step belongs to --load if that names another run. Scripts name one folder as --load and --save, before there is anything in
    it: their first run starts afresh, but only in a folder in which nothing looks like a checkpoint, ours or another program's.

    Args:
        config: normalised.
        run_dir: where this run saves; None: it does not.
        has_checkpoint: whether a folder has step folders, the same answer on every rank.
        is_vacant: as ``find.is_vacant``, the same answer on every rank.
        attempt: of torchrun; 0 is the first.
    Raises:
        CheckpointError: another run is in the folder, or what --load names is not there and not meant to be missing.
    """
    checkpoint = config.checkpoint
    load = None if checkpoint.load is None else Path(checkpoint.load)
    own = None if run_dir is None else run_dir.resolve()
    loads_own = load is not None and own is not None and own in (load / "_").resolve().parents
    has_own = checkpoint.save is not None and run_dir is not None and has_checkpoint(run_dir)
    if has_own and (checkpoint.auto_resume or attempt > 0):
        return StartingPoint(run_dir, checkpoint.ckpt_step if load is None or loads_own else None, goes_on=True, continues_own=True)
    if has_own and not loads_own:
        raise CheckpointError(
            f"{run_dir} already holds checkpoints, and this would write another run beside them:"
            f" add --auto-resume (or --load {run_dir}) to go on from them, or choose another --save"
        )
    if load is None:
        return StartingPoint(None)
    is_first_run = checkpoint.save is not None and own is not None and load.resolve() in (own, own / "checkpoints")
    asks_for_one = checkpoint.exit_on_missing_checkpoint or checkpoint.ckpt_step is not None or config.batch.skip_train
    if not is_first_run or asks_for_one or not is_vacant(load):
        return StartingPoint(load, checkpoint.ckpt_step, continues_own=has_own and loads_own and not checkpoint.finetune)
    if not has_shape(config):
        raise CheckpointError(f"{load} has no checkpoint yet, to take the model's shape from (--use-checkpoint-args): give the shape")
    return StartingPoint(
        None, note=f"{load} has no checkpoint yet: starting from scratch (--exit-on-missing-checkpoint makes this an error)"
    )


def require_kept_steps(run_dir: Path) -> None:
    """A run that has saved has its checkpoints: one that was lost is no reason to start afresh, without a word.

    Raises:
        CheckpointError: run_status.json tells of a saved step, and there is none.
    """
    saved, folder = saved_step(run_dir), run_dir / "checkpoints"
    if saved is not None and not holds_steps(folder):
        what = "has no step in it" if folder.is_dir() else "is not there"
        raise CheckpointError(
            f"{run_dir / 'run_status.json'} says that step {saved} was saved, but {folder} {what} (is a disk not mounted?): bring it back;"
            " or, to begin anew, choose another --save or delete run_status.json"
        )


def check_on_paper(config: Config) -> StartingPoint:
    """As a run would look at --load and --save, but nothing is made, and files are not read in full.

    Returns:
        Its starting point, its ``source`` a step folder.
    Raises:
        CheckpointError: what is to be loaded is absent, or visibly incomplete; or what was saved is gone.
        ConfigError, DiskError: --save cannot be made, or cannot be written.
    """
    save = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    if save is not None:
        _can_be_written(save)
        require_kept_steps(save)
    point = starting_point(config, save, has_checkpoint=find.has_steps, is_vacant=find.is_vacant)
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
    """Whether a run could make this folder, or write into it."""
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
