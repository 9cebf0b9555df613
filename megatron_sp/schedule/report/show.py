"""Schedule as text: the model's tree with its splits and collectives, and all details of one module."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.report.survey import Edge, Node, Part, Survey, survey
from megatron_sp.utils import markup
from megatron_sp.utils.errors import DiskError
from megatron_sp.utils.output_file import write_output

if TYPE_CHECKING:
    from megatron_sp.schedule.schedule import Schedule


def show(found: Survey, *, every: bool = False) -> str:
    """Return the tree as text."""
    lines = list(_heading(found))
    rows = [row for node, depth in _shown(found.folded(), every) for row in _rows(node, depth)]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    lines += [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows
    ]
    if found.problem:
        lines += ["", f"apply() refuses it: {found.problem}"]
    return "\n".join(lines)


def _heading(found: Survey) -> Iterator[str]:
    share = f" ({100 * found.local / found.whole:.0f} %)" if found.whole else ""
    yield f"{found.root.kind} over {found.mesh}: {count(len(found.directives), 'line')}, "\
        f"{found.local:,} of {found.whole:,} parameters on a rank{share}"  # fmt: skip
    yield ""


def count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 line``, ``2 lines``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_quiet(node: Node) -> bool:
    return all(not (n.parts or n.edges or n.notes) for n in node.walk())


def _shown(root: Node, every: bool) -> Iterator[tuple[Node, int]]:
    def walk(node: Node, depth: int) -> Iterator[tuple[Node, int]]:
        yield node, depth
        for child in node.children:
            if every or not is_quiet(child):
                yield from walk(child, depth + 1)

    if root.parts or root.edges or root.notes:
        yield root, 0
    for child in root.children:
        if every or not is_quiet(child):
            yield from walk(child, 0)


def _rows(node: Node, depth: int) -> Iterator[tuple[str, str, str, str]]:
    # rows (name, class, role, one fact) of a module; only the first row has its name
    name = f"{'  ' * depth}{node.name or '(the model)'}{f'  x {node.copies}' if node.copies > 1 else ''}"
    things = [*(edge_words(e) for e in node.edges if e.side == "in"), *(part_words(p) for p in node.parts)]
    things += [*(edge_words(e) for e in node.edges if e.side == "out"), *node.notes]
    yield name, node.kind, node.role, things[0] if things else ""
    for thing in things[1:]:
        yield "", "", "", thing


def part_words(part: Part) -> str:
    # format a parameter: ``weight [24 -> 12, 24]``
    sizes = [
        f"{whole} -> {local}" if whole != local else str(whole)
        for whole, local in zip(part.shape, part.local, strict=True)
    ]
    more = ", gradient summed over tp" if part.summed else ""
    return f"{part.name} [{', '.join(sizes)}]{more}{f', tied to {part.tied}' if part.tied else ''}"


def edge_words(edge: Edge) -> str:
    # format an edge: ``in hidden_states: all_gather dim 1, backward reduce_scatter``
    over = "" if edge.axis == "tp" else f" over {edge.axis}"
    return f"{edge.side} {edge.tensor}".strip() + f": {edge.words}{over}"


def explain(found: Survey, path: str) -> str:
    """Return all that is known of one module as text, with the reason of each collective."""
    node = found.at(path)
    lines = [f"{path or 'the model'}, {_article(node.kind)}{f': {node.role}' if node.role else ''}"]
    lines += _parts(node, found)
    for edge in sorted(node.edges, key=lambda e: e.side):
        over = f"over {edge.axis}"
        lines.append(f"  {edge.side} {edge.tensor}".rstrip() + f": {edge.words}, {over}")
        lines.append(f"    because {edge.why}")
        lines.append(f"    asked for by {line_words(edge.directive)}")
    lines += [f"  {note}" for note in node.notes]
    lines += _around(found, path)
    if not node.edges and not node.role and not node.notes and len(lines) == 1:
        lines.append("  no line mentions it: every rank has all of it and does the same")
    return "\n".join(lines)


def _parts(node: Node, found: Survey) -> Iterator[str]:
    for part in node.parts:
        yield f"  {part_words(part)}"
        if part.dim is not None:
            places = " and ".join(f"{start} to {start + length}" for start, length in part.runs) or "none"
            yield f"    rank {found.rank} of {found.size} has {places} along dim {part.dim}"
        elif part.summed:
            yield "    every rank has all of it and uses it on a share: the sum of their gradients is the whole one"


def _around(found: Survey, path: str) -> Iterator[str]:
    for node in found.root.walk():
        is_around = node.path != path and (not node.path or path.startswith(f"{node.path}."))
        for edge in node.edges if is_around else ():
            yield f"  around it, {node.path or 'the model'}: {edge.side} {edge.tensor}".rstrip() + f": {edge.words}"


def line_words(directive: Directive) -> str:
    return f"{directive}{f' at {directive.where}' if directive.where else ''}"


def _article(kind: str) -> str:
    return f"{'an' if kind[:1] in 'AEIO' else 'a'} {kind}"


def as_record(found: Survey, path: str | None = None) -> dict[str, Any]:
    """Return everything, or one module, as a JSON-serialisable dict."""

    def record(node: Node) -> dict[str, Any]:
        edges = [
            {"side": e.side, "tensor": e.tensor, "forward": e.forward, "backward": e.backward, "axis": e.axis, "dim": e.dim,
             "why": e.why, "line": str(e.directive), "where": e.directive.where}
            for e in node.edges
        ]  # fmt: skip
        parts = [
            {"name": p.name, "shape": list(p.shape), "local": list(p.local), "dim": p.dim, "runs": [list(r) for r in p.runs],
             "summed": p.summed, "tied": p.tied or None}
            for p in node.parts
        ]  # fmt: skip
        made = {
            "path": node.path,
            "class": node.kind,
            "role": node.role,
            "parameters": parts,
            "collectives": edges,
            "notes": node.notes,
        }
        return {**made, "modules": [record(child) for child in node.children]}

    if path is not None:
        return record(found.at(path))
    return {
        "mesh": found.mesh, "rank": found.rank, "tp": found.size, "parameters": found.whole, "parameters_per_rank": found.local,
        "lines": [{"line": str(d), "where": d.where} for d in found.directives], "problem": found.problem or None,
        "model": record(found.root),
    }  # fmt: skip


@dataclass
class Difference:
    """Difference between two schedules; false if there is none.

    Attributes:
        removed, added: lines.
    """

    removed: list[Directive] = field(default_factory=list)
    added: list[Directive] = field(default_factory=list)
    # (what, before, after) for parameters, collectives, other notes on modules, and the mesh
    effects: list[tuple[str, str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.effects)

    def __str__(self) -> str:
        if not self:
            return "no difference"
        lines = [f"- {d}" for d in self.removed] + [f"+ {d}" for d in self.added]
        lines += [f"  {what}: {before} -> {after}" for what, before, after in self.effects]
        return "\n".join(lines if self.effects else [*lines, "  written otherwise, to the same effect"])


def diff(before: Schedule, after: Schedule) -> Difference:
    """Compare two schedules of models with the same modules."""
    lines = [[(d.on, d.do, repr(sorted(d.args.items(), key=str)), d) for d in s.directives] for s in (before, after)]
    keys = [{line[:3] for line in each} for each in lines]
    removed = [line[3] for line in lines[0] if line[:3] not in keys[1]]
    added = [line[3] for line in lines[1] if line[:3] not in keys[0]]
    facts = [_facts(s) for s in (before, after)]
    names = list(dict.fromkeys([*facts[0], *facts[1]]))
    changed = [
        (n, facts[0].get(n, "nothing"), facts[1].get(n, "nothing")) for n in names if facts[0].get(n) != facts[1].get(n)
    ]
    return Difference(removed, added, changed)


def _facts(schedule: Schedule) -> dict[str, str]:
    found = survey(schedule)
    facts = {"mesh": found.mesh}
    for node in found.root.walk():
        path = node.path or "the model"
        for part in node.parts:
            facts[f"{node.path}.{part.name}".lstrip(".")] = part_words(part).partition(" ")[2]
        facts |= _edges(node, path)
        if node.notes:
            facts[f"{path}, besides"] = "; ".join(node.notes)
    return facts


def _edges(node: Node, path: str) -> dict[str, str]:
    sides: dict[str, list[str]] = {}
    for edge in node.edges:
        sides.setdefault(f"{path}, {edge.side} {edge.tensor}".rstrip(), []).append(f"{edge.words} over {edge.axis}")
    return {key: "; ".join(words) for key, words in sides.items()}


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
    lead = f'<p class="lead">{_text(count(len(found.directives), "line"))}; {_text(share)}</p>{problem}'
    legend = f'<p class="legend">{legend}</p>'
    main = f"<main><h1>{_text(title)}</h1>{lead}{legend}{body}<h2>Lines</h2><ol>{lines}</ol></main>"
    return markup.page(title, _STYLE, markup.Html(main))


def _tops(root: Node) -> list[Node]:
    return (
        [root] if root.parts or root.edges or root.notes else [child for child in root.children if not is_quiet(child)]
    )


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
    # a segment for each rank's share, in the order of the whole parameter; of a parameter with blocks, block by block
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
    chips += (
        f'<span class="back {_colour(edge.backward)}">backward {_text(edge.backward)}</span>' if edge.backward else ""
    )
    title = f"{edge.why}\n{line_words(edge.directive)}"
    return f'<div class="edge" title="{_text(title)}">{chips}<em>{_text(what)}</em></div>'


def _colour(op: str) -> str:
    return op if op in ("all_gather", "all_reduce", "reduce_scatter", "slice") else "other"


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
