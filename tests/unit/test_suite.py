"""The tests about the tests: none of their folders is passed over."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    """pytest's own list of folders that it does not look into has "dist" in it."""
    folders = {path.parent.name for path in Path(__file__).parent.parent.glob("*/test_*.py")}
    assert folders >= {"unit", "dist", "integration"}
    passed_over = [folder for folder in folders for pattern in pytestconfig.getini("norecursedirs") if fnmatch(folder, pattern)]
    assert passed_over == []
