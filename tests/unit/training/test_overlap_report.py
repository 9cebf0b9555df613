"""Rows, tables, traces and pictures of --report-overlap from steps that are written by hand; its flag."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_sp.comm.collectives import Handle, done
from megatron_sp.comm.groups import SINGLE_RANK
from megatron_sp.comm.recorder import WAIT, Collective, CollectiveTimes, Recorder, Span, StepTimes
from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.ops import availability
from megatron_sp.parallel.pipeline_orders import plan_pipeline
from megatron_sp.parallel.pipeline_plan import Action, PipelinePlan
from megatron_sp.training import overlap
from megatron_sp.training.overlap import OverlapEntry, OverlapReport, comparable, draw_steps, in_lanes, table, tabulate, trace, windows
from megatron_sp.utils.errors import ConfigError

SP = Collective("sp", "all_to_all", (4, 4), (4, 4), "float32")
TP = Collective("tp", "all_reduce", (8,), (8,), "float32")
CP = Collective("cp", "all_to_all", (0, 4), (0, 2), "float32")
DOWN = Collective("pp", "send", (6,), (), "bfloat16", (0, 1))
UP = Collective("pp", "receive", (), (6,), "bfloat16", (1, 0))
FLAGS = ["--num-layers=2", "--hidden-size=8", "--num-attention-heads=2", "--seq-length=8", "--lr=1", "--train-iters=2", "--mock-data",
         "--vocab-size=9"]  # fmt: skip


def make_step(seconds: float = 1.0, exposed: float = 0.01, layers: int = 3) -> StepTimes:
    """Each layer projects, attends with an exchange under it, waits, and goes on; then all of that backward."""
    step, at = StepTimes(seconds), 0.0
    for direction in ("forward", "backward"):
        for layer in range(layers) if direction == "forward" else reversed(range(layers)):
            begin = at
            for label, length in (("projection", 0.02), ("attention", 0.05), (WAIT, exposed), ("output projection", 0.02), ("mlp", 0.04)):
                step.spans.append(Span(label, layer, direction, at, at + length))
                at += length
            step.flights.append(
                CollectiveTimes(
                    SP, "qkv" if direction == "forward" else "d qkv", layer, direction, begin + 0.02, begin + 0.07 + exposed, exposed
                )
            )
            step.flights.append(CollectiveTimes(SP, "out", layer, direction, begin + 0.05, begin + 0.06, 0.0))
        step.flights.append(CollectiveTimes(TP, "all-reduce", None, direction, at, at, 0.0))
    return step


def test_exposed_exchange_hidden_and_share() -> None:
    steps = [make_step(1.0, 0.01), make_step(2.0, 0.02), make_step(4.0, 0.03)]
    rows = tabulate(steps, [0.04, 0.01] * 3 + [0.5] + [0.06, 0.02] * 3 + [0.5])
    assert [(r.axis, r.layer, r.direction, r.number) for r in rows] == [
        ("sp", 0, "forward", 2), ("sp", 0, "backward", 2), ("sp", 1, "forward", 2), ("sp", 1, "backward", 2), ("sp", 2, "forward", 2),
        ("sp", 2, "backward", 2), ("tp", None, "forward", 1), ("tp", None, "backward", 1),
    ]  # fmt: skip
    assert rows[0].exchange == pytest.approx(0.05) and rows[1].exchange == pytest.approx(0.08)
    assert rows[0].exposed == pytest.approx(0.02) and rows[0].hidden == pytest.approx(0.6)  # medians of the steps
    assert rows[0].share_of_step == pytest.approx(0.01)
    assert rows[-1].exposed == 0.0 and rows[-1].hidden == 1.0


@pytest.mark.parametrize("exchange, exposed, hidden", [(2.0, 0.5, 0.75), (1.0, 3.0, 0.0), (0.0, 0.0, 0.0), (1.0, -1e-9, 1.0)])
def test_hidden_stays_between_none_and_all(exchange: float, exposed: float, hidden: float) -> None:
    assert OverlapEntry("sp", 0, "forward", 1, exchange, exposed, 0.0).hidden == hidden


def test_the_table() -> None:
    rows = tabulate([make_step()], [0.04, 0.01] * 3 + [0.5] + [0.06, 0.02] * 3 + [0.5])
    lines = table(rows, 9, 1.0, [0.06, 0.11])
    assert "median of 9 steps, 1000.0 ms" in lines[0]
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert "ulysses 0 forward 2 50.00 ms 80 % 10.00 ms 1.00 %" in text
    assert "ulysses all backward 6 240.00 ms 88 % 30.00 ms 3.00 %" in text
    assert "tensor ends forward 1 500.00 ms 100 % 0.00 ms 0.00 %" in text and "tensor all" not in text
    assert "rank 0 6.0 % of its step, the worst, rank 1, 11.0 %" in text and "exposed above exchange" not in text
    assert "exposed above exchange" in "\n".join(table([OverlapEntry("sp", 0, "forward", 1, 1.0, 2.0, 0.5)], 1, 4.0, [0.5]))


def test_which_steps_count() -> None:
    """Not the first, unless it is the only one; and while the batch grows only those like the last."""
    warm_up, short, long = make_step(9.0), make_step(layers=1), make_step(layers=2)
    assert comparable([warm_up]) == [warm_up]
    assert comparable([warm_up, short, long, long]) == [long, long]


def test_the_trace_lays_steps_one_after_another() -> None:
    steps = [make_step(1.0), make_step(1.0)]
    found = trace(steps, tabulate(steps, [0.1] * 14), 1.0)
    assert json.loads(json.dumps(found)) == found
    events = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 2 * (len(steps[0].spans) + len(steps[0].flights))
    assert {e["cat"] for e in events} == {"compute", "wait", "exchange"}
    waits = [e for e in events if e["cat"] == "wait"]
    assert waits[0]["dur"] == pytest.approx(1e4) and waits[6]["ts"] - waits[0]["ts"] == pytest.approx(1e6)
    for tid in {e["tid"] for e in events}:  # viewers draw what overlaps on one line over each other
        line = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == tid)
        assert all(b[0] >= a[1] - 0.01 for a, b in pairwise(line))
    names = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert names == {0: "compute", 1: "ulysses exchanges", 2: "ulysses exchanges (2)", 21: "tensor exchanges"}
    assert {"axis", "layer", "direction", "exchange", "exposed", "hidden", "share_of_step"} <= found["otherData"]["rows"][0].keys()


def test_bytes_over_cp() -> None:
    step = make_step()
    step.flights.append(step.flights[0]._replace(what=CP))
    assert overlap.bytes_sent(step, "cp", 0) == 4 * 4 and overlap.bytes_sent(step, "cp", 1) == 0, "not what stays"
    assert "by a rank 16 B to 1.0 KiB" in overlap._line_about_context([1024, 16])
    assert "no query saw a key of another rank" in overlap._line_about_context([0, 0])


def with_messages(step: StepTimes) -> StepTimes:
    """The same with two micro-batches through rank 0 of two stages: what it sends, and what it waits for."""
    for i in range(2):
        step.actions.append((Action("F", 0, i), 0.1 * i, 0.1 * i + 0.1))
        step.flights.append(CollectiveTimes(DOWN, f"F0:{i}", 0, "forward", 0.1 * i + 0.1, 0.1 * i + 0.15, 0.0))
    for i in range(2):
        step.actions += [(Action("B", 0, i), 0.5 + 0.2 * i, 0.7 + 0.2 * i), (Action("W", 0, i), 0.7 + 0.2 * i, 0.7 + 0.2 * i)]
        step.flights.append(CollectiveTimes(UP, f"B1:{i}", 1, "backward", 0.1, 0.45 + 0.2 * i, 0.25 * (1 - i)))
    return step


def test_messages_of_a_pipeline_are_counted_apart(tmp_path: Path) -> None:
    """By the stage that made them, in rows, trace and picture; bytes are those that are sent."""
    step = with_messages(make_step())
    assert overlap.bytes_sent(step, "pp", 0) == 2 * 6 * 2
    rows = tabulate([step], [0.1 if flight.what.axis == "pp" else 0.01 for flight in step.flights])
    of_pipeline = [row for row in rows if row.axis == "pp"]
    assert rows[:2] == of_pipeline and [row[1:6] for row in of_pipeline] == [
        (0, "forward", 2, pytest.approx(0.2), 0.0), (1, "backward", 2, pytest.approx(0.2), pytest.approx(0.25)),
    ]  # fmt: skip
    lines = table(rows, 1, 1.0, [0.1])
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert "pipeline 1 backward 2 200.00 ms 0 % 250.00 ms 25.00 %" in text and "by the stage that made them" in text
    assert "by the stage" not in "\n".join(table(tabulate([make_step()], [0.1] * 14), 1, 1.0, [0.1]))
    events = trace([step], rows, 1.0)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(names) if tid > 30] == ["pipeline exchanges", "pipeline exchanges (2)", "pipeline exchanges (3)"]
    found = next(e for e in events if e["name"] == "B1:0")
    assert found["args"] == {
        "layer": 1, "direction": "backward", "op": "receive", "elements": 6, "dtype": "bfloat16", "exposed_us": 250000,
    }  # fmt: skip
    pytest.importorskip("matplotlib")
    draw_steps(step, tmp_path / "a.png", {})


class OfTwo:
    """A pipeline of two ranks, of which this is the first."""

    kind, size = "1f1b", 2

    def __init__(self) -> None:
        self.channels = SimpleNamespace(recorder=None, me=0)

    def plan(self, num_micro_batches: int) -> PipelinePlan:
        return plan_pipeline("1f1b", 2, 1, num_micro_batches)


def report_of_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[StepTimes]) -> list[str]:
    """The lines of a report on steps written by hand; the other rank computes when this one waits."""
    lines: list[str] = []
    other = {
        "actions": [
            ["F", 1, 0, 0, 0.15, 0.25], ["B", 1, 0, 0, 0.25, 0.45], ["W", 1, 0, 0, 0.45, 0.45],
            ["F", 1, 1, 0, 0.45, 0.55], ["B", 1, 1, 0, 0.55, 0.65], ["W", 1, 1, 0, 0.65, 0.65],
        ],
        "sent": {"B1:0": 0.4, "B1:1": 0.65}, "received": {"F0:0": [0.15, 0.15], "F0:1": [0.45, 0.0]},
    }  # fmt: skip
    monkeypatch.setattr(overlap, "time_alone", lambda collectives, groups, clock, ep: [0.04] * len(collectives))
    monkeypatch.setattr(overlap, "time_messages", lambda messages, channels, groups, clock: dict.fromkeys(messages, 0.01))
    monkeypatch.setattr(overlap, "broadcast_json", lambda value, group: value)
    monkeypatch.setattr(
        overlap, "gather_json", lambda value, group: json.loads(json.dumps([value, [other, 24]] if isinstance(value, list) else [value]))
    )
    pipeline: Any = OfTwo()
    made = OverlapReport(len(steps), Groups(), tmp_path, lines.append, pipeline)  # type: ignore[arg-type]
    assert pipeline.channels.recorder is made.recorder
    made.recorder.steps = steps
    made.write()
    return lines


def test_the_report_of_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [with_messages(make_step(seconds, layers=0)) for seconds in (9.0, 1.0, 3.0, 1.1)]
    steps[3].actions = [(action, 2 * begin, 2 * end) for action, begin, end in steps[3].actions]  # the median
    lines = report_of_pipeline(tmp_path, monkeypatch, steps)
    first = next(i for i, line in enumerate(lines) if "messages of rank 0's pipeline" in line)
    assert lines[first : first + 6] == [
        "  messages of rank 0's pipeline: 48 B in all, by a rank 24 B to 24 B",
        "  its ranks together waited 400.0 ms for messages: 300.0 ms until they were sent, 100.0 ms while they were under way",
        "pipeline (1f1b): passes of a step 1800.0 ms, 1.440 of the 1250.0 ms of a replay with the mean times of its actions;"
        " bubble 52.8 %, planned 32.0 %",
        "  rank  planned                                           measured (F, B with micro-batch; dots are waits)",
        "     0  F0---F1----.B0---------B1--------...............  F0---F1----................B0--------B1---------",
        "     1  .....F0-B0--F1-B1--.............................  ....F0-B0---F1-B1...............................",
    ], lines  # fmt: skip
    assert f"overlap: schedule in {tmp_path / 'overlap-pipeline.svg'}" in lines
    assert "1f1b: 2 ranks, 2 micro-batches" in (tmp_path / "overlap-pipeline.svg").read_text()
    assert not (tmp_path / "overlap.png").exists(), "no layer has an exchange of its own"


def test_a_schedule_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = report_of_pipeline(tmp_path / "absent", monkeypatch, [with_messages(make_step())])
    path = tmp_path / "absent" / "overlap-pipeline.svg"
    assert f"warning: overlap: {path} cannot be written: No such file or directory; training goes on" in lines


def test_each_axis_is_timed_on_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = SimpleNamespace(cp="cp", sp="sp", tp="tp", pp=SINGLE_RANK, device=torch.device("cpu"), control=SINGLE_RANK)
    asked: list[str] = []

    def recorded(group: str) -> Handle:
        asked.append(group)
        return done(torch.zeros(1))

    monkeypatch.setattr(overlap, "all_to_all_async", lambda send, sends, receive, receives, group: recorded(group))
    monkeypatch.setattr(overlap, "all_reduce_async", lambda send, group: recorded(group))
    monkeypatch.setattr(overlap, "gather_json", lambda value, group: [value])
    overlap.time_alone([SP, CP, TP], groups, overlap.WallClock())  # type: ignore[arg-type]
    assert asked[:3] == ["sp", "cp", "tp"]


def test_lanes() -> None:
    flights = [
        CollectiveTimes(SP, str(i), 0, "forward", *times, 0.0) for i, times in enumerate([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 2.6)])
    ]
    assert [(lane, f.name) for lane, f in in_lanes(reversed(flights))] == [(0, "0"), (1, "1"), (0, "2"), (2, "3")]


def test_the_picture_shows_two_layers_of_each_pass() -> None:
    forward, backward = windows(make_step(layers=6))
    assert {s.layer for s in forward.spans} == {s.layer for s in backward.spans} == {2, 3}
    assert {f.layer for f in forward.flights} == {2, 3} and {f.direction for f in forward.flights} == {"forward"}
    assert forward.end - forward.begin == pytest.approx(2 * 0.14)
    twice = make_step(layers=2)
    later = make_step(layers=2)
    twice.spans += [s._replace(begin=s.begin + 1.0, end=s.end + 1.0) for s in later.spans]
    assert windows(twice)[0].end == pytest.approx(2 * 0.14), "the first micro-batch only"
    assert windows(StepTimes(1.0)) == []


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_steps(make_step(), tmp_path / "a.png", {"forward": "all of it"})
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    draw_steps(StepTimes(1.0), tmp_path / "empty.png", {})
    with pytest.raises(OSError):
        draw_steps(make_step(), tmp_path / "absent" / "a.png", {})


class Groups:
    """A layout of one rank."""

    cp = sp = tp = pp = control = SINGLE_RANK
    pp_ranks, pp_rank = (0,), 0
    rank, device = 0, torch.device("cpu")


def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[OverlapEntry], list[str]]:
    """Of two steps written by hand, without anything to time."""
    lines: list[str] = []
    monkeypatch.setattr(overlap, "time_alone", lambda collectives, groups, clock, ep: [0.04] * len(collectives))
    monkeypatch.setattr(overlap, "gather_json", lambda value, group: [value])
    made = OverlapReport(2, Groups(), tmp_path, lines.append)  # type: ignore[arg-type]
    assert not made.is_due(last=True), "nothing is recorded"
    made.recorder.steps = [make_step()]
    assert not made.is_due(last=False) and made.is_due(last=True)
    made.recorder.steps = [make_step(), make_step()]
    assert made.is_due(last=False)
    rows = made.write()
    assert not made.is_due(last=True)
    made.recorder.start_step()
    assert not made.recorder.recording
    return rows, lines


def test_without_matplotlib_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "find", lambda name: availability.Kernel(name, False, reason=f"{name} is not installed"))
    _, lines = report(tmp_path, monkeypatch)
    assert lines[-1] == "overlap: no picture, for matplotlib is not installed; pip install matplotlib gets it"
    assert (tmp_path / "overlap-trace.json").exists() and not (tmp_path / "overlap.png").exists()


def test_files_that_cannot_be_written_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, lines = report(tmp_path / "absent", monkeypatch)
    warnings = [line for line in lines if line.startswith("warning: overlap: ")]
    assert rows and len(warnings) >= 1 and all("No such file or directory" in line for line in warnings)
    assert all(line.endswith("; training goes on") for line in warnings)


def test_a_broken_library_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "find", lambda name: availability.Kernel(name, True, "3"))

    def broken(*args: object) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(overlap, "draw_steps", broken)
    _, lines = report(tmp_path, monkeypatch)
    assert lines[-1] == f"warning: overlap: {tmp_path / 'overlap.png'} cannot be drawn: RuntimeError: no fonts; training goes on"


@pytest.mark.parametrize(
    "words, steps", [([], None), (["--report-overlap"], 10), (["--report-overlap", "3"], 3), (["--report-overlap", "--bf16"], 10)]
)
def test_the_flag_alone_means_ten_steps(words: list[str], steps: int | None) -> None:
    assert config_from_args([*FLAGS, "--sp-size=2", *words], world_size=2).logging.report_overlap == steps


@pytest.mark.parametrize("words, message", [
    (["--report-overlap"], "tensor_model_parallel_size 1 and pipeline_model_parallel_size 1 there are none to report: add"),
    (["--report-overlap", "--sp-size=2", "--skip-train", "--load=x"], "--skip-train takes none"),
    (["--report-overlap", "--sp-size=2", "--verify-parallelism"], "--verify-parallelism compares one step and ends"),
    (["--report-overlap", "0", "--sp-size=2"], r"--report-overlap \(0\) must be at least 1"),
    (["--report-overlap", "many", "--sp-size=2"], "expected an integer, got 'many'"),
])  # fmt: skip
def test_nothing_to_report(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_args([*FLAGS, *words], world_size=2)


def test_a_recorder_is_handed_to_every_block() -> None:
    from megatron_sp.parallel.parallel_context import ParallelContext

    layout: Any = ParallelContext()
    assert layout.in_layer(3) is layout
    recorder = Recorder(overlap.WallClock(), 1)
    inner = ParallelContext(recorder=recorder).in_layer(3)
    assert [axis.recorder for axis in (inner.tp, inner.sp, inner.cp)] == [recorder.at(axis, 3) for axis in ("tp", "sp", "cp")]
