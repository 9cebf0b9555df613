"""report.json: the state of a first light. Written atomically after every part, so that a call goes on where the last one stopped."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from first_light.records import Record, record_of
from megatron_sp.utils.errors import ConfigError, DiskError
from megatron_sp.utils.files import atomic_replace, open_own

FORMAT = 1
NAME, PAGE, LOGS = "report.json", "report.html", "logs"
_MOST_BYTES = 64 * 2**20
Status = Literal["done", "failed", "stopped"]


@dataclass
class PartResult:
    """How a part went.

    Attributes:
        status: done; failed: it raised, ended or took too long; stopped: by the budget or a signal, so it is to be repeated.
        message: why it is not done.
        seconds: it took.
        revision: of the checkout that measured it.
        records: what it has measured.
    """

    status: Status
    message: str = ""
    seconds: float = 0.0
    revision: str = ""
    records: list[Record] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        """True if not all is well."""
        if (
            self.status == "stopped"
        ):  # what the end has cut short is repeated; a wrong result is none of the end's doing
            return any(record.verdict == "wrong" for record in self.records)
        return self.status == "failed" or any(record.is_bad for record in self.records)

    def as_json(self) -> dict[str, Any]:
        """Return it for the file."""
        return {"status": self.status, "message": self.message, "seconds": round(self.seconds, 3), "revision": self.revision,
                "records": [record.as_json() for record in self.records]}  # fmt: skip


@dataclass
class Report:
    """A first light so far.

    Attributes:
        machine: what it ran on: ``device``, ``gpu`` and versions, as text. A report is about one machine.
        calls: of the program: ``date``, ``command``, ``minutes``.
        parts: results by name.
    """

    machine: dict[str, str]
    calls: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[str, PartResult] = field(default_factory=dict)

    def is_finished(self, part: str, again: bool) -> bool:
        """True if a part need not be run; ``again``: what has failed is to be repeated."""
        result = self.parts.get(part)
        return result is not None and result.status != "stopped" and not (again and result.is_bad)

    @property
    def is_bad(self) -> bool:
        """True if any part is."""
        return any(result.is_bad for result in self.parts.values())

    def write(self, folder: Path) -> None:
        """Replace report.json.

        Raises:
            DiskError: it cannot be written; the old one is as it was.
        """
        value = {"first_light": FORMAT, "machine": self.machine, "calls": self.calls,
                 "parts": {name: result.as_json() for name, result in self.parts.items()}}  # fmt: skip
        write_file(folder / NAME, json.dumps(value, indent=1) + "\n")


def write_file(path: Path, text: str) -> None:
    """Replace a file of this program atomically. Raises DiskError if that fails."""
    try:
        atomic_replace(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}; choose another --out") from None


def read_report(path: Path) -> Report:
    """Read a report.json, which may be anybody's.

    Raises:
        ConfigError: it is missing, damaged, or of another version of this program.
    """
    try:
        with open_own(path, os.O_RDONLY) as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; choose another --out") from None
    try:
        value = json.loads(data) if len(data) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or "first_light" not in value:
        raise ConfigError(f"{path} is no report of first light, or damaged: choose another --out, or remove the folder")
    if value["first_light"] != FORMAT:
        raise ConfigError(
            f"{path} was written by another version of first light (its format is {str(value['first_light'])[:20]}, this one's {FORMAT}):"
            " choose another --out"
        )
    try:
        return _report_of(value)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{path} is damaged: choose another --out, or remove the folder") from None


def _report_of(value: dict[str, Any]) -> Report:
    machine = {str(name): str(words) for name, words in value["machine"].items()}
    calls = [
        {"date": str(c["date"]), "command": str(c["command"]), "minutes": float(c["minutes"])} for c in value["calls"]
    ]
    parts = {}
    for name, part in value["parts"].items():
        if part["status"] not in ("done", "failed", "stopped"):
            raise ValueError(part["status"])
        records = [record_of(record) for record in part["records"]]
        parts[name] = PartResult(
            part["status"], str(part["message"]), float(part["seconds"]), str(part["revision"]), records
        )
    return Report(machine, calls, parts)


def open_report(folder: Path, machine: dict[str, str]) -> Report:
    """Return the report of a folder, which is made if need be.

    Raises:
        ConfigError: the folder has other contents, or a report of another machine or version.
        DiskError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = set(os.listdir(folder))
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be used: {error.strerror}; give a folder of its own") from None
    for name in [name for name in names if name.startswith((f".{NAME}.", f".{PAGE}.")) and name.endswith(".tmp")]:
        names.discard(name)  # a write that was killed
        (folder / name).unlink(missing_ok=True)
    if NAME not in names:
        if names:
            raise ConfigError(
                f"--out {folder} is a folder of something else ({min(names)[:60]} is in it): give one of its own"
            )
        return Report(machine)
    report = read_report(folder / NAME)
    for name, here in machine.items():
        there = report.machine.get(name, "")
        if there != here:
            raise ConfigError(
                f"--out {folder} is about another machine ({name} {there or 'unknown'}, here {here}): choose another --out"
            )
    return report
