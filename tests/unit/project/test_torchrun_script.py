"""torchrun's connection to host 0: the kernel ends it when that host is silent for JOIN_TIMEOUT, and torchrun's wrapper says so."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import socket
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
from support.paths import ROOT
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry

SCRIPT = ROOT / "scripts" / "torchrun.py"


@pytest.fixture
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torchrun_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tcp(connection: socket.socket, option: int) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, option)


@pytest.mark.parametrize("join, limit", [(1, 30), (60, 60)])
def test_the_connection_of_the_rendezvous_has_the_limit(program: ModuleType, join: int, limit: int) -> None:
    """JOIN_TIMEOUT, but never so short that a network which stumbles would end a job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = {"is_host": "1", "join_timeout": str(join)}
    handler = program.create_rendezvous(RendezvousParameters(program.BACKEND, f"127.0.0.1:{port}", "job", 1, 1, "127.0.0.1", **words))
    assert handler.get_backend() == program.BACKEND and handler.settings.timeout.join.total_seconds() == join
    (connection,) = program.connections_to(port)
    with connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert tcp(connection, socket.TCP_USER_TIMEOUT) == limit * 1000
        assert tcp(connection, socket.TCP_KEEPIDLE) == tcp(connection, socket.TCP_KEEPINTVL) == limit // 4


def test_looking_at_connections_leaves_none_open(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that lead elsewhere nor, when the limit is set, the one that was looked for; one may close meanwhile."""
    monkeypatch.setattr(program, "create_handler", lambda *_: None)
    monkeypatch.setattr(program, "_Backend", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = server.getsockname()[1]
        monkeypatch.setattr(program, "create_backend", lambda parameters: (None, SimpleNamespace(port=port)))
        with socket.create_connection(("127.0.0.1", port)) as wanted, socket.create_connection(other.getsockname()) as elsewhere:
            listed = os.listdir("/proc/self/fd")
            gone = next(n for n in range(3, 10**6) if str(n) not in listed)
            monkeypatch.setattr(program.os, "listdir", lambda _: [str(gone), *listed])
            monkeypatch.setattr(program, "_is_socket", lambda name: int(name) in (gone, wanted.fileno(), elsewhere.fileno()))
            with warnings.catch_warnings(record=True) as said:  # Python closes what is left open, and says so
                warnings.simplefilter("always")
                program.create_rendezvous(RendezvousParameters(program.BACKEND, "127.0.0.1", "job", 1, 1, join_timeout="60"))
                gc.collect()
            assert [str(w.message) for w in said] == []
            assert tcp(wanted, socket.TCP_USER_TIMEOUT) == 60_000 and tcp(elsewhere, socket.TCP_USER_TIMEOUT) == 0


@pytest.mark.parametrize("seconds, user_ms, idle_s", [(1, 1000, 1), (600, 600_000, 150), (999_999_999, 2_000_000_000, 32_767)])
def test_every_join_timeout_is_one_that_the_kernel_takes(program: ModuleType, seconds: int, user_ms: int, idle_s: int) -> None:
    with socket.socket() as connection:
        program.limit_silence(connection, seconds)
        assert (tcp(connection, socket.TCP_USER_TIMEOUT), tcp(connection, socket.TCP_KEEPIDLE)) == (user_ms, idle_s)


@pytest.mark.parametrize("error, said", [
    (RendezvousConnectionError("reset by peer"), "host 0 or the connection to it was lost (reset by peer)"),
    (RendezvousTimeoutError(), "not all hosts came, or came back, within JOIN_TIMEOUT"),
])  # fmt: skip
def test_what_torchrun_cannot_reach_is_exit_code_7(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    def torchrun(words: list[str]) -> None:
        assert words == ["--nnodes", "2", "train.py"]
        raise error

    monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.setattr(program, "main", torchrun)
    assert program.run(["--nnodes", "2", "train.py"]) == 7
    assert f"error: {said}" in capsys.readouterr().err


class Failure(NamedTuple):
    exitcode: int
    timestamp: int = 0
    pid: int = 77


@pytest.mark.parametrize(
    ("failures", "code", "said"),
    [
        ({0: Failure(-15), 1: Failure(3)}, 3, ""),  # torchrun has ended rank 0
        ({0: Failure(7, 10), 1: Failure(4, 9)}, 4, ""),
        ({0: Failure(7), 1: Failure(-9), 2: Failure(-15)}, 137, "error: rank 1 (pid 77 on "),
        ({1: Failure(-11)}, 139, "was killed by SIGSEGV\n"),
        ({1: Failure(-15)}, 143, "was killed by SIGTERM\n"),
    ],
)
def test_the_worker_that_failed_first_counts(
    program: ModuleType, failures: dict[int, Failure], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.code_of(SimpleNamespace(failures=failures)) == code
    words = capsys.readouterr().err
    assert said in words and words.count("\n") == bool(said)


def test_only_the_first_signal_stops_torchrun(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would break off the wait for the workers' save."""
    monkeypatch.setattr(program.workers, "_terminate_process_handler", program.workers._terminate_process_handler)
    program.stop_once()
    with pytest.raises(program.workers.SignalException):
        program.workers._terminate_process_handler(signal.SIGINT, None)
    program.workers._terminate_process_handler(signal.SIGTERM, None)


def test_what_the_workers_say_themselves_is_not_said_by_torchrun(program: ModuleType) -> None:
    """The words are torchrun's own: where another torch has others, this test tells."""
    sources = "".join(Path(str(module.__file__)).read_text() for module in (program.agent, program.workers))
    for words in program._NOISE:
        assert f'"{words}' in sources
        assert not program.is_news(logging.LogRecord("x", logging.WARNING, "x", 1, f"{words} and more", (), None))
    assert program.is_news(logging.LogRecord("x", logging.WARNING, "x", 1, "Unable to shutdown process %s", (), None))
