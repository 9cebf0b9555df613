"""Finding step folders, newest first, in the path given to --load: a run, its checkpoints folder, or one step folder.

Checkpoints of other programs are told by their files' names; the error has the command that converts them.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from megatron_sp.checkpoint.commit import list_steps, read_latest, require_no_links, step_name, step_number
from megatron_sp.checkpoint.manifest import MANIFEST_NAME, is_complete
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import read_small_file

_ITERATION = re.compile(r"iter_\d{7,}|release")
_RANK = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
_STEP = re.compile(r"global_step\d+(_universal)?")
_WEIGHTS = re.compile(r"model.*\.safetensors|pytorch_model.*\.bin")
_TRACKERS = ("latest", "latest_universal")
_OF_CHECKPOINTS = re.compile(
    r"step-\d+(\.(replaced|abandoned)-.*)?|latest|latest_universal|latest_checkpointed_iteration\.txt|iter_\d+|release"
    r"|global_step\d+.*|mp_rank_.*|\.metadata"
    r"|.*\.(safetensors|pt|pth|ckpt|distcp)|pytorch_model.*|model_optim_rng.*"
)


class Candidates(NamedTuple):
    """Step folders to try, newest first, and warnings."""

    folders: list[Path]
    warnings: list[str]


def checkpoints_folder(path: Path) -> Path:
    """Return ``path/checkpoints`` if it exists, else ``path``."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def is_step_folder(path: Path) -> bool:
    """Return whether ``path`` itself is a step folder."""
    return path.is_dir() and (step_number(path.name) is not None or (path / MANIFEST_NAME).exists())


def has_steps(path: Path) -> bool:
    """Return whether ``path`` is or holds a step folder, sound or not."""
    return is_step_folder(path) or bool(list_steps(checkpoints_folder(path)))


def is_vacant(path: Path) -> bool:
    """Return whether nothing in a folder looks like a checkpoint of any program."""
    if not (path.is_symlink() or path.exists()):
        return True
    try:
        folders = {path, checkpoints_folder(path)}
        return not any(_OF_CHECKPOINTS.fullmatch(name) for folder in folders for name in os.listdir(folder))
    except OSError:  # it may be full of them; or it is a file
        return False


def candidates(path: Path, ckpt_step: int | None) -> Candidates:
    """Return the step folders of ``path``: all, or ``ckpt_step`` and those before it. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(_absent(path))
    if is_step_folder(path):
        own = step_number(path.name)
        if ckpt_step is not None and own not in (None, ckpt_step):
            asked = f"--ckpt-step {ckpt_step} asks for another: give the run's folder"
            raise CheckpointError(f"{path} is one step's folder, {asked}")
        if own is not None:
            require_no_links(path.parent, own)
        return Candidates([path], [])
    folder = checkpoints_folder(path)
    steps = list_steps(folder)
    require_no_links(folder, ckpt_step)
    if not steps:
        require_own(path, ckpt_step)
        runs = (run.parent for run in sorted(path.glob("*/checkpoints")))
        near = [str(run) for run in runs if list_steps(checkpoints_folder(run))][:3]
        there = f"did you mean {' or '.join(near)}?" if near else f"there is: {listing(folder)}"
        raise CheckpointError(f"{path} has no checkpoint: looked for {folder}/step-*/{MANIFEST_NAME}; {there}")
    hint, problem = read_latest(folder)
    warnings = [f"{problem}: ignored, the folders themselves decide"] if problem else []
    if ckpt_step is not None:
        if ckpt_step not in steps:
            sound = _step_list({step: p for step, p in steps.items() if is_complete(p)})
            asked = f"{step_name(ckpt_step)} (--ckpt-step {ckpt_step})"
            raise CheckpointError(f"{folder} has no {asked}; it has the steps {sound}")
        steps = {step: p for step, p in steps.items() if step <= ckpt_step}
    elif hint is not None and hint != max(steps):
        newest = f"the newest folder is {step_name(max(steps))}"
        warnings.append(f"{folder / 'latest'} names {step_name(hint)}, but {newest}: the folders decide")
    return Candidates([steps[step] for step in sorted(steps, reverse=True)], warnings)


def require_own(path: Path, ckpt_step: int | None) -> None:
    """Raise CheckpointError, with the way out, if a folder holds another program's checkpoint and no steps of ours."""
    if not has_steps(path) and (other := identify(path)) is not None:
        raise CheckpointError(of_another_program(path, other, ckpt_step))


def of_another_program(path: Path, other: Foreign, ckpt_step: int | None) -> str:
    """Say what a folder holds instead, and how to convert it."""
    return f"{path} has no checkpoint of megatron_sp, but a {other.whose}. {other.way_out(ckpt_step)}"


def _step_list(steps: dict[int, Path]) -> str:
    numbers = [str(step) for step in sorted(steps)]
    return ", ".join(numbers if len(numbers) <= 12 else [*numbers[:4], "...", *numbers[-7:]]) or "none"


def way_out(step_dir: Path) -> str:
    """Return advice on what to do about a damaged step folder."""
    beside = {step: path for step, path in list_steps(step_dir.parent).items() if path != step_dir}
    others = {step: path for step, path in beside.items() if is_complete(path)}
    if not others:
        return "Those beside it are not complete either." if beside else "There is no other checkpoint beside it."
    own = step_number(step_dir.name)
    can_fall_back = own is not None and min(others) < own
    fallback = "--resume-fallback to go on from the newest sound one before it, or " if can_fall_back else ""
    return (
        f"Give {fallback}--ckpt-step N to choose one of {_step_list(others)}, whose files are all there with their"
        " sizes; a load reads and compares their contents."
    )


def listing(folder: Path) -> str:
    """Return the first few names in a folder, for messages."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"nothing readable ({error.strerror})"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) or "nothing") + more


def _absent(path: Path) -> str:
    if path.exists():
        kinds = "a folder (a run, its checkpoints folder, or one step-NNNNNN folder in it)"
        return f"{path} is a file: a checkpoint is {kinds}"
    parent, missing = path.absolute().parent, path.name
    while not parent.is_dir() and parent != parent.parent:
        parent, missing = parent.parent, parent.name
    near = difflib.get_close_matches(missing, _names(parent), n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(near)}" if near else f"there is: {listing(parent)}"
    return f"there is no {path}: looked for a run, its checkpoints folder or a step folder; in {parent}, {hint}"


# Checkpoints of other programs. Nothing is opened but DeepSpeed's one-line ``latest``.

_UNPADDED = "Where the files do not say how many entries of the vocabulary are no padding, it asks for --vocab-size N."


class Foreign(NamedTuple):
    """A checkpoint of another program."""

    whose: str  # what it is, as the end of "it holds"
    folder: Path  # folder for --input
    words: tuple[str, ...] = ()  # further words that its conversion needs
    remark: str = ""  # what may have to be changed in them, or how to go on; a sentence or two
    is_whole: bool = True  # False if its folders are missing

    @property
    def output(self) -> str:
        # folder for --output: beside ``folder``, or beside the checkpoint that it is a part of
        patterns = (_ITERATION, _RANK, _STEP)
        parts = (self.folder, *self.folder.parents)
        root = next(part for part in parts if not any(pattern.fullmatch(part.name) for pattern in patterns))
        return f"{root if root.name not in ('', '..') else root.resolve()}-megatron_sp"

    def way_out(self, step: int | None) -> str:
        if not self.is_whole:
            missing = "The folders with its tensors are not there"
            return f"{missing}: bring them back (is a disk not mounted?), or give another folder."
        line = ["megatron-sp", "convert", "--input", str(self.folder), "--to", "megatron_sp", "--output", self.output]
        line += [*(() if step is None else ("--step", str(step))), *self.words]
        remark = f"\n{self.remark}" if self.remark else ""
        return f"Convert it once, and load what that has made ({self.output}):\n  {shlex.join(line)}{remark}"


def identify(path: Path) -> Foreign | None:
    """Return what another program has left in a folder, or in its ``checkpoints``."""
    for folder in (path, path / "checkpoints"):
        names = _names(folder)
        if "config.json" in names and any(_WEIGHTS.fullmatch(name) for name in names):
            remark = (
                "It has no optimizer's state: train with --finetune (and --use-checkpoint-args, which takes the"
                " model's flags from there)."
            )
            # its trainer leaves DeepSpeed's files beside the model
            words = ("--from", "hf") if "latest" in names else ()
            return Foreign("model of Hugging Face (config.json)", folder, words, remark)
        if names and (other := _deepspeed(folder, names) or _megatron(folder, names)):
            return other
    return None


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _deepspeed(folder: Path, names: set[str]) -> Foreign | None:
    def has_states(names: set[str]) -> bool:
        return any(name.endswith("_model_states.pt") for name in names)

    def names_a_step(tracker: Path) -> bool:  # unlike our own ``latest``, which names a step-NNNNNN
        try:
            text = read_small_file(tracker, 4096).decode("utf-8", "replace") if tracker.exists() else ""
        except (CheckpointError, OSError):
            return False
        return _STEP.fullmatch(text.strip()) is not None

    is_step = has_states(names)
    steps = [folder.name] if is_step else sorted(name for name in names if has_states(_names(folder / name)))
    was_here = any(map(_STEP.fullmatch, names)) or any(names_a_step(folder / name) for name in _TRACKERS)
    if not steps and not was_here:
        return None
    universal = any(name.endswith("_universal") for name in (*steps, *names)) or (is_step and "zero" in names)
    kind = "universal checkpoint" if universal else "checkpoint"
    shown = f" ({', '.join(steps[-3:])})" if steps else ""
    remark = f"--qkv-layout interleaved if its Megatron-DeepSpeed is from before December 2024. {_UNPADDED}"
    return Foreign(f"{kind} of DeepSpeed{shown}", folder, ("--qkv-layout", "flat"), remark, bool(steps))


def _megatron(folder: Path, names: set[str]) -> Foreign | None:
    def is_distributed(names: set[str]) -> bool:
        return ".metadata" in names or {"common.pt", "metadata.json"} <= names

    def holds_ranks(names: set[str]) -> bool:
        return any(map(_RANK.fullmatch, names)) or is_distributed(names)

    iterations = sorted(name for name in names if _ITERATION.fullmatch(name) and holds_ranks(_names(folder / name)))
    is_part = "model_optim_rng.pt" in names or holds_ranks(names)
    if not (iterations or is_part or "latest_checkpointed_iteration.txt" in names):
        return None
    inside = _names(folder / iterations[-1]) if iterations and not is_part else names
    kind = "distributed checkpoint (torch_dist)" if is_distributed(inside) else "checkpoint"
    shown = f" ({', '.join(iterations[-3:])})" if iterations and not is_part else ""
    return Foreign(f"{kind} of Megatron-LM{shown}", folder, (), _UNPADDED, bool(iterations) or is_part)
