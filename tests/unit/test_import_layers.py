"""Which module may import which, read from the sources; a finding names the line."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_sp"
LEVELS = {
    "__init__": 0, "config": 0, "config_rules": 0, "config_rules_data": 0, "config_rules_model": 0, "config_concessions": 0, "presets": 0,
    "utils": 0, "comm": 1, "ops": 1, "data": 1, "parallel": 2, "optim": 2,
    "checkpoint": 2, "models": 3, "schedule": 4, "convert": 4, "training": 5, "cli": 5, "doctor": 5,
}  # fmt: skip
TORCH_FREE = (
    "config",
    "config_rules",
    "config_rules_data",
    "config_rules_model",
    "config_concessions",
    "presets",
    "cli",
    "utils/errors",
    "utils/field_kinds",
    "convert/arguments",
    "training/arguments",
    "training/config_file",
    "training/flops",
    "training/hardware",
    "training/memory",
    "training/memory_saves",
    "training/memory_zero",
    "training/traffic",
    "training/remedies",
    "training/dry_run",
    "training/console",
    "training/preset_table",
    "training/recipe",
    "training/recipe_run",
    "training/recipe_variables",
    "training/planner/advice",
    "training/planner/command",
    "training/planner/layouts",
    "training/planner/machine",
    "training/planner/options",
    "training/planner/picture",
    "training/planner/report",
    "training/planner/search",
    "training/planner/timing",
    "training/planner/work",
    "training/ckpt/diff",
    "training/ckpt/facts",
    "training/ckpt/ls",
    "training/ckpt/names",
    "training/ckpt/options",
    "training/ckpt/places",
    "training/ckpt/prune",
    "training/ckpt/show",
    "training/ckpt/survey",
    "training/ckpt/text",
    "training/ckpt/verify",
    "training/schedule_tool/options",
    "checkpoint/commit",
    "checkpoint/file_records",
    "checkpoint/find",
    "checkpoint/lock",
    "checkpoint/manifest",
    "checkpoint/verify",
    "models/unit_order",
    "optim/residency",
)
OPTIONAL = {
    "flash_attn",
    "apex",
    "triton",
    "tensorboard",
    "wandb",
    "matplotlib",
    "transformers",
    "torch.utils.tensorboard",
    "starlette",
    "uvicorn",
}
CORE = {"torch", "numpy", "einops", "sentencepiece", "tokenizers", "safetensors", "tyro", "rich", "yaml", "megatron_sp"}
MAY_NAME_DISTRIBUTED = {"comm": "torch.distributed", "checkpoint": "torch.distributed.checkpoint"}
MAY_NAME_OPTIONAL = ("ops/availability.py",)


def imports(tree: ast.AST, module: str) -> list[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere in a module; ``from a import b`` counts as ``a.b``."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def top_imports(tree: ast.Module) -> list[str]:
    """First names imported when the module is loaded, TYPE_CHECKING blocks and functions left out."""
    return [n.split(".")[0] for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) for _, n in imports(node, "")]


def attributes(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted text) of every ``torch.distributed...`` expression."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("torch", "distributed"):
            found.append((node.lineno, "torch.distributed"))
    return found


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def findings(path: str, source: str) -> list[str]:
    """What is wrong with one module.

    Args:
        path: relative to the package, such as ``ops/attention.py``.
    """
    tree = ast.parse(source)
    module = "megatron_sp." + path.removesuffix(".py").replace("/", ".")
    folder = path.split("/")[0].removesuffix(".py")
    level, bad = LEVELS[folder], []
    for line, name in imports(tree, module):
        where = f"{path}:{line}"
        parts = name.split(".")
        if parts[0] == "megatron_sp" and len(parts) > 1 and parts[1] in LEVELS and parts[1] != "__init__":
            other = LEVELS[parts[1]]
            if parts[1] != folder and (other > level or (other == level and level not in (0, 5))):
                bad.append(f"{where}: {folder} (level {level}) imports {parts[1]} (level {other})")
        if path not in MAY_NAME_OPTIONAL and any(is_in(name, package) for package in OPTIONAL):
            bad.append(f"{where}: {name} is optional; ops/availability.py is the only place that tries to import it")
    for line, name in [*imports(tree, module), *attributes(tree)]:
        allowed = MAY_NAME_DISTRIBUTED.get(folder)
        if is_in(name, "torch.distributed") and not (allowed and is_in(name, allowed)):
            bad.append(f"{path}:{line}: {name}: only comm/ talks to torch.distributed, checkpoint/ to its checkpoint package")
    if path.removesuffix(".py") in TORCH_FREE:
        bad += [f"{path}: loads {name}; it must not" for name in top_imports(tree) if name in ("torch", "numpy")]
    return bad


def modules() -> list[str]:
    return sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py"))


def test_every_folder_has_a_level() -> None:
    assert {path.split("/")[0].removesuffix(".py") for path in modules()} <= set(LEVELS)


def test_the_package_keeps_its_layers() -> None:
    assert [finding for path in modules() for finding in findings(path, (PACKAGE / path).read_text())] == []


def test_nothing_but_the_named_packages_is_imported() -> None:
    import sys

    known = CORE | OPTIONAL | set(sys.stdlib_module_names)
    strange = [
        f"{p}:{n}: {name}"
        for p in modules()
        for n, name in imports(ast.parse((PACKAGE / p).read_text()), "x.y")
        if name.split(".")[0] not in known
    ]
    assert strange == []


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("ops/a.py", "from megatron_sp.comm import groups", "ops/a.py:1: ops (level 1) imports comm (level 1)"),
        ("utils/a.py", "def f():\n    import megatron_sp.ops.gelu", "utils/a.py:2: utils (level 0) imports ops (level 1)"),
        ("config.py", "from megatron_sp.training import loop", "config.py:1: config (level 0) imports training"),
        ("models/a.py", "from ..training.loop import x", "models/a.py:1: models (level 3) imports training (level 5)"),
        ("parallel/a.py", "from megatron_sp import optim", "parallel/a.py:1: parallel (level 2) imports optim (level 2)"),
        ("training/a.py", "import torch.distributed as dist", "training/a.py:1: torch.distributed"),
        ("training/a.py", "from torch import distributed", "training/a.py:1: torch.distributed"),
        ("ops/a.py", "import torch\n\ntorch.distributed.barrier()", "ops/a.py:3: torch.distributed: only comm/"),
        ("checkpoint/a.py", "import torch.distributed", "checkpoint/a.py:1: torch.distributed"),
        ("ops/a.py", "try:\n    import flash_attn\nexcept ImportError:\n    pass", "ops/a.py:2: flash_attn is optional"),
        ("training/a.py", "from torch.utils.tensorboard import SummaryWriter", "training/a.py:1: torch.utils.tensorboard"),
        ("config.py", "import numpy as np", "config.py: loads numpy"),
    ],
)
def test_a_breach_is_named(path: str, source: str, expected: str) -> None:
    assert findings(path, source) and findings(path, source)[0].startswith(expected)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("comm/a.py", "import torch.distributed as dist\nfrom megatron_sp.utils import errors"),
        ("checkpoint/a.py", "import torch.distributed.checkpoint as dcp"),
        ("training/a.py", "from megatron_sp.models.gpt import GPTModel\nfrom megatron_sp import __version__"),
        ("ops/availability.py", "import flash_attn"),
        ("cli.py", "def f():\n    import torch"),
        ("ops/a.py", "from . import availability"),
    ],
)
def test_what_is_allowed(path: str, source: str) -> None:
    assert findings(path, source) == []
