"""A program that ends while a thread of gloo's wants the interpreter: what a group that somebody still refers to may do at any time.

    python backend_at_exit.py run_main|run_program CODE

The thread is in a callback, after a read that lets go of the interpreter. The interpreter's tear-down, if there is
one, wakes it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from megatron_sp.training.setup import run_main
from megatron_sp.utils.entry_point import run_program
from megatron_sp.utils.launch import Launch

SLEEPER, WAKER = os.pipe()
KEPT: list[object] = []


class Torn:
    """Wakes the thread when it is torn down itself."""

    sleep = staticmethod(time.sleep)

    def __del__(self, write: Callable[[int, bytes], int] = os.write, waker: int = WAKER) -> None:
        write(waker, b"x")
        self.sleep(30)  # the thread ends the process long before


def work() -> None:
    """Leave a thread of gloo's in a callback."""
    store, groups = dist.HashStore(), {}

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    called = threading.Event()

    def call_back(_: object) -> None:
        called.set()
        os.read(SLEEPER, 1)

    first = groups[0].allreduce([torch.ones(1)])
    KEPT.extend([groups, first.get_future().then(call_back)])
    sys.torn = Torn()  # type: ignore[attr-defined]  # a module that nothing refers to in the end
    groups[1].allreduce([torch.ones(1)]).wait()
    called.wait()


def main() -> int:
    work()
    print("all work is done")
    return int(sys.argv[2])


if __name__ == "__main__":
    if sys.argv[1] == "run_main":
        run_main(lambda _: main(), Launch.from_env())
    else:
        run_program(main)
