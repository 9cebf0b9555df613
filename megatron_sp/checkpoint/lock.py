"""One writer per run: the file LOCK in the run folder.

It is created with O_EXCL and records its holder (host, pid, start time of the process); its modification time is a
heartbeat. Whoever finds it decides whether the holder is alive: on the same machine by the process table (pid and start
time, so a reused pid does not count), where a holder from before the last boot is dead; from another machine only by
the heartbeat, whose age is measured against the file system's own clock, since the clocks of two hosts may differ. A
dead holder's lock is taken over with a warning. A kernel lock on LOCK.takeover decides who may take over; it dies with
its holder, so that file means nothing when it is left behind. A job of several hosts that continues after one of them
was rebooted finds its own lock with an old boot id: it waits for a heartbeat until the lock is stale. A LOCK that is
not a regular file, or whose time lies in the future, gives no information: it is refused at once, with an error naming
it.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_sp.utils.errors import LockError
from megatron_sp.utils.files import file_system, open_own, require_own

logger = logging.getLogger(__name__)

LOCK_NAME = "LOCK"
OF_ONE_HOST = (
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "f2fs",
    "zfs",
    "tmpfs",
)  # file systems that only one host mounts at a time
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 120.0
_FUTURE_SECONDS = (
    5.0  # a heartbeat may come between reading the clock and the file; if it is later than this, a clock is wrong
)
_OWN_JOB_PAUSE_S = 1.0  # between checks for a heartbeat of an earlier attempt
_TRIES, _PAUSE_S = 200, 0.01  # for the right to take over, which others hold for microseconds


class RunLock:
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
        self._me = {
            **_this_process(),
            "job": job,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "token": uuid.uuid4().hex,
        }
        self._stale_s = stale_s
        for _ in range(_TRIES):
            if self._create():
                break
            self._clear_if_dead()
        else:
            raise LockError(
                f"{self.path.parent}: other jobs take {self.path} again and again; see which they are, and end them"
            )
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

    def is_ours(self) -> bool:
        return _read(self.path).get("token") == self._me["token"]

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _create(self) -> bool:
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            _require_file(self.path)
            return False
        with open(fd, "w") as file:
            json.dump(self._me, file)
            file.flush()
            os.fsync(fd)
        return True

    def _clear_if_dead(self) -> None:
        # remove the lock of a dead holder; raise LockError for a live one
        self._wait_for_own_job()
        self._judge()
        with self._right_to_remove() as granted:
            if not granted:
                time.sleep(_PAUSE_S)
            elif (who := self._judge()) is not None:
                self.path.unlink(missing_ok=True)
                logger.warning(
                    "took over the lock of %s: %s was held by %s",
                    self.path.parent,
                    self.path.name,
                    f"{who}, which is gone",
                )

    def _wait_for_own_job(self) -> None:
        first = sign = self._sign_of_own_job()
        if first is not None:
            logger.warning(
                "%s is held by %s, an earlier attempt of this job: waiting up to %.0f s for a sign of life",
                self.path, _name(_read(self.path)), self._stale_s,
            )  # fmt: skip
        while sign is not None and sign == first:
            time.sleep(_OWN_JOB_PAUSE_S)
            sign = self._sign_of_own_job()

    def _sign_of_own_job(self) -> int | None:
        """Return when the lock was last touched, in ns; None unless the holder is of this job, cannot be checked, and is not yet stale."""
        holder = _read(self.path)
        if not self._me["job"] or holder.get("job") != self._me["job"] or _is_alive(holder, self.path) is not None:
            return None
        age = self._age()
        try:
            return (
                self.path.lstat().st_mtime_ns if age is not None and -_FUTURE_SECONDS <= age < self._stale_s else None
            )
        except FileNotFoundError:
            return None

    def _judge(self) -> str | None:
        # the name of the dead holder, or None if the lock has been released meanwhile; raise LockError for a live one
        _require_file(self.path)
        holder, age = _read(self.path), self._age()
        if age is None:
            return None
        who, alive = _name(holder), _is_alive(holder, self.path)
        if alive is None and age < -_FUTURE_SECONDS:
            raise LockError(
                f"{self.path.parent} was in use by {who}, and {self.path} was touched {-age:.0f} s from now, by the clock of its file"
                f" system: a clock is or was wrong, so it is unknown whether that job is alive. If it is surely gone, delete {self.path};"
                " or use another --save"
            )
        if alive or (alive is None and age < self._stale_s):
            raise LockError(
                f"{self.path.parent} is in use by {who}, last sign of life {max(0.0, age):.0f} s ago. Two jobs must not write into one run:"
                f" end that one, use another --save, or, if it is surely gone, delete {self.path}"
                + ("" if alive else f" (it is taken over by itself after {self._stale_s:.0f} s without a sign of life)")
            )
        return who

    @contextlib.contextmanager
    def _right_to_remove(self) -> Iterator[bool]:
        """Context manager that yields whether this process alone may remove the lock now.

        A previous holder may have unlinked the locked file: the kernel's lock counts only if the file still has its
        name.
        """
        guard = self.path.with_name(f"{LOCK_NAME}.takeover")
        _require_file(guard)
        with open_own(guard, os.O_RDWR | os.O_CREAT) as file:
            granted = _locked(file.fileno(), guard)
            try:
                yield granted
            finally:
                if granted:
                    guard.unlink(missing_ok=True)

    def _age(self) -> float | None:
        """Return the seconds since the lock was touched, by the file system's clock; negative if in the future, None if it is gone."""
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
                    logger.error(
                        "%s is no longer ours: another process took over this run; stop one of the two", self.path
                    )
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
    """Return the holder of a run's lock, None if nobody holds it; changes nothing, so anyone may call it."""
    path = Path(run_dir) / LOCK_NAME
    try:
        require_own(path)
        age = time.time() - path.lstat().st_mtime
    except OSError:
        return None
    holder = _read(path)
    return Holder(_name(holder), max(0.0, age), _is_alive(holder, path))


def _require_file(path: Path) -> None:
    try:
        require_own(path)
    except OSError as error:
        raise LockError(
            f"{path} cannot be used as the lock of this run: {error.strerror}. It is not a lock of ours: delete it, or use another --save"
        ) from None


def _locked(fd: int, path: Path) -> bool:
    # Try to take the kernel's lock on an open file; return whether this process has it and the file still has its name.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
            return False
        raise LockError(
            f"{path.parent}: the lock of a job that is gone cannot be taken over safely here (flock: {error.strerror}): delete {LOCK_NAME}"
        ) from None
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _name(holder: dict[str, Any]) -> str:
    return (
        f"pid {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')} (since {holder.get('started', '?')})"
    )


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "process_start": _start_time(pid)}


def _machine() -> str:
    # boot id and pid namespace, equal only where a pid means the same process; empty if /proc does not have them
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    # the start time of a process, in clock ticks since boot (proc(5), stat, field 22); empty if unknown or ended
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # the name before it may contain spaces and brackets
    return "" if fields[0] in "ZX" else fields[19]


def _is_alive(holder: dict[str, Any], path: Path) -> bool | None:
    # whether the holder is alive; None if this machine cannot tell, because the holder is elsewhere or not
    # identified. path: the lock; may be gone meanwhile.
    here = _this_process()
    pid = holder.get("pid")
    if _is_of_earlier_boot(holder, here, path):
        return False
    if (
        holder.get("host") != here["host"]
        or holder.get("machine") != here["machine"]
        or not isinstance(pid, int)
        or pid <= 0
    ):
        return None
    if here["machine"]:
        started = _start_time(pid)
        return started != "" and started == holder.get("process_start")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_of_earlier_boot(holder: dict[str, Any], here: dict[str, Any], path: Path) -> bool:
    """Return whether the holder ran on this machine before its last boot.

    Another boot id and the same host name are not enough, as clones share the name: only on a local file system can no
    other machine have written the lock. A local file system alone is not enough either, as this machine may export it
    to others, whose names differ.
    """
    before, now = (str(process.get("machine") or "").partition(" ")[0] for process in (holder, here))
    if not before or not now or before == now or holder.get("host") != here["host"]:
        return False
    try:
        return file_system(path) in OF_ONE_HOST
    except OSError:
        return False


def _read(path: Path) -> dict[str, Any]:
    # the lock's contents; empty if it is missing or not (yet) readable
    try:
        with open_own(path, os.O_RDONLY) as file:
            value = json.loads(file.read(10_000))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
