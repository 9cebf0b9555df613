"""tools/dev/house_figures.py: what it counts in a package small enough to count by hand; docstrings; what a plain run imports."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("house_figures", ROOT / "tools/dev/house_figures.py")
assert SPEC is not None and SPEC.loader is not None
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)

BUDGET_LINES, BUDGET_FILES = 25_000, 130
SOURCE = f'''"""Numbers."""

LONG = "{"x" * 120}"  # a comment


# another
class Circle:
    """Of the class.

    Two lines of text, and a blank one.
    """

    @property
    def width(self):
        return 1

    @staticmethod
    def narrow(x):
        """Return x."""

        def inner():
            return x

        return inner
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "pack"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""A package."""\n')
    (folder / "a.py").write_text(SOURCE)
    (folder / "sub").mkdir()
    (folder / "sub/b.py").write_text("def late():\n    from pack.a import Circle\n    return Circle\n\n\ndef unused(): ...\n")
    return folder


def test_a_package_counted_by_hand(package: Path) -> None:
    counts = tool.count(sorted(package.rglob("*.py")))
    assert {name: counts[name] for name in ("files", "lines", "functions", "comments", "long_lines", "small_files", "words", "code")} == {
        "files": 3, "lines": 31, "functions": 5, "comments": 2, "long_lines": 1, "small_files": 1, "words": 16,
        "code": 31 - 10 - 6 - 1,  # blank lines (one of them in a docstring), docstrings, comments
    }  # fmt: skip
    assert tool.per(counts, "functions", "lines", 1000) == 161.3
    assert {name: some["files"] for name, some in tool.folders(package).items()} == {".": 2, "sub": 1}
    lines = tool.folder_table(tool.folders(package)).splitlines()
    assert len({len(line) for line in lines}) == 1 and [line.split()[0] for line in lines] == ["folder", ".", "sub", "all"]


def test_modules_and_names_that_other_folders_import_need_a_docstring(package: Path) -> None:
    assert tool.undocumented(package) == ["pack/sub/b.py:1: the module"]
    (package / "a.py").write_text(SOURCE.replace('"""Of', 'x = """Of'))
    assert tool.undocumented(package) == ["pack/a.py:7: Circle", "pack/sub/b.py:1: the module"]
    assert tool.undocumented(ROOT / "megatron_sp") == []


@pytest.mark.parametrize("line, alone", [
    ("Of the MLP.", False), ("Whether it is sound.", False), ("What a rank sends.", False), ("Return whether it is sound.", True),
    ("Official names of the models.", True), ("Memory of one rank.", True),
])  # fmt: skip
def test_a_first_line_stands_alone(line: str, alone: bool) -> None:
    assert tool.stands_alone(line) is alone


def test_every_first_line_stands_alone() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{text.lineno}: {text.value[:80]}"
        for path in sorted((ROOT / "megatron_sp").rglob("*.py"))
        for _, text in tool.docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if not tool.stands_alone(text.value)
    ]
    assert bad == []


def test_a_plain_run_imports_no_more_than_its_budget() -> None:
    modules = tool.imported()
    assert {
        "megatron_sp",
        "megatron_sp.training.step",
        "megatron_sp.models.gpt",
    } <= modules.keys() and "megatron_sp.commands.cli" not in modules
    flags = {"arguments", "settings"}  # other programs' names and files are read where a command line has them
    assert {name.rpartition(".")[2] for name in modules if name.startswith("megatron_sp.config.flags.")} == flags
    largest = sorted(modules, key=modules.__getitem__, reverse=True)[:40]
    assert sum(modules.values()) <= BUDGET_LINES and len(modules) <= BUDGET_FILES, (
        f"a plain run imports {sum(modules.values()):,} lines in {len(modules)} files, more than {BUDGET_LINES:,} in {BUDGET_FILES}:"
        f" import what it does not use where that is used, in a function; the largest are {', '.join(largest)}"
    )


def test_a_program_that_fails_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match=r"failed with exit code 2:\nerror: --num-layers \(0\)"):
        tool.imported([*tool.PLAIN_RUN, "--num-layers", "0"])
