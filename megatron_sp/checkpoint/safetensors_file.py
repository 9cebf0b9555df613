"""Streaming writer and byte-range reader of safetensors files; files of a checkpoint are hashed while they are written.

The layout is that of torch.distributed.checkpoint's sharded Hugging Face storage, which any safetensors reader can
open: 8 bytes of header length, a JSON header, then the tensors one after the other. The header's ``__metadata__`` gives
the position of each rectangle in its global tensor under DCP_SHARDING_INFO (``saved_offsets``; ``global_shape`` is our
addition). The format allows one entry per name and file, so two rectangles of one tensor must go to two files
(``cut_into_files``).

That package is not used because it builds each file in memory twice before it writes the first byte; here a tensor goes
from its own memory to the file while a second thread computes the hash. The header is validated before it is used: a
malicious file leads to an error message, not to a huge allocation. Source: huggingface/safetensors README (format);
torch/distributed/checkpoint/hf_storage.py and filesystem.py (metadata).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.checkpoint.manifest import ITEM_BYTES, FileRecord, Manifest
from megatron_sp.checkpoint.pieces import Piece, Rect
from megatron_sp.ops.allocator import empty
from megatron_sp.utils import direct_io
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import MAX_VALUES, is_counts, open_regular, parse_object

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 1 << 24
_MAX_FOREIGN_VALUES = 300_000  # values in the header of another program's file, enough for 40,000 tensors
MAX_TENSORS_PER_FILE = 10_000  # keeps our own headers far below what the reader accepts
_BLOCK_BYTES = 8 << 20  # written and hashed at a time


def shapes_of(manifest: Manifest) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the global shape and dtype of each tensor, by name."""
    return {name: (shape, DTYPES[dtype]) for name, (dtype, shape) in manifest.tensors.items()}


class NamedPiece(NamedTuple):
    """A piece to be written to a file, with the name and shape of its tensor."""

    name: str
    shape: tuple[int, ...]  # of the global tensor
    piece: Piece

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return self.piece.tensor.numel() * self.piece.tensor.element_size()


class StoredPiece(NamedTuple):
    """A rectangle found in a file."""

    name: str
    dtype: str  # safetensors' name, e.g. BF16
    rect: Rect
    file: str
    begin: int  # byte at which its contents start in the file; row-major


def cut_into_files(items: Iterable[NamedPiece], max_bytes: int) -> list[list[NamedPiece]]:
    """Distribute the pieces of a rank over files (first fit): no name twice in a file, at most ``max_bytes`` each.

    A piece larger than ``max_bytes`` gets a file to itself.
    """
    files: list[list[NamedPiece]] = []
    names: list[set[str]] = []
    room: list[int] = []
    for item in items:
        for index in range(len(files)):
            if (
                item.name not in names[index]
                and item.num_bytes <= room[index]
                and len(names[index]) < MAX_TENSORS_PER_FILE
            ):
                break
        else:
            index = len(files)
            files.append([])
            names.append(set())
            room.append(max_bytes)
        files[index].append(item)
        names[index].add(item.name)
        room[index] -= item.num_bytes
    return files


def write_file(
    path: Path,
    items: Sequence[NamedPiece],
    reached: Callable[[str], None] = lambda point: None,
    contents: Callable[[NamedPiece], Tensor] | None = None,
    in_turn: bool = False,
) -> FileRecord:
    """Write and fsync one new file.

    Args:
        items: pieces with distinct names, on any device, contiguous or not.
        reached: called with ``hash`` before a block is hashed, ``write`` when one is written, ``shard`` when all are
            written but not yet fsynced.
        contents: returns a piece's contents when they are needed (default: those of the piece); they are released
            before the next ones.
        in_turn: hash and write one after the other instead of concurrently: slower, but uses one core only.
    Returns:
        Its size and SHA-256, computed from the bytes as they were written.
    Raises:
        OSError: no space, for example; what was written so far is left behind.
    """
    digest = hashlib.sha256()

    def update(block: memoryview) -> None:
        reached("hash")
        digest.update(block)

    size = _write(path, items, _header, contents or _own_contents, reached, update, in_turn)
    return FileRecord(size, digest.hexdigest())


def write_plain_file(path: Path, items: Sequence[NamedPiece], contents: Callable[[NamedPiece], Tensor]) -> int:
    """Write whole tensors as a plain safetensors file, without our own header entries and without a hash.

    Returns:
        Its size in bytes.
    Raises:
        OSError: what was written so far is left behind.
    """
    return _write(path, items, _plain_header, contents, lambda point: None, None)


def _own_contents(item: NamedPiece) -> Tensor:
    return item.piece.tensor


def _write(
    path: Path, items: Sequence[NamedPiece], header: Callable[[Sequence[NamedPiece]], bytes], contents: Callable[[NamedPiece], Tensor],
    reached: Callable[[str], None], update: Callable[[memoryview], None] | None, in_turn: bool = False,
) -> int:  # fmt: skip
    items = sorted(
        items, key=lambda item: -item.piece.tensor.element_size()
    )  # keeps every tensor aligned to its own size
    with direct_io.create(path) as file, contextlib.ExitStack() as stack:
        hasher = None if update is None or in_turn else stack.enter_context(ThreadPoolExecutor(1))
        size = 0
        for block in _blocks(header(items), items, contents):
            hashed = None  # hashing, writing: both release the interpreter lock
            if update is not None and hasher is not None:
                hashed = hasher.submit(update, block)
            elif update is not None:
                update(block)
            file.write(block)
            reached("write")
            if hashed is not None:
                hashed.result()
            size += len(block)
            del block  # else it stays in memory while the next tensor is produced
        reached("shard")
        file.sync()
    return size


def _blocks(
    header: bytes, items: Sequence[NamedPiece], contents: Callable[[NamedPiece], Tensor]
) -> Iterable[memoryview]:
    yield memoryview(header)
    for item in items:
        data = _bytes_of(contents(item).detach().cpu().contiguous())
        for start in range(0, len(data), _BLOCK_BYTES):
            yield data[start : start + _BLOCK_BYTES]
        del data


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.as_strided(
        (tensor.numel(),), (1,)
    )  # a tensor of one element may have any stride, and view() refuses that
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _header(items: Sequence[NamedPiece]) -> bytes:
    info = {item.name: {"saved_offsets": list(item.piece.offsets), "global_shape": list(item.shape)} for item in items}
    return _encode(items, {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)})


def _plain_header(items: Sequence[NamedPiece]) -> bytes:
    return _encode(items, {"format": "pt"})


def _encode(items: Sequence[NamedPiece], metadata: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for item in items:
        begin, end = end, end + item.num_bytes
        tensor = item.piece.tensor
        entries[item.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path, *, whole: bool = False) -> list[StoredPiece]:
    """Return every rectangle in a file, after checking that the header is consistent with itself and the file's size.

    Args:
        whole: the file is from another program, and each of its tensors is a whole one.
    Raises:
        CheckpointError: the header is too long or not JSON, lacks an entry, or its tensors overlap, leave gaps or reach
            past the end.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path} is not a safetensors file: it has {size:,} bytes and says that its header has {length:,}"
            )
        header = parse_object(file.read(length), f"the header of {path}", _MAX_FOREIGN_VALUES if whole else MAX_VALUES)
    metadata = header.pop("__metadata__", {})
    info_text = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, dict) else None
    info = parse_object(info_text.encode("utf-8"), f"DCP_SHARDING_INFO of {path}") if isinstance(info_text, str) else {}
    pieces = [_stored_piece(path, name, entry, None if whole else info, 8 + length) for name, entry in header.items()]
    _check_no_holes(path, pieces, 8 + length, size)
    return pieces


def _stored_piece(path: Path, name: str, entry: Any, info: dict[str, Any] | None, data_start: int) -> StoredPiece:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and dtype in DTYPES and is_counts(shape) and is_counts(span) and len(span) == 2):
        raise CheckpointError(
            f"{path}: the header's entry for {name[:200]!r} has no known dtype, shape and data_offsets"
        )
    placed = {"saved_offsets": [0] * len(shape)} if info is None else info.get(name)
    offsets = placed.get("saved_offsets") if isinstance(placed, dict) else None
    if not (is_counts(offsets) and len(offsets) == len(shape)):
        raise CheckpointError(
            f"{path}: the header does not say where {name[:200]!r} lies in its tensor (saved_offsets)"
        )
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if span[1] - span[0] != expected:
        raise CheckpointError(
            f"{path}: {name[:200]!r} is {dtype} {shape}, {expected:,} bytes, but data_offsets {span} say otherwise"
        )
    return StoredPiece(name, dtype, Rect(tuple(offsets), tuple(shape)), path.name, data_start + span[0])


def _check_no_holes(path: Path, pieces: list[StoredPiece], data_start: int, size: int) -> None:
    position = data_start
    for piece in sorted(pieces, key=lambda p: (p.begin, p.rect.numel)):
        if piece.begin != position:
            problem = "overlaps another tensor" if piece.begin < position else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: {piece.name[:200]!r} starts at byte {piece.begin:,}, expected {position:,}: it {problem}"
            )
        position += piece.rect.numel * ITEM_BYTES[piece.dtype]
    if position != size:
        raise CheckpointError(f"{path} has {size:,} bytes, its header describes {position:,}")


def read_rows(file: Any, piece: StoredPiece, first: int, count: int) -> Tensor:
    """Read rows ``first`` to ``first + count`` (along dim 0) of a stored rectangle into a new CPU tensor, in one contiguous read.

    Raises:
        CheckpointError: the file ends too early.
    """
    row = math.prod(piece.rect.sizes[1:])
    shape = torch.Size((count, *piece.rect.sizes[1:]) if piece.rect.sizes else ())
    tensor = empty(shape, dtype=DTYPES[piece.dtype], device=torch.device("cpu"))  # reused memory: new pages cost faults
    read_into(file, tensor, piece.begin + first * row * tensor.element_size())
    return tensor


def read_into(file: Any, tensor: Tensor, position: int) -> None:
    """Fill a contiguous CPU tensor from an unbuffered open file, starting at byte ``position``. Raises CheckpointError."""
    data = _bytes_of(tensor)
    file.seek(position)
    done = 0
    while done < len(data):
        count = file.readinto(data[done:])
        if not count:
            raise CheckpointError(
                f"{file.name} ended at byte {position + done:,} while it was read: is another process changing it?"
            )
        done += count
