"""The stop flag, the second signal, and the watchdog, each in a process of its own where it ends one."""

from __future__ import annotations

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


def in_child(body: Callable[[], None]) -> int:
    """The exit code; 0 when ``body`` returns."""
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            body()
            os._exit(0)
        finally:
            os._exit(99)
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks(number: signal.Signals, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_ECHO_SECONDS", FOR_EVER)
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
        time.sleep(0.05)  # at least
        os.kill(os.getpid(), second)
        time.sleep(FOR_EVER)

    assert in_child(body) == 128 + second


def test_watchdog_ends_a_silent_process(tmp_path: Path) -> None:
    report, said = tmp_path / "stacks.txt", tmp_path / "said.txt"

    def body() -> None:
        dog = Watchdog(0.2, report, 3, said.write_text, startup_s=FOR_EVER)  # type: ignore[arg-type]
        dog.beat("a step")
        time.sleep(FOR_EVER)

    assert in_child(body) == 7
    text = report.read_text()
    assert text.startswith("rank 3: no progress in 'a step' for 0 s") and "body" in text and "_watch" in text
    assert str(report) in said.read_text()


def test_watchdog_names_the_stage_and_the_action(tmp_path: Path) -> None:
    report = tmp_path / "stacks.txt"

    def body() -> None:
        dog = Watchdog(0.2, report, 3, startup_s=FOR_EVER)
        dog.locate = lambda: ("pipeline stage 1", "action B1:4")
        dog.beat("step 7")
        assert dog.place == "'step 7', action B1:4"
        time.sleep(FOR_EVER)

    assert in_child(body) == 7
    assert report.read_text().startswith("rank 3 (pipeline stage 1): no progress in 'step 7', action B1:4, for 0 s\n")


def test_watchdog_without_a_place_for_its_report(tmp_path: Path) -> None:
    def body() -> None:
        Watchdog(0.1, tmp_path / "absent" / "stacks.txt", 0, startup_s=0.0)
        time.sleep(FOR_EVER)

    assert in_child(body) == 7


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
