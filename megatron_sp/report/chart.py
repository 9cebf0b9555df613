"""A chart: its data for the page's script, which draws it, and its frame with a table of its values for readers without scripts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.report.curves import Curve
from megatron_sp.report.html import Html, join, show, table, tag
from megatron_sp.report.sparkline import sparkline

_SPARK_COLUMNS = 24


@dataclass
class Chart:
    """Contents of a chart.

    Attributes:
        key: short unique key for ids.
        axis: title of the value axis.
        kind: kind of the values, for ``html.show``; bytes, seconds and percent bring units, which the axis title names.
        curves: curves; without any points the chart says that there is no data.
        unit: unit of the value axis, if the kind brings none; empty for a pure number.
        levels: horizontal lines (value, short label).
        from_zero: True if the axis includes zero.
        noisy: True if a running mean is drawn over the single values.
        wide: True for the whole width of the page.
        note: a sentence below the chart.
    """

    key: str
    title: str
    axis: str
    kind: str
    curves: list[Curve]
    unit: str = ""
    levels: list[tuple[float, str]] = field(default_factory=list)
    from_zero: bool = False
    noisy: bool = True
    wide: bool = False
    note: str = ""

    @property
    def height(self) -> int:
        """Height in pixels."""
        return 366 if self.wide else 250

    @property
    def drawn(self) -> list[Curve]:
        """Curves with at least one point."""
        return [c for c in self.curves if c.x]

    def to_json(self) -> dict[str, Any]:
        """Return the chart for the page's script."""
        return {
            "key": self.key, "kind": self.kind, "axis": self.axis, "unit": self.unit, "zero": self.from_zero, "noisy": self.noisy,
            "h": self.height, "curves": [c.to_json() for c in self.drawn],
            "levels": [[v, t] for v, t in self.levels if math.isfinite(v)],
        }  # fmt: skip


def figure(chart: Chart, *, several: bool) -> Html:
    """Return the frame that the page's script draws the chart in.

    Args:
        several: the page compares runs, so that a single curve has to be named too.
    """
    named = len(chart.drawn) > 1 or several
    log = tag("button", "log", type="button", class_="log needs-script", aria_pressed="false", aria_label=f"logarithmic: {chart.title}")
    bad = sum(c.num_bad for c in chart.drawn if any(t != "nan" for _, t in c.bad) or chart.key in ("loss", "grad_norm"))
    note = f"▾ {bad:,} {'value is' if bad == 1 else 'values are'} not finite (red marks). " if bad else ""
    return tag(
        "figure",
        tag("figcaption", tag("h3", chart.title), log),
        _legend(chart) if named else None,
        tag("div", class_="canvas"),
        tag("p", note + chart.note, class_="quiet") if note + chart.note else None,
        _values(chart, named=named),
        class_="card chart wide" if chart.wide else "card chart", data_key=chart.key,
    )  # fmt: skip


def _legend(chart: Chart) -> Html:
    keys = [
        tag("button", tag("span", class_=f"swatch c{c.look} {c.style} d{c.look if c.style == 'line' else 0}"), c.label, type="button",
            aria_pressed="true", data_curve=place)
        for place, c in enumerate(chart.drawn)
    ]  # fmt: skip
    return tag("div", keys, class_="legend")


def _values(chart: Chart, *, named: bool) -> Html:
    """Return a table of what the curves show; the page's script folds it."""
    head, rows = ["curve", "values", "lowest", "highest", "last", ""], []
    for c in chart.drawn:
        finite = [v for v in c.y if math.isfinite(v)]
        # a curve of discarded steps is several stretches, which one row of bars would join
        spark = sparkline(finite, _SPARK_COLUMNS) if c.style != "undone" and len(finite) > 1 else ""
        rows.append([c.label, f"{c.count:,}", *(show(v, chart.kind) for v in (c.low, c.high, c.last)), tag("td", spark, class_="spark")])
    first = 0 if named else 1  # the title names a single curve
    body = table(head[first:], [row[first:] for row in rows], numeric=range(1 - first, 5 - first)) if rows else join("nothing was logged")
    unit = f" ({chart.unit})" if chart.unit else ""
    return tag("details", tag("summary", f"values{unit}"), body, class_="values", open=True)
