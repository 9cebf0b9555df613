"""Mutants that no longer fit the source would test nothing."""

from __future__ import annotations

import pytest
from support import mutants
from support.paths import ROOT

PACKAGE = ROOT / "megatron_sp"


@pytest.mark.parametrize("suite", mutants.SUITES)
def test_every_mutant_changes_one_place(suite: str) -> None:
    chosen = mutants.SUITES[suite].mutants
    lost = [m.name for m in chosen if (PACKAGE / m.file).read_text().count(m.old) != 1 or m.old == m.new]
    assert lost == [] and len({m.name for m in chosen}) == len(chosen) > 25
