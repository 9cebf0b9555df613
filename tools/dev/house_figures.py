"""Figures about the shape of the code: files, lines, functions, signatures and docstrings of each folder, and import circles.

    python tools/dev/house_figures.py [--json | --docstrings]

``--json`` prints the same figures for programs. ``--docstrings`` lists the docstrings whose first line does not stand
alone: it continues a name ("Of the MLP.") instead of being a sentence or a noun phrase.

How things are counted: a function's lines are those from ``def`` to its last one, without decorators; a nested function
counts on its own and as a part of the outer one. A signature's parameters are those with a name of their own, without
self, cls, *args and **kwargs. A circle is a group of modules that import each other when they run, be it inside of a
function; imports under ``if TYPE_CHECKING`` do not count, nor does a module's implicit import of the packages that it
lies in.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_sp"
CONTINUES = re.compile(r"(Of|What|Whether|Where|That|Which|Who|With|From|By|Before|Behind|Around|After|So that|Is|Has|Does|Can) ")
LONG_LINE, MANY_PARAMETERS = 120, 8
Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # where a statement holds others


class Counts:
    """Counts of a folder, or of the whole package."""

    def __init__(self) -> None:
        self.files: list[int] = []  # lines of each
        self.functions: list[int] = []  # lines of each
        self.parameters: list[int] = []  # of each function
        self.long_lines = self.docstrings = self.not_alone = 0

    def add(self, text: str, tree: ast.AST) -> None:
        """Count a file."""
        lines = text.splitlines()
        self.files.append(len(lines))
        self.long_lines += sum(len(line) > LONG_LINE for line in lines)
        for node in statements(tree):
            if isinstance(node, Function):
                self.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
                self.parameters.append(parameters(node))
        for _, first in docstrings(tree):
            self.docstrings += 1
            self.not_alone += not stands_alone(first)

    def to_json(self) -> dict[str, Any]:
        return {
            "files": len(self.files), "lines": sum(self.files), "lines_of_a_file": spread(self.files),
            "functions": len(self.functions), "lines_of_a_function": spread(self.functions), "parameters": spread(self.parameters),
            "wide_signatures": sum(n > MANY_PARAMETERS for n in self.parameters), "long_lines": self.long_lines,
            "docstrings": self.docstrings, "not_alone": self.not_alone,
        }  # fmt: skip


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a module and all statements in it, without looking into expressions, which are most of a tree."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        inner = [n for block in _BLOCKS for n in getattr(node, block, ())]
        waiting += [n for n in inner if isinstance(n, ast.AST)]


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, first line) of each docstring of a module."""
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text.splitlines()[0]


def stands_alone(first_line: str) -> bool:
    """Return True if a docstring's first line can be read without the name above it."""
    return CONTINUES.match(first_line) is None


class Documented:
    """Search for public names without a docstring in a package.

    Three kinds need none: a method that a base class in the package documents; one of a Protocol that documents it, in
    a class that has all members of this Protocol; and a rule of the dry run (its argument is a ``Step``), which bears
    the name of torch's function.
    """

    def __init__(self, package: Path) -> None:
        self.package = package
        self.trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
        nodes = [node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self.classes: dict[str, list[ast.ClassDef]] = defaultdict(list)
        for node in nodes:
            self.classes[node.name].append(node)
        self._known: dict[ast.ClassDef, set[str]] = {}
        self.protocols = [(node, self._members(node)) for node in nodes if "Protocol" in map(ast.unparse, node.bases)]

    def missing(self) -> list[tuple[str, int, str]]:
        """(file, line, name) of each public module, class, function and method without one."""
        found = []
        for path, tree in self.trees.items():
            where = path.relative_to(self.package.parent).as_posix()
            found += [(where, 1, "the module")] if ast.get_docstring(tree) is None else []
            found += [(where, line, name) for line, name in self._search(tree.body, None, "")]
        return found

    def _search(self, body: list[ast.stmt], owner: ast.ClassDef | None, prefix: str) -> Iterator[tuple[int, str]]:
        for node in body:
            if not isinstance(node, (ast.ClassDef, *FUNCTION)) or node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None and not (isinstance(node, FUNCTION) and self._needs_none(node, owner)):
                yield node.lineno, prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from self._search(node.body, node, f"{prefix}{node.name}.")

    def _needs_none(self, function: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None) -> bool:
        first = function.args.args[:1]
        if first and first[0].annotation and ast.unparse(first[0].annotation) == "Step":
            return True
        if any(ast.unparse(decorator).endswith(".setter") for decorator in function.decorator_list):
            return True
        if owner is None:
            return False
        members = self._members(owner)
        promised = [*self._bases(owner), *(protocol for protocol, wanted in self.protocols if wanted <= members)]
        return any(
            isinstance(node, FUNCTION) and node.name == function.name and ast.get_docstring(node) for base in promised for node in base.body
        )

    def _bases(self, owner: ast.ClassDef) -> Iterator[ast.ClassDef]:
        for base in owner.bases:
            for found in self.classes.get(ast.unparse(base).split("[")[0].rpartition(".")[2], ()):
                if found.name != owner.name:
                    yield found
                    yield from self._bases(found)

    def _members(self, owner: ast.ClassDef) -> set[str]:
        """Public names of a class: functions, fields, and what methods set on ``self``."""
        if owner in self._known:
            return self._known[owner]
        found = set()
        for part in (owner, *self._bases(owner)):
            for node in ast.walk(part):
                if isinstance(node, FUNCTION):
                    found.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
        self._known[owner] = {name for name in found if not name.startswith("_")}
        return self._known[owner]


def parameters(function: Function) -> int:
    """Return the number of parameters of a signature, without self and cls."""
    given = function.args
    names = [a.arg for a in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def spread(values: Sequence[int]) -> dict[str, int] | None:
    """Return the median, the 90th percentile and the largest; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {"p50": int(statistics.median(ordered)), "p90": ordered[int(0.9 * (len(ordered) - 1))], "max": ordered[-1]}


# --------------------------------------------------------------------------------------------------------- circles


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected groups of more than one module (Tarjan's algorithm), sorted.

    Args:
        graph: module -> the modules that it imports, all of them keys.
    """
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
    return sorted(found)


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the modules that a tree imports when it runs; of ``from a import b`` both ``a`` and ``a.b``, as b may be either.

    Args:
        package: the package that relative imports start from.
    """
    unseen = {inner for node in statements(tree) if _for_types(node) for child in node.body for inner in statements(child)}  # type: ignore[attr-defined]
    for node in statements(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"


def import_graph(trees: dict[str, ast.AST], packages: set[str]) -> dict[str, set[str]]:
    """Return which module imports which of the others.

    Args:
        trees: module -> its tree.
        packages: those of them that are folders.
    """
    graph = {}
    for name, tree in trees.items():
        package = name if name in packages else name.rpartition(".")[0]
        named = set(imports(tree, package))
        # "from a import b" with a module a.b runs a first, as any import of a.b does: only b is named
        parents = {module.rpartition(".")[0] for module in named if module in trees}
        graph[name] = {module for module in named if module in trees and module not in parents} - {name}
    return graph


# --------------------------------------------------------------------------------------------------------- figures


def figures(package: Path = PACKAGE) -> dict[str, Any]:
    """Return all figures of a package, and the length of the README beside it."""
    folders: dict[str, Counts] = {}
    trees: dict[str, ast.AST] = {}
    packages, whole = set[str](), Counts()
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        trees[name] = tree
        if path.name == "__init__.py":
            packages.add(name)
        for counts in (folders.setdefault(path.relative_to(package).parts[0] if path.parent != package else ".", Counts()), whole):
            counts.add(text, tree)
    readme = package.parent / "README.md"
    return {
        "folders": {name: counts.to_json() for name, counts in folders.items()}, "all": whole.to_json(),
        "circles": circles(import_graph(trees, packages)),
        "readme_lines": len(readme.read_text(encoding="utf-8").splitlines()) if readme.exists() else 0,
    }  # fmt: skip


def show(found: dict[str, Any]) -> str:
    """Return the figures as one table, and two lines about the whole."""

    def cells(name: str, counts: dict[str, Any]) -> list[str]:
        spreads = ("lines_of_a_file", "lines_of_a_function", "parameters")
        files, functions, signature = (" / ".join(map(str, counts[key].values())) if counts[key] else "-" for key in spreads)
        return [
            name, f"{counts['files']:,}", f"{counts['lines']:,}", files, f"{counts['functions']:,}", functions, signature,
            *(f"{counts[key]:,}" for key in ("wide_signatures", "long_lines", "docstrings", "not_alone")),
        ]  # fmt: skip

    head = [
        "folder", "files", "lines", "lines of a file", "functions", "lines of a function", "parameters", f"beyond {MANY_PARAMETERS}",
        f"lines beyond {LONG_LINE}", "docstrings", "not alone",
    ]  # fmt: skip
    rows = [cells(name, counts) for name, counts in [*found["folders"].items(), ("all", found["all"])]]
    under = ["p50 / p90 / max" if title.startswith(("lines of", "parameters")) else "" for title in head]
    table = [head, under, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(row[1:], widths[1:], strict=True))]) for row in table]
    groups = "; ".join(", ".join(group) for group in found["circles"]) or "none"
    return "\n".join([*lines, f"import circles: {groups}", f"README: {found['readme_lines']:,} lines"])


def list_docstrings(package: Path) -> Iterator[str]:
    """Yield the place and first line of each docstring that does not stand alone."""
    for path in sorted(package.rglob("*.py")):
        for line, first in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            if not stands_alone(first):
                yield f"{path.relative_to(package.parent)}:{line}: {first}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--docstrings", action="store_true", help="list docstrings that do not stand alone")
    parser.add_argument("--package", type=Path, default=PACKAGE, metavar="FOLDER", help="default: megatron_sp")
    options = parser.parse_args(argv)
    package = options.package.resolve()
    if options.docstrings:
        for line in list_docstrings(package):
            print(line)
        return 0
    found = figures(package)
    print(json.dumps(found, indent=1) if options.json else show(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
