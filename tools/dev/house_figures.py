"""Figures about the shape of the code: files, lines, functions, signatures, import circles and docstrings of each folder.

    python tools/dev/house_figures.py [--docstrings]

``--docstrings`` lists those whose first line does not stand alone: it continues a name
("Of the MLP.") in place of a sentence or noun phrase.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_sp"
CONTINUES = re.compile(r"(Of|What|Whether|Where|That|Which|Who|With|From|By|Before|After|Around|Behind|So that|Is|Has|Does|Can) ")
LONG_LINE, MANY_PARAMETERS = 120, 8


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, first line) of each docstring of a module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text.splitlines()[0]


def stands_alone(first_line: str) -> bool:
    """Whether a docstring's first line can be read without the name above it."""
    return CONTINUES.match(first_line) is None


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of a signature, without self and cls."""
    given = function.args
    names = [a.arg for a in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def circles(trees: dict[str, ast.AST]) -> list[list[str]]:
    """Modules that import each other at run time, a list for each group."""
    graph = {name: (set(_imports(tree, trees)) & set(trees)) - {name} for name, tree in trees.items()}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def _imports(tree: ast.AST, known: dict[str, ast.AST]) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (next((m for m in (f"{node.module}.{a.name}", node.module) if m in known), "") for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            yield from _imports(node, known)


def spread(values: list[int]) -> dict[str, int]:
    """Median, 90th percentile and largest."""
    ordered = sorted(values)
    return {"p50": int(statistics.median(ordered)), "p90": ordered[int(0.9 * (len(ordered) - 1))], "max": ordered[-1]}


def figures() -> dict[str, Any]:
    """All figures of the package."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    trees: dict[str, ast.AST] = {}
    lengths, functions, signatures = [], [], []
    counts: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        trees[name] = tree
        lines = text.splitlines()
        folder = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "."
        folders[folder].update(files=1, lines=len(lines))
        lengths.append(len(lines))
        counts["lines beyond 120 columns"] += sum(len(line) > LONG_LINE for line in lines)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
                signatures.append(parameters(node))
        for _, first in docstrings(tree):
            counts["docstrings"] += 1
            counts["docstrings whose first line does not stand alone"] += not stands_alone(first)
    counts["signatures beyond 8 parameters"] = sum(n > MANY_PARAMETERS for n in signatures)
    modules = {name: tree for name, tree in trees.items() if name != "megatron_sp"}
    return {
        "folders": {name: dict(count) for name, count in folders.items()},
        "lines of a file": spread(lengths), "lines of a function": spread(functions), "parameters of a signature": spread(signatures),
        "circles": circles(modules), **counts,
        "lines of the README": len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docstrings", action="store_true", help="list docstrings that do not stand alone")
    options = parser.parse_args()
    if options.docstrings:
        for path in sorted(PACKAGE.rglob("*.py")):
            for line, first in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
                if not stands_alone(first):
                    print(f"{path.relative_to(ROOT)}:{line}: {first}")
        return 0
    found = figures()
    for name, count in found.pop("folders").items():
        print(f"{name:<12} {count['files']:>4} files {count['lines']:>6} lines")
    for name, value in found.items():
        print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
