"""--report-overlap on real ranks: sane numbers, the same losses and gradients, and the files of a whole run."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.layouts import Case, Sharded
from support.ranks import run_ranks
from support.training import records, train

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.recorder import WAIT, Collective, WallClock
from megatron_sp.training.overlap import OverlapReport, time_alone

CASES = [
    Case(sp=2, mode="chunked"),
    Case(sp=2, mode="none", kernels={"recompute_granularity": "full"}),
    Case(sp=3, mode="split-qkv", seq=7, micro_batches=2),
    Case(tp=2),
    Case(tp=2, sp=2, tp_seq=True, mode="chunked", model={"num_attention_heads": 8}),
]
# collectives of a block: (forward, backward) for each axis
NUMBERS: list[dict[str, tuple[int, int]]] = [
    {"sp": (4, 4)}, {"sp": (2, 1 + 2)}, {"sp": (2 * 4, 2 * 4)}, {"tp": (2, 2)}, {"sp": (4, 4), "tp": (4, 6)},
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _load_matplotlib() -> None:
    """The picture is drawn with it, where it is installed: loaded here, once, and not by every rank 0."""
    with contextlib.suppress(ImportError):
        import matplotlib.pyplot  # noqa: F401


def record(case: Case, numbers: dict[str, tuple[int, int]], run_dir: Path) -> None:
    whole = tiny.make_model(tiny.shape(**{"seq_length": case.seq, **case.model}))
    plain = Sharded(case, whole)
    want = [(plain.step(), {n: g.clone() for n, g in plain.grads().items()}) for _ in range(3)][-1]
    lines: list[str] = []
    report = OverlapReport(3, plain.groups, run_dir, lines.append)
    sharded, recorder = Sharded(case, whole, report.recorder), report.recorder
    for _ in range(4):  # the last is not recorded any more
        recorder.start_step()
        loss = sharded.step()
        recorder.end_step()
        assert torch.equal(loss, want[0])
        assert [n for n, g in sharded.grads().items() if not torch.equal(g, want[1][n])] == []
    assert len(recorder.steps) == 3
    for step in recorder.steps:
        assert all(a.end == pytest.approx(b.begin) for a, b in pairwise(step.spans)), "no gap"
        assert step.spans[-1].end == pytest.approx(step.seconds) and step.spans[0].begin >= 0.0
        assert all(0.0 <= f.begin <= f.end <= step.seconds and f.exposed >= 0.0 for f in step.flights)
        assert sum(f.exposed for f in step.flights) == pytest.approx(sum(s.end - s.begin for s in step.spans if s.label == WAIT))
    seconds = max(step.seconds for step in recorder.steps)
    rows = report.write()
    places = [(r.axis, r.layer, r.direction) for r in rows if r.layer is not None]
    assert places == [(axis, layer, way) for axis in numbers for layer in range(tiny.LAYERS) for way in ("forward", "backward")]
    for row in rows:
        assert row.exchange > 0 and 0 <= row.exposed <= seconds and 0 <= row.share_of_step <= 1 and 0 <= row.hidden <= 1
        if row.layer is not None:
            assert row.number == numbers[row.axis][row.direction == "backward"], row
    if torch.distributed.get_rank() == 0:
        assert any(line.startswith("  exposed in all: rank 0") for line in lines)
        events = [e for e in json.loads((run_dir / "overlap-trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
        assert {e["cat"] for e in events} >= {"compute", "exchange"} and all(e["dur"] >= 0 for e in events)
    else:
        assert lines == []


@pytest.mark.often("tp1-sp2-dp1-chunked2 b2x1-{'sp': (4, 4)}")
@pytest.mark.parametrize("case, numbers", [
    pytest.param(case, numbers, marks=pytest.mark.long if i in (1, 3) else ())
    for i, (case, numbers) in enumerate(zip(CASES, NUMBERS, strict=True))
], ids=str)  # fmt: skip
def test_recording_changes_nothing_and_is_sane(case: Case, numbers: dict[str, tuple[int, int]], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_ranks(record, case.world, tmp_path, case, numbers, run_dir)


def unlike_ranks() -> None:
    """What looks the same to rank 0 has other sizes on rank 1: both take part in timing each."""
    groups = ParallelGroups.create(torch.device("cpu"), sp_size=2)
    first = [((2, 3), (2, 5)), ((5, 1), (3, 1))][groups.rank]
    second = [((2, 3), (2, 5)), ((5, 4), (3, 4))][groups.rank]
    mine = [Collective("sp", "all_to_all", *counts, "float64") for counts in (first, second, first)]
    times = time_alone(mine, groups, WallClock())
    assert len(times) == 3 and times[0] == times[2] and min(times) > 0


def unequal_numbers() -> None:
    groups = ParallelGroups.create(torch.device("cpu"), sp_size=2)
    what = Collective("sp", "all_to_all", (1, 1), (1, 1), "float32")
    with pytest.raises(RuntimeError, match=r"different numbers of collectives in one step: \[1, 2\]"):
        time_alone([what] * (1 + groups.rank), groups, WallClock())


@pytest.mark.parametrize("fn", [unlike_ranks, unequal_numbers])
def test_timing_alone(fn: Any, tmp_path: Path) -> None:
    run_ranks(fn, 2, tmp_path)


def test_a_run_with_the_report_is_the_same_run(tmp_path: Path) -> None:
    """Bit for bit; fewer steps than asked for are reported at the end; a single process is told that there is nothing to report."""
    flags = ("--sp-size", 2, "--sp-head-chunks", 2, "--train-iters", 4)
    train(tmp_path, "--save", tmp_path / "plain", *flags, ranks=2).expect(0)
    outcome = train(tmp_path, "--save", tmp_path / "told", *flags, "--report-overlap", ranks=2).expect(
        0, "overlap on rank 0", "(median of 3 steps"
    )
    a, b = ([(r["loss_hex"], r["grad_norm_hex"]) for r in records(tmp_path / name)] for name in ("plain", "told"))
    assert a == b and len(a) == 4
    assert "overlap on rank 0" not in outcome.texts[1]
    train(tmp_path, "--report-overlap").expect(2, "there are none to report")
