"""Crash-safe writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_sp.utils import files
from megatron_sp.utils.files import atomic_write_json, atomic_write_text, free_bytes, fsync_dir, write_synced


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    atomic_write_text(path, "old\n")
    atomic_write_json(path, {"step": 3, "name": "é"})
    assert json.loads(path.read_text()) == {"step": 3, "name": "é"}
    assert path.read_text().endswith("}\n")
    assert os.listdir(tmp_path) == ["status.json"]


@pytest.mark.parametrize(("value", "error"), [("new", OSError), (object(), TypeError)], ids=["disk is full", "no JSON"])
def test_a_failed_write_keeps_the_old_file_and_removes_its_own(
    value: object, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    atomic_write_json(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(error, match=r"No space|not JSON serializable"):
        atomic_write_json(path, value)
    assert path.read_text() == '"old"\n'
    assert os.listdir(tmp_path) == ["status.json"]


def test_the_file_is_on_the_disk_before_its_name_is_and_the_name_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watch_fsync(fd: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        fsync(fd)

    def watch_replace(a: Path, b: Path) -> None:
        events.append("rename")
        replace(a, b)

    monkeypatch.setattr(files.os, "fsync", watch_fsync)
    monkeypatch.setattr(files.os, "replace", watch_replace)
    atomic_write_text(tmp_path / "latest", "step-000001\n")
    assert events == ["file", "rename", "folder"]


def test_write_synced_refuses_an_existing_file(tmp_path: Path) -> None:
    write_synced(tmp_path / "a", b"1")
    with pytest.raises(FileExistsError):
        write_synced(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_fsync_of_an_absent_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fsync_dir(tmp_path / "absent")


def test_free_bytes_of_a_folder_still_to_be_made(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(free_bytes(tmp_path), rel=0.05)
