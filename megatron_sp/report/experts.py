"""Section about the load of experts: a picture over layers and steps, with curves of the whole model among the others.

A cell is the largest load of an expert of the layer in the logged steps of its column, as a multiple of the mean load: 1 is even, the
number of experts over k is a layer whose tokens all take the same ones. Steps are put together where there are more than columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_sp.report.html import Html, show, tag
from megatron_sp.report.reading import RunFiles
from megatron_sp.report.run_history import Record, number
from megatron_sp.report.sections import Section, card, quiet, section

_COLUMNS, _LAYERS = 120, 256
_CELL, _ROW, _LEFT, _BELOW = 10, 10, 60, 24


def experts_section(run: RunFiles) -> Section | None:
    """Return the section; None if the run has no experts."""
    records = [record for record in run.history.train.values() if _loads(record)]
    if not records:
        return None
    last = records[-1]
    largest, idle = number(last.get("expert_load_max")), number(last.get("experts_idle"))
    lead = (
        f"At step {last['step']:,} the busiest expert had {show(largest, 'loss')} of the mean load of its layer, and"
        f" {show(idle, 'count')} experts had no token."
    )
    columns = _columns(records)
    values = [value for column in columns for value in column[2] if math.isfinite(value)]
    high = max([*values, 1.0])
    note = quiet(f"White: the mean load. Dark: {show(high, 'loss')} of it. {len(records):,} logged steps in {len(columns):,} columns.")
    return section("experts", "Load of experts", card("Largest load by layer", tag("p", lead), _picture(columns, high), note))


def _loads(record: Record) -> list[float]:
    """Return the largest load of each layer in a record; nothing if it has none, or something else in their place."""
    found = record.get("expert_load_max_by_layer")
    return [number(value) for value in found[:_LAYERS]] if isinstance(found, list) else []


def _columns(records: Sequence[Record]) -> list[tuple[int, int, list[float]]]:
    """Return (first step, last step, largest load of each layer) of each column."""
    count = min(_COLUMNS, len(records))
    found = []
    for i in range(count):
        part = records[i * len(records) // count : (i + 1) * len(records) // count]
        layers = max(len(_loads(record)) for record in part)
        loads = [
            [value for record in part for value in _loads(record)[layer : layer + 1] if math.isfinite(value)] for layer in range(layers)
        ]
        found.append((int(number(part[0]["step"])), int(number(part[-1]["step"])), [max(of_layer, default=math.nan) for of_layer in loads]))
    return found


def _picture(columns: Sequence[tuple[int, int, list[float]]], high: float) -> Html:
    """Draw a cell for each layer and column, the first layer at the bottom."""
    layers = max(len(loads) for _, _, loads in columns)
    width, height = _LEFT + _CELL * len(columns), _ROW * layers + _BELOW
    cells = []
    for index, (first, last, loads) in enumerate(columns):
        steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        for layer, value in enumerate(loads):
            if not math.isfinite(value):
                continue
            share = 0.0 if high <= 1 else min(1.0, max(0.0, (value - 1) / (high - 1)))
            title = tag("title", f"{steps}, layer {layer + 1} with experts: {value:.2f} of the mean")
            at = {"x": _LEFT + _CELL * index, "y": _ROW * (layers - 1 - layer), "width": _CELL, "height": _ROW}
            cells.append(tag("rect", title, fill="var(--c1)", fill_opacity=f"{share:.3f}", **at))
    every = max(1, math.ceil(layers / 12))
    words = [
        tag("text", f"layer {layer + 1}", x=_LEFT - 6, y=_ROW * (layers - layer) - 2, text_anchor="end", class_="axis")
        for layer in range(0, layers, every)
    ]
    ends = [(0, "start", columns[0][0]), (len(columns), "end", columns[-1][1])]
    words += [
        tag("text", f"{step:,}", x=_LEFT + _CELL * at, y=height - 8, text_anchor=anchor, class_="axis")
        for at, anchor, step in ends[: 1 if len(columns) == 1 else 2]
    ]
    label = f"largest load of an expert by layer ({layers}) and step"
    return tag("svg", cells, words, viewBox=f"0 0 {width} {height}", role="img", aria_label=label, class_="loads")
