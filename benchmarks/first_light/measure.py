"""Time of a call on a device, and the error of a result.

On a GPU each call is timed alone between two events, and right before it a buffer larger than any L2 cache is written,
so that operands come from memory, as they do in training. The host runs ahead while that buffer is written; a chain of
many launches takes it longer, and that shows, as it does in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import Stats
from torch import Tensor

_FLUSHED_BYTES = 2**30


class Stopwatch:
    """Times calls.

    Args:
        device: of the operands.
        rounds: timed calls of each function; two more are for warming up.
        flushed_bytes: written before each call, on a GPU.
        now: the clock of the host, for a CPU.
    """

    def __init__(
        self,
        device: torch.device,
        rounds: int,
        flushed_bytes: int = _FLUSHED_BYTES,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.rounds, self.now = device, rounds, now
        self._flushed = torch.empty(flushed_bytes, dtype=torch.uint8, device=device) if device.type == "cuda" else None

    def ms(
        self, calls: dict[str, Callable[[], Any]], before: dict[str, Callable[[], Any]] | None = None
    ) -> dict[str, Stats]:
        """Return milliseconds of each call; they take turns, so that what slows the machine for a while slows all.

        Args:
            calls: by name.
            before: what is done before each call, untimed.
        """
        before = before or dict.fromkeys(calls, lambda: None)
        for name, call in calls.items():
            for _ in range(2):
                before[name]()
                call()
        rounds = [{name: self._once(call, before[name]) for name, call in calls.items()} for _ in range(self.rounds)]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {name: Stats.of(times[name]() for times in rounds) for name in calls}

    def _once(self, call: Callable[[], Any], before: Callable[[], Any]) -> Callable[[], float]:
        """Run a call; return what tells its milliseconds, once the device has come to its end."""
        before()
        if self._flushed is None:
            began = self.now()
            call()
            spent = 1e3 * (self.now() - began)
            return lambda: spent
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        start.record()
        call()
        end.record()
        return lambda: start.elapsed_time(end)


def error_of(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> float:
    """Return the largest deviation of any tensor over that tensor's largest value; infinite for a NaN or another shape."""
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        if g is None or w is None:
            continue
        if g.numel() != w.numel():
            return float("inf")
        wide = w.detach().double().cpu().reshape(-1)
        difference = (g.detach().double().cpu().reshape(-1) - wide).abs().max().nan_to_num(nan=float("inf"))
        worst = max(worst, float(difference / wide.abs().max().clamp_min(1e-30)))
    return worst
