"""One safetensors file, its hostile variants, and bounded JSON."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megatron_sp.checkpoint import manifest as manifest_module
from megatron_sp.checkpoint import safetensors_file
from megatron_sp.checkpoint.manifest import FileRecord, Manifest, encode_state, hash_file, read_manifest
from megatron_sp.checkpoint.pieces import DTYPES, NamedPiece, Piece, Rect
from megatron_sp.checkpoint.safetensors_file import read_header, read_into, write_file
from megatron_sp.checkpoint.stream import TensorInfo, tensor_infos
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import open_regular, parse_object, read_small_file


def some_items() -> list[NamedPiece]:
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    return [
        NamedPiece("byte", (3,), Piece((0,), torch.tensor([1, 2, 3], dtype=torch.uint8))),
        NamedPiece("cut", (6, 20), Piece((1, 4), base[1:5, 2:9])),
        NamedPiece("turned", (10, 6), Piece((0, 0), base.t())),
        NamedPiece("bf16", (5,), Piece((2,), torch.tensor([1.5, -2, 3], dtype=torch.bfloat16))),
        NamedPiece("scalar", (), Piece((), torch.tensor(7, dtype=torch.int64))),
        NamedPiece("odd", (9, 9), Piece((3, 4), base[2:3, 7:8])),  # one element, strides 10 and 1
        NamedPiece("odder", (9,), Piece((3,), base[4:5, 7])),  # one element, stride 10
        NamedPiece("one", (1,), Piece((0,), torch.tensor([0.1], dtype=torch.float64, requires_grad=True))),
    ]


def test_any_safetensors_reader_opens_it_and_ours_finds_every_piece_aligned(tmp_path: Path) -> None:
    items = some_items()
    record = write_file(tmp_path / "a.safetensors", items)
    data = (tmp_path / "a.safetensors").read_bytes()
    assert record == FileRecord(len(data), hashlib.sha256(data).hexdigest())
    assert hash_file(tmp_path / "a.safetensors") == record.sha256
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert set(file.keys()) == {item.name for item in items}
        info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        for item in items:
            stored = file.get_tensor(item.name)
            assert stored.dtype == item.piece.tensor.dtype
            assert torch.equal(stored, item.piece.tensor.detach())
            assert info[item.name] == {"saved_offsets": list(item.piece.offsets), "global_shape": list(item.shape)}
    found = {piece.name: piece for piece in read_header(tmp_path / "a.safetensors")}
    for item in items:
        piece, tensor = found[item.name], item.piece.tensor
        assert piece.rect == Rect(tuple(item.piece.offsets), tuple(tensor.shape)) and DTYPES[piece.dtype] == tensor.dtype
        assert piece.begin % tensor.element_size() == 0


def test_larger_than_a_block_is_hashed_whole(tmp_path: Path) -> None:
    tensor = torch.randn(5_000_003)
    record = write_file(tmp_path / "a", [NamedPiece("w", (5_000_003,), Piece((0,), tensor))])
    assert record.sha256 == hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()


class Slow(io.BytesIO):
    """Gives and takes three bytes at a time, as the system may (Linux moves at most 2 GiB per call)."""

    name = "slow"

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:3])


def test_short_reads_are_continued_and_an_early_end_is_an_error() -> None:
    found = torch.zeros(5, dtype=torch.int64)
    read_into(Slow(bytes(8) + torch.arange(5).numpy().tobytes()), found, 8)
    assert found.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointError, match="slow ended at byte 40 while it was read"):
        read_into(Slow(bytes(40)), found, 8)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reluctant(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(memoryview(data)[:100])

    monkeypatch.setattr(safetensors_file, "open", lambda path, mode, buffering: Reluctant(path, mode), raising=False)
    tensor = torch.randn(1000)
    record = write_file(tmp_path / "a", [NamedPiece("w", (1000,), Piece((0,), tensor))])
    data = (tmp_path / "a").read_bytes()
    assert record == FileRecord(len(data), hashlib.sha256(data).hexdigest())
    assert data.endswith(tensor.numpy().tobytes())


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: list[Any], begin: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def info(**offsets: list[int]) -> dict[str, str]:
    return {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": at} for name, at in offsets.items()})}


HOSTILE: dict[str, tuple[Any, bytes, int | None, str]] = {
    "a header of 1 TiB": ({}, b"", 1 << 40, "its header has 1,099,511,627,776"),
    "a header of all bits": ({}, b"", (1 << 64) - 1, "is not a safetensors file"),
    "a header longer than the file": ({}, b"", 100, "is not a safetensors file"),
    "an empty header": (b"", b"", 0, "is not a safetensors file"),
    "no JSON": (b"{]", b"", None, "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", None, "not valid JSON"),
    "a list": ([1], b"", None, "must be a JSON object"),
    "deep JSON": (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", b"", None, "nested"),
    "too many values": (b'{"a":[' + b"[]," * 1_200_000 + b"[]]}", b"", None, "more than 1,000,000 values"),
    "a name twice": (b'{"a": 1, "a": 2}', b"", None, "given twice"),
    "overlap": ({"__metadata__": info(a=[0], b=[0]), "a": entry([4], 0, 4), "b": entry([4], 2, 6)}, bytes(6), None, "overlaps another"),
    "the same bytes": ({"__metadata__": info(a=[0], b=[0]), "a": entry([4], 0, 4), "b": entry([4], 0, 4)}, bytes(4), None, "overlaps"),
    "a hole": ({"__metadata__": info(a=[0], b=[0]), "a": entry([4], 0, 4), "b": entry([4], 5, 9)}, bytes(9), None, "leaves a hole"),
    "past the end": ({"__metadata__": info(a=[0]), "a": entry([9], 0, 9)}, bytes(4), None, "its header describes"),
    "bytes left over": ({"__metadata__": info(a=[0]), "a": entry([4], 0, 4)}, bytes(5), None, "its header describes"),
    "shape against bytes": ({"__metadata__": info(a=[0]), "a": entry([5], 0, 4)}, bytes(4), None, "say otherwise"),
    "huge shape": ({"__metadata__": info(a=[0, 0]), "a": entry([2**62, 4], 0, 4)}, bytes(4), None, "say otherwise"),
    "negative shape": ({"__metadata__": info(a=[0, 0]), "a": entry([-2, -2], 0, 4)}, bytes(4), None, "no known dtype"),
    "boolean shape": ({"__metadata__": info(a=[0]), "a": entry([True], 0, 1)}, bytes(1), None, "no known dtype"),
    "unknown dtype": ({"__metadata__": info(a=[0]), "a": entry([4], 0, 4, "OBJ")}, bytes(4), None, "no known dtype"),
    "entry is text": ({"__metadata__": info(a=[0]), "a": "x"}, b"", None, "no known dtype"),
    "no offsets": ({"a": entry([4], 0, 4)}, bytes(4), None, "where 'a' lies"),
    "negative offsets": ({"__metadata__": info(a=[-1]), "a": entry([4], 0, 4)}, bytes(4), None, "where 'a' lies"),
    "offsets of another rank": ({"__metadata__": info(a=[0, 0]), "a": entry([4], 0, 4)}, bytes(4), None, "where 'a' lies"),
    "metadata is a list": ({"__metadata__": [], "a": entry([4], 0, 4)}, bytes(4), None, "where 'a' lies"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_little_memory(name: str, tmp_path: Path) -> None:
    header, data, length, text = HOSTILE[name]
    path = write_raw(tmp_path / "x.safetensors", header, data, length)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=text) as error:
        read_header(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert len(str(error.value)) < 2000


def test_files_that_are_too_short_too_long_or_no_plain_ones(tmp_path: Path) -> None:
    for size in (0, 1, 7, 8, 9):
        (tmp_path / "x").write_bytes(bytes(size))
        with pytest.raises(CheckpointError, match=f"has {size} bytes"):
            read_header(tmp_path / "x")
    with open(tmp_path / "big", "wb") as file:
        file.truncate(1 << 40)  # sparse: one TiB
    with pytest.raises(CheckpointError, match=r"has 1,099,511,627,776 bytes: more than the 100"):
        read_small_file(tmp_path / "big", 100)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    for name, text in (("link", "symbolic link"), ("pipe", "not a plain file"), ("", "not a plain file"), ("absent", "No such file")):
        with pytest.raises(CheckpointError, match=text):
            open_regular(tmp_path / name)


def test_json_within_bounds() -> None:
    assert parse_object(b'{"a": [1, 2.5, null, "x"]}', "it") == {"a": [1, 2.5, None, "x"]}
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(CheckpointError, match="deeper than 32"):
        parse_object(json.dumps({"a": deep}).encode(), "it")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        parse_object(b'{"a": ' + b"1" * 10_000 + b"}", "it")  # Python refuses to convert such an integer


def a_manifest() -> Manifest:
    record = FileRecord(10, "ab" * 32)
    return Manifest(7, 2, {"state.json": record, "rank00000-00000.safetensors": record}, {"w": ("BF16", (2, 3)), "x": ("F32", ())})


def forged(**changes: Any) -> bytes:
    """A manifest with other contents and a right hash of its own."""
    document = {**json.loads(a_manifest().encode()), **changes, "manifest_sha256": "0" * 64}
    text = json.dumps(document).encode()
    return text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1)


def read(folder: Path, data: bytes) -> Manifest:
    (folder / "MANIFEST.json").write_bytes(data)
    return read_manifest(folder)


def test_manifest_round_trip(tmp_path: Path) -> None:
    manifest = read(tmp_path, a_manifest().encode())
    assert manifest == a_manifest()
    assert tensor_infos(manifest) == {"w": TensorInfo((2, 3), torch.bfloat16), "x": TensorInfo((), torch.float32)}
    assert manifest.num_bytes == 20


def test_every_single_flipped_bit_of_a_manifest_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(a_manifest().encode())
    (tmp_path / "MANIFEST.json").touch()
    monkeypatch.setattr(manifest_module, "read_small_file", lambda path, max_bytes: bytes(data))
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(CheckpointError):
                read_manifest(tmp_path)
            data[position] ^= 1 << bit


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"format_version": 2}, "format version 2, this program reads up to 1"),
        ({"format_version": "1"}, "format_version is 1"),
        ({"format_version": True}, "format_version is True"),
        ({"format_version": 0}, "a positive integer is needed"),
        ({"files": {}}, "does not list state.json"),
        ({"files": {"../../etc/passwd": {"bytes": 1, "sha256": "ab" * 32}}}, "only plain file names"),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": "ab" * 32}}}, "only plain file names"),
        ({"files": {".hidden": {"bytes": 1, "sha256": "ab" * 32}}}, "only plain file names"),
        ({"files": {"a\n": {"bytes": 1, "sha256": "ab" * 32}}}, "only plain file names"),
        ({"files": {"state.json": {"bytes": -1, "sha256": "ab" * 32}}}, "needs bytes and sha256"),
        ({"files": {"state.json": {"bytes": 1, "sha256": "xy"}}}, "needs bytes and sha256"),
        ({"files": [1]}, "it needs step"),
        ({"tensors": {"w": {"dtype": "OBJECT", "shape": [1]}}}, "needs a known dtype"),
        ({"tensors": {"w": {"dtype": "F32", "shape": [-1]}}}, "needs a known dtype"),
        ({"step": -1}, "it needs step"),
        ({"step": 1.5}, "it needs step"),
    ],
)
def test_malformed_manifests(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=text):
        read(tmp_path, forged(**changes))


def test_a_state_that_could_not_be_read_back_is_refused_before_saving() -> None:
    with pytest.raises(ValueError, match="use tensors"):
        encode_state(1, {"x": "y" * (5 << 20)})
    deep: Any = 1
    for _ in range(50):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="could not be read back"):
        encode_state(1, {"x": deep})
    with pytest.raises(TypeError):
        encode_state(1, {"x": torch.zeros(1)})
    assert json.loads(encode_state(5, {"a": 1}))["step"] == 5
    assert sys.getsizeof(encode_state(5, {})) < 200
