"""Picture of a pipeline's step: planned and measured, a row of boxes for each rank, as text and as SVG.

F0-F1-..B0---F2-B1---     F forward, B backward (with a W: the gradient of the input), W gradients of weights, with the number of
..F0-B0---F1-B1---..      the micro-batch and, of slices after the first, the slice; dots and gaps are waits
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from megatron_sp.parallel.pipeline_plan import Action
from megatron_sp.training.pipeline_times import Box, Timetable
from megatron_sp.utils.markup import svg

COLUMNS = 48  # of a rank's row on the console
_LEFT, _RIGHT, _ROW, _LANE = 64, 16, 30, 24  # pixels
_NARROWEST, _WIDEST, _LETTER = 840, 12_000, 6.5
# after Okabe and Ito, whose colours colour-blind readers can tell apart, each a background for black letters; lighter: a rank's later
# stages
_STYLE = """
  .in { font: 11px sans-serif; fill: #1b1f24; text-anchor: middle }
  .F { fill: #56b4e9 } .B { fill: #2eb88f } .W { fill: #e69f00 } .f { fill: #b4def6 } .b { fill: #a3dfcd } .w { fill: #f6d68f }
"""


def summary(planned: Timetable, measured: Timetable) -> str:
    """Return one line: the time of the passes of a step, that of the replay, their ratio, and the bubbles."""
    ratio = f"{measured.seconds / planned.seconds:.3f} of " if planned.seconds else ""
    return (
        f"passes of a step {1e3 * measured.seconds:.1f} ms, {ratio}the {1e3 * planned.seconds:.1f} ms of a replay with the mean times"
        f" of its actions; bubble {100 * measured.bubble:.1f} %, planned {100 * planned.bubble:.1f} %"
    )


def text_rows(planned: Timetable, measured: Timetable, columns: int = COLUMNS) -> list[str]:
    """Return a line for each rank: its planned row and its measured row, on the same scale, each of so many characters."""
    longest = max(planned.seconds, measured.seconds)
    kinds = {name[0] for row in planned.rows for name in _names(row)}
    upper, lower = (", ".join(kind for kind in letters if kind in kinds) for letters in ("FBW", "fbw"))
    key = f"{upper} with micro-batch; {f'{lower} of later stages; ' if lower else ''}dots are waits"
    lines = [f"  rank  {'planned':{columns}s}  measured ({key})"]
    for rank, (of_plan, of_run) in enumerate(zip(planned.rows, measured.rows, strict=True)):
        lines.append(f"  {rank:4d}  {_text_row(of_plan, longest, columns)}  {_text_row(of_run, longest, columns)}")
    return lines


def _text_row(row: Sequence[Box], longest: float, columns: int) -> str:
    """Return a row of characters: each column is the box that has most of it, or a dot if none has half."""
    width = longest / columns if longest else 1.0
    names, owners = _names(row), list[int | None]()
    for column in range(columns):
        begin, end = column * width, (column + 1) * width
        shares = [max(0.0, min(end, box.end) - max(begin, box.begin)) for box in row]
        most = max(range(len(row)), key=lambda i: shares[i], default=None)
        owners.append(most if most is not None and sum(shares) >= width / 2 else None)
    found, column = "", 0
    while column < columns:
        owner, length = owners[column], 1
        while column + length < columns and owners[column + length] == owner:
            length += 1
        name = "" if owner is None else names[owner] if len(names[owner]) <= length else names[owner][0]
        found += name.ljust(length, "." if owner is None else "-")
        column += length
    return found


def _names(row: Sequence[Box]) -> list[str]:
    """Return the name of each box of a rank: its kind, in small letters in all stages but the first, micro-batch and slice."""
    first = min((box.action.stage for box in row), default=0)
    return [_name(box.action, later=box.action.stage != first) for box in row]


def _name(action: Action, *, later: bool) -> str:
    kind = action.kind.lower() if later else action.kind
    return f"{kind}{action.micro_batch}" + (f".{action.slice}" if action.slice else "")


def pipeline_svg(planned: Timetable, measured: Timetable, title: str) -> str:
    """Return the picture as an SVG document: the plan, below it the run, on one time axis.

    It is as wide as the names of half of the boxes need, up to some screens; narrower boxes have their number alone, or nothing. Each
    box says under the pointer what it is.

    Args:
        planned, measured: of the same ranks.
        title: first line.
    """
    longest = max(planned.seconds, measured.seconds)
    scale = _pixels_per_second(planned, longest)
    lanes, ranks = longest * scale, len(planned.rows)
    width, top = round(_LEFT + lanes + _RIGHT), 98
    second = top + ranks * _ROW + 48
    height = second + ranks * _ROW + 12
    panels = [*_panel("planned", planned, top, lanes, scale), *_panel("measured", measured, second, lanes, scale)]
    return svg(width, height, title, summary(planned, measured), [*_key(planned), *panels], style=_STYLE, sized=True)


def _pixels_per_second(planned: Timetable, longest: float) -> float:
    """Return the scale at which half of the boxes hold their names, within limits."""
    needs = [
        (len(name) * _LETTER + 4) / (box.end - box.begin)
        for row in planned.rows for box, name in zip(row, _names(row), strict=True) if box.end > box.begin
    ]  # fmt: skip
    wanted = median(needs) * longest if needs else 0.0
    return min(_WIDEST, max(_NARROWEST, wanted)) / longest if longest else 0.0


def _key(planned: Timetable) -> list[str]:
    """Draw what the colours mean."""
    kinds: set[str] = {box.action.kind for row in planned.rows for box in row}
    words = {"F": "forward", "B": "gradient of the input" if "W" in kinds else "backward", "W": "gradients of weights"}
    several = any(len({box.action.stage for box in row}) > 1 for row in planned.rows)
    shown = [(kind, f"{kind}: {word}") for kind, word in words.items() if kind in kinds]
    if several:
        shown.append(("f", "f: in a rank's later stages"))
    parts, x = [], 16.0
    for kind, word in shown:
        parts.append(f'<rect class="{kind}" x="{x:g}" y="56" width="12" height="12"/>')
        parts.append(f'<text class="text" x="{x + 18:g}" y="66">{word}</text>')
        x += 18 + 7 * len(word) + 16
    return parts


def _panel(name: str, table: Timetable, top: int, lanes: float, scale: float) -> list[str]:
    """Draw the rows of a timetable, with the time in ms above them."""
    bottom = top + len(table.rows) * _ROW
    parts = [f'<g id="{name}">', f'<text class="text" x="16" y="{top - 8}">{name}</text>']
    step = _round_step(110 / scale) if scale else 0.0
    for number in range(int(lanes / scale / step + 1e-9) + 1 if step else 0):
        x = _LEFT + number * step * scale
        parts.append(f'<path class="tick" d="M{x:.1f} {top - 4}V{bottom}"/>')
        if number:
            parts.append(f'<text class="text" x="{x + 3:.1f}" y="{top - 8}">{1e3 * number * step:g} ms</text>')
    for rank, row in enumerate(table.rows):
        y = top + rank * _ROW
        parts.append(f'<text class="text" x="16" y="{y + 16}">rank {rank}</text>')
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{lanes:.1f}" height="{_LANE}"/>')
        for box, label in zip(row, _names(row), strict=True):
            parts.append(_draw(box, label, y, scale))
    return [*parts, "</g>"]


def _draw(box: Box, name: str, y: int, scale: float) -> str:
    x, width = _LEFT + box.begin * scale, (box.end - box.begin) * scale
    about = f"{box.action}: {1e3 * box.begin:.2f} to {1e3 * box.end:.2f} ms"
    fits = next((text for text in (name, name[1:]) if width >= len(text) * _LETTER + 2), "")
    inside = f'<text class="in" x="{x + width / 2:.1f}" y="{y + 16}">{fits}</text>' if fits else ""
    # a line of the lane stays between neighbours
    shown = max(0.4, width - 0.6)
    return f'<g><title>{about}</title><rect class="{name[0]}" x="{x:.2f}" y="{y}" width="{shown:.2f}" height="{_LANE}"/>{inside}</g>'


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is not below ``least``."""
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
