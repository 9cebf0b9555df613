"""The index cache: damage is rebuilt, nothing is unpickled, and a folder that cannot be written is no obstacle."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_sp.data import index_cache
from megatron_sp.data.index_cache import Arrays, Expected, cached_arrays

EXPECTED: Expected = {"a": ((5,), np.dtype(np.int32)), "b": ((3, 2), np.dtype(np.int64))}


def make() -> Arrays:
    make.calls += 1  # type: ignore[attr-defined]
    return {"a": np.arange(5, dtype=np.int32), "b": np.arange(6, dtype=np.int64).reshape(3, 2)}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    make.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(index_cache, "_warned", set())


def check(arrays: Arrays) -> None:
    assert arrays["a"].tolist() == [0, 1, 2, 3, 4] and arrays["b"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_built_once_then_mapped(tmp_path: Path) -> None:
    for _ in range(3):
        arrays = cached_arrays(tmp_path / "c", "k", EXPECTED, make)
        check(arrays)
        assert isinstance(arrays["a"], np.memmap) and not arrays["a"].flags.writeable
    assert make.calls == 1  # type: ignore[attr-defined]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["k-a.npy", "k-b.npy", "k.json", "k.lock"]
    check(cached_arrays(tmp_path / "c", "other", EXPECTED, make))
    check(cached_arrays(None, "k", EXPECTED, make))
    assert make.calls == 3  # type: ignore[attr-defined]


def flip(path: Path, position: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(data)


def header(folder: Path, text: str) -> None:
    """A .npy whose header says ``text``."""
    raw = text.encode() + b"\n"
    (folder / "k-a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(raw).to_bytes(2, "little") + raw + bytes(20))


def hostile(folder: Path) -> None:
    """A .npy of objects: whoever unpickles it makes a folder."""
    header = "{'descr': '|O', 'fortran_order': False, 'shape': (5,), }".ljust(117) + "\n"
    payload = f"cos\nmkdir\n(S'{folder}/canary'\ntR.".encode()
    (folder / "k-a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + payload)


DAMAGE = {
    "flipped": lambda f: flip(f / "k-a.npy", -3),
    "header": lambda f: flip(f / "k-a.npy", 20),
    "header: a string ends too late": lambda f: flip(f / "k-a.npy", 17),
    "header: no dictionary": lambda f: flip(f / "k-a.npy", 21, 1 << 4),
    "header: too short": lambda f: flip(f / "k-a.npy", 8, 1 << 6),
    "header: no indentation": lambda f: header(f, "{\n 'a': }\n   b\n  c"),
    "header: too deep": lambda f: header(f, "-" * 9000 + "1"),
    "archive": lambda f: (np.savez(f / "x.npz", np.arange(5)), os.replace(f / "x.npz", f / "k-a.npy")),
    "half an archive": lambda f: (f / "k-a.npy").write_bytes(b"PK\x03\x04" + bytes(200)),
    "cut": lambda f: os.truncate(f / "k-b.npy", 150),
    "empty": lambda f: os.truncate(f / "k-b.npy", 0),
    "shape": lambda f: np.save(f / "k-a.npy", np.arange(6, dtype=np.int32)),
    "dtype": lambda f: np.save(f / "k-a.npy", np.arange(5, dtype=np.uint32)),
    "order": lambda f: np.save(f / "k-b.npy", np.asfortranarray(np.arange(6, dtype=np.int64).reshape(3, 2))),
    "objects": hostile,
    "no json": lambda f: (f / "k.json").write_text("{"),
    "list": lambda f: (f / "k.json").write_text("[]"),
    "deep": lambda f: (f / "k.json").write_text("[" * 100_000),
    "not text": lambda f: (f / "k.json").write_bytes(b"\xff\xfe"),
    "missing name": lambda f: (f / "k.json").write_text(json.dumps({"a": 1})),
    "wrong sum": lambda f: (f / "k.json").write_text(json.dumps({"a": 1, "b": 2})),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_rebuilt_with_a_warning(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached_arrays(tmp_path, "k", EXPECTED, make)
    DAMAGE[name](tmp_path)
    with caplog.at_level(logging.WARNING):
        check(cached_arrays(tmp_path, "k", EXPECTED, make))
    assert make.calls == 2 and "is damaged and is rebuilt" in caplog.text  # type: ignore[attr-defined]
    assert not (tmp_path / "canary").exists()
    caplog.clear()
    check(cached_arrays(tmp_path, "k", EXPECTED, make))
    assert make.calls == 2 and not caplog.records  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["k.json", "k-a.npy"])
def test_a_fifo_in_the_cache_is_not_waited_for(name: str, tmp_path: Path) -> None:
    cached_arrays(tmp_path, "k", EXPECTED, make)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    check(cached_arrays(tmp_path, "k", EXPECTED, make))


@pytest.mark.filterwarnings("ignore:Reading `.npy`", "ignore:Data type alias")  # what numpy says of some of the damage
def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """numpy leaves a damaged header to Python's parser and tokenizer, whose errors differ from version to version."""
    cached_arrays(tmp_path, "k", EXPECTED, make)
    path = tmp_path / "k-a.npy"
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in range(1 if good[position] == ord(" ") else 8):  # one of each blank that fills the header up
            path.write_bytes(good)
            flip(path, position, 1 << bit)
            arrays = index_cache._load(tmp_path, "k", EXPECTED)
            if arrays is not None:  # a bit of the header that says nothing, such as the sort of a quote or of a blank
                check(arrays)


@pytest.mark.parametrize("name", ["k-a.npy", "k-b.npy", "k.json"])
def test_half_a_set_is_rebuilt(name: str, tmp_path: Path) -> None:
    cached_arrays(tmp_path, "k", EXPECTED, make)
    (tmp_path / name).unlink()
    check(cached_arrays(tmp_path, "k", EXPECTED, make))
    assert make.calls == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["under a file", "full"])
def test_a_folder_that_cannot_be_written(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    if where == "full":
        folder = tmp_path / "cache"

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(np, "save", full)
    with caplog.at_level(logging.WARNING):
        for key in ("k", "l", "m"):
            check(cached_arrays(folder, key, EXPECTED, make))
    assert make.calls == 3  # type: ignore[attr-defined]
    assert len(caplog.records) == 1 and "stay in memory" in caplog.text and "--data-cache-path" in caplog.text
    assert not list(tmp_path.rglob("*.npy")) and not list(tmp_path.rglob("*.tmp"))


def test_what_a_killed_builder_left_is_removed_when_old(tmp_path: Path) -> None:
    old, young = tmp_path / ".k-a.0.tmp", tmp_path / ".k-a.1.tmp"
    for path in (old, young):
        path.write_text("")
    os.utime(old, (time.time() - 7200,) * 2)
    cached_arrays(tmp_path, "k", EXPECTED, make)
    assert not old.exists() and young.exists()


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "fcntl", None)
    check(cached_arrays(tmp_path, "k", EXPECTED, make))
    check(cached_arrays(tmp_path, "k", EXPECTED, make))
    assert make.calls == 1  # type: ignore[attr-defined]
