"""The whole page, and its top: state and key figures of the run.

One file that works from a disk, loads nothing and runs no script but its own (``utils/markup.py``).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_sp import __version__
from megatron_sp.report import sections
from megatron_sp.report.charts import axis_map, charts, figure
from megatron_sp.report.reading import RunFiles, read_run
from megatron_sp.report.run_history import SMOOTHED_FROM, accuracies, are_equal, number, starts_after_interruptions
from megatron_sp.report.time_section import time_section
from megatron_sp.report.time_use import time_line, totals
from megatron_sp.utils import markup
from megatron_sp.utils.errors import DiskError
from megatron_sp.utils.files import write_output
from megatron_sp.utils.format import format_duration, format_parameters, show
from megatron_sp.utils.markup import Html, join, table, tag

SILENT_S = 120.0  # after which a run that says it is running is not believed
SIGNS = {"good": "✓", "busy": "●", "warn": "◆", "bad": "✕"}
_HERE = Path(__file__).parent
_NO_SCRIPTS = "The charts are drawn by the page's own script, which does not run here; the tables hold their values."


@dataclass(frozen=True)
class State:
    """State of a run: a word, its look (good, busy, warn, bad), and a sentence."""

    word: str
    look: str
    why: str


def state_of(run: RunFiles, now: float) -> State:
    """Return the state of the run at the time ``now`` (seconds since the epoch)."""
    status, message = run.status.get("status"), str(run.status.get("message") or "")
    code = run.status.get("exit_code")
    if status == "done":
        return State("done", "good", "")
    if status == "preempted":
        return State("preempted", "warn", "everything is saved; the same command resumes the run")
    if status == "failed":
        return State("failed", "bad", f"exit code {code}: {message}" if message else f"exit code {code}")
    if status != "running":
        why = "there is no run_status.json" if not run.status else "run_status.json names no known state"
        return State("unknown", "warn", why)
    signs = [run.lock.get("heartbeat"), *(r.get("time") for r in run.records[-1:]), run.status.get("time")]
    silent = now - max((s for s in map(number, signs) if math.isfinite(s)), default=-math.inf)
    if silent > SILENT_S:
        since = f" for {format_duration(silent)}" if math.isfinite(silent) else ""
        why = f"run_status.json says that it is running, but there was no sign of life{since}"
        return State("lost", "bad", f"{why}: killed, or its host went down")
    return State("running", "busy", f"last sign of life {format_duration(silent)} before this page was made")


@dataclass(frozen=True)
class Figures:
    """Key figures of a run; NaN for those that were not logged."""

    step: int
    train_iters: float
    tokens: float
    loss: float
    best: float
    best_step: int
    tokens_per_s: float
    mfu: float
    memory: float
    interruptions: int
    skipped: float
    useful: float  # share of the time from first launch to last record in steps that count


def figures(run: RunFiles) -> Figures:
    """Compute the key figures from the records."""
    valid, last = list(run.history.valid.values()), run.train[-1] if run.train else {}
    losses = [(number(r.get("loss")), r["step"]) for r in valid]
    best, best_step = min((pair for pair in losses if math.isfinite(pair[0])), default=(math.nan, 0))
    named = [run.status.get("train_iters"), *(s.get("train_iters") for s in run.of_kind("start")[-1:])]
    memory = [number(r.get("memory_bytes")) for r in run.of_kind("train")]
    medians = []
    for name in ("tokens_per_s", "mfu"):
        values = [v for r in run.train if math.isfinite(v := number(r.get(name)))]
        medians.append(statistics.median(values) if values else math.nan)
    sums = totals(time_line(run.attempts))
    whole = sum(sums.values())  # since the first launch; "steps" are those that were kept
    return Figures(
        step=max([0, *(r["step"] for r in run.records[-1:]), *run.history.train]),
        train_iters=next((n for n in map(number, named) if math.isfinite(n)), math.nan),
        tokens=number(last.get("consumed_tokens")), loss=number(last.get("loss")), best=best, best_step=best_step,
        tokens_per_s=medians[0], mfu=medians[1],
        memory=max((m for m in memory if math.isfinite(m)), default=math.nan),
        interruptions=len(starts_after_interruptions(run.records)), skipped=number(last.get("skipped_steps")),
        useful=sums["steps"] / whole if whole > 0 else math.nan,
    )  # fmt: skip


def header(run: RunFiles, others: Sequence[RunFiles], now: float) -> Html:
    """Return the header: name, state and a one-line description of the run."""
    start = next(reversed(run.of_kind("start")), {})
    layout, config = run.environment.get("layout"), run.config
    words = []
    if math.isfinite(params := number(start.get("num_params"))):
        words.append(f"{format_parameters(int(params))} parameters")
    if config:
        precision = config["precision"]
        words.append("fp16" if precision["fp16"] else "bf16" if precision["bf16"] else "fp32")
        if config["model"]["seq_length"]:
            words.append(f"sequences of {config['model']['seq_length']}")
    if isinstance(layout, dict):
        sizes = ", ".join(f"{axis} {layout[axis]}" for axis in ("dp", "cp", "sp", "tp") if number(layout.get(axis)) > 1)
        words.append(f"{layout.get('world_size', '?')} processes{f' ({sizes})' if sizes else ''}")
    if config and config["parallel"].get("zero_stage"):
        words.append(f"ZeRO {config['parallel']['zero_stage']}")
    if isinstance(device := run.environment.get("device"), str):
        words.append(device)
    names = ", ".join(other.name for other in others)
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    return tag(
        "header",
        tag("p", "run report", class_="kicker"),
        tag("h1", run.name, pill(state_of(run, now))),
        tag("p", " · ".join(words) or "no record yet", class_="lead"),
        tag("p", f"{run.folder}", " · compared with " + names if others else "", f" · made {date}", class_="quiet"),
    )


def pill(state: State) -> Html:
    sign = tag("span", SIGNS[state.look], aria_hidden="true")
    return tag("span", sign, " ", state.word, class_=f"pill {state.look}", title=state.why or None)


def tiles(run: RunFiles, now: float) -> Html:
    f, state = figures(run), state_of(run, now)
    of_all = f" of {f.train_iters:,.0f}" if math.isfinite(f.train_iters) else ""
    share = f.step / f.train_iters if f.train_iters > 0 else math.nan
    twice, equal = len(run.repeated), sum(are_equal(taken) for taken in run.repeated.values())
    again = "no logged step was repeated"
    if twice:
        again = f"{twice} logged steps repeated, {'all' if equal == twice else equal} bit-identical"
    about_best = "no validation yet"
    if math.isfinite(f.best):
        has_perplexity = "perplexity" in run.history.valid[f.best_step]
        perplexity = f"perplexity {math.exp(min(f.best, 700)):.4g}, " if has_perplexity else ""
        about_best = f"{perplexity}at step {f.best_step:,}"
    rows = [
        ("State", f"{SIGNS[state.look]} {state.word}", state.why or "finished normally", state.look),
        ("Steps", f"{f.step:,}", f"{show(share, 'percent')}{of_all}" if of_all else "", ""),
        ("Tokens", show(f.tokens, "si"), f"{show(f.tokens, 'count')} consumed" if math.isfinite(f.tokens) else "", ""),
        ("Best validation loss", show(f.best, "loss"), about_best, ""),
        *_accuracy_tiles(run),
        ("Throughput", f"{show(f.tokens_per_s, 'si')}", "tokens/s, median of the logged steps", ""),
        ("MFU", show(f.mfu, "percent"), "median; causal attention counted once", ""),
        ("Peak memory", show(f.memory, "bytes"), "of rank 0", ""),
        ("Interruptions", f"{f.interruptions}", again, "bad" if equal < twice else ""),
        ("Useful time", show(f.useful, "percent"), "spent in steps that were kept", ""),
    ]
    about_skipped = "gradients not finite, weights unchanged"
    rows.append(("Skipped steps", show(f.skipped, "count"), about_skipped, "warn" if f.skipped > 0 else ""))
    tiles = []
    for *texts, look in rows:
        parts = [tag("div", text, class_=kind) for kind, text in zip(("name", "value", "about"), texts, strict=True)]
        tiles.append(tag("div", parts, class_=f"tile {look}".strip()))
    return tag("div", tiles, class_="tiles")


def _accuracy_tiles(run: RunFiles) -> list[tuple[str, str, str, str]]:
    titles = {"lm_accuracy": "Masked-token accuracy", "order_accuracy": "Sentence-order accuracy (chance is 50 %)"}
    tiles = []
    for last in list(run.history.valid.values())[-1:]:
        about = f"in the validation at step {last['step']:,}"
        for name in accuracies(last):
            title = titles.get(name, name.replace("_", " ").capitalize())
            tiles.append((title, show(number(last.get(name)), "percent"), about, ""))
    for last in run.of_kind("classification")[-1:]:
        about = f"of {show(number(last.get('examples')), 'count')} examples; F1 {show(number(last.get('f1')), 'plain')}"
        tiles.append(("Classification accuracy", show(number(last.get("accuracy")), "percent"), about, ""))
    return tiles


def comparison(runs: Sequence[RunFiles], now: float) -> Html:
    """Return a table with one row for each run, and losses at the last step that all have logged."""
    common = set.intersection(*(set(run.history.train) for run in runs)) if runs else set()
    last = max(common, default=None)
    head = [
        "run", "state", "steps", "tokens", "last loss" if last is None else f"loss at step {last:,}", "best validation",
        "tokens/s", "MFU", "peak memory", "interruptions", "skipped",
    ]  # fmt: skip
    rows = []
    for index, run in enumerate(runs):
        f = figures(run)
        loss = number(run.history.train[last].get("loss")) if last is not None else f.loss
        name = tag("th", tag("span", class_=f"swatch c{index % 6} d{index % 6}"), run.name, scope="row")
        rows.append([
            name, pill(state_of(run, now)), f"{f.step:,}", show(f.tokens, "si"), show(loss, "loss"),
            show(f.best, "loss"), show(f.tokens_per_s, "si"), show(f.mfu, "percent"), show(f.memory, "bytes"),
            f.interruptions, show(f.skipped, "count"),
        ])  # fmt: skip
    return table(head, rows, numeric=range(2, 11))


def write_page(paths: Sequence[Path], output: Path) -> list[RunFiles]:
    """Read the runs and write the page about the first of them, compared with the others.

    Raises DataError: a folder does not exist; DiskError: the page cannot be written.
    """
    runs = [read_run(path) for path in paths]
    name_apart(runs)
    try:
        write_output(output, page(runs, time.time()).encode("utf-8", "replace").decode())  # file names need not be text
    except OSError as error:
        raise DiskError(f"{output} cannot be written: {error.strerror}; choose another --output") from None
    return runs


def name_apart(runs: Sequence[RunFiles]) -> None:
    # runs of one name get their paths, and those of one path a number
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    for place, run in enumerate(runs):
        if run.name in [other.name for other in runs[:place]]:
            run.name = f"{run.name} ({place + 1})"


def page(runs: Sequence[RunFiles], now: float) -> Html:
    """Return the page about the first run, compared with the others; ``now`` decides whether it is still alive."""
    run, drawn, several = runs[0], charts(runs), len(runs) > 1
    resumed = [(step, index) for index, each in enumerate(runs) for step in each.history.resumed]
    compared = tag("div", comparison(runs, now), class_="card") if several else None
    frames = tag("div", [figure(c, several=several) for c in drawn], class_="charts")
    without_scripts = tag("noscript", tag("p", _NO_SCRIPTS, class_="quiet"))
    parts = [
        sections.section("overview", "Overview", tiles(run, now), compared),
        sections.section("curves", "Curves", _controls(), without_scripts, frames),
        sections.classification_section(runs), sections.experts_section(run), sections.numerics_section(run),
        time_section(run), sections.prediction_section(run), sections.exchanges_section(run),
        sections.environment_section(runs), sections.configuration_section(runs),
    ]  # fmt: skip
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
    style, *scripts = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "scales.js", "page.js"))
    script = '"use strict";\n(() => {\n' + "".join(scripts) + "})();\n"
    return markup.page(f"{run.name}: run report", style, body, [script], data=data)


def _controls() -> Html:
    # the controls of the charts, which are shown only if scripts run
    choices = (("step", "steps"), ("tokens", "tokens"), ("time", "training time"))
    axes = [tag("option", words, value=value) for value, words in choices]
    slider = tag("input", type="range", id="smoothing", min="0", max="10", step="1", value="1")
    return tag(
        "div",
        tag("label", "x axis ", tag("select", axes, id="axis")),
        tag("label", "smoothing ", slider, tag("output", "1 %", for_="smoothing")),
        tag("button", "whole run", type="button", id="reset", hidden=True),
        tag("span", "drag to zoom, double click for the whole run", class_="quiet"),
        class_="controls needs-script",
    )
