"""The three steps of a save: open a staging folder, write this rank's files, commit. Disk errors are returned as reasons.

Only rank 0 opens and commits; every rank writes. None of these raises OSError: a full disk must not end the training.

The work is divided by a plan: every rank describes its rectangles, and all compute the same division. A rectangle that
several ranks hold is written by the one of them with the fewest bytes so far, the largest first, so that the work is
balanced. It also checks that the rectangles tile every tensor, before anything is written.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_sp.checkpoint import commit
from megatron_sp.checkpoint.manifest import STATE_NAME, FileRecord, Manifest, cores_of_rank, io_threads
from megatron_sp.checkpoint.pieces import GlobalTensor, Rect, tiling_problem
from megatron_sp.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, NamedPiece, cut_into_files, write_file
from megatron_sp.utils.files import free_bytes, fsync_dir

Description = dict[str, list[Any]]  # name -> [dtype, shape, [[offsets, sizes], ...]]: as JSON
logger = logging.getLogger(__name__)

SPACE_FACTOR = 1.2  # free space required, relative to the bytes to write
_MIN_FILE_BYTES = 64 << 20  # smaller files are not worth a thread


@dataclass(frozen=True)
class SavePlan:
    """Assignment of rectangles to the ranks that write them; the same on every rank."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype name, global shape)
    writer: dict[tuple[str, Rect], int]  # the rank that writes each rectangle
    rank_bytes: list[int]  # bytes of tensors each rank writes

    def items_of(self, rank: int, tensors: dict[str, GlobalTensor]) -> list[NamedPiece]:
        """Return the pieces that ``rank`` writes, out of those it holds."""
        items, seen = [], set()
        for name, tensor in tensors.items():
            for piece in tensor.pieces:
                key = (name, piece.rect)
                if piece.rect.numel and self.writer[key] == rank and key not in seen:
                    seen.add(key)
                    items.append(NamedPiece(name, tensor.shape, piece))
        return items


def describe(tensors: dict[str, GlobalTensor]) -> Description:
    """Return the description of this rank's rectangles.

    Raises:
        ValueError: a piece that does not fit its tensor, a dtype that safetensors does not support, or a reserved name.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}: a checkpoint can hold {', '.join(str(d) for d in DTYPE_NAMES)}"
            )
        if name == "__metadata__":
            raise ValueError("a tensor cannot be named __metadata__: safetensors uses that name itself")
        tensor.check(name)
    return {
        name: [
            DTYPE_NAMES[tensor.dtype],
            list(tensor.shape),
            [[list(r.offsets), list(r.sizes)] for r in tensor.rects()],
        ]
        for name, tensor in tensors.items()
    }


def make_plan(descriptions: list[Description]) -> SavePlan:
    """Assign every rectangle to a rank.

    Args:
        descriptions: those of all ranks, in rank order.
    Raises:
        ValueError: ranks disagree on a dtype or shape, or the rectangles do not tile a tensor.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    holders: dict[str, dict[Rect, list[int]]] = {}
    for rank, description in enumerate(descriptions):
        for name, (dtype, shape, rects) in description.items():
            known = tensors.setdefault(name, (dtype, tuple(shape)))
            if known != (dtype, tuple(shape)):
                raise ValueError(
                    f"{name} is {dtype} {shape} on rank {rank}, but {known[0]} {list(known[1])} on a lower rank"
                )
            of_name = holders.setdefault(name, {})
            for offsets, sizes in rects:
                of_name.setdefault(Rect(tuple(offsets), tuple(sizes)), []).append(rank)
    for name, (_, shape) in tensors.items():
        if problem := tiling_problem(shape, holders[name].keys()):
            raise ValueError(f"{name} {list(shape)} cannot be saved: {problem}")
    return _assign(tensors, holders, len(descriptions))


def _assign(
    tensors: dict[str, tuple[str, tuple[int, ...]]], holders: dict[str, dict[Rect, list[int]]], world_size: int
) -> SavePlan:
    writer: dict[tuple[str, Rect], int] = {}
    rank_bytes = [0] * world_size
    work = [
        (rect.numel * DTYPES[tensors[name][0]].itemsize, name, rect, ranks)
        for name, rects in holders.items()
        for rect, ranks in rects.items()
    ]
    for num_bytes, name, rect, ranks in sorted(work, key=lambda w: (len(w[3]) > 1, -w[0], w[1], w[2])):  # replicas last
        rank = min(ranks, key=lambda r: (rank_bytes[r], r))
        writer[name, rect] = rank
        rank_bytes[rank] += num_bytes
    return SavePlan(tensors, writer, rank_bytes)


def open_staging(folder: Path, step: int, num_bytes: int, make_room: Callable[[], Any]) -> dict[str, str]:
    """Check the free space and create a staging folder.

    Args:
        num_bytes: bytes of tensors that all ranks together will write.
        make_room: called once if there is not enough space, before giving up.
    Returns:
        {"staging": its path} or {"failed": why not}.
    """
    needed = int(SPACE_FACTOR * num_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if free_bytes(folder) < needed:
            make_room()
        if (free := free_bytes(folder)) < needed:
            return {
                "failed": f"{folder} has {size_words(free)} free, {size_words(needed)} are needed ({SPACE_FACTOR} times the tensors)"
            }
        return {"staging": str(commit.staging_dir(folder, step))}
    except OSError as error:
        return {"failed": explain(error, folder)}


def write_own_files(
    staging: Path,
    rank: int,
    items: Sequence[NamedPiece],
    max_file_bytes: int,
    reached: Callable[[str], None],
    beside: bool = False,
) -> dict[str, Any]:
    """Write and fsync a rank's pieces, several files at once, since hashing is the bottleneck on a CPU without SHA instructions.

    Args:
        reached: called at the points of each file that ``write_file`` names.
        beside: training goes on meanwhile: write the same files with fewer threads (``threads_beside_training``).
    Returns:
        {"files": {name: (bytes, sha256)}} or {"failed": why}; what was written is left for rank 0 to remove.
    """
    threads = io_threads()
    share = sum(item.num_bytes for item in items) // threads + 1
    files = cut_into_files(items, min(max_file_bytes, max(share, _MIN_FILE_BYTES)))
    paths = [staging / f"rank{rank:05d}-{number:05d}.safetensors" for number in range(len(files))]
    try:
        staging.mkdir(exist_ok=True)  # a shared file system may be slow to show it to other hosts
        with ThreadPoolExecutor(
            threads_beside_training() if beside else threads
        ) as pool:  # leaving the block waits for all, even if one has failed
            records = list(pool.map(partial(write_file, reached=reached, in_turn=beside), paths, files))
        for point in () if records else ("hash", "write", "shard"):
            reached(point)
        fsync_dir(staging)
    except OSError as error:
        return {"failed": explain(error, staging)}
    return {"files": {path.name: record for path, record in zip(paths, records, strict=True)}}


def make_manifest(step: int, state: bytes, plan: SavePlan, results: Sequence[dict[str, Any]]) -> Manifest:
    # the manifest of the files of all ranks; ``results`` are those of ``write_own_files`` on each rank
    files = {name: FileRecord(*record) for result in results for name, record in result["files"].items()}
    files[STATE_NAME] = FileRecord(len(state), hashlib.sha256(state).hexdigest())
    return Manifest(step, len(results), files, plan.tensors)


def commit_staging(
    staging: Path,
    step: int,
    state: bytes,
    plan: SavePlan,
    results: Sequence[dict[str, Any]],
    fault: Callable[[str], None],
) -> dict[str, Any]:
    """Seal and publish a staging folder, or remove it if any rank failed.

    Args:
        fault: called with the name of each point at which tests inject faults.
    Returns:
        {"num_bytes": bytes written by all ranks} or {"failed": why}.
    """
    failures = [f"rank {rank}: {result['failed']}" for rank, result in enumerate(results) if "failed" in result]
    try:
        if not failures:
            fault("save.manifest")
            manifest = make_manifest(step, state, plan, results)
            commit.seal(staging, state, manifest)
            fault("save.rename")
            commit.log_notes(commit.publish(staging, manifest))
            return {"num_bytes": manifest.num_bytes}
    except OSError as error:
        failures = [explain(error, staging)]
    shutil.rmtree(staging, ignore_errors=True)
    return {"failed": "; ".join(failures[:3])}


def prune_quietly(
    folder: Path, keep_last: int, keep_every: int | None, before_each: Callable[[], None] = lambda: None
) -> list[str]:
    """Call ``commit.prune``, but only warn if a folder cannot be deleted."""
    try:
        return commit.prune(folder, keep_last, keep_every, before_each)
    except OSError as error:
        logger.warning("old checkpoints could not be deleted: %s", explain(error, folder))
        return []


def explain(error: OSError, path: Path) -> str:
    """Return the operating system's error message with the path concerned."""
    return f"{error.strerror or error} ({error.filename or path})"


def size_words(num_bytes: int) -> str:
    """Format a number of bytes in GiB from half a GiB on, else in MiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 1 << 29 else f"{num_bytes / 2**20:.1f} MiB"


def idle_cores() -> int:
    """Return the number of this rank's cores that torch does not compute on."""
    return max(0, cores_of_rank() - torch.get_num_threads())


def threads_beside_training() -> int:
    """Return the number of files to write at once while training goes on.

    One per idle core. If no core is idle, as many as ``io_threads()``: then all compute threads slow down alike, while
    a single writer would make all of them wait for the one whose core it shares (docs/design/008-async-save.md has the
    figures).
    """
    return min(idle_cores() or io_threads(), io_threads())
