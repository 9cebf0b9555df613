"""What the benchmarks share: medians, a description of the machine, tables and JSON files.

Every figure is a median with its minimum and maximum, and every result file names hardware, versions and the command,
so that a number can be measured again. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Stats:
    """Repeated measurements of one quantity."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Stats:
        """Raises ValueError without any value."""
        kept = tuple(float(v) for v in values)
        if not kept:
            raise ValueError("no measurement to summarise")
        return cls(kept)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def text(self, unit: str, scale: float = 1.0, digits: int = 3) -> str:
        """``median (low-high) unit``; values are multiplied by ``scale``."""
        median, low, high = (f"{v * scale:.{digits}f}" for v in (self.median, self.low, self.high))
        return f"{median} ({low}-{high}) {unit}".rstrip()

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "min": self.low, "max": self.high}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Stats:
    """Quotients of neighbouring measurements: what slows the machine for a while slows both sides of a quotient.

    Raises:
        ValueError: the two do not have the same length.
    """
    return Stats.of(a / b for a, b in zip(numerators, denominators, strict=True))


def hardware() -> dict[str, Any]:
    """CPU, memory and system of this machine; what cannot be found out is left out."""
    found: dict[str, Any] = {"system": platform.platform(), "cpus": len(os.sched_getaffinity(0))}
    model = _field_of("/proc/cpuinfo", "model name")
    memory = _field_of("/proc/meminfo", "MemTotal")
    if model:
        found["cpu"] = model
    if memory:
        found["memory_gib"] = round(int(memory.split()[0]) / 2**20, 1)
    return found


def load_average() -> float:
    """Processes that wanted to run during the last minute: more than a little means that others disturb the figures."""
    return os.getloadavg()[0]


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far (VmHWM)."""
    return _status_bytes("VmHWM")


def memory_bytes() -> int:
    """Resident memory of this process now (VmRSS)."""
    return _status_bytes("VmRSS")


def reset_peak_memory() -> bool:
    """Make ``peak_memory_bytes`` start from now; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def git_revision() -> str:
    """The commit of this checkout, with ``+`` if files differ from it; empty outside git."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip()


def child_environment(threads: int, extra: Iterable[str] = ()) -> dict[str, str]:
    """The environment of a measured process: this repository importable, ``threads`` threads, ``extra`` as KEY=VALUE.

    Raises:
        ValueError: an entry of ``extra`` is not KEY=VALUE.
    """
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    for entry in extra:
        key, equals, value = entry.partition("=")
        if not key or not equals:
            raise ValueError(f"'{entry}' is not KEY=VALUE")
        environment[key] = value
    return environment


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> None:
    """A table on the terminal: by rich where it is installed, else plain columns."""
    rows = [list(row) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain_table(title, header, rows)
    else:
        table = Table(title=title, title_justify="left")
        for index, name in enumerate(header):
            table.add_column(name, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 150).print(table)
    for note in notes:
        print(note)


def trained(ranks: int, flags: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Train a GPT once with the real program and launcher, and return the records of its metrics.jsonl; CalledProcessError if it fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(REPOSITORY / "pretrain_gpt.py"), *flags, "--save", str(folder)]
    subprocess.run(command, check=True, env=child_environment(1), stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_json(path: str | None, benchmark: str, results: dict[str, Any], versions: dict[str, str]) -> None:
    """Write results with everything that is needed to measure them again; nothing without a path."""
    if path is None:
        return
    record = {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "revision": git_revision(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **versions},
        "results": results,
    }
    from megatron_sp.utils.files import write_output  # a worker under another interpreter has no need of it

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_output(path, compact_json(record) + "\n")
    print(f"written to {path}")


def compact_json(value: Any, width: int = 120, indent: str = "") -> str:
    """JSON whose objects and lists take one line each where they fit in ``width``.

    Floats have five digits, and three or more repeated measurements become their median and range: a file of results
    is for readers, and the command in it measures again.
    """
    if isinstance(value, float):
        return json.dumps(float(f"{value:.5g}"))
    if isinstance(value, (list, tuple)) and len(value) > 2 and all(isinstance(entry, float) for entry in value):
        return compact_json(Stats.of(value).as_dict(), width, indent)
    if not isinstance(value, (dict, list, tuple)) or not value:
        return json.dumps(value)
    inner = indent + "  "
    if isinstance(value, dict):
        ends, parts = (
            "{}",
            [f"{json.dumps(name)}: {compact_json(entry, width, inner)}" for name, entry in value.items()],
        )
    else:
        ends, parts = "[]", [compact_json(entry, width, inner) for entry in value]
    line = ends[0] + ", ".join(parts) + ends[1]
    if len(indent) + len(line) <= width and "\n" not in line:
        return line
    return f"{ends[0]}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{ends[1]}"


def timed(fn: Callable[[], Any], clock: Callable[[], float]) -> tuple[float, Any]:
    """Seconds that a call takes, and what it returns."""
    start = clock()
    result = fn()
    return clock() - start, result


def _print_plain_table(title: str, header: Sequence[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [list(header), *rows]) for i in range(len(header))]
    print(title)
    for row in [list(header), *rows]:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join([first.strip().ljust(widths[0]), *others]))


def _field_of(path: str, name: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.partition(":")[0].strip() == name), "")
    except OSError:
        return ""


def _status_bytes(name: str) -> int:
    return int((_field_of("/proc/self/status", name) or "0").split()[0]) * 1024
