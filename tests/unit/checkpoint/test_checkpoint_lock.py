"""One writer per run; LOCK and LOCK.takeover may be anything when a job starts, and nothing of another's is touched."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
from support.waiting import PATIENCE_S, wait_until

from megatron_sp.checkpoint import lock
from megatron_sp.checkpoint.lock import RunLock, holder_of
from megatron_sp.utils import host as host_facts
from megatron_sp.utils.errors import EXIT_LOCK, LockError


def forge(run: Path, age_s: float = 0.0, **changes: Any) -> None:
    """A lock as another process would have left it."""
    holder = {**lock._this_process(), "started": "2026-01-01T00:00:00Z", "token": "other", **changes}
    (run / "LOCK").write_text(json.dumps(holder))
    os.utime(run / "LOCK", (time.time() - age_s,) * 2)


def hold_and_wait(rank: int, run: Path, ready: Any) -> None:
    RunLock(run)
    ready.set()
    signal.pause()


def test_the_second_is_refused_by_name_and_the_third_gets_it(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run") as first:
        holder = json.loads((tmp_path / "run" / "LOCK").read_text())
        assert holder["pid"] == os.getpid() and holder["host"] and first.is_ours()
        with pytest.raises(LockError, match=rf"is in use by pid {os.getpid()} on {holder['host']}.*use another --save") as error:
            RunLock(tmp_path / "run")
        assert error.value.exit_code == 8
    assert os.listdir(tmp_path / "run") == []
    RunLock(tmp_path / "run").close()
    first.close()  # twice is harmless, and does not take another's lock
    other = RunLock(tmp_path / "run")
    first.close()
    assert other.is_ours()
    other.close()


def test_a_living_process_keeps_it_and_a_killed_one_loses_it_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = mp.get_context("fork")
    ready = context.Event()
    child = context.Process(target=hold_and_wait, args=(0, tmp_path, ready))
    child.start()
    try:
        assert ready.wait(PATIENCE_S)
        with pytest.raises(LockError, match=f"pid {child.pid} on "):
            RunLock(tmp_path)
        os.utime(tmp_path / "LOCK", (0, 0))  # it lives, however long it has been silent: it may wake up and write
        with pytest.raises(LockError, match=f"pid {child.pid} on "):
            RunLock(tmp_path)
    finally:
        child.kill()
        child.join()
    with RunLock(tmp_path):
        assert f"was held by pid {child.pid} on" in caplog.text and "which is gone" in caplog.text
    assert os.listdir(tmp_path) == []


def test_a_zombie_is_dead_and_a_reused_pid_is_not_the_holder(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    while lock._start_time(child.pid) != "":
        time.sleep(0.01)  # until it has ended; it is not waited for
    forge(tmp_path, pid=child.pid, process_start="1")
    RunLock(tmp_path).close()
    child.wait()
    forge(tmp_path, process_start="12345")  # our own pid, used again: another start
    RunLock(tmp_path).close()


@pytest.mark.parametrize(
    "changes",
    [{"host": "elsewhere"}, {"machine": f"{host_facts.machine().partition(' ')[0]} pid:[1]"}, {"host": "elsewhere", "pid": 1 << 30}],
)
def test_on_another_machine_only_the_heartbeat_counts(changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forge(tmp_path, age_s=60, **changes)
    with pytest.raises(LockError, match=r"last sign of life \d+ s ago.*taken over by itself after 120 s"):
        RunLock(tmp_path)
    forge(tmp_path, age_s=200, **changes)
    RunLock(tmp_path).close()
    assert "took over the lock" in caplog.text


@pytest.mark.parametrize("kind, host, is_gone", [
    ("ext4", None, True), ("xfs", None, True), ("nfs4", None, False), ("", None, False),
    ("ext4", "a client of ours", False),
])  # fmt: skip
def test_a_holder_of_before_the_machine_was_booted(
    kind: str, host: str | None, is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only where no other machine can have written the lock, and only under this machine's name, is the holder dead for sure."""
    monkeypatch.setattr(lock, "file_system", lambda path: kind)
    forge(tmp_path, age_s=1, machine="an-earlier-boot pid:[4026531836]", **({"host": host} if host else {}))
    held = holder_of(tmp_path)
    assert held is not None and held.is_alive is (False if is_gone else None)
    if is_gone:
        RunLock(tmp_path).close()
        assert "took over the lock" in caplog.text
    else:
        with pytest.raises(LockError, match="taken over by itself after 120 s"):
            RunLock(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[1]", b'{"pid": "x"}', b"[" * 9000, b'{"pid": -1}'])
def test_an_unreadable_lock_counts_by_its_age(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "LOCK").write_bytes(content)
    with pytest.raises(LockError, match="is in use by pid"):
        RunLock(tmp_path)
    os.utime(tmp_path / "LOCK", (time.time() - 500,) * 2)
    RunLock(tmp_path).close()


def test_the_heartbeat_keeps_it_fresh_and_notices_a_take_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = RunLock(tmp_path, heartbeat_s=0.02)
    os.utime(tmp_path / "LOCK", (0, 0))
    wait_until(lambda: (tmp_path / "LOCK").stat().st_mtime > 0)
    forge(tmp_path)
    wait_until(lambda: "no longer ours" in caplog.text)
    assert not held.is_ours()
    held.close()
    assert (tmp_path / "LOCK").exists()  # the other's


def test_a_lock_that_changed_hands_while_it_was_judged_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder is dead when it is judged first; before this process may remove its lock, another one has taken over."""
    forge(tmp_path, age_s=500, host="elsewhere")
    judge = RunLock._judge
    verdicts = []

    def judge_and_change(self: RunLock) -> str | None:
        verdicts.append(judge(self))
        forge(tmp_path, token="new owner")
        return verdicts[-1]

    monkeypatch.setattr(RunLock, "_judge", judge_and_change)
    with pytest.raises(LockError, match="is in use by"):
        RunLock(tmp_path)
    assert len(verdicts) == 1  # the second found the new owner alive
    assert json.loads((tmp_path / "LOCK").read_text())["token"] == "new owner"
    assert os.listdir(tmp_path) == ["LOCK"]


def test_who_died_while_taking_over_does_not_stop_the_next(tmp_path: Path) -> None:
    """Its file is left behind, and nobody has it locked any more."""
    forge(tmp_path, age_s=500, host="elsewhere")
    (tmp_path / "LOCK.takeover").touch()
    RunLock(tmp_path).close()
    assert os.listdir(tmp_path) == []


def contend(rank: int, run: Path, start: Any, winners: Any, losers: Any) -> None:
    start.wait()
    try:
        held = RunLock(run)
    except LockError:
        with losers.get_lock():
            losers.value += 1
        return
    with winners.get_lock():
        winners.value += 1
    while winners.value + losers.value < 6:  # held until all have tried
        time.sleep(0.01)
    held.close()


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path: Path) -> None:
    forge(tmp_path, age_s=500, host="elsewhere")
    context = mp.get_context("fork")
    start, winners, losers = context.Event(), context.Value("i", 0), context.Value("i", 0)
    children = [context.Process(target=contend, args=(rank, tmp_path, start, winners, losers)) for rank in range(6)]
    for child in children:
        child.start()
    start.set()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 6
    assert winners.value == 1
    assert os.listdir(tmp_path) == []


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "it is a FIFO, and should be a file"),
    "folder": (Path.mkdir, "it is a folder, and should be a file"),
    "dangling link": (lambda path: path.symlink_to("absent"), "it is a link, and should be a file"),
    "looping link": (lambda path: path.symlink_to(path.name), "it is a link, and should be a file"),
    "link to a file": (lambda path: path.symlink_to(path.with_name("other")), "it is a link, and should be a file"),
}


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
