"""Run a Python script in a forked child: what this process has imported, torch above all, it need not import again."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch


def run_script(script: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The exit code and what was written, as ``subprocess.run([sys.executable, script, *arguments])`` gives them."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        pid = os.fork()
        if pid == 0:
            _child(script, arguments, cwd, stdout.fileno(), stderr.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = [_all_of(file) for file in (stdout, stderr)]
    return subprocess.CompletedProcess([str(script), *arguments], code, *texts)


def _all_of(file: tempfile._TemporaryFileWrapper[str]) -> str:
    file.seek(0)
    return file.read()


def _child(script: Path, arguments: tuple[str, ...], cwd: Path, stdout: int, stderr: int) -> None:
    code = 1
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        os.chdir(cwd)
        torch.set_num_threads(1)  # OpenMP with more threads hangs after a fork
        sys.argv = [str(script), *arguments]
        sys.path[0] = str(script.parent)
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
