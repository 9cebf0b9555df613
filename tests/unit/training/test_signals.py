"""The stop flag, a second signal, and the watchdog, each in a process of its own where it ends one."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.waiting import NEVER_MINUTES, wait_until

from megatron_sp.training import signals
from megatron_sp.training.signals import StopSignals, Watchdog

FOR_EVER = 60 * NEVER_MINUTES


def started(body: Callable[[], object], said: Path) -> int:
    """The pid of a child that says what it says into a file."""
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            body()
            os._exit(0)
        finally:
            os._exit(99)
    return pid


def code_of(pid: int) -> int:
    """The exit code of a child; it is killed if it does not end."""
    ended: list[int] = []

    def has_ended() -> bool:
        done, status = os.waitpid(pid, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if done else [])
        return bool(ended)

    try:
        wait_until(has_ended)
    finally:
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return ended[0]


@pytest.fixture
def said(tmp_path: Path) -> Path:
    (tmp_path / "said").touch()
    return tmp_path / "said"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks(number: signal.Signals, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the launcher's echoes of it do nothing."""
    monkeypatch.setattr(signals, "_ECHO_SECONDS", FOR_EVER)
    before = signal.getsignal(number)
    stop = StopSignals()
    stop.install()
    assert not stop.requested
    for _ in range(3):
        os.kill(os.getpid(), number)
    stop.restore()
    assert stop.requested and signal.getsignal(number) == before
    assert capfd.readouterr().err.count("stop requested") == 1
    stop.restore()


@pytest.mark.parametrize("first, second", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
def test_a_later_signal_ends(first: signal.Signals, second: signal.Signals, said: Path) -> None:
    def body() -> None:
        signals._ECHO_SECONDS = 0.02
        StopSignals().install()
        os.kill(os.getpid(), first)
        time.sleep(0.05)  # at least
        os.kill(os.getpid(), second)
        time.sleep(FOR_EVER)

    assert code_of(started(body, said)) == 128 + second


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_ends_c_code_that_never_comes_back(first: signal.Signals, said: Path) -> None:
    """As in a collective whose peer does not come: the interpreter's lock is free, but no handler of Python's is called."""

    def body() -> None:
        StopSignals(launched=False).install()
        mutex = ctypes.create_string_buffer(128)  # zeros: an ordinary one
        os.write(2, b"ready\n")
        for _ in range(2):  # the second waits for the first for ever, whatever signals come; ctypes lets go of the interpreter's lock
            ctypes.CDLL(None).pthread_mutex_lock(mutex)

    pid = started(body, said)
    for words, number in (("ready", first), ("stop requested", signal.SIGINT)):
        wait_until(lambda words=words: words in said.read_text())  # type: ignore[misc]
        os.kill(pid, number)
    assert code_of(pid) == 128 + signal.SIGINT and said.read_text().count("leaving at once,") == 1


def test_what_a_worker_gets_is_not_ours(said: Path) -> None:
    def body() -> None:
        stop = StopSignals(launched=False)
        stop.install()
        worker = os.fork()
        if worker == 0:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
            os._exit(7)
        assert code_of(worker) == 7 and not stop.requested
        stop.restore()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL

    assert code_of(started(body, said)) == 0 and said.read_text() == ""


# the watchdog


def ends(said: Path, timeout_s: float, report: Path, what: str, **more: object) -> None:
    """A process without a further beat ends with code 7."""

    def body() -> None:
        dog = Watchdog(timeout_s, report, 3, lambda message: said.write_text(message), startup_s=0.0 if not what else FOR_EVER)  # type: ignore[arg-type, return-value]
        vars(dog).update(more)
        if what:
            dog.beat(what)
        time.sleep(FOR_EVER)

    assert code_of(started(body, said)) == 7


def test_watchdog_ends_a_silent_process(tmp_path: Path, said: Path) -> None:
    report = tmp_path / "stacks.txt"
    ends(said, 0.2, report, "a step")
    text = report.read_text()
    assert text.startswith("rank 3: no progress in 'a step' for 0 s") and "body" in text and "_watch" in text
    assert str(report) in said.read_text()
    ends(said, 0.2, report, "step 7", locate=lambda: ("pipeline stage 1", "action B1:4"))
    assert report.read_text().startswith("rank 3 (pipeline stage 1): no progress in 'step 7', action B1:4, for 0 s\n")
    ends(said, 0.1, tmp_path / "absent" / "stacks.txt", "")


def test_watchdog_leaves_a_living_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that stands still unless the test moves it, so that the machine's load does not count."""
    now, looks = [100.0], [0]

    class Looked(Watchdog):
        def _end(self) -> None:
            raise AssertionError("it was to be left alone")

        def _is_late(self) -> bool:
            late = super()._is_late()
            looks[0] += 1
            return late

    def pass_time(seconds: float) -> None:
        now[0] += seconds
        seen = looks[0]
        wait_until(lambda: looks[0] >= seen + 2)  # one look may have begun before

    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    dog = Looked(0.04, tmp_path / "stacks.txt", 0, startup_s=10.0)
    pass_time(10.0)  # the first beat may come later
    for step in range(3):
        dog.beat(f"step {step}")
        pass_time(0.03)
    assert dog._thread.is_alive()
    dog.close()
    now[0] += FOR_EVER
    assert not dog._thread.is_alive() and not (tmp_path / "stacks.txt").exists()
