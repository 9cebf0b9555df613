"""report.html: one file without scripts, which loads nothing. A content security policy in its head forbids both.

Everything in a report is untrusted text: it becomes markup nowhere (``megatron_sp/utils/markup.py`` escapes).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import megatron_sp.report
from first_light.records import Record
from first_light.report import PartResult, Report, write_file
from first_light.tables import Table, results, tables, undone, verdict_of
from megatron_sp.utils import markup
from megatron_sp.utils.format import format_duration
from megatron_sp.utils.markup import Html, join, table, tag

_LOOKS = {"ok": "good", "wrong": "bad", "failed": "bad", "absent": "busy", "NOT WELL": "bad", "stopped": "warn"}
_COLOURS = {  # Okabe and Ito's, as in the overlap picture: blues and greens compute, reds move
    "projection": "#0072B2", "attention": "#009E73", "output projection": "#56B4E9", "mlp": "#E69F00", "wait": "#d7373f",
}  # fmt: skip
_EXCHANGE, _OTHER = "#CC79A7", "#A9A9A9"
_LANE, _WIDTH, _NAMES = 22, 1000, 190  # of a time line, in its own units
_STYLE = """
.line { display: block; width: 100%; height: auto; margin: 6px 0 14px; font-size: 11px; }
.line text { fill: var(--ink); } .scroll { max-height: none; } .keys .key { margin: 0 5px 0 14px; }
"""


def write_page(report: Report, path: Path) -> None:
    """Write the page. Raises DiskError if that fails."""
    write_file(path, page(report))


def page(report: Report) -> str:
    """Return the page."""
    parts = results(report)
    bad = [name for name, _, result in parts if result.is_bad]
    left = undone(report)
    verdict = "something is NOT WELL" if bad else "well so far" if left else "all is well"
    pill = tag("span", verdict, class_=f"pill {'bad' if bad else 'warn' if left else 'good'}")
    where = report.machine.get("gpu") or "A trial on the CPU"
    header = tag(
        "header", tag("p", "megatron_sp: first light", class_="kicker"), tag("h1", where, pill), _lead(report, left)
    )
    sections = [_summary(report, parts), *(_section(*part) for part in parts)]
    links = [tag("a", name, href=f"#part-{number}") for number, (name, _, _) in enumerate(parts)]
    numbered = [
        tag("section", section, id="summary" if number == 0 else f"part-{number - 1}")
        for number, section in enumerate(sections)
    ]
    body = join(header, tag("nav", tag("a", "summary", href="#summary"), links), tag("main", numbered))
    css = (Path(megatron_sp.report.__file__).parent / "page.css").read_text(encoding="utf-8")
    return markup.page("First light", css + _STYLE, body)


def _lead(report: Report, left: Sequence[str]) -> Html:
    words = [f"{name} {value}" for name, value in report.machine.items() if name != "gpu"]
    lines = [tag("p", ", ".join(words), class_="lead")]
    if not report.machine.get("gpu"):
        lines.append(
            tag(
                "p", "Tiny shapes: this says that the parts run. No time here says anything about a GPU.", class_="lead"
            )
        )
    lines += [tag("p", f"{call['date']}: ", tag("code", call["command"]), class_="quiet") for call in report.calls]
    lines += [tag("p", f"To be done: {', '.join(left)}.", class_="quiet")] if left else []
    return join(lines)


def _summary(report: Report, parts: Sequence[tuple[str, str, PartResult]]) -> Html:
    rows = [
        [
            name,
            title,
            _pill(verdict_of(result)),
            _counts(result.records),
            format_duration(result.seconds),
            result.message,
        ]
        for name, title, result in parts
    ]
    if not rows:
        return join(tag("h2", "Summary"), tag("p", "Nothing has been measured yet."))
    made = table(["part", "", "", "records", "took", "remark"], rows, numeric=(4,))
    return join(tag("h2", "Summary"), tag("div", made, class_="card"))


def _counts(records: Sequence[Record]) -> str:
    counts = {
        verdict: sum(record.verdict == verdict for record in records)
        for verdict in ("ok", "wrong", "failed", "absent", "measured")
    }
    words = {"absent": "not there"}
    return ", ".join(f"{count} {words.get(verdict, verdict)}" for verdict, count in counts.items() if count) or "none"


def _section(name: str, title: str, result: PartResult) -> Html:
    parts = [tag("h2", title, " ", _pill(verdict_of(result)))]
    if result.message:
        parts.append(tag("p", result.message, class_="bad-text" if result.is_bad else "quiet"))
    for made in tables(result.records):
        lines = [
            join(tag("h3", record.row), time_line(record))
            for record in result.records
            if record.table == made.title and record.spans
        ]
        parts.append(tag("div", tag("h3", made.title), _table(made), lines, class_="card"))
    measured = f"{name}, {format_duration(result.seconds)}" + (
        f", revision {result.revision}" if result.revision else ""
    )
    return join(parts, tag("p", measured, class_="quiet"))


def _table(made: Table) -> Html:
    rows = [
        [row[0], *([_pill(row[1]) if row[1] else ""] if made.has_results else []), *row[1 + made.has_results :]]
        for row in made.rows
    ]
    return table(made.head, rows, numeric=range(1 + made.has_results, len(made.head) - made.has_remarks))


def _pill(word: str) -> Html:
    return tag("span", word, class_=f"pill {_LOOKS.get(word, 'busy')}")


def time_line(record: Record) -> Html:
    """Return a record's spans as a picture: a lane for each stream, time to the right, forward and backward at one scale."""
    lanes = list(dict.fromkeys(lane for lane, _, _, _ in record.spans))
    whole = max((end for _, _, _, end in record.spans), default=0.0) or 1.0
    scale = (_WIDTH - _NAMES) / whole
    made = [tag("text", lane, x=0, y=place * _LANE + 15) for place, lane in enumerate(lanes)]
    for lane, label, begin, end in record.spans:
        words = tag("title", f"{label}: {begin:.3f} to {end:.3f} ms")
        at = {"x": f"{_NAMES + begin * scale:.2f}", "y": lanes.index(lane) * _LANE + 3}
        made.append(
            tag(
                "rect",
                words,
                **at,
                width=f"{max(0.3, (end - begin) * scale):.2f}",
                height=_LANE - 6,
                fill=_colour(lane, label),
            )
        )
    made.append(tag("text", f"{whole:.3g} ms", x=_WIDTH, y=len(lanes) * _LANE + 14, text_anchor="end"))
    box = f"0 0 {_WIDTH} {len(lanes) * _LANE + 20}"
    colours = {label: _colour(lane, label) for lane, label, _, _ in record.spans if "exchanges" not in lane} | {
        "exchange": _EXCHANGE
    }
    keys = [[tag("span", class_="key", style=f"--c: {colour}"), label, "  "] for label, colour in colours.items()]
    picture = tag("svg", made, viewBox=box, role="img", aria_label=f"time line of {record.row}", class_="line")
    return join(picture, tag("p", keys, class_="quiet keys"))


def _colour(lane: str, label: str) -> str:
    return _EXCHANGE if "exchanges" in lane else _COLOURS.get(label, _OTHER)
