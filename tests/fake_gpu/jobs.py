"""Cases for the fake device, run by a process that has imported everything once: torch in this process knows no such device."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fake_gpu.build import build
from fake_gpu.calls import Call, disagreements

TESTS = Path(__file__).parents[1]
BASE = """
    --num-layers 3 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 60 --mock-data --train-iters 2
    --micro-batch-size 2 --lr 1e-2 --lr-decay-style constant --log-interval 1 --eval-iters 0
"""


@dataclass(frozen=True)
class Job:
    """A training on the fake device, or another program.

    Attributes:
        flags: beside ``BASE``; of another program all of them.
        world_size: number of ranks.
        family: gpt or bert.
        micro_batches: of each rank in a step.
        skips_first: the first step is skipped (``program.Case``).
        drop: a wait to be left out (``program.Case``).
        square_from: size from which on square tensors are noted (``program.Case``).
        program: pretrain, or one of ``programs.PROGRAMS``.
        large: the model is large (``program.Case``); ``flags`` are then all of them.
        counts: of a model with experts (``program.Case``).
        rehearsals: how often all ranks run beforehand, for programs in which what they gather must fit each other: each run
            has what all have given in the one before, which may end early, where its first part did not fit.
    """

    flags: str
    world_size: int = 1
    family: str = "gpt"
    micro_batches: int = 2
    skips_first: bool = False
    drop: str = ""
    square_from: int = 0
    program: str = "pretrain"
    large: bool = False
    counts: tuple[int, ...] = ()
    rehearsals: int = 0

    @property
    def offloads_optimizer(self) -> bool:
        """True if the master weights are in host memory."""
        return "--offload-optimizer" in self.flags

    def skips(self, step: int) -> bool:
        """True if a step, from 0, does not update the weights."""
        return self.skips_first and step == 0

    def case(self, rank: int) -> dict[str, Any]:
        """Return the case of one rank (``program.Case``)."""
        words = self.flags.split()
        case = {"world_size": self.world_size, "rank": rank, "program": self.program, "drop": self.drop, "square_from": self.square_from}
        if self.program != "pretrain" or self.large:
            return {**case, "flags": words, "large": self.large, "counts": self.counts}
        axes = (
            "--tensor-model-parallel-size", "--sequence-parallel-size", "--context-parallel-size", "--pipeline-model-parallel-size",
        )  # fmt: skip
        sizes = [int(words[words.index(axis) + 1]) for axis in axes if axis in words]
        replicas = self.world_size
        for size in sizes:
            replicas //= size
        batch = ["--global-batch-size", str(2 * self.micro_batches * replicas)]
        return {**case, "flags": [*BASE.split(), *batch, *words], "family": self.family, "skips_first": self.skips_first}


@cache
def _server() -> subprocess.Popen[str]:
    """Return the process that runs cases; it ends with this one."""
    build()  # here, so that a missing compiler is this test's message
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "fake_gpu.program"], cwd=TESTS.parent, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    atexit.register(server.kill)
    return server


@cache
def run_rank(job: Job, rank: int = 0) -> dict[str, Any]:
    """Run one rank of a job; return its ``program.Outcome`` as a dict."""
    case = job.case(rank)
    if rank > 0:
        case["broadcasts"] = run_rank(job)["broadcasts"]
    if job.rehearsals:
        before = replace(job, rehearsals=job.rehearsals - 1)
        case["gathered"] = [run_rank(before, each)["gathered"] for each in range(job.world_size)]
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(case) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the fake device's process has ended: its message is above"
    outcome: dict[str, Any] = json.loads(answer)
    return outcome


def require_sound(outcome: dict[str, Any]) -> None:
    """Fail unless the program ran to its end, and the checker found nothing."""
    assert not outcome["error"], f"{outcome['error']}\n{outcome['output'][-3000:]}"
    assert "wait() was never called" not in outcome["output"], outcome["output"]
    assert not outcome["problems"], "\n".join(outcome["problems"])


def waits(step: dict[str, Any]) -> dict[str, int]:
    """Where the host waited in a step, or after all, and how often; places without their lines."""
    counted: dict[str, int] = {}
    for where, count in step["host_waits"].items():
        name = where.partition(":")[0]
        counted[name] = counted.get(name, 0) + count
    return counted


def require_agreement(outcomes: Sequence[dict[str, Any]]) -> None:
    """Fail if the ranks of a job would wait for each other for ever."""
    calls = [[_call(call) for call in outcome["calls"]] for outcome in outcomes]
    communicators = [[tuple(ranks) for ranks in outcome["communicators"]] for outcome in outcomes]
    lines = disagreements(calls, communicators)
    assert not lines, "\n".join(lines)


def _call(fields: dict[str, Any]) -> Call:
    after = tuple((tuple(ranks), count) for ranks, count in fields["after"])
    return Call(
        **{
            **fields,
            "ranks": tuple(fields["ranks"]),
            "sizes": tuple(fields["sizes"]),
            "received": tuple(fields["received"]),
            "after": after,
        }
    )
