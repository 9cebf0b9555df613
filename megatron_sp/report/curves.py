"""Reduction of any number of records to the points to draw.

A screen has about a thousand columns. With more points, each bucket of neighbours is reduced to its minimum and
maximum, so that no spike is lost, and its mean, from which the smoothed line is drawn. Values that are not finite leave
a gap and are listed separately.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LARGEST = 1e300  # differences of larger ones overflow; they are listed like infinity
LOOKS = 6  # colours and dashes in page.css
MARKED = 200  # marks of values that are not finite; more than that cannot be told apart


@dataclass
class Curve:
    """A line, or single points, in a chart.

    Attributes:
        label: label in legend and tooltip.
        run: index of the run.
        look: index of colour and dashes; by default that of the run.
        style: line; points (joined by thin dashes); undone (steps that a resume discarded).
        x, y: points to draw; NaN in y is a gap.
        mean_x, mean_y: means of the buckets; empty if every point is drawn.
        bad: (x, text) of values that are not finite, thinned out; ``num_bad`` is their number.
        count, low, high, last: statistics of all points, including those not drawn.
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

    def to_json(self) -> dict[str, Any]:
        """Return the curve for the page's script, with short names and numbers to save space."""
        record: dict[str, Any] = {"n": self.label, "r": self.run, "k": self.look, "s": self.style, "x": _short(self.x), "y": _short(self.y)}
        if self.mean_x:
            record |= {"mx": _short(self.mean_x), "my": _short(self.mean_y)}
        return record | ({"bad": self.bad} if self.bad else {})


def curve(label: str, run: int, style: str, x: Sequence[float], given: Sequence[float], buckets: int) -> Curve:
    """Return a curve with at most two points (and possibly a gap) for each bucket, and the last point.

    Args:
        x, given: points in order; x must be finite.
    """
    y = [value if -LARGEST < value < LARGEST else math.nan for value in given]
    finite = [value for value in y if value == value]
    out = Curve(label, run, style, count=len(y))
    if finite:
        out.low, out.high, out.last = min(finite), max(finite), finite[-1]
    if len(finite) < len(y):
        bad = [(a, f"{b:g}") for a, b, kept in zip(x, given, y, strict=True) if kept != kept]
        out.num_bad, out.bad = len(bad), bad[:: max(1, math.ceil(len(bad) / MARKED))]
    if len(y) <= 2 * buckets:
        out.x, out.y = list(x), y
        return out
    edges = [index * len(y) // buckets for index in range(buckets + 1)]
    for start, end in itertools.pairwise(edges):
        _add_bucket(out, x[start:end], y[start:end])
    if out.x[-1] != x[-1]:  # a reader looks at the end first
        out.x.append(x[-1])
        out.y.append(y[-1])
    return out


def _add_bucket(out: Curve, x: Sequence[float], y: list[float]) -> None:
    """Add the lowest and the highest value, the first gap, and the means."""
    finite = y if not math.isnan(sum(y)) else [value for value in y if value == value]  # most buckets have no gap
    chosen = {y.index(min(finite)), y.index(max(finite))} if finite else set()
    if len(finite) < len(y):
        chosen.add(next(i for i, value in enumerate(y) if value != value))
    for i in sorted(chosen):
        out.x.append(x[i])
        out.y.append(y[i])
    out.mean_x.append(sum(x) / len(x))
    out.mean_y.append(sum(finite) / len(finite) if finite else math.nan)


def _short(values: Sequence[float]) -> list[float | int | None]:
    """Round to six digits, with integers as such and None in place of values that are not finite."""
    return [None if not math.isfinite(v) else int(v) if v == int(v) and abs(v) < 1e15 else float(f"{v:.6g}") for v in values]
