"""Reading a run's log files, ``metrics.jsonl`` and ``run_status.json``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_sp.utils.errors import DataError
from megatron_sp.utils.files import open_own, open_readable

_OF_EVALUATION = tuple(f'{{"kind": "{kind}"'.encode() for kind in ("start", "valid", "test"))
_MOST_STATUS_BYTES = 1 << 24


def read_records(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read a run's records, each with ``kind`` and ``step``, and notes about skipped lines. Raises DataError."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    records, notes, bad = [], [], []
    names: dict[str, str] = {}  # one string for each name, however many records have it
    try:
        with open_readable(file) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                record = _parse(line)
                if record is not None:
                    records.append({names.setdefault(name, name): value for name, value in record.items()})
                elif line.endswith(b"\n"):
                    bad.append(number)
                else:
                    notes.append(f"{file}: the last line is cut off (a process died while writing it) and is left out")
    except OSError as error:
        hint = " (give a run's folder; it gets this file with the first logged step)"
        hint = hint if path.is_dir() or not path.exists() else ""
        raise DataError(f"{file} cannot be read: {error.strerror}{hint}") from None
    if bad:
        notes.append(f"{file}: {len(bad)} lines are not records and are left out, the first is line {bad[0]}")
    return records, notes


def evaluated(run_dir: Path, step: int) -> list[str]:
    """Return those of ``valid`` and ``test`` that the run has a record of at this step."""
    names = set[str]()
    try:
        with open_own(run_dir / "metrics.jsonl", os.O_RDONLY) as file:
            for line in file:
                if not line.startswith(_OF_EVALUATION):  # most lines are of other kinds
                    continue
                record = _parse(line)
                if record is not None and record["kind"] == "start" and record["step"] < step:
                    names.clear()  # what came before a resume from an earlier step belongs to an abandoned history
                elif record is not None and record["kind"] != "start" and record["step"] == step:
                    names.add(record["kind"])
    except OSError:  # missing, or a link
        return []
    return sorted(names)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the parsed ``run_status.json``; {} if it is missing or unreadable."""
    try:
        with open_own(run_dir / "run_status.json", os.O_RDONLY) as file:
            record = json.loads(file.read(_MOST_STATUS_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def saved_step(run_dir: Path) -> int | None:
    """Return the step of the run's last checkpoint; None if unknown."""
    saved = read_status(run_dir).get("saved_step")
    return saved if type(saved) is int and saved >= 0 else None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    step = record.get("step")
    return record if type(step) is int and abs(step) < 2**53 else None  # a larger one is not exact as a float
