"""Waiting for what another process or thread does: for the event itself, with a bound that only something that hangs ever reaches.

No test's verdict depends on how fast the machine is: what is to happen "at once" is tried with time-outs so long that
it cannot have been one of those.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 300.0  # a machine that is a hundred times too slow stays below it
NEVER_MINUTES = 60.0  # for time-outs of the program that must not be what ends a test


def wait_until(condition: Callable[[], Any], pause_s: float = 0.005) -> None:
    """Look again and again until ``condition`` holds.

    Raises:
        AssertionError: it never did.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause_s)
