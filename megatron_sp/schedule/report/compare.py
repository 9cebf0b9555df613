"""Comparison of two schedules: which lines differ, and what that changes in the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_sp.schedule.core.directives import Directive
from megatron_sp.schedule.report.show import part_words
from megatron_sp.schedule.report.survey import Node, survey

if TYPE_CHECKING:
    from megatron_sp.schedule.schedule import Schedule


@dataclass
class Difference:
    """Difference between two schedules; false if there is none.

    Attributes:
        removed, added: lines.
        effects: (what, before, after) for parameters, collectives, other notes on modules, and the mesh.
    """

    removed: list[Directive] = field(default_factory=list)
    added: list[Directive] = field(default_factory=list)
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
    changed = [(n, facts[0].get(n, "nothing"), facts[1].get(n, "nothing")) for n in names if facts[0].get(n) != facts[1].get(n)]
    return Difference(removed, added, changed)


def _facts(schedule: Schedule) -> dict[str, str]:
    """Return the facts of a schedule that can be compared, by name."""
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
