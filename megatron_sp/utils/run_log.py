"""Reading what a run says of itself: ``metrics.jsonl``, written by several processes one after the other, and ``run_status.json``."""

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
    """All records of a run, in the order they were written.

    Args:
        path: a run folder, or the file itself.
    Returns:
        (records, each with ``kind`` and ``step``; sentences about lines that were left out, such as one that a dying process cut off).
    Raises:
        DataError: there is no such file.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        with open_readable(file) as opened:
            lines = opened.read().split(b"\n")
    except OSError as error:
        hint = " (give a run's folder; it gets this file with the first logged step)" if path.is_dir() or not path.exists() else ""
        raise DataError(f"{file} cannot be read: {error.strerror}{hint}") from None
    records, notes, bad = [], [], []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif index == len(lines) - 1:
            notes.append(f"{file}: the last line is cut off (a process died while writing it) and is left out")
        else:
            bad.append(index + 1)
    if bad:
        notes.append(f"{file}: {len(bad)} lines are no records and are left out, the first is line {bad[0]}")
    return records, notes


def evaluated(run_dir: Path, step: int) -> list[str]:
    """Which of ``valid`` and ``test`` the run's line of history has a record of at this step.

    What stands before a resume from an earlier step is of a history that was given up. A file that is not there, or is a link, has none.
    """
    found = set[str]()
    try:
        with open_own(run_dir / "metrics.jsonl", os.O_RDONLY) as file:
            for line in file:
                if not line.startswith(_OF_EVALUATION):  # the others are many
                    continue
                record = _parse(line)
                if record is not None and record["kind"] == "start" and record["step"] < step:
                    found.clear()
                elif record is not None and record["kind"] != "start" and record["step"] == step:
                    found.add(record["kind"])
    except OSError:
        return []
    return sorted(found)


def read_status(run_dir: Path) -> dict[str, Any]:
    """The parsed ``run_status.json`` ({} when there is none)."""
    try:
        with open_own(run_dir / "run_status.json", os.O_RDONLY) as file:
            record = json.loads(file.read(_MOST_STATUS_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def saved_step(run_dir: Path) -> int | None:
    """Of the last checkpoint that the run has written, as ``run_status.json`` says; None: it says nothing."""
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
    return record if type(step) is int and abs(step) < 2**53 else None  # beyond that it has no place on an axis
