"""Tests that need a CUDA device; where there is none, nothing in this folder is collected."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def whole_fp32() -> Iterator[None]:
    """Products of fp32 operands in fp32, not in TF32, so that the CPU's tolerances hold."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
