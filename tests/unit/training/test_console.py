"""Lines and numbers for people."""

from __future__ import annotations

import io
import sys

import pytest

from megatron_sp.training.metrics import Console
from megatron_sp.utils.format import format_bytes, format_count, format_duration, format_parameters


@pytest.mark.parametrize("seconds, text", [
    (0, "0 s"), (-5, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599.6, "1 h 00 min"), (3600, "1 h 00 min"), (11220, "3 h 07 min"),
    (725, "12 min 05 s"), (360000, "100 h 00 min"),
])  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * 2**30, "1.5 GiB"), (3 * 2**50, "3072.0 TiB")]
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize("count, text", [(7, "7"), (999, "999"), (1000, "1.0 k"), (124_440_000, "124.4 M"), (1.3e9, "1.3 B")])
def test_count(count: float, text: str) -> None:
    assert format_count(count) == text


def test_parameters_are_there_to_read_and_to_compare() -> None:
    assert format_parameters(11_237_376) == "11.2 M (11,237,376)" and format_parameters(438) == "438"


def test_only_rank_0_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        console = Console(rank)
        console.start_progress(10, 0)
        console.line(f"from {rank}")
        console.progress(1, "x")
        console.close()
    assert capsys.readouterr().out == "from 0\n", "no bar without a terminal"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines pass above the bar unbroken and unstyled: brackets are not markup."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(0)
    console.start_progress(10, 4)
    console.progress(6, "loss 1.5")
    console.line("[bold]" + "x" * 200)
    console.close()
    console.close()
    text = screen.getvalue()
    assert "6/10" in text and "loss 1.5" in text and "[bold]" + "x" * 200 in text


def test_no_bar_when_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    console = Console(0, progress_bar=False)
    console.start_progress(10, 0)
    console.line("plain")
    assert screen.getvalue() == "plain\n"
