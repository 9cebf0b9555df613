"""Picture of --report-overlap: a rank's computation, and below it the exchanges, for two layers forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.comm.recorder import WAIT, CollectiveTimes, Direction, Span, StepTimes
from megatron_sp.ops import availability

LAYERS_SHOWN = 2
# Okabe and Ito's colours, which colour-blind readers can tell apart: blues and greens compute, reds move
COLOURS = {
    "projection": "#0072B2", "attention": "#009E73", "output projection": "#56B4E9", "mlp": "#E69F00", "other": "#C9C9C9", WAIT: "#FFFFFF",
    "to heads": "#CC79A7", "to positions": "#882255", "context parallel": "#F0E442", "tensor parallel": "#D55E00",
    "pipeline": "#7A5195", "experts": "#B8860B", "expert parallel": "#EE6677",
}  # fmt: skip
WORDS = {
    "projection": "QKV projection", "other": "norms, dropout, rest", "mlp": "MLP", WAIT: "waiting (exposed)",
    "to heads": "Ulysses: to heads", "to positions": "Ulysses: back to positions",
    "context parallel": "context-parallel exchange", "tensor parallel": "tensor-parallel collective",
    "pipeline": "message between stages", "experts": "experts", "expert parallel": "expert-parallel exchange",
}  # fmt: skip
_TO_HEADS = ("qkv", "q", "k", "v", "d out")
_WIDE_ENOUGH = 0.011  # share of the window that a letter needs


class Window(NamedTuple):
    """A time window of a step, in seconds, and the spans and collectives in it."""

    direction: Direction
    begin: float
    end: float
    spans: list[Span]
    flights: list[CollectiveTimes]


def in_lanes(flights: Iterable[CollectiveTimes]) -> list[tuple[int, CollectiveTimes]]:
    """Return each collective with the first lane that is free at that time."""
    free_from: list[float] = []
    placed = []
    for flight in sorted(flights, key=lambda f: f.begin):
        lane = next((i for i, free in enumerate(free_from) if free <= flight.begin), len(free_from))
        free_from[lane:lane + 1] = [flight.end]  # fmt: skip
        placed.append((lane, flight))
    return placed


def windows(step: StepTimes) -> list[Window]:
    """Return the windows of the first forward and the first backward pass of two layers in the middle of the model."""
    layers = sorted({span.layer for span in step.spans if span.layer is not None})
    first = max(0, (len(layers) - LAYERS_SHOWN) // 2)
    shown = set(layers[first : first + LAYERS_SHOWN])
    found = []
    for direction in ("forward", "backward"):
        of_pass = _first_pass(step.spans, direction)
        inside = [span for span in of_pass if span.layer in shown]
        if not inside:
            continue
        begin, end = min(span.begin for span in inside), max(span.end for span in inside)
        spans = [span for span in of_pass if span.end > begin and span.begin < end]
        flights = [flight for flight in step.flights if flight.end > begin and flight.begin < end]
        found.append(Window(direction, begin, end, spans, flights))
    return found


def _first_pass(spans: Sequence[Span], direction: Direction) -> list[Span]:
    """Return the spans of the first micro-batch's pass."""
    start = next((i for i, span in enumerate(spans) if span.direction == direction), len(spans))
    end = next((i for i in range(start, len(spans)) if spans[i].direction != direction), len(spans))
    return list(spans[start:end])


def draw_steps(step: StepTimes, path: Path, titles: Mapping[str, str]) -> None:
    """Write the picture of a step.

    Args:
        step: step to show.
        path: path of the PNG file.
        titles: title of each direction.
    Raises:
        OSError: the file cannot be written.
    """
    package = availability.load("matplotlib")
    figures = importlib.import_module(f"{package.__name__}.figure")  # not pyplot, which needs a display and keeps global state
    patches = importlib.import_module(f"{package.__name__}.patches")
    parts = windows(step)
    heights = [1.2 + max(1, _num_lanes(part)) for part in parts]
    figure = figures.Figure(figsize=(13, 1.5 + 0.62 * sum(heights) + 0.45 * len(parts)), layout="constrained")
    figure.suptitle(f"exchanges under computation, rank 0 (one step: {1e3 * step.seconds:.1f} ms)", fontsize=12, fontweight="bold")
    used: dict[str, None] = {}
    if parts:
        panels = figure.subplots(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axes, part in zip(panels, parts, strict=True):
            _draw(axes, part, titles.get(part.direction, ""), used)
    keys = [patches.Patch(label=WORDS.get(kind, kind), **_look(kind)) for kind in COLOURS if kind in used]
    if keys:
        figure.legend(handles=keys, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _num_lanes(part: Window) -> int:
    return sum(1 + max(lane for lane, _ in placed) for _, placed in _by_axis(part))


def _by_axis(part: Window) -> list[tuple[str, list[tuple[int, CollectiveTimes]]]]:
    axes = (("sp", "ulysses"), ("cp", "context"), ("ep", "experts"), ("tp", "tensor"), ("pp", "pipeline"))
    placed = [(name, in_lanes([f for f in part.flights if f.what.axis == axis])) for axis, name in axes]
    return [(name, lanes) for name, lanes in placed if lanes]


def _draw(axes: Any, part: Window, title: str, used: dict[str, None]) -> None:
    width = part.end - part.begin
    for span in part.spans:
        kind = span.label if span.label in COLOURS else "other"
        _bar(axes, 0.0, span.begin, span.end, part, kind, "" if kind in (WAIT, "other") else WORDS.get(kind, kind), used)
    ticks, y = {0.0: "compute"}, 1.15
    for name, placed in _by_axis(part):
        ticks[y] = f"{name} exchanges"
        for lane, flight in placed:
            _bar(axes, y + lane, flight.begin, flight.end, part, _kind(flight), flight.name, used)
        y += 1 + max(lane for lane, _ in placed)
    layers = [span.layer for span in part.spans if span.layer is not None]
    for layer in dict.fromkeys(layers):
        begins = max(part.begin, min(span.begin for span in part.spans if span.layer == layer))
        axes.axvline(1e3 * (begins - part.begin), color="#444444", linewidth=0.9, linestyle=(0, (3, 2)), zorder=4)
        axes.annotate(f"layer {layer}", (1e3 * (begins - part.begin), -0.5), (3, 2), textcoords="offset points", fontsize=8.5, va="bottom")
    axes.set_xlim(0, 1e3 * width)
    axes.set_ylim(y - 0.45, -0.85)  # the first line on top
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.set_xlabel(f"ms ({part.direction} pass)", fontsize=9)
    axes.set_title(f"{part.direction}: {title}", loc="left", fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _kind(flight: CollectiveTimes) -> str:
    if flight.what.axis == "sp":
        return "to heads" if flight.name in _TO_HEADS else "to positions"
    return {"cp": "context parallel", "ep": "expert parallel", "pp": "pipeline", "tp": "tensor parallel"}[flight.what.axis]


def _bar(axes: Any, y: float, begin: float, end: float, part: Window, kind: str, text: str, used: dict[str, None]) -> None:
    used[kind] = None
    begin, end = max(begin, part.begin), min(end, part.end)
    left, width, window = 1e3 * (begin - part.begin), 1e3 * (end - begin), 1e3 * (part.end - part.begin)
    axes.barh(y, width, left=left, height=0.8, **_look(kind))
    if text and width > window * _WIDE_ENOUGH * 0.62 * len(text):
        dark = kind in ("projection", "attention", "to positions", "tensor parallel", "pipeline")
        axes.text(left + width / 2, y, text, ha="center", va="center", fontsize=7.5, color="white" if dark else "black", clip_on=True)


def _look(kind: str) -> dict[str, Any]:
    look: dict[str, Any] = {"facecolor": COLOURS[kind], "edgecolor": "white", "linewidth": 0.4}
    return {**look, "edgecolor": "#CC0000", "hatch": "//////"} if kind == WAIT else look
