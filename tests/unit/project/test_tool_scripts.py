"""The scripts in tools/ without the package installed: one line that says what to do, no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

from megatron_sp.commands.cli import PROGRAMS

SCRIPTS = sorted(path.name for path in (ROOT / "tools").glob("*.py") if path.name != "door.py")
COMMANDS = {*PROGRAMS, "convert", "data corpus", "data section-task"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_without_the_package_says_how_to_get_it(script: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-S", str(ROOT / "tools" / script), "--help"]  # -S: a Python in which nothing is installed
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd="/")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    said = re.fullmatch(
        r"error: the package megatron_sp is not installed in .*: run `pip install -e \.` in (.*),"
        r" or `python -m megatron_sp ([a-z -]+) \.\.\.` there\n",
        done.stderr,
    )
    assert said is not None and said[1] == str(ROOT) and said[2] in COMMANDS
    assert f"the same as ``megatron-sp {said[2]}``" in (ROOT / "tools" / script).read_text()


def test_every_script_is_here() -> None:
    assert len(SCRIPTS) == 13


@pytest.mark.parametrize("script", ["convert_checkpoint.py", "make_corpus.py"])
def test_a_script_with_the_package_is_its_command(script: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / script), "--help"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0 and done.stdout.startswith("usage: ") and done.stderr == ""


def test_a_broken_installation_keeps_its_traceback(tmp_path: Path) -> None:
    """A module that is missing inside the package is another fault, which the line would hide."""
    (tmp_path / "megatron_sp" / "commands").mkdir(parents=True)
    (tmp_path / "megatron_sp" / "commands" / "generate.py").write_text("import no_such_module\n")
    words = [sys.executable, "-S", str(ROOT / "tools" / "generate.py")]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and "No module named 'no_such_module'" in done.stderr and "Traceback" in done.stderr
