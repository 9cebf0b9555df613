"""Section about time: its breakdown, the attempts, slow steps, repeated steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from megatron_sp.report.charts import bar
from megatron_sp.report.reading import RunFiles, config_of
from megatron_sp.report.run_history import Record, are_equal, number
from megatron_sp.report.sections import Section, card, quiet, section, shortened, text
from megatron_sp.report.time_use import SLOW, Attempt, merged, slow_steps, time_line, totals
from megatron_sp.utils.format import format_duration, show
from megatron_sp.utils.markup import Html, join, table, tag

WORDS = {
    "steps": "training steps", "lost": "steps discarded by an interruption", "valid": "validation", "save": "saving",
    "start": "starting", "other": "other", "down": "not running",
}  # fmt: skip


def time_section(run: RunFiles) -> Section | None:
    """Return the section: breakdown of the time, attempts, slow steps, repeated steps."""
    tries = run.attempts
    spans = time_line(tries)
    if not spans:
        return None
    return section("time", "Time", _time_card(run, tries), _attempts_card(tries) if len(tries) > 1 else None,
                   tag("div", _slow_card(tries), _repeated_card(run), class_="pair"))  # fmt: skip


def _time_card(run: RunFiles, tries: Sequence[Attempt]) -> Html:
    spans = time_line(tries)
    sums = {kind: seconds for kind, seconds in totals(spans).items() if seconds > 0}
    whole = sum(sums.values())
    begin, end = spans[0].begin, spans[-1].end
    parts = [
        (f"k-{s.kind}", s.seconds, f"{WORDS[s.kind]}, {format_duration(s.seconds)}, to step {s.step:,}")
        for s in merged(spans)
    ]
    line = bar(parts, end - begin, "timeline of the run")
    shares = bar(
        [(f"k-{k}", v, f"{WORDS[k]}: {format_duration(v)}") for k, v in sums.items()], whole, "shares of the time"
    )
    rows = [
        [join(tag("span", class_=f"key k-{k}"), WORDS[k]), show(v, "seconds"), show(v / whole, "percent")]
        for k, v in sums.items()
    ]
    return card(
        "Where the time went",
        line, tag("p", tag("span", _clock(begin)), tag("span", _clock(end)), class_="ends quiet"),
        shares, table(["", "time", "share"], rows, numeric=(1, 2)),
        _spread("saves", run.of_kind("save")), _spread("validations", run.of_kind("valid")),
    )  # fmt: skip


def _spread(what: str, records: Sequence[Record]) -> Html | None:
    seconds = [s for r in records if math.isfinite(s := number(r.get("seconds")))]
    failed = sum(r.get("saved") is False for r in records)
    if not seconds:
        return None
    middle = sorted(seconds)[len(seconds) // 2]
    words = f"{len(records):,} {what}: median {show(middle, 'seconds')}, longest {show(max(seconds), 'seconds')}"
    return tag(
        "p", words, f"; {failed} could not be written" if failed else "", class_="bad-text" if failed else "quiet"
    )


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def _attempts_card(tries: Sequence[Attempt]) -> Html:
    rows = []
    for index, attempt in enumerate(tries):
        down = attempt.begin - tries[index - 1].end if index else math.nan
        lost = sum(s.seconds for s in attempt.spans if s.kind == "lost")
        redone = max(attempt.last_step - tries[index + 1].first_step, 0) if index + 1 < len(tries) else 0
        rows.append([
            index + 1, _clock(attempt.begin), show(down, "seconds"),
            show(number(attempt.start.get("launch_to_ready_s")), "seconds"),
            f"{attempt.first_step:,} to {attempt.last_step:,}",
            f"{redone:,} steps, {show(lost, 'seconds')}" if redone else "–",
            attempt.start.get("world_size", "–"), _changes(tries[index - 1].start, attempt.start) if index else "–",
        ])  # fmt: skip
    few, more = shortened(rows, "attempts")
    head = [
        "attempt", "launched", "pause before", "launch to ready", "steps", "discarded", "processes",
        "changes since the previous attempt",
    ]  # fmt: skip
    return card("Attempts", table(head, few, numeric=(0, 2, 3, 5, 6)), more)


def _changes(old: Record, new: Record) -> str:
    pairs = {**_flat(config_of(old), config_of(new)), **_flat(_about(old), _about(new))}
    return ", ".join(f"{name}: {text(a)} → {text(b)}" for name, (a, b) in pairs.items()) or "nothing"


def _about(start: Record) -> dict[str, dict[str, Any]]:
    environment = start.get("environment")
    environment = environment if isinstance(environment, dict) else {}
    return {
        "": {k: v for k, v in environment.items() if not isinstance(v, dict)},
        **{k: v for k, v in environment.items() if isinstance(v, dict)},
    }


def _flat(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    if not old or not new:
        return {}
    changes: dict[str, tuple[Any, Any]] = {}
    for group in dict.fromkeys([*old, *new]):
        a, b = old.get(group, {}), new.get(group, {})
        changes |= {str(key): (a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)}
    return changes


def _slow_card(tries: Sequence[Attempt]) -> Html:
    slow = sorted(slow_steps(tries), key=lambda s: -s.lost_s)
    if not slow:
        return card("Slow steps", quiet(f"None took more than {SLOW:g} times the median of the steps before."))
    rows = []
    for s in slow:
        times = show(s.seconds, "seconds"), f"{s.seconds / s.usual:.1f} x", show(s.lost_s, "seconds")
        rows.append([f"{s.step:,}", s.attempt + 1, *times, "first logged after a start" if s.is_first else ""])
    few, more = shortened(rows, "slow intervals")
    lost = f"{show(sum(s.lost_s for s in slow), 'seconds')} lost in total"
    lead = quiet(f"{len(slow):,} logged intervals took more than {SLOW:g} times the median of those before: {lost}.")
    return card(
        "Slow steps",
        lead,
        table(["step", "attempt", "time per step", "of the usual", "lost", ""], few, numeric=range(5)),
        more,
    )


def _repeated_card(run: RunFiles) -> Html:
    if not run.repeated:
        return card("Repeated steps", quiet("None: no interruption discarded logged steps."))
    differ = {step: taken for step, taken in run.repeated.items() if not are_equal(taken)}
    count = len(run.repeated)
    if differ:
        lead = tag("p", f"✕ {len(differ):,} of {count:,} repeated logged steps differ.", class_="bad-text")
    else:
        words = f"✓ {count:,} logged steps were repeated: loss, gradient norm and samples are bit-identical."
        lead = tag("p", words, class_="good-text")
    order = [*differ.items(), *((s, t) for s, t in run.repeated.items() if s not in differ)]
    few, more = shortened([_repeated_row(step, taken) for step, taken in order], "steps")
    values = join(table(["step", "loss", "gradient norm", ""], few, numeric=(0, 1, 2)), more)
    return card("Repeated steps", lead, tag("details", tag("summary", "values"), values, open=bool(differ)))


def _repeated_row(step: int, taken: Sequence[Record]) -> list[object]:
    fields = (("loss", "loss_hex"), ("gradient norm", "grad_norm_hex"), ("samples", "samples_sha"))
    wrong = [word for word, field in fields if len({str(r.get(field)) for r in taken}) > 1]
    exact = {field: [f"{number(r.get(field)):.17g}" for r in taken] for field in ("loss", "grad_norm")}
    values = [" → ".join(dict.fromkeys(numbers)) for numbers in exact.values()]
    return [f"{step:,}", *values, f"✕ {', '.join(wrong)} differ" if wrong else "✓ equal"]
