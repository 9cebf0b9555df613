"""Verification of a step folder against its manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_sp.checkpoint.file_records import hash_file, io_threads
from megatron_sp.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import open_regular

_MAX_SHOWN = 5


def is_complete(step_dir: Path) -> bool:
    """Return whether the manifest is sound and every file exists with its size: the cheap half of verification."""
    try:
        return not missing_or_cut(step_dir, read_manifest(step_dir))
    except CheckpointError:
        return False


def missing_or_cut(step_dir: Path, manifest: Manifest) -> list[str]:
    """Return the problems of a step folder's files, judged by their presence and sizes only."""
    problems = []
    for name, record in manifest.files.items():
        path = step_dir / name
        try:
            fd = open_regular(path)
        except CheckpointError as error:
            problems.append(str(error) if path.is_symlink() or path.exists() else f"{path} is missing")
            continue
        size = os.fstat(fd).st_size
        os.close(fd)
        if size != record.num_bytes:
            problems.append(f"{path} has {size:,} bytes, its manifest says {record.num_bytes:,}")
    return problems


def changed(
    step_dir: Path, manifest: Manifest, names: Iterable[str], progress: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """Return a problem for each of these files whose SHA-256 differs; reads them in full, reporting the bytes to ``progress``."""

    def problem(name: str) -> str | None:
        path, expected = step_dir / name, manifest.files[name].sha256
        try:
            found = hash_file(path, progress)
        except (OSError, CheckpointError) as error:
            return f"{path} cannot be read: {error}"
        if found == expected:
            return None
        return f"{path} has SHA-256 {found[:12]}..., its manifest says {expected[:12]}...: its contents have changed"

    with ThreadPoolExecutor(io_threads()) as pool:
        return [text for text in pool.map(problem, names) if text is not None]


def require_none(step_dir: Path, problems: list[str]) -> None:
    """Raise CheckpointError if there are any problems."""
    if problems:
        more = [f"  and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        raise CheckpointError("\n".join([f"{step_dir} is damaged:", *(f"  {p}" for p in problems[:_MAX_SHOWN]), *more]))


def extra_files(step_dir: Path, manifest: Manifest) -> list[str]:
    """Return the names in a step folder that its manifest does not list; such files are never read."""
    return sorted(entry.name for entry in os.scandir(step_dir) if entry.name not in manifest.files and entry.name != MANIFEST_NAME)
