"""The first light of a GPU on the fake device: each part runs to its end as the CUDA branch, and the checker finds nothing.

What it computes is not there, so numbers are not looked at: events are timed, L2 caches flushed, streams waited for,
peaks read, and none of it is a typing error that an hour on a GPU would be lost to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from support.paths import ROOT

from fake_gpu.build import build

PROFILER = "AssertionError: Legacy CUDA profiling requires use_cpu=True"  # what torch's profiler says in a build for the CPU
SHORT = ("kernels:run", "timeline:run", "speed:run_small")
OTHERS = (
    "doctor:run", "steps:run", "replay:run_1b_64k", "memory_peak:run", "attention:run", "collectives:run",
    "kernels:run_others", "experts:run",
)  # fmt: skip
LEAST_RECORDS = {
    "kernels:run": 78,
    "timeline:run": 4,
    "experts:run": 8,
    "steps:run": 19,
    "replay:run_1b_64k": 5,
    "memory_peak:run": 2,
    "kernels:run_others": 111,
}


def run(parts: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What came of each part; they share the time that imports take."""
    build()  # here, so that a missing compiler is this test's message
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "fake_gpu.first_light", *parts], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {part: json.loads(line) for part, line in zip(parts, done.stdout.splitlines(), strict=True)}


@pytest.mark.long
@pytest.mark.parametrize("parts", [SHORT, OTHERS], ids=["short", "long"])
def test_parts_run_as_the_cuda_branch(parts: tuple[str, ...]) -> None:
    for part, found in run(parts).items():
        assert not found["error"], f"{part}: {found['error']}\n{found['output'][-2000:]}"
        assert not found["problems"], f"{part}: {found['problems']}"
        records = found["records"]
        failed = [f"{record['row']}: {record['message']}" for record in records if record["verdict"] == "failed"]
        assert [text for text in failed if PROFILER not in text] == [], part
        assert len(failed) == (part == "timeline:run")
        assert len(records) >= LEAST_RECORDS.get(part, 1), [record["row"] for record in records]
        if part == "kernels:run":
            _all_are_timed_by_events_behind_a_flush(found)
        if part == "memory_peak:run":
            _earlier_models_are_gone(records)


def _earlier_models_are_gone(records: list[dict[str, Any]]) -> None:
    """The fake device itself keeps 16-bit weights, a tenth of what a model takes."""
    peaks = {record["row"]: record["values"]["peak_bytes"] for record in records}
    for family in ("GPT", "Llama"):
        assert peaks[f"{family}, kernels of triton"] < 1.1 * peaks[f"{family}, kernels of torch"], peaks


def _all_are_timed_by_events_behind_a_flush(found: dict[str, Any]) -> None:
    timed = [record for record in found["records"] if record["table"].startswith("how fast")]
    for form in ("torch", "triton"):  # seven chains, forward and backward
        assert len([record for record in timed if record["row"].endswith(f": {form}")]) == 14
    assert {name for name in found["launches"] if name.startswith("triton.")} != set()
    assert {record["values"]["median_ms"] for record in timed} == {1.0}, "the fake device's events are 1 ms apart"
    assert found["launches"]["aten.zero_.default"] >= 3 * len(timed)
