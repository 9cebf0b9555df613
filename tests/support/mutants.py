"""Break the parallel code on purpose, one operation at a time, and see that some test turns red: ``make mutants``.

Operators over the syntax tree make the mutants: one drops a wait, a sum, a scale, a permutation or a condition, or swaps
two axes, in a copy of the repository, where the suite's tests then run until the first failure. A mutant is named by its
function, its operator and its place among those of the function, so that a change of the code needs no change here. A
mutant that survives means that a test is missing, or that it computes the same: then it is in ``EQUIVALENT``.

    python tests/support/mutants.py SUITE [--sample 40] [--seed 0] [--only linear] [--jobs 1] [--list]
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600
GRID = "tests/dist/test_equality_grid.py"


class Suite(NamedTuple):
    """Files of the package, and the tests that have to find whatever breaks in them, the quick ones first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


SUITES = {  # files; tests
    "layers": Suite(
        ("comm/collectives.py", "parallel/linear.py", "parallel/lm_head.py", "parallel/tensor_parallel.py",
         "parallel/ulysses.py", "parallel/attention_core.py", "parallel/attention_block.py",
         "parallel/split_projection.py", "parallel/chunked_mlp.py", "parallel/heads.py", "parallel/parallel_context.py",
         "models/attention.py", "models/mlp.py", "models/transformer.py", "ops/main_grad.py"),
        ("tests/unit/parallel/test_heads.py", "tests/unit/parallel/test_linear.py",
         "tests/unit/parallel/test_chunked_mlp.py", "tests/unit/parallel/test_context_cut.py",
         "tests/unit/comm/test_shard_spec.py", "tests/dist/test_collectives.py", "tests/dist/test_exchange.py",
         *(f"{GRID}::{test}" for test in ("test_tensor_parallel", "test_ulysses",
         "test_mlp_in_chunks"))),
    ),
    "zero": Suite(
        ("optim/flat.py", "optim/gradients.py", "optim/weights.py", "optim/residency.py", "optim/optimizer.py"),
        ("tests/unit/optim", "tests/dist/test_zero.py", f"{GRID}::test_zero", "tests/dist/test_fake_run.py"),
    ),
    "bert": Suite(
        ("models/bert.py", "models/language_model.py"),
        ("tests/unit/models/test_bert.py", f"{GRID}::test_bert",
         "tests/integration/test_hugging_face.py"),
    ),
    "context": Suite(
        ("ops/attention_pieces.py", "ops/partial_attention.py", "ops/tiled_attention.py",
         "ops/gpu_partial_attention.py", "parallel/context_parallel.py", "parallel/context_plan.py"),
        ("tests/unit/ops/test_partial_attention.py", "tests/unit/ops/test_gpu_partial_attention.py",
         "tests/unit/parallel/test_context_cut.py", "tests/dist/test_context_parallel.py",
         "tests/dist/test_context_gather.py", f"{GRID}::test_context_parallel"),
    ),
    "pipelines": Suite(
        ("parallel/pipeline.py", "parallel/pipeline_stages.py", "parallel/sequence_slices.py", "training/pipelined.py",
         "training/step.py"),
        ("tests/unit/training/test_step.py", "tests/unit/parallel/test_sequence_slices.py",
         "tests/unit/parallel/test_pipeline_stages.py", f"{GRID}::test_pipelines",
         f"{GRID}::test_delayed_weight_gradients", "tests/dist/test_delayed_weights.py",
         "tests/dist/test_pipeline_random_orders.py", "tests/dist/test_train_layouts.py"),
    ),
    "experts": Suite(
        ("models/experts.py", "ops/expert_mlp.py", "ops/routing.py", "parallel/expert_exchange.py",
         "parallel/experts.py", "parallel/router_pass.py"),
        ("tests/unit/ops/test_routing.py", "tests/unit/parallel/test_experts.py",
         "tests/unit/models/test_model_experts.py", "tests/unit/ops/test_expert_mlp.py", f"{GRID}::test_experts",
         "tests/dist/test_train_layouts.py"),
    ),
    "kernels": Suite(
        ("ops/kernels/activations.py", "ops/kernels/biases.py", "ops/kernels/cross_entropy.py",
         "ops/kernels/dropout.py", "ops/kernels/grouped.py", "ops/kernels/norms.py", "ops/kernels/rotary.py",
         "ops/norm.py"),
        ("tests/kernels/test_interpreted.py", "tests/unit/ops/test_norm.py", "tests/unit/ops/test_dropout.py"),
    ),
}  # fmt: skip

# (place, operator, expression): why the mutant computes the same
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("models/attention.py::FusedHeads._norm_all_heads", "sum", "first_key + key"):
        "a tp rank that shares its first key has no other: either tp divides the keys, or they divide tp",
}  # fmt: skip


class Mutant(NamedTuple):
    """One edit: the characters from ``start`` to ``stop`` of a file's source become ``new``."""

    file: str
    function: str
    operator: str
    number: int
    start: int
    stop: int
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.file}::{self.function} {self.operator} {self.number}: {' '.join(self.old.split())[:80]}"


# methods whose result is left unchanged by dropping them, with the operator that drops them
DROPPED = {
    "wait": "wait", "add_": "sum", "index_add_": "sum", "addmm_": "sum", "sum": "sum",
    "mul_": "scale", "div_": "scale", "mul": "scale", "div": "scale", "exp": "scale", "exp_": "scale",
    "transpose": "permutation", "permute": "permutation", "movedim": "permutation", "flip": "permutation", "index_select": "permutation",
    "zero_": "zero", "fill_": "zero", "copy_": "copy", "masked_fill": "mask", "masked_fill_": "mask",
}  # fmt: skip
CALLS = {"all_reduce": "sum", "reversed": "permutation", "sorted": "permutation"}
AXES = ("view", "reshape", "flatten", "new_empty", "unsqueeze", "transpose")


def edits(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (operator, the node that is replaced, new source) of one node of the tree."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = _called(node.value)
        if operator := DROPPED.get(name) or CALLS.get(name):
            yield operator, node, "pass"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, receiver = node.func.attr, ast.unparse(node.func.value)
        if name == "wait":
            yield "wait", node, f"{receiver}._result"  # what lies there before it has arrived
        elif name in DROPPED:
            yield DROPPED[name], node, receiver
        if name in AXES and len(node.args) > 1 and (first := ast.unparse(node.args[0])) != (second := ast.unparse(node.args[1])):
            rest = ", ".join([second, first, *map(ast.unparse, node.args[2:]), *map(ast.unparse, node.keywords)])
            if name != "transpose":  # whose axes may come in either order
                yield "axes", node, f"{receiver}.{name}({rest})"
    elif isinstance(node, ast.Call) and _called(node) in CALLS and node.args:
        yield CALLS[_called(node)], node, f"({ast.unparse(node.args[0])})"
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        operator = "sum" if isinstance(node.op, (ast.Add, ast.Sub)) else "scale"
        yield operator, node, f"{ast.unparse(node.target)} = {ast.unparse(node.value)}" if operator == "sum" else "pass"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv)):
        operator = "sum" if isinstance(node.op, (ast.Add, ast.Sub)) else "scale"
        yield operator, node, f"({ast.unparse(node.left)})"
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            rest = [ast.unparse(other) for other in node.values if other is not value]
            yield "condition", node, "(" + (" and " if isinstance(node.op, ast.And) else " or ").join(rest) + ")"
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""


def mutants_of(file: str, conditions: bool = False) -> list[Mutant]:
    """Every mutant of a file of the package, outside of messages, annotations and asserts; on request those of conditions, too."""
    source = (ROOT / "megatron_sp" / file).read_text(encoding="utf-8")
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    data, found = source.encode(), []
    counts: dict[tuple[str, str], int] = {}

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for statement in node.body:
                visit(statement, f"{function}.{node.name}" if function else node.name)
            return
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                visit(node.value, function)
            return
        if isinstance(node, ast.If) and all(isinstance(each, ast.Raise) for each in node.body):
            return  # a check of an argument
        if function:
            for operator, place, new in edits(node):
                if not conditions and operator == "condition":
                    continue
                start, stop = (
                    starts[line - 1] + column
                    for line, column in ((place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset))
                )
                number = counts[function, operator] = counts.get((function, operator), 0) + 1
                old = data[start:stop].decode()
                found.append(Mutant(file, function, operator, number, start, stop, old, new))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            node = node.value  # dropped as a statement
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


def copy_repository(to: Path) -> Path:
    for name in ("megatron_sp", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.toml"):
        shutil.copy(path, to)
    return to


def run_tests(root: Path, tests: tuple[str, ...]) -> str:
    """Return the first test that fails in the copy; empty if none does.

    Raises:
        SystemExit: no test has run.
    """
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"(over {LIMIT_S} s)"
    if done.returncode not in (0, 1, 2):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return "" if done.returncode == 0 else first.group(1).removeprefix("tests/") if first else "?"


def survives(mutant: Mutant, copies: Queue[Path], tests: tuple[str, ...]) -> bool:
    root, began = copies.get(), time.monotonic()
    path = root / "megatron_sp" / mutant.file
    source = path.read_bytes()
    try:
        path.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.stop :])
        red = run_tests(root, tests)
    finally:
        path.write_bytes(source)
        copies.put(root)
    print(f"{'killed' if red else 'SURVIVED'} {time.monotonic() - began:4.0f} s  {mutant.name}  {red}", flush=True)
    return not red


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the parallel code on purpose and see that tests notice.")
    parser.add_argument("suite", choices=sorted(SUITES), help="what is broken")
    parser.add_argument("--sample", type=int, help="number of mutants, drawn from the seed; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--conditions", action="store_true", help="turn conditions round, too")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    args = parser.parse_args()
    suite = SUITES[args.suite]
    chosen = [m for file in suite.files for m in mutants_of(file, args.conditions) if args.only in m.name]
    chosen = [m for m in chosen if (f"{m.file}::{m.function}", m.operator, " ".join(m.old.split())) not in EQUIVALENT]
    if args.sample is not None and args.sample < len(chosen):
        chosen = random.Random(args.seed).sample(chosen, args.sample)
    if args.list:
        print("\n".join(f"{m.name}  ->  {m.new}" for m in chosen))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        copies: Queue[Path] = Queue()
        for job in range(args.jobs):
            copies.put(copy_repository(Path(scratch) / f"copy{job}"))
        if red := run_tests(copies.queue[0], suite.tests):  # would kill them all
            raise SystemExit(f"without a mutant {red} is red: nothing can be said about the mutants")
        with ThreadPoolExecutor(args.jobs) as pool:
            survivors = list(pool.map(lambda mutant: survives(mutant, copies, suite.tests), chosen))
    alive = [mutant.name for mutant, lives in zip(chosen, survivors, strict=True) if lives]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} killed", *alive, sep="\n    ")
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
