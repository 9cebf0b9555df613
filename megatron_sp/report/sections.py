"""Building blocks of the page's sections, and the section about the environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_sp.report.html import Html, table, tag
from megatron_sp.report.reading import RunFiles
from megatron_sp.report.run_history import Record

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
    """Paragraph in a muted color."""
    return tag("p", text, class_="quiet")


def shortened(rows: Sequence[Any], what: str) -> tuple[Sequence[Any], Html | None]:
    """Return the first rows, and a sentence about the rest; None if there is no rest."""
    return rows[:ROWS], quiet(f"and {len(rows) - ROWS:,} more {what}") if len(rows) > ROWS else None


def environment_section(runs: Sequence[RunFiles]) -> Section | None:
    """Return the section about the environment: versions, devices, hosts, layout, with a column for each run."""
    found = [_about_flat(run.environment) for run in runs]
    names = list(dict.fromkeys(name for each in found for name in each))
    if not names:
        return None
    rows = []
    for name in names:
        values = [each.get(name, "–") for each in found]
        rows.append([tag("th", name, scope="row"), *(tag("td", v, class_="differs" if v != values[0] else None) for v in values)])
    return section("environment", "Environment", tag("div", table(["", *(run.name for run in runs)], rows), class_="card"))


def _about_flat(environment: Record) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in environment.items():
        if key == "hosts" and isinstance(value, dict):
            few, more = list(value.items())[:ROWS], len(value) - ROWS
            flat["hosts"] = ", ".join(f"{host} ({count} {'process' if count == 1 else 'processes'})" for host, count in few)
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
