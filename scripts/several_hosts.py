"""What launch.sh must know before one of several hosts joins a job: this host's address on the way to the others, and its interface.

``several_hosts.py NODE_RANK MASTER_ADDR MASTER_PORT TIMEOUT_S`` prints "ADDRESS INTERFACE" (INTERFACE is "-" where it
cannot be told). Without it, torchrun and gloo take the address that the host's own name stands for: 127.0.1.1 on many
Debian machines, which the other hosts cannot reach. A master address that is not this host's, a port in use, a name
nobody knows, and a master that does not answer end it with one message: exit code 2 for what the variables say, 7 for a
host that does not come. Only the standard library is used.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import sys
import time

_SIOCGIFADDR = 0x8915


class Refusal(Exception):
    """A message for the user.

    Attributes:
        code: of the process.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def resolve(host: str, port: int) -> tuple[int, str]:
    """(address family, numeric address) of a host.

    Raises:
        Refusal: the name is not known here.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Refusal(
            2, f"MASTER_ADDR={host} cannot be looked up on this host ({error.strerror}): give the address of host 0"
        ) from None
    return family, str(address[0])


def local_address(family: int, address: str, port: int) -> str:
    """The address this host sends from towards ``address``; nothing is sent.

    Raises:
        Refusal: no network leads there.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise Refusal(
                2, f"no network of this host leads to MASTER_ADDR={address} ({error.strerror}): see `ip route`"
            ) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the interface with this IPv4 address; "-" if there is none (a further address of an interface, IPv6)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "-"


def check_can_listen(family: int, host: str, address: str, port: int) -> None:
    """See that this host, the first, can be met at ``address:port``.

    Raises:
        Refusal: the address is another host's, or somebody has the port.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise Refusal(
                    2,
                    f"NODE_RANK=0 says that this is the first host, but MASTER_ADDR={host} is no address of it: the job meets at"
                    " host 0, so give all hosts the address of this one, or give this one another NODE_RANK",
                ) from None
            if error.errno == errno.EADDRINUSE:
                raise Refusal(
                    2,
                    f"port {port} of this host is in use, perhaps by another job: give all hosts another MASTER_PORT, such as {port + 1}",
                ) from None
            raise Refusal(
                2, f"this host cannot listen at {host}:{port} ({error.strerror}): give all hosts another MASTER_PORT"
            ) from None


def wait_for_master(family: int, host: str, address: str, port: int, timeout_s: float) -> None:
    """Wait until the first host answers.

    Raises:
        Refusal: it has not within ``timeout_s``.
    """
    began, launcher = time.monotonic(), os.getppid()
    told = False
    while os.getppid() == launcher:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(2.0)
            try:
                probe.connect((address, port))
                return
            except OSError as error:
                reason = error.strerror or "no answer"
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise Refusal(
                7,
                f"nobody answers at MASTER_ADDR:MASTER_PORT {host}:{port} after {waited:.0f} s ({reason}): see that host 0 was"
                " started with the same two variables, and that no firewall is between (JOIN_TIMEOUT=SECONDS waits longer)",
            )
        if waited > 5 and not told:
            told = True
            print(f"launch: waiting for host 0 at {host}:{port}", file=sys.stderr, flush=True)
        time.sleep(0.3)
    raise Refusal(7, "the launcher has ended meanwhile")


def main(words: list[str]) -> int:
    node_rank, host, port, timeout_s = int(words[0]), words[1], int(words[2]), float(words[3])
    try:
        family, address = resolve(host, port)
        local = local_address(family, address, port)
        if node_rank == 0:
            check_can_listen(family, host, address, port)
        else:
            wait_for_master(family, host, address, port, timeout_s)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return refusal.code
    print(local, interface_of(local))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
