"""scripts/setup_env.sh where no package needs to be installed: when it does nothing, and what it says when it cannot work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

TOOLS = ("bash", "dirname", "cksum", "tr", "date", "mkdir", "rm", "mktemp", "sed", "tail", "grep", "mv", "cat")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "a clone"  # paths have blanks
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", root)
    shutil.copy(ROOT / "scripts" / "setup_env.sh", root / "scripts")
    (root / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found
        (root / "bin" / tool).symlink_to(found)
    return root


def run(root: Path, *words: str, **env: str) -> tuple[int, str]:
    """Exit code and messages, with nothing on the PATH but a few tools and what the test puts there."""
    done = subprocess.run(
        ["bash", str(root / "scripts" / "setup_env.sh"), *words],
        capture_output=True, text=True, env={"PATH": str(root / "bin"), "HOME": str(root), **env}, cwd="/",
    )  # fmt: skip
    assert done.stdout == ""
    return done.returncode, done.stderr


def python(root: Path, body: str, name: str = "python3") -> None:
    (root / "bin" / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
    (root / "bin" / name).chmod(0o755)


def finished(root: Path, wanted: str = "runtime") -> Path:
    """An environment as a finished call leaves it, with empty packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / ".venv")], check=True)
    (site,) = (root / ".venv" / "lib").glob("python3*/site-packages")
    for name in ("torch", "numpy", "pip"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("")
    done = subprocess.run(["bash", "-c", "cksum < setup.py | tr ' ' '-'"], cwd=root, capture_output=True, text=True, check=True)
    key = done.stdout.strip()
    (root / ".venv" / ".megatron_sp_made").write_text("")
    (root / ".venv" / ".megatron_sp_ready").write_text(f"{wanted} {key} {root}\n")
    return root / ".venv"


def test_a_second_call_does_nothing_in_no_time(clone: Path) -> None:
    venv = finished(clone, "dev")
    before = sorted(os.listdir(venv))
    assert run(clone, "dev") == (0, "")
    assert run(clone, "runtime") == (0, "")  # dev has everything that runtime has
    assert run(clone) == (0, "")
    assert sorted(os.listdir(venv)) == before


def test_runtime_is_not_enough_for_dev(clone: Path) -> None:
    finished(clone, "runtime")
    assert run(clone)[0] == 0
    code, text = run(clone, "dev")  # goes on to install, and the packages here are empty
    assert code == 1 and "installing torch" in text
    assert not (clone / ".venv" / ".megatron_sp_ready").exists()


@pytest.mark.parametrize("damage", ["moved", "interrupted", "no python", "lost torch"])
def test_what_this_script_made_is_rebuilt(clone: Path, damage: str) -> None:
    venv = finished(clone)
    if damage == "moved":
        ready = venv / ".megatron_sp_ready"
        ready.write_text(ready.read_text().replace("a clone", "another place"))
    elif damage == "interrupted":
        (venv / ".megatron_sp_ready").unlink()
    elif damage == "no python":
        (venv / "bin" / "python").unlink()
    else:
        (torch,) = venv.glob("lib/*/site-packages/torch")
        shutil.rmtree(torch)
    code, text = run(clone)
    assert "rebuilding .venv: it was moved, broken or left half-built" in text
    assert code == 1 and "no Python 3.10 or later found" in text and not venv.exists()


def test_a_foreign_environment_is_never_deleted(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / "mine").write_text("keep")
    code, text = run(clone)
    assert code == 1 and "is kept as .venv.old-" in text
    (kept,) = clone.glob(".venv.old-*")
    assert (kept / "mine").read_text() == "keep"


def test_without_python(clone: Path) -> None:
    code, text = run(clone)
    assert code == 1
    assert "no Python 3.10 or later found (looked for python3, python3.12" in text and "PYTHON=/path/to/python" in text
    python(clone, "exit 1")  # as if too old
    assert "no Python 3.10 or later found" in run(clone)[1]
    assert "(looked for /nowhere)" in run(clone, PYTHON="/nowhere")[1]


def test_without_the_venv_module(clone: Path) -> None:
    python(
        clone,
        'if [ "$1" = -m ]; then echo "ensurepip is not available" >&2; exit 1; fi\n'
        'if [ "$1" = - ]; then exit 1; fi\n'  # no torch
        f'exec {sys.executable} "$@"',
    )
    code, text = run(clone, PYTHON=str(clone / "bin" / "python3"))
    assert code == 1 and "ensurepip is not available" in text and "apt install python3-venv" in text
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("installed_as", ["2.13.0", "2.13.0+cpu", None])
def test_the_torch_found_stays_as_it_is(clone: Path, installed_as: str | None) -> None:
    """PyPI's torch is installed as 2.13.0 and calls itself 2.13.0+cu130: pip must be given its own name for it."""
    venv = finished(clone)
    for name in ("made", "ready"):
        (venv / f".megatron_sp_{name}").unlink()  # an environment of the user, in which pip only notes what is asked of it
    (site,) = (venv / "lib").glob("python3*/site-packages")
    (site / "torch" / "__init__.py").write_text('__version__ = "2.13.0+cu130"\n')
    if installed_as:
        (site / "torch-2.13.0.dist-info").mkdir()
        (site / "torch-2.13.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {installed_as}\n")
    (site / "pip" / "__main__.py").write_text('import sys\nwith open("asked", "a") as f:\n    f.write(" ".join(sys.argv[1:]) + "\\n")\n')
    assert run(clone)[0] == 0
    assert (venv / "constraints.txt").read_text() == f"torch=={installed_as or '2.13.0+cu130'}\n"
    asked = [line.split() for line in (clone / "asked").read_text().splitlines() if line.startswith("install")]
    assert not [word for words in asked for word in words if word.startswith("torch")]
    # what builds the package is one that every torch accepts: 2.11 and 2.12 want less than 82, 2.13 at least 77.0.3
    assert [words[-1] for words in asked] == ["setuptools>=77.0.3,<82", ".[plot]"]
    assert all(words[words.index("-c") + 1] == ".venv/constraints.txt" for words in asked)


def test_an_unknown_word(clone: Path) -> None:
    assert run(clone, "everything") == (1, "setup_env: unknown argument 'everything': expected runtime or dev\n")


@pytest.mark.parametrize("script", ["scripts/setup_env.sh", "scripts/test.sh", ".ci/run"])
def test_the_scripts_are_sound_and_executable(script: str) -> None:
    path = ROOT / script
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    assert os.access(path, os.X_OK) and path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in path.read_text()
