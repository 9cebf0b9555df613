"""Which rank died, when a collective breaks: gloo and NCCL only say that somebody did."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

import torch.distributed as dist

from megatron_sp.comm.groups import Group
from megatron_sp.comm.objects import gather_json
from megatron_sp.utils.processes import is_running

_BROKEN = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "timeout", "broken pipe", "peer", "store")


@dataclass(frozen=True)
class Peers:
    """Host and process id of every rank, exchanged once at the start."""

    hosts: list[str]
    pids: list[int]

    @classmethod
    def create(cls, group: Group) -> Peers:
        entries = gather_json([socket.gethostname(), os.getpid()], group)
        return cls([str(e[0]) for e in entries], [int(e[1]) for e in entries])

    def dead_here(self, patience_s: float = 1.0) -> list[int]:
        """Ranks of this host whose process is gone; waits a little for one to appear."""
        deadline = time.monotonic() + patience_s
        here = [r for r, host in enumerate(self.hosts) if host == socket.gethostname()]
        while not (dead := [r for r in here if not is_running(self.pids[r])]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return dead

    def explain(self, error: BaseException) -> str:
        """One message: who died, or that it was on another host."""
        dead = self.dead_here()
        who = (
            f"rank {dead[0]} (pid {self.pids[dead[0]]} on {self.hosts[dead[0]]}) died" if dead
            else "a rank died or did not answer, none of those on this host; the launcher's report names it"
        )  # fmt: skip
        return f"{who}: a collective failed ({first_line(error)}). Start the same command again with --auto-resume."


def is_peer_failure(error: BaseException) -> bool:
    """Whether an exception comes from a collective whose partner is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _BROKEN)


def first_line(error: BaseException) -> str:
    """The beginning of an error's text, or its type when it has none."""
    return next((line[:200] for line in str(error).splitlines() if line.strip()), type(error).__name__)
