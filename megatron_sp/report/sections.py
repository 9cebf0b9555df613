"""Sections of the page, but those about time and curves, and what they are built of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_sp.config.fields import described
from megatron_sp.config.schema import GROUPS, Config
from megatron_sp.report.charts import bar
from megatron_sp.report.reading import RunFiles
from megatron_sp.report.run_history import Record, number
from megatron_sp.utils.format import show
from megatron_sp.utils.markup import Html, table, tag

ROWS = 40  # shown of a long table; the rest is counted
_SCORES = (("accuracy", "percent"), ("exact_match", "percent"), ("f1", "loss"), ("matthews", "loss"))
_COLUMNS, _LAYERS = 120, 256  # of the picture of experts' loads
_CELL, _ROW, _LEFT, _BELOW = 10, 10, 60, 24
_AXES = {"cp": "context", "ep": "experts", "pp": "pipeline", "sp": "ulysses", "tp": "tensor"}


class Section(NamedTuple):
    """A section of the page, with a key as link target."""

    key: str
    title: str
    body: Html


def section(key: str, title: str, *children: object) -> Section:
    return Section(key, title, tag("section", tag("h2", title), *children, id=key))


def card(title: str, *children: object) -> Html:
    return tag("div", tag("h3", title), *children, class_="card")


def quiet(text: str) -> Html:
    return tag("p", text, class_="quiet")


def shortened(rows: Sequence[Any], what: str) -> tuple[Sequence[Any], Html | None]:
    """Return the first rows, and a sentence about the rest; None if there is no rest."""
    return rows[:ROWS], quiet(f"and {len(rows) - ROWS:,} more {what}") if len(rows) > ROWS else None


def text(value: Any) -> str:
    """Return a JSON value as text, in the style of a command line."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(text(v) for v in value) or "–"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {text(v)}" for key, v in value.items()) or "–"
    return str(value)


def environment_section(runs: Sequence[RunFiles]) -> Section | None:
    """Return the section about versions, devices, hosts and layout, with a column for each run."""
    columns = []
    for run in runs:
        flat: dict[str, str] = {}
        for key, value in run.environment.items():
            if key == "hosts" and isinstance(value, dict):
                few, more = list(value.items())[:ROWS], len(value) - ROWS
                words = [f"{host} ({count} {'process' if count == 1 else 'processes'})" for host, count in few]
                flat["hosts"] = ", ".join(words) + (f", and {more:,} more" if more > 0 else "")
            elif isinstance(value, dict):
                prefix = "" if key == "versions" else f"{key}: "
                flat |= {f"{prefix}{inner}": text(v) for inner, v in value.items()}
            else:
                flat[str(key)] = text(value)
        columns.append(flat)
    rows = []
    for name in dict.fromkeys(name for flat in columns for name in flat):
        values = [flat.get(name, "–") for flat in columns]
        cells = [tag("td", v, class_="differs" if v != values[0] else None) for v in values]
        rows.append([tag("th", name, scope="row"), *cells])
    if not rows:
        return None
    body = table(["", *(run.name for run in runs)], rows)
    return section("environment", "Environment", tag("div", body, class_="card"))


# a classifier


def classification_section(runs: Sequence[RunFiles]) -> Section | None:
    """Return the section: scores of all runs with a classification, and details by class for the first run."""
    classified = [(run, last) for run in runs for last in run.of_kind("classification")[-1:]]
    if not classified:
        return None
    rows = []
    for run, last in classified:
        scores = [show(number(last.get(name)), kind) for name, kind in _SCORES]
        rows.append([run.name, f"{last['step']:,}", show(number(last.get("examples")), "count"), *scores])
    head = ["run", "step", "examples", "accuracy", "exact match", "F1", "Matthews correlation"]
    scores_of_runs = table(head, rows, numeric=range(1, 7))
    record = classified[0][1]
    labels, counts = record.get("labels"), _confusion(record)
    if classified[0][0] is not runs[0] or counts is None:
        return section("classification", "Classification", card("Validation examples", scores_of_runs))
    names, sums = [str(label) for label in labels or []], [sum(row) for row in counts]
    label, score = names[sums.index(max(sums))], show(_share(max(sums), sum(sums)), "percent")
    baseline = quiet(f"Always predicting “{label}”, the most frequent class, would score {score}.")
    by_class, pairs = [], []
    for place, (name, row) in enumerate(zip(names, counts, strict=True)):
        hits, true, predicted = row[place], sum(row), sum(other[place] for other in counts)
        shares = [show(_share(hits, true), "percent"), show(_share(hits, predicted), "percent")]
        by_class.append([name, show(true, "count"), *shares, show(_share(2 * hits, true + predicted), "loss")])
        pairs += [(count, name, names[i]) for i, count in enumerate(row) if i != place and count > 0]
    few, more = shortened(by_class, "classes")
    head = ["class", "examples", "recall", "precision", "F1"]
    classes, mistakes = card("Classes", table(head, few, numeric=range(1, 5)), more), None
    if pairs:
        pairs.sort(key=lambda pair: -pair[0])
        few, more = shortened([[true, other, show(count, "count")] for count, true, other in pairs], "pairs of classes")
        confusions = table(["class", "predicted as", "examples"], few, numeric=[2])
        note = quiet("predictions.tsv in the folder of the run lists every example.")
        mistakes = card("Most frequent confusions", confusions, more, note)
    examples = card("Validation examples", scores_of_runs, baseline)
    return section("classification", "Classification", examples, classes, mistakes)


def _confusion(record: Record) -> list[list[float]] | None:
    # number of examples, indexed [true][predicted]; None if missing (older versions, many classes) or inconsistent
    labels, rows = record.get("labels"), record.get("confusion")
    if not isinstance(labels, list) or not isinstance(rows, list) or not labels or len(rows) != len(labels):
        return None
    counts = [[number(value) for value in row] if isinstance(row, list) else [] for row in rows]
    fits = all(len(row) == len(labels) and all(math.isfinite(v) and v >= 0 for v in row) for row in counts)
    return counts if fits else None


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


# load of experts


def experts_section(run: RunFiles) -> Section | None:
    """Return the section with a picture of the largest loads by layer and step; None if the run has no experts."""
    records = [record for record in run.history.train.values() if _loads(record)]
    if not records:
        return None
    columns: list[tuple[int, int, list[float]]] = []  # first and last step, and the largest load of each layer
    count = min(_COLUMNS, len(records))
    for i in range(count):
        part = records[i * len(records) // count : (i + 1) * len(records) // count]
        loads = [_loads(record) for record in part]
        largest = []
        for layer in range(max(map(len, loads))):
            known = [of_layers[layer] for of_layers in loads if layer < len(of_layers)]
            largest.append(max((load for load in known if math.isfinite(load)), default=math.nan))
        columns.append((int(number(part[0]["step"])), int(number(part[-1]["step"])), largest))
    high = max([*(load for *_, loads in columns for load in loads if math.isfinite(load)), 1.0])
    last = records[-1]
    busiest, idle = show(number(last.get("expert_load_max")), "loss"), show(number(last.get("experts_idle")), "count")
    lead = (
        f"At step {last['step']:,} the busiest expert had {busiest} of the mean load of its layer, and {idle} experts"
        " had no token."
    )
    steps = f"{len(records):,} logged steps in {len(columns):,} columns"
    note = quiet(f"White: the mean load. Dark: {show(high, 'loss')} of it. {steps}.")
    picture = _picture_of_loads(columns, high)
    return section("experts", "Load of experts", card("Largest load by layer", tag("p", lead), picture, note))


def _loads(record: Record) -> list[float]:
    # the largest load of each layer in a record; nothing if it has none, or something else in their place
    loads = record.get("expert_load_max_by_layer")
    return [number(value) for value in loads[:_LAYERS]] if isinstance(loads, list) else []


def _picture_of_loads(columns: Sequence[tuple[int, int, list[float]]], high: float) -> Html:
    layers = max(len(loads) for *_, loads in columns)
    width, height = _LEFT + _CELL * len(columns), _ROW * layers + _BELOW
    parts = []
    for index, (first, last, loads) in enumerate(columns):
        steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        for layer, value in enumerate(loads):
            if not math.isfinite(value):
                continue
            share = 0.0 if high <= 1 else min(1.0, max(0.0, (value - 1) / (high - 1)))
            title = tag("title", f"{steps}, layer {layer + 1} with experts: {value:.2f} of the mean")
            at = {"x": _LEFT + _CELL * index, "y": _ROW * (layers - 1 - layer), "width": _CELL, "height": _ROW}
            parts.append(tag("rect", title, fill="var(--c1)", fill_opacity=f"{share:.3f}", **at))
    for layer in range(0, layers, max(1, math.ceil(layers / 12))):
        y = _ROW * (layers - layer) - 2
        parts.append(tag("text", f"layer {layer + 1}", x=_LEFT - 6, y=y, text_anchor="end", class_="axis"))
    ends = [(0, "start", columns[0][0]), (len(columns), "end", columns[-1][1])]
    for at_column, anchor, step in ends[: 1 if len(columns) == 1 else 2]:
        x = _LEFT + _CELL * at_column
        parts.append(tag("text", f"{step:,}", x=x, y=height - 8, text_anchor=anchor, class_="axis"))
    label = f"largest load of an expert by layer ({layers}) and step"
    return tag("svg", parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=label, class_="loads")


# measurements


def numerics_section(run: RunFiles) -> Section | None:
    """Return the section about steps that were skipped; None if there are none."""
    rows, before, earlier = [], 0.0, 0
    is_fp16 = bool(run.config and run.config["precision"]["fp16"])
    for r in run.train:
        skipped = number(r.get("skipped_steps"))
        if skipped > before:
            where = f"{r['step']:,}" if r["step"] - earlier <= 1 else f"{earlier + 1:,} to {r['step']:,}"
            dump = next((step for step in run.bad_steps if earlier < step <= r["step"]), None)
            why = "overflow: the loss scale was too large" if is_fp16 else "not finite"
            why = f"not finite: nonfinite-step-{dump:06d}.json" if dump is not None else why
            values = [_value(r, name) for name in ("loss", "grad_norm", "loss_scale")]
            rows.append([where, f"{skipped - before:,.0f}", *values, why])
        before, earlier = max(before, skipped) if math.isfinite(skipped) else before, r["step"]
    if not rows:
        return None
    few, more = shortened(rows, "places")
    lead = quiet("Their gradients were not finite, so weights and optimizer state were left unchanged.")
    head = ["logged step", "skipped", "loss", "gradient norm", "loss scale after", "reason"]
    body = tag("div", lead, table(head, few, numeric=range(5)), more, class_="card")
    return section("numerics", "Skipped steps", body)


def _value(record: Record, field: str) -> str:
    value = number(record.get(field))
    return str(record.get(field, "–")) if not math.isfinite(value) else show(value)


def prediction_section(run: RunFiles) -> Section | None:
    """Return the section that compares predictions with measurements after ten steps, from the last such record."""
    last = next(reversed(run.of_kind("prediction")), None)
    if last is None:
        return None
    names = (
        "predicted_bytes", "measured_bytes", "before_model_bytes", "sent_bytes", "can_hide_bytes", "collectives",
        "step_s",
    )  # fmt: skip
    predicted, measured, before, sent, hideable, count, step_s = (number(last.get(name)) for name in names)
    whole = max((v for v in (predicted, measured, predicted + before) if math.isfinite(v)), default=1.0)
    held = show(before, "bytes")
    note = "The prediction covers tensors; allocator, NCCL and the program itself come on top."
    if before > 0:
        note = (
            f"On top of the {held} that the program held before the model was built (the first part of both bars). On a"
            " CPU the measured value includes memory that the allocator keeps."
        )
    bars = []
    rest = measured - before if before > 0 else measured
    for name, kind, num_bytes in (("predicted", "k-steps", predicted), ("measured", "k-lost", rest)):
        value = show(num_bytes, "bytes")
        parts = [("k-other", before, f"before the model was built: {held}")] if before > 0 else []
        parts += [(kind, num_bytes, value)] if math.isfinite(num_bytes) else []
        drawn = bar(parts, whole, f"{name}: {value}")
        bars.append(tag("div", tag("span", name), drawn, tag("span", value, class_="num"), class_="bar-row"))
    rows = [
        ["sent by each rank per step, predicted", show(sent, "bytes")],
        ["collectives per step, predicted", show(count, "count")],
        ["share of the traffic that can overlap with computation", show(_share(hideable, sent), "percent")],
        ["time per step, measured (median of the first ten)", show(step_s, "seconds")],
        ["so each rank sends at least", f"{show(sent / step_s, 'bytes')}/s" if step_s > 0 else "–"],
    ]  # fmt: skip
    memory = card("Memory of a rank", *bars, quiet(note))
    traffic = card("Traffic and time", table(["", ""], rows, numeric=(1,)))
    return section("prediction", "Predicted and measured", tag("div", memory, traffic, class_="pair"))


def exchanges_section(run: RunFiles) -> Section | None:
    """Return the section about --report-overlap: time of the exchanges, and how much of it ran under computation."""
    if not run.overlap:
        return None
    records, step = run.overlap["rows"], run.overlap["step_seconds"]
    times = [(number(r.get("exchange")), number(r.get("exposed"))) for r in records]
    exchange, exposed = (sum(v for v in each if math.isfinite(v)) for each in zip(*times, strict=True))
    whole = max([1e-12, *(v for pair in times for v in pair if math.isfinite(v))])
    rows = []
    for r, (alone, waited) in zip(records, times, strict=True):
        bars = []
        for kind, value, word in (("k-steps", alone, "alone"), ("k-lost", waited, "exposed")):
            if math.isfinite(value):
                bars.append(bar([(kind, value, "")], whole, f"{word} {show(value, 'seconds')}"))
        rows.append([
            _AXES.get(r["axis"], r["axis"]), "outside" if r.get("layer") is None else r["layer"],
            r.get("direction", ""), _value(r, "number"), show(alone, "seconds"), show(waited, "seconds"),
            show(number(r.get("hidden")), "percent"), tag("div", bars, class_="two-bars"),
        ])  # fmt: skip
    few, more = shortened(rows, "rows")
    lead = (
        f"Timed alone, the exchanges of a step take {show(exchange, 'seconds')}; rank 0 waited"
        f" {show(exposed, 'seconds')} for them in a step of {show(step, 'seconds')}"
        f" ({show(_share(exposed, step), 'percent')})."
    )
    if exposed > exchange:
        lead += " It waited longer than they take alone: for a slower rank, or because computation competes for the"
        lead += " processor."
    head = ["axis", "layer (pipeline: stage)", "direction", "count", "alone", "exposed", "hidden", "alone and exposed"]
    note = quiet(
        "Of rank 0. Alone: timed with nothing running beside it. Exposed: time that the rank waited. overlap-trace.json"
        " has the timeline."
    )
    body = tag("div", tag("p", lead), table(head, few, numeric=range(3, 7)), more, note, class_="card")
    return section("exchanges", "Exchanges", body)


# configuration


def configuration_section(runs: Sequence[RunFiles]) -> Section | None:
    """Return the section: every flag with its default and its value in each run whose configuration is known."""
    configured = [run for run in runs if run.config]
    if not configured:
        return None
    configs = [run.config for run in configured]
    rows, num_changed, num_differ = [], 0, 0
    for group, entries in Config().to_dict().items():
        about = tag("span", (GROUPS[group].__doc__ or "").partition("\n")[0].rstrip("."), class_="quiet")
        title = tag("th", f"{group} options ", about, colspan=len(configured) + 2, scope="colgroup")
        rows.append(tag("tr", title, class_="group"))
        helps = {f.name: described(f) for f in dataclasses.fields(GROUPS[group])}
        for name, default in entries.items():
            values = [config[group][name] for config in configs]
            is_changed, differs = any(v != default for v in values), any(v != values[0] for v in values)
            num_changed, num_differ = num_changed + is_changed, num_differ + differs
            looks = " ".join(word for word, holds in (("changed", is_changed), ("other", differs)) if holds)
            mark = tag("span", "● ", class_="mark", title="not the default") if is_changed else None
            flag = tag("th", mark, "--" + name.replace("_", "-"), scope="row", title=helps[name])
            cells = [tag("td", text(v), class_="differs" if v != values[0] else None) for v in values]
            rows.append(tag("tr", flag, cells, tag("td", text(default), class_="quiet"), class_=looks or None))
    columns = ["flag", *(run.name for run in configured), "default"]
    head = tag("thead", tag("tr", [tag("th", name, scope="col") for name in columns]))
    flags = tag("table", head, tag("tbody", rows), class_="config", id="config-table")
    words = f"{num_changed} flags differ from their defaults"
    if len(configured) > 1:
        words += f"; {num_differ} between the runs" if num_differ else "; the runs have the same configuration"
    if missing := [run.name for run in runs if not run.config]:
        why = "is unknown: neither a start record nor a checkpoint has it"
        words += f". The configuration of {', '.join(missing)} {why}"
    # the filter of the table, which only the page's script shows; without it the table has every row
    choices = [("other", "where the runs differ")] if len(configured) > 1 else []
    choices += [("changed", "not the default"), ("all", "all flags")]
    options = [tag("option", word, value=value) for value, word in choices]
    controls = tag(
        "div", tag("label", "show ", tag("select", options, id="config-show")),
        tag("label", "filter ", tag("input", type="search", id="config-filter", autocomplete="off", size="18")),
        class_="controls needs-script",
    )  # fmt: skip
    lead, body = quiet(words + "."), tag("div", flags, class_="scroll", tabindex="0")
    return section("configuration", "Configuration", tag("div", lead, controls, body, class_="card"))
