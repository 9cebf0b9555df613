"""The way out of every program, and its output, which may be full, closed, or gone with a terminal."""

from __future__ import annotations

import atexit
import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from megatron_sp.utils import streams
from megatron_sp.utils.entry_point import leave, run_program
from megatron_sp.utils.errors import DataError
from megatron_sp.utils.streams import OutputLost, Stream


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def gone_terminal() -> int:
    master, terminal = os.openpty()
    os.close(master)
    return terminal


FAULTS: dict[str, tuple[Callable[[], int], int]] = {
    "full": (lambda: os.open("/dev/full", os.O_WRONLY), errno.ENOSPC),
    "pipe": (closed_pipe, errno.EPIPE),
    "terminal": (gone_terminal, errno.EIO),
}


def in_child(body: Callable[[], object], stdout: int | None = None, stderr: int | None = None) -> tuple[int, str, str]:
    """(exit code, what was said on stdout, on stderr) of a fork; the streams are made anew on the given descriptors, or on pipes."""
    ends = [os.pipe() if fd is None else None for fd in (stdout, stderr)]
    pid = os.fork()
    if pid == 0:
        try:
            for number, (fd, end) in enumerate(zip((stdout, stderr), ends, strict=True), 1):
                os.dup2(end[1] if end else fd, number)  # type: ignore[arg-type]
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            body()
        finally:
            os._exit(99)
    texts = []
    for end in ends:
        if end is None:
            texts.append("")
            continue
        os.close(end[1])
        with open(end[0]) as said:
            texts.append(said.read())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), texts[0], texts[1]


def ended_by(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        print("a result")
        raise error

    return main


@pytest.mark.parametrize(
    "main, code, said",
    [
        (lambda: print("a result"), 0, ""),
        (lambda: 5, 5, ""),
        (ended_by(DataError("no such thing")), 4, "error: no such thing\n"),
        (ended_by(SystemExit(None)), 0, ""),
        (ended_by(SystemExit(3)), 3, ""),
        (ended_by(SystemExit("why")), 1, "why\n"),
        (ended_by(KeyboardInterrupt()), 130, "\n"),
    ],
)
def test_the_code_is_mains_and_all_is_flushed(main: Callable[[], int | None], code: int, said: str) -> None:
    got, out, err = in_child(lambda: run_program(main))
    assert (got, err) == (code, said) and out in ("a result\n", "")


def test_a_mistake_of_ours_has_its_traceback() -> None:
    code, out, err = in_child(lambda: run_program(ended_by(ValueError("oh"))))
    assert (code, out) == (1, "a result\n") and err.startswith("Traceback") and err.endswith("ValueError: oh\n")


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("much", [1, 100_000])
def test_a_result_that_nobody_takes_is_no_success(name: str, much: int) -> None:
    """At the last flush or in the middle of things; a program of unix that met a closed pipe would have been ended by SIGPIPE."""
    made, number = FAULTS[name]
    code, _, err = in_child(lambda: run_program(lambda: print("a result" * much)), stdout=made())
    if number == errno.EPIPE:
        assert (code, err) == (141, "")
    else:
        assert code == 6 and err == f"error: standard output cannot be written: {os.strerror(number)}\n"


@pytest.mark.parametrize("name", FAULTS)
def test_messages_that_nobody_takes_change_nothing(name: str) -> None:
    def main() -> int:
        print("a message" * 10_000, file=sys.stderr, flush=True)
        print("a result")
        return 4

    assert in_child(lambda: run_program(main), stderr=FAULTS[name][0]())[:2] == (4, "a result\n")
    assert in_child(lambda: run_program(ended_by(DataError("x"))), stderr=FAULTS[name][0]())[:2] == (4, "a result\n")


@pytest.mark.parametrize("name", FAULTS)
def test_a_training_goes_on_and_knows(name: str) -> None:
    made, number = FAULTS[name]

    def body() -> None:
        streams.survive()
        for _ in range(3):
            print("a step" * 10_000, flush=True)
        assert streams.lost() == {"stdout": os.strerror(number)}
        leave(0)

    code, _, err = in_child(body, stdout=made())
    assert (
        code == 0
        and err == f"warning: standard output cannot be written ({os.strerror(number)}): its output there is lost, the program continues\n"
    )

    def both() -> None:
        streams.survive()
        print("a step", flush=True)
        print("a warning", file=sys.stderr)
        assert set(streams.lost()) == {"stdout", "stderr"}
        leave(0)

    assert in_child(both, stdout=made(), stderr=made())[0] == 0


def test_streams_that_were_closed_from_the_start(tmp_path: Path) -> None:
    """No file may get their descriptors: what a signal handler says on 2 would go into it."""
    program = f"""
import os, sys
from megatron_sp.utils import streams
streams.survive()
kept = open({str(tmp_path / "a file")!r}, "w")
assert kept.fileno() > 2, kept.fileno()
print("x", flush=True); print("x", file=sys.stderr, flush=True); os.write(2, b"x")
assert not sys.stdout.isatty() and not hasattr(sys.stdout, "buffer")
from megatron_sp.utils.entry_point import leave
leave(7 if set(streams.lost()) == {{"stdout", "stderr"}} else 1)
"""
    command = ["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, program]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 7
    assert (tmp_path / "a file").read_bytes() == b""


def test_a_letter_that_the_encoding_has_not() -> None:
    raw = io.BytesIO()
    stream = Stream(io.TextIOWrapper(raw, "ascii"), "stdout", is_result=True)
    stream.writelines(["\u00e9\n", "\U0001f600"])
    stream.flush()
    assert raw.getvalue() == b"?\n?" and stream.error is None and stream.encoding == "ascii"


def test_one_within_another_and_streams_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with streams.checked(), streams.checked():
        print("inside")
    assert (sys.stdout, sys.stderr) == before and capsys.readouterr().out == "inside\n"


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "full")


def test_a_loss_that_was_swallowed_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OutputLost) as lost, streams.checked():
        try:
            print("x")
        except SystemExit:
            print("y")
    assert lost.value.code == 6


def test_what_was_registered_for_the_end_is_done_by_the_process_that_registered_it(tmp_path: Path) -> None:
    program = """
import atexit, os, sys, threading
from megatron_sp.utils.entry_point import leave, run_program
if sys.argv[1] == "torch":
    sys.modules["torch"] = sys  # looks loaded, so the interpreter's own end is left out, which would do all of this
atexit.register(os.write, 1, b"registered\\n")
threading.Thread(target=lambda: (threading.main_thread().join(0.01), os.write(1, b"a thread\\n"))).start()
if sys.argv[1] == "fork":
    if os.fork() == 0:
        leave(0)
    os.wait()
run_program(lambda: print("main\\n", end=""))  # one write: the thread writes at any time
"""
    for word in ("plain", "fork", "torch"):
        done = subprocess.run([sys.executable, "-c", program, word], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and sorted(done.stdout.split("\n")) == ["", "a thread", "main", "registered"], done


def test_after_a_failure_too_what_was_logged_and_printed_is_there() -> None:
    program = """
import logging.handlers, sys
from megatron_sp.utils.entry_point import leave
sys.modules["torch"] = sys  # looks loaded, so that the interpreter's own end is left out
logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, target=logging.StreamHandler(sys.stderr)))
logging.warning("logged")
print("printed")
leave(7, as_usual=False)
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, env=buffered)
    assert (done.returncode, done.stdout, done.stderr) == (7, "printed\n", "logged\n")


def _never(*_: Any) -> None:
    raise AssertionError("called")


def test_after_a_failure_nobody_waits() -> None:
    def body() -> None:
        atexit.register(_never)
        leave(7, as_usual=False)

    assert in_child(body) == (7, "", "")
