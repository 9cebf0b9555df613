"""When the ranks of a pipeline computed what in a step, and when they would have, waiting for each other alone."""

# measured   begin and end of each action on each rank (``pipeline.Timeline``), on one time axis
# planned    the same schedule replayed (``pipeline_plan.py``), each action as long as those of its kind, stage and
#            slice took on average in that step, and messages free
#
# Both have the same work; the measured one is longer by messages, by the host, and by actions that took longer than
# others.
#
# Each rank has times of its own clock since the start of its step. All ranks start together: a step with a pipeline
# begins with a comparison of what they have read (``sequences.py``), and the recorder with its end, at which on a GPU
# nothing is queued (the recorded step before has settled). What is left of a difference is corrected by messages:
# none has arrived before it was sent (``clock_shifts``).

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from megatron_sp.comm.recorder import StepTimes
from megatron_sp.parallel.pipeline_plan import Action, PipelinePlan, replay
from megatron_sp.utils.markup import svg


class Box(NamedTuple):
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timetable:
    """Actions of a step."""

    rows: tuple[tuple[Box, ...], ...]  # of each pipeline rank, in order; times since the first of them began

    @property
    def seconds(self) -> float:
        """Time from the begin of the first action to the end of the last."""
        return max((box.end for row in self.rows for box in row), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of this time in which the ranks wait."""
        busy = sum(box.end - box.begin for row in self.rows for box in row)
        return 1 - busy / (self.seconds * len(self.rows)) if self.seconds else 0.0


@dataclass(frozen=True)
class RankTimes:
    """Times of a rank in a step, in seconds of its own clock."""

    actions: list[Box]  # in order
    sent: dict[str, float]  # when each message was sent, by the action that made it
    # when each message was there at the latest, and how long the rank waited for it until then
    received: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, step: StepTimes) -> RankTimes:
        """Take what a recorder knows of a step."""
        messages = [flight for flight in step.flights if flight.what.pipe is not None]
        return cls(
            [Box(*times) for times in step.actions],
            {flight.name: flight.begin for flight in messages if flight.what.op == "send"},
            {flight.name: (flight.end, flight.exposed) for flight in messages if flight.what.op == "receive"},
        )

    def as_json(self) -> dict[str, Any]:
        """Return the same in lists and dictionaries."""
        return {
            "actions": [[*box.action, box.begin, box.end] for box in self.actions],
            "sent": self.sent,
            "received": self.received,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> RankTimes:
        """Return what ``as_json`` was made of."""
        actions = [Box(Action(*row[:4]), *row[4:]) for row in record["actions"]]
        return cls(
            actions, record["sent"], {name: (end, exposed) for name, (end, exposed) in record["received"].items()}
        )


def clock_shifts(ranks: Sequence[RankTimes]) -> list[float]:
    """Return the least to add to each rank's times that lets no message arrive before it was sent."""
    # a message to the next rank says that its clock is at most so much behind, a message back at most so much ahead
    shifts = [0.0]
    for above, below in pairwise(ranks):
        down, up = _delays(above, below), _delays(below, above)
        least, most = max((-delay for delay in down), default=-math.inf), min(up, default=math.inf)
        shifts.append(shifts[-1] + max(least, min(0.0, most)))
    return shifts


def _delays(source: RankTimes, target: RankTimes) -> list[float]:
    return [end - source.sent[name] for name, (end, _) in target.received.items() if name in source.sent]


def measured(plan: PipelinePlan, ranks: Sequence[RankTimes]) -> Timetable:
    """Return the timetable that the ranks have measured."""
    rows = []
    for rank, shift in zip(ranks, clock_shifts(ranks), strict=True):
        row: list[Box] = []
        for action, begin, end in rank.actions:
            if action.kind == "W" and not plan.splits:
                row[-1] = row[-1]._replace(end=end + shift)
            else:
                row.append(Box(action, begin + shift, end + shift))
        rows.append(row)
    first = min((box.begin for row in rows for box in row), default=0.0)
    return Timetable(
        tuple(tuple(Box(action, begin - first, end - first) for action, begin, end in row) for row in rows)
    )


def planned(plan: PipelinePlan, took: Timetable) -> Timetable:
    """Return the replay of a plan, with the mean times of the measured actions."""
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for row in took.rows:
        for (kind, stage, _, part), begin, end in row:
            times[kind, stage, part].append(end - begin)
    mean = {key: fmean(values) for key, values in times.items()}
    # a W that has no box is part of its B
    replayed = replay(plan, lambda action: mean.get((action.kind, action.stage, action.slice), 0.0))
    start, stop = replayed.start, replayed.stop
    drawn = [[action for action in actions if plan.splits or action.kind != "W"] for actions in plan.actions]
    return Timetable(tuple(tuple(Box(action, start[action], stop[action]) for action in actions) for actions in drawn))


def waits_for_messages(ranks: Sequence[RankTimes]) -> tuple[float, float]:
    """Return the seconds that ranks waited for what had not been sent, and for messages under way."""
    shifts = clock_shifts(ranks)
    sent = {name: at + shift for rank, shift in zip(ranks, shifts, strict=True) for name, at in rank.sent.items()}
    before = after = 0.0
    for rank, shift in zip(ranks, shifts, strict=True):
        for name, (end, exposed) in rank.received.items():
            # a sender's clock may be known less well than a message is short
            idle = min(exposed, max(0.0, sent[name] - (end + shift - exposed)))
            before, after = before + idle, after + exposed - idle
    return before, after


COLUMNS = 48  # of a rank's row on the console
_LEFT, _RIGHT, _ROW, _LANE = 64, 16, 30, 24  # pixels
_NARROWEST, _WIDEST, _LETTER = 840, 12_000, 6.5
# after Okabe and Ito, whose colours colour-blind readers can tell apart, each a background for black letters; lighter:
# a rank's later stages
_STYLE = """
  .in { font: 11px sans-serif; fill: #1b1f24; text-anchor: middle }
  .F { fill: #56b4e9 } .B { fill: #2eb88f } .W { fill: #e69f00 }
  .f { fill: #b4def6 } .b { fill: #a3dfcd } .w { fill: #f6d68f }
"""


def summary(planned: Timetable, measured: Timetable) -> str:
    """Return a line: the time of the passes, that of the replay, their ratio, the bubbles."""
    ratio = f"{measured.seconds / planned.seconds:.3f} of " if planned.seconds else ""
    return (
        f"passes of a step {1e3 * measured.seconds:.1f} ms, {ratio}the {1e3 * planned.seconds:.1f} ms of a replay with"
        f" the mean times of its actions; bubble {100 * measured.bubble:.1f} %, planned {100 * planned.bubble:.1f} %"
    )


def text_rows(planned: Timetable, measured: Timetable, columns: int = COLUMNS) -> list[str]:
    """Return each rank's planned and measured row, of so many characters."""
    longest = max(planned.seconds, measured.seconds)
    kinds = {name[0] for row in planned.rows for name in _names(row)}
    upper, lower = (", ".join(kind for kind in letters if kind in kinds) for letters in ("FBW", "fbw"))
    key = f"{upper} with micro-batch; {f'{lower} of later stages; ' if lower else ''}dots are waits"
    lines = [f"  rank  {'planned':{columns}s}  measured ({key})"]
    for rank, (of_plan, of_run) in enumerate(zip(planned.rows, measured.rows, strict=True)):
        lines.append(f"  {rank:4d}  {_text_row(of_plan, longest, columns)}  {_text_row(of_run, longest, columns)}")
    return lines


def _text_row(row: Sequence[Box], longest: float, columns: int) -> str:
    # a row of characters: each column is the box that has most of it, or a dot if none has half
    width = longest / columns if longest else 1.0
    names, owners = _names(row), list[int | None]()
    for column in range(columns):
        begin, end = column * width, (column + 1) * width
        shares = [max(0.0, min(end, box.end) - max(begin, box.begin)) for box in row]
        most = max(range(len(row)), key=lambda i: shares[i], default=None)
        owners.append(most if most is not None and sum(shares) >= width / 2 else None)
    text, column = "", 0
    while column < columns:
        owner, length = owners[column], 1
        while column + length < columns and owners[column + length] == owner:
            length += 1
        name = "" if owner is None else names[owner] if len(names[owner]) <= length else names[owner][0]
        text += name.ljust(length, "." if owner is None else "-")
        column += length
    return text


def _names(row: Sequence[Box]) -> list[str]:
    # the name of each box of a rank: its kind, in small letters in all stages but the first, micro-batch and slice
    first, names = min((box.action.stage for box in row), default=0), []
    for action, _, _ in row:
        kind = action.kind if action.stage == first else action.kind.lower()
        names.append(f"{kind}{action.micro_batch}" + (f".{action.slice}" if action.slice else ""))
    return names


def pipeline_svg(planned: Timetable, measured: Timetable, title: str) -> str:
    """Return the picture as an SVG document: the plan, below it the run, on one time axis."""
    # as wide as the names of half of the boxes need, up to some screens; narrower boxes have their number or nothing
    longest = max(planned.seconds, measured.seconds)
    needs = [
        (len(name) * _LETTER + 4) / (box.end - box.begin)
        for row in planned.rows for box, name in zip(row, _names(row), strict=True) if box.end > box.begin
    ]  # fmt: skip
    wanted = median(needs) * longest if needs else 0.0
    scale = min(_WIDEST, max(_NARROWEST, wanted)) / longest if longest else 0.0
    lanes, ranks = longest * scale, len(planned.rows)
    width, top = round(_LEFT + lanes + _RIGHT), 98
    second = top + ranks * _ROW + 48
    height = second + ranks * _ROW + 12
    panels = [*_panel("planned", planned, top, lanes, scale), *_panel("measured", measured, second, lanes, scale)]
    return svg(width, height, title, summary(planned, measured), [*_key(planned), *panels], style=_STYLE, sized=True)


def _key(planned: Timetable) -> list[str]:
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
            x, width = _LEFT + box.begin * scale, (box.end - box.begin) * scale
            about = f"{box.action}: {1e3 * box.begin:.2f} to {1e3 * box.end:.2f} ms"
            fits = next((text for text in (label, label[1:]) if width >= len(text) * _LETTER + 2), "")
            inside = f'<text class="in" x="{x + width / 2:.1f}" y="{y + 16}">{fits}</text>' if fits else ""
            shown = max(0.4, width - 0.6)  # a line of the lane stays between neighbours
            rect = f'<rect class="{label[0]}" x="{x:.2f}" y="{y}" width="{shown:.2f}" height="{_LANE}"/>'
            parts.append(f"<g><title>{about}</title>{rect}{inside}</g>")
    return [*parts, "</g>"]


def _round_step(least: float) -> float:
    # the smallest of 1, 2 or 5 times a power of ten that is not below ``least``
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
