"""The stop flag, the second signal, and the watchdog, each in a process of its own where it ends one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_sp.training import signals
from megatron_sp.training.signals import StopSignals
from megatron_sp.training.watchdog import Watchdog

pytestmark = pytest.mark.quiet


def in_child(body: Callable[[], None], timeout_s: float = 20.0) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            body()
            os._exit(0)
        finally:
            os._exit(99)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child did not end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    stop = StopSignals()
    stop.install()
    assert not stop.requested
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)  # the launcher's echo
    stop.restore()
    assert stop.requested and signal.getsignal(number) == before
    assert capfd.readouterr().err.count("stop requested") == 1
    stop.restore()


@pytest.mark.parametrize("first, second", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
def test_a_later_signal_ends(first: signal.Signals, second: signal.Signals) -> None:
    def body() -> None:
        signals._ECHO_SECONDS = 0.02
        StopSignals().install()
        os.kill(os.getpid(), first)
        time.sleep(0.05)
        os.kill(os.getpid(), second)
        time.sleep(10)

    assert in_child(body) == 128 + second


def test_watchdog_ends_a_silent_process(tmp_path: Path) -> None:
    report, said = tmp_path / "stacks.txt", tmp_path / "said.txt"

    def body() -> None:
        dog = Watchdog(0.2, report, 3, said.write_text, startup_s=0.0)  # type: ignore[arg-type]
        dog.beat("a step")
        time.sleep(10)

    assert in_child(body) == 7
    text = report.read_text()
    assert text.startswith("rank 3: no progress in 'a step' for 0 s") and "body" in text and "_watch" in text
    assert str(report) in said.read_text()


def test_watchdog_without_a_place_for_its_report(tmp_path: Path) -> None:
    def body() -> None:
        Watchdog(0.1, tmp_path / "absent" / "stacks.txt", 0, startup_s=0.0)
        time.sleep(10)

    assert in_child(body) == 7


def test_watchdog_leaves_a_living_process_alone(tmp_path: Path) -> None:
    def body() -> None:
        dog = Watchdog(0.3, tmp_path / "stacks.txt", 0, startup_s=0.3)
        time.sleep(0.4)  # the first beat may come later
        for step in range(6):
            dog.beat(f"step {step}")
            time.sleep(0.1)
        dog.close()
        time.sleep(0.5)

    assert in_child(body) == 0 and not (tmp_path / "stacks.txt").exists()
