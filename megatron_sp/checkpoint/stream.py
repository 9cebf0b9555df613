"""Checkpoints written and read by one process with one tensor in memory at a time, whatever their size: for converters and tools.

The result is an ordinary step folder with world size 1, which any layout can load; it is created atomically, like that
of a training run. A ``NativeReader`` assembles tensors, in full or by rows, from the rectangles that any number of
ranks have written.
"""

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

from megatron_sp.checkpoint import commit, load, manifest, saving
from megatron_sp.checkpoint.lock import RunLock
from megatron_sp.checkpoint.manifest import STATE_NAME, FileRecord, Manifest, encode_state, read_manifest, read_state
from megatron_sp.checkpoint.pieces import GlobalTensor, Piece
from megatron_sp.checkpoint.safetensors_file import NamedPiece, cut_into_files, shapes_of, write_file
from megatron_sp.checkpoint.saving import describe, make_plan
from megatron_sp.ops.allocator import empty
from megatron_sp.utils.errors import CheckpointError, DiskError
from megatron_sp.utils.files import fsync_dir

MAX_FILE_BYTES = 1 << 30
BLOCK_BYTES = 64 << 20


class TensorInfo(NamedTuple):
    """Shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Source:
    """A tensor to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # returns the tensor when it is needed; called once, or a second time if the tensor is larger than a file
    read: Callable[[], Tensor]


def write_checkpoint(
    run_dir: str | Path, step: int, tensors: Mapping[str, Source], state: dict[str, Any], *, max_file_bytes: int = MAX_FILE_BYTES,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Path:  # fmt: skip
    """Write ``run_dir/checkpoints/step-NNNNNN`` and name it in ``latest``.

    Args:
        run_dir: a run folder without checkpoints; created if it does not exist. Its lock is held meanwhile.
        step: for the folder's name and its state.
        tensors: by name; at most one of them is in memory (two copies if it is not contiguous).
        state: contents of state.json; ``format_version`` and ``step`` are added.
        max_file_bytes: limit of the tensor bytes in a file; a larger tensor is split by rows over several.
        progress: called with the bytes of each tensor, or part of one, when it is about to be written.
    Returns:
        The step folder.
    Raises:
        CheckpointError: the folder already has checkpoints, or a tensor has not the announced shape and dtype.
        LockError: another job is writing there.
        DiskError: no space, no permission, or a failing disk; nothing is left behind.
        ValueError, TypeError: a dtype that safetensors does not support, or a state that is not JSON.
    """
    run_dir = Path(run_dir)
    data = encode_state(step, state)
    announced = {
        name: GlobalTensor(tuple(t.shape), t.dtype, list(_rows(t, max_file_bytes))) for name, t in tensors.items()
    }
    plan = make_plan([describe(announced)])
    require_no_checkpoint(run_dir)  # before anything is created
    is_new = not run_dir.exists()
    outcome: dict[str, Any] = {"failed": "interrupted"}
    try:
        with RunLock(run_dir):
            require_no_checkpoint(run_dir)
            commit.log_notes(commit.sweep(run_dir / "checkpoints"))
            opened = saving.open_staging(run_dir / "checkpoints", step, sum(plan.rank_bytes), lambda: None)
            if "staging" not in opened:
                raise DiskError(f"nothing was written: {opened['failed']}; free some, or write elsewhere")
            staging = Path(opened["staging"])
            try:
                files = cut_into_files(plan.items_of(0, announced), max_file_bytes)
                records = _write_files(staging, files, _Contents(tensors, progress))
                outcome = saving.commit_staging(staging, step, data, plan, [{"files": records}], lambda point: None)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise
    except OSError as error:
        raise DiskError(f"nothing was written: {saving.explain(error, run_dir)}") from None
    finally:
        if "failed" in outcome and is_new:
            with contextlib.suppress(OSError):
                (run_dir / "checkpoints").rmdir()
                run_dir.rmdir()
    if "failed" in outcome:
        raise DiskError(f"nothing was written: {outcome['failed']}")
    return run_dir / "checkpoints" / commit.step_name(step)


def require_no_checkpoint(run_dir: Path) -> None:
    """Check that a run folder has no checkpoints yet. Raises CheckpointError."""
    if run_dir.exists() and not run_dir.is_dir():
        raise CheckpointError(f"{run_dir} is a file; a folder is made there: name another one")
    if steps := commit.list_steps(run_dir / "checkpoints"):
        names = ", ".join(path.name for path in list(steps.values())[:4])
        raise CheckpointError(
            f"{run_dir}/checkpoints has {names}{', ...' if len(steps) > 4 else ''} already: name another folder"
        )


def _rows(tensor: Source, max_bytes: int) -> Iterator[Piece]:
    # yield meta-tensor stand-ins for the parts in which a tensor is written: blocks of rows
    rest, rows = tuple(tensor.shape[1:]), tensor.shape[0] if tensor.shape else 1
    at_once = max(1, max_bytes // max(1, torch.Size(rest).numel() * tensor.dtype.itemsize))
    for first in range(0, rows, at_once):
        shape = (min(at_once, rows - first), *rest) if tensor.shape else ()
        yield Piece(
            (first, *[0] * len(rest)) if tensor.shape else (), torch.empty(shape, dtype=tensor.dtype, device="meta")
        )


class _Contents:
    """Reader that loads a tensor when a part of it is requested, and releases it before the next one."""

    def __init__(self, tensors: Mapping[str, Source], progress: Callable[[int], None]) -> None:
        self._tensors, self._progress = tensors, progress
        self._name: str | None = None
        self._tensor: Tensor | None = None

    def __call__(self, item: NamedPiece) -> Tensor:
        if self._name != item.name or self._tensor is None:
            self._tensor = None  # freed before the next one is produced
            self._tensor, self._name = self._read(item.name), item.name
        self._progress(item.num_bytes)
        tensor, stand_in = self._tensor, item.piece.tensor
        return tensor if stand_in.shape == tensor.shape else tensor.narrow(0, item.piece.offsets[0], stand_in.shape[0])

    def _read(self, name: str) -> Tensor:
        wanted, tensor = self._tensors[name], self._tensors[name].read()
        if tuple(tensor.shape) != tuple(wanted.shape) or tensor.dtype != wanted.dtype:
            actual = f"{tensor.dtype} {list(tensor.shape)}"
            raise CheckpointError(
                f"{name} was announced as {wanted.dtype} {list(wanted.shape)}, but is {actual}: nothing was written"
            )
        return tensor


def _write_files(staging: Path, files: list[list[NamedPiece]], contents: _Contents) -> dict[str, FileRecord]:
    records = {}
    for number, items in enumerate(files):
        path = staging / f"rank00000-{number:05d}.safetensors"
        records[path.name] = write_file(path, items, contents=contents)
    fsync_dir(staging)
    return records


class TensorReader:
    """Reader of a step folder's tensors, one at a time or by rows; ``NativeReader`` is the one that checks the folder first.

    Args:
        step_dir: the folder.
        tensors: shape and dtype of each tensor in it.
        index: the rectangles of each tensor.
    """

    def __init__(self, step_dir: Path, tensors: Mapping[str, TensorInfo], index: load.Index) -> None:
        self.step_dir, self._tensors, self._index = step_dir, tensors, index

    def tensors(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of every tensor, by name, in the order of names."""
        return dict(self._tensors)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a whole tensor into a contiguous CPU tensor, converting to ``dtype`` if given.

        Raises:
            CheckpointError: a file ends early.
            KeyError: there is no tensor of this name.
        """
        shape = torch.Size(self._tensors[name].shape)
        tensor = empty(shape, dtype=dtype or self._tensors[name].dtype, device=torch.device("cpu"))
        load.fill(self.step_dir, self._index, {name: GlobalTensor.whole(tensor)})
        return tensor

    def read_rows(self, name: str, first: int, count: int) -> Tensor:
        """Read rows ``first`` to ``first + count`` along dim 0. Raises ValueError if the tensor lacks these rows; else as ``read``."""
        shape, dtype = self._tensors[name]
        if not shape or not 0 <= first <= first + count <= shape[0]:
            raise ValueError(f"{name} {list(shape)} has no rows {first} to {first + count}")
        tensor = torch.empty((count, *shape[1:]), dtype=dtype)
        wanted = GlobalTensor(shape, dtype, [Piece((first, *[0] * (len(shape) - 1)), tensor)])
        load.fill(self.step_dir, self._index, {name: wanted})
        return tensor

    def blocks(self, name: str, max_bytes: int = BLOCK_BYTES) -> Iterator[Tensor]:
        """Iterate over a tensor from front to back, in blocks of whole rows of at most ``max_bytes`` (but at least one row)."""
        shape, dtype = self._tensors[name]
        if not shape:
            yield self.read(name)
            return
        rows = max(1, max_bytes // max(1, torch.Size(shape[1:]).numel() * dtype.itemsize))
        for first in range(0, shape[0], rows):
            yield self.read_rows(name, first, min(rows, shape[0] - first))


class NativeReader(TensorReader):
    """Reader of the tensors of a step folder, whatever layout wrote it.

    Args:
        step_dir: a step folder.
        verified: its contents have been verified already, or need not be; otherwise every byte is verified against the
            manifest.
    Raises:
        CheckpointError: files are missing, truncated or changed, headers contradict the manifest, or tensors are
            incomplete.
    """

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
        """The contents of state.json."""
        return read_state(self.step_dir)


def tensor_infos(manifest: Manifest) -> dict[str, TensorInfo]:
    """Return shape and dtype of all tensors, in the order of their names."""
    return {name: TensorInfo(shape, dtype) for name, (shape, dtype) in sorted(shapes_of(manifest).items())}
