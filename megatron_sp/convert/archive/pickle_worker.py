"""The sandboxed process that interprets foreign pickles: it has three pipes and little memory, and gives up all else first.

The interpreter produces plain data only (``pickle_machine.py``); the process is a second barrier in case it has bugs:
no file can be opened, no process started, no module imported, and memory and time are bounded. Started by
``pickle_tree.PickleReader`` as

    python -I -S -c "..." HEADROOM_BYTES CPU_SECONDS

A request on standard input is 24 bytes, little endian (length of the data, number of consecutive pickles, ``max_cost``
of ``check``), followed by the data. An answer is 8 bytes of length and JSON: {"values": [...], "end": ..., "storages":
[...], "devices": [...]} or {"refused": "..."}. The process exits at the end of its input.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import resource
import struct
import sys
from typing import Any

from megatron_sp.convert.archive.pickle_machine import Machine, Refused, check


def main() -> None:
    """Give up all rights, then answer requests on standard input until it ends."""
    headroom_bytes, cpu_seconds = int(sys.argv[1]), int(sys.argv[2])
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    _give_up_everything(headroom_bytes, cpu_seconds)
    while len(header := requests.read(24)) == 24:
        length, count, max_cost = struct.unpack("<QQQ", header)
        text = _answer(requests.read(length), count, max_cost)
        answers.write(struct.pack("<Q", len(text)) + text)
        answers.flush()
    os._exit(0)  # an ordinary exit raises audit events, which end the process as a failure


def _give_up_everything(headroom_bytes: int, cpu_seconds: int) -> None:
    for limit, value in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_CPU", cpu_seconds),
        ("RLIMIT_AS", _address_space() + headroom_bytes),
        ("RLIMIT_NOFILE", 3),
    ):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # no system has all of these limits
            resource.setrlimit(getattr(resource, limit), (value, value))
    gc.disable()  # no cycle of values outlives a request, and the search for cycles would take most of the time
    sys.addaudithook(_no_event)


def _no_event(event: str, _args: Any) -> None:
    """End the process at any audit event: Python raises one before open, import, exec, ..., none of which is needed here."""
    if event != "builtins.id":  # raised by id(), which ``check`` needs
        os._exit(9)


def _address_space() -> int:
    """Return the bytes of address space in use, or a guess where the system does not report them."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 30


def _answer(data: bytes, count: int, max_cost: int) -> bytes:
    try:
        values, storages, devices, end = [], {}, set(), 0
        for _ in range(count):
            machine = Machine(data, end)
            values.append(machine.run())
            end = machine.at
            storages.update(machine.storages)
            devices |= machine.devices
        check(["(", *values], max_cost)
        result: dict[str, Any] = {"values": values, "end": end, "storages": list(storages.values()), "devices": sorted(devices)}
        return json.dumps(result, default=_bytes, separators=(",", ":")).encode("ascii")
    except Refused as error:
        return json.dumps({"refused": str(error)}).encode("ascii")
    except (MemoryError, RecursionError):
        return json.dumps({"refused": "needs more memory than a checkpoint's pickle of its size does"}).encode("ascii")


def _bytes(value: bytes) -> list[str]:
    return ["b", base64.b64encode(value).decode("ascii")]
