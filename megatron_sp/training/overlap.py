"""Overlap report (--report-overlap): the share of each layer's communication that was hidden: table, trace, pictures.

    exposed   time that a rank was blocked in ``wait()``, summed over a layer's collectives of one pass, slow peers too
    exchange  the same collectives, each run alone: same sizes, same groups, no computation meanwhile
    hidden    1 - exposed / exchange, clamped to [0, 1]

Collectives are recorded during some steps (``comm/recorder.py``). Then each distinct collective is run alone, in turn
over several rounds, so that a temporary slowdown of the machine affects all of them; the median of each is used. Tables
and pictures are rank 0's.

Messages between the stages of a pipeline are exchanges of their own, counted by the stage that made them. A rank waits
for most of them because they have not been sent yet, which is the bubble of the schedule: the report says how much of
the waits that is, and shows the schedule of rank 0's pipeline as planned and as run (``pipeline_times.py``).
"""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import (
    Handle,
    all_gather_async,
    all_reduce_async,
    all_to_all_async,
    barrier,
    reduce_scatter_async,
)
from megatron_sp.comm.groups import SINGLE_RANK, Group, ParallelGroups
from megatron_sp.comm.object_collectives import broadcast_json, gather_json
from megatron_sp.comm.recorder import (
    WAIT,
    Axis,
    Clock,
    Collective,
    CollectiveTimes,
    CudaClock,
    Direction,
    Recorder,
    Span,
    StepTimes,
    WallClock,
)
from megatron_sp.ops import availability
from megatron_sp.parallel.pipeline import Channels
from megatron_sp.training import pipeline_times
from megatron_sp.training.kernel_selection import time_in_turns
from megatron_sp.training.pipeline_times import RankTimes
from megatron_sp.training.pipelined import Pipeline
from megatron_sp.utils.files import atomic_write_text
from megatron_sp.utils.format import format_bytes

TRACE_NAME, PICTURE_NAME, PIPELINE_NAME = "overlap-trace.json", "overlap.png", "overlap-pipeline.svg"
AXIS_WORDS: dict[Axis, str] = {"cp": "context", "ep": "experts", "pp": "pipeline", "sp": "ulysses", "tp": "tensor"}
_ROUNDS = 7
_SECONDS = 20.0  # after which no further round begins
_TRACED_STEPS = 3


class OverlapEntry(NamedTuple):
    """The collectives of one axis, layer and direction in one step; times in seconds."""

    # layer: None for embedding and head; with axis pp the stage that made the messages

    axis: Axis
    layer: int | None
    direction: Direction
    number: int
    exchange: float
    exposed: float
    share_of_step: float

    @property
    def hidden(self) -> float:
        return min(1.0, max(0.0, 1.0 - self.exposed / self.exchange)) if self.exchange > 0 else 0.0


class OverlapReport:
    """Recorder of some steps, the first of which is not counted if there are others, and their overlap report."""

    def __init__(
        self, num_steps: int, groups: ParallelGroups, run_dir: Path, say: Callable[[str], None],
        pipeline: Pipeline | None = None, ep: Group = SINGLE_RANK,
    ) -> None:  # fmt: skip
        self._groups, self._run_dir, self._say, self._pipeline = groups, run_dir, say, pipeline
        self._clock: Clock = CudaClock(groups.device) if groups.device.type == "cuda" else WallClock()
        self.recorder = Recorder(self._clock, num_steps)
        self._written, self._ep = False, ep
        if pipeline is not None:
            pipeline.channels.recorder = self.recorder

    def is_due(self, *, last: bool) -> bool:
        """Return, alike on every rank, whether enough steps are recorded, or there will be no more."""
        return not self._written and (self.recorder.is_complete or (last and bool(self.recorder.steps)))

    def write(self) -> list[OverlapEntry]:
        """Time the collectives alone; on rank 0 print the table, write trace and picture. Collective."""
        self._written, groups = True, self._groups
        recorded = self.recorder.steps
        steps = comparable(recorded)
        self.recorder.num_steps, self.recorder.steps = 0, []
        # the step of median length: not one that something else on the machine slowed down
        typical = sorted(steps, key=lambda s: s.seconds)[len(steps) // 2]
        collectives = [flight.what for flight in steps[-1].flights]
        alone = iter(time_alone([c for c in collectives if c.pipe is None], groups, self._clock, self._ep))
        messages: dict[Collective, float] = {}
        if self._pipeline is not None:
            sent = {c for c in collectives if c.pipe is not None}
            messages = time_messages(sent, self._pipeline.channels, groups, self._clock)
        rows = tabulate(steps, [next(alone) if c.pipe is None else messages[c] for c in collectives])
        length = statistics.median(step.seconds for step in steps)
        shares = [float(share) for share in gather_json(sum(row.share_of_step for row in rows), groups.control)]
        over_cp = gather_json(bytes_sent(steps[-1], "cp", groups.cp.rank()), groups.control)
        of_ranks: list[Any] = []
        if self._pipeline is not None:  # those of rank 0's pipeline, of the step that is typical on rank 0
            index = broadcast_json(next(i for i, step in enumerate(recorded) if step is typical), groups.control)
            own: list[Any] | None = None
            if groups.pp_ranks[0] == 0:
                own = [RankTimes.of(recorded[index]).as_json(), bytes_sent(recorded[index], "pp", groups.pp_rank)]
            of_ranks = [of_rank for of_rank in gather_json(own, groups.control) if of_rank is not None]
        if groups.rank == 0:
            for line in table(rows, len(steps), length, shares):
                self._say(line)
            if groups.cp.size() > 1:
                self._say(_line_about_context(over_cp))
            if self._pipeline is not None:
                ranks = [RankTimes.from_json(times) for times, _ in of_ranks]
                self._write_pipeline(self._pipeline, ranks, [sent for _, sent in of_ranks])
            self._write_files(steps, typical, rows, length)
        return rows

    def _write_pipeline(self, pipeline: Pipeline, ranks: Sequence[RankTimes], sizes: Sequence[int]) -> None:
        # print the schedule as planned and as run, and draw it; if that fails, print a line and go on
        plan = pipeline.plan(1 + max(box.action.micro_batch for box in ranks[0].actions))
        as_run = pipeline_times.measured(plan, ranks)
        as_planned = pipeline_times.planned(plan, as_run)
        until_sent, under_way = pipeline_times.waits_for_messages(ranks)
        self._say(
            f"  messages of rank 0's pipeline: {format_bytes(sum(sizes))} in all, by a rank {format_bytes(min(sizes))}"
            f" to {format_bytes(max(sizes))}"
        )
        self._say(
            f"  its ranks together waited {1e3 * (until_sent + under_way):.1f} ms for messages: {1e3 * until_sent:.1f}"
            f" ms until they were sent, {1e3 * under_way:.1f} ms while they were under way"
        )
        self._say(f"pipeline ({pipeline.kind}): {pipeline_times.summary(as_planned, as_run)}")
        for line in pipeline_times.text_rows(as_planned, as_run):
            self._say(line)
        path = self._run_dir / PIPELINE_NAME
        title = f"{pipeline.kind}: {pipeline.size} ranks, {plan.num_micro_batches} micro-batches"
        title += f" of {plan.num_slices} slices" if plan.num_slices > 1 else ""
        try:
            atomic_write_text(path, pipeline_times.pipeline_svg(as_planned, as_run, title))
            self._say(f"overlap: schedule in {path}")
        except OSError as error:
            self._say(f"warning: overlap: {path} cannot be written: {error.strerror}; training goes on")

    def _write_files(self, steps: list[StepTimes], typical: StepTimes, rows: list[OverlapEntry], length: float) -> None:
        # write trace and picture; if that fails, print a line and go on
        path = self._run_dir / TRACE_NAME
        try:
            atomic_write_text(path, json.dumps(trace(steps[-_TRACED_STEPS:], rows, length)) + "\n")
            self._say(f"overlap: trace in {path} (open it at ui.perfetto.dev or chrome://tracing)")
        except OSError as error:
            self._say(f"warning: overlap: {path} cannot be written: {error.strerror}; training goes on")
        if self._pipeline is not None and not windows(typical):  # nothing but messages, which the schedule shows
            return
        plots = availability.find("matplotlib")
        if not plots.available:
            self._say(f"overlap: no picture, for {plots.reason}; pip install matplotlib gets it")
            return
        path = self._run_dir / PICTURE_NAME
        titles = {}
        for direction in ("forward", "backward"):
            titles[direction] = "no exchanges"
            if of_direction := [row for row in rows if row.direction == direction]:
                total = _added(of_direction)
                hidden = f"{100 * total.hidden:.0f} % hidden"
                titles[direction] = f"exchanges of all layers {1e3 * total.exchange:.1f} ms, {hidden}"
        try:
            draw_steps(typical, path, titles)
            self._say(f"overlap: time line in {path}")
        except Exception as error:  # a full disk, or a broken library: a missing picture must not end the run
            self._say(f"warning: overlap: {path} cannot be drawn: {type(error).__name__}: {error}; training goes on")


def bytes_sent(step: StepTimes, axis: Axis, rank: int) -> int:
    """Return the bytes that a rank, whose place on the axis is ``rank``, sends to others there in a step."""
    of_axis = (flight.what for flight in step.flights if flight.what.axis == axis)
    sizes = ((sum(what.sends) - (what.sends[rank] if what.pipe is None else 0), what.dtype) for what in of_axis)
    return sum(count * getattr(torch, dtype).itemsize for count, dtype in sizes)


def _line_about_context(of_ranks: list[int]) -> str:
    # nothing sent is no fault: a plan that lacks rows that are needed is refused in the step itself
    if not any(of_ranks):
        return (
            "  the cp ranks sent each other no keys or values in this step: no query saw a key of another rank"
            " (documents that lie on one rank, or a window of one token)"
        )
    return (
        f"  keys, values and their gradients sent over cp: {format_bytes(sum(of_ranks))} in all, by a rank"
        f" {format_bytes(min(of_ranks))} to {format_bytes(max(of_ranks))}"
    )


def comparable(steps: list[StepTimes]) -> list[StepTimes]:
    """Return the steps to evaluate: not the warm-up, and as many collectives as the last."""
    kept = steps[1:] or steps
    return [step for step in kept if len(step.flights) == len(kept[-1].flights)]


def time_alone(
    collectives: Sequence[Collective], groups: ParallelGroups, clock: Clock, ep: Group = SINGLE_RANK
) -> list[float]:
    """Return the seconds of each collective when run alone: the median over rounds. Collective."""
    # Collectives with the same sizes on every rank are timed once. Two that are alike on one rank may differ on another
    # (uneven heads), and all ranks have to take part, so the ranks compare their lists first. Those of one pipeline
    # stage are run beside those of the others, which may have more or fewer layers.
    numbers: dict[Collective, int] = {}
    own_kinds = [numbers.setdefault(what, len(numbers)) for what in collectives]
    everyone = gather_json([groups.pp.rank(), own_kinds], groups.control)
    stages: dict[int, list[list[int]]] = {}
    for stage, of_rank in everyone:
        stages.setdefault(stage, []).append(of_rank)
    if any(len({len(of_rank) for of_rank in of_ranks}) > 1 for of_ranks in stages.values()):
        raise RuntimeError(
            "the ranks have run different numbers of collectives in one step:"
            f" {[len(of_rank) for _, of_rank in everyone]}"
        )
    kinds = {stage: [tuple(of_ranks) for of_ranks in zip(*lists, strict=True)] for stage, lists in stages.items()}
    kind_of = kinds[groups.pp.rank()]
    example = {kind: what for kind, what in zip(reversed(kind_of), reversed(collectives), strict=True)}
    buffers = _buffers(collectives, groups.device)

    def start(what: Collective) -> Handle:
        send, receive = buffers[what.dtype]
        send, receive = send[: sum(what.sends)], receive[: sum(what.receives)]
        group = {"cp": groups.cp, "ep": ep, "sp": groups.sp, "tp": groups.tp}[what.axis]
        if what.op == "all_to_all":
            return all_to_all_async(send, what.sends, receive, what.receives, group)
        if what.op == "all_gather":
            return all_gather_async(send, group, receive)
        if what.op == "reduce_scatter":
            return reduce_scatter_async(send, group, receive)
        assert what.op == "all_reduce", f"{what.op} cannot be run again"
        return all_reduce_async(send, group)

    turns: list[Collective | None] = [example[kind] for kind in dict.fromkeys(kind_of)]
    turns += [None] * (max(len(set(in_stage)) for in_stage in kinds.values()) - len(turns))
    seconds_of = dict(zip(dict.fromkeys(kind_of), _time_in_turns(turns, start, groups, clock), strict=False))
    return [seconds_of[kind] for kind in kind_of]


def time_messages(
    messages: Collection[Collective], channels: Channels, groups: ParallelGroups, clock: Clock
) -> dict[Collective, float]:
    """Return the seconds of each message between stages when it is sent alone. Collective."""
    line = groups.pp_ranks[0]
    sent = [[*(what.pipe or ()), sum(what.sends), what.dtype] for what in messages if what.op == "send"]
    everyone = gather_json([line, sent], groups.control)
    lines: dict[int, set[tuple[int, int, int, str]]] = {}
    for of_line, of_rank in everyone:
        lines.setdefault(of_line, set()).update(map(tuple, of_rank))
    own: list[Collective | None] = []
    for source, target, size, dtype in sorted(lines[line]):
        ends = {source: Collective("pp", "send", (size,), (), dtype, (source, target)),
                target: Collective("pp", "receive", (), (size,), dtype, (source, target))}  # fmt: skip
        own.append(ends.get(channels.me))
    own += [None] * (max(map(len, lines.values())) - len(own))
    buffers = _buffers([what for what in own if what is not None], groups.device)

    def start(what: Collective) -> Handle:
        assert what.pipe is not None
        send, receive = buffers[what.dtype]
        if what.op == "send":
            return channels.send(send[: sum(what.sends)], what.pipe[1])
        return channels.receive(receive[: sum(what.receives)], what.pipe[0])

    timed = zip(own, _time_in_turns(own, start, groups, clock), strict=True)
    return {what: seconds for what, seconds in timed if what is not None}


def _time_in_turns(
    turns: Sequence[Collective | None], start: Callable[[Collective], Handle], groups: ParallelGroups, clock: Clock
) -> list[float]:
    # the median seconds of each turn; all ranks have as many, and None where a rank only waits for the others

    def once(what: Collective | None) -> float:
        clock.settle()
        barrier(groups.control)
        begin = clock.now()
        if what is not None:
            start(what).wait()
        end = clock.now()
        clock.settle()
        return clock.seconds(begin, end)

    return time_in_turns([partial(once, what) for what in turns], groups, _ROUNDS, _SECONDS)


def _buffers(collectives: Sequence[Collective], device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    # a send and a receive buffer for each dtype, large enough for all collectives; zeros, so that no sum overflows
    buffers = {}
    for dtype in {what.dtype for what in collectives}:
        sizes = [(sum(what.sends), sum(what.receives)) for what in collectives if what.dtype == dtype]
        largest = [max(column) for column in zip(*sizes, strict=True)]
        buffers[dtype] = tuple(torch.zeros(size, dtype=getattr(torch, dtype), device=device) for size in largest)
    return buffers  # type: ignore[return-value]


def tabulate(steps: Sequence[StepTimes], alone: Sequence[float]) -> list[OverlapEntry]:
    """Return one row for each axis, layer and direction."""
    places: dict[tuple[Axis, int | None, Direction], list[int]] = {}
    for index, flight in enumerate(steps[-1].flights):
        places.setdefault((flight.what.axis, flight.layer, flight.direction), []).append(index)
    rows = []
    for (axis, layer, direction), indices in places.items():
        exposed = [sum(step.flights[i].exposed for i in indices) for step in steps]
        share = statistics.median(e / step.seconds for e, step in zip(exposed, steps, strict=True))
        exchange, median = sum(alone[i] for i in indices), statistics.median(exposed)
        rows.append(OverlapEntry(axis, layer, direction, len(indices), exchange, median, share))
    return sorted(rows, key=lambda r: (r.axis, r.layer is None, r.layer or 0, r.direction != "forward"))


def table(rows: Sequence[OverlapEntry], num_steps: int, length: float, shares: Sequence[float]) -> list[str]:
    """Return the lines of the table."""
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
    if any(row.axis == "pp" for row in rows):
        lines.append(
            '  ("pipeline": messages, by the stage that made them; exposed is also the wait until they were sent)'
        )
    if sum(row.exposed for row in rows) > sum(row.exchange for row in rows):
        why = "the ranks wait for each other, or computation takes the processor from the exchanges"
        lines.append(f"  (exposed above exchange: {why})")
    worst = max(range(len(shares)), key=lambda rank: shares[rank])
    of_worst = f"the worst, rank {worst}, {100 * shares[worst]:.1f} %"
    lines.append(f"  exposed in all: rank 0 {100 * shares[0]:.1f} % of its step, {of_worst}")
    return lines


def _line(word: str, layer: str, direction: str, row: OverlapEntry) -> str:
    return (
        f"  {word:8s} {layer:>5s}  {direction:<9s} {row.number:7d} {1e3 * row.exchange:9.2f} ms {100 * row.hidden:6.0f}"
        f" % {1e3 * row.exposed:9.2f} ms {100 * row.share_of_step:13.2f} %"
    )


def _added(rows: Sequence[OverlapEntry]) -> OverlapEntry:
    number, exchange, exposed, share = (sum(values) for values in zip(*(row[3:] for row in rows), strict=True))
    return rows[0]._replace(number=int(number), exchange=exchange, exposed=exposed, share_of_step=share)


def trace(steps: Sequence[StepTimes], rows: Sequence[OverlapEntry], length: float) -> dict[str, Any]:
    """Return a trace in Chrome's format, times in us: computation, waits, and a track for each concurrent exchange."""
    names: dict[int, str] = {0: "compute"}
    events: list[dict[str, Any]] = []
    start = 0.0
    for step in steps:
        for span in step.spans:
            label = span.label if span.layer is None or span.label == WAIT else f"{span.label} {span.layer}"
            about = {"layer": span.layer, "direction": span.direction}
            category = "wait" if span.label == WAIT else "compute"
            events.append(_event(0, category, label, start + span.begin, start + span.end, about))
        for first, axis in ((1, "sp"), (11, "cp"), (21, "tp"), (31, "pp"), (41, "ep")):
            for lane, flight in in_lanes([f for f in step.flights if f.what.axis == axis]):
                names[first + lane] = f"{AXIS_WORDS[flight.what.axis]} exchanges" + (f" ({lane + 1})" if lane else "")
                what = flight.what
                facts: dict[str, Any] = {
                    "layer": flight.layer, "direction": flight.direction, "op": what.op,
                    "elements": sum(what.receives if what.op == "receive" else what.sends),
                    "dtype": what.dtype, "exposed_us": 1e6 * flight.exposed,
                }  # fmt: skip
                begin, end = start + flight.begin, start + flight.end
                events.append(_event(first + lane, "exchange", flight.name, begin, end, facts))
        start += step.seconds
    about_lines = [{"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0"}}]
    for tid, name in sorted(names.items()):
        about_lines.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}})
        about_lines.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": tid, "args": {"sort_index": tid}})
    table_rows = [{**row._asdict(), "hidden": row.hidden} for row in rows]
    other = {"step_seconds": length, "rows": table_rows}
    return {"traceEvents": about_lines + events, "displayTimeUnit": "ms", "otherData": other}


def _event(tid: int, category: str, name: str, begin: float, end: float, about: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * begin, 3), "dur": round(1e6 * (end - begin), 3)}
    return {"name": name, "cat": category, "ph": "X", "pid": 0, "tid": tid, **times, "args": about}


LAYERS_SHOWN = 2
# Okabe and Ito's colours, which colour-blind readers can tell apart: blues and greens compute, reds move
COLOURS = {
    "projection": "#0072B2", "attention": "#009E73", "output projection": "#56B4E9", "mlp": "#E69F00",
    "other": "#C9C9C9", WAIT: "#FFFFFF",
    "to heads": "#CC79A7", "to positions": "#882255", "context parallel": "#F0E442", "tensor parallel": "#D55E00",
    "pipeline": "#7A5195", "experts": "#B8860B", "expert parallel": "#EE6677",
}  # fmt: skip
WORDS = {
    "projection": "QKV projection", "other": "norms, dropout, rest", "mlp": "MLP", WAIT: "waiting (exposed)",
    "to heads": "Ulysses: to heads", "to positions": "Ulysses: back to positions",
    "context parallel": "context-parallel exchange", "tensor parallel": "tensor-parallel collective",
    "pipeline": "message between stages", "experts": "experts", "expert parallel": "expert-parallel exchange",
}  # fmt: skip
_KINDS: dict[Axis, str] = {
    "cp": "context parallel", "ep": "expert parallel", "pp": "pipeline", "sp": "", "tp": "tensor parallel",
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
    of_directions = []
    for direction in ("forward", "backward"):
        # the first micro-batch's pass ends where a span of another direction begins
        start = next((i for i, span in enumerate(step.spans) if span.direction == direction), len(step.spans))
        of_pass = list(takewhile(lambda span: span.direction == direction, step.spans[start:]))  # noqa: B023
        inside = [span for span in of_pass if span.layer in shown]
        if not inside:
            continue
        begin, end = min(span.begin for span in inside), max(span.end for span in inside)
        spans = [span for span in of_pass if span.end > begin and span.begin < end]
        flights = [flight for flight in step.flights if flight.end > begin and flight.begin < end]
        of_directions.append(Window(direction, begin, end, spans, flights))
    return of_directions


def draw_steps(step: StepTimes, path: Path, titles: Mapping[str, str]) -> None:
    """Write the picture of a step. Raises OSError."""
    package = availability.load("matplotlib")
    # not pyplot, which needs a display and keeps global state
    figures = importlib.import_module(f"{package.__name__}.figure")
    patches = importlib.import_module(f"{package.__name__}.patches")
    parts = windows(step)
    num_lanes = [sum(1 + max(lane for lane, _ in placed) for _, placed in _by_axis(part)) for part in parts]
    heights = [1.2 + max(1, count) for count in num_lanes]
    figure = figures.Figure(figsize=(13, 1.5 + 0.62 * sum(heights) + 0.45 * len(parts)), layout="constrained")
    figure.suptitle(
        f"exchanges under computation, rank 0 (one step: {1e3 * step.seconds:.1f} ms)", fontsize=12, fontweight="bold"
    )
    used: dict[str, None] = {}
    if parts:
        panels = figure.subplots(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axes, part in zip(panels, parts, strict=True):
            _draw(axes, part, titles.get(part.direction, ""), used)
    keys = [patches.Patch(label=WORDS.get(kind, kind), **_look(kind)) for kind in COLOURS if kind in used]
    if keys:
        figure.legend(handles=keys, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _by_axis(part: Window) -> list[tuple[str, list[tuple[int, CollectiveTimes]]]]:
    axes = (("sp", "ulysses"), ("cp", "context"), ("ep", "experts"), ("tp", "tensor"), ("pp", "pipeline"))
    placed = [(name, in_lanes([f for f in part.flights if f.what.axis == axis])) for axis, name in axes]
    return [(name, lanes) for name, lanes in placed if lanes]


def _draw(axes: Any, part: Window, title: str, used: dict[str, None]) -> None:
    width = part.end - part.begin
    for span in part.spans:
        kind = span.label if span.label in COLOURS else "other"
        _bar(
            axes, 0.0, span.begin, span.end, part, kind, "" if kind in (WAIT, "other") else WORDS.get(kind, kind), used
        )
    ticks, y = {0.0: "compute"}, 1.15
    for name, placed in _by_axis(part):
        ticks[y] = f"{name} exchanges"
        for lane, flight in placed:
            kind = _KINDS[flight.what.axis]
            if flight.what.axis == "sp":
                kind = "to heads" if flight.name in _TO_HEADS else "to positions"
            _bar(axes, y + lane, flight.begin, flight.end, part, kind, flight.name, used)
        y += 1 + max(lane for lane, _ in placed)
    layers = [span.layer for span in part.spans if span.layer is not None]
    for layer in dict.fromkeys(layers):
        begins = max(part.begin, min(span.begin for span in part.spans if span.layer == layer))
        axes.axvline(1e3 * (begins - part.begin), color="#444444", linewidth=0.9, linestyle=(0, (3, 2)), zorder=4)
        axes.annotate(
            f"layer {layer}", (1e3 * (begins - part.begin), -0.5), (3, 2), textcoords="offset points", fontsize=8.5,
            va="bottom",
        )  # fmt: skip
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


def _bar(
    axes: Any, y: float, begin: float, end: float, part: Window, kind: str, text: str, used: dict[str, None]
) -> None:
    used[kind] = None
    begin, end = max(begin, part.begin), min(end, part.end)
    left, width, window = 1e3 * (begin - part.begin), 1e3 * (end - begin), 1e3 * (part.end - part.begin)
    axes.barh(y, width, left=left, height=0.8, **_look(kind))
    if text and width > window * _WIDE_ENOUGH * 0.62 * len(text):
        dark = kind in ("projection", "attention", "to positions", "tensor parallel", "pipeline")
        axes.text(
            left + width / 2, y, text, ha="center", va="center", fontsize=7.5, color="white" if dark else "black",
            clip_on=True,
        )  # fmt: skip


def _look(kind: str) -> dict[str, Any]:
    look: dict[str, Any] = {"facecolor": COLOURS[kind], "edgecolor": "white", "linewidth": 0.4}
    return {**look, "edgecolor": "#CC0000", "hatch": "//////"} if kind == WAIT else look
