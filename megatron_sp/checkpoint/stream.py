"""Checkpoints written and read by one process, with one tensor in memory at a time: for converters and tools."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.checkpoint import commit, load, manifest
from megatron_sp.checkpoint.lock import RunLock
from megatron_sp.checkpoint.manifest import STATE_NAME, Manifest, encode_state, read_manifest, read_state
from megatron_sp.checkpoint.pieces import DTYPES, GlobalTensor, NamedPiece, Piece, describe, make_plan
from megatron_sp.checkpoint.safetensors_file import cut_into_files, write_file
from megatron_sp.ops.allocator import empty
from megatron_sp.utils.errors import CheckpointError, DiskError
from megatron_sp.utils.files import fsync_dir

MAX_FILE_BYTES = 1 << 30
BLOCK_BYTES = 64 << 20
_MAX_NOTES = 8


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Source:
    """A tensor to write."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # returns the tensor when it is needed; called once, or a second time if the tensor is larger than a file
    read: Callable[[], Tensor]


# Writing


def write_checkpoint(
    run_dir: str | Path, step: int, tensors: Mapping[str, Source], state: dict[str, Any], *,
    max_file_bytes: int = MAX_FILE_BYTES, progress: Callable[[int], None] = lambda num_bytes: None,
) -> Path:  # fmt: skip
    """Write ``run_dir/checkpoints/step-NNNNNN`` under the run's lock, name it in ``latest`` and return it.

    Args:
        run_dir: a run folder without checkpoints, or a new one.
        state: contents of state.json; ``format_version`` and ``step`` are added.
        max_file_bytes: a larger tensor is split by rows over several files.
        progress: called with the bytes of each tensor or part of one.
    Raises:
        CheckpointError, LockError, DiskError: nothing is left behind.
    """
    run_dir = Path(run_dir)
    data = encode_state(step, state)
    stand_ins = {
        name: GlobalTensor(tuple(t.shape), t.dtype, list(_rows(t, max_file_bytes))) for name, t in tensors.items()
    }
    plan = make_plan([describe(stand_ins)])
    current: tuple[str, Tensor] | None = None

    def contents(item: NamedPiece) -> Tensor:
        nonlocal current
        if current is None or current[0] != item.name:
            current = None  # freed before the next one is produced
            wanted, tensor = tensors[item.name], tensors[item.name].read()
            if tuple(tensor.shape) != tuple(wanted.shape) or tensor.dtype != wanted.dtype:
                announced, actual = f"{wanted.dtype} {list(wanted.shape)}", f"{tensor.dtype} {list(tensor.shape)}"
                raise CheckpointError(f"{item.name} was announced as {announced}, but is {actual}: nothing was written")
            current = item.name, tensor
        progress(item.num_bytes)
        tensor, part = current[1], item.piece
        return tensor if part.rect.sizes == tensor.shape else tensor.narrow(0, part.offsets[0], part.tensor.shape[0])

    require_no_checkpoint(run_dir)  # before anything is created
    is_new = not run_dir.exists()
    outcome: dict[str, Any] = {"failed": "interrupted"}
    try:
        with RunLock(run_dir):
            require_no_checkpoint(run_dir)
            commit.log_notes(commit.sweep(run_dir / "checkpoints"))
            opened = commit.open_staging(run_dir / "checkpoints", step, sum(plan.rank_bytes), lambda: None)
            if "staging" not in opened:
                raise DiskError(f"nothing was written: {opened['failed']}; free some, or write elsewhere")
            staging = Path(opened["staging"])
            try:
                records = {}
                for number, items in enumerate(cut_into_files(plan.items_of(0, stand_ins), max_file_bytes)):
                    path = staging / f"rank00000-{number:05d}.safetensors"
                    records[path.name] = write_file(path, items, contents=contents)
                fsync_dir(staging)
                written = [{"files": records}]
                outcome = commit.commit_staging(staging, step, data, plan.tensors, written, lambda point: None)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise
    except OSError as error:
        raise DiskError(f"nothing was written: {commit.explain(error, run_dir)}") from None
    finally:
        if "failed" in outcome and is_new:
            with contextlib.suppress(OSError):  # only if they are empty
                (run_dir / "checkpoints").rmdir()
                run_dir.rmdir()
    if "failed" in outcome:
        raise DiskError(f"nothing was written: {outcome['failed']}")
    return run_dir / "checkpoints" / commit.step_name(step)


def _rows(tensor: Source, max_bytes: int) -> Iterator[Piece]:
    # yield meta-tensor stand-ins for the parts in which a tensor is written: blocks of rows
    if not tensor.shape:
        yield Piece((), torch.empty((), dtype=tensor.dtype, device="meta"))
        return
    rows, *rest = tensor.shape
    step = max(1, max_bytes // max(1, torch.Size(rest).numel() * tensor.dtype.itemsize))
    for first in range(0, rows, step):
        shape = (min(step, rows - first), *rest)
        yield Piece((first, *[0] * len(rest)), torch.empty(shape, dtype=tensor.dtype, device="meta"))


def require_no_checkpoint(run_dir: Path) -> None:
    """Raise CheckpointError if a run folder has checkpoints."""
    if run_dir.exists() and not run_dir.is_dir():
        raise CheckpointError(f"{run_dir} is a file; a folder is made there: name another one")
    if steps := commit.list_steps(run_dir / "checkpoints"):
        names = ", ".join(path.name for path in list(steps.values())[:4])
        more = ", ..." if len(steps) > 4 else ""
        raise CheckpointError(f"{run_dir}/checkpoints has {names}{more} already: name another folder")


class FiniteTensors:
    """Refuses, or (``allow``) notes, tensors that are not finite in the dtype they are written in."""

    def __init__(self, *, allow: bool) -> None:
        self._allow = allow
        self._found: dict[str, str] = {}

    def look(self, name: str, tensor: Tensor, written: torch.dtype) -> Tensor:
        # returns the tensor
        problem = _not_finite(tensor, written)
        if problem is not None:
            self._found[name] = f"{name} has {problem}"
            if not self._allow:
                other = " or another --dtype" if "too large" in problem else ""
                raise CheckpointError(
                    f"{self._found[name]}: nothing can be trained or computed with such a tensor. Take another"
                    f" checkpoint{other}; --allow-non-finite writes it all the same"
                )
        return tensor

    def notes(self) -> list[str]:
        lines = list(self._found.values())
        more = len(lines) - _MAX_NOTES
        return lines[:_MAX_NOTES] + ([f"{more} more tensors have numbers that are not finite"] if more > 0 else [])


def _not_finite(tensor: Tensor, written: torch.dtype) -> str | None:
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    if tensor.dtype.itemsize == 1:  # of 8-bit floats torch has no smallest and largest
        tensor = tensor.float()
    # one pass over a sound tensor, with nothing allocated
    low, high = (float(end) for end in torch.aminmax(tensor))
    largest = torch.finfo(written).max if written.is_floating_point else float("inf")
    if -largest <= low and high <= largest:  # false for NaN, which aminmax hands on
        return None
    nan, finite = int(tensor.isnan().sum()), tensor.isfinite()
    infinite = tensor.numel() - nan - int(finite.sum())
    lost = int((finite & ~tensor.to(written).isfinite()).sum())
    count, names = f"of {tensor.numel():,}", str(written).removeprefix("torch.")
    if nan or infinite:
        kinds = [f"{number:,} {kind}" for number, kind in ((nan, "NaN"), (infinite, "infinite")) if number]
        return f"{' and '.join(kinds)} {count} numbers"
    return f"{lost:,} {count} numbers that are too large for {names} (up to {max(-low, high):.3g})" if lost else None


# Reading


class TensorReader:
    """Reader of a step folder's tensors, whatever layout wrote them."""

    def __init__(self, step_dir: Path, tensors: Mapping[str, TensorInfo], index: load.Index) -> None:
        self.step_dir, self._tensors, self._index = step_dir, tensors, index

    def tensors(self) -> dict[str, TensorInfo]:
        return dict(self._tensors)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a whole tensor into a CPU tensor. Raises CheckpointError."""
        shape = torch.Size(self._tensors[name].shape)
        tensor = empty(shape, dtype=dtype or self._tensors[name].dtype, device=torch.device("cpu"))
        load.fill(self.step_dir, self._index, {name: GlobalTensor.whole(tensor)})
        return tensor

    def read_rows(self, name: str, first: int, count: int) -> Tensor:
        """Read rows along dim 0."""
        shape, dtype = self._tensors[name]
        if not shape or not 0 <= first <= first + count <= shape[0]:
            raise ValueError(f"{name} {list(shape)} has no rows {first} to {first + count}")
        tensor = torch.empty((count, *shape[1:]), dtype=dtype)
        wanted = GlobalTensor(shape, dtype, [Piece((first, *[0] * (len(shape) - 1)), tensor)])
        load.fill(self.step_dir, self._index, {name: wanted})
        return tensor

    def blocks(self, name: str, max_bytes: int = BLOCK_BYTES) -> Iterator[Tensor]:
        """Iterate over a tensor in blocks of rows of at most ``max_bytes``."""
        shape, dtype = self._tensors[name]
        if not shape:
            yield self.read(name)
            return
        rows = max(1, max_bytes // max(1, torch.Size(shape[1:]).numel() * dtype.itemsize))
        for first in range(0, shape[0], rows):
            yield self.read_rows(name, first, min(rows, shape[0] - first))


class NativeReader(TensorReader):
    """Reader that checks the folder first: every byte, or only headers if ``verified``. Raises CheckpointError."""

    def __init__(self, step_dir: str | Path, *, verified: bool = False) -> None:
        folder = Path(step_dir)
        self.manifest = read_manifest(folder)
        manifest.require_none(folder, manifest.missing_or_cut(folder, self.manifest))
        files = load.data_files(self.manifest)
        if not verified:
            manifest.require_none(folder, manifest.changed(folder, self.manifest, [*files, STATE_NAME]))
        index = load.make_index(folder, self.manifest, load.read_headers(folder, files))
        load.check_tiling(folder, self.manifest, index, self.manifest.tensors)
        super().__init__(folder, tensor_infos(self.manifest), index)

    @cached_property
    def state(self) -> dict[str, Any]:
        return read_state(self.step_dir)


def tensor_infos(manifest: Manifest) -> dict[str, TensorInfo]:
    """Return shape and dtype of all tensors, in the order of their names."""
    return {name: TensorInfo(shape, DTYPES[dtype]) for name, (dtype, shape) in sorted(manifest.tensors.items())}
