"""Reader of all files in a run folder: missing ones are omitted, damaged ones with a note."""

from __future__ import annotations

import contextlib
import difflib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_sp.config.schema import Config
from megatron_sp.report.run_history import History, Record, number, repetitions, replay
from megatron_sp.report.time_use import Attempt, attempts
from megatron_sp.utils.errors import ConfigError, DataError
from megatron_sp.utils.files import open_readable
from megatron_sp.utils.run_log import read_records

LARGEST_FILE_BYTES = 64 * 2**20  # of a JSON file beside the records


@dataclass
class RunFiles:
    """Contents of a run folder."""

    name: str  # short name for legends
    folder: Path
    records: list[Record] = field(default_factory=list)  # of metrics.jsonl, in the order of writing
    history: History = field(default_factory=lambda: History(""))  # without records that a resume has undone
    status: Record = field(default_factory=dict)  # run_status.json
    state: Record = field(default_factory=dict)  # state.json of the newest checkpoint
    # LOCK, the job that writes to the folder, with ``heartbeat``: the time of its last sign of life
    lock: Record = field(default_factory=dict)
    overlap: Record = field(default_factory=dict)  # {"step_seconds", "rows"} of overlap-trace.json
    bad_steps: dict[int, Record] = field(default_factory=dict)  # step -> nonfinite-step-N.json
    notes: list[str] = field(default_factory=list)  # notes on what was omitted

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    @cached_property
    def attempts(self) -> list[Attempt]:
        return attempts(self.records)

    @cached_property
    def train(self) -> list[Record]:
        return list(self.history.train.values())

    @cached_property
    def repeated(self) -> dict[int, list[Record]]:
        return repetitions(self.records)

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """Configuration of the last start, else of the newest checkpoint, else empty."""
        return next((c for start in reversed(self.of_kind("start")) if (c := config_of(start))), config_of(self.state))

    @property
    def environment(self) -> Record:
        """Environment of the last start that recorded it, else versions and layout of the newest checkpoint."""
        for start in reversed(self.of_kind("start")):
            if isinstance(start.get("environment"), dict):
                return start["environment"]  # type: ignore[no-any-return]
        return {key: self.state[key] for key in ("versions", "layout") if isinstance(self.state.get(key), dict)}


def read_run(path: Path) -> RunFiles:
    """Read a run's folder. Raises DataError: the folder does not exist."""
    if path.exists() and not path.is_dir():
        raise DataError(f"{path} is a file: give the folder of a run (it holds metrics.jsonl and run_status.json)")
    if not path.is_dir():
        parent, way_out = path.absolute().parent, "give the folder of a run (what --save named)"
        try:
            names = sorted(p.name for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))
        except OSError:
            raise DataError(f"{path}: no such folder, nor {parent}: {way_out}") from None
        near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or names[:6]
        there = f"; {parent} holds {', '.join(near)}" if near else ""
        raise DataError(f"{path}: no such folder: {way_out}{there}")
    run = RunFiles(path.resolve().name or str(path), path)
    if (path / "metrics.jsonl").exists():
        run.records, run.notes = read_records(path)
    run.history.name = run.name
    replay(run.history, run.records)
    run.status, run.lock = (_json(path / name, run.notes) for name in ("run_status.json", "LOCK"))
    trace = _json(path / "overlap-trace.json", run.notes).get("otherData")
    if run.lock:
        with contextlib.suppress(OSError):  # it may just have been given back
            run.lock["heartbeat"] = (path / "LOCK").stat().st_mtime
    if isinstance(trace, dict) and isinstance(trace.get("rows"), list):
        rows = [row for row in trace["rows"] if isinstance(row, dict) and isinstance(row.get("axis"), str)]
        run.overlap = {"step_seconds": number(trace.get("step_seconds")), "rows": rows} if rows else {}
    states = [p for p in (path / "checkpoints").glob("step-*/state.json") if p.parent.name[5:].isdigit()]
    if states:
        run.state = _json(max(states, key=lambda p: int(p.parent.name[5:])), run.notes)
    for file in sorted(path.glob("nonfinite-step-*.json")):
        record = _json(file, run.notes)
        if type(record.get("step")) is int:
            run.bad_steps[record["step"]] = record
    return run


def _json(path: Path, notes: list[str]) -> Record:
    # the JSON object in a file; {} if there is none, with a note if the file cannot be used
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise ValueError(f"larger than {LARGEST_FILE_BYTES} bytes")
        with open_readable(path) as file:
            record = json.loads(file.read(LARGEST_FILE_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path} cannot be used ({error}) and is left out")
        return {}
    return record if isinstance(record, dict) else {}


def config_of(record: Record) -> dict[str, dict[str, Any]]:
    """Return the configuration in a start record or a checkpoint's state; empty if it cannot be used."""
    try:
        return Config.from_dict(record["config"])[0].to_dict() if "config" in record else {}
    except ConfigError:
        return {}
