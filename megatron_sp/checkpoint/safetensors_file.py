"""Streaming writer and byte-range reader of safetensors files, hashed while they are written.

The layout is that of torch.distributed.checkpoint's sharded Hugging Face storage, which any safetensors reader opens:
DCP_SHARDING_INFO in the header places each rectangle in its global tensor. (torch's own writer builds a file in memory
twice.)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.checkpoint.commit import explain
from megatron_sp.checkpoint.manifest import ITEM_BYTES, FileRecord, cores_of_rank, io_threads
from megatron_sp.checkpoint.pieces import DTYPE_NAMES, DTYPES, NamedPiece, Rect
from megatron_sp.ops.allocator import empty
from megatron_sp.utils import direct_io
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.files import fsync_dir
from megatron_sp.utils.strict_json import MAX_VALUES, is_counts, open_regular, parse_object

MAX_HEADER_BYTES = 1 << 24
MAX_TENSORS_PER_FILE = 10_000  # keeps our own headers far below what the reader accepts
_MAX_FOREIGN_VALUES = 300_000  # values in the header of another program's file, enough for 40,000 tensors
_BLOCK_BYTES = 8 << 20  # written and hashed at a time
_MIN_FILE_BYTES = 64 << 20  # smaller files are not worth a thread


class StoredPiece(NamedTuple):
    """A rectangle found in a file."""

    name: str
    dtype: str  # safetensors' name, e.g. BF16
    rect: Rect
    file: str
    begin: int  # byte at which its contents start in the file; row-major


# Writing


def idle_cores() -> int:
    # of this rank's cores, those that torch does not compute on
    return max(0, cores_of_rank() - torch.get_num_threads())


def write_own_files(
    staging: Path, rank: int, items: Sequence[NamedPiece], max_file_bytes: int, reached: Callable[[str], None],
    beside: bool = False,
) -> dict[str, Any]:  # fmt: skip
    # {"files": {name: (bytes, sha256)}} or {"failed": why}, and what was written is left for rank 0 to remove
    threads = io_threads()  # several files at once: hashing is the bottleneck on a CPU without SHA instructions
    share = sum(item.num_bytes for item in items) // threads + 1
    files = cut_into_files(items, min(max_file_bytes, max(share, _MIN_FILE_BYTES)))
    paths = [staging / f"rank{rank:05d}-{number:05d}.safetensors" for number in range(len(files))]
    if beside:
        # training goes on meanwhile: one file per idle core. If no core is idle, all compute threads had better slow
        # down alike, as a single writer makes them wait for the one whose core it shares
        threads = min(idle_cores() or threads, threads)
    try:
        staging.mkdir(exist_ok=True)  # a shared file system may be slow to show it to other hosts
        with ThreadPoolExecutor(threads) as pool:  # leaving the block waits for all, even if one has failed
            records = list(pool.map(partial(write_file, reached=reached, in_turn=beside), paths, files))
        for point in () if records else ("hash", "write", "shard"):
            reached(point)
        fsync_dir(staging)
    except OSError as error:
        return {"failed": explain(error, staging)}
    return {"files": {path.name: record for path, record in zip(paths, records, strict=True)}}


def cut_into_files(items: Iterable[NamedPiece], max_bytes: int) -> list[list[NamedPiece]]:
    # first fit; a name may stand in a file only once, so two rectangles of a tensor go to two files
    files: list[tuple[list[NamedPiece], set[str]]] = []
    room: list[int] = []
    for item in items:
        for index, (_, names) in enumerate(files):
            if item.name not in names and item.num_bytes <= room[index] and len(names) < MAX_TENSORS_PER_FILE:
                break
        else:
            index = len(files)
            files.append(([], set()))
            room.append(max_bytes)
        files[index][0].append(item)
        files[index][1].add(item.name)
        room[index] -= item.num_bytes
    return [members for members, _ in files]


def write_file(
    path: Path, items: Sequence[NamedPiece], *, reached: Callable[[str], None] = lambda point: None,
    contents: Callable[[NamedPiece], Tensor] = lambda item: item.piece.tensor, in_turn: bool = False,
    plain: bool = False,
) -> FileRecord:  # fmt: skip
    """Write and fsync one new file; return its size and the SHA-256 of the bytes as they were written.

    Args:
        reached: called with ``hash`` and ``write`` at each block, with ``shard`` before the fsync.
        contents: produces a piece's contents when they are needed.
        in_turn: hash and write one after the other, on one core.
        plain: for other programs: no places in the header, no hash.
    """
    items = sorted(items, key=lambda item: -item.piece.tensor.element_size())  # aligns every tensor to its own size
    digest, size = hashlib.sha256(), 0

    def update(block: memoryview) -> None:
        reached("hash")
        digest.update(block)

    with direct_io.create(path) as file, contextlib.ExitStack() as stack:
        hasher = None if in_turn or plain else stack.enter_context(ThreadPoolExecutor(1))
        for block in _blocks(items, contents, plain):
            hashed = hasher.submit(update, block) if hasher else None  # both release the interpreter lock
            if in_turn:
                update(block)
            file.write(block)
            reached("write")
            if hashed is not None:
                hashed.result()
            size += len(block)
            del block  # else it stays in memory while the next tensor is produced
        reached("shard")
        file.sync()
    return FileRecord(size, "" if plain else digest.hexdigest())


def _blocks(items: Sequence[NamedPiece], contents: Callable[[NamedPiece], Tensor], plain: bool) -> Iterator[memoryview]:
    metadata = {"format": "pt"}
    if not plain:
        # global_shape is our addition; it is not read back
        info = {i.name: {"saved_offsets": list(i.piece.offsets), "global_shape": list(i.shape)} for i in items}
        metadata |= {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for item in items:
        begin, end, tensor = end, end + item.num_bytes, item.piece.tensor
        dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        entries[item.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for item in items:
        data = _bytes_of(contents(item).detach().cpu().contiguous())
        for start in range(0, len(data), _BLOCK_BYTES):
            yield data[start : start + _BLOCK_BYTES]
        del data  # before the next contents are asked for


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.as_strided((tensor.numel(),), (1,))  # one element may have any stride, which view() refuses
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


# Reading


def read_header(path: Path, *, whole: bool = False) -> list[StoredPiece]:
    """Return every rectangle in a file, or (``whole``) another program's tensors. Raises CheckpointError."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):  # before anything of that size is allocated
            sizes = f"it has {size:,} bytes and says that its header has {length:,}"
            raise CheckpointError(f"{path} is not a safetensors file: {sizes}")
        header = parse_object(file.read(length), f"the header of {path}", _MAX_FOREIGN_VALUES if whole else MAX_VALUES)
    metadata = header.pop("__metadata__", {})
    info_text = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, dict) else None
    info = parse_object(info_text.encode("utf-8"), f"DCP_SHARDING_INFO of {path}") if isinstance(info_text, str) else {}
    start = 8 + length
    pieces = [_stored_piece(path, name, entry, None if whole else info, start) for name, entry in header.items()]
    position = start
    for piece in sorted(pieces, key=lambda p: (p.begin, p.rect.numel)):
        if piece.begin != position:
            problem = "overlaps another tensor" if piece.begin < position else "leaves a hole before it"
            where = f"starts at byte {piece.begin:,}, expected {position:,}"
            raise CheckpointError(f"{path}: {piece.name[:200]!r} {where}: it {problem}")
        position += piece.rect.numel * ITEM_BYTES[piece.dtype]
    if position != size:
        raise CheckpointError(f"{path} has {size:,} bytes, its header describes {position:,}")
    return pieces


def _stored_piece(path: Path, name: str, entry: Any, info: dict[str, Any] | None, data_start: int) -> StoredPiece:
    entry, shown = entry if isinstance(entry, dict) else {}, repr(name[:200])
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and dtype in DTYPES and is_counts(shape) and is_counts(span) and len(span) == 2):
        raise CheckpointError(f"{path}: the header's entry for {shown} has no known dtype, shape and data_offsets")
    place = {"saved_offsets": [0] * len(shape)} if info is None else info.get(name)
    offsets = place.get("saved_offsets") if isinstance(place, dict) else None
    if not (is_counts(offsets) and len(offsets) == len(shape)):
        raise CheckpointError(f"{path}: the header does not say where {shown} lies in its tensor (saved_offsets)")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if span[1] - span[0] != expected:
        needed = f"{shown} is {dtype} {shape}, {expected:,} bytes"
        raise CheckpointError(f"{path}: {needed}, but data_offsets {span} say otherwise")
    return StoredPiece(name, dtype, Rect(tuple(offsets), tuple(shape)), path.name, data_start + span[0])


def read_rows(file: Any, piece: StoredPiece, first: int, count: int) -> Tensor:
    """Read rows of a stored rectangle (along dim 0) into a new CPU tensor."""
    row = math.prod(piece.rect.sizes[1:])
    shape = torch.Size((count, *piece.rect.sizes[1:]) if piece.rect.sizes else ())
    tensor = empty(shape, dtype=DTYPES[piece.dtype], device=torch.device("cpu"))  # reused memory: new pages cost faults
    read_into(file, tensor, piece.begin + first * row * tensor.element_size())
    return tensor


def read_into(file: Any, tensor: Tensor, position: int) -> None:
    """Fill a contiguous CPU tensor from an unbuffered open file. Raises CheckpointError if it ends early."""
    data = _bytes_of(tensor)
    file.seek(position)
    done = 0
    while done < len(data):
        count = file.readinto(data[done:])
        if not count:
            end = f"{file.name} ended at byte {position + done:,}"
            raise CheckpointError(f"{end} while it was read: is another process changing it?")
        done += count
