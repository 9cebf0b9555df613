"""Runs functions of ``checks`` under Triton's interpreter, in a process of its own: it is chosen before kernels are decorated.

``python -m kernels.interpreter`` reads calls from standard input, one JSON object a line, and answers each with a line:
an empty string, or the traceback.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


@cache
def _server() -> subprocess.Popen[str]:
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1",
    }  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, "-m", "kernels.interpreter"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.kill)
    return server


def interpret(check: str, *arguments: Any) -> None:
    """Run a function of ``checks`` under the interpreter; fails with its traceback."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps([check, arguments]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the interpreter's process has ended: its message is above"
    problem = json.loads(answer)
    assert not problem, problem


def main() -> None:
    """Answer calls until there are no more."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from kernels import checks
    from megatron_sp.ops.kernels import launch

    # by default a GPU's maximum is the operand that is not NaN; Triton's interpreter has NaN
    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    multiply = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        """The product of what its operands are; the interpreter's takes bf16, which it has as integers, for these integers."""
        a, b = (
            TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        )
        return multiply(self, a, b, total, *options)

    InterpreterBuilder.create_dot = create_dot
    np.seterr(all="ignore")  # it computes with numpy, which would say what a GPU does not
    torch.set_num_threads(1)
    launch.DEVICE = "cpu"
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            getattr(checks, name)(*arguments)
            problem = ""
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    main()
