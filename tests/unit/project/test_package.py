"""The package as others meet it: importing it is quiet and light, its version and requirements are what setup.py says."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.paths import ROOT

import megatron_sp

_BLOCKED_IMPORT = """
import sys
before_env = dict(__import__("os").environ)
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise AssertionError("import of " + name)
sys.meta_path.insert(0, Blocker())
import {module}
assert dict(__import__("os").environ) == before_env, "the environment was changed"
"""
THIRD_PARTY = ("einops", "sentencepiece", "safetensors", "rich", "yaml", "matplotlib", "tensorboard", "wandb", "transformers", "flash_attn")


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("megatron_sp", ("torch", "numpy", *THIRD_PARTY)),
        ("megatron_sp.config.schema", ("torch", "numpy", *THIRD_PARTY)),
        ("megatron_sp.commands.cli", ("torch", "numpy", *THIRD_PARTY)),
        ("megatron_sp.config.flags.arguments", ("torch", "numpy", "rich", "einops")),
        ("megatron_sp.training", ("torch", "numpy", *THIRD_PARTY)),
        ("megatron_sp.ops.availability", ("torch", "numpy", *THIRD_PARTY)),
    ],
)
def test_importing_is_quiet_and_light(module: str, blocked: tuple[str, ...]) -> None:
    done = run(_BLOCKED_IMPORT.format(module=module, blocked=blocked))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr


def test_the_blocker_blocks() -> None:
    assert "AssertionError: import of numpy" in run(_BLOCKED_IMPORT.format(module="numpy", blocked=("numpy",))).stderr


def setup_arguments() -> dict[str, object]:
    """What setup.py passes to setuptools, with nothing imported from the package."""
    program = (
        "import json, runpy, sys, setuptools\n"
        "setuptools.setup = lambda **k: print(json.dumps(k))\n"
        f"runpy.run_path({str(ROOT / 'setup.py')!r})\n"
        "assert not any(name.startswith('megatron_sp') for name in sys.modules)"
    )
    import json

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_setup_py() -> None:
    pytest.importorskip("setuptools")
    arguments = setup_arguments()
    assert arguments["version"] == megatron_sp.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", megatron_sp.__version__)
    packages = arguments["packages"]
    assert isinstance(packages, list) and all(p == "megatron_sp" or p.startswith("megatron_sp.") for p in packages)
    folders = {str(p.parent.relative_to(ROOT)).replace("/", ".") for p in (ROOT / "megatron_sp").rglob("*.py")}
    assert folders <= set(packages)  # a folder without __init__.py would not be installed
    data = {f"{name.replace('.', '/')}/{file}" for name, files in arguments["package_data"].items() for file in files}  # type: ignore[attr-defined]
    there = {p.relative_to(ROOT) for p in (ROOT / "megatron_sp").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    there = {p for p in there if ".ruff_cache" not in p.parts}
    assert {str(p) for p in there} == data  # one that is not named would not be installed
    assert set(arguments["extras_require"]) == {"hf", "eval", "serve", "data", "log", "plot", "dev", "docs", "bench", "flash"}  # type: ignore[call-overload]
    assert arguments["entry_points"] == {"console_scripts": ["megatron-sp = megatron_sp.commands.cli:program"]}
    assert not any("apex" in str(value) for value in arguments.values())


def test_license() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
