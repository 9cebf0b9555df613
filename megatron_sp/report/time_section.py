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
    sums = {kind: seconds for kind, seconds in totals(spans).items() if seconds > 0}
    whole, begin, end = sum(sums.values()), spans[0].begin, spans[-1].end
    parts, shares, rows = [], [], []
    for s in merged(spans):
        parts.append((f"k-{s.kind}", s.seconds, f"{WORDS[s.kind]}, {format_duration(s.seconds)}, to step {s.step:,}"))
    for kind, seconds in sums.items():
        shares.append((f"k-{kind}", seconds, f"{WORDS[kind]}: {format_duration(seconds)}"))
        name = join(tag("span", class_=f"key k-{kind}"), WORDS[kind])
        rows.append([name, show(seconds, "seconds"), show(seconds / whole, "percent")])
    notes = []
    for what, records in (("saves", run.of_kind("save")), ("validations", run.of_kind("valid"))):
        took = sorted(seconds for r in records if math.isfinite(seconds := number(r.get("seconds"))))
        if took:
            failed = sum(r.get("saved") is False for r in records)
            words = f"median {show(took[len(took) // 2], 'seconds')}, longest {show(took[-1], 'seconds')}"
            words = f"{len(records):,} {what}: {words}{f'; {failed} could not be written' if failed else ''}"
            notes.append(tag("p", words, class_="bad-text" if failed else "quiet"))
    where = card(
        "Where the time went", bar(parts, end - begin, "timeline of the run"),
        tag("p", tag("span", _clock(begin)), tag("span", _clock(end)), class_="ends quiet"),
        bar(shares, whole, "shares of the time"), table(["", "time", "share"], rows, numeric=(1, 2)), *notes,
    )  # fmt: skip
    pair = tag("div", _slow_card(tries), _repeated_card(run), class_="pair")
    return section("time", "Time", where, _attempts_card(tries) if len(tries) > 1 else None, pair)


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
    # entries of configuration and environment that differ between two starts
    groups = [(config_of(old), config_of(new))]
    environments = [e if isinstance(e := start.get("environment"), dict) else {} for start in (old, new)]
    before, after = ({"": {k: v for k, v in e.items() if not isinstance(v, dict)}, **e} for e in environments)
    groups.append((before, after))
    changes: dict[str, tuple[Any, Any]] = {}
    for before, after in groups:
        for name in dict.fromkeys([*before, *after]) if before and after else ():
            a, b = (group if isinstance(group := of.get(name), dict) else {} for of in (before, after))
            differing = [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]
            changes |= {str(key): (a.get(key), b.get(key)) for key in differing}
    return ", ".join(f"{name}: {text(a)} → {text(b)}" for name, (a, b) in changes.items()) or "nothing"


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
    head = ["step", "attempt", "time per step", "of the usual", "lost", ""]
    return card("Slow steps", lead, table(head, few, numeric=range(5)), more)


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
    rows = []
    for step, taken in {**differ, **run.repeated}.items():
        fields = (("loss", "loss_hex"), ("gradient norm", "grad_norm_hex"), ("samples", "samples_sha"))
        wrong = [word for word, field in fields if len({str(r.get(field)) for r in taken}) > 1]
        exact = [dict.fromkeys(f"{number(r.get(name)):.17g}" for r in taken) for name in ("loss", "grad_norm")]
        verdict = f"✕ {', '.join(wrong)} differ" if wrong else "✓ equal"
        rows.append([f"{step:,}", *(" → ".join(numbers) for numbers in exact), verdict])
    few, more = shortened(rows, "steps")
    values = join(table(["step", "loss", "gradient norm", ""], few, numeric=(0, 1, 2)), more)
    return card("Repeated steps", lead, tag("details", tag("summary", "values"), values, open=bool(differ)))
