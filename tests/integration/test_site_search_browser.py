"""The documentation's search where the site was opened from a folder: the theme's own worker answers in a frame."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.paths import ROOT
from test_run_page_browser import BROWSER, look

material = pytest.importorskip("material", reason="the extra docs is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)")]

DRIVER = """
const worker = new Worker("assets/javascripts/workers/search.js"), [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3];
worker.addEventListener("message", ({ data }) => {
  if (data.type === READY) worker.postMessage({ type: QUERY, data: "ulysses" });
  if (data.type === RESULT) console.log("FACT" + JSON.stringify(["found", data.data.items.map((item) => item[0].location)]));
});
worker.postMessage({ type: SETUP, data: { ...__index, options: { suggest: false } } });
"""
INDEX = {
    "config": {
        "lang": ["en", "de"],
        "separator": r"[\s\-]+",
        "pipeline": ["stopWordFilter"],
        "fields": {"title": {"boost": 1000.0}, "text": {"boost": 1.0}},
    },
    "docs": [
        {"location": "a.html", "title": "Tensor parallelism", "text": "<p>columns and rows</p>"},
        {"location": "b.html", "title": "Sequences", "text": "<p>Ulysses trades positions for heads</p>"},
    ],
}


def test_search_answers_without_a_server(tmp_path: Path) -> None:
    """A second language has the worker load further scripts, which the frame does for it."""
    scripts = Path(material.__file__).parent / "templates/assets/javascripts"
    shutil.copytree(scripts / "lunr", tmp_path / "assets/javascripts/lunr")
    (tmp_path / "assets/javascripts/workers").mkdir()
    (worker,) = (scripts / "workers").glob("search.*.min.js")
    shutil.copy(worker, tmp_path / "assets/javascripts/workers/search.js")
    shutil.copy(ROOT / "docs/assets/iframe-worker.js", tmp_path)
    parts = [f"var __index = {json.dumps(INDEX)}", DRIVER]
    page = "<!doctype html><html><head><script src='iframe-worker.js'></script></head><body></body>"
    (tmp_path / "page.html").write_text(page + "".join(f"<script>{part}</script>" for part in parts) + "</html>")
    seen = look(tmp_path / "page.html")
    assert seen.console == [] and seen.facts["found"] == ["b.html"], seen
