"""The three steps of a save: open a staging folder, write this rank's files, commit. Disk errors are returned as reasons.

Only rank 0 opens and commits; every rank writes. None of these raises OSError: a full disk must not end the training.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from megatron_sp.checkpoint import commit
from megatron_sp.checkpoint.cores import threads_beside_training
from megatron_sp.checkpoint.file_records import FileRecord, io_threads
from megatron_sp.checkpoint.manifest import STATE_NAME, Manifest
from megatron_sp.checkpoint.plan import SavePlan
from megatron_sp.checkpoint.safetensors_file import NamedPiece, cut_into_files, write_file
from megatron_sp.utils.files import free_bytes, fsync_dir

logger = logging.getLogger(__name__)

SPACE_FACTOR = 1.2  # free space required, relative to the bytes to write
_MIN_FILE_BYTES = 64 << 20  # smaller files are not worth a thread


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
            return {"failed": f"{folder} has {size_words(free)} free, {size_words(needed)} are needed ({SPACE_FACTOR} times the tensors)"}
        return {"staging": str(commit.staging_dir(folder, step))}
    except OSError as error:
        return {"failed": explain(error, folder)}


def write_own_files(
    staging: Path, rank: int, items: Sequence[NamedPiece], max_file_bytes: int, reached: Callable[[str], None], beside: bool = False
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
    """Return the manifest of the files of all ranks; ``results`` are those of ``write_own_files`` on each rank."""
    files = {name: FileRecord(*record) for result in results for name, record in result["files"].items()}
    files[STATE_NAME] = FileRecord(len(state), hashlib.sha256(state).hexdigest())
    return Manifest(step, len(results), files, plan.tensors)


def commit_staging(
    staging: Path, step: int, state: bytes, plan: SavePlan, results: Sequence[dict[str, Any]], fault: Callable[[str], None]
) -> dict[str, Any]:
    """Seal and publish a staging folder, or remove it if any rank failed.

    Args:
        results: those of ``write_own_files`` on all ranks.
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


def prune_quietly(folder: Path, keep_last: int, keep_every: int | None, before_each: Callable[[], None] = lambda: None) -> list[str]:
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
