"""A report's records as tables of text, for the page and for docs/benchmarks/gpu.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from first_light.plan import PARTS, parts_for
from first_light.records import Record, Value
from first_light.report import PartResult, Report
from megatron_sp.utils.format import format_bytes

_UNITS = {"_ms": " (ms)", "_s": " (s)", "_bytes": "", "_gbs": " (GB/s)", "_tflops": " (TFLOP/s)", "_share": ""}


@dataclass(frozen=True)
class Table:
    """One table of a part.

    Attributes:
        head: of the columns: what, result (if any row has one), the values, remark (likewise).
        rows: as wide as ``head``.
        has_results, has_remarks: which columns there are.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    has_results: bool
    has_remarks: bool


def tables(records: Sequence[Record]) -> list[Table]:
    """Return the records' tables, in the order in which they begin."""
    titles = list(dict.fromkeys(record.table for record in records))
    return [_table(title, [record for record in records if record.table == title]) for title in titles]


def _table(title: str, records: Sequence[Record]) -> Table:
    names = list(dict.fromkeys(name for record in records for name in record.values))
    has_remarks = any(record.message for record in records)
    has_results = any(record.verdict != "measured" for record in records)
    head = ["", *(["result"] if has_results else []), *map(heading, names), *(["remark"] if has_remarks else [])]
    rows = []
    for record in records:
        result = ["" if record.verdict == "measured" else record.verdict] if has_results else []
        values = [cell(name, record.values.get(name)) for name in names]
        rows.append([record.row, *result, *values, *([record.message] if has_remarks else [])])
    return Table(title, head, rows, has_results, has_remarks)


def heading(name: str) -> str:
    """Return a column's title: its name, with its unit in brackets."""
    for end, unit in _UNITS.items():
        if name.endswith(end):
            return name.removesuffix(end) + unit
    return name


def cell(name: str, value: Value) -> str:
    """Return a value as text, by the unit in its column's name."""
    if value is None:
        return ""
    if isinstance(value, (str, bool)):
        return str(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_share"):
        return f"{100 * value:.1f} %"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 100):
        return f"{value:,.0f}"
    if "error" in name:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def results(report: Report) -> list[tuple[str, str, PartResult]]:
    """Return (name, title, result) of the parts in their order; unknown ones of a report come last."""
    titles = {part.name: part.title for part in PARTS}
    order = {name: place for place, name in enumerate(titles)}
    names = sorted(report.parts, key=lambda name: order.get(name, len(order)))
    return [(name, titles.get(name, name), report.parts[name]) for name in names]


def undone(report: Report) -> list[str]:
    """Return the parts that are still to be done."""
    return [
        part.name
        for part in parts_for(report.machine.get("device", "cuda"))
        if not report.is_finished(part.name, again=False)
    ]


def verdict_of(result: PartResult) -> str:
    """Return ok, NOT WELL or stopped, of a part."""
    return "stopped" if result.status == "stopped" else "NOT WELL" if result.is_bad else "ok"
