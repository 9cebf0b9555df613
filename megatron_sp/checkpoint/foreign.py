"""Checkpoints of other programs, told by the names of their files: what a folder holds, and the command that converts it.

Nothing is opened but DeepSpeed's one-line ``latest``: a run finds out before it creates anything.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import read_small_file

_ITERATION = re.compile(r"iter_\d{7,}|release")
_RANK = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
_STEP = re.compile(r"global_step\d+(_universal)?")
_WEIGHTS = re.compile(r"model.*\.safetensors|pytorch_model.*\.bin")
_TRACKERS = ("latest", "latest_universal")


class Foreign(NamedTuple):
    """A checkpoint of another program.

    Attributes:
        whose: what it is, as the end of "it holds".
        folder: folder for --input.
        output: folder for --output.
        words: further words that its conversion needs.
        remark: what may have to be changed in them, or how to go on; a sentence or two.
        is_whole: False if its folders are missing.
    """

    whose: str
    folder: Path
    output: str
    words: tuple[str, ...] = ()
    remark: str = ""
    is_whole: bool = True

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
    if not steps and not any(_STEP.fullmatch(name) for name in names) and not any(_tells_of_step(folder / name) for name in _TRACKERS):
        return None
    universal = any(name.endswith("_universal") for name in (*steps, *names)) or (is_step and "zero" in names)
    whose = f"{'universal checkpoint' if universal else 'checkpoint'} of DeepSpeed{_shown(steps)}"
    remark = f"--qkv-layout interleaved if its Megatron-DeepSpeed is from before December 2024. {_UNPADDED}"
    return Foreign(whose, folder, _output(folder), ("--qkv-layout", "flat"), remark, bool(steps))


def _has_states(names: set[str]) -> bool:
    return any(name.endswith("_model_states.pt") for name in names)


def _tells_of_step(tracker: Path) -> bool:
    """Return whether a ``latest`` is DeepSpeed's: ours names a step-NNNNNN."""
    try:
        return tracker.exists() and _STEP.fullmatch(read_small_file(tracker, 4096).decode("utf-8", "replace").strip()) is not None
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
    """Return a name for what is made of a folder: beside it, or beside the checkpoint that it is a part of."""
    root = next(part for part in (folder, *folder.parents) if not _is_part(part))
    return f"{root if root.name not in ('', '..') else root.resolve()}-megatron_sp"


def _is_part(folder: Path) -> bool:
    return any(pattern.fullmatch(folder.name) for pattern in (_ITERATION, _RANK, _STEP))
