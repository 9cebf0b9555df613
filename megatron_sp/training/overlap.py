"""Overlap report (--report-overlap): the share of each layer's communication that was hidden, as a table, a trace and a picture.

    exposed   time that a rank was blocked in ``wait()``, summed over a layer's collectives of one pass (a slow peer counts too)
    exchange  the same collectives, each run alone: same sizes, same groups, no computation meanwhile
    hidden    1 - exposed / exchange, clamped to [0, 1]

Collectives are recorded during some steps (``comm/recorder.py``). Then each distinct collective is run alone, in turn
over several rounds, so that a temporary slowdown of the machine affects all of them; the median of each is used. Tables
and pictures are rank 0's.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import (
    Handle,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    all_to_all_async,
    barrier,
    reduce_scatter_async,
)
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.objects import gather_json
from megatron_sp.comm.recorder import WAIT, Axis, Clock, Collective, CollectiveTimes, CudaClock, Direction, Recorder, StepTimes, WallClock
from megatron_sp.ops import availability
from megatron_sp.training.overlap_picture import draw_steps, in_lanes
from megatron_sp.utils.files import atomic_write_text
from megatron_sp.utils.format import format_bytes

TRACE_NAME, PICTURE_NAME = "overlap-trace.json", "overlap.png"
AXIS_WORDS: dict[Axis, str] = {"cp": "context", "sp": "ulysses", "tp": "tensor"}
_ROUNDS = 7
_SECONDS = 20.0  # after which no further round begins
_TRACED_STEPS = 3


class OverlapEntry(NamedTuple):
    """The collectives of one axis, layer and direction in one step; times in seconds; layer None: embedding and head."""

    axis: Axis
    layer: int | None
    direction: Direction
    number: int
    exchange: float
    exposed: float
    share_of_step: float

    @property
    def hidden(self) -> float:
        """Share of the exchange that was hidden, from 0 to 1."""
        return min(1.0, max(0.0, 1.0 - self.exposed / self.exchange)) if self.exchange > 0 else 0.0


class OverlapReport:
    """Recorder of some steps, and their overlap report.

    Args:
        num_steps: number of steps to record; the first is not counted if there are others.
        groups: process groups of the layout.
        run_dir: folder for trace and picture.
        say: prints a line on rank 0.
    """

    def __init__(self, num_steps: int, groups: ParallelGroups, run_dir: Path, say: Callable[[str], None]) -> None:
        self._groups, self._run_dir, self._say = groups, run_dir, say
        self._clock: Clock = CudaClock(groups.device) if groups.device.type == "cuda" else WallClock()
        self.recorder = Recorder(self._clock, num_steps)
        self._written = False

    def is_due(self, *, last: bool) -> bool:
        """Return whether to write the report now: enough steps are recorded, or there will be no more. The same on every rank."""
        return not self._written and (self.recorder.is_complete or (last and bool(self.recorder.steps)))

    def write(self) -> list[OverlapEntry]:
        """Time the collectives alone; on rank 0 print the table and write trace and picture. Collective; returns this rank's rows."""
        self._written = True
        steps = comparable(self.recorder.steps)
        self.recorder.num_steps, self.recorder.steps = 0, []
        alone = time_alone([flight.what for flight in steps[-1].flights], self._groups, self._clock)
        rows = tabulate(steps, alone)
        length = statistics.median(step.seconds for step in steps)
        shares = [float(share) for share in gather_json(sum(row.share_of_step for row in rows), self._groups.control)]
        over_cp = gather_json(bytes_sent(steps[-1], "cp", self._groups.cp.rank()), self._groups.control)
        if self._groups.rank == 0:
            for line in table(rows, len(steps), length, shares):
                self._say(line)
            if self._groups.cp.size() > 1:
                self._say(_line_about_context(over_cp))
            self._write_files(steps, rows, length)
        return rows

    def _write_files(self, steps: list[StepTimes], rows: list[OverlapEntry], length: float) -> None:
        """Write trace and picture; if that fails, print a line and go on."""
        path = self._run_dir / TRACE_NAME
        try:
            atomic_write_text(path, json.dumps(trace(steps[-_TRACED_STEPS:], rows, length)) + "\n")
            self._say(f"overlap: trace in {path} (open it at ui.perfetto.dev or chrome://tracing)")
        except OSError as error:
            self._say(f"warning: overlap: {path} cannot be written: {error.strerror}; training goes on")
        plots = availability.find("matplotlib")
        if not plots.available:
            self._say(f"overlap: no picture, for {plots.reason}; pip install matplotlib (or this package with [plot]) gets it")
            return
        path = self._run_dir / PICTURE_NAME
        # the step of median length: not one that something else on the machine slowed down
        step = sorted(steps, key=lambda s: s.seconds)[len(steps) // 2]
        titles = {d: _summary([row for row in rows if row.direction == d]) for d in ("forward", "backward")}
        try:
            draw_steps(step, path, titles)
            self._say(f"overlap: time line in {path}")
        except Exception as error:  # a full disk, or a broken library: a missing picture must not end the run
            self._say(f"warning: overlap: {path} cannot be drawn: {type(error).__name__}: {error}; training goes on")


def bytes_sent(step: StepTimes, axis: Axis, rank: int) -> int:
    """Return the bytes that a rank sends to others of an axis in a step's all_to_alls; ``rank``: its place there."""
    sizes = ((sum(what.sends) - what.sends[rank], what.dtype) for what in (f.what for f in step.flights) if what.axis == axis)
    return sum(count * getattr(torch, dtype).itemsize for count, dtype in sizes)


def _line_about_context(of_ranks: list[int]) -> str:
    """Return what the cp ranks have sent, also that it is nothing; a plan that lacks rows that are needed is refused in the step itself."""
    if not any(of_ranks):
        return (
            "  the cp ranks sent each other no keys or values in this step: no query saw a key of another rank (documents that lie on one"
            " rank, or a window of one token)"
        )
    return (
        f"  keys, values and their gradients sent over cp: {format_bytes(sum(of_ranks))} in all, by a rank {format_bytes(min(of_ranks))} to"
        f" {format_bytes(max(of_ranks))}"
    )


def comparable(steps: list[StepTimes]) -> list[StepTimes]:
    """Return the steps to evaluate: not the first (warm-up), and only those with as many collectives as the last (batch ramp-up)."""
    kept = steps[1:] or steps
    return [step for step in kept if len(step.flights) == len(kept[-1].flights)]


def time_alone(collectives: Sequence[Collective], groups: ParallelGroups, clock: Clock) -> list[float]:
    """Return the seconds of each collective when run alone: the median over rounds. Collective.

    Collectives with the same sizes on every rank are timed once. Two that are alike on one rank may differ on another
    (uneven heads), and all ranks have to take part, so the ranks compare their lists first.

    Raises:
        RuntimeError: the ranks ran different numbers of collectives.
    """
    numbers: dict[Collective, int] = {}
    mine = [numbers.setdefault(what, len(numbers)) for what in collectives]
    everyone = gather_json(mine, groups.control)
    counts = {len(theirs) for theirs in everyone}
    if len(counts) > 1:
        raise RuntimeError(f"the ranks have run different numbers of collectives in one step: {[len(theirs) for theirs in everyone]}")
    kinds: dict[tuple[int, ...], list[float]] = {}
    kind_of = [tuple(of_ranks) for of_ranks in zip(*everyone, strict=True)]
    example = {kind: what for kind, what in zip(reversed(kind_of), reversed(collectives), strict=True)}
    buffers = _buffers(collectives, groups.device)
    began = time.monotonic()
    for index in range(1 + _ROUNDS):
        for kind in dict.fromkeys(kind_of):
            seconds = _time_once(example[kind], groups, clock, *buffers[example[kind].dtype])
            if index > 0:  # the first round is for warm-up
                kinds.setdefault(kind, []).append(seconds)
        spent = torch.tensor([time.monotonic() - began], dtype=torch.float64)
        if index > 0 and float(all_reduce(spent, groups.control, "max")) > _SECONDS:
            break
    return [statistics.median(kinds[kind]) for kind in kind_of]


def _buffers(collectives: Sequence[Collective], device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """Return a send and a receive buffer for each dtype, large enough for all collectives; zeros, so that no sum overflows."""
    found = {}
    for dtype in {what.dtype for what in collectives}:
        sizes = [(sum(what.sends), sum(what.receives)) for what in collectives if what.dtype == dtype]
        found[dtype] = tuple(torch.zeros(max(each), dtype=getattr(torch, dtype), device=device) for each in zip(*sizes, strict=True))
    return found  # type: ignore[return-value]


def _time_once(what: Collective, groups: ParallelGroups, clock: Clock, send: Tensor, receive: Tensor) -> float:
    clock.settle()
    barrier(groups.control)
    begin = clock.now()
    _start(what, groups, send[: sum(what.sends)], receive[: sum(what.receives)]).wait()
    end = clock.now()
    clock.settle()
    return clock.seconds(begin, end)


def _start(what: Collective, groups: ParallelGroups, send: Tensor, receive: Tensor) -> Handle:
    group = {"cp": groups.cp, "sp": groups.sp, "tp": groups.tp}[what.axis]
    if what.op == "all_to_all":
        return all_to_all_async(send, what.sends, receive, what.receives, group)
    if what.op == "all_gather":
        return all_gather_async(send, group, receive)
    if what.op == "reduce_scatter":
        return reduce_scatter_async(send, group, receive)
    assert what.op == "all_reduce", f"{what.op} cannot be run again"
    return all_reduce_async(send, group)


def tabulate(steps: Sequence[StepTimes], alone: Sequence[float]) -> list[OverlapEntry]:
    """Return one row for each axis, layer and direction: cp, sp, tp, layers in order, embedding and head at the end.

    Args:
        steps: steps with the same collectives in the same order.
        alone: seconds of each of these collectives when run alone.
    """
    places: dict[tuple[Axis, int | None, Direction], list[int]] = {}
    for index, flight in enumerate(steps[-1].flights):
        places.setdefault((flight.what.axis, flight.layer, flight.direction), []).append(index)
    rows = []
    for (axis, layer, direction), indices in places.items():
        exposed = [sum(step.flights[i].exposed for i in indices) for step in steps]
        share = statistics.median(e / step.seconds for e, step in zip(exposed, steps, strict=True))
        rows.append(OverlapEntry(axis, layer, direction, len(indices), sum(alone[i] for i in indices), statistics.median(exposed), share))
    return sorted(rows, key=lambda r: (r.axis, r.layer is None, r.layer or 0, r.direction != "forward"))


def table(rows: Sequence[OverlapEntry], num_steps: int, length: float, shares: Sequence[float]) -> list[str]:
    """Return the lines of the table.

    Args:
        rows: rows of rank 0.
        num_steps, length: number of steps that the medians are taken over, and median length of a step in seconds.
        shares: exposed share of the step, for every rank.
    """
    steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
    lines = [f"overlap on rank 0, of one step (median of {steps}, {1e3 * length:.1f} ms):"]
    lines.append("           layer  direction  number     exchange   hidden      exposed   share of step")
    for row in rows:
        lines.append(_line(AXIS_WORDS[row.axis], "ends" if row.layer is None else str(row.layer), row.direction, row))
    for axis, word in AXIS_WORDS.items():
        for direction in ("forward", "backward"):
            of_all = [row for row in rows if row.axis == axis and row.direction == direction]
            if len(of_all) > 1:
                lines.append(_line(word, "all", direction, _added(of_all)))
    if any(row.layer is None for row in rows):
        lines.append('  ("ends": embedding and head)')
    if sum(row.exposed for row in rows) > sum(row.exchange for row in rows):
        lines.append("  (exposed above exchange: the ranks wait for each other, or computation takes the processor from the exchanges)")
    worst = max(range(len(shares)), key=lambda rank: shares[rank])
    lines.append(f"  exposed in all: rank 0 {100 * shares[0]:.1f} % of its step, the worst, rank {worst}, {100 * shares[worst]:.1f} %")
    return lines


def _line(word: str, layer: str, direction: str, row: OverlapEntry) -> str:
    return (
        f"  {word:8s} {layer:>5s}  {direction:<9s} {row.number:7d} {1e3 * row.exchange:9.2f} ms {100 * row.hidden:6.0f} %"
        f" {1e3 * row.exposed:9.2f} ms {100 * row.share_of_step:13.2f} %"
    )


def _added(rows: Sequence[OverlapEntry]) -> OverlapEntry:
    """Return the sum of several rows as one row."""
    number, exchange, exposed, share = (sum(values) for values in zip(*(row[3:] for row in rows), strict=True))
    return rows[0]._replace(number=int(number), exchange=exchange, exposed=exposed, share_of_step=share)


def _summary(rows: Sequence[OverlapEntry]) -> str:
    """Return a summary of all layers in one direction, for the title of a picture."""
    if not rows:
        return "no exchanges"
    whole = _added(rows)
    return f"exchanges of all layers {1e3 * whole.exchange:.1f} ms, {100 * whole.hidden:.0f} % hidden"


def trace(steps: Sequence[StepTimes], rows: Sequence[OverlapEntry], length: float) -> dict[str, Any]:
    """Return a trace in Chrome's format: a track of computation and waits, and one track for each concurrent exchange; times in us."""
    names: dict[int, str] = {0: "compute"}
    events: list[dict[str, Any]] = []
    start = 0.0
    for step in steps:
        for span in step.spans:
            label = span.label if span.layer is None or span.label == WAIT else f"{span.label} {span.layer}"
            about = {"layer": span.layer, "direction": span.direction}
            events.append(_event(0, "wait" if span.label == WAIT else "compute", label, start + span.begin, start + span.end, about))
        for first, axis in ((1, "sp"), (11, "cp"), (21, "tp")):
            for lane, flight in in_lanes([f for f in step.flights if f.what.axis == axis]):
                names[first + lane] = f"{AXIS_WORDS[flight.what.axis]} exchanges" + (f" ({lane + 1})" if lane else "")
                events.append(_event(first + lane, "exchange", flight.name, start + flight.begin, start + flight.end, _about(flight)))
        start += step.seconds
    about_lines = [{"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0"}}]
    for tid, name in sorted(names.items()):
        about_lines.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}})
        about_lines.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": tid, "args": {"sort_index": tid}})
    table_rows = [{**row._asdict(), "hidden": row.hidden} for row in rows]
    return {"traceEvents": about_lines + events, "displayTimeUnit": "ms", "otherData": {"step_seconds": length, "rows": table_rows}}


def _about(flight: CollectiveTimes) -> dict[str, Any]:
    return {
        "layer": flight.layer, "direction": flight.direction, "op": flight.what.op, "elements": sum(flight.what.sends),
        "dtype": flight.what.dtype, "exposed_us": 1e6 * flight.exposed,
    }  # fmt: skip


def _event(tid: int, category: str, name: str, begin: float, end: float, about: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * begin, 3), "dur": round(1e6 * (end - begin), 3)}
    return {"name": name, "cat": category, "ph": "X", "pid": 0, "tid": tid, **times, "args": about}
