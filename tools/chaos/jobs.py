"""Start a training, watch it from outside, and kill what is left of it.

Nothing here needs the training's cooperation: progress is read from ``metrics.jsonl``, ranks from ``run_status.json``.
A process gets a signal only if it is one that was started here, or a descendant of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from megatron_sp.utils.host import is_running

_POLL_S = 0.004
_TINY = (  # a GPT of some ten thousand parameters on synthetic tokens
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --mock-data"
    " --vocab-size 60 --device cpu --num-threads 1 --lr 1e-2 --lr-decay-style constant --eval-iters 0 --log-interval"
    " 1 --peak-tflops 1 --save-interval 3 --distributed-timeout-minutes 0.15 --no-progress-bar --zero-stage 1"
    " --train-iters 40"
)


class Watch:
    """Reader of the records added to ``metrics.jsonl`` of a run since its creation."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.jsonl"
        self._at = self._path.stat().st_size if self._path.exists() else 0
        self.records: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        """Return all records since the creation of this object, complete lines only."""
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
        """Records of a kind that the metrics have so far."""
        return [record for record in self.look() if record.get("kind") == kind]


class Job:
    """A training in separate processes, whose output goes to a file.

    Args:
        run: run folder.
        output: file with the output of the processes.
        pids: ids of the processes that were started; ranks may be descendants of these.
    """

    def __init__(self, run: Path, output: Path, pids: list[int]) -> None:
        self.run, self.output, self._started = run, output, pids
        self.codes: dict[int, int] = {}
        self._known: set[int] = set(pids)

    def has_ended(self) -> bool:
        """Return whether all processes that were started have ended."""
        for pid in self._started:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self._started)

    @property
    def code(self) -> int:
        """Exit code of the job: 0 if all processes succeeded, else the first nonzero code."""
        return next((self.codes[pid] for pid in self._started if self.codes[pid]), 0)

    def processes(self) -> list[int]:
        """Return the ids of running processes: those that were started come first, then their descendants."""
        parents = _parents()
        before = -1
        while before != len(self._known):  # including orphans: they were known before
            before = len(self._known)
            self._known |= {pid for pid, parent in parents.items() if parent in self._known}
        return sorted(
            (pid for pid in self._known if pid in parents and is_running(pid)),
            key=lambda pid: (pid not in self._started, pid),
        )

    def ranks(self) -> list[int]:
        """Return the process ids of this attempt by rank; [] until ``run_status.json`` lists them."""
        with contextlib.suppress(OSError, ValueError):
            pids = json.loads((self.run / "run_status.json").read_text()).get("pids")
            own = set(self.processes())
            if isinstance(pids, list) and pids and set(pids) <= own:
                return [int(pid) for pid in pids]
        return []

    def wait(self, condition: Callable[[], Any], timeout_s: float) -> bool:
        """Wait until the condition holds or the job has ended; return False on timeout."""
        deadline = time.monotonic() + timeout_s
        while not (condition() or self.has_ended()):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def kill(self) -> None:
        """Kill all processes, and wait until they are gone."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.has_ended()
            time.sleep(_POLL_S)
        while not self.has_ended():
            time.sleep(_POLL_S)

    def text(self) -> str:
        """Output of the job so far; empty if there is none."""
        with contextlib.suppress(OSError):
            return self.output.read_text(errors="replace")
        return ""


def _parents() -> dict[int, int]:
    """Return the parent of every visible process of this machine."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{entry.name}/stat") as file:
                found[int(entry.name)] = int(file.read().rpartition(")")[2].split()[1])
    return found


def start_command(command: list[str], run: Path, output: Path) -> Job:
    """Start a training's own command for this run folder.

    Raises:
        OSError: the command cannot be started.
    """
    words = [*command, *save_flags(run)]
    with open(output, "wb") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    process.returncode = 0  # the Job waits for it
    return Job(run, output, [process.pid])


def start_built_in(ranks: int, run: Path, output: Path) -> Job:
    """Start the built-in training by forking this process, which has already imported torch and the training loop."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    return Job(
        run,
        output,
        [_fork(lambda rank=rank: train_tiny(rank, ranks, port, save_flags(run)), output) for rank in range(ranks)],
    )  # type: ignore[misc]


def train_tiny(rank: int, ranks: int, port: int, more: list[str]) -> None:
    """Run one rank of the built-in training; never returns."""
    import torch

    from megatron_sp.commands.pretrain import parse_config
    from megatron_sp.tasks.gpt import GPT
    from megatron_sp.training.loop import pretrain

    torch.set_num_threads(1)  # before anything else: OpenMP with more threads hangs after a fork
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "MEGATRON_SP_FAULT"):
        os.environ.pop(name, None)
    layout = ["--sequence-parallel-size", "2" if ranks % 4 == 0 else "1", "--global-batch-size", str(4 * ranks)]
    pretrain(
        parse_config([*_TINY.split(), *layout, *more], prog="megatron-sp chaos"), dataclasses.replace(GPT, name="chaos")
    )


def save_flags(run: Path) -> list[str]:
    """Flags that let a job save to a run folder and continue from it."""
    return ["--save", str(run), "--auto-resume", "--resume-fallback"]


def _fork(body: Callable[[], None], output: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()  # a Ctrl-C at the terminal is for the campaign, not for its jobs
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
    """Return the result of ``body``, computed in a forked process: this one stays free of threads, so it can go on forking.

    Raises:
        RuntimeError: the child failed; the message has its traceback.
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
