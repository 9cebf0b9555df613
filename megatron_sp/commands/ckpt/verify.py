"""``ckpt verify``: all problems of a checkpoint, not only the first."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_sp.checkpoint import verify
from megatron_sp.checkpoint.commit import list_steps
from megatron_sp.checkpoint.manifest import STATE_NAME, Manifest, read_manifest, read_state
from megatron_sp.commands.ckpt.places import place_of, step_folder
from megatron_sp.commands.ckpt.text import Progress, plural, warn
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_OK, CheckpointError
from megatron_sp.utils.format import format_bytes


def run(path: Path, ckpt_step: int | None, *, every: bool, deep: bool) -> int:
    """Verify checkpoints and print the results.

    Args:
        every: verify all steps of the run.
        deep: check the tensors themselves, too.
    Returns:
        The exit code: 0, or 3 if there is any problem.
    """
    code = EXIT_OK
    for step_dir in _folders(path, ckpt_step, every):
        found = problems(step_dir, deep=deep)
        if found:
            code = EXIT_CHECKPOINT
            print("\n".join([f"{step_dir}: damaged, {plural(len(found), 'problem')}:", *(f"  {p}" for p in found)]), file=sys.stderr)
        else:
            listed = read_manifest(step_dir)
            size = format_bytes(listed.num_bytes)
            print(f"{step_dir}: sound: {size} in {plural(len(listed.files), 'file')}, {plural(len(listed.tensors), 'tensor')}", flush=True)
    return code


def _folders(path: Path, ckpt_step: int | None, every: bool) -> list[Path]:
    if not every:
        return [step_folder(path, ckpt_step)]
    place = place_of(path)
    if place.only is not None or ckpt_step is not None:
        raise CheckpointError(f"--all asks for every step of a run, but one step is named ({path}): give the run, or leave --all out")
    step_folder(path)  # raises where there is none
    return list(list_steps(place.folder).values())


def problems(step_dir: Path, *, deep: bool) -> list[str]:
    """Return the problems of a step folder, one sentence each; files that the manifest does not list only cause a warning."""
    try:
        listed = read_manifest(step_dir)
    except CheckpointError as error:
        return [str(error)]  # it is unknown what else must be there
    if extra := verify.extra_files(step_dir, listed):
        warn(f"{step_dir} holds files that its manifest does not list, ignored: {', '.join(extra[:10])}")
    found = of_bytes(step_dir, listed)
    if not any(STATE_NAME in problem for problem in found):
        found += _of_state(step_dir, listed)
    if deep:
        from megatron_sp.commands.ckpt.deep import deep_problems

        found += deep_problems(step_dir, listed)
    return [problem.replace(f"{step_dir}/", "") for problem in dict.fromkeys(found)]


def of_bytes(step_dir: Path, listed: Manifest) -> list[str]:
    """Return a sentence for each file that is missing, cut or changed."""
    lacking = {name: texts for name in listed.files if (texts := verify.missing_or_cut(step_dir, _only(listed, name)))}
    there = [name for name in listed.files if name not in lacking]
    with Progress("verifying", sum(listed.files[name].num_bytes for name in there)) as progress:
        return [text for texts in lacking.values() for text in texts] + verify.changed(step_dir, listed, there, progress.add)


def is_sound(step_dir: Path) -> bool:
    """Return whether the manifest is valid and every file has the listed contents."""
    try:
        listed = read_manifest(step_dir)
    except CheckpointError:
        return False
    return not of_bytes(step_dir, listed)


def _only(listed: Manifest, name: str) -> Manifest:
    return Manifest(listed.step, listed.world_size, {name: listed.files[name]}, {})


def _of_state(step_dir: Path, listed: Manifest) -> list[str]:
    try:
        step = read_state(step_dir).get("step")
    except CheckpointError as error:
        return [str(error)]
    return [] if step == listed.step else [f"state.json is of step {step}, the manifest of step {listed.step}"]
