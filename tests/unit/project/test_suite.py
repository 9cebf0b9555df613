"""The tests about the tests: none of their folders is passed over, and none of them depends on how fast the machine is."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest
from support.paths import ROOT


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    """pytest's own list of folders that it does not look into has "dist" in it."""
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders >= {"data", "schedule", "dist", "integration"}
    passed_over = [folder for folder in folders for pattern in pytestconfig.getini("norecursedirs") if fnmatch(folder, pattern)]
    assert passed_over == []


def test_no_verdict_is_a_measured_time() -> None:
    """A machine under load is slow: wait for events (support/waiting.py), count what is done, or give the code a clock of the test's."""
    clocks = re.compile(r"assert .*\b(monotonic|perf_counter)(_ns)?\(\)")
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted((ROOT / "tests").rglob("test_*.py")) if path.parent.name != "gpu"
        for number, line in enumerate(path.read_text().splitlines(), 1) if clocks.search(line)
    ]  # fmt: skip
    assert found == []
