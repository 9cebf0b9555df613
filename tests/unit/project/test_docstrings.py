"""Docstrings of the package: every public name has one, and each first line can be read without the name above it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

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


def test_every_public_name_has_a_docstring() -> None:
    assert figures.Documented(ROOT / "megatron_sp").missing() == []


def test_names_without_a_docstring_are_found(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text(
        "class Shape(Protocol):\n"
        '    """A shape."""\n'
        "    def area(self):\n"
        '        """Area."""\n'
        "    def name(self): ...\n"
        "class Circle:\n"
        '    """A circle."""\n'
        "    name = 'circle'\n"
        "    def area(self): ...\n"
        "    def radius(self): ...\n"
        "    def _own(self): ...\n"
        "class Ring(Circle):\n"
        "    def area(self): ...\n"
        "def conv2d(step: Step): ...\n"
        "def tell(step: int): ...\n"
    )
    assert figures.Documented(package).missing() == [
        ("package/a.py", 1, "the module"), ("package/a.py", 5, "Shape.name"), ("package/a.py", 10, "Circle.radius"),
        ("package/a.py", 12, "Ring"), ("package/a.py", 15, "tell"),
    ]  # fmt: skip


@pytest.mark.parametrize("line, alone", [
    ("Of the MLP.", False), ("Whether it is sound.", False), ("What a rank sends.", False), ("Return whether it is sound.", True),
    ("Official names of the models.", True), ("Memory of one rank.", True),
])  # fmt: skip
def test_what_stands_alone(line: str, alone: bool) -> None:
    assert figures.stands_alone(line) is alone
