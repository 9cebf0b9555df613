"""Tests that need a CUDA device; where there is none, nothing in this folder is collected.

What torch says of itself on a GPU is no error here, and a mode of the whole process that a test has set ends with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
# as pytest and Python write filters; each comes once in a process, so which test it would fail depends on their order
TORCH_SAYS = (
    "ignore:Warning. Profiler clears events at the end of each cycle:UserWarning",
    "ignore:Synchronization debug mode is a prototype feature:UserWarning",
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
    # of attention in backward, with --deterministic-mode as a warning (warn_only)
    "ignore:[\\w ]+ defaults to a non-deterministic algorithm:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything else that warns is an error, as in all tests."""
    for item in items:
        if FOLDER in item.path.parents:
            for rule in TORCH_SAYS:
                item.add_marker(pytest.mark.filterwarnings(rule))


@pytest.fixture(autouse=True)
def modes_of_the_process() -> Iterator[None]:
    """Products of fp32 operands in fp32, not in TF32, so that the CPU's tolerances hold; afterwards all modes are as before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        reset_modes()


def reset_modes() -> None:
    """Let the host wait again, and kernels be what they are without --deterministic-mode, whatever a test that failed has left."""
    torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
