"""``Checkpointer`` saves, finds, verifies and loads checkpoints; docs/reference/checkpoints.md has the guarantees."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_sp.checkpoint import commit, find, manifest, safetensors_file
from megatron_sp.checkpoint.manifest import STATE_NAME, Manifest, encode_state, read_manifest
from megatron_sp.checkpoint.pieces import (
    DTYPE_NAMES,
    DTYPES,
    Description,
    GlobalTensor,
    NamedPiece,
    SavePlan,
    describe,
    make_plan,
)
from megatron_sp.comm.object_collectives import broadcast_json, gather_json
from megatron_sp.utils.errors import CheckpointError, DiskError, ReportedError
from megatron_sp.utils.faults import FaultPlan

_MAX_ROWS = 20
_KINDS = {kind.__name__: kind for kind in ReportedError.__subclasses__()}


class Together:
    """The ranks that share a checkpoint: all go on, or all raise the same error."""

    def __init__(self, rank: int, world_size: int, group: Any) -> None:
        if group is None and world_size != 1:
            raise ValueError(f"a checkpoint of {world_size} ranks needs a CPU-capable process group (gloo)")
        self.rank = rank
        self.world_size = world_size
        self.group = group

    def each(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on every rank; return all results, or raise the first ReportedError on all. Collective."""
        return [outcome["value"] for outcome in self._run(work, gather_json)]

    def first(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on rank 0 for all ranks. Collective; else as ``each``."""
        share = lambda outcome, group: [broadcast_json(outcome, group)]
        return self._run(work if self.rank == 0 else None, share)[0]["value"]

    def _run(self, work: Callable[[], Any] | None, share: Callable[[Any, Any], list[Any]]) -> list[dict[str, Any]]:
        # an error is an outcome like any other: this rank must not leave the rest waiting in the next collective
        outcome: dict[str, Any] | None = None
        bug: Exception | None = None
        try:
            outcome = None if work is None else {"value": work()}
        except (ReportedError, OSError) as error:
            outcome = {"error": str(error), "kind": type(error).__name__}
        except Exception as error:
            outcome, bug = {"error": f"{type(error).__name__}: {error}"}, error
        outcomes = share(outcome, self.group)
        if bug is not None:
            raise bug
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if "error" in outcome]
        if failed:
            ranks_of: dict[str, list[str]] = {}  # by message
            for rank, outcome in failed:
                ranks_of.setdefault(outcome["error"], []).append(str(rank))
            lines = []
            for text, ranks in ranks_of.items():
                more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
                of_all = len(ranks) == len(outcomes)  # then no rank needs to be named
                lines.append(text if of_all else f"rank {', '.join(ranks[:8])}{more}: {text}")
            raise _KINDS.get(failed[0][1].get("kind", ""), CheckpointError)("\n".join(lines))
        return outcomes


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
    """Everything a save writes, fixed at its step."""

    step: int
    state: bytes  # state.json, on rank 0
    plan: SavePlan
    items: list[NamedPiece]  # of this rank


class Checkpointer:
    """Checkpoints of one run, in ``run_dir/checkpoints`` (None: reading only).

    Every rank of ``group`` (gloo; None in a single process) makes the calls marked "Collective".
    """

    def __init__(
        self, run_dir: str | Path | None, *, rank: int = 0, world_size: int = 1, group: Any = None,
        faults: FaultPlan | None = None, keep_last: int = 2, keep_every: int | None = None,
        max_file_bytes: int = 1 << 30,
    ) -> None:  # fmt: skip
        if keep_last < 2 or (keep_every is not None and keep_every < 1):
            given = f"keep_last ({keep_last}) must be at least 2 and keep_every ({keep_every})"
            raise ValueError(f"{given} at least 1, or None")
        self._run_dir = run_dir
        self.ranks = Together(rank, world_size, group)
        self.faults = faults or FaultPlan()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._max_file_bytes = max_file_bytes
        self._planned: tuple[Description, SavePlan] | None = None
        self._last_saved: Path | None = None
        self._verified: dict[Path, Manifest] = {}  # step folders that this process has verified in full

    def _folder(self) -> Path:
        if self._run_dir is None:
            raise RuntimeError("this Checkpointer was made without a run_dir: it can only read")
        return Path(self._run_dir) / "checkpoints"

    # Saving

    def prepare(self) -> list[str]:
        """Create the folder and clean up after interrupted saves, holding the run's lock. Collective."""
        folder = self._folder()

        def work() -> list[str]:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                commit.require_no_links(folder)
                notes = commit.sweep(folder)
            except OSError as error:
                why = commit.explain(error, folder)
                raise DiskError(f"cannot save into {folder}: {why}; give another --save") from None
            commit.log_notes(notes)
            return notes

        return list(self.ranks.first(work))

    def save(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> SaveReport:
        """Write a checkpoint of this step, atomically: this rank's pieces, rank 0's JSON state. Collective.

        A disk error is a report, not an exception: older checkpoints are untouched, and training can go on.
        """
        started = time.monotonic()
        report = self.write(self.snapshot(step, tensors, state))
        report.seconds = time.monotonic() - started
        return report

    def snapshot(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> Snapshot:
        self.faults.at("save.begin", step)
        plan, encoded = self.plan(tensors, step, state)
        return Snapshot(step, encoded, plan, plan.items_of(self.ranks.rank, tensors))

    def plan(
        self, tensors: dict[str, GlobalTensor], step: int = 0, state: dict[str, Any] | None = None
    ) -> tuple[SavePlan, bytes]:
        """Divide the work among the ranks, and encode rank 0's state. Collective."""
        encoded, described = b"", Description()

        def is_known() -> bool:  # the caller's mistakes show here, before anything is written
            nonlocal encoded, described
            is_first = self.ranks.rank == 0
            encoded = encode_state(step, state) if is_first and state is not None else b""
            described = describe(tensors)
            return self._planned is not None and self._planned[0] == described

        # made anew only when some rank's rectangles have changed
        if not all(self.ranks.each(is_known)) or self._planned is None:
            self._planned = (described, make_plan(self.ranks.each(lambda: described)))
        return self._planned[1], encoded

    def write(self, snapshot: Snapshot, ranks: Together | None = None, *, beside: bool = False) -> SaveReport:
        """Write a snapshot, with few cores if training goes on ``beside``. Collective over ``ranks``."""
        ranks = ranks or self.ranks
        step, plan, rank = snapshot.step, snapshot.plan, ranks.rank
        final = self._folder() / commit.step_name(step)

        fault = lambda point: self.faults.at(f"save.{point}", step)
        prune = lambda: commit.prune(final.parent, self._keep_last, self._keep_every, lambda: fault("prune"))

        def opening() -> dict[str, str]:
            if final == self._last_saved and manifest.is_complete(final):
                return {"done": f"{final} holds this step already"}
            return commit.open_staging(final.parent, step, sum(plan.rank_bytes), prune)

        def finish() -> dict[str, Any]:
            outcome = commit.commit_staging(staging, step, snapshot.state, plan.tensors, results, fault)
            return outcome if "failed" in outcome else {**outcome, "removed": prune()}

        opened = ranks.first(opening)
        if "staging" not in opened:
            done = opened.get("done")
            return SaveReport(step, bool(done), final if done else None, done or opened["failed"])
        staging, items, size = Path(opened["staging"]), snapshot.items, self._max_file_bytes
        results = ranks.each(lambda: safetensors_file.write_own_files(staging, rank, items, size, fault, beside))
        for point in ("manifest", "rename", "prune") if rank else ():
            fault(point)  # the other ranks have nothing to do here, but tests kill them here
        outcome = ranks.first(finish)
        if "failed" in outcome:
            return SaveReport(step, False, None, outcome["failed"])
        self._last_saved = final
        return SaveReport(step, True, final, num_bytes=outcome["num_bytes"], removed=outcome["removed"])

    # Finding and checking, on rank 0 for all ranks

    def has_checkpoint(self, path: str | Path) -> bool:
        return bool(self.ranks.first(lambda: find.has_steps(Path(path))))

    def is_vacant(self, path: str | Path) -> bool:
        return bool(self.ranks.first(lambda: find.is_vacant(Path(path))))

    def find(self, path: str | Path, ckpt_step: int | None = None, fallback: bool = False) -> Path:
        """Return the newest checkpoint, or ``ckpt_step``, verified byte for byte. Collective.

        With ``fallback`` a damaged one is a warning, and the newest sound one before it is taken.
        """

        def candidates() -> list[list[str]]:
            found = find.candidates(Path(path), ckpt_step)
            return [[os.fspath(folder) for folder in found.folders], found.warnings]

        folders, warnings = self.ranks.first(candidates)
        self._log(warnings)
        problems = []
        for folder in map(Path, folders):
            try:
                self.verify(folder)
                return folder
            except CheckpointError as error:
                if not fallback:
                    raise CheckpointError(f"{error}\n{find.way_out(folder)}") from None
                problems.append(str(error))
                self._log([f"{error}\ntrying the one before it (--resume-fallback)"])
        none = f"no sound checkpoint under {path}: {len(folders)} tried, all damaged"
        raise CheckpointError("\n".join([none, *problems]))

    def verify(self, step_dir: str | Path) -> None:
        """Read a checkpoint in full and compare it with its manifest. Collective; raises CheckpointError."""
        from megatron_sp.checkpoint import load  # a run that starts afresh never needs it

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
            self._log([f"{step_dir} holds files that its manifest does not list, ignored: {', '.join(extra[:10])}"])
        try:
            manifest.require_none(step_dir, [problem for of_rank in self.ranks.each(contents) for problem in of_rank])
        except BaseException:
            self._verified.pop(step_dir, None)
            raise

    def _share(self, names: list[str]) -> list[str]:
        return names[self.ranks.rank :: self.ranks.world_size]

    def _log(self, notes: list[str]) -> None:
        if self.ranks.rank == 0:
            commit.log_notes(notes)

    # Reading

    def read_state(self, step_dir: str | Path) -> dict[str, Any]:
        return manifest.read_state(Path(step_dir))

    def tensor_shapes(self, step_dir: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (shape, DTYPES[dtype]) for name, (dtype, shape) in read_manifest(Path(step_dir)).tensors.items()}

    def load(
        self, step_dir: str | Path, tensors: dict[str, GlobalTensor], *, partial: bool = False,
        unread: Collection[str] = (), cast: bool = False,
    ) -> None:  # fmt: skip
        """Load a verified checkpoint into these pieces, in place. Collective; raises CheckpointError.

        Args:
            partial: stored tensors that no rank wants are no error.
            unread: names of stored tensors that may stay unread in any case.
            cast: a different dtype is converted.
        """
        from megatron_sp.checkpoint import load

        step_dir = Path(step_dir)
        if not all(self.ranks.each(lambda: step_dir in self._verified)):
            self.verify(step_dir)
        listed = self._verified[step_dir]
        unasked = self.ranks.each(lambda: sorted(set(listed.tensors) - set(tensors)))
        unwanted = set.intersection(*map(set, unasked))  # not requested by any rank

        unexpected = set() if partial else unwanted - set(unread)
        self.ranks.each(lambda: _require_fit(step_dir, listed, tensors, unexpected, cast))
        # the ranks share headers and tilings, too; then each reads what it wants
        rows = self.ranks.each(lambda: load.read_headers(step_dir, self._share(load.data_files(listed))))
        index = load.make_index(step_dir, listed, (row for of_rank in rows for row in of_rank))
        wanted = sorted(set(listed.tensors) - unwanted)
        self.ranks.each(lambda: load.check_tiling(step_dir, listed, index, self._share(wanted)))
        self.ranks.each(lambda: load.fill(step_dir, index, tensors))


def _require_fit(
    step_dir: Path, listed: Manifest, wanted: dict[str, GlobalTensor], unexpected: Collection[str], cast: bool
) -> None:
    # raise CheckpointError, with a table of the tensors that cannot be loaded as requested
    rows: list[tuple[str, str, str]] = []  # name, in the checkpoint, wanted
    for name, tensor in wanted.items():
        tensor.check(name)
    for name, tensor in wanted.items():
        asked = f"{DTYPE_NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
        if name not in listed.tensors:
            near = difflib.get_close_matches(name, sorted(unexpected) or sorted(listed.tensors), n=1, cutoff=0.6)
            rows.append((name, f"missing{f'; nearest: {near[0]}' if near else ''}", asked))
            continue
        dtype, shape = listed.tensors[name]
        if shape != tuple(tensor.shape) or (not cast and dtype != DTYPE_NAMES.get(tensor.dtype)):
            rows.append((name, f"{dtype} {list(shape)}", asked))
    for name in sorted(unexpected):
        dtype, shape = listed.tensors[name]
        rows.append((name, f"{dtype} {list(shape)}", "not wanted"))
    if not rows:
        return
    shown = [("tensor", "in the checkpoint", "wanted"), *rows[:_MAX_ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(2)]
    lines = [f"  {name:<{widths[0]}}  {stored:<{widths[1]}}  {asked}" for name, stored, asked in shown]
    if len(rows) > _MAX_ROWS:
        lines.append(f"  ... and {len(rows) - _MAX_ROWS} more")
    advice = (
        "Give the model's flags as they were when it was saved (or --use-checkpoint-args), or load a part of it"
        " (--finetune, --no-load-optim)."
    )
    title = f"{step_dir} does not fit this model: {len(rows)} of its tensors differ"
    raise CheckpointError("\n".join([title, *lines, advice]))
