"""Each wait of the CUDA branch is needed: without it the checker finds a race, or the host waits more often.

The places are not listed: a run reports where the package waits for a stream, an event or a collective, keeps the
operand of one, or pins host memory, and each of them is left out in a run of its own. What may be left out is explained.
And each such call in the source is passed by a run: one that no run passes would never be looked at.
"""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
from support.paths import ROOT

from fake_gpu import grid
from fake_gpu.jobs import Job, require_sound, run_rank

JOBS = grid.JOBS | grid.PROGRAMS
WAIT, COPY = "Work.wait in comm/collectives.py:wait < ", "wait_stream in optim/offload.py:copy < "
EXPLAINED = {
    "wait_stream in checkpoint/background.py:take < checkpoint/background.py:start": "the host has just seen that weights are finite",
    "event.synchronize in checkpoint/background.py:wait < checkpoint/background.py:_work": "the writer reads by numpy, which is not seen",
    f"{COPY}optim/offload.py:send": "nothing is queued since the host has read the losses; the same line is needed by fetch",
    "Work.wait in comm/recorder.py:when_done < comm/recorder.py:watch": "only the recorded time depends on it",
    f"{WAIT}training/overlap.py:_time_once": "a collective that is timed: nobody reads its result",
}
# the jobs in which the places are looked for
ALL = (
    "optimizer on the host, stage 1", "optimizer on the host, stage 2, fp32", "optimizer on the host, a skipped step",
    "activations on the host", "sp, chunked", "sp, split", "tp_seq, dp", "stage 3", "documents, sp", "MLP in chunks", "BERT, tp, sp",
    "validation, stage 3", "overlap report", "overlap report, tp_seq", "saves", "generate, tp, sp", "serve, tp, sp", "evaluate, tp, dp",
    "evaluate BERT, sp", "verify, tp_seq", "classifier, sp, stage 2", "documents", "tp, sp, fp32", "BERT, post-norm, tp, sp",
    "BERT, post-norm, tp_seq, MLP in chunks", "cp", "cp, window, on the host", "pp", "pp, slices, sp", "pp, zb1p, stage 3",
    "experts, sp, norms over all heads", "experts, ep, chunks, stage 2",
)  # fmt: skip


def waits(outcome: dict[str, object]) -> list[int]:
    """How often the host waited in each step, and after them."""
    return [sum(part["host_waits"].values()) for part in (*outcome["steps"], outcome)]  # type: ignore[misc,attr-defined,index]


def is_noticed(job: Job, site: str) -> bool:
    """True if leaving out one wait of a job is a mistake that the checker finds."""
    clean, broken = run_rank(job), run_rank(replace(job, drop=site))
    return bool(broken["problems"] or broken["error"]) or waits(broken) != waits(clean)


@pytest.mark.parametrize(
    ("name", "site"),
    [
        pytest.param(
            "optimizer on the host, a skipped step",
            "wait_stream in optim/offload.py:join < optim/offload.py:start_step",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "optimizer on the host, a skipped step",
            "pin_memory in data/loader.py:_batch < data/loader.py:_dealt_batch",
            marks=pytest.mark.long,
        ),
        ("sp, chunked", f"{WAIT}parallel/ulysses.py:_pieces"),
        ("sp, chunked", "event.synchronize in training/step.py:run < training/loop.py:_take_steps"),
        pytest.param("pp", f"{WAIT}parallel/pipeline.py:take", marks=pytest.mark.long),
        pytest.param("cp", f"{WAIT}parallel/context_parallel.py:_add_arrived", marks=pytest.mark.long),
        pytest.param("overlap report, tp_seq", "operand in comm/collectives.py:all_gather_async", marks=pytest.mark.long),
        pytest.param(
            "activations on the host, sp, stage 3",
            "wait_stream in parallel/offload.py:_copy < parallel/offload.py:start_in",
            marks=pytest.mark.long,
        ),
    ],
)
def test_without_it(name: str, site: str) -> None:
    assert site in run_rank(JOBS[name])["sites"], "the place has moved"
    assert is_noticed(JOBS[name], site)


@pytest.mark.long
@pytest.mark.timeout(7200)  # five minutes where nothing else runs
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


# calls that order work of the device, by name; those of threads and processes have the same name
_ORDERING = {"wait", "wait_event", "wait_stream", "synchronize", "record", "record_event", "record_stream", "pin_memory"}
_FOLDERS = ("checkpoint", "comm", "data", "inference", "models", "ops", "optim", "parallel", "tasks", "training")
_THREADS, _SCHEDULES = "waits for a thread", "schedules of other people's models have it, which no program here trains"
NOT_PASSED = {
    "checkpoint/lock.py:_beat": _THREADS, "inference/serving/engine.py:run": _THREADS, "training/saves.py:_finish": _THREADS,
    "training/saves.py:close": _THREADS, "training/signals.py:_watch": _THREADS,
    "parallel/mappings.py:_end": _SCHEDULES, "parallel/mappings.py:_gathered": _SCHEDULES,
    "parallel/mappings.py:_scattered_sum": _SCHEDULES, "parallel/mappings.py:_traded": _SCHEDULES,
    "optim/weights.py:_start": "a unit that was fetched ahead and is not used", "optim/weights.py:_release": "the same",
    "parallel/attention_block.py:_qkv_projection": "its last wait: the weight is frozen",
    "training/report.py:_record": "makes a record", "training/report.py:_compare": "the same",
    "training/run.py:open_loader": "tells the loader to pin; that is passed",
}  # fmt: skip


def ordering_calls(source: str) -> list[tuple[str, range]]:
    """Return the function and the lines of each call in a module that orders something, or pins memory by ``pin_memory=``."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if called in _ORDERING or any(keyword.arg == "pin_memory" for keyword in node.keywords):
                assert node.end_lineno is not None
                found.append((function, range(node.lineno, node.end_lineno + 1)))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


def test_ordering_calls_are_found() -> None:
    source = "def f(x):\n    x.wait(\n    )\n    y = [z.wait() for z in x]\n\ndef g():\n    empty(3, pin_memory=True)\n    f(1)\n"
    assert ordering_calls(source) == [("f", range(2, 4)), ("f", range(4, 5)), ("g", range(7, 8))]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_call_that_orders_is_passed() -> None:
    passed = {line for job in (*JOBS.values(), grid.CAPTURED["auto"]) for line in run_rank(job)["passed"]}
    package = ROOT / "megatron_sp"
    lacking: set[str] = set()
    for path in sorted(path for folder in _FOLDERS for path in (package / folder).rglob("*.py")):
        name = str(path.relative_to(package))
        for function, lines in ordering_calls(path.read_text()):
            if not any(f"{name}:{line}" in passed for line in lines):
                lacking.add(f"{name}:{function}")
    assert lacking == NOT_PASSED.keys(), f"not passed: {sorted(lacking - NOT_PASSED.keys())}; passed: {sorted(NOT_PASSED.keys() - lacking)}"
