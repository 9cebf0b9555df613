"""Finding the step folders, newest first, of the path given to --load: a run, its checkpoints folder, or one step folder.

Checkpoints of other programs are told by the names of their files, and the error has the command that converts them.
Nothing is opened but DeepSpeed's one-line ``latest``: a run finds out before it creates anything.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from megatron_sp.checkpoint.commit import (
    list_steps,
    read_latest,
    require_no_link,
    require_no_links,
    step_name,
    step_number,
)
from megatron_sp.checkpoint.manifest import MANIFEST_NAME, is_complete
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import read_small_file

_ITERATION = re.compile(r"iter_\d{7,}|release")
_RANK = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
_STEP = re.compile(r"global_step\d+(_universal)?")
_WEIGHTS = re.compile(r"model.*\.safetensors|pytorch_model.*\.bin")
_TRACKERS = ("latest", "latest_universal")


class Candidates(NamedTuple):
    """Step folders to try, newest first, and warnings."""

    folders: list[Path]
    warnings: list[str]


def checkpoints_folder(path: Path) -> Path:
    """Return the folder that holds the steps: ``path/checkpoints`` if it exists, else ``path`` itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def is_step_folder(path: Path) -> bool:
    """Return whether ``path`` itself is a step folder, by its name or its manifest, and not a folder of them."""
    return path.is_dir() and (step_number(path.name) is not None or (path / MANIFEST_NAME).exists())


def has_steps(path: Path) -> bool:
    """Return whether ``path`` (a run, its checkpoints folder or a step folder) is or holds a step folder, sound or not."""
    return is_step_folder(path) or bool(list_steps(checkpoints_folder(path)))


_OF_CHECKPOINTS = re.compile(
    r"step-\d+(\.(replaced|abandoned)-.*)?|latest|latest_universal|latest_checkpointed_iteration\.txt|iter_\d+|release"
    r"|global_step\d+.*|mp_rank_.*|\.metadata"
    r"|.*\.(safetensors|pt|pth|ckpt|distcp)|pytorch_model.*|model_optim_rng.*"
)


def is_vacant(path: Path) -> bool:
    """Return whether nothing in a folder looks like a checkpoint of this or another program; a missing folder is vacant."""
    if path.is_symlink() or path.exists():
        if not path.is_dir():
            return False
        try:
            folders = [path, path / "checkpoints"] if (path / "checkpoints").is_dir() else [path]
            return not any(_OF_CHECKPOINTS.fullmatch(name) for folder in folders for name in os.listdir(folder))
        except OSError:
            return False
    return True


def candidates(path: Path, ckpt_step: int | None) -> Candidates:
    """Return the step folders that ``path`` stands for.

    Args:
        path: a run folder, a checkpoints folder, or one step folder.
        ckpt_step: return only this step and, for a fallback, those before it.
    Raises:
        CheckpointError: there are none (the message names what was looked for, what exists and the nearest names),
            ``path`` is the folder of another step, or a step folder is a link.
    """
    if not path.is_dir():
        raise CheckpointError(_absent(path))
    if is_step_folder(path):
        if ckpt_step is not None and step_number(path.name) not in (None, ckpt_step):
            raise CheckpointError(
                f"{path} is one step's folder, --ckpt-step {ckpt_step} asks for another: give the run's folder"
            )
        if step_number(path.name) is not None:
            require_no_link(path)
        return Candidates([path], [])
    folder = checkpoints_folder(path)
    steps = list_steps(folder)
    if ckpt_step is None:
        require_no_links(folder)
    else:
        require_no_link(folder / step_name(ckpt_step))
    if not steps:
        if (other := identify(path)) is not None:
            raise CheckpointError(of_another_program(path, other, ckpt_step))
        near = _runs_in(path)
        there = f"did you mean {' or '.join(near)}?" if near else f"there is: {listing(folder)}"
        raise CheckpointError(f"{path} has no checkpoint: looked for {folder}/step-*/{MANIFEST_NAME}; {there}")
    hint, problem = read_latest(folder)
    warnings = [f"{problem}: ignored, the folders themselves decide"] if problem else []
    if ckpt_step is not None:
        if ckpt_step not in steps:
            sound = step_list(_complete(steps))
            raise CheckpointError(
                f"{folder} has no {step_name(ckpt_step)} (--ckpt-step {ckpt_step}); it has the steps {sound}"
            )
        steps = {step: p for step, p in steps.items() if step <= ckpt_step}
    elif hint is not None and hint != max(steps):
        newest = step_name(max(steps))
        warnings.append(
            f"{folder / 'latest'} names {step_name(hint)}, but the newest folder is {newest}: the folders decide"
        )
    return Candidates([steps[step] for step in sorted(steps, reverse=True)], warnings)


def require_own(path: Path, ckpt_step: int | None) -> None:
    """Check that a folder without steps of ours holds no other program's checkpoint. Raises CheckpointError: it does; how to convert it."""
    if not has_steps(path) and (other := identify(path)) is not None:
        raise CheckpointError(of_another_program(path, other, ckpt_step))


def of_another_program(path: Path, other: Foreign, ckpt_step: int | None) -> str:
    """Say what a folder holds instead of checkpoints of ours, and how to convert it: several lines."""
    return f"{path} has no checkpoint of megatron_sp, but a {other.whose}. {other.way_out(ckpt_step)}"


def _runs_in(path: Path) -> list[str]:
    runs = (folder.parent for folder in sorted(path.glob("*/checkpoints")))
    return [str(run) for run in runs if list_steps(checkpoints_folder(run))][:3]


def step_list(steps: dict[int, Path]) -> str:
    numbers = [str(step) for step in sorted(steps)]
    return ", ".join(numbers if len(numbers) <= 12 else [*numbers[:4], "...", *numbers[-7:]]) or "none"


def way_out(step_dir: Path) -> str:
    """Return advice on what to do about a damaged step folder."""
    beside = {step: path for step, path in list_steps(step_dir.parent).items() if path != step_dir}
    others = _complete(beside)
    if not others:
        return "Those beside it are not complete either." if beside else "There is no other checkpoint beside it."
    own = step_number(step_dir.name)
    fallback = (
        "--resume-fallback to go on from the newest sound one before it, or "
        if own is not None and min(others) < own
        else ""
    )
    return (
        f"Give {fallback}--ckpt-step N to choose one of {step_list(others)}, whose files are all there with their sizes; a load reads and"
        " compares their contents."
    )


def _complete(steps: dict[int, Path]) -> dict[int, Path]:
    return {step: path for step, path in steps.items() if is_complete(path)}


def listing(folder: Path) -> str:
    """Return the first few names in a folder, for messages."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"nothing readable ({error.strerror})"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"


def _absent(path: Path) -> str:
    if path.exists():
        return f"{path} is a file: a checkpoint is a folder (a run, its checkpoints folder, or one step-NNNNNN folder in it)"
    parent, missing = path.absolute().parent, path.name
    while not parent.is_dir() and parent != parent.parent:
        parent, missing = parent.parent, parent.name
    try:
        near = difflib.get_close_matches(missing, os.listdir(parent), n=3, cutoff=0.5)
    except OSError:
        near = []
    hint = f"nearest: {', '.join(near)}" if near else f"there is: {listing(parent)}"
    return f"there is no {path}: looked for a run, its checkpoints folder or a step folder; in {parent}, {hint}"


class Foreign(NamedTuple):
    """A checkpoint of another program."""

    whose: str  # what it is, as the end of "it holds"
    folder: Path  # folder for --input
    output: str  # folder for --output
    words: tuple[str, ...] = ()  # further words that its conversion needs
    remark: str = ""  # what may have to be changed in them, or how to go on; a sentence or two
    is_whole: bool = True  # False if its folders are missing

    def way_out(self, step: int | None) -> str:
        """Return the lines that say how to use it: --step N of them is for ``step``, if that is not None."""
        if not self.is_whole:
            return "The folders with its tensors are not there: bring them back (is a disk not mounted?), or give another folder."
        line = ["megatron-sp", "convert", "--input", str(self.folder), "--to", "megatron_sp", "--output", self.output]
        line += [*(() if step is None else ("--step", str(step))), *self.words]
        remark = f"\n{self.remark}" if self.remark else ""
        return f"Convert it once, and load what that has made ({self.output}):\n  {shlex.join(line)}{remark}"


def identify(path: Path) -> Foreign | None:
    """Return what another program has left in a folder, or in its ``checkpoints``; None: nothing that ``convert`` reads."""
    for folder in (path, path / "checkpoints"):
        names = _names(folder)
        for kind in (_hugging_face, _deepspeed, _megatron):
            if names and (found := kind(folder, names)) is not None:
                return found
    return None


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


_UNPADDED = "Where the files do not say how many entries of the vocabulary are no padding, it asks for --vocab-size N."


def _deepspeed(folder: Path, names: set[str]) -> Foreign | None:
    is_step = _has_states(names)
    steps = [folder.name] if is_step else sorted(name for name in names if _has_states(_names(folder / name)))
    if (
        not steps
        and not any(_STEP.fullmatch(name) for name in names)
        and not any(_tells_of_step(folder / name) for name in _TRACKERS)
    ):
        return None
    universal = any(name.endswith("_universal") for name in (*steps, *names)) or (is_step and "zero" in names)
    whose = f"{'universal checkpoint' if universal else 'checkpoint'} of DeepSpeed{_shown(steps)}"
    remark = f"--qkv-layout interleaved if its Megatron-DeepSpeed is from before December 2024. {_UNPADDED}"
    return Foreign(whose, folder, _output(folder), ("--qkv-layout", "flat"), remark, bool(steps))


def _has_states(names: set[str]) -> bool:
    return any(name.endswith("_model_states.pt") for name in names)


def _tells_of_step(tracker: Path) -> bool:
    # whether a ``latest`` is DeepSpeed's: ours names a step-NNNNNN
    try:
        return (
            tracker.exists()
            and _STEP.fullmatch(read_small_file(tracker, 4096).decode("utf-8", "replace").strip()) is not None
        )
    except (CheckpointError, OSError):
        return False


def _megatron(folder: Path, names: set[str]) -> Foreign | None:
    iterations = sorted(name for name in names if _ITERATION.fullmatch(name) and _holds_ranks(_names(folder / name)))
    is_part = "model_optim_rng.pt" in names or _holds_ranks(names)
    if not (iterations or is_part or "latest_checkpointed_iteration.txt" in names):
        return None
    inside = _names(folder / iterations[-1]) if iterations and not is_part else names
    kind = "distributed checkpoint (torch_dist)" if _is_distributed(inside) else "checkpoint"
    whose = f"{kind} of Megatron-LM{_shown([] if is_part else iterations)}"
    return Foreign(whose, folder, _output(folder), remark=_UNPADDED, is_whole=bool(iterations) or is_part)


def _holds_ranks(names: set[str]) -> bool:
    return any(map(_RANK.fullmatch, names)) or _is_distributed(names)


def _is_distributed(names: set[str]) -> bool:
    return ".metadata" in names or {"common.pt", "metadata.json"} <= names


def _shown(names: list[str]) -> str:
    return f" ({', '.join(names[-3:])})" if names else ""


def _hugging_face(folder: Path, names: set[str]) -> Foreign | None:
    if "config.json" not in names or not any(_WEIGHTS.fullmatch(name) for name in names):
        return None
    remark = "It has no optimizer's state: train with --finetune (and --use-checkpoint-args, which takes the model's flags from there)."
    words = ("--from", "hf") if "latest" in names else ()  # its trainer leaves DeepSpeed's files beside the model
    return Foreign("model of Hugging Face (config.json)", folder, _output(folder), words, remark)


def _output(folder: Path) -> str:
    # a name for what is made of a folder: beside it, or beside the checkpoint that it is a part of
    root = next(part for part in (folder, *folder.parents) if not _is_part(part))
    return f"{root if root.name not in ('', '..') else root.resolve()}-megatron_sp"


def _is_part(folder: Path) -> bool:
    return any(pattern.fullmatch(folder.name) for pattern in (_ITERATION, _RANK, _STEP))
