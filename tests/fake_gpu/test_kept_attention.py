"""Full recomputation on the fake device: attention is computed once, as without recomputation, and what is kept is saved and moved.

The grid (``test_grid.py``) runs with results kept, too; here calls of the kernels are counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fake_gpu.grid import CHUNKED, DOCUMENTS, FULL, NO_DROPOUT, SP, TP_SEQ
from fake_gpu.jobs import Job, require_sound, run_rank

PLAIN = f"--bf16 {NO_DROPOUT}"
KEPT, REPEATED = "recomputation keeps attention's output and the log of its sums", "recomputation repeats attention: "
JOBS = {
    "dense": Job(PLAIN), "grouped": Job(f"{PLAIN} --num-query-groups 2"), "window": Job(f"{PLAIN} --window-size 8"),
    "documents": Job(f"{PLAIN} {DOCUMENTS}"), "documents, window": Job(f"{PLAIN} {DOCUMENTS} --window-size 4"),
    "BERT": Job(PLAIN, family="bert"), "sp, chunked": Job(f"{PLAIN} {SP} {CHUNKED}", 2), "sp, no overlap": Job(f"{PLAIN} {SP}", 2),
    "sp, uneven": Job(f"{PLAIN} --sequence-parallel-size 3 {CHUNKED} --num-query-groups 2", 3), "tp_seq": Job(f"{PLAIN} {TP_SEQ}", 2),
    "activations on the host": Job(f"{PLAIN} --offload-activations"),
    "activations on the host, sp, stage 3": Job(f"{PLAIN} --offload-activations {SP} {CHUNKED} --zero-stage 3", 2),
    "stage 3": Job(f"{PLAIN} --zero-stage 3", 4),
}  # fmt: skip


def recomputed(name: str, more: str = "") -> Job:
    job = JOBS[name]
    return Job(f"{job.flags} {FULL} {more}", job.world_size, job.family)


def kernel_calls(outcome: dict[str, Any], backward: bool) -> Counter[str]:
    """Calls of attention kernels in the last step, by name."""
    found: Counter[str] = Counter()
    for _, op, count, _ in outcome["steps"][-1]["files"]:
        if "_attention" in op and ("backward" in op) == backward:
            found[op] += count
    return found


def exchanges(outcome: dict[str, Any]) -> int:
    return sum("all_to_all" in call["name"] for call in outcome["calls"])


@pytest.mark.often("documents, window")
@pytest.mark.parametrize("name", JOBS)
def test_attention_is_computed_once(name: str) -> None:
    plain, kept = run_rank(JOBS[name]), run_rank(recomputed(name))
    for outcome in (plain, kept):
        require_sound(outcome)
    assert KEPT in kept["output"] and KEPT not in plain["output"]
    forward, backward = ([sum(kernel_calls(outcome, which).values()) for outcome in (plain, kept)] for which in (False, True))
    assert forward[0] == forward[1] > 0 and backward[0] == backward[1] >= forward[0]
    if "sp," in name and JOBS[name].world_size > 1:
        # a block sends its heads there and back, and their gradients; the recomputation sends them
        # there; where chunks share keys (HeadChunk.remade), it sends queries apart from keys, and so does the way back of their gradients
        assert 4 * exchanges(kept) == (7 if "uneven" in name else 5) * exchanges(plain) > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["documents, window", "sp, chunked"])
def test_attention_is_repeated_if_it_is_asked_for(name: str) -> None:
    once, again = run_rank(recomputed(name)), run_rank(recomputed(name, "--recompute-attention full"))
    require_sound(again)
    assert f"{REPEATED}asked for" in again["output"]
    assert sum(kernel_calls(again, backward=False).values()) == 2 * sum(kernel_calls(once, backward=False).values())


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", "torch's kernel for float32 on a GPU is not a flash kernel"),
        pytest.param("--bf16 --attention-dropout 0.1", "with attention dropout", marks=pytest.mark.long),
        pytest.param("--bf16 --kv-channels 12", "no flash kernel takes heads 12 wide", marks=pytest.mark.long),
        pytest.param("--bf16 --attention-backend unfused", "the plain form gives no log of its sums", marks=pytest.mark.long),
    ],
)
def test_why_it_is_repeated(flags: str, reason: str) -> None:
    dropout = "" if "dropout" in flags else NO_DROPOUT
    outcome = run_rank(Job(f"{dropout} {flags} {FULL}"))
    require_sound(outcome)
    assert f"{REPEATED}{reason}" in outcome["output"]
