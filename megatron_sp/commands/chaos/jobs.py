"""Starting a training, watching it from outside, and ending what is left of it.

Nothing here asks the training for anything: progress is read from ``metrics.jsonl``, ranks from ``run_status.json``. A process gets a
signal only if it is a descendant of one that we have started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_sp.utils.processes import is_running

_POLL_S = 0.004


class Watch:
    """What has been added to ``metrics.jsonl`` of a run since the watch began."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.jsonl"
        self._at = self._path.stat().st_size if self._path.exists() else 0
        self.records: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        """All records since, complete lines only."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._at)
            data = file.read()
            end = data.rfind(b"\n") + 1
            self._at += end
            for line in data[:end].splitlines():
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    self.records += [record] if isinstance(record, dict) else []
        return self.records

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.look() if record.get("kind") == kind]


class Job:
    """A training that runs in processes of its own; their output goes into a file.

    Args:
        run: its run folder.
        output: a new file.
        pids: of the processes that were started; ranks may be below them.
    """

    def __init__(self, run: Path, output: Path, pids: list[int]) -> None:
        self.run, self.output, self._started = run, output, pids
        self.codes: dict[int, int] = {}
        self._known: set[int] = set(pids)

    def has_ended(self) -> bool:
        """Whether all processes that were started have ended."""
        for pid in self._started:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self._started)

    @property
    def code(self) -> int:
        """0 if all have ended well, else the first other code."""
        return next((self.codes[pid] for pid in self._started if self.codes[pid]), 0)

    def processes(self) -> list[int]:
        """Those that were started and their descendants, as far as they run; the started ones first."""
        parents = _parents()
        before = -1
        while before != len(self._known):  # also of those whose parent has gone: they were known before
            before = len(self._known)
            self._known |= {pid for pid, parent in parents.items() if parent in self._known}
        return sorted((pid for pid in self._known if pid in parents and is_running(pid)), key=lambda pid: (pid not in self._started, pid))

    def ranks(self) -> list[int]:
        """Process ids by rank, of this attempt; [] while it has not said so."""
        with contextlib.suppress(OSError, ValueError):
            pids = json.loads((self.run / "run_status.json").read_text()).get("pids")
            own = set(self.processes())
            if isinstance(pids, list) and pids and set(pids) <= own:
                return [int(pid) for pid in pids]
        return []

    def wait(self, condition: Callable[[], Any], timeout_s: float) -> bool:
        """Until the condition holds or the job has ended; False if neither comes in time."""
        deadline = time.monotonic() + timeout_s
        while not (condition() or self.has_ended()):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def kill(self) -> None:
        """End everything, and wait until it is gone."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.has_ended()
            time.sleep(_POLL_S)
        while not self.has_ended():
            time.sleep(_POLL_S)

    def text(self) -> str:
        with contextlib.suppress(OSError):
            return self.output.read_text(errors="replace")
        return ""


def _parents() -> dict[int, int]:
    """The parent of every process of this machine that can be seen."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{entry.name}/stat") as file:
                found[int(entry.name)] = int(file.read().rpartition(")")[2].split()[1])
    return found


def start_command(command: list[str], run: Path, output: Path) -> Job:
    """Start a training's own command for this run folder.

    Raises:
        OSError: it cannot be started.
    """
    words = [*command, *save_flags(run)]
    with open(output, "wb") as file:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    process.returncode = 0  # the Job waits for it
    return Job(run, output, [process.pid])


def start_built_in(ranks: int, run: Path, output: Path) -> Job:
    """Start the tiny training by forking this process, which has imported all that it needs."""
    from megatron_sp.commands.chaos import tiny

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    return Job(run, output, [_fork(lambda rank=rank: tiny.train(rank, ranks, port, save_flags(run)), output) for rank in range(ranks)])  # type: ignore[misc]


def save_flags(run: Path) -> list[str]:
    return ["--save", str(run), "--auto-resume", "--resume-fallback"]


def _fork(body: Callable[[], None], output: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()  # a Ctrl-C at the terminal is for the one who does all this
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        body()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def in_child(body: Callable[[], Any]) -> Any:
    """What ``body`` returns, as JSON, computed in a forked process: this one stays without threads, so that it can go on forking.

    Raises:
        RuntimeError: the child failed; with its traceback.
    """
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                answer = {"value": body()}
            except Exception:
                answer = {"error": traceback.format_exc()}
            with os.fdopen(theirs, "w") as pipe:
                json.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    answer = json.loads(text) if text else {"error": "the process that compared has died"}
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]
