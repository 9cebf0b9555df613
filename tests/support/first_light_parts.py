"""Parts of a first light that go wrong in every way, for the processes of its runner; they import no torch.

The folder in ``FIRST_LIGHT_TEST`` is where they tell what they did: ``calls`` has a line for each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from first_light.plan import Part
from first_light.records import Context

SECONDS = 3600.0  # of what hangs: it is killed long before
_SLEEP = "import time; time.sleep(3600)"


def part(name: str, function: str = "", limit_s: float = 100.0, least_s: float = 10.0) -> Part:
    """A part of this module, by the name of its function."""
    return Part(name, f"the part {name}", f"support.first_light_parts:{function or name}", limit_s, least_s)


def folder() -> Path:
    return Path(os.environ["FIRST_LIGHT_TEST"])


def _tell(what: str) -> None:
    with open(folder() / "calls", "a") as file:
        file.write(f"{what}\n")


def good(context: Context) -> None:
    """Two records."""
    _tell("good")
    context.record("a table", "first", "ok", error=1e-6)
    context.record("a table", "second", time_ms=1.5, on=context.device)


def also_good(context: Context) -> None:
    _tell("also_good")
    context.record("another table", "one", "ok")


def wrong(context: Context) -> None:
    """A record that is wrong."""
    context.record("a table", "a kernel", "wrong", error=2.0)


def raises(context: Context) -> None:
    """Raises after its first record."""
    context.record("a table", "before", "ok")
    raise ValueError("the kernel\nwas not amused")


def dies(context: Context) -> None:
    """Ends by a signal, as a broken kernel does."""
    context.record("a table", "before", "ok")
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(context: Context) -> None:
    """Ends at once, without a word."""
    os._exit(3)


def leaves_a_child(context: Context) -> None:
    """Ends well, but for a process that it has started in a session of its own."""
    child = subprocess.Popen([sys.executable, "-c", _SLEEP], start_new_session=True)
    (folder() / "child").write_text(str(child.pid))


def hangs(context: Context) -> None:
    """Hangs beside processes of its own: one in its group, one that has left it, and a folder of temporary files."""
    context.record("a table", "before", "ok")
    children = [subprocess.Popen([sys.executable, "-c", _SLEEP], start_new_session=new) for new in (False, True)]
    Path(os.environ["TMPDIR"], "left behind").write_text("x")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told = folder() / "hangs.new"
    told.write_text(" ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children))) + f"\n{os.environ['TMPDIR']}")
    told.rename(folder() / "hangs")
    _tell("hangs")
    time.sleep(SECONDS)


def hangs_once(context: Context) -> None:
    """Hangs when it is called for the first time."""
    if not (folder() / "hangs").exists():
        hangs(context)
    _tell("hangs_once")
    context.record("a table", "at last", "ok")
