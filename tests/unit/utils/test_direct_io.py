"""Files written around the page cache have the bytes they were given, whatever the file system says to it."""

import errno
import os
import random
from pathlib import Path

import pytest

from megatron_sp.utils import direct_io

BLOCK = direct_io._BUFFER_BYTES


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a file system that takes O_DIRECT, whatever the tests' own is; the flag itself is set nowhere. Collects lengths written."""
    lengths: list[int] = []
    write = os.write

    def recorded(fd: int, data: memoryview) -> int:
        lengths.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(direct_io, "file_system", lambda fd: "ext4")
    monkeypatch.setattr(direct_io.fcntl, "fcntl", lambda *args: 0)
    monkeypatch.setattr(direct_io.os, "write", recorded)
    return lengths


def put(path: Path, *parts: bytes) -> bool:
    """Write parts; returns whether the page cache was left out at the end."""
    with direct_io.create(path) as file:
        for part in parts:
            file.write(memoryview(part))
        file.sync()
        return file.is_direct


@pytest.mark.parametrize("seed", range(6))
def test_contents(tmp_path: Path, seed: int) -> None:
    """On the file system of the tests, with O_DIRECT where that is one that takes it."""
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 8, 4095, 4096, 70_000, BLOCK - 1, BLOCK, BLOCK + 4096, 2 * BLOCK + 5)) for _ in range(rng.randrange(6))]
    parts = [rng.randbytes(size) for size in sizes]
    put(tmp_path / "file", *parts)
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_where_the_page_cache_is_left_out(tmp_path: Path) -> None:
    with direct_io.create(tmp_path / "file") as file:
        flags = direct_io.fcntl.fcntl(file._fd, direct_io.fcntl.F_GETFL)
        is_known = direct_io.file_system(file._fd) in ("ext4", "xfs")
        assert bool(flags & os.O_DIRECT) == file.is_direct == is_known
    with open("/proc/self/status") as status:
        assert direct_io.file_system(status.fileno()) == "proc"


def test_only_whole_pages_go_around_it(tmp_path: Path, direct: list[int]) -> None:
    assert not put(tmp_path / "file", b"h" * 100, b"x" * BLOCK)
    assert direct == [BLOCK, 100] and (tmp_path / "file").read_bytes() == b"h" * 100 + b"x" * BLOCK
    del direct[:]
    assert put(tmp_path / "even", b"x" * 8192) and direct == [8192]
    del direct[:]
    assert not put(tmp_path / "odd", b"x" * 8193) and direct == [8192, 1]


def test_a_disk_that_wants_larger_pages(tmp_path: Path, direct: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    write, flags = os.write, []

    def refuse(fd: int, data: memoryview) -> int:
        if not flags:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data)

    def fcntl(fd: int, what: int, value: int = 0) -> int:
        if what == direct_io.fcntl.F_SETFL and not value & os.O_DIRECT:
            flags.append(value)
        return 0

    monkeypatch.setattr(direct_io.os, "write", refuse)
    monkeypatch.setattr(direct_io.fcntl, "fcntl", fcntl)
    assert not put(tmp_path / "file", b"a" * BLOCK, b"b" * BLOCK)
    assert (tmp_path / "file").read_bytes() == b"a" * BLOCK + b"b" * BLOCK and len(flags) == 1


def test_short_writes(tmp_path: Path, direct: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(direct_io.os, "write", lambda fd, data: write(fd, data[:100_000]))
    data = random.Random(1).randbytes(BLOCK + 12345)
    put(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data


def test_a_refusal_of_the_disk_is_told(tmp_path: Path, direct: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct_io.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        put(tmp_path / "file", b"x" * BLOCK)
    with pytest.raises(OSError, match="No space left"):
        put(tmp_path / "other", b"x")  # not before sync


def test_a_file_system_that_does_not_know_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, what: int, value: int = 0) -> int:
        if what == direct_io.fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return 0

    monkeypatch.setattr(direct_io, "file_system", lambda fd: "xfs")
    monkeypatch.setattr(direct_io.fcntl, "fcntl", refuse)
    assert not put(tmp_path / "file", b"x" * 5000)
    assert (tmp_path / "file").read_bytes() == b"x" * 5000


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        put(tmp_path / "file", b"x")
    assert (tmp_path / "file").read_text() == "mine"
