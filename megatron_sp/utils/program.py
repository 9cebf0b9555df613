"""The outermost frame of every program, and the only way out of its process.

The interpreter's own tear-down is not for a process that has joined a process group: gloo's and NCCL's threads live as long as anybody
refers to their group, and one that asks for the interpreter's lock meanwhile (to let go of a tensor, to call back) is ended by force in the
middle of C++, which aborts the process (`terminate called without an active exception`), after all its work was done. So nobody waits for
that: what was registered for the end is done, what was said is flushed, and ``os._exit`` ends all threads at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from megatron_sp.utils import output
from megatron_sp.utils.errors import EXIT_INTERRUPTED, EXIT_OK, ReportedError

_PID = os.getpid()


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Run a program's ``main`` and leave the process with its code; never returns.

    A failure of standard output has a code of its own (``utils/output.py``), as have a message of ours and Ctrl-C.
    """
    code, as_usual = 1, True
    try:
        with output.checked():
            try:
                code = main() or EXIT_OK
            except ReportedError as error:
                print(f"error: {error}", file=sys.stderr)
                code = error.exit_code
            except SystemExit as end:
                if isinstance(end, output.OutputLost):
                    raise
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
                code = end.code if isinstance(end.code, int) else EXIT_OK if end.code is None else 1
            except KeyboardInterrupt:
                code, as_usual = EXIT_INTERRUPTED, False
                print(file=sys.stderr)
            except Exception:
                as_usual = False
                traceback.print_exc()
    except output.OutputLost as lost:
        code = int(str(lost.code))
    leave(code, as_usual=as_usual)


def leave(code: int, *, as_usual: bool = True) -> NoReturn:
    """End this process, with everything flushed, but without the interpreter's tear-down. From the main thread.

    Args:
        as_usual: do first what an ordinary end does: wait for threads that are no daemons, call what was registered with ``atexit``
            (trackers, temporary folders). After a failure nobody waits. A fork leaves what was registered to its parent.
    """
    if "torch" not in sys.modules and os.getpid() == _PID:  # no backend, no threads of one
        sys.exit(code)
    if as_usual and os.getpid() == _PID:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing's processes do, which also end by os._exit
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # full or closed: that was told when it happened
            stream.flush()
    os._exit(code)
