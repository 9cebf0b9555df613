"""Figures about the size and shape of the code, beside the bars that they are held to.

    python tools/dev/house_figures.py [--json]

The first table has a row for each folder of the package, the second one the whole house and what a plain run imports. A
function's lines are those from ``def`` to its last one, without decorators; a nested function counts on its own and as a
part of the outer one. Lines of code are those that are neither blank nor a comment nor part of a docstring. What a run
imports is measured by running one: two steps of a tiny GPT on one process.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_sp"
CONTINUES = re.compile(
    r"(Of|What|Whether|Where|That|Which|Who|With|From|By|Before|Behind|Around|After|So that|Is|Has|Does|Can) "
)
LONG_LINE, SMALL_FILE, LARGE_FILE = 120, 20, 700
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
PLAIN_RUN = (
    "pretrain_gpt.py", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32",
    "--max-position-embeddings", "32", "--vocab-size", "100", "--mock-data", "--micro-batch-size", "1", "--global-batch-size", "1",
    "--train-iters", "2", "--lr", "1e-3", "--device", "cpu",
)  # fmt: skip


def count(paths: Sequence[Path]) -> Counter[str]:
    """Count files, lines, functions, docstrings and comments of Python files."""
    counts = Counter[str]()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines, tree = text.splitlines(), ast.parse(text)
        texts = [string for _, string in docstrings(tree)]
        comments = [
            token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
        ]
        blank = sum(not line.strip() for line in lines)
        blank_in_texts = sum(not line.strip() for string in texts for line in string.value.splitlines()[:-1])
        of_texts = sum((string.end_lineno or 0) - string.lineno + 1 for string in texts) - blank_in_texts
        counts += Counter(
            files=1, lines=len(lines), code=len(lines) - blank - of_texts - sum(not c.line[: c.start[1]].strip() for c in comments),
            functions=sum(isinstance(node, FUNCTION) for node in ast.walk(tree)), words=sum(len(s.value.split()) for s in texts),
            comments=len(comments), long_lines=sum(len(line) > LONG_LINE for line in lines),
            small_files=len(lines) <= SMALL_FILE and path.name != "__init__.py", large_files=len(lines) >= LARGE_FILE,
        )  # fmt: skip
    return counts


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.Constant]]:
    """Yield (module, class or function; its docstring)."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and node.body and isinstance(node.body[0], ast.Expr):
            constant = node.body[0].value
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                yield node, constant


def stands_alone(docstring: str) -> bool:
    """Return False if a docstring's first line continues the name above it ("Of the MLP.")."""
    return CONTINUES.match(docstring.lstrip()) is None


def undocumented(package: Path) -> list[str]:
    """List modules without a docstring, and functions and classes without one that another folder imports, as "file:line: name"."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    importers = defaultdict[str, set[Path]](set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    importers[f"{node.module}.{alias.name}"].add(path.parent)
    missing = []
    for path, tree in trees.items():
        file = path.relative_to(package.parent)
        missing += [] if ast.get_docstring(tree) else [f"{file}:1: the module"]
        module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        missing += [
            f"{file}:{node.lineno}: {node.name}"
            for node in tree.body
            if isinstance(node, (ast.ClassDef, *FUNCTION))
            and not ast.get_docstring(node)
            and importers[f"{module}.{node.name}"] - {path.parent}
        ]
    return missing


def imported(words: Sequence[str] = PLAIN_RUN) -> dict[str, int]:
    """Return the modules of the package that a program imports when it runs, each with its number of lines.

    Args:
        words: the program, relative to the repository, and its arguments; it also gets ``--save`` with a folder that is removed.
    Raises:
        RuntimeError: the program failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *words, "--save", folder], cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    if done.returncode:
        errors = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
        raise RuntimeError(f"{' '.join(words)} failed with exit code {done.returncode}:\n{errors[-2000:]}")
    modules = {}
    for name in re.findall(rf"\| +({PACKAGE.name}(?:\.\w+)*)$", done.stderr, re.MULTILINE):
        path = ROOT.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        modules[name] = len(file.read_text(encoding="utf-8").splitlines())
    return modules


# --------------------------------------------------------------------------------------------------------- tables


def folders(package: Path) -> dict[str, Counter[str]]:
    """Return the counts of each folder of a package; "." are the files beside them."""
    paths = defaultdict[str, list[Path]](list)
    for path in sorted(package.rglob("*.py")):
        paths["." if path.parent == package else path.relative_to(package).parts[0]].append(path)
    return {name: count(some) for name, some in paths.items()}


def bars(root: Path = ROOT) -> dict[str, tuple[float, str]]:
    """Return (figure, its bar) of the whole house, by name."""
    package, tests = count(sorted((root / PACKAGE.name).rglob("*.py"))), count(sorted((root / "tests").rglob("*.py")))
    modules = imported()
    return {
        "package: lines": (package["lines"], "<= 58,000"),
        "package: files": (package["files"], "<= 350"),
        f"package: files of <= {SMALL_FILE} lines": (package["small_files"], "0"),
        f"package: files of >= {LARGE_FILE} lines": (package["large_files"], "0"),
        "package: functions per 1,000 lines": (per(package, "functions", "lines", 1000), "<= 45"),
        "package: docstring words per 100 lines of code": (per(package, "words", "code", 100), "<= 100"),
        "package: comments per 100 lines": (per(package, "comments", "lines", 100), ">= 5"),
        f"package: lines longer than {LONG_LINE}": (package["long_lines"], "0"),
        "tests: lines": (tests["lines"], "<= 55,000"),
        "a plain pretrain_gpt.py imports: lines": (sum(modules.values()), "<= 25,000"),
        "a plain pretrain_gpt.py imports: files": (len(modules), "<= 130"),
        "README: lines": (len((root / "README.md").read_text(encoding="utf-8").splitlines()), "<= 110"),
        "documentation: words": (
            sum(len(path.read_text(encoding="utf-8").split()) for path in (root / "docs").rglob("*.md")),
            "-",
        ),
    }


def per(counts: Counter[str], name: str, of: str, unit: int) -> float:
    """Return how many of one thing there are for ``unit`` of another, with one decimal."""
    return round(unit * counts[name] / max(counts[of], 1), 1)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))] for row in rows
    )
    return "\n".join(map("  ".join, lines))


def folder_table(by_folder: dict[str, Counter[str]]) -> str:
    """Return the table of the folders, and of all of them."""
    head = ("folder", "files", "lines", "functions/1,000", "doc words/100", "comments/100", f"> {LONG_LINE}")
    rows = [
        (name, f"{counts['files']:,}", f"{counts['lines']:,}", f"{per(counts, 'functions', 'lines', 1000)}",
         f"{per(counts, 'words', 'code', 100)}", f"{per(counts, 'comments', 'lines', 100)}", f"{counts['long_lines']:,}")
        for name, counts in [*by_folder.items(), ("all", sum(by_folder.values(), Counter[str]()))]
    ]  # fmt: skip
    return table([head, *rows])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    by_folder, whole = folders(PACKAGE), bars()
    if options.json:
        print(
            json.dumps({"folders": by_folder, "bars": {name: figure for name, (figure, _) in whole.items()}}, indent=1)
        )
        return 0
    print(folder_table(by_folder), end="\n\n")
    print(table([("figure", "now", "bar"), *((name, f"{figure:,}", bar) for name, (figure, bar) in whole.items())]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
