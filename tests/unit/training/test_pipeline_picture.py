"""The picture of a pipeline's step, as text and as SVG, from spans that are made up."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from megatron_sp.parallel.pipeline_orders import plan_pipeline
from megatron_sp.parallel.pipeline_plan import Action, Costs, PipelinePlan, replay_costs
from megatron_sp.training.pipeline_times import Box, Timetable, pipeline_svg, summary, text_rows

SVG = "{http://www.w3.org/2000/svg}"


def table(plan: PipelinePlan, stretch: float = 1.0, unit: float = 0.001) -> Timetable:
    """The replay with F, B and W of 1, 1.5 and 0.5 units, all times stretched."""
    run = replay_costs(plan, Costs(unit, 1.5 * unit, 0.5 * unit))
    drawn = [[a for a in actions if plan.splits or a.kind != "W"] for actions in plan.actions]
    return Timetable(tuple(tuple(Box(a, stretch * run.start[a], stretch * run.stop[a]) for a in actions) for actions in drawn))


def boxes(svg: str, half: str) -> list[tuple[str, str, float, float, float, str]]:
    """(title, class, x, y, width, text) of every action in a half of the picture."""
    found = []
    (panel,) = (group for group in ET.fromstring(svg).iter(f"{SVG}g") if group.get("id") == half)
    for group in panel.iter(f"{SVG}g"):
        title, rect, text = group.find(f"{SVG}title"), group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        if title is not None and rect is not None:
            x, y, width = (float(rect.get(name, "nan")) for name in ("x", "y", "width"))
            found.append((title.text or "", rect.get("class", ""), x, y, width, "" if text is None else text.text or ""))
    return found


def test_the_summary() -> None:
    plan = plan_pipeline("1f1b", 2, 1, 4)
    slow = table(plan, 1.5)
    assert summary(table(plan), slow) == (
        f"passes of a step {1e3 * slow.seconds:.1f} ms, 1.500 of the {1e3 * slow.seconds / 1.5:.1f} ms of a replay with the mean times"
        f" of its actions; bubble {100 * slow.bubble:.1f} %, planned {100 * slow.bubble:.1f} %"
    )
    assert "passes of a step 0.0 ms, the 0.0 ms" in summary(Timetable(((),)), Timetable(((),)))


def test_text_rows_show_names_where_there_is_room() -> None:
    row = (Box(Action("F", 0, 0), 0.0, 4.0), Box(Action("F", 0, 12), 4.0, 6.0), Box(Action("B", 0, 0), 9.0, 12.0),
           Box(Action("W", 0, 0, 2), 12.0, 16.0))  # fmt: skip
    later = (Box(Action("F", 1, 0), 4.0, 8.0), Box(Action("F", 3, 0), 8.0, 12.0), Box(Action("B", 3, 0), 12.0, 13.0))
    lines = text_rows(Timetable((row, later)), Timetable(((), later)), columns=16)
    assert lines[1:] == ["     0  F0--F-...B0-W0.2  ................", "     1  ....F0--f0--b...  ....F0--f0--b..."]
    assert lines[0] == "  rank  planned           measured (F, B, W with micro-batch; f, b of later stages; dots are waits)"


def test_boxes_smaller_than_a_column_are_added_up() -> None:
    """A column of short actions is no wait."""
    row = tuple(Box(Action("F", 0, i), 0.1 * i, 0.1 * i + 0.09) for i in range(80))
    (line,) = text_rows(Timetable((row,)), Timetable((row,)), columns=8)[1:]
    assert line.split()[1:] == ["FFFFFFFF"] * 2
    sparse = tuple(Box(Action("F", 0, i), 0.1 * i, 0.1 * i + 0.03) for i in range(80))
    (line,) = text_rows(Timetable((sparse,)), Timetable((row,)), columns=8)[1:]
    assert line.split()[1] == "........"


@pytest.mark.parametrize("plan", [plan_pipeline("1f1b", 2, 1, 3), plan_pipeline("zbv", 4, 2, 5), plan_pipeline("slices", 3, 1, 2, 4)],
                         ids=lambda plan: plan.kind)  # fmt: skip
def test_every_action_is_a_box_in_its_row(plan: PipelinePlan) -> None:
    as_planned, as_run = table(plan), table(plan, 1.25)
    svg = pipeline_svg(as_planned, as_run, "a < b & c")
    page = ET.fromstring(svg)
    assert next(page.iter(f"{SVG}text")).text == "a < b & c" and page.get("aria-label") == "a < b & c"
    assert "@media (prefers-color-scheme: dark)" in svg
    wide, high = float(page.get("width", "nan")), float(page.get("height", "nan"))
    ends = []
    for half, times in (("planned", as_planned), ("measured", as_run)):
        found = boxes(svg, half)
        assert [title.rpartition(": ")[0] for title, *_ in found] == [str(box.action) for row in times.rows for box in row]
        places = sorted({y for _, _, _, y, *_ in found})
        assert len(places) == plan.num_ranks and places[-1] + 24 <= high
        of_ranks = {y: [box for box in found if box[3] == y] for y in places}
        for y, row in zip(places, times.rows, strict=True):
            assert len(of_ranks[y]) == len(row)
            xs = [(x, x + width) for _, _, x, _, width, _ in of_ranks[y]]
            assert all(b[0] >= a[1] - 0.011 for a, b in pairwise(xs)) and xs[-1][1] <= wide
            first = min(box.action.stage for box in row)
            kinds = [box.action.kind if box.action.stage == first else box.action.kind.lower() for box in row]
            assert [kind for _, kind, *_ in of_ranks[y]] == kinds
        ends.append(max(x + width for _, _, x, _, width, _ in found) - 64)
    assert ends[1] / ends[0] == pytest.approx(1.25, rel=0.01), "one time axis"
    assert boxes(svg, "planned")[0][0] == "F0:0: 0.00 to 1.00 ms"


@pytest.mark.parametrize("kind, ranks, stages, count", [("zbv", 8, 2, 64), ("1f1b", 2, 1, 1)])
def test_the_width_follows_the_boxes_within_limits(kind: str, ranks: int, stages: int, count: int) -> None:
    """8 ranks and 64 micro-batches are readable: half of the boxes have their names or numbers, on some screens' width."""
    plan = plan_pipeline(kind, ranks, stages, count)  # type: ignore[arg-type]
    svg = pipeline_svg(table(plan), table(plan, 1.1), kind)
    width = float(ET.fromstring(svg).get("width", "nan"))
    assert 840 <= width <= 12_100
    found = boxes(svg, "planned")
    named = [text for *_, text in found if text]
    assert len(named) >= 0.45 * len(found) and all(re.fullmatch(r"[FBWfbw]?\d+", text) for text in named)
    assert len(svg) < 3_000_000
