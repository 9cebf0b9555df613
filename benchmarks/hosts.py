"""Two "hosts" on one machine: network namespaces joined by a pair of virtual ethernet devices, slowed to the rate of a real link.

Needs root and Debian's iproute2. Each host is given one core, so that computation on one side does not slow the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

RANKS = 2


class HostsError(RuntimeError):
    """The hosts cannot be made here; the message says what is missing."""


class Hosts:
    """Two namespaces and the link between them; a context manager that takes both away again.

    Args:
        gbits: rate of the link in each direction, Gbit/s; None: as fast as the kernel copies.
    """

    def __init__(self, gbits: float | None) -> None:
        self._gbits = gbits
        self._names = [f"msp{os.getpid()}h{i}" for i in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self.interface = "veth0"

    def __enter__(self) -> Hosts:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing or os.geteuid() != 0:
            raise HostsError(
                f"network namespaces need root and iproute2 (missing: {', '.join(missing) or 'root'}); use --links loopback"
            )
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self._remove()
            raise HostsError(f"{' '.join(error.cmd)}: {error.stderr.strip()}; use --links loopback") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str], **options: object
    ) -> subprocess.Popen[str]:
        """Start a program on a host, on the host's core."""
        line = ["ip", "netns", "exec", self._names[host], "taskset", "-c", str(_core_of(host)), *command]
        return subprocess.Popen(line, env={**environment, "GLOO_SOCKET_IFNAME": self.interface}, text=True, **options)  # type: ignore[call-overload]

    def _make(self) -> None:
        first, second = self._names
        for name in self._names:
            _run("ip", "netns", "add", name)
        _run(
            "ip",
            "link",
            "add",
            self.interface,
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            self.interface,
            "netns",
            second,
        )
        for name, address in zip(self._names, self.addresses, strict=True):
            inside = ["ip", "netns", "exec", name]
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", self.interface)
            _run(*inside, "ip", "link", "set", self.interface, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            if self._gbits is not None:
                rate = f"{round(self._gbits * 1000)}mbit"
                _run(
                    *inside,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    self.interface,
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "512kb",
                    "latency",
                    "100ms",
                )

    def _remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run_workers(
    link: str,
    script: str,
    interpreter: str,
    task: Mapping[str, Any],
    environment: Mapping[str, str],
    ranks: int = RANKS,
) -> dict[str, Any]:
    """Run ``script --worker JSON`` on two ranks with one core each and return the JSON that rank 0 prints last.

    More ranks share the cores, and on two hosts the link: the first half of them is on the first host.

    Args:
        link: Gbit/s of a link between two hosts, or "loopback".
        script: of the benchmark.
        interpreter: that runs it.
        task: for the workers; rank, their number, address and port are added.
        environment: of the workers.
        ranks: how many.
    Raises:
        HostsError: two hosts cannot be made here.
        RuntimeError: a rank failed.
    """
    with contextlib.ExitStack() as stack:
        hosts = None if link == "loopback" else stack.enter_context(Hosts(float(link)))
        port = _free_port() if hosts is None else 29577
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_end, processes)  # before the hosts go
        signal.signal(signal.SIGTERM, _leave)
        for rank in range(ranks):
            address = "127.0.0.1" if hosts is None else hosts.addresses[0]
            place = {"rank": rank, "ranks": ranks, "address": address, "port": port}
            command = [interpreter, script, "--worker", json.dumps({**task, **place})]
            if hosts is not None:
                processes.append(hosts.start(rank * 2 // ranks, command, environment, stdout=subprocess.PIPE))
                continue
            line = ["taskset", "-c", str(_core_of(rank)), *command]
            processes.append(subprocess.Popen(line, env=dict(environment), stdout=subprocess.PIPE, text=True))
        texts = [process.communicate()[0] for process in processes]
    for process in processes:
        if process.returncode:
            raise RuntimeError(f"a rank ended with code {process.returncode}; its messages are above")
    return dict(json.loads(texts[0].strip().splitlines()[-1]))


def join(task: Mapping[str, Any]) -> None:
    """A worker's side: one thread, and the process group of all."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    ranks = task["ranks"]
    store = dist.TCPStore(task["address"], task["port"], ranks, task["rank"] == 0, timeout=timedelta(minutes=5))
    dist.init_process_group("gloo", store=store, rank=task["rank"], world_size=ranks, timeout=timedelta(minutes=10))


@contextlib.contextmanager
def answering(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A worker's side, to its end: what is put into the dict on rank 0 is what ``run_workers`` returns."""
    import torch.distributed as dist

    sys.stdout, out = sys.stderr, sys.stdout  # what libraries print is not the answer
    join(task)
    answer: dict[str, Any] = {}
    yield answer
    if task["rank"] == 0:
        print(json.dumps(answer), file=out, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def in_turn(task: Mapping[str, Any], contenders: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of each contender in each of ``rounds``, one after the other, after ``warmup`` rounds that do not count. Collective."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(task["warmup"] + task["rounds"]):
        for name, run in contenders.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            dist.barrier()
            if index >= task["warmup"]:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def _core_of(rank: int) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank % len(cores)]


def _leave(*_: object) -> None:
    """Out as by an exception, so that hosts and workers go; `timeout` sends its signal twice."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()  # nothing happens to those that have ended


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
