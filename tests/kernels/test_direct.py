"""Launches that go around Triton's JIT launch what it would have launched: on a driver that records them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CHECKS = [
    ("what_is_launched_is_what_the_jit_launches", "launches_of_the_package"),
    *(pytest.param((check,), marks=pytest.mark.long) for check in (
        "constants_devices_and_warps_count", "later_launches_do_without_the_jit", "what_is_not_known_is_left_to_the_jit",
    )),
]  # fmt: skip


@pytest.mark.parametrize("checks", CHECKS, ids="-".join)
def test_direct_launches(checks: tuple[str, ...]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-m", "kernels.driver_stand_in", *checks]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
