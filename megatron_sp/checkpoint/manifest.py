"""MANIFEST.json: what a step folder must hold, byte for byte. A folder without a sound manifest is not a checkpoint.

It lists files with size and SHA-256 (its own among them, of the manifest with zeros in its place), and tensors with
dtype and global shape. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from megatron_sp.config import rules
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.launch import processes_of_host
from megatron_sp.utils.strict_json import is_count, is_counts, open_regular, parse_object, read_small_file

# by safetensors' names of dtypes
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}

FORMAT_VERSION = 1
MANIFEST_NAME = "MANIFEST.json"
STATE_NAME = "state.json"
MAX_MANIFEST_BYTES = 16 << 20
MAX_STATE_BYTES = 4 << 20

_MAX_SHOWN = 5
_NO_HASH = "0" * 64
_HASH = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")  # no path, no hidden file


class FileRecord(NamedTuple):
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checked MANIFEST.json."""

    step: int
    world_size: int  # ranks that wrote it
    files: dict[str, FileRecord]  # by file name, state.json among them
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (safetensors' dtype name, global shape)

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.files.values())

    def encode(self) -> bytes:
        files, tensors = sorted(self.files.items()), sorted(self.tensors.items())
        document = {
            "format": "megatron_sp checkpoint",
            "format_version": FORMAT_VERSION,
            "manifest_sha256": _NO_HASH,
            "step": self.step,
            "world_size": self.world_size,
            "files": {name: {"bytes": record.num_bytes, "sha256": record.sha256} for name, record in files},
            "tensors": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in tensors},
        }
        text = json.dumps(document, indent=1).encode("utf-8") + b"\n"
        # the first zeros are this field's: no name before it can hold 64 of them
        return text.replace(_NO_HASH.encode(), hashlib.sha256(text).hexdigest().encode(), 1)


def read_manifest(step_dir: Path) -> Manifest:
    """Read and check a step folder's manifest, not the files it names. Raises CheckpointError."""
    path = step_dir / MANIFEST_NAME
    if not path.exists() and not path.is_symlink():
        raise CheckpointError(f"{step_dir} has no {MANIFEST_NAME}: it is not a complete checkpoint")
    data = read_small_file(path, MAX_MANIFEST_BYTES)
    document = parse_object(data, str(path))
    _check_format_version(document, path)
    digest = document.get("manifest_sha256")
    zeroed = data.replace(digest.encode(), _NO_HASH.encode(), 1) if _is_hash(digest) else b""
    if not zeroed or hashlib.sha256(zeroed).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: its contents do not match the SHA-256 it carries")
    step, world_size, files, tensors = (document.get(key) for key in ("step", "world_size", "files", "tensors"))
    if not (is_count(step) and is_count(world_size) and isinstance(files, dict) and isinstance(tensors, dict)):
        raise CheckpointError(f"{path} is malformed: it needs step, world_size, files and tensors")
    manifest = Manifest(step, world_size, {}, {})
    for name, entry in files.items():
        if not _FILE_NAME.fullmatch(name):
            name = name[:200]
            raise CheckpointError(
                f"{path} names the file {name!r}: only plain file names of the same folder are allowed"
            )
        if not (isinstance(entry, dict) and is_count(entry.get("bytes")) and _is_hash(entry.get("sha256"))):
            raise CheckpointError(f"{path} is malformed: the entry of {name} needs bytes and sha256")
        manifest.files[name] = FileRecord(entry["bytes"], entry["sha256"])
    for name, entry in tensors.items():
        dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if not (isinstance(dtype, str) and dtype in ITEM_BYTES and is_counts(shape)):
            where = f"the entry of tensor {name[:200]!r}"
            raise CheckpointError(f"{path} is malformed: {where} needs a known dtype and a shape")
        manifest.tensors[name] = dtype, tuple(shape)
    if STATE_NAME not in manifest.files:
        raise CheckpointError(f"{path} is malformed: it does not list {STATE_NAME}")
    return manifest


def _is_hash(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _check_format_version(document: dict[str, Any], path: Path) -> None:
    version = document.get("format_version")
    if not is_count(version) or version < 1:
        given = str(version)[:40]
        raise CheckpointError(f"{path} is malformed: format_version is {given}, a positive integer is needed")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this program reads up to {FORMAT_VERSION}:"
            " a newer megatron_sp wrote it, update to read it"
        )


def encode_state(step: int, state: dict[str, Any]) -> bytes:
    """Return the bytes of state.json. Raises TypeError or ValueError if they could not be read back."""
    data = json.dumps({**state, "format_version": FORMAT_VERSION, "step": step}, indent=1).encode("utf-8") + b"\n"
    if len(data) > MAX_STATE_BYTES:
        sizes = f"{len(data):,} bytes as JSON, more than the {MAX_STATE_BYTES:,} that are read back"
        raise ValueError(f"the state has {sizes}: use tensors")
    try:
        parse_object(data, STATE_NAME)
    except CheckpointError as error:
        raise ValueError(f"the state could not be read back: {error}") from None
    return data


def read_state(step_dir: Path) -> dict[str, Any]:
    """Return state.json, checked against the manifest. Raises CheckpointError."""
    path = step_dir / STATE_NAME
    expected = read_manifest(step_dir).files[STATE_NAME].sha256
    data = read_small_file(path, MAX_STATE_BYTES)
    if hashlib.sha256(data).hexdigest() != expected:
        raise CheckpointError(f"{path} is damaged: its contents do not match the manifest")
    state = parse_object(data, str(path))
    _check_format_version(state, path)
    return state


def stored_configuration(state: dict[str, Any], *, normalize: bool = False) -> tuple[Config, list[str]]:
    """Return the unchecked configuration in state.json, and warnings about unknown entries. Raises CheckpointError."""
    try:
        config, warnings = Config.from_dict(state.get("config"))
        config.model_is_settled = True
        if normalize:
            rules.normalize(config)
    except ConfigError as error:
        raise CheckpointError(f"{STATE_NAME} of the checkpoint: {error}") from None
    return config, warnings


def cores_of_rank() -> int:
    # 0 if the host has more ranks than cores
    return len(os.sched_getaffinity(0)) // processes_of_host()


def io_threads() -> int:
    # files to read or write at once
    return max(1, min(4, cores_of_rank()))


def hash_file(path: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Return a file's SHA-256 in hexadecimal; ``progress`` gets the bytes of each block."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(1 << 20))
    with open(open_regular(path), "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            progress(count)
    return digest.hexdigest()


def is_complete(step_dir: Path) -> bool:
    """Return whether the manifest is sound and every file has its size."""
    try:
        return not missing_or_cut(step_dir, read_manifest(step_dir))
    except CheckpointError:
        return False


def missing_or_cut(step_dir: Path, manifest: Manifest) -> list[str]:
    """Return what is wrong with the presence and sizes of a step folder's files."""
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
    """Read files in full and return a problem for each whose SHA-256 differs."""

    def problem(name: str) -> str | None:
        path, expected = step_dir / name, manifest.files[name].sha256
        try:
            actual = hash_file(path, progress)
        except (OSError, CheckpointError) as error:
            return f"{path} cannot be read: {error}"
        if actual == expected:
            return None
        return f"{path} has SHA-256 {actual[:12]}..., its manifest says {expected[:12]}...: its contents have changed"

    with ThreadPoolExecutor(io_threads()) as pool:  # hashing releases the interpreter lock
        return [text for text in pool.map(problem, names) if text is not None]


def require_none(step_dir: Path, problems: list[str]) -> None:
    """Raise CheckpointError if there are any problems."""
    if problems:
        more = [f"  and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        raise CheckpointError("\n".join([f"{step_dir} is damaged:", *(f"  {p}" for p in problems[:_MAX_SHOWN]), *more]))


def extra_files(step_dir: Path, manifest: Manifest) -> list[str]:
    """Return the names that the manifest does not list; such files are never read."""
    return sorted({entry.name for entry in os.scandir(step_dir)} - {MANIFEST_NAME, *manifest.files})
