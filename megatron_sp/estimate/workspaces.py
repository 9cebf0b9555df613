"""Memory that cuBLAS works in: torch allocates it beside all tensors, and it stays.

There is one workspace for each handle and stream, of the size that torch chooses (PyTorch: aten/src/ATen/cuda/
CublasHandlePool.cpp :: parseChosenWorkspaceSize). A handle belongs to a thread: the program's own has one and so has
autograd's, which runs the backward pass, and both launch products on the compute stream. cublasLt works in the same
memory.
"""

from __future__ import annotations

import re

from megatron_sp.estimate.memory_plan import Line

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = "workspaces of cuBLAS"
_HANDLES = 2
_KIB = 1024
_HOPPER, _HOPPER_BYTES = (9, 0), 32 * _KIB**2
_OTHER_BYTES = (2 * 4096 + 8 * 16) * _KIB  # ":4096:2:16:8"


def workspaces(capability: tuple[int, int], setting: str = "") -> Line:
    """Return the bytes of a process's workspaces.

    Args:
        capability: compute capability of its GPU.
        setting: CUBLAS_WORKSPACE_CONFIG, which --deterministic-mode sets: pairs of KiB and a number, ":4096:8".
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", setting)
    default = _HOPPER_BYTES if capability == _HOPPER else _OTHER_BYTES
    each = sum(int(size) * int(count) for size, count in pairs) * _KIB if pairs else default
    return Line(WORKSPACES, _HANDLES * each)
