"""PREFIX.sha256 beside a data set: written with it, compared by ``megatron-sp data verify``."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron_sp.commands import cli
from megatron_sp.data import digest_file, indexed_dataset
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.utils.errors import EXIT_DATA, DataError, DiskError


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedDatasetWriter(tmp_path / "x", vocab_size=1000) as writer:
        for k in range(20):
            writer.add_document(np.arange(k) + k)
    return tmp_path / "x"


def verify(prefix: Path, *flags: str) -> int:
    return cli.main(["data", "verify", str(prefix), *flags])


def test_sha256sum_reads_it(prefix: Path) -> None:
    assert shutil.which("sha256sum")
    done = subprocess.run(["sha256sum", "--check", "--strict", "x.sha256"], cwd=prefix.parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["x.bin: OK", "x.idx: OK"]), done.stderr


def test_of_a_merged_set_too(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetWriter(tmp_path / "both", vocab_size=1000) as writer:
        writer.merge(prefix)
        writer.merge(prefix)
    assert verify(tmp_path / "both") == 0 and "every byte is as" in capsys.readouterr().out


@pytest.mark.parametrize("ending, at", [(".bin", 0), (".bin", 100), (".bin", -1), (".idx", 37), (".idx", -1)])
def test_any_other_byte_is_found(
    prefix: Path, ending: str, at: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(indexed_dataset, "_SCAN_BYTES", 64)  # read in several pieces
    assert verify(prefix) == 0
    data = bytearray(Path(f"{prefix}{ending}").read_bytes())
    data[at] ^= 1
    Path(f"{prefix}{ending}").write_bytes(data)
    assert verify(prefix) == EXIT_DATA
    said = capsys.readouterr().err
    assert f"{prefix}{ending}" in said and ("SHA-256" in said) == (ending == ".bin"), "the index contradicts itself already"


def test_data_without_one_can_be_given_one(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = Path(f"{prefix}.sha256").read_bytes()
    os.unlink(f"{prefix}.sha256")
    assert verify(prefix) == 0
    assert "there is no" in (said := capsys.readouterr().out) and "--write-digest" in said and not Path(f"{prefix}.sha256").exists()
    assert verify(prefix, "--write-digest") == 0 and "is written" in capsys.readouterr().out
    assert Path(f"{prefix}.sha256").read_bytes() == written
    assert verify(prefix, "--write-digest") == 0 and "every byte is as" in capsys.readouterr().out


def test_one_that_says_otherwise_is_never_replaced(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(f"{prefix}.sha256").read_text().replace("  x.bin", "  x.bin")
    other = ("0" * 64) + other[64:]
    Path(f"{prefix}.sha256").write_text(other)
    assert verify(prefix, "--write-digest") == EXIT_DATA and "delete" in capsys.readouterr().err
    assert Path(f"{prefix}.sha256").read_text() == other


def test_a_renamed_set_is_known_by_its_endings(prefix: Path, tmp_path: Path) -> None:
    for ending in (".bin", ".idx", ".sha256"):
        os.rename(f"{prefix}{ending}", tmp_path / f"new name{ending}")
    assert verify(tmp_path / "new name") == 0


@pytest.mark.parametrize("text", ["", "rubbish\n", "0" * 64 + "  x.bin\n", ("0" * 64 + "  x.bin\n") * 2, "g" * 64 + "  x.idx\n", "\xff"])
def test_what_is_no_digest_file_is_said(prefix: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{prefix}.sha256").write_bytes(text.encode("latin-1"))
    assert verify(prefix) == EXIT_DATA and "is not in sha256sum's format" in capsys.readouterr().err


def test_where_nothing_can_be_written(prefix: Path) -> None:
    with pytest.raises(DiskError, match="cannot be written"):
        digest_file.write(str(prefix.parent / "none" / "x"), {".bin": "0" * 64, ".idx": "0" * 64})


def test_all_of_a_set_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is synced when it is whole, and the folder after each rename."""
    synced: list[tuple[int, int]] = []
    folder, fsync, replace = tmp_path.stat().st_ino, os.fsync, os.replace

    def remember(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def rename(before: str, after: str) -> None:
        if renamed:
            assert synced[-1][0] == folder, "the rename before is not on the disk"
        status = os.stat(before)
        assert (status.st_ino, status.st_size) in synced, f"{after} is not on the disk"
        renamed.append(after)
        replace(before, after)

    renamed: list[str] = []
    monkeypatch.setattr(os, "fsync", remember)
    monkeypatch.setattr(os, "replace", rename)
    with IndexedDatasetWriter(tmp_path / "x", vocab_size=1000) as writer:
        writer.add_document(np.arange(20))
    assert len(renamed) == 3 and synced[-1][0] == folder
    renamed.clear()
    digest_file.write(str(tmp_path / "x"), {".bin": "0" * 64, ".idx": "1" * 64})
    assert len(renamed) == 1 and synced[-1][0] == folder


def test_a_fifo_in_its_place_is_not_waited_for(prefix: Path) -> None:
    (file := prefix.with_name("x.sha256")).unlink()
    os.mkfifo(file)
    with pytest.raises(DataError, match="is not in sha256sum's format"):
        digest_file.read(str(prefix))
