"""The picture of who sends which rows to whom, read back as numbers and as shapes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from megatron_sp.parallel.context_plan import ContextPlan, cut_row, plan_context
from megatron_sp.parallel.row_mask import RowMask
from megatron_sp.planner.context_picture import context_matrix, context_svg

SVG = "{http://www.w3.org/2000/svg}"


def plan_of(mask: RowMask, c: int, k: int | None = None) -> ContextPlan:
    return plan_context(mask, cut_row(mask, c, k))


def test_the_matrix_of_a_zigzag() -> None:
    assert context_matrix(plan_of(RowMask(4800), 2), 3).splitlines() == [
        "rows of keys and values that travel, 3 sequences of 4,800 positions",
        " rank    has  from 0  from 1  receives  of a ring  pairs/mean  pieces",
        "    0  2,400       .   7,200     7,200       100%       1.000       2",
        "    1  2,400   3,600       .     3,600        50%       1.000       2",
        "sends          3,600   7,200    10,800        75%",
        "largest share of pairs / mean: 1.000",
    ]


def test_the_matrix_of_one_rank_and_of_a_row_that_nobody_sees() -> None:
    alone = context_matrix(plan_of(RowMask(7), 1), 1)
    assert "1 sequence of 7 positions" in alone and alone.splitlines()[2].split() == ["0", "7", ".", "0", "-", "1.000", "1"]
    nothing = context_matrix(plan_of(RowMask(8, causal=False, lengths=(0,)), 2), 1)
    assert nothing.splitlines()[2].split() == ["0", "4", ".", "0", "0", "0%", "-", "0"]


def test_sums_of_the_matrix_are_those_of_the_plan() -> None:
    mask = RowMask(100, documents=((30, 64, 100), (8, 100)))
    plan = plan_of(mask, 4, 3)
    lines = [line.split() for line in context_matrix(plan, 2).splitlines()[2:7]]
    for i in range(4):
        assert [0 if cell == "." else int(cell) for cell in lines[i][2:6]] == [plan.num_rows(i, j, 2) for j in range(4)]
        assert int(lines[i][6]) == sum(plan.rows_received(i, 2)) and int(lines[i][9]) == sum(len(plan.pieces(i, j)) for j in range(4))
    assert [int(cell) for cell in lines[4][1:5]] == [sum(plan.rows_sent(j, 2)) for j in range(4)]
    with pytest.raises(ValueError, match="the mask describes 2 sequences, and 1 are asked for"):
        context_matrix(plan, 1)


def bars(svg: str) -> list[tuple[int, int, int, int, str]]:
    """Lane, height, start and stop in positions (1,000 in a row) and colour of every bar."""
    found = []
    for bar in ET.fromstring(svg).iter(f"{SVG}rect"):
        if bar.get("fill"):
            x, y, width, height = (float(bar.get(name, "nan")) for name in ("x", "y", "width", "height"))
            start, stop = ((at - 74) / 840 * 1000 for at in (x, x + width))
            found.append((int(y - 92) // 34, int(height), round(start), round(stop), bar.get("fill", "")))
    return found


@pytest.mark.parametrize("c", [1, 3, 10])
def test_bars_are_the_runs_and_rows_of_the_plan(c: int) -> None:
    mask = RowMask(1000, documents=((300, 640, 1000), (80, 1000)))
    plan = plan_of(mask, c, 3)
    for sequence in range(2):
        found = bars(context_svg(plan, sequence))
        colours = {lane: colour for lane, height, *_, colour in found if height == 26}
        assert len(set(colours.values())) == c
        owned = sorted((lane, start, stop) for lane, height, start, stop, _ in found if height == 26)
        assert owned == sorted((i, *run) for i in range(c) for run in plan.runs[i])
        received = sorted((lane, start, stop, colour) for lane, height, start, stop, colour in found if height == 10)
        assert received == sorted((i, *run, colours[j]) for i in range(c) for j in range(c) if i != j for run in plan.rows(i, j)[sequence])


def test_the_words_of_the_picture() -> None:
    svg = context_svg(plan_of(RowMask(1000, documents=((300, 640, 1000), (80, 1000)), window=50), 2, 1), 1)
    texts = [text.text for text in ET.fromstring(svg).iter(f"{SVG}text")]
    assert texts[0] == "1,000 positions on 2 ranks: causal, window 50, 2 documents, sequence 1 of 2"
    assert texts[2] == "rank 0" and re.fullmatch(r"receives 0 rows; 0\.\d\d of the mean's pairs", texts[3] or "")
    assert (texts[5] or "").startswith("receives 49 rows; 1.0")
    (ticks,) = ET.fromstring(svg).iter(f"{SVG}path")
    assert ticks.get("d") == f"M{74 + 67.2} 76v10 M914 76v10"
    padded = context_svg(plan_of(RowMask(8, causal=False, lengths=(4,)), 1))
    assert "8 positions on 1 rank: bidirectional, 4 real keys" in padded and "M494 76v10" in padded
    assert "no pairs" in context_svg(plan_of(RowMask(8, causal=False, lengths=(0,)), 2)) and "<path" not in context_svg(
        plan_of(RowMask(8), 2)
    )
    with pytest.raises(ValueError, match="describes 1 sequences: there is no sequence 1"):
        context_svg(plan_of(RowMask(8), 2), 1)
