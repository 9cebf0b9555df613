"""Integer arithmetic that names what it means."""

from __future__ import annotations


def divide(a: int, b: int) -> int:
    """a / b, which must be whole."""
    assert a % b == 0, f"{a} is not a multiple of {b}"
    return a // b


def window_tile(window: int) -> int:
    """Queries that a sliding window's attention takes at a time: few enough that what they see beside the window is little of it."""
    return min(window, max(64, min(256, window // 4)))


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below a."""
    return (a + multiple - 1) // multiple * multiple
