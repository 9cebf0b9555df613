"""One writer per run: the file LOCK in the run folder.

It is created with O_EXCL and records its holder; its modification time is a heartbeat. Whoever finds it decides whether
the holder is alive: on the same machine by the process table, else by the age of the heartbeat. A dead holder's lock is
taken over with a warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.utils import host as host_facts
from megatron_sp.utils.errors import LockError
from megatron_sp.utils.files import file_system, open_own, require_own

logger = logging.getLogger(__name__)

LOCK_NAME = "LOCK"
OF_ONE_HOST = ("ext2", "ext3", "ext4", "xfs", "f2fs", "zfs", "tmpfs")  # file systems that one host mounts at a time
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 120.0
# a heartbeat may come between reading the clock and the file; if it is later than this, a clock is wrong
_FUTURE_SECONDS = 5.0
_OWN_JOB_PAUSE_S = 1.0  # between checks for a heartbeat of an earlier attempt
_TRIES, _PAUSE_S = 200, 0.01  # for the right to take over, which others hold for microseconds


class RunLock(contextlib.AbstractContextManager["RunLock"]):
    """Lock of a run, held from construction until ``close()``; for rank 0 alone.

    Args:
        job: the launcher's name of the job, the same in all its attempts; empty if it has none.
    Raises:
        LockError: another process holds it (the message names its host and pid), or it cannot be taken over.
        OSError: the folder cannot be written.
    """

    def __init__(
        self, run_dir: str | Path, heartbeat_s: float = HEARTBEAT_SECONDS, stale_s: float = STALE_SECONDS, job: str = ""
    ) -> None:
        self.path = Path(run_dir) / LOCK_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._holder = {**_this_process(), "job": job, "started": now, "token": uuid.uuid4().hex}
        self._stale_s = stale_s
        for _ in range(_TRIES):
            if self._create():
                break
            self._clear_if_dead()
        else:
            again = f"other jobs take {self.path} again and again; see which they are, and end them"
            raise LockError(f"{self.path.parent}: {again}")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(heartbeat_s,), name="run-lock-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Release the lock, if it is still ours. May be called twice."""
        self._closed.set()
        self._thread.join()
        if self.is_ours():
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_ours(self) -> bool:
        return _read(self.path).get("token") == self._holder["token"]

    def _create(self) -> bool:
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            _require_file(self.path)
            return False
        with open(fd, "w") as file:
            json.dump(self._holder, file)
            file.flush()
            os.fsync(fd)
        return True

    def _clear_if_dead(self) -> None:
        # remove the lock of a dead holder; raise LockError for a live one
        self._wait_for_own_job()
        self._judge()
        # A kernel lock on a second file decides who may remove the first. It dies with its holder, so that file means
        # nothing when it is left behind. The verdict is repeated under it: another process may have taken over since.
        guard = self.path.with_name(f"{LOCK_NAME}.takeover")
        _require_file(guard)
        with open_own(guard, os.O_RDWR | os.O_CREAT) as file:
            if not _locked(file.fileno(), guard):
                time.sleep(_PAUSE_S)
                return
            try:
                if (who := self._judge()) is not None:
                    self.path.unlink(missing_ok=True)
                    held = f"{self.path.name} was held by {who}, which is gone"
                    logger.warning("took over the lock of %s: %s", self.path.parent, held)
            finally:
                guard.unlink(missing_ok=True)

    def _wait_for_own_job(self) -> None:
        # A job of several hosts that continues after one of them was rebooted finds its own lock with an old boot id:
        # wait until there is a heartbeat or the lock is stale.
        first = None
        while True:
            holder = _read(self.path)
            is_own = self._holder["job"] and holder.get("job") == self._holder["job"]
            if not is_own or _is_alive(holder, self.path) is not None:
                return
            age = self._age()
            if age is None or not -_FUTURE_SECONDS <= age < self._stale_s:
                return
            try:
                touched = self.path.lstat().st_mtime_ns
            except FileNotFoundError:
                return
            if first is None:
                first = touched
                logger.warning(
                    "%s is held by %s, an earlier attempt of this job: waiting up to %.0f s for a sign of life",
                    self.path, _name(_read(self.path)), self._stale_s,
                )  # fmt: skip
            elif touched != first:
                return
            time.sleep(_OWN_JOB_PAUSE_S)

    def _judge(self) -> str | None:
        # the name of the dead holder, or None if the lock has been released meanwhile; raise LockError for a live one
        _require_file(self.path)
        holder, age = _read(self.path), self._age()
        if age is None:
            return None
        who, alive = _name(holder), _is_alive(holder, self.path)
        if alive is None and age < -_FUTURE_SECONDS:
            raise LockError(
                f"{self.path.parent} was in use by {who}, and {self.path} was touched {-age:.0f} s from now, by the"
                " clock of its file system: a clock is or was wrong, so it is unknown whether that job is alive. If it"
                f" is surely gone, delete {self.path}; or use another --save"
            )
        if alive or (alive is None and age < self._stale_s):
            raise LockError(
                f"{self.path.parent} is in use by {who}, last sign of life {max(0.0, age):.0f} s ago. Two jobs must not"
                " write into one run: end that one, use another --save, or, if it is surely gone, delete"
                f" {self.path}"
                + ("" if alive else f" (it is taken over by itself after {self._stale_s:.0f} s without a sign of life)")
            )
        return who

    def _age(self) -> float | None:
        # seconds since the lock was touched; negative if in the future, None if it is gone. By the file system's own
        # clock, the time of a file made now: the clocks of two hosts may differ.
        probe = self.path.with_name(f"{LOCK_NAME}.probe-{uuid.uuid4().hex[:8]}")
        try:
            probe.touch()
            return probe.stat().st_mtime - self.path.lstat().st_mtime
        except FileNotFoundError:
            return None
        finally:
            probe.unlink(missing_ok=True)

    def _beat(self, every_s: float) -> None:
        while not self._closed.wait(every_s):
            try:
                if not self.is_ours():
                    taken = "another process took over this run; stop one of the two"
                    logger.error("%s is no longer ours: %s", self.path, taken)
                    return
                os.utime(self.path)
            except OSError as error:
                logger.warning("the heartbeat of %s failed: %s", self.path, error)


class Holder(NamedTuple):
    """The holder of a lock, as recorded in it."""

    who: str  # pid, host and start of the lock, as text
    age_s: float  # seconds since its last sign of life, by this host's clock
    is_alive: bool | None  # None if this machine cannot tell

    @property
    def may_write(self) -> bool:
        """True if the holder may be saving: it is alive or, where that is unknown, its lock is not stale."""
        return self.is_alive if self.is_alive is not None else self.age_s < STALE_SECONDS


def holder_of(run_dir: str | Path) -> Holder | None:
    """Return the holder of a run's lock, None if nobody holds it; changes nothing."""
    path = Path(run_dir) / LOCK_NAME
    try:
        require_own(path)
        age = time.time() - path.lstat().st_mtime
    except OSError:
        return None
    holder = _read(path)
    return Holder(_name(holder), max(0.0, age), _is_alive(holder, path))


def _require_file(path: Path) -> None:
    # anything but a regular file gives no information: refused at once, by name
    try:
        require_own(path)
    except OSError as error:
        kind = f"{path} cannot be used as the lock of this run: {error.strerror}"
        raise LockError(f"{kind}. It is not a lock of ours: delete it, or use another --save") from None


def _locked(fd: int, path: Path) -> bool:
    # try to take the kernel's lock on an open file
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
            return False
        gone = "the lock of a job that is gone cannot be taken over safely here"
        raise LockError(f"{path.parent}: {gone} (flock: {error.strerror}): delete {LOCK_NAME}") from None
    try:
        # a previous holder may have unlinked the file: the lock counts only if it still has its name
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _name(holder: dict[str, Any]) -> str:
    host, started = holder.get("host", "an unknown host"), holder.get("started", "?")
    return f"pid {holder.get('pid', '?')} on {host} (since {started})"


def _this_process() -> dict[str, Any]:
    pid, host, machine = os.getpid(), socket.gethostname(), host_facts.machine()
    machine = "" if machine == host else machine  # without /proc a pid says nothing about its process
    return {"host": host, "machine": machine, "pid": pid, "process_start": _start_time(pid)}


def _start_time(pid: int) -> str:
    # the start time of a process, in clock ticks since boot (proc(5), stat, field 22); empty if unknown or ended
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # the name before it may contain spaces and brackets
    return "" if fields[0] in "ZX" else fields[19]


def _is_alive(holder: dict[str, Any], path: Path) -> bool | None:
    # None if this machine cannot tell: the holder is elsewhere or not identified. The lock at ``path`` may be gone.
    here, pid, machine = _this_process(), holder.get("pid"), holder.get("machine")
    if holder.get("host") != here["host"]:
        return None
    then, now = str(machine or "").partition(" ")[0], here["machine"].partition(" ")[0]
    if then and now and then != now:
        # Dead if it ran here before the last boot. Another boot id under the same host name is not enough, as clones
        # share the name: only on a local file system can no other machine have written the lock. A local file system
        # alone is not enough either, as this machine may export it to others, whose names differ.
        try:
            return False if file_system(path) in OF_ONE_HOST else None
        except OSError:
            return None
    if machine != here["machine"] or not isinstance(pid, int) or pid <= 0:
        return None
    if here["machine"]:
        # a reused pid has another start
        started = _start_time(pid)
        return started != "" and started == holder.get("process_start")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(path: Path) -> dict[str, Any]:
    # the lock's contents; empty if it is missing or not (yet) readable
    try:
        with open_own(path, os.O_RDONLY) as file:
            value = json.loads(file.read(10_000))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
