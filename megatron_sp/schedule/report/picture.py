"""Picture of a schedule as an HTML page: the model's tree, a bar with coloured shares for each parameter, collectives at the edges.

A self-contained file without scripts or external resources (a content security policy in its head forbids both), light
or dark by the reader's preference. All text in it is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path

from megatron_sp.schedule.report.show import count, is_quiet, line_words, part_words
from megatron_sp.schedule.report.survey import Edge, Node, Part, Survey
from megatron_sp.utils import markup
from megatron_sp.utils.errors import DiskError
from megatron_sp.utils.output_file import write_output

_MOST_BARS = 16  # bars show no more ranks than this
_STYLE = """
:root { color-scheme: light dark; --ground: #f4f6f9; --card: #fff; --line: #dde2ea; --ink: #17202e; --quiet: #566173; --own: #1d5fd1;
  --other: #bcd3f7; --whole: #c8ced8; --summed: #8a63d2; --gather: #0a7f5a; --reduce: #c64a06; --scatter: #8a6500;
  --back: #566173; --bad: #c0242f; }
@media (prefers-color-scheme: dark) { :root { --ground: #0e1218; --card: #161c25; --line: #2b3442; --ink: #e8edf4; --quiet: #9aa7b8;
  --own: #6fa8ff; --other: #26405f; --whole: #414b5a; --summed: #a283ea; --gather: #4fd59b; --reduce: #ff9a57; --scatter: #e8c34a;
  --back: #9aa7b8; --bad: #ff7d84; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 28px 24px 48px; background: var(--ground); color: var(--ink);
  font: 14px/1.4 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 980px; margin: 0 auto; }
h1 { margin: 0 0 2px; font-size: 1.6rem; overflow-wrap: anywhere; }
.lead, .legend { color: var(--quiet); margin: 0 0 14px; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; font-size: .82rem; }
.legend i { display: inline-block; width: 22px; height: 10px; border-radius: 2px; margin-right: 6px; }
.bad { border-left: 3px solid var(--bad); padding: 6px 12px; margin: 0 0 14px; overflow-wrap: anywhere; }
details, .leaf { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin: 4px 0; padding: 6px 10px; }
details > details, details > .leaf { margin-left: 10px; }
summary { cursor: pointer; }
.name { font-weight: 600; overflow-wrap: anywhere; } .kind { color: var(--quiet); font-size: .84rem; }
.role, .times { border: 1px solid var(--line); border-radius: 99px; padding: 0 8px; font-size: .78rem; color: var(--quiet); }
.role { color: var(--own); border-color: currentColor; }
.part { display: flex; align-items: center; gap: 10px; margin: 3px 0 3px 16px; font-size: .84rem; }
.part code { color: var(--quiet); overflow-wrap: anywhere; min-width: 0; }
.bar { display: flex; flex: none; width: 150px; height: 12px; border-radius: 3px; overflow: hidden; gap: 1px; background: var(--card); }
.bar.down { flex-direction: column; width: 40px; height: 30px; margin-right: 110px; }
.bar b { flex: 1; background: var(--other); } .bar b.own { background: var(--own); } .bar b.whole { background: var(--whole); }
.bar b.summed { background: var(--summed); }
.edge { display: flex; align-items: baseline; gap: 8px; margin: 3px 0 3px 16px; font-size: .84rem; }
.edge span { border-radius: 4px; padding: 0 7px; border: 1px solid currentColor; white-space: nowrap; }
.all_gather { color: var(--gather); } .all_reduce { color: var(--reduce); } .reduce_scatter { color: var(--reduce); }
.slice { color: var(--scatter); } .other { color: var(--back); }
.edge em { color: var(--quiet); font-style: normal; overflow-wrap: anywhere; min-width: 0; }
.edge .back { border-style: dashed; }
.note { margin: 3px 0 3px 16px; color: var(--quiet); font-size: .84rem; overflow-wrap: anywhere; }
ol { padding-left: 22px; color: var(--quiet); } li code { overflow-wrap: anywhere; }
"""
_LEGEND = (("own", "this rank's share"), ("other", "other ranks' shares"), ("whole", "whole on every rank"),
           ("summed", "whole on every rank, gradient summed over tp"))  # fmt: skip


def write_picture(found: Survey, path: str | Path) -> None:
    """Write the page. Raises DiskError: it cannot be written."""
    try:
        write_output(path, page(found))
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}") from None


def page(found: Survey) -> str:
    """Return the page as HTML."""
    title = f"{found.root.kind} over {found.mesh}"
    share = f"{found.local:,} of {found.whole:,} parameters on rank {found.rank} of tp {found.size}"
    legend = "".join(f'<span><i style="background:var(--{key})"></i>{_text(words)}</span>' for key, words in _LEGEND)
    problem = f'<p class="bad">apply() refuses it: {_text(found.problem)}</p>' if found.problem else ""
    lines = "".join(f"<li><code>{_text(line_words(d))}</code></li>" for d in found.directives)
    body = "".join(_module(child, found) for child in _tops(found.folded()))
    lead = f'<p class="lead">{_text(count(len(found.directives), "line"))}; {_text(share)}</p>'
    main = (
        f'<main><h1>{_text(title)}</h1>{lead}{problem}<p class="legend">{legend}</p>{body}<h2>Lines</h2><ol>{lines}</ol></main>'
    )
    return markup.page(title, _STYLE, markup.Html(main))


def _tops(root: Node) -> list[Node]:
    return [root] if root.parts or root.edges or root.notes else [child for child in root.children if not is_quiet(child)]


def _module(node: Node, found: Survey) -> str:
    head = f'<span class="name">{_text(node.name or "the model")}</span> <span class="kind">{_text(node.kind)}</span>'
    head += f' <span class="role">{_text(node.role)}</span>' if node.role else ""
    head += f' <span class="times">{node.copies} alike</span>' if node.copies > 1 else ""
    before = "".join(_edge(e) for e in node.edges if e.side == "in")
    after = "".join(_edge(e) for e in node.edges if e.side == "out")
    parts = "".join(_part(p, found) for p in node.parts)
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in node.notes)
    children = "".join(_module(child, found) for child in node.children if not is_quiet(child))
    if children:
        return f"<details open><summary>{head}</summary>{before}{parts}{notes}{children}{after}</details>"
    return f'<div class="leaf">{head}{before}{parts}{notes}{after}</div>'


def _part(part: Part, found: Survey) -> str:
    down = " down" if part.dim == 0 and len(part.shape) > 1 else ""
    return f'<div class="part"><div class="bar{down}">{"".join(_shares(part, found))}</div><code>{_text(part_words(part))}</code></div>'


def _shares(part: Part, found: Survey) -> Iterator[str]:
    """Yield a segment for each rank's share, in the order of the whole parameter; of a parameter with blocks, block by block."""
    if part.dim is None:
        yield f'<b class="{"summed" if part.summed else "whole"}"></b>'
        return
    size = min(found.size, _MOST_BARS)
    own = found.rank * size // found.size
    for _ in part.runs or ((0, 0),):
        for rank in range(size):
            yield f"<b{' class=own' if rank == own else ''}></b>"


def _edge(edge: Edge) -> str:
    what = f"{edge.side} {edge.tensor}".strip() + ("" if edge.axis == "tp" else f", over {edge.axis}")
    dim = "" if edge.dim is None else f" dim {edge.dim}"
    chips = f'<span class="{_colour(edge.forward)}">↓ {_text(edge.forward + dim)}</span>' if edge.forward else ""
    chips += f'<span class="back {_colour(edge.backward)}">backward {_text(edge.backward)}</span>' if edge.backward else ""
    title = f"{edge.why}\n{line_words(edge.directive)}"
    return f'<div class="edge" title="{_text(title)}">{chips}<em>{_text(what)}</em></div>'


def _colour(op: str) -> str:
    return op if op in ("all_gather", "all_reduce", "reduce_scatter", "slice") else "other"


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
