"""MANIFEST.json: the list of what a step folder must contain, byte for byte. A folder without a sound manifest is not a checkpoint.

It lists every file with its size and SHA-256 and every tensor with its dtype and global shape, so that a tensor with a
missing piece is not taken for a smaller one. It also contains its own hash: the SHA-256 of the manifest with the digits
of that hash replaced by zeros. It protects against accidents, not attackers: whoever can write the files can write the
manifest.

A step folder is also compared with its manifest here. Nothing of this imports torch.
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

from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.launch import processes_of_host
from megatron_sp.utils.strict_json import is_count, is_counts, open_regular, parse_object, read_small_file

_MAX_SHOWN = 5
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


FORMAT_VERSION = 1
MANIFEST_NAME = "MANIFEST.json"
STATE_NAME = "state.json"
MAX_MANIFEST_BYTES = 16 << 20
MAX_STATE_BYTES = 4 << 20

_NO_HASH = "0" * 64
_HASH = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")  # no path, no hidden file


@dataclass(frozen=True)
class Manifest:
    """A checked MANIFEST.json."""

    step: int
    world_size: int  # ranks that wrote it
    files: dict[str, FileRecord]  # by file name, state.json among them
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (safetensors' dtype name, global shape)

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(record.num_bytes for record in self.files.values())

    def encode(self) -> bytes:
        """Return the contents of MANIFEST.json."""
        document = {
            "format": "megatron_sp checkpoint",
            "format_version": FORMAT_VERSION,
            "manifest_sha256": _NO_HASH,
            "step": self.step,
            "world_size": self.world_size,
            "files": {
                name: {"bytes": record.num_bytes, "sha256": record.sha256}
                for name, record in sorted(self.files.items())
            },
            "tensors": {
                name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in sorted(self.tensors.items())
            },
        }
        text = json.dumps(document, indent=1).encode("utf-8") + b"\n"
        return text.replace(_NO_HASH.encode(), hashlib.sha256(text).hexdigest().encode(), 1)


def read_manifest(step_dir: Path) -> Manifest:
    """Read and check a step folder's manifest (not the files it names).

    Raises:
        CheckpointError: it is missing, damaged, malformed, or of a newer format.
    """
    path = step_dir / MANIFEST_NAME
    if not path.exists() and not path.is_symlink():
        raise CheckpointError(f"{step_dir} has no {MANIFEST_NAME}: it is not a complete checkpoint")
    return decode_manifest(read_small_file(path, MAX_MANIFEST_BYTES), path)


def decode_manifest(data: bytes, path: Path) -> Manifest:
    # parse and check the bytes of a manifest; ``path`` is for messages. Raises CheckpointError
    document = parse_object(data, str(path))
    check_format_version(document, path)
    digest = document.get("manifest_sha256")
    if (
        not _is_hash(digest)
        or hashlib.sha256(data.replace(digest.encode(), _NO_HASH.encode(), 1)).hexdigest() != digest
    ):
        raise CheckpointError(f"{path} is damaged: its contents do not match the SHA-256 it carries")
    step, world_size, files, tensors = (document.get(key) for key in ("step", "world_size", "files", "tensors"))
    if not (is_count(step) and is_count(world_size) and isinstance(files, dict) and isinstance(tensors, dict)):
        raise CheckpointError(f"{path} is malformed: it needs step, world_size, files and tensors")
    manifest = Manifest(
        step,
        world_size,
        {n: _file_record(path, n, v) for n, v in files.items()},
        {n: _tensor(path, n, v) for n, v in tensors.items()},
    )
    if STATE_NAME not in manifest.files:
        raise CheckpointError(f"{path} is malformed: it does not list {STATE_NAME}")
    return manifest


def encode_state(step: int, state: dict[str, Any]) -> bytes:
    """Return the bytes of state.json: the state with ``format_version`` and ``step`` added.

    Raises:
        TypeError, ValueError: the state is not JSON, or larger than the reader accepts.
    """
    data = json.dumps({**state, "format_version": FORMAT_VERSION, "step": step}, indent=1).encode("utf-8") + b"\n"
    if len(data) > MAX_STATE_BYTES:
        raise ValueError(
            f"the state has {len(data):,} bytes as JSON, more than the {MAX_STATE_BYTES:,} that are read back: use tensors"
        )
    try:
        parse_object(data, STATE_NAME)
    except CheckpointError as error:
        raise ValueError(f"the state could not be read back: {error}") from None
    return data


def read_state(step_dir: Path) -> dict[str, Any]:
    """Return the contents of state.json, checked against the manifest.

    Raises:
        CheckpointError: it is missing, damaged, or of a newer format.
    """
    path = step_dir / STATE_NAME
    expected = read_manifest(step_dir).files[STATE_NAME].sha256
    data = read_small_file(path, MAX_STATE_BYTES)
    if hashlib.sha256(data).hexdigest() != expected:
        raise CheckpointError(f"{path} is damaged: its contents do not match the manifest")
    state = parse_object(data, str(path))
    check_format_version(state, path)
    return state


def check_format_version(document: dict[str, Any], path: Path) -> None:
    version = document.get("format_version")
    if not is_count(version) or version < 1:
        raise CheckpointError(
            f"{path} is malformed: format_version is {str(version)[:40]}, a positive integer is needed"
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this program reads up to {FORMAT_VERSION}:"
            " a newer megatron_sp wrote it, update to read it"
        )


def _file_record(path: Path, name: str, value: Any) -> FileRecord:
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(
            f"{path} names the file {name[:200]!r}: only plain file names of the same folder are allowed"
        )
    if not (isinstance(value, dict) and is_count(value.get("bytes")) and _is_hash(value.get("sha256"))):
        raise CheckpointError(f"{path} is malformed: the entry of {name} needs bytes and sha256")
    return FileRecord(value["bytes"], value["sha256"])


def _tensor(path: Path, name: str, value: Any) -> tuple[str, tuple[int, ...]]:
    if not (
        isinstance(value, dict)
        and isinstance(value.get("dtype"), str)
        and value["dtype"] in ITEM_BYTES
        and is_counts(value.get("shape"))
    ):
        raise CheckpointError(
            f"{path} is malformed: the entry of tensor {name[:200]!r} needs a known dtype and a shape"
        )
    return value["dtype"], tuple(value["shape"])


def _is_hash(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


"""By safetensors' names of dtypes."""


class FileRecord(NamedTuple):
    """A file's entry in the manifest."""

    num_bytes: int
    sha256: str


def cores_of_rank() -> int:
    """Return this rank's share of the cores it may use, split among the host's ranks; 0 if there are more ranks than cores."""
    return len(os.sched_getaffinity(0)) // processes_of_host()


def io_threads() -> int:
    """Return the number of files to read or write at once: one per core of this rank, at least one and at most four."""
    return max(1, min(4, cores_of_rank()))


def hash_file(path: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Return the SHA-256 of a file's contents in hexadecimal; ``progress`` is called with the number of bytes of each block read."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(1 << 20))
    with open(open_regular(path), "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            progress(count)
    return digest.hexdigest()


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
            actual = hash_file(path, progress)
        except (OSError, CheckpointError) as error:
            return f"{path} cannot be read: {error}"
        if actual == expected:
            return None
        return f"{path} has SHA-256 {actual[:12]}..., its manifest says {expected[:12]}...: its contents have changed"

    with ThreadPoolExecutor(io_threads()) as pool:
        return [text for text in pool.map(problem, names) if text is not None]


def require_none(step_dir: Path, problems: list[str]) -> None:
    """Raise CheckpointError if there are any problems."""
    if problems:
        more = [f"  and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        raise CheckpointError("\n".join([f"{step_dir} is damaged:", *(f"  {p}" for p in problems[:_MAX_SHOWN]), *more]))


def extra_files(step_dir: Path, manifest: Manifest) -> list[str]:
    """Return the names in a step folder that its manifest does not list; such files are never read."""
    return sorted(
        entry.name for entry in os.scandir(step_dir) if entry.name not in manifest.files and entry.name != MANIFEST_NAME
    )
