"""Charts as static SVG, for readers without scripts, printers and previews.

Where scripts run, ``page.js`` redraws the same charts for the actual width and makes them interactive.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.report.curves import Curve
from megatron_sp.report.html import Html, join, show, tag
from megatron_sp.report.run_history import SMOOTHED_FROM

LEFT, RIGHT, TOP, BOTTOM = 62, 14, 18, 26  # pixels around the plot
UNDONE_DOTS = 40  # of more, the line alone is readable
SMOOTHING = 0.01  # the default share of the points to either side


@dataclass
class Chart:
    """Contents of a chart.

    Attributes:
        key: short unique key for ids.
        kind: kind of the values, for ``html.show``.
        curves: curves; without any points the chart says that there is no data.
        levels: horizontal lines (value, label).
        from_zero: True if the axis includes zero.
        noisy: True if a running mean is drawn over the single values.
        wide: True for the whole width of the page.
        note: a sentence below the chart.
    """

    key: str
    title: str
    kind: str
    curves: list[Curve]
    levels: list[tuple[float, str]] = field(default_factory=list)
    from_zero: bool = False
    noisy: bool = True
    wide: bool = False
    note: str = ""

    @property
    def height(self) -> int:
        """Height in pixels."""
        return 340 if self.wide else 220

    @property
    def drawn(self) -> list[Curve]:
        """Curves that have points."""
        return [c for c in self.curves if c.x]

    def to_json(self) -> dict[str, Any]:
        """Data for the page's script."""
        return {
            "key": self.key, "kind": self.kind, "zero": self.from_zero, "noisy": self.noisy, "h": self.height,
            "curves": [c.to_json() for c in self.drawn], "levels": [[v, t] for v, t in self.levels if math.isfinite(v)],
        }  # fmt: skip


def describe(chart: Chart) -> str:
    """Return a description of the chart in words."""
    parts = []
    for c in chart.drawn:
        if math.isfinite(c.last):
            low, high, last = (show(value, chart.kind) for value in (c.low, c.high, c.last))
            parts.append(f"{c.label}: {c.count:,} values, lowest {low}, highest {high}, last {last}")
        if c.num_bad:
            parts.append(f"{c.label}: {c.num_bad:,} values are not finite")
    return "; ".join(parts) or "nothing was logged"


def unit_of(high: float, kind: str) -> float:
    """Return the unit in which axis ticks are round: a power of 1024 for bytes, else 1."""
    return 1024.0 ** max(0, math.floor(math.log(high, 1024))) if kind == "bytes" and high >= 1 else 1.0


def ticks(low: float, high: float, number: int = 5, unit: float = 1.0) -> list[float]:
    """Return about ``number`` round values between two others."""
    if not high > low:
        return [low]
    step = unit * _round_step((high - low) / number / unit)
    if not (math.isfinite(step) and step > 0):
        return [low]
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _round_step(raw: float) -> float:
    if not (math.isfinite(raw) and raw > 0):
        return math.nan
    size = 10.0 ** math.floor(math.log10(raw))
    return next((m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999), 10 * size) if size > 0 else math.nan


def extent(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    """Return the limits of an axis: slightly beyond the values, and never equal."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    pad = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return (low if from_zero and low == 0 else low - pad), high + pad


def draw(chart: Chart, resumed: Sequence[tuple[int, int]], width: int = 0) -> Html:
    """Draw the chart over the steps.

    Args:
        resumed: (step, run) of each resume.
        width: nominal width in pixels; the picture scales.
    """
    width = width or (1160 if chart.wide else 560)
    bottom, right = chart.height - BOTTOM, width - RIGHT
    x_low, x_high = _x_range(chart)
    values = [v for c in chart.drawn for v in c.y] + [v for v, _ in chart.levels]
    y_low, y_high = extent(values, from_zero=chart.from_zero)
    x_of = lambda x: LEFT + (x - x_low) / (x_high - x_low) * (right - LEFT)
    y_of = lambda y: bottom - (y - y_low) / (y_high - y_low) * (bottom - TOP)
    parts: list[object] = []
    for y in ticks(y_low, y_high, unit=unit_of(y_high, chart.kind)):
        parts.append(tag("line", x1=LEFT, x2=right, y1=_px(y_of(y)), y2=_px(y_of(y)), class_="grid"))
        parts.append(tag("text", tick_text(y, chart.kind), x=LEFT - 8, y=_px(y_of(y) + 4), class_="tick end"))
    for x in ticks(x_low, x_high, 8 if chart.wide else 5):
        near_end = x_of(x) > right - 24
        parts.append(
            tag("text", f"{x:,.0f}", x=_px(right if near_end else x_of(x)), y=bottom + 17, class_=f"tick {'end' if near_end else 'mid'}")
        )
    for step, run in resumed:
        if x_low <= step <= x_high:
            parts.append(tag("line", x1=_px(x_of(step)), x2=_px(x_of(step)), y1=TOP - 6, y2=bottom, class_=f"resume c{run % 6}"))
    for value, label in chart.levels:
        if math.isfinite(value):
            parts.append(tag("line", x1=LEFT, x2=right, y1=_px(y_of(value)), y2=_px(y_of(value)), class_="level"))
            parts.append(tag("text", label, x=right, y=_px(y_of(value) - 5), class_="tick end"))
    parts += [_draw_curve(c, x_of, y_of, smooth=chart.noisy and c.style == "line" and len(c.y) >= SMOOTHED_FROM) for c in chart.drawn]
    if not chart.drawn:
        parts.append(tag("text", "nothing was logged", x=width / 2, y=chart.height / 2, class_="tick mid"))
    title, about = f"{chart.key}-title", f"{chart.key}-about"
    return tag("svg", tag("title", chart.title, id=title), tag("desc", describe(chart), id=about), tag("g", parts, class_="plot"),
               viewBox=f"0 0 {width} {chart.height}", role="img", aria_labelledby=f"{title} {about}")  # fmt: skip


def _x_range(chart: Chart) -> tuple[float, float]:
    xs = [x for c in chart.drawn for x in (c.x[0], c.x[-1])] or [0.0, 1.0]
    low, high = min(xs), max(xs)
    return (low, high) if high > low else (low - 1, high + 1)


def _draw_curve(c: Curve, x_of: Any, y_of: Any, *, smooth: bool) -> Html:
    look = f"c{c.look} {c.style}"
    single = " faint" if smooth else f" d{c.look}" if c.style == "line" else ""
    parts: list[object] = [tag("path", d=_path(c.x, c.y, x_of, y_of), class_=look + single)]
    if smooth:
        parts.append(tag("path", d=_path(*c.smooth(SMOOTHING), x_of, y_of), class_=f"{look} d{c.look}"))
    lone = _alone(c)
    if c.style != "line" or lone:
        dots = lone if c.style == "line" else [(a, b) for a, b in zip(c.x, c.y, strict=True) if math.isfinite(b)]
        if len(dots) <= (UNDONE_DOTS if c.style == "undone" else 300):
            parts += [
                tag("circle", cx=_px(x_of(a)), cy=_px(y_of(b)), r=2.5 if c.style == "undone" else 3.5, class_=f"{look} dot")
                for a, b in dots
            ]
    for x, text in c.bad:
        at = x_of(x)
        parts.append(tag("path", tag("title", f"{c.label} at {x:,.0f}: {text}"), d=f"M{at:.1f} {TOP - 1}l-5 -9h10z", class_="bad"))
    return join(parts)


def _alone(c: Curve) -> list[tuple[float, float]]:
    """Return the points with a gap on either side, which a line would not show."""
    there = [False, *(math.isfinite(v) for v in c.y), False]
    return [(c.x[i], c.y[i]) for i in range(len(c.y)) if there[i + 1] and not there[i] and not there[i + 2]]


def _path(xs: Sequence[float], ys: Sequence[float], x_of: Any, y_of: Any) -> str:
    words, pen = [], "M"
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            words.append(f"{pen}{x_of(x):.1f} {y_of(y):.1f}")
        pen = "L" if math.isfinite(y) else "M"
    return "".join(words)


def _px(value: float) -> str:
    return f"{value:.1f}"


def tick_text(value: float, kind: str) -> str:
    """Return a number as ``show`` does, without superfluous digits."""
    if value == 0:
        return "0"
    text = show(value, "plain" if kind == "loss" else kind)
    return text.replace(".0 ", " ") if kind in ("bytes", "percent") else text


def bar(parts: Sequence[tuple[str, float, str]], whole: float, label: str) -> Html:
    """Return a horizontal bar.

    Args:
        parts: (class, amount, title) of its parts, from the left.
        whole: amount that fills the width.
    """
    ends = list(itertools.accumulate((amount for _, amount, _ in parts), initial=0.0))
    whole = whole if math.isfinite(whole) and whole > 0 else 1.0
    rects = [
        tag("rect", tag("title", words), x=f"{1000 * start / whole:.2f}", y=0, width=f"{1000 * amount / whole:.2f}", height=20, class_=kind)
        for (kind, amount, words), start in zip(parts, ends, strict=False)
        if amount > 0
    ]
    return tag("svg", rects, viewBox="0 0 1000 20", preserveAspectRatio="none", role="img", aria_label=label, class_="bar")
