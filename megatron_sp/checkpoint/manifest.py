"""MANIFEST.json: the list of what a step folder must contain, byte for byte. A folder without a sound manifest is not a checkpoint.

It lists every file with its size and SHA-256 and every tensor with its dtype and global shape, so that a tensor with a
missing piece is not taken for a smaller one. It also contains its own hash: the SHA-256 of the manifest with the digits
of that hash replaced by zeros. It protects against accidents, not attackers: whoever can write the files can write the
manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from megatron_sp.checkpoint.file_records import ITEM_BYTES, FileRecord
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import is_count, is_counts, parse_object, read_small_file

if TYPE_CHECKING:
    import torch

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

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Global shape and dtype of each tensor, by name."""
        from megatron_sp.checkpoint.safetensors_file import DTYPES  # here, so that listing checkpoints does not load torch

        return {name: (shape, DTYPES[dtype]) for name, (dtype, shape) in self.tensors.items()}

    def encode(self) -> bytes:
        """Return the contents of MANIFEST.json."""
        document = {
            "format": "megatron_sp checkpoint",
            "format_version": FORMAT_VERSION,
            "manifest_sha256": _NO_HASH,
            "step": self.step,
            "world_size": self.world_size,
            "files": {name: {"bytes": record.num_bytes, "sha256": record.sha256} for name, record in sorted(self.files.items())},
            "tensors": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in sorted(self.tensors.items())},
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
    """Parse and check the bytes of a manifest; ``path`` is for messages. Raises CheckpointError."""
    document = parse_object(data, str(path))
    check_format_version(document, path)
    digest = document.get("manifest_sha256")
    if not _is_hash(digest) or hashlib.sha256(data.replace(digest.encode(), _NO_HASH.encode(), 1)).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: its contents do not match the SHA-256 it carries")
    step, world_size, files, tensors = (document.get(key) for key in ("step", "world_size", "files", "tensors"))
    if not (is_count(step) and is_count(world_size) and isinstance(files, dict) and isinstance(tensors, dict)):
        raise CheckpointError(f"{path} is malformed: it needs step, world_size, files and tensors")
    manifest = Manifest(
        step, world_size, {n: _file_record(path, n, v) for n, v in files.items()}, {n: _tensor(path, n, v) for n, v in tensors.items()}
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
        raise ValueError(f"the state has {len(data):,} bytes as JSON, more than the {MAX_STATE_BYTES:,} that are read back: use tensors")
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
    """Reject a file of a newer format or without a format version. Raises CheckpointError."""
    version = document.get("format_version")
    if not is_count(version) or version < 1:
        raise CheckpointError(f"{path} is malformed: format_version is {str(version)[:40]}, a positive integer is needed")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this program reads up to {FORMAT_VERSION}:"
            " a newer megatron_sp wrote it, update to read it"
        )


def _file_record(path: Path, name: str, value: Any) -> FileRecord:
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"{path} names the file {name[:200]!r}: only plain file names of the same folder are allowed")
    if not (isinstance(value, dict) and is_count(value.get("bytes")) and _is_hash(value.get("sha256"))):
        raise CheckpointError(f"{path} is malformed: the entry of {name} needs bytes and sha256")
    return FileRecord(value["bytes"], value["sha256"])


def _tensor(path: Path, name: str, value: Any) -> tuple[str, tuple[int, ...]]:
    if not (
        isinstance(value, dict) and isinstance(value.get("dtype"), str) and value["dtype"] in ITEM_BYTES and is_counts(value.get("shape"))
    ):
        raise CheckpointError(f"{path} is malformed: the entry of tensor {name[:200]!r} needs a known dtype and a shape")
    return value["dtype"], tuple(value["shape"])


def _is_hash(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None
