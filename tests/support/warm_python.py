"""A stand-in for ``python`` that answers at once: what torch and this package take to import is imported once, and every program is a fork.

``WarmPython(folder)`` starts a server that has imported them, and puts two small programs into ``folder``: ``python``
and ``megatron-sp``. Each sends its command line, environment, working directory and standard streams to the server,
which forks; the child becomes the program that was asked for. A page of documentation with twenty commands then costs
seconds of a core instead of a minute. What a child does is what ``python`` would do: scripts, ``-m``, ``-c``, standard
input; its exit code and signals go through.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]

_PROGRAM = """#!{python} -SE
import array, json, os, signal, socket, sys
words = {before!r} + sys.argv[1:]
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
server.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
request = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
server.sendall(len(request).to_bytes(8, "big") + request)
answer = server.makefile("r")
pid = int(answer.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
sys.exit(int(answer.readline() or 137))
"""


class WarmPython:
    """The server and the two programs; a context manager.

    Attributes:
        folder: has ``python`` and ``megatron-sp``; to be first in PATH.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        address = str(folder / "socket")
        for name, before in (("python", []), ("megatron-sp", ["-m", "megatron_sp"])):
            (folder / name).write_text(_PROGRAM.format(python=sys.executable, before=before, address=address))
            (folder / name).chmod(0o755)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # OpenMP with more threads hangs after a fork
        self._server = subprocess.Popen([sys.executable, __file__, address], stdout=subprocess.PIPE, text=True, env=environment)
        assert self._server.stdout is not None and self._server.stdout.readline() == "ready\n"

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._server.wait()


def _serve(address: str) -> None:
    sys.path.insert(0, str(ROOT))
    import numpy.random  # noqa: F401
    import torch.distributed.run
    import yaml  # noqa: F401

    import megatron_sp.commands.cli
    import megatron_sp.commands.pretrain
    import megatron_sp.tasks.gpt  # noqa: F401
    from megatron_sp.config.flags.settings import targets

    targets()  # the table of all flags is kept
    torch.set_num_threads(1)
    leaf = torch.ones(1, requires_grad=True)
    torch.autograd.grad(leaf * 1, leaf, torch.ones(1))  # imports half a second of modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(16)
        print("ready", flush=True)
        while os.getppid() != 1:
            connection = server.accept()[0]
            if os.fork() == 0:
                server.close()
                _become(connection)
            connection.close()


def _become(connection: socket.socket) -> None:
    code, me, leave = 1, os.getpid(), os._exit

    def exit_with(code: int) -> NoReturn:
        """End this process or a fork of it; programs call ``os._exit`` themselves."""
        if os.getpid() == me:
            with contextlib.suppress(OSError):
                connection.sendall(f"{code}\n".encode())
        leave(code)

    os._exit = exit_with
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile("rb") as stream:
            words, environment, cwd = json.loads(stream.read(int.from_bytes(stream.read(8), "big")))
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, buffering=1) for n, mode in ((0, "r"), (1, "w"), (2, "w")))
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        connection.sendall(f"{me}\n".encode())
        threading.Thread(target=_die_with, args=(connection,), daemon=True).start()
        _run(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        if os.getpid() == me:
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _die_with(connection: socket.socket) -> None:
    """The program that was started has been killed: so is this one."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _run(words: list[str]) -> None:
    while words and words[0] in ("-u", "-S", "-E", "-s"):
        words = words[1:]
    if words[:1] == ["-m"]:
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        sys.modules.pop(words[1], None)  # the server has imported torchrun's
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[:1] in (["-c"], ["-"]):
        text = words[1] if words[0] == "-c" else sys.stdin.read()
        sys.argv, sys.path[0] = [words[0], *words[2 if words[0] == "-c" else 1 :]], ""
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write(text)
            script.flush()
            runpy.run_path(script.name, run_name="__main__")
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _serve(sys.argv[1])
