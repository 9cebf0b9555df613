"""From any number of records to the points worth drawing.

A screen has a thousand columns. Of more points than that, each bucket of neighbours gives its lowest and its highest, so no spike is lost,
and its mean, from which the smoothed line is drawn. What is not a number leaves a gap, and is listed by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.report.run_history import smoothed

LARGEST = 1e300  # differences of larger ones overflow; they are listed like infinity
LOOKS = 6  # there are in page.css
MARKED = 200  # of the places that are no numbers; more than that cannot be told apart


@dataclass
class Curve:
    """A line, or single points, in a chart.

    Attributes:
        label: for legend and tooltip.
        run: which of the runs.
        look: which colour and dashes; the run's place if nothing else is said.
        style: line; points (joined by thin dashes); undone (what a resume threw away).
        x, y: what is drawn; NaN in y is a gap.
        mean_x, mean_y: the buckets' means; empty if every point is drawn.
        bad: x of values that are no finite numbers, and their text.
        count, low, high, last: of all points, thinned out or not.
    """

    label: str
    run: int
    style: str
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    mean_x: list[float] = field(default_factory=list)
    mean_y: list[float] = field(default_factory=list)
    bad: list[tuple[float, str]] = field(default_factory=list)
    num_bad: int = 0
    count: int = 0
    low: float = math.nan
    high: float = math.nan
    last: float = math.nan
    look: int = -1

    def __post_init__(self) -> None:
        self.look = (self.run if self.look < 0 else self.look) % LOOKS

    def smooth(self, share: float) -> tuple[list[float], list[float]]:
        """x and y of its running mean."""
        x, y = (self.mean_x, self.mean_y) if self.mean_x else (self.x, self.y)
        return x, smoothed(y, share)

    def to_json(self) -> dict[str, Any]:
        """For the script in the page; short names, for there are many points."""
        record: dict[str, Any] = {"n": self.label, "r": self.run, "k": self.look, "s": self.style, "x": _short(self.x), "y": _short(self.y)}
        if self.mean_x:
            record |= {"mx": _short(self.mean_x), "my": _short(self.mean_y)}
        return record | ({"bad": self.bad} if self.bad else {})


def curve(label: str, run: int, style: str, x: Sequence[float], y: Sequence[float], buckets: int) -> Curve:
    """A curve with at most two points (and perhaps a gap) for each bucket.

    Args:
        x, y: in order; x finite.
    """
    pairs, bad = [], []
    for a, b in zip(x, y, strict=True):
        if -LARGEST < b < LARGEST:
            pairs.append((a, b))
        else:
            pairs.append((a, math.nan))
            bad.append((a, f"{b:g}"))
    finite = [b for _, b in pairs if b == b]
    out = Curve(label, run, style, count=len(pairs))
    if finite:
        out.low, out.high, out.last = min(finite), max(finite), finite[-1]
    out.num_bad, out.bad = len(bad), bad[:: max(1, math.ceil(len(bad) / MARKED))]
    if len(pairs) <= 2 * buckets:
        out.x, out.y = [a for a, _ in pairs], [b for _, b in pairs]
        return out
    for index in range(buckets):
        _add_bucket(out, pairs[index * len(pairs) // buckets : (index + 1) * len(pairs) // buckets])
    if out.x[-1] != pairs[-1][0]:  # a reader looks at the end first
        out.x.append(pairs[-1][0])
        out.y.append(pairs[-1][1])
    return out


def _add_bucket(out: Curve, pairs: Sequence[tuple[float, float]]) -> None:
    finite = [p for p in pairs if p[1] == p[1]]
    chosen = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])} if finite else set()
    gap = next((p[0] for p in pairs if p[1] != p[1]), None) if len(finite) < len(pairs) else None
    for a, b in sorted([*chosen, *([(gap, math.nan)] if gap is not None else [])], key=lambda p: p[0]):
        out.x.append(a)
        out.y.append(b)
    out.mean_x.append(sum(a for a, _ in pairs) / len(pairs))
    out.mean_y.append(sum(b for _, b in finite) / len(finite) if finite else math.nan)


def _short(values: Sequence[float]) -> list[float | int | None]:
    """Six digits, whole numbers as such, and null for what is no number."""
    return [None if not math.isfinite(v) else int(v) if v == int(v) and abs(v) < 1e15 else float(f"{v:.6g}") for v in values]
