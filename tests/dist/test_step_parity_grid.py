"""The grid of layouts: pairwise in every run (eight ranks with ``make test-all``), the full product with ``make test-full``."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from support.layouts import AXES, grid_case, pairwise_grid, run_cases

PAIRWISE = pairwise_grid()
GRIDS = sorted({(case.tp, case.sp, case.dp) for case in PAIRWISE})
EIGHT = [axes for axes in GRIDS if math.prod(axes) == 8]


@pytest.mark.parametrize(
    "axes", [pytest.param(axes, marks=pytest.mark.long if axes in EIGHT else ()) for axes in GRIDS],
    ids=lambda axes: "tp{}-sp{}-dp{}".format(*axes),
)  # fmt: skip
def test_pairwise(axes: tuple[int, int, int], tmp_path: Path) -> None:
    """All cases of the same axes in one set of processes; the message names the case."""
    cases = [case for case in PAIRWISE if (case.tp, case.sp, case.dp) == axes]
    run_cases(cases, tmp_path)


def test_the_pairwise_grid_is_about_as_large_as_it_should_be() -> None:
    assert 100 <= len(PAIRWISE) <= 170 and len({str(vars(case)) for case in PAIRWISE}) == len(PAIRWISE)


@pytest.mark.full
@pytest.mark.parametrize("ranks", AXES["ranks"], ids=str)
@pytest.mark.parametrize("mode", AXES["mode"])
def test_full_product(ranks: tuple[int, bool, int, int], mode: str, tmp_path: Path) -> None:
    others = {name: values for name, values in AXES.items() if name not in ("ranks", "mode")}
    choices = (dict(zip(others, values, strict=True)) | {"ranks": ranks, "mode": mode} for values in itertools.product(*others.values()))
    cases = [case for case in map(grid_case, choices) if case is not None]
    for start in range(0, len(cases), 100):
        run_cases(cases[start : start + 100], tmp_path)
