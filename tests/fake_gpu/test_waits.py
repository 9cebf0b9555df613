"""Each wait of the CUDA branch is needed: without it the checker finds a race, or the host waits more often.

The places are not listed: a run reports where the package waits for a stream, an event or a collective, or pins host
memory, and each of them is left out in a run of its own. What may be left out is explained.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fake_gpu.grid import JOBS
from fake_gpu.jobs import Job, require_sound, run_rank

WAIT, COPY = "Work.wait in comm/collectives.py:wait < ", "wait_stream in optim/offload.py:copy < "
EXPLAINED = {
    f"{WAIT}optim/weights.py:settle": "nothing reads the parameters after the last step, unless something is saved or evaluated",
    "wait_stream in checkpoint/host_copy.py:take < checkpoint/background.py:start": "the host has just seen that weights are finite",
    "event.synchronize in checkpoint/host_copy.py:wait < checkpoint/background.py:_work": "the writer reads by numpy, which is not seen",
    f"{COPY}optim/offload.py:send": "nothing is queued since the host has read the losses; the same line is needed by fetch",
    "Work.wait in comm/recorder.py:when_done < comm/recorder.py:watch": "only the recorded time depends on it",
    f"{WAIT}training/overlap.py:_time_once": "a collective that is timed: nobody reads its result",
}
# the jobs in which the places are looked for
ALL = (
    "optimizer on the host, stage 1", "optimizer on the host, stage 2, fp32", "optimizer on the host, a skipped step",
    "activations on the host", "sp, chunked", "sp, split", "tp_seq, dp", "stage 3", "documents, sp", "MLP in chunks", "BERT, tp, sp",
    "validation, stage 3", "overlap report", "saves",
)  # fmt: skip


def waits(outcome: dict[str, object]) -> list[int]:
    """How often the host waited in each step."""
    return [sum(step["host_waits"].values()) for step in outcome["steps"]]  # type: ignore[attr-defined,index]


def is_noticed(job: Job, site: str) -> bool:
    """True if leaving out one wait of a job is a mistake that the checker finds."""
    clean, broken = run_rank(job), run_rank(replace(job, drop=site))
    return bool(broken["problems"] or broken["error"]) or waits(broken) != waits(clean)


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("optimizer on the host, a skipped step", "wait_stream in optim/offload.py:join < optim/offload.py:start_step"),
        ("optimizer on the host, a skipped step", "pin_memory in data/loader.py:_batch"),
        ("sp, chunked", f"{WAIT}parallel/ulysses.py:_pieces"),
        ("sp, chunked", "event.synchronize in training/step.py:wait < training/step.py:run"),
        ("activations on the host, sp, stage 3", "wait_stream in parallel/offload.py:_copy < parallel/offload.py:start_in"),
    ],
)
def test_without_it(name: str, site: str) -> None:
    assert site in run_rank(JOBS[name])["sites"], "the place has moved"
    assert is_noticed(JOBS[name], site)


@pytest.mark.long
def test_every_wait_is_needed() -> None:
    places: dict[str, list[str]] = {}
    for name in ALL:
        outcome = run_rank(JOBS[name])
        require_sound(outcome)
        for site in outcome["sites"]:
            places.setdefault(site, []).append(name)
    needed = {site for site, jobs in places.items() if any(is_noticed(JOBS[name], site) for name in jobs)}
    unneeded = places.keys() - needed
    assert unneeded == EXPLAINED.keys(), (
        f"not noticed: {sorted(unneeded - EXPLAINED.keys())}; needed: {sorted(EXPLAINED.keys() - unneeded)}"
    )
