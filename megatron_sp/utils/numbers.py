"""Named integer arithmetic."""

from __future__ import annotations

# the largest integer that a flag takes if it has no bound of its own: products of two fit into 128 bits, sums into 64
MAX_COUNT = 10**15


def divide(a: int, b: int) -> int:
    """Return a / b, an integer."""
    assert a % b == 0, f"{a} is not a multiple of {b}"
    return a // b


def window_tile(window: int) -> int:
    """Return the tile size (queries) of sliding-window attention."""
    # small compared with large windows, to limit wasted work
    return min(window, max(64, min(256, window // 4)))


def round_up(a: int, multiple: int) -> int:
    """Return the next multiple, or ``a``."""
    return (a + multiple - 1) // multiple * multiple


def division(value: int, divisor: int) -> str:
    """Return the division as ``a = q * b + r``."""
    return f"{value} = {value // divisor} * {divisor} + {value % divisor}"
