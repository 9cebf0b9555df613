"""A second signal ends a process wherever it is; one that a worker gets, or that the launcher repeats, is none."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_sp.training import signals
from megatron_sp.training.signals import StopSignals


def started(body: Callable[[], None], said: Path) -> int:
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


def wait_for(words: str, said: Path) -> None:
    while not said.exists() or words not in said.read_text():
        time.sleep(0.002)


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_in_c_code_that_never_comes_back(first: signal.Signals, tmp_path: Path) -> None:
    """As in a collective whose peer does not come: the interpreter's lock is free, but no handler of Python's is called."""

    def body() -> None:
        StopSignals(launched=False).install()
        mutex = ctypes.create_string_buffer(128)  # zeros: an ordinary one
        os.write(2, b"ready\n")
        for _ in range(2):  # the second waits for the first for ever, whatever signals come; ctypes lets go of the interpreter's lock
            ctypes.CDLL(None).pthread_mutex_lock(mutex)

    pid = started(body, said := tmp_path / "said")
    wait_for("ready", said)
    os.kill(pid, first)
    wait_for("stop requested", said)
    os.kill(pid, signal.SIGINT)
    assert code_of(pid) == 128 + signal.SIGINT and said.read_text().count("leaving at once,") == 1


def test_the_echo_of_a_launcher_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_ECHO_SECONDS", 1e9)

    def body() -> None:
        stop = StopSignals()
        stop.install()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        stop.restore()

    assert code_of(started(body, said := tmp_path / "said")) == 0
    assert said.read_text().count("stop requested") == 1


def test_what_a_worker_gets_is_not_ours(tmp_path: Path) -> None:
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
        stop.restore()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL

    assert code_of(started(body, said := tmp_path / "said")) == 0
    assert said.read_text() == ""
