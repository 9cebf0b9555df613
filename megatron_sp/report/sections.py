"""Sections of the page, but those about time and curves, and what they are built of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_sp.config.schema import GROUPS, Config
from megatron_sp.report.charts import bar
from megatron_sp.report.reading import RunFiles
from megatron_sp.report.run_history import Record, number
from megatron_sp.utils.flag_field import described
from megatron_sp.utils.format import show
from megatron_sp.utils.markup import Html, table, tag

ROWS = 40  # shown of a long table; the rest is counted


class Section(NamedTuple):
    """A section of the page, with a key as link target."""

    key: str
    title: str
    body: Html


def section(key: str, title: str, *children: object) -> Section:
    """Section of the page with its heading."""
    return Section(key, title, tag("section", tag("h2", title), *children, id=key))


def card(title: str, *children: object) -> Html:
    """Box with a heading."""
    return tag("div", tag("h3", title), *children, class_="card")


def quiet(text: str) -> Html:
    return tag("p", text, class_="quiet")


def shortened(rows: Sequence[Any], what: str) -> tuple[Sequence[Any], Html | None]:
    """Return the first rows, and a sentence about the rest; None if there is no rest."""
    return rows[:ROWS], quiet(f"and {len(rows) - ROWS:,} more {what}") if len(rows) > ROWS else None


def environment_section(runs: Sequence[RunFiles]) -> Section | None:
    """Return the section about the environment: versions, devices, hosts, layout, with a column for each run."""
    columns = [_about_flat(run.environment) for run in runs]
    names = list(dict.fromkeys(name for each in columns for name in each))
    if not names:
        return None
    rows = []
    for name in names:
        values = [each.get(name, "–") for each in columns]
        rows.append(
            [
                tag("th", name, scope="row"),
                *(tag("td", v, class_="differs" if v != values[0] else None) for v in values),
            ]
        )
    return section(
        "environment", "Environment", tag("div", table(["", *(run.name for run in runs)], rows), class_="card")
    )


def _about_flat(environment: Record) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in environment.items():
        if key == "hosts" and isinstance(value, dict):
            few, more = list(value.items())[:ROWS], len(value) - ROWS
            flat["hosts"] = ", ".join(
                f"{host} ({count} {'process' if count == 1 else 'processes'})" for host, count in few
            )
            flat["hosts"] += f", and {more:,} more" if more > 0 else ""
        elif isinstance(value, dict):
            flat |= {f"{key}: {inner}" if key != "versions" else str(inner): text(v) for inner, v in value.items()}
        else:
            flat[str(key)] = text(value)
    return flat


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


# --------------------------------------------------------------------------------------------------------- a classifier


_SCORES = (("accuracy", "percent"), ("exact_match", "percent"), ("f1", "loss"), ("matthews", "loss"))


class _Confusion(NamedTuple):
    """Confusion matrix of a classifier."""

    labels: list[str]  # labels of the classes
    counts: list[list[float]]  # number of examples, indexed [true][predicted]


def classification_section(runs: Sequence[RunFiles]) -> Section | None:
    """Return the section: scores of all runs with a classification, and details by class for the first run."""
    classified = [(run, last) for run in runs for last in run.of_kind("classification")[-1:]]
    if not classified:
        return None
    head = ["run", "step", "examples", "accuracy", "exact match", "F1", "Matthews correlation"]
    rows = [
        [run.name, f"{last['step']:,}", show(number(last.get("examples")), "count"), *_scores(last)]
        for run, last in classified
    ]
    confused = _confusion(classified[0][1]) if classified[0][0] is runs[0] else None
    return section(
        "classification", "Classification",
        card("Validation examples", table(head, rows, numeric=range(1, 7)), _majority_baseline(confused)),
        None if confused is None else _classes(confused), None if confused is None else _mistakes(confused),
    )  # fmt: skip


def _scores(record: Record) -> list[str]:
    return [show(number(record.get(name)), kind) for name, kind in _SCORES]


def _confusion(record: Record) -> _Confusion | None:
    # the confusion matrix of a record; None if it is missing (older versions, many classes) or inconsistent
    labels, rows = record.get("labels"), record.get("confusion")
    if not isinstance(labels, list) or not isinstance(rows, list) or len(rows) != len(labels):
        return None
    counts = [[number(value) for value in row] if isinstance(row, list) else [] for row in rows]
    if not labels or any(
        len(row) != len(labels) or not all(math.isfinite(v) and v >= 0 for v in row) for row in counts
    ):
        return None
    return _Confusion([str(label) for label in labels], counts)


def _majority_baseline(confused: _Confusion | None) -> Html | None:
    if confused is None:
        return None
    sums = [sum(row) for row in confused.counts]
    label = confused.labels[sums.index(max(sums))]
    score = show(_share(max(sums), sum(sums)), "percent")
    return quiet(f"Always predicting “{label}”, the most frequent class, would score {score}.")


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _classes(confused: _Confusion) -> Html:
    rows = []
    for place, (label, row) in enumerate(zip(confused.labels, confused.counts, strict=True)):
        hits, true, said = row[place], sum(row), sum(each[place] for each in confused.counts)
        shares = (_share(hits, true), _share(hits, said))
        rows.append(
            [
                label,
                show(true, "count"),
                *(show(s, "percent") for s in shares),
                show(_share(2 * hits, true + said), "loss"),
            ]
        )
    few, more = shortened(rows, "classes")
    return card("Classes", table(["class", "examples", "recall", "precision", "F1"], few, numeric=range(1, 5)), more)


def _mistakes(confused: _Confusion) -> Html | None:
    labels = confused.labels
    pairs = [
        (count, labels[true], labels[said])
        for true, row in enumerate(confused.counts)
        for said, count in enumerate(row)
        if said != true
    ]
    rows = [
        [true, said, show(count, "count")]
        for count, true, said in sorted(pairs, key=lambda pair: -pair[0])
        if count > 0
    ]
    if not rows:
        return None
    few, more = shortened(rows, "pairs of classes")
    return card("Most frequent confusions", table(["class", "predicted as", "examples"], few, numeric=[2]), more,
                tag("p", "predictions.tsv in the folder of the run lists every example.", class_="quiet"))  # fmt: skip


# ------------------------------------------------------------------------------------------------------ load of experts


_COLUMNS, _LAYERS = 120, 256
_CELL, _ROW, _LEFT, _BELOW = 10, 10, 60, 24


def experts_section(run: RunFiles) -> Section | None:
    """Return the section; None if the run has no experts."""
    records = [record for record in run.history.train.values() if _loads(record)]
    if not records:
        return None
    last = records[-1]
    largest, idle = number(last.get("expert_load_max")), number(last.get("experts_idle"))
    lead = (
        f"At step {last['step']:,} the busiest expert had {show(largest, 'loss')} of the mean load of its layer, and"
        f" {show(idle, 'count')} experts had no token."
    )
    columns = _columns(records)
    values = [value for column in columns for value in column[2] if math.isfinite(value)]
    high = max([*values, 1.0])
    steps = f"{len(records):,} logged steps in {len(columns):,} columns"
    note = quiet(f"White: the mean load. Dark: {show(high, 'loss')} of it. {steps}.")
    return section(
        "experts", "Load of experts", card("Largest load by layer", tag("p", lead), _picture(columns, high), note)
    )


def _loads(record: Record) -> list[float]:
    # the largest load of each layer in a record; nothing if it has none, or something else in their place
    loads = record.get("expert_load_max_by_layer")
    return [number(value) for value in loads[:_LAYERS]] if isinstance(loads, list) else []


def _columns(records: Sequence[Record]) -> list[tuple[int, int, list[float]]]:
    count = min(_COLUMNS, len(records))
    columns = []
    for i in range(count):
        part = records[i * len(records) // count : (i + 1) * len(records) // count]
        layers = max(len(_loads(record)) for record in part)
        loads = [
            [value for record in part for value in _loads(record)[layer : layer + 1] if math.isfinite(value)]
            for layer in range(layers)
        ]
        columns.append(
            (
                int(number(part[0]["step"])),
                int(number(part[-1]["step"])),
                [max(of_layer, default=math.nan) for of_layer in loads],
            )
        )
    return columns


def _picture(columns: Sequence[tuple[int, int, list[float]]], high: float) -> Html:
    layers = max(len(loads) for _, _, loads in columns)
    width, height = _LEFT + _CELL * len(columns), _ROW * layers + _BELOW
    cells = []
    for index, (first, last, loads) in enumerate(columns):
        steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        for layer, value in enumerate(loads):
            if not math.isfinite(value):
                continue
            share = 0.0 if high <= 1 else min(1.0, max(0.0, (value - 1) / (high - 1)))
            title = tag("title", f"{steps}, layer {layer + 1} with experts: {value:.2f} of the mean")
            at = {"x": _LEFT + _CELL * index, "y": _ROW * (layers - 1 - layer), "width": _CELL, "height": _ROW}
            cells.append(tag("rect", title, fill="var(--c1)", fill_opacity=f"{share:.3f}", **at))
    every = max(1, math.ceil(layers / 12))
    words = [
        tag("text", f"layer {layer + 1}", x=_LEFT - 6, y=_ROW * (layers - layer) - 2, text_anchor="end", class_="axis")
        for layer in range(0, layers, every)
    ]
    ends = [(0, "start", columns[0][0]), (len(columns), "end", columns[-1][1])]
    words += [
        tag("text", f"{step:,}", x=_LEFT + _CELL * at, y=height - 8, text_anchor=anchor, class_="axis")
        for at, anchor, step in ends[: 1 if len(columns) == 1 else 2]
    ]
    label = f"largest load of an expert by layer ({layers}) and step"
    return tag("svg", cells, words, viewBox=f"0 0 {width} {height}", role="img", aria_label=label, class_="loads")


# --------------------------------------------------------------------------------------------------------- measurements


_AXES = {"cp": "context", "ep": "experts", "pp": "pipeline", "sp": "ulysses", "tp": "tensor"}


def numerics_section(run: RunFiles) -> Section | None:
    rows, before, earlier = [], 0.0, 0
    is_fp16 = bool(run.config and run.config["precision"]["fp16"])
    for r in run.train:
        skipped = number(r.get("skipped_steps"))
        if skipped > before:
            where = f"{r['step']:,}" if r["step"] - earlier <= 1 else f"{earlier + 1:,} to {r['step']:,}"
            dump = next((step for step in run.bad_steps if earlier < step <= r["step"]), None)
            why = "overflow: the loss scale was too large" if is_fp16 else "not finite"
            why = f"not finite: nonfinite-step-{dump:06d}.json" if dump is not None else why
            rows.append(
                [
                    where,
                    f"{skipped - before:,.0f}",
                    _value(r, "loss"),
                    _value(r, "grad_norm"),
                    _value(r, "loss_scale"),
                    why,
                ]
            )
        before, earlier = max(before, skipped) if math.isfinite(skipped) else before, r["step"]
    if not rows:
        return None
    few, more = shortened(rows, "places")
    lead = quiet("Their gradients were not finite, so weights and optimizer state were left unchanged.")
    body = table(
        ["logged step", "skipped", "loss", "gradient norm", "loss scale after", "reason"], few, numeric=range(5)
    )
    return section("numerics", "Skipped steps", tag("div", lead, body, more, class_="card"))


def _value(record: Record, field: str) -> str:
    value = number(record.get(field))
    return str(record.get(field, "–")) if not math.isfinite(value) else show(value)


# ----------------------------------------------------------------------------------------- predicted and measured


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
    there = [("k-other", before, f"before the model was built: {show(before, 'bytes')}")] if before > 0 else []
    rest = measured - before if before > 0 else measured
    in_steps = show(predicted, "bytes")
    note = "The prediction covers tensors; allocator, NCCL and the program itself come on top."
    if before > 0:
        note = (
            f"On top of the {show(before, 'bytes')} that the program held before the model was built (the first part of"
            " both bars). On a CPU the measured value includes memory that the allocator keeps."
        )
    memory = card(
        "Memory of a rank",
        _bar_row("predicted", [*there, ("k-steps", predicted, in_steps)], whole, in_steps),
        _bar_row("measured", [*there, ("k-lost", rest, show(rest, "bytes"))], whole, show(rest, "bytes")),
        quiet(note),
    )
    share = show(hideable / sent, "percent") if sent > 0 else "–"
    rows = [
        ["sent by each rank per step, predicted", show(sent, "bytes")],
        ["collectives per step, predicted", show(count, "count")],
        ["share of the traffic that can overlap with computation", share],
        ["time per step, measured (median of the first ten)", show(step_s, "seconds")],
        ["so each rank sends at least", f"{show(sent / step_s, 'bytes')}/s" if step_s > 0 else "–"],
    ]  # fmt: skip
    return section(
        "prediction",
        "Predicted and measured",
        tag("div", memory, card("Traffic and time", table(["", ""], rows, numeric=(1,))), class_="pair"),
    )


def _bar_row(name: str, parts: Sequence[tuple[str, float, str]], whole: float, value: str) -> Html:
    drawn = [p for p in parts if math.isfinite(p[1])]
    return tag(
        "div", tag("span", name), bar(drawn, whole, f"{name}: {value}"), tag("span", value, class_="num"),
        class_="bar-row",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ exchanges


def exchanges_section(run: RunFiles) -> Section | None:
    """Return the section about --report-overlap: time of the exchanges, and how much of it ran under computation."""
    if not run.overlap:
        return None
    rows = run.overlap["rows"]
    exchange, exposed = (sum(v for r in rows if math.isfinite(v := number(r.get(k)))) for k in ("exchange", "exposed"))
    step = run.overlap["step_seconds"]
    whole = max([1e-12, *(v for r in rows for k in ("exchange", "exposed") if math.isfinite(v := number(r.get(k))))])
    few, more = shortened([_exchange_row(row, whole) for row in rows], "rows")
    share = exposed / step if step > 0 else math.nan
    waited = f"rank 0 waited {show(exposed, 'seconds')} for them"
    lead = f"Timed alone, the exchanges of a step take {show(exchange, 'seconds')}; {waited}"
    lead += f" in a step of {show(step, 'seconds')} ({show(share, 'percent')})."
    if exposed > exchange:
        lead += " It waited longer than they take alone: for a slower rank, or because computation competes for the"
        lead += " processor."
    head = ["axis", "layer (pipeline: stage)", "direction", "count", "alone", "exposed", "hidden", "alone and exposed"]
    note = quiet(
        "Of rank 0. Alone: timed with nothing running beside it. Exposed: time that the rank waited. overlap-trace.json"
        " has the timeline."
    )
    return section(
        "exchanges",
        "Exchanges",
        tag("div", tag("p", lead), table(head, few, numeric=range(3, 7)), more, note, class_="card"),
    )


def _exchange_row(row: Record, whole: float) -> list[object]:
    exchange, exposed = number(row.get("exchange")), number(row.get("exposed"))
    return [
        _AXES.get(row["axis"], row["axis"]), "outside" if row.get("layer") is None else row["layer"],
        row.get("direction", ""), _value(row, "number"), show(exchange, "seconds"), show(exposed, "seconds"),
        show(number(row.get("hidden")), "percent"), _two_bars(exchange, exposed, whole),
    ]  # fmt: skip


def _two_bars(exchange: float, exposed: float, whole: float) -> Html:
    kinds = (("k-steps", exchange, "alone"), ("k-lost", exposed, "exposed"))
    bars = [
        bar([(kind, value, "")], whole, f"{word} {show(value, 'seconds')}")
        for kind, value, word in kinds
        if math.isfinite(value)
    ]
    return tag("div", bars, class_="two-bars")


# -------------------------------------------------------------------------------------------------------- configuration


def configuration_section(runs: Sequence[RunFiles]) -> Section | None:
    """Return the section: every flag with its default and its value in each run whose configuration is known."""
    configured = [run for run in runs if run.config]
    if not configured:
        return None
    defaults = Config().to_dict()
    configs = [run.config for run in configured]
    helps = {group: {f.name: described(f) for f in dataclasses.fields(cls)} for group, cls in GROUPS.items()}
    rows, changed, differ = [], 0, 0
    for group, entries in defaults.items():
        about = tag("span", (GROUPS[group].__doc__ or "").partition("\n")[0].rstrip("."), class_="quiet")
        rows.append(
            tag(
                "tr",
                tag("th", f"{group} options ", about, colspan=len(configured) + 2, scope="colgroup"),
                class_="group",
            )
        )
        for name, default in entries.items():
            values = [config[group][name] for config in configs]
            is_changed, is_other = any(v != default for v in values), any(v != values[0] for v in values)
            changed, differ = changed + is_changed, differ + is_other
            rows.append(_row(name, helps[group][name], values, default, is_changed=is_changed, is_other=is_other))
    head = tag(
        "tr",
        tag("th", "flag", scope="col"),
        [tag("th", run.name, scope="col") for run in configured],
        tag("th", "default", scope="col"),
    )
    body = tag(
        "div",
        tag("table", tag("thead", head), tag("tbody", rows), class_="config", id="config-table"),
        class_="scroll",
        tabindex="0",
    )
    words = f"{changed} flags differ from their defaults"
    words += (
        (f"; {differ} between the runs" if differ else "; the runs have the same configuration")
        if len(configured) > 1
        else ""
    )
    missing = [run.name for run in runs if not run.config]
    if missing:
        words += (
            f". The configuration of {', '.join(missing)} is unknown: neither a start record nor a checkpoint has it"
        )
    return section(
        "configuration",
        "Configuration",
        tag("div", tag("p", words + ".", class_="quiet"), _controls(len(configured) > 1), body, class_="card"),
    )


def _row(name: str, help_: str, values: Sequence[object], default: object, *, is_changed: bool, is_other: bool) -> Html:
    looks = " ".join(word for word, holds in (("changed", is_changed), ("other", is_other)) if holds)
    mark = tag("span", "● ", class_="mark", title="not the default") if is_changed else None
    cells = [tag("td", text(v), class_="differs" if v != values[0] else None) for v in values]
    flag = tag("th", mark, "--" + name.replace("_", "-"), scope="row", title=help_)
    return tag("tr", flag, cells, tag("td", text(default), class_="quiet"), class_=looks or None)


def _controls(several: bool) -> Html:
    # the filter of the table, which only the page's script shows; without it the table has every row
    choices = [("changed", "not the default"), ("all", "all flags")]
    if several:
        choices.insert(0, ("other", "where the runs differ"))
    options = [tag("option", words, value=value) for value, words in choices]
    return tag(
        "div",
        tag("label", "show ", tag("select", options, id="config-show")),
        tag("label", "filter ", tag("input", type="search", id="config-filter", autocomplete="off", size="18")),
        class_="controls needs-script",
    )
