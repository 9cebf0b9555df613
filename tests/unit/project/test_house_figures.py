"""tools/dev/house_figures.py: what it counts, in a package small enough to count by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("house_figures_tool", ROOT / "tools/dev/house_figures.py")
assert SPEC is not None and SPEC.loader is not None
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)

FILES = {
    "__init__.py": '"""A package."""\n',
    "one/__init__.py": "",
    "one/a.py": f'''"""Numbers."""

import pack.one.b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pack.two import d
else:
    d = None
LONG = "{"x" * 120}"


class C:
    """Of the class."""

    @property
    def width(self, *, a=1, b=2, c=3, d=4, e=5, f=6, g=7, h=8, i=9):
        return 1

    @staticmethod
    def narrow(x, /, *rest, **more):
        """Return x."""

        def inner():
            return x

        return inner
''',
    "one/b.py": "def late():\n    from .a import C\n    return C\n",
    "two/__init__.py": "from . import d\n",
    "two/d.py": "from pack.one import b\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "pack" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "README.md").write_text("a\nb\n")
    return tmp_path / "pack"


def test_a_package_counted_by_hand(package: Path) -> None:
    found = tool.figures(package)
    one = found["folders"]["one"]
    assert (one["files"], one["lines"]) == (3, 30) and found["folders"]["."]["files"] == 1
    assert found["all"]["files"] == 6 and found["all"]["lines"] == 33 and found["readme_lines"] == 2
    assert one["lines_of_a_file"] == {"p50": 3, "p90": 3, "max": 27}
    assert one["lines_of_a_function"] == {"p50": 2, "p90": 3, "max": 7}, "without its decorators"
    assert one["parameters"] == {"p50": 0, "p90": 1, "max": 9}, "self and *rest are not counted"
    assert (one["functions"], one["wide_signatures"], one["long_lines"]) == (4, 1, 1)
    assert (one["docstrings"], one["not_alone"]) == (3, 1), "Of the class."
    assert found["folders"]["two"]["lines_of_a_function"] is None


def test_circles_are_those_of_run_time(package: Path) -> None:
    """Relative imports and those inside functions count, those for type checking do not."""
    assert tool.figures(package)["circles"] == [["pack.one.a", "pack.one.b"]]
    (package / "one/b.py").write_text("if not 1:\n    pass\n")
    assert tool.figures(package)["circles"] == []


def test_one_table_or_json(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> Any:
        assert tool.main([*words, "--package", str(package)]) == 0
        return capsys.readouterr().out

    lines = printed().splitlines()
    assert lines[0].split()[:3] == ["folder", "files", "lines"] and [line.split()[0] for line in lines[2:6]] == [".", "one", "two", "all"]
    assert len({len(line) for line in lines[:6]}) == 1, "the columns are aligned"
    assert "pack.one.a, pack.one.b" in lines[-2] and lines[-1] == "README: 2 lines"
    assert json.loads(printed("--json")) == tool.figures(package)
    assert printed("--docstrings") == "pack/one/a.py:13: Of the class.\n"
