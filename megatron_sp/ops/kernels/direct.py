"""Launches of compiled kernels without the path through Triton's JIT, which costs the host more than most kernels take.

    JIT       bind the arguments, specialize each, make a string of that, look it up, collect metadata for hooks, launch
    here      a tuple of what Triton specializes by, look it up, launch

The first launch with a signature goes through the JIT, which compiles the kernel where need be and returns it; later ones
call that kernel's launcher. What is in a signature is never less than what Triton tells kernels apart by: the compile-time
arguments and warps, of each tensor its type and whether its address is a multiple of 16, of each integer whether it is 1,
a multiple of 16, and its width. So a kernel that was compiled for an aligned address never gets another one.

The JIT keeps the launch where something else wants to see it (a profiler's hooks, hooks of a kernel), on GPUs other than
NVIDIA's, where a kernel has arguments of other types, under the interpreter, and with a Triton whose launchers are not
known here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from megatron_sp.ops import availability

OLDEST, NEWEST = (3, 4), (3, 7)
"""Versions of Triton whose compiled kernels are launched here; each was looked at."""


class _Compiled(NamedTuple):
    """A compiled kernel.

    Attributes:
        run: its launcher.
        function: its handle in the driver.
        metadata: what the launcher has to know of it.
        constants: values of its compile-time arguments, in order, which are its last.
    """

    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]


_compiled: dict[Hashable, _Compiled] = {}


def signature(arguments: Sequence[Any]) -> tuple[Hashable, ...] | None:
    """Return what a kernel is compiled for, of arguments that are not compile-time ones; None if one of them is not known here."""
    found: list[Hashable] = []
    for x in arguments:
        kind: type = type(x)
        if kind is int:
            if -(2**31) <= x < 2**31:
                found.append(1 if x == 1 else 16 if x & 15 == 0 else 0)
            else:
                found.append((x & 15 == 0, x < 2**63))
        elif isinstance(x, Tensor):
            found += (x.dtype, x.data_ptr() & 15 == 0)
        elif kind is float or kind is bool:
            found.append(kind)
        else:
            return None
    return tuple(found)


def run(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any], options: dict[str, Any]
) -> None:  # fmt: skip
    """Launch a kernel on the current stream of the current device.

    Args:
        kernel: a function that ``triton.jit`` has decorated.
        grid: number of programs along each axis.
        arguments: its first arguments, in order.
        constants: its others, by name: compile-time arguments.
        options: of Triton's compiler.
    """
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
        _keep(key, kernel, kernel[grid](*arguments, **constants, **options), len(arguments), constants)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.get_current_stream(device)
    known.run(x, y, z, stream, known.function, known.metadata, None, None, None, *arguments, *known.constants)


def _keep(key: Hashable, kernel: Any, compiled: Any, count: int, constants: dict[str, Any]) -> None:
    """Keep what the JIT has launched for a signature, if it is as it is known here."""
    names = getattr(kernel, "arg_names", None)
    if not isinstance(names, (list, tuple)) or set(names[count:]) != set(constants):
        return
    if all(getattr(compiled, name, None) is not None for name in ("run", "function", "packed_metadata")):
        of_constants = tuple(constants[name] for name in names[count:])
        _compiled[key] = _Compiled(compiled.run, compiled.function, compiled.packed_metadata, of_constants)


def _is_watched(kernel: Any, hooks: Any) -> bool:
    """Return whether something wants to see the launches of a kernel; also of one that is interpreted, which has no hooks of its own."""
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook  # a function or None; from Triton 3.5 on lists of functions
    return bool(
        getattr(kernel, "pre_run_hooks", True)
        or (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )  # fmt: skip


class _Triton(NamedTuple):
    """Parts of Triton: its driver, and what has the hooks of all launches."""

    driver: Any
    hooks: Any


@cache
def _triton() -> _Triton | None:
    """Return Triton's driver and hooks; None where launches are left to the JIT."""
    triton, driver = availability.load("triton"), availability.load("triton", "triton.runtime").driver
    version = re.match(r"(\d+)\.(\d+)", triton.__version__)
    if version is None or not OLDEST <= (int(version[1]), int(version[2])) <= NEWEST:
        return None
    try:
        is_known = driver.active.get_current_target().backend == "cuda"
    except RuntimeError:  # there is no GPU: the kernels are interpreted
        return None
    return _Triton(driver, triton.knobs.runtime) if is_known else None
