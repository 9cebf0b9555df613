"""--report-overlap of pipelines on real ranks: messages as a run without contents has them, actions in the order of the plan, the files."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.training import NO_DROPOUT, records, train

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.estimate.layout import pipeline_plan
from megatron_sp.parallel.pipeline_plan import PipelinePlan
from megatron_sp.planner import fake_run
from megatron_sp.training.overlap import OverlapReport

SVG = "{http://www.w3.org/2000/svg}"
MODEL = ("--num-layers", 5, *NO_DROPOUT, "--micro-batch-size", 1, "--global-batch-size", 3, "--train-iters", 3)
CASES: dict[str, tuple[int, tuple[object, ...]]] = {
    "1f1b": (2, ("--pp-size", 2)),
    # with recomputation a backward pass takes twice as long as a forward one, and the order is another one
    "zbv": (2, ("--pp-size", 2, "--pipeline-schedule", "zbv", "--zero-stage", 1, "--recompute-granularity", "full")),
    "slices": (2, ("--pp-size", 2, "--pipeline-schedule", "slices", "--pipeline-slices", 3)),
    "tp": (4, ("--pp-size", 2, "--tp-size", 2, "--sequence-parallel")),
    "interleaved": (4, ("--pp-size", 4, "--num-layers", 8, "--pipeline-schedule", "interleaved")),
    "dp": (4, ("--pp-size", 2, "--global-batch-size", 6, "--pipeline-schedule", "zb1p")),
}
LONG = ("interleaved", "dp")


def keep_steps(run_dir: Path) -> Callable[[int], None]:
    """Have each rank write what it has recorded to a file before it reports."""

    def setup(rank: int) -> None:
        write = OverlapReport.write

        def kept(self: OverlapReport) -> Any:
            found = [{"actions": step.actions, "flights": step.flights} for step in self.recorder.steps]
            (run_dir / f"steps-{rank}.json").write_text(json.dumps(found))
            return write(self)

        OverlapReport.write = kept  # type: ignore[method-assign]

    return setup


@pytest.mark.often("zbv")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES])
def test_a_pipeline_reports_its_messages_and_its_schedule(name: str, tmp_path: Path) -> None:
    ranks, flags = CASES[name]
    words = (*MODEL, *flags, "--report-overlap", 2)
    config = config_from_args(
        [*map(str, words), "--seq-length=32", "--hidden-size=32", "--num-attention-heads=4", "--lr=1", "--mock-data", "--vocab-size=60"],
        world_size=ranks,
    )
    plan = pipeline_plan(config.model, config.kernels, config.parallel, 3)
    runs = [fake_run.run_rank(config, ranks, "cpu", rank) for rank in range(ranks)]
    outcome = train(tmp_path, "--save", tmp_path / "run", *words, ranks=ranks, setup=keep_steps(tmp_path))
    outcome.expect(0, "messages of rank 0's pipeline", f"pipeline ({plan.kind}): passes of a step", "overlap: schedule in")
    assert all("pipeline (" not in text for text in outcome.texts[1:])
    for rank in range(ranks):
        steps = json.loads((tmp_path / f"steps-{rank}.json").read_text())
        assert len(steps) == 2
        me = rank * plan.num_ranks // ranks
        for step in steps:
            check_actions(step["actions"], plan, me)
            check_messages(step["flights"], plan, me)
            messages = [size for (_, _, group, _), size in runs[rank].sent().items() if group == "pp"]
            assert sent(step["flights"]) == tuple(map(sum, zip(*messages, strict=True)))
    check_files(tmp_path / "run", plan, outcome.texts[0])


def check_actions(found: list[Any], plan: PipelinePlan, me: int) -> None:
    """All of the plan's, one after another."""
    assert [tuple(action) for action, _, _ in found] == [tuple(action) for action in plan.actions[me]]
    times = [at for _, begin, end in found for at in (begin, end)]
    assert times == sorted(times) and times[0] >= 0


def check_messages(flights: list[Any], plan: PipelinePlan, me: int) -> None:
    """Each message is recorded by its sender and its receiver, under the action that made it."""
    for op, wanted in (
        ("send", plan.messages(me)),
        ("receive", [message for rank in range(plan.num_ranks) for message in plan.messages(rank) if message.target == me]),
    ):
        found = sorted((name, layer, way, tuple(what[5])) for what, name, layer, way, *_ in flights if what[:2] == ["pp", op])
        ways = {"F": "forward", "B": "backward"}
        assert found == sorted((str(m.action), m.action.stage, ways[m.action.kind], (m.source, m.target)) for m in wanted)
    assert all(0 <= begin <= end and exposed >= 0 for _, _, _, _, begin, end, exposed in flights)


def sent(flights: list[Any]) -> tuple[int, int]:
    """(number, bytes) of what a rank has sent to other stages; all in fp32."""
    sizes = [4 * sum(what[2]) for what, *_ in flights if what[:2] == ["pp", "send"]]
    assert all(what[4] == "float32" for what, *_ in flights if what[:2] == ["pp", "send"])
    return len(sizes), sum(sizes)


def check_files(run_dir: Path, plan: PipelinePlan, text: str) -> None:
    """Boxes of every action in both halves of the picture, rows on the console, lanes and rows of the trace."""
    picture = ET.parse(run_dir / "overlap-pipeline.svg").getroot()
    wanted = [str(a) for actions in plan.actions for a in actions if plan.splits or a.kind != "W"]
    for half in ("planned", "measured"):
        (panel,) = (group for group in picture.iter(f"{SVG}g") if group.get("id") == half)
        assert [(title.text or "").rpartition(": ")[0] for title in panel.iter(f"{SVG}title")] == wanted
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  rank  planned"))
    assert [line.split()[0] for line in lines[first + 1 : first + 1 + plan.num_ranks]] == [str(r) for r in range(plan.num_ranks)]
    trace = json.loads((run_dir / "overlap-trace.json").read_text())
    rows = [row for row in trace["otherData"]["rows"] if row["axis"] == "pp"]
    of_rank_0 = [m for rank in range(plan.num_ranks) for m in plan.messages(rank) if 0 in (m.source, m.target)]
    assert sum(row["number"] for row in rows) == len(of_rank_0) and all(row["exchange"] > 0 for row in rows)
    assert any(e["args"].get("name") == "pipeline exchanges" for e in trace["traceEvents"] if e["name"] == "thread_name")
    metrics = records(run_dir)
    assert len(metrics) == 3


@pytest.mark.long
def test_recording_a_pipeline_changes_no_bit(tmp_path: Path) -> None:
    flags = ("--pp-size", 2, "--pipeline-schedule", "zb1p", *MODEL)
    for name, more in (("plain", ()), ("told", ("--report-overlap", 2))):
        train(tmp_path, "--save", tmp_path / name, *flags, *more, ranks=2).expect(0)
    a, b = ([(r["loss_hex"], r["grad_norm_hex"]) for r in records(tmp_path / name)] for name in ("plain", "told"))
    assert a == b and len(a) == 3
