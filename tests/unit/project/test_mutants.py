"""The operators that break the code on purpose (``tests/support/mutants.py``); what they find takes hours: ``make mutants``."""

from __future__ import annotations

import ast

import pytest
from support import mutants
from support.paths import ROOT

CASES = [
    ("work.wait()", "wait", "pass"),
    ("y = handle.wait()", "wait", "handle._result"),
    ("grad.add_(late)", "sum", "pass"),
    ("y = grad.add_(late)", "sum", "grad"),
    ("y = a + b", "sum", "(a)"),
    ("y -= b", "sum", "y = b"),
    ("all_reduce(x, group)", "sum", "pass"),
    ("y = all_reduce(x, group)", "sum", "(x)"),
    ("y = x / count", "scale", "(x)"),
    ("x *= scale", "scale", "pass"),
    ("y = x.mul_(scale)", "scale", "x"),
    ("y = x.transpose(0, 1)", "permutation", "x"),
    ("y = [*reversed(parts)]", "permutation", "(parts)"),
    ("y = x.view(s, b, -1)", "axes", "x.view(b, s, -1)"),
    ("buffer.zero_()", "zero", "pass"),
    ("if fresh and not late:\n    pass", "condition", "(fresh)"),
    ("y = a if fresh else b", "condition", "(not (fresh))"),
]


@pytest.mark.parametrize(("line", "operator", "new"), CASES)
def test_operators(line: str, operator: str, new: str) -> None:
    found = [(name, text) for node in ast.walk(ast.parse(line)) for name, _, text in mutants.edits(node)]
    assert (operator, new) in found


def test_checks_and_messages_are_left_alone() -> None:
    mutated = [m for m in mutants.mutants_of("comm/collectives.py", conditions=True) if "was called twice" in m.old]
    assert mutated == []


def test_a_mutant_is_named_by_its_method() -> None:
    names = [m.name for m in mutants.mutants_of("parallel/ulysses.py")]
    assert any(name.startswith("parallel/ulysses.py::HeadsPass.") for name in names)
    assert not any(name.startswith("parallel/ulysses.py::HeadsPass ") for name in names)


@pytest.mark.parametrize("suite", mutants.SUITES)
def test_suites_fit_the_repository(suite: str) -> None:
    files, tests = mutants.SUITES[suite]
    for path, _, test in (node.partition("::") for node in tests):
        assert (ROOT / path).exists() and (not test or f"def {test}(" in (ROOT / path).read_text()), f"{path}::{test}"
    chosen = [m for file in files for m in mutants.mutants_of(file)]
    assert len({m.name for m in chosen}) == len(chosen) >= 20
    for mutant in chosen[::25]:
        source = (ROOT / "megatron_sp" / mutant.file).read_bytes()
        broken = source[: mutant.start] + mutant.new.encode() + source[mutant.stop :]
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source)), mutant.name


def test_equivalent_mutants_are_there() -> None:
    every = {
        (f"{m.file}::{m.function}", m.operator, " ".join(m.old.split()))
        for files, _ in mutants.SUITES.values()
        for file in files
        for m in mutants.mutants_of(file)
    }
    assert mutants.EQUIVALENT.keys() - every == set()
