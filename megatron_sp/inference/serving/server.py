"""The server process: socket, engine, and graceful shutdown.

On SIGTERM and SIGINT no new requests are accepted, present ones have a grace period to finish, the rest then gets 503,
and the process exits with 0. A second SIGINT ends the grace period at once.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Callable
from typing import Any

from megatron_sp.inference.serving.app import Front, build_app
from megatron_sp.ops import availability
from megatron_sp.utils.errors import ConfigError

_LAST_WORDS_S = 5.0  # to write the 503s


def require_packages() -> None:
    """Raise ConfigError, with installation instructions, if starlette or uvicorn is not available."""
    lacking = [kernel.reason for name in ("starlette", "uvicorn") if not (kernel := availability.find(name)).available]
    if lacking:
        raise ConfigError(f"serving needs two small packages: {'; '.join(lacking)}. Install them with: pip install starlette uvicorn")


def is_loopback(host: str) -> bool:
    """Return whether a host address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def warning_about(host: str, *, has_key: bool) -> str | None:
    """Return a warning for an address that is reachable from other machines; None for a loopback address."""
    if is_loopback(host):
        return None
    who = "whoever has the API key" if has_key else "anybody, without a password,"
    return f"warning: --host {host} lets {who} on the network use this model, and nothing is encrypted (docs/how-to/serve.md)"


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but not yet listening.

    Raises:
        ConfigError: the address does not exist, or the port is in use.
    """
    made: socket.socket | None = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        if made is not None:
            made.close()
        raise ConfigError(
            f"--host {host} --port {port} cannot be used: {error.strerror or error}; choose another port, or 0 for any"
        ) from None
    return made


def serve(front: Front, door: socket.socket, grace_s: float, ready: Callable[[], None]) -> None:
    """Serve requests until a signal arrives; return when all are finished.

    Args:
        front: its engine must have been started; it is stopped at the end.
        door: a socket from ``open_socket``.
        grace_s: grace period for requests to finish.
        ready: called when the server accepts requests.
    """
    uvicorn: Any = availability.load("uvicorn")

    class Server(uvicorn.Server):  # type: ignore[misc, name-defined]
        def handle_exit(self, sig: int, frame: Any) -> None:
            going: bool = self.should_exit  # type: ignore[has-type]
            if going and sig == signal.SIGINT:
                self.force_exit = True
            front.engine.drain(0.0 if self.force_exit else grace_s)
            self.should_exit = True

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            ready()

        async def on_tick(self, counter: int) -> bool:
            return bool(await super().on_tick(counter)) or bool(front.engine.broken)

    config = uvicorn.Config(
        build_app(front), log_level="warning", access_log=False, server_header=False, timeout_keep_alive=30, lifespan="off",
        timeout_graceful_shutdown=int(grace_s + _LAST_WORDS_S) + 1, ws="none",
    )  # fmt: skip
    try:
        Server(config).run(sockets=[door])
    finally:
        front.engine.stop()
