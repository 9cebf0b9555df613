"""Curves as text."""

from __future__ import annotations

import math

import pytest

from megatron_sp.report.charts import sparkline


def test_bars_follow_the_values() -> None:
    assert sparkline(list(range(8))) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 1.0, 2.0]) == "█▁▅"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([]) == ""


def test_many_values_are_averaged_in_groups() -> None:
    assert sparkline([0, 2, 7, 9, 15, 15], width=3) == "▁▅█"
    assert len(sparkline([1.0] * 1001, width=60)) == 60


def test_gaps_stay_gaps_and_do_not_spoil_their_group() -> None:
    assert sparkline([1.0, math.nan, 2.0]) == "▁ █"
    assert sparkline([math.nan, 1.0, 2.0, math.inf], width=2) == "▁█"
    assert sparkline([math.nan, math.inf]) == "  "


def test_a_width_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"width \(0\)"):
        sparkline([1.0], width=0)
