"""Finding the rank that died, was stopped or hangs when a collective fails: gloo and NCCL do not name it.

The processes of this host are inspected directly. For the others there is a roll call: a rank whose collective fails
leaves a mark in the job's store; the one without a mark is the one that the others wait for.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch.distributed as dist

from megatron_sp.comm.collectives import WaitError
from megatron_sp.comm.groups import Group
from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.utils.files import open_own
from megatron_sp.utils.host import is_running, is_stopped, machine
from megatron_sp.utils.launch import Launch

_PATIENCE_S = 20.0  # enough for a process that computes on a busy machine; one that has ended is not waited for
_NONE = -1
_BROKEN = (
    "gloo", "nccl", "connection closed", "connection reset", "timed out", "timeout", "broken pipe", "peer", "store",
)  # fmt: skip
_ROLL_CALL_S = 5.0  # the others find their own collectives broken a little later
_POLL_S = 0.05


@dataclass(frozen=True)
class Peers:
    """Host and process of every rank, exchanged once at the start."""

    hosts: list[str]  # names for messages
    pids: list[int]
    machines: list[str]  # identifiers of the hosts
    stacks: list[int] = field(default_factory=list)  # file descriptors for ``take_stack``
    rank: int = 0
    # number of restarts of the job; the maximum over the ranks, since a host that came back starts counting anew
    attempt: int = 0
    store: dist.Store | None = None  # a store that all ranks can reach; None: no roll call
    # what each rank has of the model ("pipeline stage 1"), for messages; empty: nothing to be said
    parts: list[str] = field(default_factory=list)

    @classmethod
    def create(cls, group: Group, launch: Launch) -> Peers:
        entries = gather_json([socket.gethostname(), os.getpid(), machine(), offer_stack(), launch.attempt], group)
        store = None
        if len(entries) > 1:
            store = dist.PrefixStore("peers", dist.distributed_c10d._get_default_store())  # has no public name
        hosts, pids, machines, stacks, attempts = (list(column) for column in zip(*entries, strict=True))
        return cls(_number_hosts(hosts, machines), pids, machines, stacks, launch.rank, max(attempts), store)

    def dead_here(self, patience_s: float = 1.0) -> list[int]:
        # the ranks of this host whose process is gone; waits up to ``patience_s`` for one to end
        deadline = time.monotonic() + patience_s
        while not (dead := [r for r in self._here() if not is_running(self.pids[r])]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return dead

    def explain(self, error: BaseException, folder: Path | None = None, place: str = "") -> str:
        """Name the rank that died, was stopped or did not answer; its stacks go into ``folder``."""
        stopped = [r for r in self._here() if is_stopped(self.pids[r])]
        dead = [] if stopped else self.dead_here()
        known = f"{self._name(dead[0])} died" if dead else ""
        if stopped:
            known = f"{self._name(stopped[0])} was stopped by a signal"
        verdicts: list[str] = []
        talk = threading.Thread(target=lambda: verdicts.append(self._agree(known, stopped or dead)), daemon=True)
        talk.start()
        talk.join(4 * _ROLL_CALL_S)  # with the network cut, the store's answer would never come
        verdict = verdicts[0] if verdicts else known
        late = [r for r in self._here() if r != self.rank and f"{self._name(r)} did not answer" in verdict]
        for rank in stopped or late:
            verdict += self._keep_stack(rank, folder)
        nobody = "a rank on another host died or did not answer; the launcher's report names it"
        where = f" in {place}" if place else ""
        failure = f"{verdict or nobody}: a collective failed{where} ({first_line(error)})"
        return f"{failure}. Start the same command again with --auto-resume."

    def _here(self) -> list[int]:
        return [r for r, where in enumerate(self.machines) if where == machine()]

    def _name(self, rank: int) -> str:
        part = f", {self.parts[rank]}" if self.parts else ""
        return f"rank {rank} (pid {self.pids[rank]} on {self.hosts[rank]}{part})"

    def _agree(self, known: str, missing: list[int]) -> str:
        # the verdict of all ranks: the first that any rank has found, or else which ranks did not answer. known:
        # this rank's verdict; "" if it has none. missing: ranks known not to answer.
        if self.store is None:
            return known
        store, shared = self.store, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store.set(f"broken/{self.rank}", "1")
            others = [r for r in range(len(self.pids)) if r != self.rank and r not in missing]
            answered = _marks(store, "broken", others)
            if not known:
                _wait_for(lambda: store.check(["verdict"]) or not answered() or bool(self.dead_here(0.0)))
                if dead := self.dead_here(0.0):
                    known = f"{self._name(dead[0])} died"
                elif late := answered():
                    known = f"{', '.join(self._name(r) for r in late[:8])} did not answer"
            if known or store.check(["verdict"]):
                known = store.compare_set("verdict", "", known).decode()
            store.set(f"heard/{self.rank}", "1")
            if self.rank == 0 and not shared:  # its process hosts the store
                heard = _marks(store, "heard", [r for r in others if r not in answered()])
                _wait_for(lambda: not heard())
        except RuntimeError:  # the store is gone
            if not known and not shared:
                known = f"{self._name(0)} is gone, or cannot be reached"
        return known

    def _keep_stack(self, rank: int, folder: Path | None) -> str:
        # write a rank's stacks into ``folder``; return their path as a part of the message
        text = take_stack(self.pids[rank], self.stacks[rank]) if folder is not None and rank < len(self.stacks) else ""
        if folder is None or not text:
            return ""
        path = folder / f"stacks-rank{rank}.txt"
        try:
            with open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                file.write(f"{self._name(rank)}, as rank {self.rank} found it\n{text}".encode())
        except OSError:
            return ""
        return f" (its stacks are in {path})"


def _number_hosts(hosts: list[str], machines: list[str]) -> list[str]:
    # the host names, numbered where several hosts have the same name: "node (2)"
    boots = {host: list(dict.fromkeys(m for h, m in zip(hosts, machines, strict=True) if h == host)) for host in hosts}
    return [h if len(boots[h]) == 1 else f"{h} ({boots[h].index(m) + 1})" for h, m in zip(hosts, machines, strict=True)]


def _marks(store: dist.Store, kind: str, ranks: list[int]) -> Callable[[], list[int]]:
    return lambda: [r for r in ranks if not store.check([f"{kind}/{r}"])]


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _ROLL_CALL_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def is_peer_failure(error: BaseException) -> bool:
    """Return whether an exception looks like that of a collective whose peer is gone."""
    if isinstance(error, dist.DistError | WaitError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _BROKEN)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return next((line[:200] for line in str(error).splitlines() if line.strip()), type(error).__name__)


def offer_stack() -> int:
    """Let ranks of this host read this process's stack by the file descriptor returned, -1 if unsupported."""
    number = _signal()
    if not number or not hasattr(os, "memfd_create"):
        return _NONE
    descriptor = os.memfd_create("stacks")
    # other threads run on: their frames are not safe to read. The handler is C code, which needs no interpreter
    faulthandler.register(number, file=descriptor, all_threads=False, chain=False)
    return descriptor


def take_stack(pid: int, descriptor: int) -> str:
    """Return the stack of a process of this host, which is resumed if it was stopped; "" if there is none to be had."""
    number = _signal()
    if not number or descriptor == _NONE:
        return ""
    try:
        # opened before waking it: a woken process may end at once, and its path with it
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # otherwise another rank has asked, and it may have gone on since
                _signal_main_thread(pid, number)
            if is_stopped(pid):
                os.kill(pid, signal.SIGCONT)
            return _settled(file)
    except OSError:
        return ""


def _signal_main_thread(pid: int, number: int) -> None:
    # ``kill`` to a stopped process may reach any thread, even one without a Python stack
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc has it since 2.30
    if tgkill is None or tgkill(pid, pid, number) != 0:
        os.kill(pid, number)


def _settled(file: BinaryIO) -> str:
    deadline, size = time.monotonic() + _PATIENCE_S, 0
    while time.monotonic() < deadline:  # until no more is written
        time.sleep(0.05)
        last, size = size, os.fstat(file.fileno()).st_size
        if 0 < last == size:
            break
    return file.read().decode("utf-8", "replace")


def _signal() -> int:
    # the number of a real-time signal that nothing else uses; 0 if there are none
    first = getattr(signal, "SIGRTMIN", None)
    return int(first) + 9 if first is not None else 0
