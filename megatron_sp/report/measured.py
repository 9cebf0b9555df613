"""Sections about measurements of a run: skipped steps, predictions and measurements, communication."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_sp.report.bars import bar
from megatron_sp.report.html import Html, show, table, tag
from megatron_sp.report.reading import RunFiles
from megatron_sp.report.run_history import Record, number
from megatron_sp.report.sections import Section, card, quiet, section, shortened

_AXES = {"cp": "context", "ep": "experts", "pp": "pipeline", "sp": "ulysses", "tp": "tensor"}


def numerics_section(run: RunFiles) -> Section | None:
    """Return the section about skipped steps and overflows."""
    rows, before, earlier = [], 0.0, 0
    is_fp16 = bool(run.config and run.config["precision"]["fp16"])
    for r in run.train:
        skipped = number(r.get("skipped_steps"))
        if skipped > before:
            where = f"{r['step']:,}" if r["step"] - earlier <= 1 else f"{earlier + 1:,} to {r['step']:,}"
            dump = next((step for step in run.bad_steps if earlier < step <= r["step"]), None)
            why = "overflow: the loss scale was too large" if is_fp16 else "not finite"
            why = f"not finite: nonfinite-step-{dump:06d}.json" if dump is not None else why
            rows.append([where, f"{skipped - before:,.0f}", _value(r, "loss"), _value(r, "grad_norm"), _value(r, "loss_scale"), why])
        before, earlier = max(before, skipped) if math.isfinite(skipped) else before, r["step"]
    if not rows:
        return None
    few, more = shortened(rows, "places")
    lead = quiet("Their gradients were not finite, so weights and optimizer state were left unchanged.")
    body = table(["logged step", "skipped", "loss", "gradient norm", "loss scale after", "reason"], few, numeric=range(5))
    return section("numerics", "Skipped steps", tag("div", lead, body, more, class_="card"))


def _value(record: Record, field: str) -> str:
    value = number(record.get(field))
    return str(record.get(field, "–")) if not math.isfinite(value) else show(value)


# ----------------------------------------------------------------------------------------- predicted and measured


def prediction_section(run: RunFiles) -> Section | None:
    """Return the section that compares the closed forms with measurements after ten steps, from the last such record."""
    last = next(reversed(run.of_kind("prediction")), None)
    if last is None:
        return None
    names = ("predicted_bytes", "measured_bytes", "before_model_bytes", "sent_bytes", "can_hide_bytes", "collectives", "step_s")
    predicted, measured, before, sent, hideable, count, step_s = (number(last.get(name)) for name in names)
    whole = max((v for v in (predicted, measured, predicted + before) if math.isfinite(v)), default=1.0)
    there = [("k-other", before, f"before the model was built: {show(before, 'bytes')}")] if before > 0 else []
    rest = measured - before if before > 0 else measured
    memory = card(
        "Memory of a rank",
        _bar_row("predicted", [*there, ("k-steps", predicted, show(predicted, "bytes"))], whole, show(predicted, "bytes")),
        _bar_row("measured", [*there, ("k-lost", rest, show(rest, "bytes"))], whole, show(rest, "bytes")),
        quiet(f"On top of the {show(before, 'bytes')} that the program held before the model was built (the first part of both bars). "
              "On a CPU the measured value includes memory that the allocator keeps." if before > 0 else
              "The prediction covers tensors; allocator, NCCL and the program itself come on top."),
    )  # fmt: skip
    share = show(hideable / sent, "percent") if sent > 0 else "–"
    rows = [
        ["sent by each rank per step, predicted", show(sent, "bytes")], ["collectives per step, predicted", show(count, "count")],
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
    return tag("div", tag("span", name), bar(drawn, whole, f"{name}: {value}"), tag("span", value, class_="num"), class_="bar-row")


# ------------------------------------------------------------------------------------------------------ exchanges


def exchanges_section(run: RunFiles) -> Section | None:
    """Return the section about --report-overlap: time of the exchanges, and the share of it that was hidden under computation."""
    if not run.overlap:
        return None
    rows = run.overlap["rows"]
    exchange, exposed = (sum(v for r in rows if math.isfinite(v := number(r.get(k)))) for k in ("exchange", "exposed"))
    step = run.overlap["step_seconds"]
    whole = max([1e-12, *(v for r in rows for k in ("exchange", "exposed") if math.isfinite(v := number(r.get(k))))])
    few, more = shortened([_exchange_row(row, whole) for row in rows], "rows")
    share = exposed / step if step > 0 else math.nan
    lead = f"Timed alone, the exchanges of a step take {show(exchange, 'seconds')}; rank 0 waited {show(exposed, 'seconds')} for them"
    lead += f" in a step of {show(step, 'seconds')} ({show(share, 'percent')})."
    if exposed > exchange:
        lead += " It waited longer than they take alone: for a slower rank, or because computation competes for the processor."
    head = ["axis", "layer (pipeline: stage)", "direction", "count", "alone", "exposed", "hidden", "alone and exposed"]
    note = quiet(
        "Of rank 0. Alone: timed with nothing running beside it. Exposed: time that the rank waited. overlap-trace.json has the timeline."
    )
    return section("exchanges", "Exchanges", tag("div", tag("p", lead), table(head, few, numeric=range(3, 7)), more, note, class_="card"))


def _exchange_row(row: Record, whole: float) -> list[object]:
    exchange, exposed = number(row.get("exchange")), number(row.get("exposed"))
    return [
        _AXES.get(row["axis"], row["axis"]), "outside" if row.get("layer") is None else row["layer"],
        row.get("direction", ""), _value(row, "number"), show(exchange, "seconds"), show(exposed, "seconds"),
        show(number(row.get("hidden")), "percent"), _two_bars(exchange, exposed, whole),
    ]  # fmt: skip


def _two_bars(exchange: float, exposed: float, whole: float) -> Html:
    kinds = (("k-steps", exchange, "alone"), ("k-lost", exposed, "exposed"))
    bars = [bar([(kind, value, "")], whole, f"{word} {show(value, 'seconds')}") for kind, value, word in kinds if math.isfinite(value)]
    return tag("div", bars, class_="two-bars")
