"""``Checkpointer``: saves, finds, verifies and loads checkpoints; the one class that the rest of the program uses.

docs/reference/checkpoints.md gives the guarantees: a step folder is complete or does not exist, nothing damaged is
loaded silently, and any layout can read what any other wrote.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_sp.checkpoint import commit, find, manifest, saving
from megatron_sp.checkpoint.manifest import STATE_NAME, Manifest, encode_state, read_manifest
from megatron_sp.checkpoint.pieces import GlobalTensor
from megatron_sp.checkpoint.safetensors_file import DTYPE_NAMES, NamedPiece, shapes_of
from megatron_sp.checkpoint.saving import Description, SavePlan, describe, make_plan
from megatron_sp.checkpoint.together import Together
from megatron_sp.utils.errors import CheckpointError, DiskError
from megatron_sp.utils.faults import FaultPlan

_MAX_ROWS = 20

Row = tuple[str, str, str]  # name, in the checkpoint, wanted


@dataclass
class SaveReport:
    """Outcome of a save; the same on every rank except ``seconds``."""

    step: int
    saved: bool
    path: Path | None  # the step folder, when saved
    reason: str = ""  # why not saved, or why nothing needed to be written
    num_bytes: int = 0  # written by all ranks
    seconds: float = 0.0  # time for which training was blocked
    removed: list[str] = field(default_factory=list)  # step folders that were pruned


@dataclass(frozen=True)
class Snapshot:
    """Everything a save writes, fixed at its step; once the tensors are copied, nothing in it changes any more."""

    step: int
    state: bytes  # state.json, on rank 0
    plan: SavePlan
    items: list[NamedPiece]  # of this rank


class Checkpointer:
    """Checkpoints of one run. Methods marked "Collective" must be called by every rank of ``group``.

    Args:
        run_dir: checkpoints are saved in ``run_dir/checkpoints``; None for reading only.
        rank, world_size: this process's rank in ``group``, and the size of ``group``.
        group: a process group for CPU tensors (gloo); None in a single process.
        faults: injected faults, for tests.
        keep_last: complete checkpoints to keep, at least 2.
        keep_every: also keep every checkpoint whose step is a multiple of this.
        max_file_bytes: approximate size limit of a file.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        *,
        rank: int = 0,
        world_size: int = 1,
        group: Any = None,
        faults: FaultPlan | None = None,
        keep_last: int = 2,
        keep_every: int | None = None,
        max_file_bytes: int = 1 << 30,
    ) -> None:
        if keep_last < 2 or (keep_every is not None and keep_every < 1):
            raise ValueError(
                f"keep_last ({keep_last}) must be at least 2 and keep_every ({keep_every}) at least 1, or None"
            )
        self._run_dir = run_dir
        self.ranks = Together(rank, world_size, group)
        self.faults = faults or FaultPlan.none()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._max_file_bytes = max_file_bytes
        self._planned: tuple[Description, SavePlan] | None = None
        self._described: Description = {}
        self._last_saved: Path | None = None
        self._verified: dict[Path, Manifest] = {}  # step folders that this process has verified in full

    # Saving

    def prepare(self) -> list[str]:
        """Create the checkpoints folder and clean up after interrupted saves. Collective; call it holding the run's lock.

        Returns:
            What was removed or restored, as sentences; rank 0 has logged them.
        Raises:
            DiskError: the folder cannot be created or written.
        """
        folder = self._folder()

        def work() -> list[str]:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                commit.require_no_links(folder)
                notes = commit.sweep(folder)
            except OSError as error:
                raise DiskError(
                    f"cannot save into {folder}: {saving.explain(error, folder)}; give another --save"
                ) from None
            commit.log_notes(notes)
            return notes

        return list(self.ranks.first(work))

    def save(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> SaveReport:
        """Write a checkpoint of this step, atomically. Collective.

        A step that this object has just saved is not written again. Folders of this step or later ones, left by another
        continuation of the run, are set aside.

        Args:
            step: number of optimizer steps done.
            tensors: this rank's pieces of every tensor.
            state: everything else, as JSON values; that of rank 0 is stored, with ``format_version`` and ``step``
                added.
        Returns:
            A report; ``saved=False`` with the reason on a disk error (no space, no permission, I/O error): older
            checkpoints are untouched, training can go on, and the next save may succeed.
        Raises:
            ValueError, TypeError: pieces that do not tile their tensors, or a state that is not JSON (errors of the
                caller).
        """
        started = time.monotonic()
        report = self.write(self.snapshot(step, tensors, state))
        report.seconds = time.monotonic() - started
        return report

    def snapshot(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> Snapshot:
        """Fix everything a save will write except the tensors' contents. Collective; arguments and errors are those of ``save``."""
        self.faults.at("save.begin", step)
        encoded = b""

        def is_known() -> bool:  # report mistakes of the caller before anything is written
            nonlocal encoded
            encoded = encode_state(step, state) if self.ranks.rank == 0 else b""
            return self._knows(tensors)

        plan = self._plan(all(self.ranks.each(is_known)))
        return Snapshot(step, encoded, plan, plan.items_of(self.ranks.rank, tensors))

    def own_items(self, tensors: dict[str, GlobalTensor]) -> list[NamedPiece]:
        """Return the pieces of these tensors that this rank would write. Collective."""
        plan = self._plan(all(self.ranks.each(lambda: self._knows(tensors))))
        return plan.items_of(self.ranks.rank, tensors)

    def write(self, snapshot: Snapshot, ranks: Together | None = None, *, beside: bool = False) -> SaveReport:
        """Write a snapshot, atomically. Collective.

        Args:
            ranks: the ranks and group to agree over; default: this object's own.
            beside: training goes on meanwhile, so use few cores.
        Returns:
            A report as from ``save``; the caller fills in ``seconds``.
        """
        return self._write(snapshot, ranks or self.ranks, beside)

    def _write(self, snapshot: Snapshot, ranks: Together, beside: bool) -> SaveReport:
        step, plan, rank = snapshot.step, snapshot.plan, ranks.rank
        final = self._folder() / commit.step_name(step)

        def fault(point: str) -> None:
            self.faults.at(point, step)

        def prune() -> list[str]:
            return saving.prune_quietly(final.parent, self._keep_last, self._keep_every, lambda: fault("save.prune"))

        def opening() -> dict[str, str]:
            if final == self._last_saved and manifest.is_complete(final):
                return {"done": f"{final} holds this step already"}
            return saving.open_staging(final.parent, step, sum(plan.rank_bytes), prune)

        def finish() -> dict[str, Any]:
            outcome = saving.commit_staging(staging, step, snapshot.state, plan, results, fault)
            return outcome if "failed" in outcome else {**outcome, "removed": prune()}

        opened = ranks.first(opening)
        if "staging" not in opened:
            done = opened.get("done")
            return SaveReport(step, bool(done), final if done else None, done or opened["failed"])
        staging = Path(opened["staging"])
        results = ranks.each(
            lambda: saving.write_own_files(
                staging, rank, snapshot.items, self._max_file_bytes, lambda point: fault(f"save.{point}"), beside
            )
        )
        for point in ("save.manifest", "save.rename", "save.prune") if rank else ():
            fault(point)  # the other ranks have nothing to do here, but tests kill them here
        outcome = ranks.first(finish)
        if "failed" in outcome:
            return SaveReport(step, False, None, outcome["failed"])
        self._last_saved = final
        return SaveReport(step, True, final, num_bytes=outcome["num_bytes"], removed=outcome["removed"])

    def _knows(self, tensors: dict[str, GlobalTensor]) -> bool:
        self._described = describe(tensors)
        return self._planned is not None and self._planned[0] == self._described

    def _plan(self, is_known: bool) -> SavePlan:
        # the division of work, made anew only when some rank's rectangles have changed
        if not is_known or self._planned is None:
            own_description = self._described
            self._planned = (own_description, make_plan(self.ranks.each(lambda: own_description)))
        return self._planned[1]

    def _folder(self) -> Path:
        if self._run_dir is None:
            raise RuntimeError("this Checkpointer was made without a run_dir: it can only read")
        return Path(self._run_dir) / "checkpoints"

    # Finding and checking

    def has_checkpoint(self, path: str | Path) -> bool:
        """Return whether there is any step folder under ``path``, sound or not. Collective."""
        path = Path(path)
        return bool(self.ranks.first(lambda: find.has_steps(path)))

    def is_vacant(self, path: str | Path) -> bool:
        """Return whether nothing in ``path`` looks like a checkpoint, of this or another program. Collective."""
        path = Path(path)
        return bool(self.ranks.first(lambda: find.is_vacant(path)))

    def find(self, path: str | Path, ckpt_step: int | None = None, fallback: bool = False) -> Path:
        """Return the newest checkpoint under ``path``, verified byte for byte. Collective.

        Args:
            path: a run folder, a checkpoints folder, or one step folder.
            ckpt_step: take this step instead of the newest.
            fallback: if it is damaged, warn and take the newest sound one before it.
        Raises:
            CheckpointError: there is none, or it is damaged (with ``fallback``: and so are all before it).
        """
        folders, warnings = self.ranks.first(lambda: _as_json(find.candidates(Path(path), ckpt_step)))
        self._tell(warnings)
        problems = []
        for folder in map(Path, folders):
            try:
                self.verify(folder)
                return folder
            except CheckpointError as error:
                if not fallback:
                    raise CheckpointError(f"{error}\n{find.way_out(folder)}") from None
                problems.append(str(error))
                self._tell([f"{error}\ntrying the one before it (--resume-fallback)"])
        raise CheckpointError(
            "\n".join([f"no sound checkpoint under {path}: {len(folders)} tried, all damaged", *problems])
        )

    def verify(self, step_dir: str | Path) -> None:
        """Read a checkpoint in full and compare it with its manifest; the ranks share the work. Collective.

        Raises:
            CheckpointError: names files that are missing, truncated or changed, with what was expected and found.
        """
        from megatron_sp.checkpoint import load

        step_dir = Path(step_dir)

        def presence() -> list[str]:
            listed = read_manifest(step_dir)
            manifest.require_none(step_dir, manifest.missing_or_cut(step_dir, listed))
            return manifest.extra_files(step_dir, listed)

        def contents() -> list[str]:
            self._verified[step_dir] = listed = read_manifest(step_dir)
            return manifest.changed(step_dir, listed, self._share([*load.data_files(listed), STATE_NAME]))

        self._verified.pop(step_dir, None)
        if extra := self.ranks.first(presence):
            self._tell([f"{step_dir} holds files that its manifest does not list, ignored: {', '.join(extra[:10])}"])
        try:
            manifest.require_none(step_dir, [problem for of_rank in self.ranks.each(contents) for problem in of_rank])
        except BaseException:
            self._verified.pop(step_dir, None)
            raise

    def _share(self, names: list[str]) -> list[str]:
        return names[self.ranks.rank :: self.ranks.world_size]

    def _tell(self, notes: list[str]) -> None:
        if self.ranks.rank == 0:
            commit.log_notes(notes)

    # Reading

    def read_state(self, step_dir: str | Path) -> dict[str, Any]:
        """Return the contents of state.json, checked against the manifest. Not collective. Raises CheckpointError."""
        return manifest.read_state(Path(step_dir))

    def tensor_shapes(self, step_dir: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the global shape and dtype of every stored tensor. Not collective. Raises CheckpointError."""
        return shapes_of(read_manifest(Path(step_dir)))

    def load(
        self, step_dir: str | Path, tensors: dict[str, GlobalTensor], *, partial: bool = False, unread: Collection[str] = (),
        cast: bool = False,
    ) -> None:  # fmt: skip
        """Load a checkpoint into these pieces, in place. Collective.

        Args:
            step_dir: as returned by ``find``; verified first unless every rank has done so already.
            tensors: the pieces this rank wants; ranks may want different tensors and rectangles.
            partial: leave stored tensors that no rank wants unread; otherwise they are an error.
            unread: names of stored tensors that may stay unread even without ``partial``.
            cast: convert stored tensors to the wanted dtype; otherwise a different dtype is an error.
        Raises:
            CheckpointError: tensors are missing, unexpected or of another shape or dtype (as a table), or files are
                damaged.
            ValueError: pieces outside their tensor.
        """
        from megatron_sp.checkpoint import load
        from megatron_sp.checkpoint.checkpointer import differences, table

        step_dir = Path(step_dir)
        if not all(self.ranks.each(lambda: step_dir in self._verified)):
            self.verify(step_dir)
        listed = self._verified[step_dir]
        unasked = self.ranks.each(lambda: sorted(set(listed.tensors) - set(tensors)))
        unwanted = set.intersection(*map(set, unasked))  # not requested by any rank

        def check_fit() -> None:
            for name, tensor in tensors.items():
                tensor.check(name)
            if rows := differences(listed, tensors, set() if partial else unwanted - set(unread), cast):
                raise CheckpointError(table(step_dir, rows))

        self.ranks.each(check_fit)
        rows = self.ranks.each(lambda: load.read_headers(step_dir, self._share(load.data_files(listed))))
        index = load.make_index(step_dir, listed, (row for of_rank in rows for row in of_rank))
        self.ranks.each(
            lambda: load.check_tiling(step_dir, listed, index, self._share(sorted(set(listed.tensors) - unwanted)))
        )
        self.ranks.each(lambda: load.fill(step_dir, index, tensors))


def _as_json(found: find.Candidates) -> list[Any]:
    return [[os.fspath(folder) for folder in found.folders], found.warnings]


def differences(
    manifest: Manifest, wanted: dict[str, GlobalTensor], unexpected: Collection[str], cast: bool
) -> list[Row]:
    """Return a row for every tensor that cannot be loaded as requested.

    Args:
        unexpected: names in the checkpoint that no rank wants; empty for a partial load.
        cast: whether a stored tensor may be converted to the wanted dtype.
    """
    rows: list[Row] = []
    for name, tensor in wanted.items():
        ask = _show(DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tensor.shape)
        if name not in manifest.tensors:
            near = difflib.get_close_matches(name, sorted(unexpected) or sorted(manifest.tensors), n=1, cutoff=0.6)
            rows.append((name, f"missing{f'; nearest: {near[0]}' if near else ''}", ask))
            continue
        dtype, shape = manifest.tensors[name]
        if shape != tuple(tensor.shape) or (not cast and dtype != DTYPE_NAMES.get(tensor.dtype)):
            rows.append((name, _show(dtype, shape), ask))
    rows += [(name, _show(*manifest.tensors[name]), "not wanted") for name in sorted(unexpected)]
    return rows


def table(step_dir: Path, rows: list[Row]) -> str:
    """Return the error message for a checkpoint that does not fit the model."""
    shown = [("tensor", "in the checkpoint", "wanted"), *rows[:_MAX_ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(2)]
    lines = [f"  {name:<{widths[0]}}  {stored:<{widths[1]}}  {wanted}" for name, stored, wanted in shown]
    if len(rows) > _MAX_ROWS:
        lines.append(f"  ... and {len(rows) - _MAX_ROWS} more")
    return "\n".join(
        [
            f"{step_dir} does not fit this model: {len(rows)} of its tensors differ",
            *lines,
            "Give the model's flags as they were when it was saved (or --use-checkpoint-args),"
            " or load a part of it (--finetune, --no-load-optim).",
        ]
    )


def _show(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
