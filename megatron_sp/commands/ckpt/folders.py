"""``ckpt ls``, ``verify`` and ``prune``: the checkpoints of a run as folders of files.

A survey reads only manifests, state and file sizes, takes no lock and changes nothing. A job may be saving or deleting
meanwhile: a folder that disappears during the survey is omitted. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.checkpoint import commit, find
from megatron_sp.checkpoint import manifest as files
from megatron_sp.checkpoint.commit import list_steps
from megatron_sp.checkpoint.lock import Holder, RunLock, holder_of
from megatron_sp.checkpoint.manifest import ITEM_BYTES, MANIFEST_NAME, STATE_NAME, Manifest, read_manifest, read_state
from megatron_sp.config.schema_model import is_expert_bias
from megatron_sp.report.run_history import number, read_history
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_OK, CheckpointError, ConfigError, DataError, DiskError
from megatron_sp.utils.files import fsync_dir
from megatron_sp.utils.format import aligned, format_bytes, format_count, format_duration

DeepCheck = Callable[[Path, Manifest], list[str]]
Record = dict[str, Any]
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # as in a manifest: name -> (dtype, shape)
CHECKPOINTS, STEP, WEIGHTS = "checkpoints", "step", "weights"
SHORT_DTYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_HEADINGS = ("folder", "saved", "size", "files", "tensors", "parameters", "optimizer", "processes", "loss", "state")


# ------------------------------------------------------------------------------------------ paths of the command line


class CheckpointPath(NamedTuple):
    """Meaning of a path on the command line."""

    folder: Path  # folder of the step folders
    run: Path | None  # run folder, with LOCK and metrics.jsonl; None for step folders outside of a run
    only: Path | None = None  # the step folder, if the path names a single one


def _resolve(path: Path) -> CheckpointPath:
    # a run, its checkpoints folder, or one step folder. Raises CheckpointError: there is none
    if not path.is_dir():
        find.candidates(path, None)  # its message lists what there is instead
    is_step = find.is_step_folder(path)
    folder = path.parent if is_step else find.checkpoints_folder(path)
    run = folder.absolute().parent if folder.absolute().name == CHECKPOINTS else None
    return CheckpointPath(folder, path if not is_step and folder != path else run, path if is_step else None)


def step_folder(path: Path, ckpt_step: int | None = None) -> Path:
    """Return the step folder itself, or the newest (or chosen) one of a run. Raises CheckpointError: there is none."""
    candidates = find.candidates(path, ckpt_step)
    for warning in candidates.warnings:
        warn(warning)
    return candidates.folders[0]


# ------------------------------------------------------------------------------------------------------------- survey


@dataclass
class Entry:
    """One folder of a survey."""

    path: Path
    step: int
    kind: str  # ``step``, or the kind of leftover: ``part``, ``replaced``, ``abandoned``
    num_bytes: int = 0  # now on disk, whatever the manifest lists
    num_files: int = 0
    saved: float = 0.0  # time of the save, in seconds since 1970
    manifest: Manifest | None = None  # None if there is no valid one
    state: Record = field(default_factory=dict)  # contents of ``state.json``; empty if it cannot be read
    problems: list[str] = field(default_factory=list)  # what manifest, state and sizes show
    loss: float | None = None  # logged at this step; None if it was not, or if a resume has undone it
    health: str = ""  # in a word or two


@dataclass
class Survey:
    """Contents of a checkpoints folder."""

    place: CheckpointPath
    steps: list[Entry]  # in order of steps, as the leftovers
    leftovers: list[Entry]
    latest: int | None  # the step that the file ``latest`` names
    holder: Holder | None  # of the run's lock
    writer: Holder | None  # the same, if it may be writing now
    newest: Entry | None  # what a resume tries first
    resumes_from: Entry | None  # what a resume would load; None if the newest one is not complete
    notes: list[str]


def _survey(place: CheckpointPath) -> Survey:
    notes: list[str] = []
    latest = None
    holder = holder_of(place.run) if place.run else None
    writer = holder if holder and holder.may_write else None
    if place.only is not None:
        left, step = commit.left_over(place.only.name), commit.step_number(place.only.name)
        if step is None and left is not None:
            step = left[0]
        elif step is None:
            with suppress(CheckpointError):
                step = read_manifest(place.only).step
        entries = [look_at(place.only, step or 0, STEP)]
    else:
        entries = _entries(place.folder, notes)
        latest, problem = commit.read_latest(place.folder)
        notes += [f"{problem}: the folders themselves decide"] if problem else []
    losses: dict[int, Record] = {}  # step: its training record, without those that a resume has undone
    if place.run is not None:
        with suppress(DataError):  # no log yet, or none at all: the losses stay out
            losses = read_history(place.run).train
    words = {STEP: "complete", "replaced": "set aside", "abandoned": "abandoned"}
    for entry in entries:
        if entry.kind == "part":
            entry.health = "being written or deleted" if writer else "unfinished"
        elif entry.problems:
            entry.health = "damaged" if entry.kind == STEP else f"{words[entry.kind]}, damaged"
        else:
            entry.health = words[entry.kind]
        if entry.kind in (STEP, "part") and entry.step in losses:
            entry.loss = number(losses[entry.step].get("loss"))
    steps = [entry for entry in entries if entry.kind == STEP]
    leftovers = [entry for entry in entries if entry.kind != STEP]
    newest = steps[-1] if steps else None
    # a newer step that an interrupted save has set aside is put back before a resume looks
    aside = [e for e in leftovers if e.kind == "replaced" and e.step > (newest.step if newest else -1)]
    newest = max(aside, key=lambda entry: entry.step) if aside else newest
    resumes_from = None if newest is None or newest.problems else newest
    return Survey(place, steps, leftovers, latest, holder, writer, newest, resumes_from, notes)


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
    problems = dict.fromkeys(entry.problems)  # without repetitions
    entry.problems = [problem.replace(f"{path}/", "").replace(f"{path} ", "it ") for problem in problems]
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
        with suppress(FileNotFoundError):  # renamed or deleted since the folder was listed
            entries.append(look_at(path, step, STEP) if step is not None else look_at(path, *(left or (0, ""))))
    if strange:
        notes.append(f"ignored, not a step folder: {', '.join(strange[:5])}{', ...' if len(strange) > 5 else ''}")
    return sorted(entries, key=lambda entry: (entry.step, entry.path.name))


# ----------------------------------------------------------------------------------------------------------------- ls


def ls(paths: Sequence[Path], *, as_json: bool) -> int:
    """Print a line for each checkpoint, and advice. Raises CheckpointError: there is no such folder."""
    listings = []
    for path in paths:
        place, runs = _resolve(path), []
        if place.only is None and place.folder == path and not list_steps(path) and path.name != CHECKPOINTS:
            runs = sorted(Path(entry.path) for entry in os.scandir(path) if entry.is_dir())  # a folder of runs
        places = [_resolve(run) for run in runs if (run / CHECKPOINTS).is_dir()] or [place]
        listings += [_survey(place) for place in places]
    if as_json:
        print(json.dumps([_record(listing) for listing in listings], indent=1))
    else:
        print("\n\n".join("\n".join(_lines(listing)) for listing in listings))
    return EXIT_OK


def _lines(listing: Survey) -> list[str]:
    folder, advice = listing.place.folder, [f"  {line}" for line in _advice(listing)]
    entries = [*listing.steps, *listing.leftovers]
    entries.sort(key=lambda entry: entry.step)  # leftovers of a step follow it
    if not entries:
        program = find.identify(folder)
        if program is not None:
            return find.of_another_program(folder, program, None).splitlines()
        return [f"{folder}: no checkpoint", *advice]
    head = f"{folder}: {plural(len(listing.steps), 'checkpoint')}"
    head += f", {len(listing.leftovers)} left over" if listing.leftovers else ""
    head += f", {format_bytes(sum(entry.num_bytes for entry in entries))}"
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for entry in entries:
        contents = ("-", "-", "-", "-")
        if entry.manifest:
            known = facts(entry.manifest, entry.state)
            parameters = f"{format_count(known['parameters'])} {'+'.join(known['dtypes'])}".strip()
            has_optimizer = "yes" if known["optimizer"] else "no"
            contents = (f"{known['tensors']:,}", parameters, has_optimizer, layout_words(known["layout"]))
        words = [entry.health]
        if entry.problems and entry.kind != "part":
            more = f" (and {len(entry.problems) - 1} more)" if len(entry.problems) > 1 else ""
            words[0] += f": {entry.problems[0].splitlines()[0]}{more}"
        words += ["latest"] if entry.kind == STEP and entry.step == listing.latest else []
        words += ["a resume takes it"] if listing.place.only is None and entry is listing.resumes_from else []
        size = format_bytes(entry.num_bytes), str(entry.num_files)
        loss = "-" if entry.loss is None else f"{entry.loss:.4f}"
        rows.append((entry.path.name, date(entry.saved), *size, *contents, loss, ", ".join(words)))
    return [head, *aligned(rows, right=(2, 3, 4, 8)), *advice]


def _advice(listing: Survey) -> list[str]:
    run, newest, lines = listing.place.run or listing.place.folder, listing.newest, list(listing.notes)
    if listing.writer:
        lines.append(f"a job is writing here: {listing.writer.who}, last sign of life {listing.writer.age_s:.0f} s ago")
    if listing.place.only is None and newest is not None and newest.problems:
        before = [entry.path.name for entry in listing.steps if not entry.problems and entry.step < newest.step]
        way = f"--resume-fallback takes {before[-1]}" if before else "there is no complete one before it"
        lines.append(f"a resume stops at {newest.path.name}, which is damaged: {way}")
    takes = listing.resumes_from
    if takes is not None and takes.manifest is not None and not facts(takes.manifest, takes.state)["optimizer"]:
        lines.append(f"{takes.path.name} has no optimizer state: it loads with --finetune, or with --no-load-optim")
    kinds = {entry.kind for entry in listing.leftovers}
    if "part" in kinds and not listing.writer:
        lines.append("unfinished: a save or a deletion was cut short; the next job that saves here removes it")
    if kinds & {"replaced", "abandoned"}:
        which = "from a continuation of the run that was given up; each can be loaded by its path"
        lines.append(f"set aside, abandoned: {which}")
    if listing.steps or listing.leftovers:
        rest = f"not the files' contents, which megatron-sp ckpt verify {run} compares"
        lines.append(f"checked: manifests and sizes; {rest}")
    if kinds and not listing.writer:
        lines.append(f"to delete what is left over: megatron-sp ckpt prune {run} --leftovers")
    return lines


def _record(listing: Survey) -> Record:
    resumes, holder, run = listing.resumes_from, listing.holder, listing.place.run

    def record(entry: Entry) -> Record:
        return {
            "path": str(entry.path), "step": entry.step, "health": entry.health, "problems": entry.problems,
            "saved": entry.saved, "bytes": entry.num_bytes, "files": entry.num_files,
            "loss": entry.loss if entry.loss is not None and math.isfinite(entry.loss) else None,
            **(facts(entry.manifest, entry.state) if entry.manifest else {}),
        }  # fmt: skip

    return {
        "run": str(run) if run else None, "folder": str(listing.place.folder), "latest": listing.latest,
        "resume": resumes.step if resumes and listing.place.only is None else None,
        "writer": {"who": holder.who, "age_s": holder.age_s, "alive": holder.is_alive} if holder else None,
        "checkpoints": [record(entry) for entry in listing.steps],
        "leftovers": [record(entry) for entry in listing.leftovers], "notes": _advice(listing),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- verify


def verify(path: Path, ckpt_step: int | None, *, every: bool, deep: DeepCheck | None) -> int:
    """Print all problems of a checkpoint, or of ``every`` one of a run; ``deep`` looks at tensors, too, with torch."""
    if every:
        place = _resolve(path)
        if place.only is not None or ckpt_step is not None:
            what = f"every step of a run, but one step is named ({path}): give the run, or leave --all out"
            raise CheckpointError(f"--all asks for {what}")
        step_folder(path)  # raises where there is none
        folders = list(list_steps(place.folder).values())
    else:
        folders = [step_folder(path, ckpt_step)]
    code = EXIT_OK
    for step_dir in folders:
        if wrong := problems(step_dir, deep=deep):
            code = EXIT_CHECKPOINT
            print(f"{step_dir}: damaged, {plural(len(wrong), 'problem')}:", file=sys.stderr)
            print(*(f"  {problem}" for problem in wrong), sep="\n", file=sys.stderr)
        else:
            listed = read_manifest(step_dir)
            counts = f"{plural(len(listed.files), 'file')}, {plural(len(listed.tensors), 'tensor')}"
            print(f"{step_dir}: sound: {format_bytes(listed.num_bytes)} in {counts}", flush=True)
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
            if step != listed.step:
                texts.append(f"state.json is of step {step}, the manifest of step {listed.step}")
        except CheckpointError as error:
            texts.append(str(error))
    texts += [] if deep is None else deep(step_dir, listed)
    return [problem.replace(f"{step_dir}/", "") for problem in dict.fromkeys(texts)]


def byte_problems(step_dir: Path, listed: Manifest) -> list[str]:
    """Return a sentence for each file that is missing, cut or changed."""
    texts, there = [], []
    for name, record in listed.files.items():
        lacking = files.missing_or_cut(step_dir, Manifest(listed.step, listed.world_size, {name: record}, {}))
        texts += lacking
        there += [] if lacking else [name]
    with progress("verifying", sum(listed.files[name].num_bytes for name in there)) as add:
        return texts + files.changed(step_dir, listed, there, add)


# -------------------------------------------------------------------------------------------------------------- prune


def prune(path: Path, *, keep_last: int | None, keep_every: int | None, leftovers: bool, dry_run: bool) -> int:
    """Delete old checkpoints and leftovers of a run, under its lock, but never the newest sound checkpoint.

    Every checkpoint to keep is read in full first: a damaged one does not count as kept.
    """
    if keep_last is None and not leftovers:
        way = "give --keep-last N for old checkpoints, --leftovers for left-over folders, or both"
        raise ConfigError(f"nothing to delete: {way}")
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"--keep-last ({keep_last}) must be at least 1: the newest sound checkpoint is never deleted")
    if keep_every is not None and (keep_every < 1 or keep_last is None):
        rule = "must be at least 1 and goes with --keep-last: it adds to what that keeps"
        raise ConfigError(f"--keep-every ({keep_every}) {rule}")
    place = _resolve(path)
    if place.only is not None or place.run is None:
        way = f"give the folder that has {CHECKPOINTS} in it, for that is what its lock is in"
        raise CheckpointError(f"{path} is not a run: {way}")
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

    def sound(step_dir: Path) -> bool:  # reads every byte, so each folder is asked once
        if step_dir not in is_sound:
            try:
                is_sound[step_dir] = not byte_problems(step_dir, read_manifest(step_dir))
            except CheckpointError:
                is_sound[step_dir] = False
            if not is_sound[step_dir]:
                warn(f"{step_dir} is damaged and does not count as kept (megatron-sp ckpt verify {step_dir} says how)")
        return is_sound[step_dir]

    if dry_run and (writer := _survey(place).writer):
        warn(f"a job is writing here ({writer.who}): nothing can be deleted until it ends")
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
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    kinds = {name: kind for name in names if (kind := commit.left_over(name)) is not None}
    if not kinds:
        print("nothing is left over")
        return 0
    newest = max(list_steps(folder), default=-1)
    back = [name for name, (step, _) in kinds.items() if "replaced" in name and step > newest]
    if back:
        raise CheckpointError(
            f"{folder / back[-1]} is newer than every step: the save that replaced it was cut short, and the next"
            f" job puts it back; rename it to {back[-1].partition('.')[0]} yourself, or start that job, before"
            " left-over folders are deleted"
        )
    aside = [name for name, (_, kind) in kinds.items() if kind != "part"]
    if aside and not any(sound(path) for path in reversed(list_steps(folder).values())):
        what = f"{', '.join(aside)} may hold all that is left of this run and is not deleted"
        raise CheckpointError(f"{folder} has no sound step: {what}")
    return sum(_delete(folder / name, dry_run) for name in kinds)


def _delete(path: Path, dry_run: bool) -> int:
    size = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    if not dry_run:
        commit.discard(path)
    print(f"{'would delete' if dry_run else 'deleted'} {path} ({format_bytes(size)})", flush=True)
    return size


# ------------------------------------------------------------------------------------------- facts of one checkpoint


def kind_of(name: str) -> tuple[str, str]:
    """Return (``weights`` or the kind of optimizer state, name of the weight)."""
    match = re.fullmatch(r"optimizer\.([a-z_]+)\.(.+)", name)
    return (match[1], match[2]) if match else (WEIGHTS, name)


def weights_of(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the weights, without the optimizer's tensors."""
    return {name: value for name, value in tensors.items() if kind_of(name)[0] == WEIGHTS}


@dataclass
class Total:
    """Number, elements and bytes of a set of tensors."""

    tensors: int = 0
    elements: int = 0
    num_bytes: int = 0

    def add(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.tensors += 1
        self.elements += math.prod(shape)
        self.num_bytes += math.prod(shape) * ITEM_BYTES[dtype]


def by_kind(tensors: Tensors) -> dict[tuple[str, str], Total]:
    """Return (kind, dtype) -> total, weights first."""
    totals: dict[tuple[str, str], Total] = {}
    for name, (dtype, shape) in tensors.items():
        totals.setdefault((kind_of(name)[0], dtype), Total()).add(dtype, shape)
    return dict(sorted(totals.items(), key=lambda item: (item[0][0] != WEIGHTS, item[0])))


def facts(manifest: Manifest, state: Record) -> Record:
    """Return the facts for a row of a table and for JSON; the contents of the state are not trusted."""
    totals, world_size = by_kind(manifest.tensors), manifest.world_size
    elements = {dtype: total.elements for (kind, dtype), total in totals.items() if kind == WEIGHTS}
    shapes = [shape for name, (_, shape) in weights_of(manifest.tensors).items() if not is_expert_bias(name)]
    stored, layout = state.get("layout"), {"world_size": world_size}
    if isinstance(stored, dict):
        axes = ("world_size", "dp", "cp", "sp", "tp", "tp_seq")
        layout |= {axis: stored[axis] for axis in axes if isinstance(stored.get(axis), int)}
    stage: Any = state
    for key in ("config", "parallel", "zero_stage"):
        stage = stage.get(key) if isinstance(stage, dict) else None
    if isinstance(stage, int) and layout["world_size"] > 1:
        layout["zero_stage"] = stage
    return {
        "tensors": len(manifest.tensors), "parameters": sum(math.prod(shape) for shape in shapes),
        "dtypes": [SHORT_DTYPES.get(dtype, dtype) for dtype in sorted(elements, key=lambda d: -elements[d])],
        "optimizer": sorted({kind for kind, _ in totals if kind != WEIGHTS}), "world_size": world_size,
        "layout": layout,
    }  # fmt: skip


def layout_words(layout: Record) -> str:
    """Return a layout as text, such as ``4: dp 2, sp 2, ZeRO 1``; axes of size 1 are omitted."""
    words = [f"{axis} {layout[axis]}" for axis in ("dp", "cp", "sp", "tp") if layout.get(axis, 1) > 1]
    words += ["tp_seq"] if layout.get("tp_seq") and layout.get("tp", 1) > 1 else []
    words += [f"ZeRO {layout['zero_stage']}"] if layout.get("zero_stage") else []
    return f"{layout['world_size']}{': ' if words else ''}{', '.join(words)}"


def date(seconds: float) -> str:
    """Return a local date and time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def plural(count: int, noun: str, several: str | None = None) -> str:
    """Return a count with its noun, such as ``1 file`` or ``2 files``."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def warn(text: str) -> None:
    """Print a warning to standard error, so that it does not get into a pipe."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show bytes done and time left on a terminal's standard error; yields what counts bytes that were done."""
    began = shown = time.monotonic()
    done, width, lock, is_seen = 0, 0, threading.Lock(), sys.stderr.isatty()

    def write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def add(num_bytes: int) -> None:
        nonlocal done, shown, width
        with lock:  # files are read by several threads
            done += num_bytes
            now = time.monotonic()
            if is_seen and now - shown >= 0.2:
                shown, left = now, (now - began) * (total - done) / max(done, 1)
                share = f"{format_bytes(done)} of {format_bytes(total)} ({100 * done // max(total, 1)} %)"
                words = f"{what}: {share}, {format_duration(left)} left"
                write("\r" + words.ljust(width))
                width = len(words)

    try:
        yield add
    finally:
        if width:  # erase the line
            write("\r" + " " * width + "\r")
