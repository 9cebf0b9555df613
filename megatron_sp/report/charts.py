"""Charts of a page: data for the page's script, which draws them, and frames with tables for readers without scripts.

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

from megatron_sp.report.reading import RunFiles
from megatron_sp.report.run_history import History, accuracies, number
from megatron_sp.utils.format import show
from megatron_sp.utils.markup import Html, join, table, tag

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_COLUMNS = 24
LARGEST = 1e300  # differences of larger ones overflow; they are listed like infinity
LOOKS = 6  # colours and dashes in page.css
MARKED = 200  # marks of values that are not finite; more than that cannot be told apart
_POINTS = 24_000  # of all curves together: what keeps the page well below a megabyte
_VALIDATION_CHARTS = 8
_OF_EVERY_VALIDATION = ("kind", "time", "step", "loss", "loss_hex", "perplexity", "seconds", "minutes")
_KNOTS = 300  # of the map from steps to tokens and to time
_OF_TRAINING: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    # field of the records, title, title of the axis, kind of the values, more of the chart
    ("lr", "Learning rate", "learning rate", "plain", {"from_zero": True, "noisy": False}),
    ("grad_norm", "Gradient norm", "gradient norm", "plain", {"from_zero": True, "unit": "L2"}),
    ("tokens_per_s", "Throughput", "throughput", "si", {"from_zero": True, "unit": "tokens/s"}),
    ("mfu", "MFU", "share of the peak", "percent", {"from_zero": True}),
    ("step_s", "Time of a step", "time", "seconds", {"from_zero": True}),
    ("memory_bytes", "Peak memory of rank 0", "memory", "bytes", {"key": "memory", "from_zero": True, "noisy": False}),
    ("loss_scale", "Loss scale", "loss scale", "si", {"from_zero": True, "noisy": False}),
    ("global_batch_size", "Global batch size", "batch size", "count",
        {"from_zero": True, "noisy": False, "unit": "sequences"}),
    ("expert_load_max", "Largest load of an expert", "of the mean load", "plain", {"from_zero": True}),
    ("experts_idle", "Experts without a token", "experts", "count", {"from_zero": True, "noisy": False}),
    ("expert_entropy", "Entropy of the loads", "of that of even loads", "percent", {}),
    ("balance_loss", "Balance loss", "loss", "loss", {}),
    ("z_loss", "z loss", "loss", "loss", {}),
    ("params_norm", "Norm of the parameters", "norm", "plain", {"unit": "L2"}),
    ("num_zeros_in_grad", "Zeros in the gradients", "zeros", "si", {"from_zero": True, "unit": "elements"}),
)  # fmt: skip
_CONSTANT = ("loss_scale", "global_batch_size")  # worth a chart only when they change


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return values as bars of text, with the lowest at the bottom and the highest at full height.

    More than ``width`` values are averaged in equal groups; non-finite ones leave a gap.
    """
    if width < 1:
        raise ValueError(f"width ({width}) must be at least 1")
    columns = min(width, len(values))
    bounds = [i * len(values) // columns for i in range(columns + 1)] if columns else []
    means: list[float | None] = []
    for start, end in itertools.pairwise(bounds):
        finite = [v for v in values[start:end] if math.isfinite(v)]
        means.append(sum(finite) / len(finite) if finite else None)
    known = [m for m in means if m is not None]
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low
    heights = [None if m is None else round((m - low) / span * (len(_BARS) - 1)) if span else 0 for m in means]
    return "".join(" " if height is None else _BARS[height] for height in heights)


def bar(parts: Sequence[tuple[str, float, str]], whole: float, label: str) -> Html:
    """Return a horizontal bar of parts (class, amount, title), from the left."""
    starts = list(itertools.accumulate((amount for _, amount, _ in parts), initial=0.0))
    whole = whole if math.isfinite(whole) and whole > 0 else 1.0
    rects = []
    for (kind, amount, words), start in zip(parts, starts, strict=False):
        if amount > 0:
            x, width = (f"{1000 * v / whole:.2f}" for v in (start, amount))
            rects.append(tag("rect", tag("title", words), x=x, y=0, width=width, height=20, class_=kind))
    look = {"viewBox": "0 0 1000 20", "preserveAspectRatio": "none", "role": "img", "aria_label": label}
    return tag("svg", rects, **look, class_="bar")


# curves


@dataclass
class Curve:
    """A line, or single points, in a chart."""

    label: str  # in legend and tooltip
    run: int  # index of the run
    style: str  # line; points (joined by thin dashes); undone (steps that a resume discarded)
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)  # NaN is a gap
    mean_x: list[float] = field(default_factory=list)  # means of the buckets; empty if every point is drawn
    mean_y: list[float] = field(default_factory=list)
    bad: list[tuple[float, str]] = field(default_factory=list)  # (x, text) of values that are not finite, thinned out
    num_bad: int = 0
    # statistics of all points, including those not drawn
    count: int = 0
    low: float = math.nan
    high: float = math.nan
    last: float = math.nan
    look: int = -1  # index of colour and dashes; by default that of the run

    def __post_init__(self) -> None:
        self.look = (self.run if self.look < 0 else self.look) % LOOKS

    @property
    def holds_values(self) -> bool:
        """True if there is something to draw or to mark."""
        return math.isfinite(self.last) or any(text != "nan" for _, text in self.bad)

    def to_json(self) -> dict[str, Any]:
        """Return the curve for the page's script, with short names and numbers to save space."""
        record: dict[str, Any] = {
            "n": self.label, "r": self.run, "k": self.look, "s": self.style, "x": _short(self.x), "y": _short(self.y),
        }  # fmt: skip
        if self.mean_x:
            record |= {"mx": _short(self.mean_x), "my": _short(self.mean_y)}
        return record | ({"bad": self.bad} if self.bad else {})


def _short(values: Sequence[float]) -> list[float | int | None]:
    rounded = lambda v: int(v) if v == int(v) and abs(v) < 1e15 else float(f"{v:.6g}")
    return [rounded(v) if math.isfinite(v) else None for v in values]


def curve(label: str, run: int, style: str, x: Sequence[float], values: Sequence[float], buckets: int) -> Curve:
    """Return a curve with at most two points (and possibly a gap) for each bucket, and the last point; x is finite."""
    y = [value if -LARGEST < value < LARGEST else math.nan for value in values]
    finite = [value for value in y if value == value]
    out = Curve(label, run, style, count=len(y))
    if finite:
        out.low, out.high, out.last = min(finite), max(finite), finite[-1]
    if len(finite) < len(y):
        bad = [(a, f"{b:g}") for a, b, kept in zip(x, values, y, strict=True) if kept != kept]
        out.num_bad, out.bad = len(bad), bad[:: max(1, math.ceil(len(bad) / MARKED))]
    if len(y) <= 2 * buckets:
        out.x, out.y = list(x), y
        return out
    edges = [index * len(y) // buckets for index in range(buckets + 1)]
    for start, end in itertools.pairwise(edges):
        part_x, part = x[start:end], y[start:end]
        finite = part if not math.isnan(sum(part)) else [value for value in part if value == value]  # most have no gap
        chosen = {part.index(min(finite)), part.index(max(finite))} if finite else set()
        if len(finite) < len(part):
            chosen.add(next(i for i, value in enumerate(part) if value != value))
        for i in sorted(chosen):
            out.x.append(part_x[i])
            out.y.append(part[i])
        out.mean_x.append(sum(part_x) / len(part_x))
        out.mean_y.append(sum(finite) / len(finite) if finite else math.nan)
    if out.x[-1] != x[-1]:  # a reader looks at the end first
        out.x.append(x[-1])
        out.y.append(y[-1])
    return out


def _series(history: History, index: int, kind: str, field: str, label: str, buckets: int) -> Curve:
    x, y = history.series(kind, field)
    return curve(label, index, "line" if kind == "train" else "points", x, y, buckets)


# a chart


@dataclass
class Chart:
    """Contents of a chart."""

    key: str  # short unique key for ids
    title: str
    axis: str  # title of the value axis
    # kind of the values, for ``format.show``; bytes, seconds and percent bring units, which the axis title names
    kind: str
    curves: list[Curve]  # without any points the chart says that there is no data
    unit: str = ""  # unit of the value axis, if the kind brings none; empty for a pure number
    levels: list[tuple[float, str]] = field(default_factory=list)  # horizontal lines (value, short label)
    from_zero: bool = False  # the axis includes zero
    noisy: bool = True  # a running mean is drawn over the single values
    wide: bool = False  # the whole width of the page
    note: str = ""  # a sentence below the chart

    @property
    def drawn(self) -> list[Curve]:
        """Curves with at least one point."""
        return [c for c in self.curves if c.x]

    def to_json(self) -> dict[str, Any]:
        """Return the chart for the page's script."""
        return {
            "key": self.key, "kind": self.kind, "axis": self.axis, "unit": self.unit, "zero": self.from_zero,
            "noisy": self.noisy, "h": 366 if self.wide else 250, "curves": [c.to_json() for c in self.drawn],
            "levels": [[v, t] for v, t in self.levels if math.isfinite(v)],
        }  # fmt: skip


def figure(chart: Chart, *, several: bool) -> Html:
    """Return the frame of a chart for the page's script; with ``several`` runs a single curve is named, too."""
    named = len(chart.drawn) > 1 or several
    log = tag(
        "button", "log", type="button", class_="log needs-script", aria_pressed="false",
        aria_label=f"logarithmic: {chart.title}",
    )  # fmt: skip
    bad = sum(c.num_bad for c in chart.drawn if any(t != "nan" for _, t in c.bad) or chart.key in ("loss", "grad_norm"))
    note = f"▾ {bad:,} {'value is' if bad == 1 else 'values are'} not finite (red marks). " if bad else ""
    keys, rows = [], []
    for place, c in enumerate(chart.drawn):
        swatch = tag("span", class_=f"swatch c{c.look} {c.style} d{c.look if c.style == 'line' else 0}")
        keys.append(tag("button", swatch, c.label, type="button", aria_pressed="true", data_curve=place))
        finite = [v for v in c.y if math.isfinite(v)]
        # a curve of discarded steps is several stretches, which one row of bars would join
        spark = sparkline(finite, _SPARK_COLUMNS) if c.style != "undone" and len(finite) > 1 else ""
        figures = [show(v, chart.kind) for v in (c.low, c.high, c.last)]
        rows.append([c.label, f"{c.count:,}", *figures, tag("td", spark, class_="spark")])
    head, first = (
        ["curve", "values", "lowest", "highest", "last", ""],
        0 if named else 1,
    )  # the title names a single one
    values: Html = join("nothing was logged")
    if rows:
        values = table(head[first:], [row[first:] for row in rows], numeric=range(1 - first, 5 - first))
    summary = tag("summary", f"values{f' ({chart.unit})' if chart.unit else ''}")
    return tag(
        "figure", tag("figcaption", tag("h3", chart.title), log), tag("div", keys, class_="legend") if named else None,
        tag("div", class_="canvas"), tag("p", note + chart.note, class_="quiet") if note + chart.note else None,
        tag("details", summary, values, class_="values", open=True),  # which the page's script folds
        class_="card chart wide" if chart.wide else "card chart", data_key=chart.key,
    )  # fmt: skip


# all charts


def charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """Return all charts of the page's run and those it is compared with that have data, and always that of the loss."""
    several = len(runs) > 1
    buckets = max(100, min(1000, _POINTS // (20 * len(runs))))
    drawn = [_loss_chart(runs, buckets)]
    records = [r for run in runs for r in run.history.valid.values()]
    of_validations = []  # further terms (BERT's order loss), accuracy
    for place, name in enumerate(
        dict.fromkeys(str(key) for r in records for key in r if key not in _OF_EVERY_VALIDATION)
    ):
        curves = [_series(run.history, i, "valid", name, run.name, buckets // 4) for i, run in enumerate(runs)]
        words, kind = name.replace("_", " "), "percent" if accuracies({name: None}) else "loss"
        unit, curves = "nats" if name.endswith("loss") else "", [c for c in curves if c.holds_values]
        of_validations.append(Chart(f"valid-{place}", f"Validation: {words}", words, kind, curves, unit=unit))
    drawn += [c for c in of_validations if c.curves][:_VALIDATION_CHARTS]
    levels, predicted = _memory_levels(runs)
    peaks = {str(r["peak"]) for run in runs for r in run.train[-1:] if r.get("peak")}
    peak = f"Relative to the peak of one device: {', '.join(sorted(peaks))}." if peaks else ""
    extras: dict[str, dict[str, Any]] = {"mfu": {"note": peak}, "memory_bytes": {"levels": levels, "note": predicted}}
    for name, title, axis, kind, more in _OF_TRAINING:
        labels = [run.name if several else title for run in runs]
        curves = [_series(run.history, i, "train", name, labels[i], buckets) for i, run in enumerate(runs)]
        curves = [c for c in curves if c.holds_values]
        if curves and not (name in _CONSTANT and all(c.low == c.high for c in curves)):
            options = {"key": name, **more, **extras.get(name, {})}
            drawn.append(Chart(title=title, axis=axis, kind=kind, curves=curves, **options))
    return drawn


def _loss_chart(runs: Sequence[RunFiles], buckets: int) -> Chart:
    # training loss, undone steps and validation loss; of several runs each has its colour
    curves = []
    for index, run in enumerate(runs):
        before, undone = f"{run.name}: " if len(runs) > 1 else "", run.history.undone
        curves.append(_series(run.history, index, "train", "loss", f"{before}training", buckets))
        discarded = Curve(f"{before}discarded by interruptions", index, "undone")
        for records in undone:
            steps, losses = [float(r["step"]) for r in records], [number(r.get("loss")) for r in records]
            part = curve("", index, "undone", steps, losses, max(buckets // 2 // len(undone), 4))
            discarded.count += part.count
            discarded.x += [*part.x, part.x[-1]]
            discarded.y += [*part.y, math.nan]
        if finite := [v for v in discarded.y if math.isfinite(v)]:
            discarded.low, discarded.high, discarded.last = min(finite), max(finite), finite[-1]
        valid = _series(run.history, index, "valid", "loss", f"{before}validation", buckets // 4)
        valid.look = valid.look if len(runs) > 1 else 1
        curves += [discarded, valid]
    notes = []
    if any(run.history.resumed for run in runs):
        notes.append("Dotted lines: training resumed from a checkpoint.")
    if any(run.history.undone for run in runs):
        same = "where grey lies on the line, the repeated steps had the same loss"
        notes.append(f"Grey: steps discarded by an interruption; {same}.")
    curves = [c for c in curves if c.count]
    return Chart("loss", "Loss", "loss", "loss", curves, unit="nats", wide=True, note=" ".join(notes))


def _memory_levels(runs: Sequence[RunFiles]) -> tuple[list[tuple[float, str]], str]:
    # the predicted memory as a level of the chart, and a sentence about it; neither when runs are compared
    last = next(reversed(runs[0].of_kind("prediction")), None) if len(runs) == 1 else None
    if last is None:
        return [], ""
    before, predicted = number(last.get("before_model_bytes")), number(last.get("predicted_bytes"))
    level, words = predicted, f"{show(predicted, 'bytes')} for tensors"
    if before > 0:
        level = before + predicted
        words += f", above the {show(before, 'bytes')} that the program held before the model was built"
    return [(level, f"predicted: {show(level, 'bytes')}")], f"Predicted: {words}."


def axis_map(run: RunFiles) -> dict[str, list[float]]:
    """Return knots of the map from steps to tokens and to minutes of training."""
    records = [r for r in run.train if math.isfinite(number(r.get("consumed_tokens")))]
    every = max(1, math.ceil(len(records) / _KNOTS))
    knots = records[::every] + (records[-1:] if records and (len(records) - 1) % every else [])
    return {
        "step": [float(r["step"]) for r in knots],
        "tokens": [number(r["consumed_tokens"]) for r in knots],
        "time": [round(float(r["minutes"]), 4) for r in knots],
    }
