"""--check-collectives: the ranks of a group compare each collective before they call it: an error instead of a hang.

Each rank writes its call under its number into the job's store, and goes on only if those of the others match.

    rank r, collective k:   set G/k/r  ->  wait for G/k/*  ->  compare  ->  delete G/k-1/r  ->  the collective itself

Calls that differ are a bug, exit code 1; a rank that has died or does not call in time is a lost peer, exit code 7.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn, cast

import torch.distributed as dist
from torch import Tensor

from megatron_sp.utils.errors import PeerError, ReportedError
from megatron_sp.utils.host import is_running, is_stopped, machine

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_HERE = str(Path(__file__).resolve().parent) + os.sep
_SPACE = "check_collectives"
_PATIENCE_S = 1.0  # a longer wait is investigated: has a rank died, or is one waiting in another collective?
_FAREWELL_S = 3.0  # how long a failing rank waits for the others to read why, before it exits


class DivergenceError(ReportedError):
    """The ranks of a group call different collectives: a bug."""

    exit_code = 1


@dataclass(frozen=True)
class Call:
    what: str  # operation, shape and dtype; must be the same on all ranks
    send: list[int]  # elements to each rank, for all-to-alls
    receive: list[int]
    place: str  # where in the code it is called

    def __str__(self) -> str:
        counts = f" sending {self.send}, expecting {self.receive}" if self.send or self.receive else ""
        return f"{self.what}{counts} at {self.place}"


def check_groups(groups: Mapping[str, dist.ProcessGroup], timeout: timedelta) -> dict[str, dist.ProcessGroup]:
    """Wrap groups in ``CheckedGroup``; a group with several names becomes one object."""
    rank = dist.get_rank()
    store = dist.PrefixStore(_SPACE, dist.distributed_c10d._get_default_store())  # has no public name
    generation = store.add(f"made/{rank}", 1)  # groups may be rebuilt within a job, and then count from 1 again
    store = dist.PrefixStore(str(generation), store)
    store.set(f"process/{rank}", json.dumps([socket.gethostname(), os.getpid(), machine()]))
    checked: dict[str, CheckedGroup] = {}
    for name, group in groups.items():
        if group.size() > 1 and group.group_name not in checked:
            checked[group.group_name] = CheckedGroup(group, name, store, timeout.total_seconds())
    return {name: cast(dist.ProcessGroup, checked.get(group.group_name, group)) for name, group in groups.items()}


class CheckedGroup:
    """A process group whose collectives are compared between ranks before they run."""

    def __init__(self, process_group: dist.ProcessGroup, name: str, store: dist.Store, timeout_s: float) -> None:
        self.process_group, self.name = process_group, name
        self.size, self.rank = process_group.size, process_group.rank
        self._ranks = dist.get_process_group_ranks(process_group)
        self._store, self._space, self._timeout_s = store, f"{name}/{self._ranks[0]}", timeout_s
        self._number = 0

    def announce(self, op: str, x: Tensor | None, send: Sequence[int], receive: Sequence[int]) -> None:
        """Announce the next call, see ``groups.announced``."""
        words = [op]
        if x is not None:
            words += [] if send or receive else [str(tuple(x.shape))]
            words += [str(x.dtype).removeprefix("torch.")]
        call = Call(" ".join(words), list(send), list(receive), _place())
        self._number += 1
        self._store.set(self._key(self.rank()), json.dumps(asdict(call)))
        calls = self._calls(call)
        # who has written call k has read all of k-1: the store holds at most two calls per rank and group
        if self._number > 1:
            self._store.delete_key(self._key(self.rank(), self._number - 1))
        trouble = _differences(calls, self._ranks)
        if trouble:
            title = f"collective {self._number} of group {self.name} differs between its ranks"
            self._fail(DivergenceError(f"{title}{trouble}"), list(range(self.size())))

    def _key(self, member: int, number: int | None = None) -> str:
        return f"{self._space}/{self._number if number is None else number}/{member}"

    def _calls(self, own: Call) -> list[Call]:
        # the calls of all ranks, in rank order; wait until all are there
        keys = [self._key(member) for member in range(self.size())]
        began, pause_s, looks = time.monotonic(), 1e-4, 0
        waiting = f"waiting/{self._ranks[self.rank()]}"
        while not self._store.check(keys):
            waited = time.monotonic() - began
            if waited > _PATIENCE_S or waited > self._timeout_s:
                if looks == 0:
                    self._store.set(waiting, f"collective {self._number} of group {self.name} ({own})")
                looks += 1
                self._look(keys, waited)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02 if waited < _PATIENCE_S else 0.2)
        if looks:
            self._store.delete_key(waiting)
        return [Call(**json.loads(value)) for value in self._store.multi_get(keys)]

    def _look(self, keys: list[str], waited_s: float) -> None:
        # check on late ranks: raise if another rank has found the reason, if a rank has died, or if the time is up
        verdict = self._key(-1)
        absent = [member for member, key in enumerate(keys) if not self._store.check([key])]
        if not absent:
            return
        present = [member for member in range(len(keys)) if member not in absent]
        if self._store.check([verdict]):
            self._fail(PeerError(self._store.get(verdict).decode()), present)
        processes = {member: self._process(member) for member in absent}
        dead = [member for member, (_, pid, host) in processes.items() if host == machine() and not is_running(pid)]
        if not dead and waited_s <= self._timeout_s:
            return
        if dead and any(self._store.check([keys[member]]) for member in dead):
            return  # it arrived between the two checks, and ended after that
        call = Call(**json.loads(self._store.get(keys[present[0]])))
        lines = [f"{_name(present, self._ranks)} call{'s' * (len(present) == 1)} {call}"]
        lines += [self._about(member, member in dead) for member in (dead or absent)[:8]]
        text = f"collective {self._number} of group {self.name}: " + ";\n  ".join(lines)
        text += "\nStart the same command again with --auto-resume." if dead else ""
        self._fail(PeerError(self._store.compare_set(verdict, "", text).decode()), present)

    def _process(self, member: int) -> tuple[str, int, str]:
        key = f"process/{self._ranks[member]}"
        host, pid, where = json.loads(self._store.get(key)) if self._store.check([key]) else ("?", os.getpid(), "?")
        return str(host), int(pid), str(where)

    def _about(self, member: int, dead: bool) -> str:
        rank, last, waiting = self._ranks[member], self._key(member, self._number - 1), f"waiting/{self._ranks[member]}"
        host, pid, where = self._process(member)
        text = f"rank {rank} has not come within {self._timeout_s:g} s"
        if dead:
            text = f"rank {rank} (pid {pid} on {host}) has died"
        if not dead and where == machine() and is_stopped(pid):
            text += f": it was stopped by a signal (pid {pid} on {host})"
        if self._store.check([last]):
            last_call = Call(**json.loads(self._store.get(last)))
            text += f", its last collective of this group was {self._number - 1}: {last_call}"
        else:
            text += ", it has made no collective of this group"
        if self._store.check([f"failed/{rank}"]):  # it ended because of a failure in another group
            text += f", and this was its last word:\n{self._store.get(f'failed/{rank}').decode()}"
        elif not dead and self._store.check([waiting]):
            text += f"; it waits in {self._store.get(waiting).decode()}"
        return text

    def _fail(self, error: ReportedError, present: list[int]) -> NoReturn:
        # once the other ``present`` ranks know it too, since this process may be the one that hosts the store
        error.on_all_ranks = any(self._ranks[member] == 0 for member in present)  # then rank 0 reports it for all
        self._store.set(f"failed/{self._ranks[self.rank()]}", str(error))
        self._store.set(f"{self._key(self.rank())}/seen", "1")
        seen, deadline = [f"{self._key(member)}/seen" for member in present], time.monotonic() + _FAREWELL_S
        while not self._store.check(seen) and time.monotonic() < deadline:
            time.sleep(0.02)
        raise error


def _differences(calls: list[Call], ranks: list[int]) -> str:
    # describe the mismatches between the calls of a group's ranks, as the end of a sentence; "" if they match
    kinds = _alike([call.what for call in calls])
    if len(kinds) > 1:
        most = max(kinds, key=len)
        others = [member for kind in kinds if kind is not most for member in kind]
        verdict = f": {_name(others, ranks)} diverge{'s' * (len(others) == 1)}" if 2 * len(most) > len(calls) else ""
        same = _alike([str(call) for call in calls])
        lines = [f"\n  {_name(kind, ranks)} call{'s' * (len(kind) == 1)} {calls[kind[0]]}" for kind in same[:8]]
        return f"{verdict}{''.join(lines)}\nEvery rank of a group must make the same calls in the same order."
    wrong = [
        f"\n  rank {ranks[i]} sends {sender.send[j]} elements to rank {ranks[j]}, which expects {receiver.receive[i]}"
        for i, sender in enumerate(calls) for j, receiver in enumerate(calls)
        if sender.send and receiver.receive and sender.send[j] != receiver.receive[i]
    ]  # fmt: skip
    if not wrong:
        return ""
    places = [f"\n  {_name(kind, ranks)}: {calls[kind[0]]}" for kind in _alike([str(call) for call in calls])[:8]]
    return f":{''.join(wrong[:8])}{''.join(places)}"


def _alike(texts: list[str]) -> list[list[int]]:
    members: dict[str, list[int]] = {}
    for member, text in enumerate(texts):
        members.setdefault(text, []).append(member)
    return list(members.values())


def _name(members: list[int], ranks: list[int]) -> str:
    # name group members by their global ranks: "rank 1" or "ranks 0, 2"
    numbers = [str(ranks[member]) for member in members]
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers[:8])}{more}"


def _place() -> str:
    # the innermost two frames outside this folder; the second distinguishes the callers of a layer's helper
    places: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(places) < 2:
        path = frame.f_code.co_filename
        if not path.startswith(_HERE) and os.path.basename(path) != "contextlib.py":
            short = path.removeprefix(_PACKAGE) if path.startswith(_PACKAGE) else os.sep.join(path.split(os.sep)[-2:])
            places.append(f"{short}:{frame.f_lineno}")
        frame = frame.f_back
    return " from ".join(places) or "?"
