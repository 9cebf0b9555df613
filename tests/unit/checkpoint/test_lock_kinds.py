"""LOCK and LOCK.takeover may be anything when a job starts: an answer at once, by name, and nothing of another's is touched."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_sp.checkpoint import lock
from megatron_sp.checkpoint.lock import RunLock, holder_of
from megatron_sp.utils.errors import EXIT_LOCK, LockError

KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "it is a FIFO, and should be a file"),
    "folder": (Path.mkdir, "it is a folder, and should be a file"),
    "dangling link": (lambda path: path.symlink_to("absent"), "it is a link, and should be a file"),
    "looping link": (lambda path: path.symlink_to(path.name), "it is a link, and should be a file"),
    "link to a file": (lambda path: path.symlink_to(path.with_name("other")), "it is a link, and should be a file"),
}


def forge(run: Path, age_s: float, **changes: object) -> None:
    (run / "LOCK").write_text(json.dumps({**lock._this_process(), "started": "then", "token": "other", **changes}))
    os.utime(run / "LOCK", (time.time() - age_s,) * 2)


@pytest.mark.parametrize("name", ["LOCK", "LOCK.takeover"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file(kind: str, name: str, tmp_path: Path) -> None:
    make, words = KINDS[kind]
    (tmp_path / "other").write_text("not ours")
    if name != "LOCK":
        forge(tmp_path, 500, host="elsewhere")
    before = (tmp_path / "LOCK").read_text() if name != "LOCK" else ""
    make(tmp_path / name)
    inode = (tmp_path / name).lstat().st_ino
    with pytest.raises(
        LockError, match=f"{name} cannot be used as the lock of this run: {words}.*delete it, or use another --save"
    ) as error:
        RunLock(tmp_path)
    assert error.value.exit_code == EXIT_LOCK and (tmp_path / name).lstat().st_ino == inode
    assert set(os.listdir(tmp_path)) == {"other", "LOCK", name} and (tmp_path / "other").read_text() == "not ours"
    if name == "LOCK":
        assert holder_of(tmp_path) is None
    else:
        assert (tmp_path / "LOCK").read_text() == before


def test_a_time_in_the_future_is_said_and_not_waited_for(tmp_path: Path) -> None:
    """Nobody can tell how long it has been silent; two minutes of waiting would not help."""
    forge(tmp_path, -100_000, host="elsewhere")
    with pytest.raises(
        LockError, match=r"was touched (99999|100000) s from now.*a clock is or was wrong.*If it is surely gone, delete"
    ) as error:
        RunLock(tmp_path)
    assert "taken over by itself" not in str(error.value) and os.listdir(tmp_path) == ["LOCK"]
    forge(tmp_path, -100_000, process_start="12345")  # of this machine, where the process table knows better than any clock
    RunLock(tmp_path).close()
    assert os.listdir(tmp_path) == []


def test_who_takes_over_now_is_waited_for_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(tmp_path, 500, host="elsewhere")
    pauses: list[float] = []
    with open(tmp_path / "LOCK.takeover", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        monkeypatch.setattr(lock.time, "sleep", pauses.append)
        with pytest.raises(LockError, match=r"other jobs take .*LOCK again and again"):
            RunLock(tmp_path)
        assert len(pauses) == lock._TRIES and (tmp_path / "LOCK").exists()
        pauses.clear()

        def let_go(_: float) -> None:
            pauses.append(0)
            fcntl.flock(guard, fcntl.LOCK_UN)

        monkeypatch.setattr(lock.time, "sleep", let_go)
        RunLock(tmp_path).close()
    assert len(pauses) == 1 and os.listdir(tmp_path) == []


def test_a_guard_that_was_unlinked_meanwhile_gives_no_right(tmp_path: Path) -> None:
    with open(tmp_path / "guard", "w") as first:
        (tmp_path / "guard").unlink()
        assert not lock._locked(first.fileno(), tmp_path / "guard")
        with open(tmp_path / "guard", "w") as second:
            assert not lock._locked(first.fileno(), tmp_path / "guard") and lock._locked(second.fileno(), tmp_path / "guard")


def test_a_file_system_without_such_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    forge(tmp_path, 500, host="elsewhere")
    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with pytest.raises(LockError, match=r"cannot be taken over safely here.*delete LOCK"):
        RunLock(tmp_path)
    assert (tmp_path / "LOCK").exists()


@pytest.mark.parametrize("then, waits", [("silence", 3), ("given back", 1), ("heartbeat", 1)])
def test_a_host_that_was_started_anew_waits_for_its_own_job(then: str, waits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The boot id is another, so the process table says nothing of the holder: its next heartbeat does, or that none comes."""
    monkeypatch.setattr(lock, "file_system", lambda path: "nfs4")
    forge(tmp_path, 5, machine="an earlier boot", job="mine")
    pauses: list[float] = []

    def meanwhile(seconds: float) -> None:
        pauses.append(seconds)
        if then == "given back":
            (tmp_path / "LOCK").unlink()
        elif then == "heartbeat":
            os.utime(tmp_path / "LOCK")
        elif len(pauses) == waits:
            monkeypatch.setattr(RunLock, "_age", lambda _: 121.0)

    monkeypatch.setattr(lock.time, "sleep", meanwhile)
    if then == "heartbeat":
        with pytest.raises(LockError, match="is in use by"):
            RunLock(tmp_path, job="mine")
    else:
        RunLock(tmp_path, job="mine").close()
        assert os.listdir(tmp_path) == []
    assert len(pauses) == waits


@pytest.mark.parametrize("mine, theirs", [("mine", "another"), ("", ""), ("mine", None)])
def test_another_jobs_lock_is_not_waited_for(mine: str, theirs: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "file_system", lambda path: "nfs4")
    forge(tmp_path, 5, machine="an earlier boot", job=theirs)
    monkeypatch.setattr(lock.time, "sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(LockError, match="is in use by"):
        RunLock(tmp_path, job=mine)
