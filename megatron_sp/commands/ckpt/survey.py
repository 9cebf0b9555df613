"""Quick survey of a checkpoints folder: only manifests, state and file sizes are read, no tensors; takes no lock and changes nothing.

A job may be saving or deleting meanwhile: a folder that disappears during the survey is omitted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_sp.checkpoint import commit
from megatron_sp.checkpoint.lock import Holder, holder_of
from megatron_sp.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest, read_state
from megatron_sp.checkpoint.verify import missing_or_cut
from megatron_sp.commands.ckpt.places import CheckpointPath
from megatron_sp.report.run_history import History, number, read_history
from megatron_sp.utils.errors import CheckpointError, DataError

STEP = "step"


@dataclass
class Entry:
    """One folder of a survey.

    Attributes:
        kind: ``step``, or the kind of leftover: ``part``, ``replaced``, ``abandoned``.
        num_bytes, num_files: bytes and files now on disk, whatever the manifest lists.
        saved: time of the save, in seconds since 1970.
        manifest: None if there is no valid one.
        state: contents of ``state.json``; empty if it cannot be read.
        problems: problems that manifest, state and sizes show.
    """

    path: Path
    step: int
    kind: str
    num_bytes: int = 0
    num_files: int = 0
    saved: float = 0.0
    manifest: Manifest | None = None
    state: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """True if nothing is wrong with the folder."""
        return not self.problems


@dataclass
class Survey:
    """Survey of a checkpoints folder.

    Attributes:
        entries: entries in order of steps; leftovers of a step follow the step itself.
        latest: the step that the file ``latest`` names.
        writer: holder of the run's lock.
        losses: step -> its training record in ``metrics.jsonl``, without records that a resume has undone.
        notes: irregularities of the folder.
    """

    place: CheckpointPath
    entries: list[Entry] = field(default_factory=list)
    latest: int | None = None
    writer: Holder | None = None
    losses: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[Entry]:
        """Step folders."""
        return [entry for entry in self.entries if entry.kind == STEP]

    @property
    def leftovers(self) -> list[Entry]:
        """Everything else: partial, abandoned and replaced folders."""
        return [entry for entry in self.entries if entry.kind != STEP]

    @property
    def is_written(self) -> bool:
        """True if a job may be saving here."""
        return self.writer is not None and self.writer.may_write

    @property
    def newest(self) -> Entry | None:
        """The entry that a resume tries first: one that an interrupted save has set aside is put back by then, if it is newer."""
        newest = self.steps[-1] if self.steps else None
        aside = [e for e in self.leftovers if e.kind == "replaced" and e.step > (newest.step if newest else -1)]
        return max(aside, key=lambda entry: entry.step) if aside else newest

    @property
    def resumes_from(self) -> Entry | None:
        """The entry that a resume would load; None if the newest one is not complete."""
        return self.newest if self.newest is not None and self.newest.is_complete else None

    def loss_of(self, entry: Entry) -> float | None:
        """Return the training loss logged at this step; None if there is none, or if the run later continued from an earlier step."""
        if entry.kind in ("replaced", "abandoned") or entry.step not in self.losses:
            return None
        return number(self.losses[entry.step].get("loss"))


def survey(place: CheckpointPath) -> Survey:
    """Survey a folder, or the one step folder that ``place`` names."""
    found = Survey(place, writer=holder_of(place.run) if place.run else None)
    if place.only is not None:
        found.entries = [look_at(place.only, _step_of(place.only), STEP)]
    else:
        found.entries = _entries(place.folder, found.notes)
        found.latest, problem = commit.read_latest(place.folder)
        found.notes += [f"{problem}: the folders themselves decide"] if problem else []
    found.losses = _history(place).train
    return found


def look_at(path: Path, step: int, kind: str) -> Entry:
    """Examine one folder: its manifest, its state, and existence and sizes of its files."""
    entry = Entry(path, step, kind)
    with os.scandir(path) as files:
        for file in files:
            entry.num_files += 1
            entry.num_bytes += file.stat(follow_symlinks=False).st_size
    sealed = path / MANIFEST_NAME
    entry.saved = (sealed if sealed.exists() else path).stat().st_mtime
    try:
        entry.manifest = read_manifest(path)
        entry.problems = missing_or_cut(path, entry.manifest)
        entry.state = read_state(path)
    except CheckpointError as error:
        entry.problems.append(str(error))
    entry.problems = [problem.replace(f"{path}/", "").replace(f"{path} ", "it ") for problem in dict.fromkeys(entry.problems)]
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
    return sorted(entries, key=lambda entry: (entry.step, entry.kind != STEP, entry.path.name))


def _step_of(path: Path) -> int:
    left = commit.left_over(path.name)
    number_of_name = commit.step_number(path.name)
    if number_of_name is None and left is None:
        try:
            return read_manifest(path).step
        except CheckpointError:
            return 0
    return number_of_name if number_of_name is not None else left[0] if left else 0


def _history(place: CheckpointPath) -> History:
    try:
        return read_history(place.run) if place.run is not None else History("")
    except DataError:  # no log yet, or none at all: the losses stay out
        return History("")
