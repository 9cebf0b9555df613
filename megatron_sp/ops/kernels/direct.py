"""Launches of compiled kernels without Triton's JIT, which costs the host more than most kernels take.

The JIT keeps first launches, hooks, GPUs other than NVIDIA's, the interpreter, and a Triton that is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from megatron_sp.ops import availability

OLDEST, NEWEST = (3, 4), (3, 7)
"""Versions of Triton that are launched here; each was looked at."""


# JIT       bind the arguments, specialize each, make a string of that, look it up, collect metadata, launch
# here      a tuple of what Triton specializes by, look it up, launch
class _Compiled(NamedTuple):
    run: Callable[..., None]
    function: int  # its handle in the driver
    metadata: Any  # what the launcher has to know of it
    constants: tuple[Any, ...]  # compile-time arguments, in order, which are its last


_compiled: dict[Hashable, _Compiled] = {}


def signature(arguments: Sequence[Any]) -> tuple[Hashable, ...] | None:
    """Return what Triton specializes a kernel by; None if an argument is not known here."""
    # never less than that: one that was compiled for an aligned address must not get another one
    kinds: list[Hashable] = []
    for x in arguments:
        kind: type = type(x)
        if kind is int:
            if -(2**31) <= x < 2**31:
                kinds.append(1 if x == 1 else 16 if x & 15 == 0 else 0)
            else:
                kinds.append((x & 15 == 0, x < 2**63))
        elif isinstance(x, Tensor):
            kinds += (x.dtype, x.data_ptr() & 15 == 0)
        elif kind is float or kind is bool:
            kinds.append(kind)
        else:
            return None
    return tuple(kinds)


def run(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any], options: dict[str, Any]
) -> None:  # fmt: skip
    """Launch a kernel on the current stream, with its compile-time ``constants`` by name."""
    triton = _triton()
    of_arguments = None if triton is None else signature(arguments)
    if triton is None or of_arguments is None or _is_watched(kernel, triton.hooks):
        kernel[grid](*arguments, **constants, **options)
        return
    driver = triton.driver.active
    device = driver.get_current_device()
    key = (kernel, device, of_arguments, *constants.items(), *options.items())
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[grid](*arguments, **constants, **options)
        names = getattr(kernel, "arg_names", None)
        if not isinstance(names, (list, tuple)) or set(names[len(arguments) :]) != set(constants):
            return  # not as it is known here
        if all(getattr(compiled, name, None) is not None for name in ("run", "function", "packed_metadata")):
            values = tuple(constants[name] for name in names[len(arguments) :])
            _compiled[key] = _Compiled(compiled.run, compiled.function, compiled.packed_metadata, values)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.get_current_stream(device)
    known.run(x, y, z, stream, known.function, known.metadata, None, None, None, *arguments, *known.constants)


def _is_watched(kernel: Any, hooks: Any) -> bool:
    # by a profiler's hooks (a function or None, from Triton 3.5 on lists) or the kernel's; also one that is
    # interpreted, which has no hooks of its own
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(
        getattr(kernel, "pre_run_hooks", True)
        or (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )  # fmt: skip


class _Triton(NamedTuple):
    driver: Any
    hooks: Any


@cache
def _triton() -> _Triton | None:
    # Triton's driver and hooks; None where launches are left to the JIT
    triton, driver = availability.load("triton"), availability.load("triton", "triton.runtime").driver
    version = re.match(r"(\d+)\.(\d+)", triton.__version__)
    if version is None or not OLDEST <= (int(version[1]), int(version[2])) <= NEWEST:
        return None
    try:
        is_known = driver.active.get_current_target().backend == "cuda"
    except RuntimeError:  # there is no GPU: the kernels are interpreted
        return None
    return _Triton(driver, triton.knobs.runtime) if is_known else None
