"""Schedule as text: the model's tree with its splits and collectives, and all details of one module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.report.survey import Edge, Node, Part, Survey


def show(found: Survey, *, every: bool = False) -> str:
    """Return the tree as text.

    Args:
        every: include modules that no line affects.
    """
    lines = list(_heading(found))
    rows = [row for node, depth in _shown(found.folded(), every) for row in _rows(node, depth)]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    lines += ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows]
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
    """Return whether no line affects a module or anything inside it."""
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
    """Yield rows (name, class, role, one fact) of a module; only the first row has its name."""
    name = f"{'  ' * depth}{node.name or '(the model)'}{f'  x {node.copies}' if node.copies > 1 else ''}"
    things = [*(edge_words(e) for e in node.edges if e.side == "in"), *(part_words(p) for p in node.parts)]
    things += [*(edge_words(e) for e in node.edges if e.side == "out"), *node.notes]
    yield name, node.kind, node.role, things[0] if things else ""
    for thing in things[1:]:
        yield "", "", "", thing


def part_words(part: Part) -> str:
    """Format a parameter: ``weight [24 -> 12, 24]``."""
    sizes = [f"{whole} -> {local}" if whole != local else str(whole) for whole, local in zip(part.shape, part.local, strict=True)]
    more = ", gradient summed over tp" if part.summed else ""
    return f"{part.name} [{', '.join(sizes)}]{more}{f', tied to {part.tied}' if part.tied else ''}"


def edge_words(edge: Edge) -> str:
    """Format an edge: ``in hidden_states: all_gather dim 1, backward reduce_scatter``."""
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
    """Yield the collectives at modules around this one."""
    for node in found.root.walk():
        is_around = node.path != path and (not node.path or path.startswith(f"{node.path}."))
        for edge in node.edges if is_around else ():
            yield f"  around it, {node.path or 'the model'}: {edge.side} {edge.tensor}".rstrip() + f": {edge.words}"


def line_words(directive: Directive) -> str:
    """Format a line with its file and line number."""
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
        made = {"path": node.path, "class": node.kind, "role": node.role, "parameters": parts, "collectives": edges, "notes": node.notes}
        return {
            **made,
            "modules": [record(child) for child in node.children],
        }

    if path is not None:
        return record(found.at(path))
    return {
        "mesh": found.mesh, "rank": found.rank, "tp": found.size, "parameters": found.whole, "parameters_per_rank": found.local,
        "lines": [{"line": str(d), "where": d.where} for d in found.directives], "problem": found.problem or None,
        "model": record(found.root),
    }  # fmt: skip
