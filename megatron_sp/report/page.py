"""The whole page: one file that works from a disk, loads nothing and runs no script but its own (``utils/markup.py``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from megatron_sp import __version__
from megatron_sp.report import sections
from megatron_sp.report.charts import axis_map, charts, figure
from megatron_sp.report.reading import RunFiles, read_run
from megatron_sp.report.run_history import SMOOTHED_FROM
from megatron_sp.report.sections import (
    classification_section,
    configuration_section,
    exchanges_section,
    experts_section,
    numerics_section,
    prediction_section,
)
from megatron_sp.report.summary import comparison, header, tiles
from megatron_sp.report.time_section import time_section
from megatron_sp.utils import markup
from megatron_sp.utils.errors import DiskError
from megatron_sp.utils.markup import Html, join, tag
from megatron_sp.utils.output_file import write_output

_HERE = Path(__file__).parent
_WITHOUT_SCRIPTS = tag(
    "noscript",
    tag("p", "The charts are drawn by the page's own script, which does not run here; the tables hold their values.", class_="quiet"),
)


def write_page(paths: Sequence[Path], output: Path) -> list[RunFiles]:
    """Read the runs and write the page about the first of them, compared with the others.

    Raises:
        DataError: a folder does not exist.
        DiskError: the page cannot be written.
    """
    runs = [read_run(path) for path in paths]
    name_apart(runs)
    try:
        write_output(output, page(runs, time.time()).encode("utf-8", "replace").decode())  # file names need not be text
    except OSError as error:
        raise DiskError(f"{output} cannot be written: {error.strerror}; choose another --output") from None
    return runs


def name_apart(runs: Sequence[RunFiles]) -> None:
    """Make the names of runs unique: runs of the same name get their paths as names, and those of the same path a number."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    for place, run in enumerate(runs):
        if run.name in [other.name for other in runs[:place]]:
            run.name = f"{run.name} ({place + 1})"


def page(runs: Sequence[RunFiles], now: float) -> Html:
    """Return the page about ``runs[0]``.

    Args:
        runs: that run, then those it is compared with.
        now: seconds since the epoch, to decide whether the run is still alive.
    """
    run, drawn = runs[0], charts(runs)
    several = len(runs) > 1
    resumed = [(step, index) for index, each in enumerate(runs) for step in each.history.resumed]
    parts = [
        sections.section("overview", "Overview", tiles(run, now), tag("div", comparison(runs, now), class_="card") if several else None),
        sections.section(
            "curves",
            "Curves",
            _controls(),
            _WITHOUT_SCRIPTS,
            tag("div", [figure(c, several=several) for c in drawn], class_="charts"),
        ),
        classification_section(runs),
        experts_section(run),
        numerics_section(run),
        time_section(run),
        prediction_section(run),
        exchanges_section(run),
        sections.environment_section(runs),
        configuration_section(runs),
    ]
    present = [part for part in parts if part is not None]
    data = {
        "charts": [c.to_json() for c in drawn], "resumed": resumed, "axes": [axis_map(each) for each in runs],
        "smoothed_from": SMOOTHED_FROM,
    }  # fmt: skip
    links = [tag("a", part.title, href=f"#{part.key}") for part in present]
    notes = [note for each in runs for note in each.notes][: sections.ROWS]
    words = "Long curves are thinned out: of neighbouring steps the lowest and the highest value are drawn. "
    words += "Time, predictions and exchanges are those of the first run. " if several else ""
    body = join(
        header(run, runs[1:], now),
        tag("nav", links, aria_label="sections"),
        tag("aside", [tag("p", "◆ ", note) for note in notes], class_="notes") if notes else None,
        tag("main", [part.body for part in present]),
        tag("footer", tag("p", words, f"Made by megatron_sp {__version__}.", class_="quiet")),
    )
    # what needs no document, and what does, in one scope of their own
    script = '"use strict";\n(() => {\n' + _asset("scales.js") + _asset("page.js") + "})();\n"
    return markup.page(f"{run.name}: run report", _asset("page.css"), body, [script], data=data)


@cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _controls() -> Html:
    """Return the controls of the charts, which are shown only if scripts run."""
    axes = [tag("option", words, value=value) for value, words in (("step", "steps"), ("tokens", "tokens"), ("time", "training time"))]
    slider = tag("input", type="range", id="smoothing", min="0", max="10", step="1", value="1")
    return tag(
        "div",
        tag("label", "x axis ", tag("select", axes, id="axis")),
        tag("label", "smoothing ", slider, tag("output", "1 %", for_="smoothing")),
        tag("button", "whole run", type="button", id="reset", hidden=True),
        tag("span", "drag to zoom, double click for the whole run", class_="quiet"),
        class_="controls needs-script",
    )
