"""tests/gpu, by pytest in a process of its own; on a CPU it must collect nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

from common import REPOSITORY

from first_light.records import Context

_NOTHING_COLLECTED = 5


def run(context: Context) -> None:
    """Record each test that does not pass, and the number of those that do."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}", "tests/gpu",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL)
        if context.device == "cpu":
            good = done.returncode == _NOTHING_COLLECTED
            message = (
                "there is no GPU, and nothing was collected" if good else f"pytest ended with code {done.returncode}"
            )
            context.record("pytest", "tests/gpu", "ok" if good else "failed", message)
            return
        if not report.exists():
            context.record(
                "pytest", "tests/gpu", "failed", f"pytest ended with code {done.returncode}, without a report"
            )
            return
        tell(context, report)


def tell(context: Context, report: Path) -> None:
    """Record the results in pytest's report."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        skipped = next((child for child in case if child.tag == "skipped"), None)
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        if bad is not None:
            counts["failed"] += 1
            context.record("pytest", name, "failed", re.sub(r"\s+", " ", bad.get("message") or bad.text or "")[:400])
        elif skipped is not None:
            counts["skipped"] += 1
            context.record("pytest", name, "absent", skipped.get("message") or "")
        else:
            counts["passed"] += 1
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    context.record(
        "pytest", "tests/gpu", "ok" if counts["passed"] and not counts["failed"] else "failed", words, **counts
    )
