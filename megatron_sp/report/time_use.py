"""Breakdown of a run's time from the times in its records: activity of each attempt, discarded steps, slow steps.

A record ends a span: it is written at the end of an activity, with its duration. Time that no record covers is "other".
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from megatron_sp.report.run_history import Record, number

KINDS = ("steps", "lost", "valid", "save", "start", "other", "down")
SLOW = 2.0  # times the median of the steps around
_AROUND = 50  # logged steps
_PAUSE_S = 1e-3  # less between two records counts with the second


@dataclass(frozen=True)
class Span:
    """An activity from ``begin`` to ``end`` (seconds since the epoch)."""

    kind: str
    begin: float
    end: float
    step: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Attempt:
    """One start of the program and its activity."""

    start: Record  # its ``start`` record; {} if the file begins without one
    begin: float
    first_step: int
    last_step: int
    train: list[Record] = field(default_factory=list)  # its training records, in order
    spans: list[Span] = field(default_factory=list)
    end: float = 0.0  # time of its last record


@dataclass(frozen=True)
class SlowStep:
    """A logged interval with slow steps."""

    attempt: int
    step: int
    seconds: float  # seconds of one step
    usual: float  # median seconds of a step nearby
    lost_s: float  # seconds that the interval took in addition
    is_first: bool


def attempts(records: Iterable[Record]) -> list[Attempt]:
    """Divide the records into attempts, one for each start; records without a time are skipped."""
    # a background save is moved to where training went on
    in_order: list[Record] = []
    for record in records:
        now, place = number(record.get("time")), len(in_order)
        if not math.isfinite(now):
            continue
        while "background_s" in record and place > 0 and in_order[place - 1]["kind"] != "start":
            if number(in_order[place - 1]["time"]) <= now:
                break
            place -= 1
        in_order.insert(place, record)
    tries: list[Attempt] = []
    for record in in_order:
        now, step, is_start = number(record["time"]), record["step"], record["kind"] == "start"
        if is_start or not tries:  # a file may begin without a start
            took = number(record.get("launch_to_ready_s")) if is_start else 0.0
            begin = max(now - took if 0 < took < math.inf else now, tries[-1].end if tries else -math.inf)
            first = step if is_start else max(step - 1, 0)
            spans = [Span("start", begin, now, first)] if begin < now else []
            tries.append(Attempt(record if is_start else {}, begin, first, first, spans=spans, end=now))
        if not is_start:
            _add(tries[-1], record, now)
        tries[-1].end = max(tries[-1].end, now)
        tries[-1].last_step = max(tries[-1].last_step, step)
    kept: list[Attempt] = []
    for attempt in tries:  # but for calls of a finished run, which did nothing
        is_over = attempt.first_step >= number(attempt.start.get("train_iters"))
        if not kept or not is_over or any(span.kind != "start" for span in attempt.spans):
            kept.append(attempt)
    last_kept = math.inf
    for attempt in reversed(kept):
        for place, s in enumerate(attempt.spans):
            if s.kind == "steps" and s.step > last_kept:
                attempt.spans[place] = Span("lost", s.begin, s.end, s.step)
        last_kept = min(last_kept, attempt.first_step)
    return kept


def _add(attempt: Attempt, record: Record, now: float) -> None:
    kind, step = record["kind"], record["step"]
    if kind == "train":
        before = attempt.train[-1]["step"] if attempt.train else attempt.first_step
        took = number(record.get("step_s")) * max(step - before, 1)
        attempt.train.append(record)
    else:
        took = number(record.get("seconds"))
    last = attempt.spans[-1].end if attempt.spans else attempt.begin
    begin = max(now - took, last) if took > 0 else now
    if begin - last > _PAUSE_S:
        attempt.spans.append(Span("other", last, begin, step))
    elif begin > last:
        begin = last
    word = {"train": "steps", "valid": "valid", "test": "valid", "save": "save"}.get(kind, "other")
    if now > begin:
        attempt.spans.append(Span(word, begin, now, step))


def time_line(tries: Sequence[Attempt]) -> list[Span]:
    """Return all spans in order, including those in which nothing ran although the run was not complete."""
    spans: list[Span] = []
    is_complete = False  # then the time until somebody starts the run again is no interruption
    for attempt in tries:
        if spans and not is_complete and attempt.begin > spans[-1].end:
            spans.append(Span("down", spans[-1].end, attempt.begin, attempt.first_step))
        spans += attempt.spans
        is_complete = attempt.last_step >= number(attempt.start.get("train_iters"))
    return spans


def totals(spans: Iterable[Span]) -> dict[str, float]:
    sums = dict.fromkeys(KINDS, 0.0)
    for span in spans:
        sums[span.kind] += span.seconds
    return sums


def merged(spans: Sequence[Span], columns: int = 1200) -> list[Span]:
    """Merge spans for a line of ``columns``: if several share a column, the most important kind is kept."""
    if not spans:
        return []
    begin, end = spans[0].begin, max(s.end for s in spans)
    width = (end - begin) / columns
    rank = {kind: place for place, kind in enumerate(("other", "steps", "lost", "valid", "start", "save", "down"))}
    cells: list[Span | None] = [None] * columns
    for span in spans:
        first = min(int((span.begin - begin) / width), columns - 1) if width > 0 else 0
        last = min(max(math.ceil((span.end - begin) / width), first + 1), columns) if width > 0 else 1
        for cell in range(first, last):
            shown = cells[cell]
            if shown is None or rank[span.kind] > rank[shown.kind]:
                cells[cell] = span
    out: list[Span] = []
    for cell, shown in enumerate(cells):
        if shown is None:
            continue
        left, right = begin + cell * width, begin + (cell + 1) * width
        if out and out[-1].kind == shown.kind and abs(out[-1].end - left) < width / 2:
            out[-1] = Span(shown.kind, out[-1].begin, right, shown.step)
        else:
            out.append(Span(shown.kind, left, right, shown.step))
    return out


def slow_steps(tries: Sequence[Attempt]) -> list[SlowStep]:
    """Return the intervals whose steps took more than ``SLOW`` times the median of earlier ones."""
    slow = []
    for index, attempt in enumerate(tries):
        seconds = [number(r.get("step_s")) for r in attempt.train]
        for place, (value, usual) in enumerate(zip(seconds, _usual(seconds), strict=True)):
            if value > SLOW * usual > 0:
                step = attempt.train[place]["step"]
                steps = step - (attempt.train[place - 1]["step"] if place else attempt.first_step)
                slow.append(SlowStep(index, step, value, usual, (value - usual) * max(steps, 1), place == 0))
    return slow


def _usual(seconds: Sequence[float]) -> list[float]:
    # for each value the median of the ``_AROUND`` before it, or of the first ``_AROUND`` if these are few
    begin = [s for s in seconds[:_AROUND] if math.isfinite(s)]
    first = median(begin) if begin else math.nan
    window, recent, usual = list[float](), list[float](), []  # window: sorted
    for value in seconds:
        usual.append(window[len(window) // 2] if len(window) >= _AROUND // 2 else first)
        if math.isfinite(value):
            recent.append(value)
            bisect.insort(window, value)
            if len(recent) > _AROUND:
                del window[bisect.bisect_left(window, recent[-_AROUND - 1])]
    return usual
