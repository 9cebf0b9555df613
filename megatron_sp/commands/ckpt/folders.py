"""``ckpt ls``, ``verify`` and ``prune``: the checkpoints of a run as folders of files.

A survey reads only manifests, state and file sizes, takes no lock and changes nothing. A job may be saving or deleting
meanwhile: a folder that disappears during the survey is omitted. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.checkpoint import commit, find
from megatron_sp.checkpoint import manifest as files
from megatron_sp.checkpoint.commit import list_steps
from megatron_sp.checkpoint.lock import Holder, RunLock, holder_of
from megatron_sp.checkpoint.manifest import MANIFEST_NAME, STATE_NAME, Manifest, read_manifest, read_state
from megatron_sp.commands.ckpt.tables import Progress, date, facts, layout_words, parameter_words, plural, warn
from megatron_sp.report.run_history import number, read_history
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_OK, CheckpointError, ConfigError, DataError, DiskError
from megatron_sp.utils.files import fsync_dir
from megatron_sp.utils.format import aligned, format_bytes

DeepCheck = Callable[[Path, Manifest], list[str]]
CHECKPOINTS = "checkpoints"
STEP = "step"
_HEADINGS = ("folder", "saved", "size", "files", "tensors", "parameters", "optimizer", "processes", "loss", "state")


# ------------------------------------------------------------------------------------------ paths of the command line


class CheckpointPath(NamedTuple):
    """Meaning of a path on the command line."""

    folder: Path  # folder of the step folders
    run: Path | None  # run folder, with LOCK and metrics.jsonl; None for step folders outside of a run
    only: Path | None = None  # the step folder, if the path names a single one; else None


def resolve(path: Path) -> CheckpointPath:
    """Resolve a path to a run, its checkpoints folder, or one step folder. Raises CheckpointError: there is none."""

    def run_of(folder: Path) -> Path | None:
        return folder.absolute().parent if folder.absolute().name == CHECKPOINTS else None

    if not path.is_dir():
        find.candidates(path, None)  # its message lists what there is instead
    if find.is_step_folder(path):
        return CheckpointPath(path.parent, run_of(path.parent), path)
    folder = find.checkpoints_folder(path)
    return CheckpointPath(folder, path if folder != path else run_of(path))


def resolve_runs(path: Path) -> list[CheckpointPath]:
    # resolve a path like ``resolve``, and a folder of runs to all of them
    place = resolve(path)
    if place.only is None and place.folder == path and not list_steps(path) and path.name != CHECKPOINTS:
        runs = sorted(
            Path(entry.path)
            for entry in os.scandir(path)
            if entry.is_dir() and (Path(entry.path) / CHECKPOINTS).is_dir()
        )
        if runs:
            return [resolve(run) for run in runs]
    return [place]


def step_folder(path: Path, ckpt_step: int | None = None) -> Path:
    """Return the step folder itself, or the newest (or chosen) one of a run. Raises CheckpointError: there is none."""
    candidates = find.candidates(path, ckpt_step)
    for warning in candidates.warnings:
        warn(warning)
    return candidates.folders[0]


# ------------------------------------------------------------------------------------------------------------- survey


@dataclass
class Entry:
    """One folder of a survey.

    Attributes:
        num_bytes, num_files: bytes and files now on disk, whatever the manifest lists.
    """

    path: Path
    step: int
    kind: str  # ``step``, or the kind of leftover: ``part``, ``replaced``, ``abandoned``
    num_bytes: int = 0
    num_files: int = 0
    saved: float = 0.0  # time of the save, in seconds since 1970
    manifest: Manifest | None = None  # None if there is no valid one
    state: dict[str, Any] = field(default_factory=dict)  # contents of ``state.json``; empty if it cannot be read
    problems: list[str] = field(default_factory=list)  # problems that manifest, state and sizes show


@dataclass
class Survey:
    """Survey of a checkpoints folder.

    Attributes:
        steps, leftovers: step folders, and partial, abandoned and replaced ones, in order of steps.
    """

    place: CheckpointPath
    steps: list[Entry] = field(default_factory=list)
    leftovers: list[Entry] = field(default_factory=list)
    latest: int | None = None  # the step that the file ``latest`` names
    writer: Holder | None = None  # holder of the run's lock
    # step -> its training record in ``metrics.jsonl``, without records that a resume has undone
    losses: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def is_written(self) -> bool:
        return self.writer is not None and self.writer.may_write

    def newest(self) -> Entry | None:
        """Return what a resume tries first: a newer step that an interrupted save has set aside is put back by then."""
        newest = self.steps[-1] if self.steps else None
        aside = [e for e in self.leftovers if e.kind == "replaced" and e.step > (newest.step if newest else -1)]
        return max(aside, key=lambda entry: entry.step) if aside else newest

    def resumes_from(self) -> Entry | None:
        # the entry that a resume would load; None if the newest one is not complete
        newest = self.newest()
        return None if newest is None or newest.problems else newest

    def loss_of(self, entry: Entry) -> float | None:
        """Return the training loss logged at this step; None if there is none, or a resume has undone it."""
        if entry.kind in ("replaced", "abandoned") or entry.step not in self.losses:
            return None
        return number(self.losses[entry.step].get("loss"))


def survey(place: CheckpointPath) -> Survey:
    """Survey a folder, or the one step folder that ``place`` names."""
    surveyed = Survey(place, writer=holder_of(place.run) if place.run else None)
    if place.only is not None:
        surveyed.steps = [look_at(place.only, _step_of(place.only), STEP)]
    else:
        entries = _entries(place.folder, surveyed.notes)
        surveyed.steps = [entry for entry in entries if entry.kind == STEP]
        surveyed.leftovers = [entry for entry in entries if entry.kind != STEP]
        surveyed.latest, problem = commit.read_latest(place.folder)
        surveyed.notes += [f"{problem}: the folders themselves decide"] if problem else []
    if place.run is not None:
        with suppress(DataError):  # no log yet, or none at all: the losses stay out
            surveyed.losses = read_history(place.run).train
    return surveyed


def look_at(path: Path, step: int, kind: str) -> Entry:
    """Examine one folder: its manifest, its state, and existence and sizes of its files."""
    entry = Entry(path, step, kind)
    with os.scandir(path) as there:
        for file in there:
            entry.num_files += 1
            entry.num_bytes += file.stat(follow_symlinks=False).st_size
    sealed = path / MANIFEST_NAME
    entry.saved = (sealed if sealed.exists() else path).stat().st_mtime
    try:
        entry.manifest = read_manifest(path)
        entry.problems = files.missing_or_cut(path, entry.manifest)
        entry.state = read_state(path)
    except CheckpointError as error:
        entry.problems.append(str(error))
    entry.problems = [
        problem.replace(f"{path}/", "").replace(f"{path} ", "it ") for problem in dict.fromkeys(entry.problems)
    ]
    return entry


def _entries(folder: Path, notes: list[str]) -> list[Entry]:
    entries, strange = [], []
    for name in sorted(os.listdir(folder)):
        path, step, left = folder / name, commit.step_number(name), commit.left_over(name)
        if step is not None and path.is_symlink():
            notes.append(f"{name} is a symbolic link: not looked at, and a load refuses it")
            continue
        if (step is None and left is None) or path.is_symlink() or not path.is_dir():
            if name != commit.LATEST_NAME and not name.startswith(f".{commit.LATEST_NAME}."):
                strange.append(name if name.isprintable() else ascii(name))  # it goes to a terminal
            continue
        try:
            entries.append(look_at(path, step, STEP) if step is not None else look_at(path, *(left or (0, ""))))
        except FileNotFoundError:
            continue  # renamed or deleted since the folder was listed
    if strange:
        notes.append(f"ignored, not a step folder: {', '.join(strange[:5])}{', ...' if len(strange) > 5 else ''}")
    return sorted(entries, key=lambda entry: (entry.step, entry.path.name))


def _step_of(path: Path) -> int:
    left, step = commit.left_over(path.name), commit.step_number(path.name)
    if step is not None or left is not None:
        return step if step is not None else left[0] if left else 0
    try:
        return read_manifest(path).step
    except CheckpointError:
        return 0


# ----------------------------------------------------------------------------------------------------------------- ls


def ls(paths: Sequence[Path], *, as_json: bool) -> int:
    """Print a line for each checkpoint, and advice on damaged ones and leftovers. Raises CheckpointError: no such folder."""
    surveys = [survey(place) for path in paths for place in resolve_runs(path)]
    if as_json:
        print(json.dumps([_survey_record(found) for found in surveys], indent=1))
    else:
        print("\n\n".join("\n".join(_survey_lines(found)) for found in surveys))
    return EXIT_OK


def _survey_lines(listing: Survey) -> list[str]:
    folder, advice = listing.place.folder, [f"  {line}" for line in _advice(listing)]
    entries = sorted(
        [*listing.steps, *listing.leftovers], key=lambda entry: entry.step
    )  # leftovers of a step follow it
    if not entries:
        program = find.identify(folder)
        return (
            [f"{folder}: no checkpoint", *advice]
            if program is None
            else find.of_another_program(folder, program, None).splitlines()
        )
    head = f"{folder}: {plural(len(listing.steps), 'checkpoint')}"
    head += f", {len(listing.leftovers)} left over" if listing.leftovers else ""
    head += f", {format_bytes(sum(entry.num_bytes for entry in entries))}"
    return [head, *aligned([_HEADINGS, *(_row(listing, entry) for entry in entries)], right=(2, 3, 4, 8)), *advice]


def _row(listing: Survey, entry: Entry) -> tuple[str, ...]:
    loss, held = listing.loss_of(entry), ("-", "-", "-", "-")
    if entry.manifest:
        known = facts(entry.manifest, entry.state)
        has_optimizer = "yes" if known["optimizer"] else "no"
        held = (f"{known['tensors']:,}", parameter_words(known), has_optimizer, layout_words(known["layout"]))
    words = [_health(listing, entry)]
    if entry.problems and entry.kind != "part":
        more = f" (and {len(entry.problems) - 1} more)" if len(entry.problems) > 1 else ""
        words[0] += f": {entry.problems[0].splitlines()[0]}{more}"
    words += ["latest"] if entry.kind == STEP and entry.step == listing.latest else []
    words += ["a resume takes it"] if listing.place.only is None and entry is listing.resumes_from() else []
    size = format_bytes(entry.num_bytes), str(entry.num_files)
    return entry.path.name, date(entry.saved), *size, *held, "-" if loss is None else f"{loss:.4f}", ", ".join(words)


def _health(listing: Survey, entry: Entry) -> str:
    # the state of an entry: complete, damaged, being written or deleted, unfinished, set aside, abandoned
    if entry.kind == "part":
        return "being written or deleted" if listing.is_written() else "unfinished"
    word = {STEP: "complete", "replaced": "set aside", "abandoned": "abandoned"}[entry.kind]
    return word if not entry.problems else "damaged" if entry.kind == STEP else f"{word}, damaged"


def _advice(listing: Survey) -> list[str]:
    run, newest, lines = listing.place.run or listing.place.folder, listing.newest(), list(listing.notes)
    if listing.is_written() and listing.writer is not None:
        lines.append(f"a job is writing here: {listing.writer.who}, last sign of life {listing.writer.age_s:.0f} s ago")
    if listing.place.only is None and newest is not None and newest.problems:
        before = [entry.path.name for entry in listing.steps if not entry.problems and entry.step < newest.step]
        way = f"--resume-fallback takes {before[-1]}" if before else "there is no complete one before it"
        lines.append(f"a resume stops at {newest.path.name}, which is damaged: {way}")
    takes = listing.resumes_from()
    if takes is not None and takes.manifest is not None and not facts(takes.manifest, takes.state)["optimizer"]:
        lines.append(f"{takes.path.name} has no optimizer state: it loads with --finetune, or with --no-load-optim")
    kinds = {entry.kind for entry in listing.leftovers}
    if "part" in kinds and not listing.is_written():
        lines.append("unfinished: a save or a deletion was cut short; the next job that saves here removes it")
    if kinds & {"replaced", "abandoned"}:
        lines.append(
            "set aside, abandoned: from a continuation of the run that was given up; each can be loaded by its path"
        )
    if listing.steps or listing.leftovers:
        lines.append(
            f"checked: manifests and sizes; not the files' contents, which megatron-sp ckpt verify {run} compares"
        )
    if kinds and not listing.is_written():
        lines.append(f"to delete what is left over: megatron-sp ckpt prune {run} --leftovers")
    return lines


def _survey_record(listing: Survey) -> dict[str, Any]:
    resumes, writer = listing.resumes_from(), listing.writer

    def record(entry: Entry) -> dict[str, Any]:
        loss = listing.loss_of(entry)
        return {
            "path": str(entry.path), "step": entry.step, "health": _health(listing, entry), "problems": entry.problems,
            "saved": entry.saved, "bytes": entry.num_bytes, "files": entry.num_files,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            **(facts(entry.manifest, entry.state) if entry.manifest else {}),
        }  # fmt: skip

    return {
        "run": str(listing.place.run) if listing.place.run else None, "folder": str(listing.place.folder), "latest": listing.latest,
        "resume": resumes.step if resumes and listing.place.only is None else None,
        "writer": {"who": writer.who, "age_s": writer.age_s, "alive": writer.is_alive} if writer else None,
        "checkpoints": [record(entry) for entry in listing.steps], "leftovers": [record(entry) for entry in listing.leftovers],
        "notes": _advice(listing),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- verify


def verify(path: Path, ckpt_step: int | None, *, every: bool, deep: DeepCheck | None) -> int:
    """Verify checkpoints and print all problems of each, not only the first.

    Args:
        every: verify all steps of the run.
        deep: checks the tensors themselves, too (``tensors.deep_problems``, which needs torch).
    Returns:
        The exit code: 0, or 3 if there is any problem.
    """
    folders = [] if every else [step_folder(path, ckpt_step)]
    if every:
        place = resolve(path)
        if place.only is not None or ckpt_step is not None:
            raise CheckpointError(
                f"--all asks for every step of a run, but one step is named ({path}): give the run, or leave --all out"
            )
        step_folder(path)  # raises where there is none
        folders = list(list_steps(place.folder).values())
    code = EXIT_OK
    for step_dir in folders:
        wrong = problems(step_dir, deep=deep)
        if wrong:
            code = EXIT_CHECKPOINT
            print(
                "\n".join([f"{step_dir}: damaged, {plural(len(wrong), 'problem')}:", *(f"  {p}" for p in wrong)]),
                file=sys.stderr,
            )
        else:
            listed = read_manifest(step_dir)
            size = format_bytes(listed.num_bytes)
            print(
                f"{step_dir}: sound: {size} in {plural(len(listed.files), 'file')}, {plural(len(listed.tensors), 'tensor')}",
                flush=True,
            )
    return code


def problems(step_dir: Path, *, deep: DeepCheck | None = None) -> list[str]:
    """Return the problems of a step folder, one sentence each; files that no manifest lists only cause a warning."""
    try:
        listed = read_manifest(step_dir)
    except CheckpointError as error:
        return [str(error)]  # it is unknown what else must be there
    if extra := files.extra_files(step_dir, listed):
        warn(f"{step_dir} holds files that its manifest does not list, ignored: {', '.join(extra[:10])}")
    texts = byte_problems(step_dir, listed)
    if not any(STATE_NAME in problem for problem in texts):
        try:
            step = read_state(step_dir).get("step")
            texts += (
                [] if step == listed.step else [f"state.json is of step {step}, the manifest of step {listed.step}"]
            )
        except CheckpointError as error:
            texts.append(str(error))
    texts += [] if deep is None else deep(step_dir, listed)
    return [problem.replace(f"{step_dir}/", "") for problem in dict.fromkeys(texts)]


def byte_problems(step_dir: Path, listed: Manifest) -> list[str]:
    """Return a sentence for each file that is missing, cut or changed."""
    lacking = {}
    for name, record in listed.files.items():
        if texts := files.missing_or_cut(step_dir, Manifest(listed.step, listed.world_size, {name: record}, {})):
            lacking[name] = texts
    there = [name for name in listed.files if name not in lacking]
    with Progress("verifying", sum(listed.files[name].num_bytes for name in there)) as progress:
        return [text for texts in lacking.values() for text in texts] + files.changed(
            step_dir, listed, there, progress.add
        )


# -------------------------------------------------------------------------------------------------------------- prune


def prune(path: Path, *, keep_last: int | None, keep_every: int | None, leftovers: bool, dry_run: bool) -> int:
    """Delete old checkpoints and leftovers of a run, under its lock, but never the newest sound checkpoint.

    Every checkpoint to keep is read in full first: a damaged one does not count as kept.

    Args:
        keep_last: number of sound checkpoints to keep; None: no step is deleted.
        keep_every: also keep multiples of this step number.
        leftovers: also delete unfinished and set-aside folders.
    Raises:
        ConfigError: the flags request nothing, or are out of range.
        LockError: a job is writing to this run.
        CheckpointError: the path is not a run, there is no sound checkpoint to keep, or a leftover folder may still be
            needed.
        DiskError: a folder cannot be deleted.
    """
    if keep_last is None and not leftovers:
        raise ConfigError(
            "nothing to delete: give --keep-last N for old checkpoints, --leftovers for left-over folders, or both"
        )
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"--keep-last ({keep_last}) must be at least 1: the newest sound checkpoint is never deleted")
    if keep_every is not None and (keep_every < 1 or keep_last is None):
        raise ConfigError(
            f"--keep-every ({keep_every}) must be at least 1 and goes with --keep-last: it adds to what that keeps"
        )
    place = resolve(path)
    if place.only is not None or place.run is None:
        raise CheckpointError(
            f"{path} is not a run: give the folder that has {CHECKPOINTS} in it, for that is what its lock is in"
        )
    try:
        with nullcontext() if dry_run else RunLock(place.run):
            _prune(place, keep_last, keep_every, leftovers, dry_run)
    except OSError as error:
        raise DiskError(f"not everything could be deleted: {commit.explain(error, place.folder)}") from None
    return EXIT_OK


def _prune(
    place: CheckpointPath, keep_last: int | None, keep_every: int | None, leftovers: bool, dry_run: bool
) -> None:
    is_sound: dict[Path, bool] = {}

    def sound(step_dir: Path) -> bool:
        if step_dir not in is_sound:
            try:
                is_sound[step_dir] = not byte_problems(step_dir, read_manifest(step_dir))
            except CheckpointError:
                is_sound[step_dir] = False
            if not is_sound[step_dir]:
                warn(f"{step_dir} is damaged and does not count as kept (megatron-sp ckpt verify {step_dir} says how)")
        return is_sound[step_dir]

    if dry_run and (listing := survey(place)).is_written() and listing.writer:
        warn(f"a job is writing here ({listing.writer.who}): nothing can be deleted until it ends")
    old = [] if keep_last is None else commit.outdated(place.folder, keep_last, keep_every, sound)
    if keep_last is not None and not old:
        kept = plural(sum(is_sound.values()), "sound checkpoint")
        print(f"no step to delete: {kept} of the {keep_last} to keep, and none older than those")
    freed = sum(_delete(step_dir, dry_run) for step_dir in old)
    if leftovers:
        freed += _delete_leftovers(place.folder, sound, dry_run)
    if not dry_run:
        fsync_dir(place.folder)
    print(f"{'would free' if dry_run else 'freed'} {format_bytes(freed)}")


def _delete_leftovers(folder: Path, sound: Callable[[Path], bool], dry_run: bool) -> int:
    # delete unfinished and set-aside folders, unless one may still be needed; return the freed bytes
    left = {
        entry.name: kind
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
        if (kind := commit.left_over(entry.name)) is not None and entry.is_dir(follow_symlinks=False)
    }
    if not left:
        print("nothing is left over")
        return 0
    newest = max(list_steps(folder), default=-1)
    back = [name for name, (step, _) in left.items() if "replaced" in name and step > newest]
    if back:
        raise CheckpointError(
            f"{folder / back[-1]} is newer than every step: the save that replaced it was cut short, and the next"
            f" job puts it back; rename it to {back[-1].partition('.')[0]} yourself, or start that job, before"
            " left-over folders are deleted"
        )
    aside = [name for name, (_, kind) in left.items() if kind != "part"]
    if aside and not any(sound(path) for path in reversed(list_steps(folder).values())):
        raise CheckpointError(
            f"{folder} has no sound step: {', '.join(aside)} may hold all that is left of this run and is not deleted"
        )
    return sum(_delete(folder / name, dry_run) for name in left)


def _delete(path: Path, dry_run: bool) -> int:
    size = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    if not dry_run:
        commit.discard(path)
    print(f"{'would delete' if dry_run else 'deleted'} {path} ({format_bytes(size)})", flush=True)
    return size
