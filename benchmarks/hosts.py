"""Two "hosts" on one machine: network namespaces joined by a pair of virtual ethernet devices, slowed to the rate of a real link.

Needs root and Debian's iproute2. Each host is given one core, so that computation on one side does not slow the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType


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
            raise HostsError(f"network namespaces need root and iproute2 (missing: {', '.join(missing) or 'root'}); use --links loopback")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self._remove()
            raise HostsError(f"{' '.join(error.cmd)}: {error.stderr.strip()}; use --links loopback") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str], **options: object) -> subprocess.Popen[str]:
        """Start a program on a host, on one core of its own."""
        core = sorted(os.sched_getaffinity(0))[host % len(os.sched_getaffinity(0))]
        line = ["ip", "netns", "exec", self._names[host], "taskset", "-c", str(core), *command]
        return subprocess.Popen(line, env={**environment, "GLOO_SOCKET_IFNAME": self.interface}, text=True, **options)  # type: ignore[call-overload]

    def _make(self) -> None:
        first, second = self._names
        for name in self._names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", self.interface, "netns", first, "type", "veth", "peer", "name", self.interface, "netns", second)
        for name, address in zip(self._names, self.addresses, strict=True):
            inside = ["ip", "netns", "exec", name]
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", self.interface)
            _run(*inside, "ip", "link", "set", self.interface, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            if self._gbits is not None:
                rate = f"{round(self._gbits * 1000)}mbit"
                _run(
                    *inside, "tc", "qdisc", "add", "dev", self.interface, "root", "tbf", "rate", rate, "burst", "512kb", "latency", "100ms"
                )

    def _remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
