"""megatron_sp/report/scales.js: numbers, units, ticks, and places of labels that never overlap. Needs Node.js or a browser."""

from __future__ import annotations

import html
import json
import math
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from megatron_sp.report.run_history import smoothed
from megatron_sp.utils.format import show

SCALES = ROOT / "megatron_sp/report/scales.js"
NODE = shutil.which("node") or shutil.which("nodejs")
BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(NODE is None and BROWSER is None, reason="needs Node.js or Chromium (Debian: apt-get install nodejs)")
NAN = math.nan


def evaluate(expression: str, data: object, tmp_path: Path) -> Any:
    """The value of a JavaScript expression of ``data``, after scales.js."""
    source = f"{SCALES.read_text()}\nconst data = {json.dumps(data)};\nconst answer = JSON.stringify({expression});\n"
    if NODE is not None:
        command = [NODE, "-"]
        done = subprocess.run(command, input=source + "console.log(answer);", capture_output=True, text=True, timeout=600, check=True)
        return json.loads(done.stdout)
    assert BROWSER is not None
    page = tmp_path / "page.html"
    page.write_text(f'<meta charset="utf-8"><pre></pre><script>{source}document.querySelector("pre").textContent = answer;</script>')
    command = [BROWSER, "--headless", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    found = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found[1]))


# ------------------------------------------------------------------------------------------------ places for labels

BOUNDS = {"x": 40, "y": 20, "w": 300, "h": 160}


def overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    return a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"] and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]


def within(box: dict[str, float]) -> bool:
    right, bottom = BOUNDS["x"] + BOUNDS["w"], BOUNDS["y"] + BOUNDS["h"]
    return box["x"] >= BOUNDS["x"] and box["y"] >= BOUNDS["y"] and box["x"] + box["w"] <= right and box["y"] + box["h"] <= bottom


def cases(count: int, seed: int) -> list[dict[str, Any]]:
    """Labels of horizontal lines: few and many, apart and on top of each other, short and longer than there is room."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        center, spread = rng.uniform(0, 200), rng.choice([0.0, 3.0, 30.0, 200.0])
        found.append({
            "levels": [[center + rng.uniform(-spread, spread), rng.choice([20.0, 90.0, 180.0, 400.0])] for _ in range(rng.randint(1, 9))],
            "lines": [[[x, rng.uniform(0, 200)] if rng.random() < 0.9 else None for x in range(40, 341, rng.choice([5, 50, 300]))]
                      for _ in range(rng.randint(0, 3))],
            "taken": [{"x": rng.uniform(0, 340), "y": rng.uniform(0, 180), "w": 40.0, "h": 14.0} for _ in range(rng.randint(0, 4))],
        })  # fmt: skip
    return found


def placed(all_cases: list[dict[str, Any]], tmp_path: Path) -> list[list[dict[str, float] | None]]:
    return evaluate(  # type: ignore[no-any-return]
        "data.cases.map((c) => placeLabels(c.levels.map(([y, w]) => besideLine(y, w, 14, 44, 340)), data.bounds, c.lines, [...c.taken]))",
        {"cases": all_cases, "bounds": BOUNDS}, tmp_path,
    )  # fmt: skip


def test_labels_never_overlap(tmp_path: Path) -> None:
    all_cases = cases(400, seed=17)
    left_out = 0
    for case, boxes in zip(all_cases, placed(all_cases, tmp_path), strict=True):
        there = [box for box in boxes if box is not None]
        left_out += len(boxes) - len(there)
        assert all(within(box) for box in there)
        every = [*there, *case["taken"]]
        for place, box in enumerate(there):
            assert not any(overlap(box, other) for other in every[place + 1 :]), f"{box} overlaps in {case}"
        y, width = case["levels"][0]
        assert boxes[0] is not None or case["taken"] or width > 296 or not 20 <= y <= 180, "nothing is in the way of the first"
    assert 0 < left_out < sum(len(case["levels"]) for case in all_cases) / 2, "some do not fit, most do"


def test_labels_keep_clear_of_curves_where_they_can(tmp_path: Path) -> None:
    level, label = 100.0, 90.0
    right = {"levels": [[level, label]], "lines": [[[200, 90], [340, 90]]], "taken": []}
    everywhere = {"levels": [[level, label]], "lines": [[[40, 20 + 8 * i], [340, 20 + 8 * i]] for i in range(21)], "taken": []}
    steep = {"levels": [[level, label]], "lines": [[[300, 20], None, [295, 180], [296, 20]]], "taken": []}
    clear = {"levels": [[level, label]], "lines": [], "taken": []}
    (first,), (crowded,), (beside,), (usual,) = placed([right, everywhere, steep, clear], tmp_path)
    assert usual == {"x": 250, "y": 83, "w": 90, "h": 14}, "above its line, at the right end"
    assert first == {"x": 250, "y": 104, "w": 90, "h": 14}, "below it, where a curve runs above"
    assert crowded == usual, "across curves rather than nowhere"
    assert beside is not None and not beside["x"] < 295.5 < beside["x"] + 90, "not across a steep curve between two points outside"


# --------------------------------------------------------------------------------------------- numbers, units, ticks


def test_ticks_are_round(tmp_path: Path) -> None:
    told = evaluate("data.map(([low, high]) => ticks(low, high, 5))", [(0, 1), (4.7, 9.1), (3, 3), (-3e-5, 2e-5)], tmp_path)
    assert [pytest.approx(found) for found in told] == [
        [0, 0.2, 0.4, 0.6, 0.8, 1.0], [5, 6, 7, 8, 9], [3], [-3e-5, -2e-5, -1e-5, 0, 1e-5, 2e-5],
    ]  # fmt: skip


def test_the_unit_of_an_axis_is_in_its_title_and_its_ticks_are_round_in_it(tmp_path: Path) -> None:
    asked = [
        ("bytes", 3.1 * 2**30, 2 * 2**30, "GiB", "2"), ("bytes", 700, 512, "B", "512"), ("seconds", 0.4, 0.3, "ms", "300"),
        ("seconds", 7.0, 2.5, "s", "2.5"), ("minutes", 200.0, 120.0, "h", "2"), ("percent", 0.3, 0.25, "%", "25"),
        ("si", 3e6, 2e6, "", "2 M"), ("count", 3e4, 25_000, "", "25,000"), ("plain", 4e-3, 2e-3, "", "0.002"), ("loss", 9, 2.5, "", "2.5"),
        ("plain", 4e-6, 2e-6, "", "2e-6"), ("bytes", 9, 0, "B", "0"),
    ]  # fmt: skip
    told = evaluate("data.map(([kind, high, v]) => [unitOf(kind, high).name, tickText(v, kind, unitOf(kind, high))])", asked, tmp_path)
    assert told == [[unit, text] for _, _, _, unit, text in asked]


def test_values_read_as_in_the_tables(tmp_path: Path) -> None:
    rng = random.Random(3)
    ranges = {"loss": (1e-3, 20), "si": (0.1, 1e13), "bytes": (1.0, 2e13), "percent": (1e-4, 2), "seconds": (1e-5, 99), "count": (1, 1e9),
              "plain": (2e-4, 9e3)}  # fmt: skip
    asked = [(math.exp(rng.uniform(math.log(low), math.log(high))), kind) for kind, (low, high) in ranges.items() for _ in range(40)]
    told = evaluate("data.map(([v, kind]) => show(v, kind))", asked, tmp_path)
    assert told == [show(value, kind) for value, kind in asked]


def test_smoothing_is_that_of_python(tmp_path: Path) -> None:
    values = [5.0, NAN, 3.0, 2.0, NAN, NAN, NAN, 8.0, 1.0, 0.5] * 30
    told = evaluate("smoothed(data, 0.01)", [None if math.isnan(v) else v for v in values], tmp_path)
    assert [NAN if v is None else v for v in told] == pytest.approx(smoothed(values, 0.01), nan_ok=True)


def test_ticks_of_a_logarithmic_axis(tmp_path: Path) -> None:
    told = evaluate("data.map(([low, high]) => logTicks(low, high))", [[0.1, 1.2], [-3, 5], [0.31, 0.33]], tmp_path)
    assert (
        told[0] == [2, 3, 5, 7, 10]
        and told[1] == pytest.approx([1e-3, 0.1, 10, 1e3, 1e5])
        and told[2] == pytest.approx([2.05, 2.075, 2.1, 2.125])
    )
