"""The steps of a documentation page: its files are written and its commands run in order, in one folder, and what they print is compared.

Of the fenced blocks of a page, ``python`` with ``title="name.py"`` is written to that file; ``bash`` is run, and stops
at the first command that fails; ``text`` after a bash block are lines that it prints, in this order, in which "..."
stands for anything. Others, such as ``sh``, are for the reader only.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.waiting import PATIENCE_S

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', flags=re.DOTALL | re.MULTILINE)


@dataclass
class Step:
    """A file to be written (``title``), or commands to be run.

    Attributes:
        expected: lines of their output; None: the page shows none.
    """

    text: str
    title: str = ""
    expected: list[str] | None = None


def steps_of(page: Path) -> list[Step]:
    """Read a page.

    Raises:
        ValueError: output of which the page does not say what printed it.
    """
    steps: list[Step] = []
    runs = False
    for kind, title, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "text":
            if not runs:
                raise ValueError(f"{page.name}: no commands before this output:\n{text}")
            steps[-1].expected = text.splitlines()
        elif kind == "bash" or title:
            steps.append(Step(text, title))
        runs = kind == "bash" and not title
    return steps


def run_page(page: Path, folder: Path, variables: dict[str, str]) -> list[str]:
    """Take all steps of a page in ``folder``.

    Returns:
        The output of each bash block.
    Raises:
        AssertionError: a command failed, or did not print what the page says.
    """
    outputs = []
    for step in steps_of(page):
        if step.title:
            (folder / step.title).write_text(step.text)
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step.text], cwd=folder, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=2 * PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{page.name}: exit code {done.returncode}\n{step.text}\n{done.stdout[-4000:]}"
        missing = first_missing(step.expected or [], done.stdout)
        assert missing is None, f"{page.name}: not printed: {missing}\n{step.text}\n{done.stdout[-4000:]}"
        outputs.append(done.stdout)
    return outputs


def first_missing(expected: list[str], output: str) -> str | None:
    """Return the first of the expected lines that is not in the output after the one before it; None if all are.

    There may be others between them, which a page shows by a line "...".
    """
    rest = iter(output.splitlines())
    for line in (line for line in expected if line.strip() != "..."):
        pattern = re.compile(".*".join(re.escape(part) for part in line.strip().split("...")))
        if not any(pattern.fullmatch(printed.strip()) for printed in rest):
            return line
    return None
