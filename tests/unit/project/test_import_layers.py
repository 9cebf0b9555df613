"""Which module may import which, read from the sources; a finding names the line."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
from support.paths import ROOT

PACKAGE = ROOT / "megatron_sp"
LEVELS = {
    folder: level
    for level, folders in enumerate((
        "utils", "config", "comm", "ops data", "parallel optim checkpoint", "models", "inference convert schedule estimate", "training",
        "tasks", "planner report", "commands",
    ))
    for folder in folders.split()
}  # fmt: skip
TORCH_FREE = {
    f"{folder}/{name}"
    for folder, names in {
        "checkpoint": "commit file_records find foreign lock manifest verify",
        "commands": "ckpt/__init__ ckpt/contents ckpt/folders cli data evaluate fill_mask finetune generate plot preprocess"
        " pretrain schedule/__init__ schedule/train serve summarize tokenizer",
        "config": "fields flags/arguments presets rules rules_data rules_model schema schema_model schema_parallel",
        "convert": "arguments",
        "estimate": "flops rough suggestions",
        "models": "unit_order",
        "optim": "residency",
        "planner": "advice command dry_run hardware layouts machine options picture report search",
        "utils": "errors format",
    }.items()
    for name in names.split()
}  # fmt: skip
OPTIONAL = {
    "amp_C", "apex", "flash_attn", "fused_layer_norm_cuda", "matplotlib", "pyarrow", "starlette", "tensorboard", "torch.utils.tensorboard",
    "transformers", "triton", "uvicorn", "wandb", "zstandard",
}  # fmt: skip
CORE = {"torch", "numpy", "einops", "sentencepiece", "tokenizers", "safetensors", "rich", "yaml", "megatron_sp"}
MAY_NAME_DISTRIBUTED = {"comm": "torch.distributed", "checkpoint": "torch.distributed.checkpoint"}
TRITON = tuple(
    f"ops/kernels/{name}.py" for name in ("activations", "biases", "cross_entropy", "dropout", "grouped", "norms", "rotary", "squares")
)
"""Kernels: they import Triton when they are loaded, so they are imported where one is needed, in a function."""
MAY_NAME_OPTIONAL = ("ops/availability.py", "commands/plot.py", "data/text_input.py")


parsed = cache(ast.parse)


def statements(node: ast.AST, for_types: bool = True) -> Iterator[ast.AST]:
    """All statements below a node, in functions and classes too; those for type checkers only if asked for."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, name, ()):
            if for_types or not (isinstance(inner, ast.If) and "TYPE_CHECKING" in ast.unparse(inner.test)):
                yield inner
                yield from statements(inner, for_types)


def imports(nodes: Iterable[ast.AST], module: str) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that statements import; ``from a import b`` counts as ``a.b``."""
    found: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def findings(path: str, source: str) -> list[str]:
    """What is wrong with one module, whose path is relative to the package, such as ``ops/attention.py``."""
    module = "megatron_sp." + path.removesuffix(".py").replace("/", ".")
    folder, tree = path.split("/")[0], parsed(source)
    level, bad = LEVELS.get(folder, len(LEVELS)), []  # what stands beside the folders may import all of them
    imported, at_the_top = imports(statements(tree), module), imports(tree.body, module)
    for line, name in imported:
        where = f"{path}:{line}"
        parts = name.split(".")
        if parts[0] == "megatron_sp" and len(parts) > 1 and parts[1] in LEVELS and parts[1] != folder:
            other = LEVELS[parts[1]]
            if other >= level:
                bad.append(f"{where}: {folder} (level {level}) imports {parts[1]} (level {other})")
        if path not in (*MAY_NAME_OPTIONAL, *TRITON) and any(is_in(name, package) for package in OPTIONAL):
            bad.append(f"{where}: {name} is optional: only {', '.join(MAY_NAME_OPTIONAL)} try to import such packages")
    if re.search(r"torch\s*\.\s*distributed", source) and folder != "comm":
        for node in ast.walk(tree):  # expressions, too
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                imported += [(node.lineno, "torch.distributed")] if (node.value.id, node.attr) == ("torch", "distributed") else []
    for line, name in imported:
        allowed = MAY_NAME_DISTRIBUTED.get(folder)
        if is_in(name, "torch.distributed") and not (allowed and is_in(name, allowed)):
            bad.append(f"{path}:{line}: {name}: only comm/ talks to torch.distributed, checkpoint/ to its checkpoint package")
    kernels = ["megatron_sp." + path.removesuffix(".py").replace("/", ".") for path in TRITON]
    bad += [f"{path}:{line}: {name} loads Triton; import it in a function" for line, name in at_the_top if name in kernels]
    if path.removesuffix(".py") in TORCH_FREE:
        first = [name.split(".")[0] for _, name in at_the_top]
        bad += [f"{path}: loads {name}; it must not" for name in first if name in ("torch", "numpy")]
    return bad


@cache
def modules() -> dict[str, str]:
    """Path and text of every module."""
    return {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_folder_has_a_level() -> None:
    assert {path.split("/")[0] for path in modules()} == {*LEVELS, "__init__.py", "__main__.py"}


def test_the_design_note_has_the_same_levels() -> None:
    level, noted = -1, {}
    for line in (ROOT / "docs/design/001-frame.md").read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| (?:L(\d+))? ?\| `(\w+)/` \|", line):
            level = int(row[1]) if row[1] else level
            noted[row[2]] = level
    assert noted == LEVELS


def test_the_package_keeps_its_layers() -> None:
    assert [finding for path, text in modules().items() for finding in findings(path, text)] == []


def circles(sources: dict[str, str]) -> list[str]:
    """Modules (by dotted name) that import each other, directly or through others, and whatever lies between two circles."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        named = [name for _, name in imports(statements(parsed(source), for_types=False), module)]
        graph[module] = {name if name in sources else name.rpartition(".")[0] for name in named} & sources.keys() - {module}
    while graph:
        imported = set().union(*graph.values())
        free = {module for module, names in graph.items() if not names or module not in imported}
        if not free:
            break
        graph = {module: names - free for module, names in graph.items() if module not in free}
    return sorted(graph)


def test_no_modules_import_each_other() -> None:
    sources = {"megatron_sp." + path.removesuffix(".py").replace("/", "."): text for path, text in modules().items()}
    assert circles({name.removesuffix(".__init__"): text for name, text in sources.items()}) == []


def test_a_circle_is_found() -> None:
    sources = {
        "megatron_sp.a": "def f():\n    from megatron_sp.b import x",
        "megatron_sp.b": "import megatron_sp.c",
        "megatron_sp.c": "if x:\n    from megatron_sp.a import f\nfrom megatron_sp.d import y",
        "megatron_sp.d": "if TYPE_CHECKING:\n    from megatron_sp.c import z",
        "megatron_sp.e": "from megatron_sp import a",
    }
    assert circles(sources) == ["megatron_sp.a", "megatron_sp.b", "megatron_sp.c"]


def test_nothing_but_the_named_packages_is_imported() -> None:
    known = CORE | OPTIONAL | set(sys.stdlib_module_names)
    imported = {(path, name.split(".")[0]) for path, text in modules().items() for _, name in imports(statements(parsed(text)), "x.y")}
    assert {(path, name) for path, name in imported if name not in known} == set()


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("ops/a.py", "from megatron_sp.data import corpus", "ops/a.py:1: ops (level 3) imports data (level 3)"),
        ("utils/a.py", "def f():\n    import megatron_sp.ops.gelu", "utils/a.py:2: utils (level 0) imports ops (level 3)"),
        ("config/schema.py", "from megatron_sp.training import loop", "config/schema.py:1: config (level 1) imports training"),
        ("models/a.py", "from ..training.loop import x", "models/a.py:1: models (level 5) imports training (level 7)"),
        ("parallel/a.py", "from megatron_sp import optim", "parallel/a.py:1: parallel (level 4) imports optim (level 4)"),
        ("training/a.py", "import torch.distributed as dist", "training/a.py:1: torch.distributed"),
        ("training/a.py", "from torch import distributed", "training/a.py:1: torch.distributed"),
        ("ops/a.py", "import torch\n\ntorch.distributed.barrier()", "ops/a.py:3: torch.distributed: only comm/"),
        ("checkpoint/a.py", "import torch.distributed", "checkpoint/a.py:1: torch.distributed"),
        ("ops/a.py", "try:\n    import flash_attn\nexcept ImportError:\n    pass", "ops/a.py:2: flash_attn is optional"),
        ("training/a.py", "from torch.utils.tensorboard import SummaryWriter", "training/a.py:1: torch.utils.tensorboard"),
        ("config/schema.py", "import numpy as np", "config/schema.py: loads numpy"),
    ],
)
def test_a_breach_is_named(path: str, source: str, expected: str) -> None:
    assert findings(path, source)[0].startswith(expected)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("comm/a.py", "import torch.distributed as dist\nfrom megatron_sp.utils import errors"),
        ("checkpoint/a.py", "import torch.distributed.checkpoint as dcp"),
        ("training/a.py", "from megatron_sp.models.gpt import GPTModel\nfrom megatron_sp import __version__"),
        ("ops/availability.py", "import flash_attn"),
        ("commands/cli.py", "def f():\n    import torch"),
        ("ops/a.py", "from . import availability"),
    ],
)
def test_what_is_allowed(path: str, source: str) -> None:
    assert findings(path, source) == []
