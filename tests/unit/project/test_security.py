"""What must not be in the tree: ways to run code from a file somebody else wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.paths import ROOT, project_files

# The (?:...) and [.] keep this file from finding itself.
FORBIDDEN = {
    "pickles": r"\b(import|from)\s+(c|cloud|_)?(?:pickle)\b|\b(c|cloud)?(?:pickle)\.(load|dump|Unpick|Pick)|allow_(?:pickle)\s*=\s*True",
    "unsafe torch files": r"weights_only\s*=\s*(?:False)|\btorch\.(load|save)\s*\(|serialization\.(?:load)\s*\((?!.*weights_only=True\))",
    "yaml with objects": r"yaml\.(unsafe_|full_)?(?:load)(_all)?\s*\(|yaml\.(Unsafe|Full)?Loader\b",
    "code from text": r"(?<![\w.])(?:eval)\s*\(|(?<![\w.])(?:exec)\s*\(",
    "remote code": r"trust_remote_code\s*=\s*(?:True)",
    "object collectives": r"\b(all_gather|broadcast|gather|scatter|send|recv)_(?:object)(_list)?\b",
    "shells": r"shell\s*=\s*(?:True)|os\.(?:system)\s*\(",
}


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    return {path: path.read_text() for path in project_files("*.py", "*.sh")}


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_the_tree_has_no(rule: str, sources: dict[Path, str]) -> None:
    pattern = re.compile(FORBIDDEN[rule])
    hits = [
        f"{p.relative_to(ROOT)}:{n}: {line.strip()}"
        for p, text in sources.items()
        if pattern.search(text)
        for n, line in enumerate(text.splitlines(), 1)
        if pattern.search(line) and not line.endswith("# ours, from the repository")
    ]
    assert hits == []


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("pickles", "import " + "pickle"),
        ("pickles", "from _" + "pickle import loads"),
        ("unsafe torch files", "serialization." + "load(path)"),
        ("pickles", "np.load(f, allow_" + "pickle=True)"),
        ("unsafe torch files", "torch." + "load(path)"),
        ("unsafe torch files", "load(weights_only = " + "False)"),
        ("yaml with objects", "yaml." + "load(text)"),
        ("yaml with objects", "yaml.compose(t, Loader=yaml." + "UnsafeLoader)"),
        ("code from text", "x = ev" + "al(text)"),
        ("remote code", "trust_remote_code=" + "True"),
        ("object collectives", "dist.all_gather_" + "object(a, b)"),
        ("shells", "run(x, shell=" + "True)"),
    ],
)
def test_the_patterns_find_what_they_are_for(rule: str, line: str) -> None:
    assert re.search(FORBIDDEN[rule], line)


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "yaml.safe_load(t)",
        "yaml.compose(t, Loader=yaml.SafeLoader)",
        "def evaluate(",
        "safetensors.load(x)",
        "from a import pickle_files",
    ],
)
def test_the_patterns_leave_the_rest_alone(line: str) -> None:
    assert not any(re.search(pattern, line) for pattern in FORBIDDEN.values())
