"""The CUDA branch of the training program, one rank at a time: no race, no early free, one wait of the host in a step.

What is run is the whole program, from the command line to its last step (``program.py``), on tensors that are not
there.
"""

from __future__ import annotations

from typing import Any

import pytest

from fake_gpu.grid import JOBS
from fake_gpu.jobs import require_agreement, require_sound, run_rank

IN_EVERY_RUN = (
    "tp_seq, sp, dp, stage 1", "stage 2, bf16 reduction", "documents, sp", "activations on the host, sp, stage 3",
    "full recomputation, stage 3", "BERT, tp, sp", "saves",
)  # fmt: skip
GRID = [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.long) for name in JOBS]


def waits(step: dict[str, Any]) -> dict[str, int]:
    """Where the host waited in a step, and how often; places without their lines."""
    counted: dict[str, int] = {}
    for where, count in step["host_waits"].items():
        name = where.partition(":")[0]
        counted[name] = counted.get(name, 0) + count
    return counted


@pytest.mark.parametrize("name", GRID)
def test_a_rank(name: str) -> None:
    """The host waits once, for the losses and the norm; with the optimizer on the host also for the gradients of each unit."""
    job = JOBS[name]
    outcome = run_rank(job, rank=job.world_size - 1 if "uneven" in name else 0)
    require_sound(outcome)
    assert len(outcome["steps"]) == 2 and outcome["num_accesses"] > 4000, outcome["output"]
    expected = {"event.synchronize at training/step.py": 1}
    num_units = 5  # embedding, three layers, the last norm
    for number, step in enumerate(outcome["steps"]):
        of_units = {"event.synchronize at optim/offload.py": num_units} if job.offloads_optimizer and not job.skips(number) else {}
        if not job.does_more:
            assert waits(step) == {**expected, **of_units}, step["host_waits"]


@pytest.mark.parametrize(
    "name", ["sp, uneven", pytest.param("tp_seq, sp, dp, stage 1", marks=pytest.mark.long), pytest.param("stage 3", marks=pytest.mark.long)]
)
def test_all_ranks_call_the_same(name: str) -> None:
    job = JOBS[name]
    outcomes = [run_rank(job, rank) for rank in range(job.world_size)]
    for outcome in outcomes:
        require_sound(outcome)
    require_agreement(outcomes)
