"""--report-overlap under the real launcher: table, trace and picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_torchrun import launch

pytestmark = pytest.mark.torchrun


@pytest.mark.long
def test_all_three_outputs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--sp-size", 2, "--sp-head-chunks", 2, "--report-overlap", 3, "--train-iters", 4)
    code, text = launch(tmp_path, "--save", run, *flags)
    assert code == 0, text
    words = [line.split() for line in text.splitlines()]
    rows = [w[:4] for w in words if w[:1] == ["ulysses"]]
    assert rows == [["ulysses", layer, way, n] for layer, n in (("0", "8"), ("1", "8")) for way in ("forward", "backward")] + [
        ["ulysses", "all", way, "16"] for way in ("forward", "backward")
    ], text
    assert "the worst, rank" in text and text.index("overlap on rank 0") < text.index("step 4/4")
    trace = json.loads((run / "overlap-trace.json").read_text())
    assert {e["cat"] for e in trace["traceEvents"] if e["ph"] == "X"} == {"compute", "wait", "exchange"}
    assert len(trace["otherData"]["rows"]) == 4
    pytest.importorskip("matplotlib")
    assert (run / "overlap.png").read_bytes().startswith(b"\x89PNG")
