"""Shared set-up: warm imports before any fork, so that a test on four ranks takes a tenth of a second."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
torch.testing.assert_close(torch.ones(1), torch.ones(1))
_leaf = torch.ones(1, requires_grad=True)
torch.autograd.grad(_leaf * 1, _leaf, torch.ones(1))  # imports sympy, which is half a second of every rank


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU are deselected where there is none."""
    if torch.cuda.is_available():
        return
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
