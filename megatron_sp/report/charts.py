"""Charts of a page: data for the page's script, which draws them, and frames with tables for readers without scripts.

A screen has about a thousand columns. With more points, each bucket of neighbours is reduced to its minimum and
maximum, so that no spike is lost, and its mean, from which the smoothed line is drawn. Values that are not finite leave
a gap and are listed separately.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_sp.report.reading import RunFiles
from megatron_sp.report.run_history import History, Record, accuracies, number
from megatron_sp.utils.format import show
from megatron_sp.utils.markup import Html, join, table, tag

# ----------------------------------------------------------------------------------------------------------------- bars


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return values as bars of text, with the lowest at the bottom and the highest at full height.

    Args:
        values: values in order; if there are more than ``width``, they are averaged in equal groups; non-finite ones
            leave a gap.
        width: maximum number of characters, at least 1.
    """
    if width < 1:
        raise ValueError(f"width ({width}) must be at least 1")
    columns = min(width, len(values))
    bounds = [i * len(values) // columns for i in range(columns + 1)] if columns else []
    means = [_mean(values[a:b]) for a, b in itertools.pairwise(bounds)]
    finite = [m for m in means if m is not None]
    if not finite:
        return " " * columns
    low, span = min(finite), max(finite) - min(finite)
    return "".join(
        " " if m is None else _BARS[round((m - low) / span * (len(_BARS) - 1)) if span else 0] for m in means
    )


def _mean(values: Sequence[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def bar(parts: Sequence[tuple[str, float, str]], whole: float, label: str) -> Html:
    """Return a horizontal bar.

    Args:
        parts: (class, amount, title) of its parts, from the left.
    """
    ends = list(itertools.accumulate((amount for _, amount, _ in parts), initial=0.0))
    whole = whole if math.isfinite(whole) and whole > 0 else 1.0
    rects = [
        tag(
            "rect",
            tag("title", words),
            x=f"{1000 * start / whole:.2f}",
            y=0,
            width=f"{1000 * amount / whole:.2f}",
            height=20,
            class_=kind,
        )
        for (kind, amount, words), start in zip(parts, ends, strict=False)
        if amount > 0
    ]
    return tag(
        "svg", rects, viewBox="0 0 1000 20", preserveAspectRatio="none", role="img", aria_label=label, class_="bar"
    )


# --------------------------------------------------------------------------------------------------------------- curves


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
        record: dict[str, Any] = {
            "n": self.label, "r": self.run, "k": self.look, "s": self.style, "x": _short(self.x), "y": _short(self.y),
        }  # fmt: skip
        if self.mean_x:
            record |= {"mx": _short(self.mean_x), "my": _short(self.mean_y)}
        return record | ({"bad": self.bad} if self.bad else {})


def curve(label: str, run: int, style: str, x: Sequence[float], values: Sequence[float], buckets: int) -> Curve:
    """Return a curve with at most two points (and possibly a gap) for each bucket, and the last point.

    Args:
        x, values: points in order; x must be finite.
    """
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
        _add_bucket(out, x[start:end], y[start:end])
    if out.x[-1] != x[-1]:  # a reader looks at the end first
        out.x.append(x[-1])
        out.y.append(y[-1])
    return out


def _add_bucket(out: Curve, x: Sequence[float], y: list[float]) -> None:
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
    return [
        None if not math.isfinite(v) else int(v) if v == int(v) and abs(v) < 1e15 else float(f"{v:.6g}") for v in values
    ]


# -------------------------------------------------------------------------------------------------------------- a chart


_SPARK_COLUMNS = 24


@dataclass
class Chart:
    """Contents of a chart."""

    key: str  # short unique key for ids
    title: str
    axis: str  # title of the value axis
    # kind of the values, for ``html.show``; bytes, seconds and percent bring units, which the axis title names
    kind: str
    curves: list[Curve]  # curves; without any points the chart says that there is no data
    unit: str = ""  # unit of the value axis, if the kind brings none; empty for a pure number
    levels: list[tuple[float, str]] = field(default_factory=list)  # horizontal lines (value, short label)
    from_zero: bool = False  # True if the axis includes zero
    noisy: bool = True  # True if a running mean is drawn over the single values
    wide: bool = False  # True for the whole width of the page
    note: str = ""  # a sentence below the chart

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
            "key": self.key, "kind": self.kind, "axis": self.axis, "unit": self.unit, "zero": self.from_zero,
            "noisy": self.noisy, "h": self.height, "curves": [c.to_json() for c in self.drawn],
            "levels": [[v, t] for v, t in self.levels if math.isfinite(v)],
        }  # fmt: skip


def figure(chart: Chart, *, several: bool) -> Html:
    """Return the frame that the page's script draws the chart in.

    Args:
        several: the page compares runs, so that a single curve has to be named too.
    """
    named = len(chart.drawn) > 1 or several
    log = tag(
        "button", "log", type="button", class_="log needs-script", aria_pressed="false",
        aria_label=f"logarithmic: {chart.title}",
    )  # fmt: skip
    bad = sum(c.num_bad for c in chart.drawn if any(t != "nan" for _, t in c.bad) or chart.key in ("loss", "grad_norm"))
    note = f"▾ {bad:,} {'value is' if bad == 1 else 'values are'} not finite (red marks). " if bad else ""
    return tag(
        "figure", tag("figcaption", tag("h3", chart.title), log), _legend(chart) if named else None,
        tag("div", class_="canvas"), tag("p", note + chart.note, class_="quiet") if note + chart.note else None,
        _values(chart, named=named), class_="card chart wide" if chart.wide else "card chart", data_key=chart.key,
    )  # fmt: skip


def _legend(chart: Chart) -> Html:
    keys = []
    for place, c in enumerate(chart.drawn):
        swatch = tag("span", class_=f"swatch c{c.look} {c.style} d{c.look if c.style == 'line' else 0}")
        keys.append(tag("button", swatch, c.label, type="button", aria_pressed="true", data_curve=place))
    return tag("div", keys, class_="legend")


def _values(chart: Chart, *, named: bool) -> Html:
    # a table of what the curves show; the page's script folds it
    head, rows = ["curve", "values", "lowest", "highest", "last", ""], []
    for c in chart.drawn:
        finite = [v for v in c.y if math.isfinite(v)]
        # a curve of discarded steps is several stretches, which one row of bars would join
        spark = sparkline(finite, _SPARK_COLUMNS) if c.style != "undone" and len(finite) > 1 else ""
        rows.append(
            [
                c.label,
                f"{c.count:,}",
                *(show(v, chart.kind) for v in (c.low, c.high, c.last)),
                tag("td", spark, class_="spark"),
            ]
        )
    first = 0 if named else 1  # the title names a single curve
    body = (
        table(head[first:], [row[first:] for row in rows], numeric=range(1 - first, 5 - first))
        if rows
        else join("nothing was logged")
    )
    unit = f" ({chart.unit})" if chart.unit else ""
    return tag("details", tag("summary", f"values{unit}"), body, class_="values", open=True)


# ----------------------------------------------------------------------------------------------------------- all charts


_POINTS = 24_000  # of all curves together: what keeps the page well below a megabyte
_VALIDATION_CHARTS = 8
_OF_EVERY_VALIDATION = ("kind", "time", "step", "loss", "loss_hex", "perplexity", "seconds", "minutes")
_KNOTS = 300  # of the map from steps to tokens and to time


def charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """Return all charts that have data, and always that of the loss.

    Args:
        runs: the run of the page, then those it is compared with.
    """
    several = len(runs) > 1
    buckets = max(100, min(1000, _POINTS // (20 * len(runs))))

    def one(key: str, title: str, axis: str, kind: str, field: str, **more: Any) -> Chart:
        curves = [
            _series(run.history, index, "train", field, run.name if several else title, buckets)
            for index, run in enumerate(runs)
        ]
        return Chart(key, title, axis, kind, [c for c in curves if _holds_values(c)], **more)

    loss = Chart(
        "loss", "Loss", "loss", "loss", _loss_curves(runs, buckets), unit="nats", wide=True, note=_loss_note(runs)
    )
    levels, predicted = _memory_levels(runs)
    others = [
        one("lr", "Learning rate", "learning rate", "plain", "lr", from_zero=True, noisy=False),
        one("grad_norm", "Gradient norm", "gradient norm", "plain", "grad_norm", from_zero=True, unit="L2"),
        one("tokens_per_s", "Throughput", "throughput", "si", "tokens_per_s", from_zero=True, unit="tokens/s"),
        one("mfu", "MFU", "share of the peak", "percent", "mfu", from_zero=True, note=_peak_note(runs)),
        one("step_s", "Time of a step", "time", "seconds", "step_s", from_zero=True),
        one(
            "memory",
            "Peak memory of rank 0",
            "memory",
            "bytes",
            "memory_bytes",
            from_zero=True,
            noisy=False,
            levels=levels,
            note=predicted,
        ),
        one("loss_scale", "Loss scale", "loss scale", "si", "loss_scale", from_zero=True, noisy=False),
        one(
            "global_batch_size",
            "Global batch size",
            "batch size",
            "count",
            "global_batch_size",
            from_zero=True,
            noisy=False,
            unit="sequences",
        ),
        one(
            "expert_load_max",
            "Largest load of an expert",
            "of the mean load",
            "plain",
            "expert_load_max",
            from_zero=True,
        ),
        one("experts_idle", "Experts without a token", "experts", "count", "experts_idle", from_zero=True, noisy=False),
        one("expert_entropy", "Entropy of the loads", "of that of even loads", "percent", "expert_entropy"),
        one("balance_loss", "Balance loss", "loss", "loss", "balance_loss"),
        one("z_loss", "z loss", "loss", "loss", "z_loss"),
        one("params_norm", "Norm of the parameters", "norm", "plain", "params_norm", unit="L2"),
        one(
            "num_zeros_in_grad",
            "Zeros in the gradients",
            "zeros",
            "si",
            "num_zeros_in_grad",
            from_zero=True,
            unit="elements",
        ),
    ]
    constant = ("loss_scale", "global_batch_size")  # worth a chart only when they change
    kept = [c for c in others if c.curves and not (c.key in constant and all(v.low == v.high for v in c.curves))]
    return [loss, *_validation_charts(runs, buckets), *kept]


def _validation_charts(runs: Sequence[RunFiles], buckets: int) -> list[Chart]:
    # the charts of validation metrics besides the loss: further terms (BERT's order loss), accuracy
    records = [r for run in runs for r in run.history.valid.values()]
    names = dict.fromkeys(str(key) for r in records for key in r if key not in _OF_EVERY_VALIDATION)
    drawn = []
    for place, name in enumerate(names):
        curves = [_series(run.history, index, "valid", name, run.name, buckets // 4) for index, run in enumerate(runs)]
        words, kind = name.replace("_", " "), "percent" if accuracies({name: None}) else "loss"
        unit = "nats" if name.endswith("loss") else ""
        drawn.append(
            Chart(
                f"valid-{place}",
                f"Validation: {words}",
                words,
                kind,
                [c for c in curves if _holds_values(c)],
                unit=unit,
            )
        )
    return [c for c in drawn if c.curves][:_VALIDATION_CHARTS]


def _holds_values(c: Curve) -> bool:
    return math.isfinite(c.last) or any(text != "nan" for _, text in c.bad)


def _series(history: History, index: int, kind: str, field: str, label: str, buckets: int) -> Curve:
    x, y = history.series(kind, field)
    return curve(label, index, "line" if kind == "train" else "points", x, y, buckets)


def _loss_curves(runs: Sequence[RunFiles], buckets: int) -> list[Curve]:
    # the curves of training loss, undone steps and validation loss; of several runs each has its colour
    curves = []
    for index, run in enumerate(runs):
        before = f"{run.name}: " if len(runs) > 1 else ""
        curves.append(_series(run.history, index, "train", "loss", f"{before}training", buckets))
        curves.append(_undone(run.history, index, f"{before}discarded by interruptions", buckets // 2))
        valid = _series(run.history, index, "valid", "loss", f"{before}validation", buckets // 4)
        valid.look = valid.look if len(runs) > 1 else 1
        curves.append(valid)
    return [c for c in curves if c.count]


def _undone(history: History, index: int, label: str, buckets: int) -> Curve:
    parts = []
    for records in history.undone:
        steps, losses = [float(r["step"]) for r in records], [number(r.get("loss")) for r in records]
        parts.append(curve(label, index, "undone", steps, losses, max(buckets // len(history.undone), 4)))
    whole = Curve(label, index, "undone", count=sum(part.count for part in parts))
    for part in parts:
        whole.x += [*part.x, part.x[-1]]
        whole.y += [*part.y, math.nan]
    drawn = [v for v in whole.y if math.isfinite(v)]
    if drawn:
        whole.low, whole.high, whole.last = min(drawn), max(drawn), drawn[-1]
    return whole


def _loss_note(runs: Sequence[RunFiles]) -> str:
    parts = []
    if any(run.history.resumed for run in runs):
        parts.append("Dotted lines: training resumed from a checkpoint.")
    if any(run.history.undone for run in runs):
        parts.append(
            "Grey: steps discarded by an interruption; where grey lies on the line, the repeated steps had the same"
            " loss."
        )
    return " ".join(parts)


def _peak_note(runs: Sequence[RunFiles]) -> str:
    names = {str(r["peak"]) for run in runs for r in run.train[-1:] if r.get("peak")}
    return f"Relative to the peak of one device: {', '.join(sorted(names))}." if names else ""


def _memory_levels(runs: Sequence[RunFiles]) -> tuple[list[tuple[float, str]], str]:
    # the predicted memory as a level of the chart, and a sentence about it; neither when runs are compared
    last = next(reversed(runs[0].of_kind("prediction")), None) if len(runs) == 1 else None
    if last is None:
        return [], ""
    before, predicted = number(last.get("before_model_bytes")), number(last.get("predicted_bytes"))
    if before > 0:
        words = (
            f"{show(predicted, 'bytes')} for tensors, above the {show(before, 'bytes')} that the program held before"
            " the model was built"
        )
        return [(before + predicted, f"predicted: {show(before + predicted, 'bytes')}")], f"Predicted: {words}."
    return [
        (predicted, f"predicted: {show(predicted, 'bytes')}")
    ], f"Predicted: {show(predicted, 'bytes')} for tensors."


def axis_map(run: RunFiles) -> dict[str, list[float]]:
    records = [r for r in run.train if math.isfinite(number(r.get("consumed_tokens")))]
    every = max(1, math.ceil(len(records) / _KNOTS))
    knots = records[::every] + (records[-1:] if records and (len(records) - 1) % every else [])
    what: dict[str, Callable[[Record], float]] = {
        "step": lambda r: float(r["step"]),
        "tokens": lambda r: number(r["consumed_tokens"]),
        "time": lambda r: round(float(r["minutes"]), 4),
    }
    return {name: [of(r) for r in knots] for name, of in what.items()}
