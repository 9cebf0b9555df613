"""Curves as text."""

from __future__ import annotations

import math

import pytest

from megatron_sp.report.charts import sparkline


@pytest.mark.parametrize(("values", "width", "bars"), [
    (list(range(8)), 60, "▁▂▃▄▅▆▇█"), ([3.0, 1.0, 2.0], 60, "█▁▅"), ([5.0, 5.0], 60, "▁▁"), ([], 60, ""), ([1.0] * 1001, 60, "▁" * 60),
    ([0, 2, 7, 9, 15, 15], 3, "▁▅█"),  # many values are averaged in groups
    # gaps stay gaps and do not spoil their group
    ([1.0, math.nan, 2.0], 60, "▁ █"), ([math.nan, 1.0, 2.0, math.inf], 2, "▁█"), ([math.nan, math.inf], 60, "  "),
])  # fmt: skip
def test_bars_follow_the_values(values: list[float], width: int, bars: str) -> None:
    assert sparkline(values, width=width) == bars


def test_a_width_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"width \(0\)"):
        sparkline([1.0], width=0)
