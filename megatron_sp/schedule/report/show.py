"""A schedule as text, JSON and a picture: the model's tree, splits and collectives; and what differs between two."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.report.survey import Edge, Node, Part, Survey, survey
from megatron_sp.utils import markup
from megatron_sp.utils.errors import DiskError
from megatron_sp.utils.files import write_output
from megatron_sp.utils.markup import Html, tag

if TYPE_CHECKING:
    from megatron_sp.schedule.schedule import Schedule


def show(seen: Survey, *, every: bool = False) -> str:
    """Return the tree as text; with ``every``, also modules that no line affects."""
    share = f" ({100 * seen.local / seen.whole:.0f} %)" if seen.whole else ""
    num_lines = f"{len(seen.directives):,} line{'' if len(seen.directives) == 1 else 's'}"
    parameters = f"{seen.local:,} of {seen.whole:,} parameters on a rank{share}"
    lines = [f"{seen.root.kind} over {seen.mesh}: {num_lines}, {parameters}", ""]
    rows: list[tuple[str, str, str, str]] = []  # name, class, role, one fact; only a module's first row has its name

    def add(node: Node, depth: int) -> None:
        copies = f"  x {len(node.paths)}" if len(node.paths) > 1 else ""
        facts = [*(edge_words(e) for e in node.edges if e.side == "in"), *map(part_words, node.parts)]
        facts += [*(edge_words(e) for e in node.edges if e.side == "out"), *node.notes]
        rows.append((f"{'  ' * depth}{node.name or '(the model)'}{copies}", node.kind, node.role, "".join(facts[:1])))
        rows.extend(("", "", "", fact) for fact in facts[1:])

    def walk(node: Node, depth: int) -> None:
        for child in node.children:
            if every or not _is_quiet(child):
                add(child, depth)
                walk(child, depth + 1)

    root = seen.root.folded()
    if root.parts or root.edges or root.notes:
        add(root, 0)
    walk(root, 0)
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[3]]).rstrip())
    if seen.problem:
        lines += ["", f"apply() refuses it: {seen.problem}"]
    return "\n".join(lines)


def _is_quiet(node: Node) -> bool:
    return all(not (n.parts or n.edges or n.notes) for n in node.walk())


def part_words(part: Part) -> str:
    """Describe a parameter: ``weight [24 -> 12, 24]``."""
    pairs = zip(part.shape, part.local, strict=True)
    sizes = [f"{whole} -> {local}" if whole != local else str(whole) for whole, local in pairs]
    more = ", gradient summed over tp" if part.summed else ""
    return f"{part.name} [{', '.join(sizes)}]{more}{f', tied to {part.tied}' if part.tied else ''}"


def edge_words(edge: Edge) -> str:
    """Describe a collective: ``in hidden_states: all_gather dim 1, backward reduce_scatter``."""
    over = "" if edge.axis == "tp" else f" over {edge.axis}"
    return f"{edge.side} {edge.tensor}".strip() + f": {edge.words}{over}"


def explain(seen: Survey, path: str) -> str:
    """Return all that is known of one module as text, with the reason of each collective."""
    node = seen.at(path)
    article = "an" if node.kind[:1] in "AEIO" else "a"
    lines = [f"{path or 'the model'}, {article} {node.kind}{f': {node.role}' if node.role else ''}"]
    for part in node.parts:
        lines.append(f"  {part_words(part)}")
        if part.dim is not None:
            places = " and ".join(f"{start} to {start + length}" for start, length in part.runs) or "none"
            lines.append(f"    rank {seen.rank} of {seen.size} has {places} along dim {part.dim}")
        elif part.summed:
            lines.append(
                "    every rank has all of it and uses it on a share: the sum of their gradients is the whole one"
            )
    for edge in sorted(node.edges, key=lambda e: e.side):
        lines.append(f"  {edge.side} {edge.tensor}".rstrip() + f": {edge.words}, over {edge.axis}")
        lines += [f"    because {edge.why}", f"    asked for by {_line_words(edge.directive)}"]
    lines += [f"  {note}" for note in node.notes]
    for outer in seen.root.walk():
        if outer.path != path and (not outer.path or path.startswith(f"{outer.path}.")):
            where = f"  around it, {outer.path or 'the model'}: "
            lines += [f"{where}{edge.side} {edge.tensor}".rstrip() + f": {edge.words}" for edge in outer.edges]
    if not node.edges and not node.role and not node.notes and len(lines) == 1:
        lines.append("  no line mentions it: every rank has all of it and does the same")
    return "\n".join(lines)


def _line_words(line: Directive) -> str:
    return f"{line}{f' at {line.where}' if line.where else ''}"


def as_record(seen: Survey, path: str | None = None) -> dict[str, Any]:
    """Return everything, or one module, as a JSON-serialisable dict."""

    def record(node: Node) -> dict[str, Any]:
        edges = []
        for edge in node.edges:
            known = {key: value for key, value in vars(edge).items() if key != "directive"}
            edges.append({**known, "line": str(edge.directive), "where": edge.directive.where})
        return {
            "path": node.path, "class": node.kind, "role": node.role,
            "parameters": [{**vars(p), "tied": p.tied or None} for p in node.parts], "collectives": edges,
            "notes": node.notes, "modules": [record(child) for child in node.children],
        }  # fmt: skip

    if path is not None:
        return record(seen.at(path))
    return {
        "mesh": seen.mesh, "rank": seen.rank, "tp": seen.size, "parameters": seen.whole,
        "parameters_per_rank": seen.local,
        "lines": [{"line": str(d), "where": d.where} for d in seen.directives], "problem": seen.problem or None,
        "model": record(seen.root),
    }  # fmt: skip


@dataclass
class Difference:
    """Difference between two schedules; false if there is none."""

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
    old, new = ({(d.on, d.do, repr(sorted(d.args.items(), key=str))): d for d in s.directives} for s in (before, after))
    removed, added = [d for key, d in old.items() if key not in new], [d for key, d in new.items() if key not in old]
    was, now = _facts(before), _facts(after)
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return Difference(removed, added, [(n, was.get(n, "nothing"), now.get(n, "nothing")) for n in names])


def _facts(schedule: Schedule) -> dict[str, str]:
    seen = survey(schedule)
    facts = {"mesh": seen.mesh}
    for node in seen.root.walk():
        path = node.path or "the model"
        for part in node.parts:
            facts[f"{node.path}.{part.name}".lstrip(".")] = part_words(part).partition(" ")[2]
        for edge in node.edges:
            key, words = f"{path}, {edge.side} {edge.tensor}".rstrip(), f"{edge.words} over {edge.axis}"
            facts[key] = f"{facts[key]}; {words}" if key in facts else words
        if node.notes:
            facts[f"{path}, besides"] = "; ".join(node.notes)
    return facts


_MOST_BARS = 16  # bars show no more ranks than this
_LEGEND = (("own", "this rank's share"), ("other", "other ranks' shares"), ("whole", "whole on every rank"),
           ("summed", "whole on every rank, gradient summed over tp"))  # fmt: skip


def write_picture(seen: Survey, path: str | Path) -> None:
    """Write the page. Raises DiskError: it cannot be written."""
    try:
        write_output(path, page(seen))
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}") from None


def page(seen: Survey) -> str:
    num_lines = f"{len(seen.directives):,} line{'' if len(seen.directives) == 1 else 's'}"
    title = f"{seen.root.kind} over {seen.mesh}"
    share = f"{seen.local:,} of {seen.whole:,} parameters on rank {seen.rank} of tp {seen.size}"
    legend = [tag("span", tag("i", style=f"background:var(--{key})"), words) for key, words in _LEGEND]
    root = seen.root.folded()
    tops = [root] if root.parts or root.edges or root.notes else [c for c in root.children if not _is_quiet(c)]
    body = [
        tag("h1", title),
        tag("p", f"{num_lines}; {share}", class_="lead"),
        tag("p", f"apply() refuses it: {seen.problem}", class_="bad") if seen.problem else None,
        tag("p", legend, class_="legend"),
        [_module(node, seen) for node in tops],
        tag("h2", "Lines"),
        tag("ol", [tag("li", tag("code", _line_words(d))) for d in seen.directives]),
    ]
    style = (Path(__file__).parent / "picture.css").read_text(encoding="utf-8")
    return markup.page(title, style, tag("main", body))


def _module(node: Node, seen: Survey) -> Html:
    head = [tag("span", node.name or "the model", class_="name"), Html(" "), tag("span", node.kind, class_="kind")]
    if node.role:
        head += [Html(" "), tag("span", node.role, class_="role")]
    if len(node.paths) > 1:
        head += [Html(" "), tag("span", f"{len(node.paths)} alike", class_="times")]
    before, after = ([_edge(e) for e in node.edges if e.side == side] for side in ("in", "out"))
    facts = [before, [_part(p, seen) for p in node.parts], [tag("p", note, class_="note") for note in node.notes]]
    if children := [_module(child, seen) for child in node.children if not _is_quiet(child)]:
        return tag("details", tag("summary", head), facts, children, after, open=True)
    return tag("div", head, facts, after, class_="leaf")


def _part(part: Part, seen: Survey) -> Html:
    # a segment for each rank's share, in the order of the whole parameter; of a parameter with blocks, block by block
    if part.dim is None:
        shares = [tag("b", class_="summed" if part.summed else "whole")]
    else:
        size = min(seen.size, _MOST_BARS)
        own = seen.rank * size // seen.size
        block = [tag("b", class_="own" if rank == own else None) for rank in range(size)]
        shares = block * max(1, len(part.runs))
    down = " down" if part.dim == 0 and len(part.shape) > 1 else ""
    return tag("div", tag("div", shares, class_=f"bar{down}"), tag("code", part_words(part)), class_="part")


def _edge(edge: Edge) -> Html:
    ops = ("all_gather", "all_reduce", "reduce_scatter", "slice")
    forward, backward = (op if op in ops else "other" for op in (edge.forward, edge.backward))
    what = f"{edge.side} {edge.tensor}".strip() + ("" if edge.axis == "tp" else f", over {edge.axis}")
    dim = "" if edge.dim is None else f" dim {edge.dim}"
    chips = [tag("span", f"↓ {edge.forward}{dim}", class_=forward)] if edge.forward else []
    if edge.backward:
        chips.append(tag("span", f"backward {edge.backward}", class_=f"back {backward}"))
    return tag("div", chips, tag("em", what), class_="edge", title=f"{edge.why}\n{_line_words(edge.directive)}")
