"""Docstrings of the package: each first line can be read without the name above it."""

from __future__ import annotations

import ast
import importlib.util

import pytest
from support.paths import ROOT

_SPEC = importlib.util.spec_from_file_location("house_figures", ROOT / "tools/dev/house_figures.py")
assert _SPEC is not None and _SPEC.loader is not None
figures = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(figures)


def test_every_first_line_stands_alone() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {first}"
        for path in sorted((ROOT / "megatron_sp").rglob("*.py"))
        for line, first in figures.docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if not figures.stands_alone(first)
    ]
    assert bad == []


@pytest.mark.parametrize("line, alone", [
    ("Of the MLP.", False), ("Whether it is sound.", False), ("What a rank sends.", False), ("Return whether it is sound.", True),
    ("Official names of the models.", True), ("Memory of one rank.", True),
])  # fmt: skip
def test_what_stands_alone(line: str, alone: bool) -> None:
    assert figures.stands_alone(line) is alone
