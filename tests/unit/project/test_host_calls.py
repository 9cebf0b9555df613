"""Python calls of a layer in a training step: a budget, since a GPU waits for them in a small model. They are counted, not timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import host_time
from gpu.step import Parts, build_ours

from megatron_sp.comm.groups import destroy_process_group

BUDGET = {"gpt": host_time.Calls(132, 182, 16), "llama": host_time.Calls(147, 203, 16)}
"""Calls of a layer in forward, backward and update; once they were 390, 580 and 40."""


def ours(shape: dict[str, int]) -> Parts:
    destroy_process_group()
    return build_ours(shape, torch.device("cpu"), torch.float32)[0]


@pytest.mark.parametrize("model", BUDGET)
def test_a_layer_within_its_budget(model: str) -> None:
    try:
        found = host_time.calls_of_a_layer(host_time.SHAPES[model], ours)
    finally:
        destroy_process_group()
    over = {part: calls for part, calls in found._asdict().items() if calls > getattr(BUDGET[model], part)}
    assert not over, f"more Python calls than {BUDGET[model]}: {over}"


def test_calls_are_counted_part_by_part() -> None:
    def twice(x: int) -> int:
        return int_of(int_of(x))

    def int_of(x: int) -> int:
        return x

    parts = Parts(twice, lambda loss: None, lambda: None)
    assert host_time.count_calls(parts, 1) == (3, 1, 1)
