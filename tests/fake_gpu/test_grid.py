"""The CUDA branch of the programs, one rank at a time: no race, no early free, one wait of the host in a step or for a token.

What is run is the whole program, from the command line to its last step (``program.py``), on tensors that are not
there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fake_gpu.grid import DOCUMENTS, EXPERTS, JOBS, PP, PROGRAMS
from fake_gpu.jobs import require_agreement, require_sound, run_rank, waits

BETWEEN = {"--eval-interval ": "tolist at training/loop.py", "--save ": "item at training/nan_checks.py"}  # by flag


@pytest.mark.often("tp_seq, sp, dp, stage 1", "activations on the host, sp, stage 3", "cp, sp, chunked, stage 3", "pp, slices, sp")
@pytest.mark.parametrize("name", JOBS)
def test_a_rank(name: str) -> None:
    """The host waits once, for the losses and the norm; with the optimizer on the host also for the gradients of each unit.

    So it waits for nothing in a micro-batch: a step has two. Between the steps it waits once for a validation's sums, and
    once to see that what is saved is finite; a measurement of collectives synchronizes as it likes. With experts it waits for the
    counts of rows, once in a layer and micro-batch.
    """
    job = JOBS[name]
    outcome = run_rank(job, rank=job.world_size - 1 if "uneven" in name else 0)
    require_sound(outcome)
    assert len(outcome["steps"]) == 2 and outcome["num_accesses"] > 4000, outcome["output"]
    expected = {"event.synchronize at training/step.py": 1}
    num_units = 5  # embedding, three layers, the last norm
    for number, step in enumerate(outcome["steps"]):
        of_units = {"event.synchronize at optim/offload.py": num_units} if job.offloads_optimizer and not job.skips(number) else {}
        if EXPERTS in job.flags:  # the counts of each layer and micro-batch, which a recomputation knows
            layers = 2 if PP in job.flags else 3
            of_units["tolist at parallel/expert_exchange.py"] = layers * (job.micro_batches or 2)
        between = {place: 1 for flag, place in BETWEEN.items() if flag in job.flags and number > 0}
        found = {place: count for place, count in waits(step).items() if place != "synchronize at comm/recorder.py"}
        assert found == {**expected, **of_units, **between}, step["host_waits"]
    plans = DOCUMENTS in job.flags or (job.family == "bert" and "--context-parallel-size" in job.flags)
    if not job.skips_first and not plans:  # what follows from documents and lengths is cached
        assert outcome["steps"][0]["allocated"] == outcome["steps"][1]["allocated"], "a step leaves nothing behind"


@pytest.mark.often("generate", "verify, tp_seq")
@pytest.mark.parametrize("name", PROGRAMS)
def test_another_program(name: str) -> None:
    job = PROGRAMS[name]
    outcome = run_rank(job)
    require_sound(outcome)
    assert outcome["num_accesses"] > 300, outcome["output"]
    assert len(outcome["steps"]) == (2 if job.program == "finetune" else 0)


@pytest.mark.parametrize(
    ("name", "passes", "agree"), [("generate", 3, {}), ("generate, tp, sp", 5, {"tolist at parallel/gather.py": 6})],
)  # fmt: skip
def test_a_token_makes_the_host_wait_once(name: str, passes: int, agree: dict[str, int]) -> None:
    """It waits for the logits, which the first tokens of a prompt's samples share; several ranks agree on the token, which takes another
    wait. What goes to the device is not pinned. A capture has a trial before: an eager step, and a replay."""
    job = PROGRAMS[name]
    for flags, trial in (("", {"synchronize at ops/cuda_graphs.py": 1}), (" --cuda-graphs off", {})):
        found = waits(run_rank(replace(job, flags=job.flags + flags)))
        assert {place: count for place, count in found.items() if not place.startswith("copy from the host")} == {
            "copy to the host at inference/decoder.py": passes + 2 * len(trial), **agree, **trial
        }  # fmt: skip


@pytest.mark.often("serve, sp")
@pytest.mark.parametrize("name", [name for name, job in (JOBS | PROGRAMS).items() if job.world_size > 1])
def test_all_ranks_call_the_same(name: str) -> None:
    job = (JOBS | PROGRAMS)[name]
    outcomes = [run_rank(job, rank) for rank in range(job.world_size)]
    for outcome in outcomes:
        require_sound(outcome)
    require_agreement(outcomes)
