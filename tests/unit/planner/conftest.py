"""The fixture of tests in which no layout is run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.rough_runs import without_runs


@pytest.fixture
def rough_runs() -> Iterator[None]:
    """What runs would tell is that of the rough forms."""
    with without_runs():
        yield
