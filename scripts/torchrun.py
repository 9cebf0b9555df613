"""torchrun, as launch.sh calls it: what a run says of its end is not drowned, and other hosts that are out of reach end it.

``torchrun.py [flags of torchrun] SCRIPT ...``. Ctrl-C reaches torchrun and all of its workers, and these save and say so;
torchrun reports two warnings for each and a traceback, and a second signal breaks off its wait for the save. Here the
first signal counts, and the exit code is that of the worker that failed first, with a line if a signal killed it.

``--rdzv-backend reachable-c10d`` is for several hosts. torchrun asks host 0's store for news twice a second, over one
connection and without a time-out: if the network is cut, the answer never comes, torchrun sees no more of its own workers
or of a signal, and the kernel gives up after some 15 minutes (tcp(7), tcp_retries2). Here the kernel gives up when host 0
has been silent for ``join_timeout``, which is how long hosts wait for each other anyway, or for 30 s if that is more.
That a host is slow does not count: its kernel answers, whatever its processes do.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from types import FrameType

try:
    from torch.distributed.elastic.agent.server import api as agent
    from torch.distributed.elastic.multiprocessing import api as workers
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.elastic.rendezvous import (
        RendezvousConnectionError,
        RendezvousHandler,
        RendezvousParameters,
        RendezvousTimeoutError,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
    from torch.distributed.run import main
except (ImportError, MemoryError) as error:  # too little address space looks like this
    print(
        f"error: torch cannot be imported: {error or type(error).__name__} (doctor says what is missing here)",
        file=sys.stderr,
    )
    sys.exit(2)

BACKEND = "reachable-c10d"
EXIT_PEER_LOST = 7
_NOISE = ("Received %s death signal", "Sending process %s closing signal", "failed (exitcode: %s)")
_LEAST_S = 30  # a network may stumble for so long; torchrun's own patience with a silent host is 15 s
_PROBES = 4  # questions to a silent host within the time-out
_MOST_S = 2_000_000  # in milliseconds still an int of the kernel's
_MOST_IDLE_S = 32_767  # tcp(7), TCP_KEEPIDLE


class _Backend(C10dRendezvousBackend):
    @property
    def name(self) -> str:
        """torchrun compares it with the name that was asked for."""
        return BACKEND


def limit_silence(connection: socket.socket, seconds: int) -> None:
    """Have the kernel give a TCP connection up when the other host's kernel has not answered for so long.

    Covers both what was sent and not acknowledged (TCP_USER_TIMEOUT) and a reply that is waited for (the probes of
    SO_KEEPALIVE).
    """
    seconds = min(seconds, _MOST_S)
    pause = max(1, min(seconds // _PROBES, _MOST_IDLE_S))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


def connections_to(port: int) -> list[socket.socket]:
    """This process's TCP connections to a port, wherever in the process they were made, as sockets of the caller's own to close."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd") if _is_socket(name)]  # before any is opened here
    found = []
    for number in numbers:
        try:
            connection = socket.socket(fileno=os.dup(number))
        except OSError:
            continue  # closed since
        if _is_to(connection, port):
            found.append(connection)
        else:
            connection.close()
    return found


def _is_socket(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except OSError:
        return False  # closed since


def _is_to(connection: socket.socket, port: int) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    try:
        return bool(connection.getpeername()[1] == port)
    except OSError:
        return False  # it listens


def create_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """torchrun's c10d rendezvous, over a connection that ends when host 0 is silent for ``join_timeout`` seconds."""
    _, store = create_backend(parameters)
    for connection in connections_to(store.port):
        with connection:
            limit_silence(connection, max(_LEAST_S, int(parameters.get("join_timeout", 600))))
    return create_handler(store, _Backend(store, parameters.run_id), parameters)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a line of torchrun's log says what the workers, or the end of this program, do not say better."""
    return not str(record.msg).startswith(_NOISE)


def stop_once() -> None:
    """Have torchrun stop at the first signal and wait for its workers, whatever follows: launch.sh's own signal, an impatient user's.

    It still kills them when their time is over (TORCH_ELASTIC_SHUTDOWN_TIMEOUT).
    """
    stop, seen = workers._terminate_process_handler, list[int]()

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) == 1:
            stop(number, frame)

    workers._terminate_process_handler = handle


def code_of(error: ChildFailedError) -> int:
    """The exit code of the worker that failed first; says which one a signal has killed, since it could not do so itself."""

    def consequences_last(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        code = item[1].exitcode
        return code == -signal.SIGTERM, code > 0, item[1].timestamp  # torchrun ends with SIGTERM whoever is left

    rank, first = min(error.failures.items(), key=consequences_last)
    if first.exitcode > 0:
        return int(first.exitcode)
    hint = ": by the system, if there was no memory left" if first.exitcode == -signal.SIGKILL else ""
    name = signal.Signals(-first.exitcode).name
    print(f"error: rank {rank} (pid {first.pid} on {socket.gethostname()}) was killed by {name}{hint}", file=sys.stderr)
    return 128 - int(first.exitcode)


def run(words: list[str]) -> int:
    """The exit code of the worker that failed first, 128 + the signal that stopped torchrun, or 7 if other hosts are out of reach."""
    rendezvous_handler_registry.register(BACKEND, create_rendezvous)
    for module in (agent, workers):
        module.logger.addFilter(is_news)
    stop_once()
    try:
        main(words)
    except workers.SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        return code_of(error)
    except RendezvousConnectionError as error:
        print(f"error: host 0 or the connection to it was lost ({error.__cause__ or error})", file=sys.stderr)
        return EXIT_PEER_LOST
    except RendezvousTimeoutError:
        print(
            "error: not all hosts came, or came back, within JOIN_TIMEOUT: see that each has its own NODE_RANK",
            file=sys.stderr,
        )
        return EXIT_PEER_LOST
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
