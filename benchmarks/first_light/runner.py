"""Parts, one after the other: each in a process of its own, until all are done or the time is up.

The clock is an argument: with another one nothing here depends on the time of day.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from common import REPOSITORY, child_environment

from first_light.plan import Part
from first_light.processes import MARK, end, end_marked
from first_light.records import Record, record_of
from first_light.report import PartResult, Report
from megatron_sp.utils.files import atomic_replace

_BENCHMARKS = Path(__file__).resolve().parent.parent
_POLL_S, _LOG_BYTES = 0.1, 2**18
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Clock(Protocol):
    """Time, and waiting for a process."""

    def now(self) -> float:
        """Return seconds since some moment."""

    def wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Wait for a process for a moment; return its exit code, or None while it runs."""


class WallClock:
    """The clock of this machine."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, process: subprocess.Popen[bytes]) -> int | None:
        try:
            return process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            return None


@dataclass
class Machine:
    """What the parts run on.

    Attributes:
        device: cpu or cuda.
        num_gpus: GPUs of this machine.
        revision: of the checkout.
    """

    device: str
    num_gpus: int
    revision: str = ""


@dataclass
class Runner:
    """Runs the parts of a report that are not done.

    Attributes:
        report: is completed.
        keep: called after each part; writes the report.
        logs: folder that keeps the end of what a part has printed that did not go well; None: nothing is kept.
        budget_s: of all parts together.
        say: prints a line.
        again: repeat what has failed.
        grace_s: that a process has between SIGTERM and SIGKILL.
        stopped: the signal that has asked for the end; 0: none.
    """

    report: Report
    machine: Machine
    keep: Callable[[], None]
    budget_s: float
    logs: Path | None = None
    clock: Clock = field(default_factory=WallClock)
    say: Callable[[str], None] = print
    again: bool = False
    grace_s: float = 5.0
    stopped: int = 0

    def run(self, parts: Sequence[Part]) -> list[str]:
        """Run the parts in order.

        Returns:
            the names of those that are still to be done: the budget or a signal came first.
        """
        deadline = self.clock.now() + self.budget_s
        todo = [part for part in parts if not self.report.is_finished(part.name, self.again)]
        with self._signals():
            while todo and not self.stopped:
                part, left = todo[0], deadline - self.clock.now()
                if left < part.least_s:
                    self.say(
                        f"{part.name} is left for the next call: {max(0.0, left):.0f} s are left, and it takes {part.least_s:.0f} or more"
                    )
                    break
                self.say(f"{part.name}: {part.title} (at most {min(left, part.limit_s):.0f} s)")
                result = self._run(part, left)
                result.revision = self.machine.revision
                self.report.parts[part.name] = result
                self.keep()
                self.say(f"  {_in_words(result)}")
                if result.status == "stopped":
                    break
                todo.pop(0)
        return [part.name for part in todo]

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(number: int, _: Any) -> None:
            self.stopped = number

        before = {number: signal.signal(number, stop) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self, part: Part, left_s: float) -> PartResult:
        began, mark = self.clock.now(), uuid.uuid4().hex
        scratch = Path(tempfile.mkdtemp(prefix="first_light-"))
        code: int | None = None
        why = ""
        try:
            process = self._start(part, mark, scratch)
            try:
                while (code := self.clock.wait(process)) is None and not why:
                    why = self._why_end(self.clock.now() - began, part.limit_s, left_s)
            finally:
                if code is None:
                    end(process, self.grace_s)
                assert process.stdin is not None
                process.stdin.close()
                end_marked(mark)
            result = _result(why, code, scratch, self.clock.now() - began)
            self._keep_log(part, scratch / "log", result.is_bad or result.status == "stopped")
            return result
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _keep_log(self, part: Part, log: Path, is_wanted: bool) -> None:
        """Keep the end of a part's log, or remove that of its last run."""
        if self.logs is None:
            return
        path = self.logs / f"{part.name}.log"
        path.unlink(missing_ok=True)
        if is_wanted:
            self.logs.mkdir(exist_ok=True)
            atomic_replace(path, log.read_bytes()[-_LOG_BYTES:])

    def _why_end(self, spent_s: float, limit_s: float, left_s: float) -> str:
        if self.stopped:
            return f"stopped by {signal.Signals(self.stopped).name}"
        if spent_s >= left_s:
            return "stopped: the time is up"
        return f"took longer than its limit of {limit_s:.0f} s" if spent_s >= limit_s else ""

    def _threads(self) -> int:
        """Return the threads of a part: a trial's shapes are too small for several, which would wait for each other."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return 1 if self.machine.device == "cpu" else max(1, min(8, cores))

    def _start(self, part: Part, mark: str, scratch: Path) -> subprocess.Popen[bytes]:
        caches = {name: str(scratch / name.lower()) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        environment = {**child_environment(self._threads()), **caches, "TMPDIR": str(scratch), MARK: mark}
        environment["PYTHONPATH"] = os.pathsep.join([str(_BENCHMARKS), environment["PYTHONPATH"]])
        function = part.function if "." in part.function else f"first_light.parts.{part.function}"
        command = [
            sys.executable,
            "-m",
            "first_light.one_part",
            function,
            self.machine.device,
            str(self.machine.num_gpus),
            str(scratch),
        ]
        with open(scratch / "log", "wb") as log:
            return subprocess.Popen(
                command, env=environment, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip


def _result(why: str, code: int | None, scratch: Path, seconds: float) -> PartResult:
    records, message, is_complete = _read(scratch / "records.jsonl")
    if code == 0 and is_complete and not message:
        return PartResult("done", "", seconds, records=records)
    if why:
        return PartResult("stopped" if why.startswith("stopped") else "failed", why, seconds, records=records)
    if not message:
        ended = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        message = "; ".join(filter(None, [ended, _last_line(scratch / "log")]))
    return PartResult("failed", message, seconds, records=records)


def _read(path: Path) -> tuple[list[Record], str, bool]:
    """Return (records, why it failed, it says that it has ended) of a part's file, whose last line may be cut off."""
    records: list[Record] = []
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            value = json.loads(line)
            if "end" in value:
                return records, str(value["message"]), True
            records.append(record_of(value))
    return records, "", False


def _last_line(log: Path) -> str:
    try:
        lines = [
            line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
    except OSError:
        return ""
    return lines[-1][:400] if lines else ""


def _in_words(result: PartResult) -> str:
    bad = sum(record.is_bad for record in result.records)
    absent = sum(record.verdict == "absent" for record in result.records)
    words = [f"{result.status} in {result.seconds:.0f} s, {len(result.records)} records"]
    words += [f"{bad} NOT WELL"] if bad else []
    words += [f"{absent} not there"] if absent else []
    words += [result.message] if result.message else []
    return ", ".join(words)
