"""HTML and SVG in which all text is escaped but what ``tag`` has made."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

# Texts of a run (names, paths, messages) are untrusted and must never become markup. A page is one file that loads
# nothing: a content security policy in its head forbids every connection, and every script but those given, by hash.
_VOID = ("meta", "input", "br", "hr")


class Html(str):
    """A string of markup; any other string is text."""


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element; text children are escaped, None and False are dropped, of attributes too."""
    words = ""
    for key, value in attributes.items():
        if value is not None and value is not False:
            name_ = key.rstrip("_").replace("_", "-")  # class_ and http_equiv
            words += f" {name_}" if value is True else f' {name_}="{html.escape(str(value), quote=True)}"'
    return Html(f"<{name}{words}>" if name in _VOID else f"<{name}{words}>{join(*children)}</{name}>")


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
    # JSON that is safe inside a script element: it can neither end the element nor begin a comment
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], *, class_: str = "", numeric: Iterable[int] = ()
) -> Html:
    """Return a table; columns ``numeric`` are aligned to the right."""
    right = set(numeric)

    def cells(row: Sequence[object], kind: str, **more: object) -> list[Html]:
        ready = (isinstance(cell, Html) and cell.startswith(("<td", "<th")) for cell in row)
        looks = ("num" if place in right else None for place in range(len(row)))
        return [
            join(c) if is_cell else tag(kind, c, class_=look, **more)
            for c, is_cell, look in zip(row, ready, looks, strict=True)
        ]

    body = [tag("tr", cells(row, "td")) for row in rows]
    top = tag("thead", tag("tr", cells(head, "th", scope="col"))) if any(head) else None
    return tag("div", tag("table", top, tag("tbody", body), class_=class_ or None),
               class_="scroll", tabindex="0")  # fmt: skip


def page(title: str, style: str, body: object, scripts: Sequence[str] = (), *, data: object = None) -> Html:
    """Return a page; style and scripts are not escaped. Scripts find JSON in the element ``data``."""
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts]
    allowed = f" script-src {' '.join(hashes)};" if hashes else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline';{allowed} base-uri 'none'; form-action 'none'"
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"), tag("title", title), tag("style", Html(style)),
    )  # fmt: skip
    json_data = [] if data is None else [tag("script", script_json(data), type="application/json", id="data")]
    end = [*json_data, *(tag("script", Html(script)) for script in scripts)]
    return join(Html("<!DOCTYPE html>\n"), tag("html", head, tag("body", body), Html("\n"), end, lang="en"), Html("\n"))


# ------------------------------------------------------------------------------------------------------------ pictures

_SVG_STYLE = """
  .page { fill: #ffffff } .title { font: 600 16px sans-serif; fill: #1b1f24 }
  .text { font: 12px sans-serif; fill: #32383f }
  .lane { fill: #eef1f4 } .tick { stroke: #57606a; stroke-width: 0.6 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .title { fill: #f0f3f6 } .text { fill: #d0d7de } .lane { fill: #161b22 }
    .tick { stroke: #9ea7b3 }
  }
"""


def svg(
    width: int, height: int, title: str, about: str, parts: Iterable[str], *, style: str = "", sized: bool = False
) -> str:
    """Return a picture as an SVG document; ``parts``, its elements, are not escaped.

    Unless ``sized`` it is as wide as there is space.
    """
    size = f'width="{width}" height="{height}" ' if sized else ""
    label = html.escape(title, quote=True)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{label}">',
        f"<style>{_SVG_STYLE}{style}</style>", f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="title" x="16" y="26">{html.escape(title)}</text>',
        f'<text class="text" x="16" y="46">{html.escape(about)}</text>',
        *parts, "</svg>", "",
    ])  # fmt: skip
