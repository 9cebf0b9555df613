"""Triton's kernels compile for the GPUs that they are for: nothing is spilled, and memory is read and written in wide pieces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# rows that are no multiple of 16 elements long, and heads whose halves are not
NARROW = {"RMSNorm, h 5001", "RMSNorm, h 8200", "dropout, h 1023", "bias, h 1023", "rotary, a quarter of 96"}
SMALL, LARGE = 99, 227  # KiB of shared memory that a program may have: on Ada and the small chips of Ampere, on Hopper
QUICK = (
    "RMSNorm, h 4096", "RMSNorm, h 16384", "dropout, h 4096", "SwiGLU", "rotary, 32 heads of 128", "experts, 64 of 2048 x 2048",
    "cross entropy, 128256",
)  # fmt: skip
_PROGRAM = """
import dataclasses, json, sys
from kernels.ahead_of_time import compile_cases, CAPABILITIES
names, capabilities = json.loads(sys.argv[1])
print(json.dumps([dataclasses.asdict(each) for each in compile_cases(names, capabilities or CAPABILITIES)]))
"""


@cache
def compiled(names: tuple[str, ...], capabilities: tuple[int, ...] = ()) -> list[dict[str, object]]:
    """Compile cases in a process of its own: the launcher is replaced there, and nothing is interpreted."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-c", _PROGRAM, json.dumps([names, capabilities])]
    out = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: list[dict[str, object]] = json.loads(out.splitlines()[-1])
    return found


def require_good(found: list[dict[str, object]]) -> None:
    """Nothing is spilled, the registers of a program fit on a multiprocessor, accesses are wide."""
    assert found
    for each in found:
        assert each["spilled_bytes"] == 0, each
        registers, warps, shared = each["registers"], each["warps"], each["shared_bytes"]
        assert isinstance(registers, int) and isinstance(warps, int) and isinstance(shared, int)
        most = LARGE if str(each["case"]).startswith("experts") and each["capability"] != 80 else SMALL
        assert registers * warps * 32 <= 65536 and shared <= most * 1024, each
        assert each["widest"] == 128 or each["case"] in NARROW, each


@pytest.mark.long
def test_the_kernels_of_a_layer_on_hopper() -> None:
    require_good(compiled(QUICK, (90,)))


@pytest.mark.long
def test_every_kernel_everywhere_and_the_page_of_it() -> None:
    from kernels.ahead_of_time import PAGE, Compiled, page
    from kernels.cases import CASES

    found = compiled(tuple(CASES))
    require_good(found)
    first = PAGE.read_text().splitlines()[2]
    version = first.split("Triton ")[1].split(",")[0]
    assert page([Compiled(**each) for each in found], version) == PAGE.read_text(), "write it again: see its first line"  # type: ignore[arg-type]
