"""HTML that is safe by construction: every text is escaped unless it was produced by ``tag``.

Texts of a run (names, paths, messages) are untrusted and must never become markup.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_sp.utils.format import format_bytes, format_duration

_VOID = ("meta", "input", "br", "hr")


class Html(str):
    """A string of markup; any other string is text."""


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element.

    Args:
        children: Html is kept, lists are flattened, None and False are dropped, everything else is escaped.
        attributes: a trailing underscore is removed (``class_``), others become hyphens; None and False are dropped,
            True has no value.
    """
    words = "".join(
        f" {_name(key)}" if value is True else f' {_name(key)}="{html.escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{words}>" if name in _VOID else f"<{name}{words}>{join(*children)}</{name}>")


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def join(*children: object) -> Html:
    """Return the children of an element, concatenated."""
    parts: list[str] = []
    for child in children:
        if child is None or child is False:
            continue
        if isinstance(child, (list, tuple)):
            parts.append(join(*child))
        else:
            parts.append(child if isinstance(child, Html) else html.escape(str(child), quote=False))
    return Html("".join(parts))


def script_json(value: Any) -> Html:
    """Return JSON that is safe inside a script element: it can neither end the element nor begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, class_: str = "", numeric: Iterable[int] = ()) -> Html:
    """Return a table that scrolls horizontally if it is too wide.

    Args:
        numeric: indices of columns that are aligned to the right.
    """
    right = set(numeric)

    def cells(row: Sequence[object], kind: str, **more: object) -> list[Html]:
        ready = (isinstance(cell, Html) and cell.startswith(("<td", "<th")) for cell in row)
        looks = ("num" if place in right else None for place in range(len(row)))
        return [join(c) if is_cell else tag(kind, c, class_=look, **more) for c, is_cell, look in zip(row, ready, looks, strict=True)]

    body = [tag("tr", cells(row, "td")) for row in rows]
    top = tag("thead", tag("tr", cells(head, "th", scope="col"))) if any(head) else None
    return tag("div", tag("table", top, tag("tbody", body), class_=class_ or None),
               class_="scroll", tabindex="0")  # fmt: skip


def show(value: float, kind: str = "plain") -> str:
    """Return a number in human-readable form.

    Args:
        kind: plain, loss, si (1.2 M), bytes, percent (of one), seconds, count.
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if kind == "loss":
        return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"
    if kind == "si":
        return _si(value)
    if kind == "bytes":
        return format_bytes(value)
    if kind == "percent":
        return f"{100 * value:.1f} %"
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "seconds":
        return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 100 else format_duration(value)
    return f"{value:.4g}"


def _si(value: float) -> str:
    for unit, size in ((" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
