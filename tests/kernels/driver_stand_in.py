"""A GPU's driver that launches nothing: kernels are compiled for Hopper by Triton itself, and what a launcher is given is recorded.

``python -m kernels.driver_stand_in CHECK ...`` runs checks of this file in a process of its own, since the driver is one
for a process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from megatron_sp.ops.kernels import direct, launch

calls: list[tuple[Any, ...]] = []
"""What each launcher was given: the kernel's handle, the grid, the stream, and the kernel's arguments."""


class _Utils:
    """Loads binaries: each gets a handle of its own."""

    def __init__(self) -> None:
        self.binaries: dict[bytes, int] = {}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[object, int, int, int, int]:
        handle = 1000 + self.binaries.setdefault(kernel, len(self.binaries))
        return object(), handle, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class _Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self.warps = metadata.num_warps

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, metadata: Any, enter: Any, leave: Any, *args: Any
    ) -> None:
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)
        calls.append((function, (x, y, z), stream, self.warps, [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]))


class Driver:
    """Stands in for Triton's driver of CUDA."""

    launcher_cls = _Launcher

    def __init__(self) -> None:
        self.utils, self.device, self.stream = _Utils(), 0, 7

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Recorded:
    """A kernel whose launches by the JIT are recorded."""

    pre_run_hooks: tuple[()] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: calls.append((grid, args, kwargs))


@triton.jit
def _scaled_kernel(X, Y, rows, width, factor, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    """A kernel whose code depends on everything that Triton specializes by."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = (column < width) & (row < rows)
    x = tl.load(X + row.to(tl.int64) * width + column, mask=mask, other=0.0).to(tl.float32) * factor
    if ADDS:
        x += tl.load(Y + row.to(tl.int64) * width + column, mask=mask, other=0.0)
    tl.store(Y + row.to(tl.int64) * width + column, x, mask=mask)


def _tensor(dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Return a tensor whose address is ``offset`` elements beyond a multiple of 64 bytes."""
    memory = torch.zeros(256, dtype=dtype)
    first = -memory.data_ptr() % 64 // memory.element_size()
    return memory[first + offset : first + offset + 64]


def _arguments() -> list[tuple[Any, ...]]:
    """Return arguments that differ in one thing each from the first, and some that differ in nothing that counts."""
    x, y = _tensor(torch.bfloat16), _tensor(torch.float32)
    base = [x, y, 32, 48, 2.5]
    others: dict[int, list[Any]] = {
        0: [*(_tensor(torch.bfloat16, offset) for offset in (1, 8, 4)), _tensor(torch.float16), _tensor(torch.float32)],
        1: [_tensor(torch.float32, offset) for offset in (1, 4, 2, 8)],
        2: [1, 2, 16, 33, 0, -16, 2**31 - 1, 2**31, 2**31 + 1, 2**33, 2**63, 2**63 + 1, -(2**31) - 1, True, False],
        3: [1, 2, 64, 17],
        4: [0.0, 1.0, 16.0, float("inf"), 16, 1, 3],
    }
    return [tuple(base), *((*base[:i], other, *base[i + 1 :]) for i, values in others.items() for other in values)]


def _launch(arguments: tuple[Any, ...], run: Callable[..., None], block: int = 1024, adds: bool = True, warps: int = 4) -> tuple[Any, ...]:
    run(_scaled_kernel, (3, 2), arguments, {"BLOCK": block, "ADDS": adds}, {"num_warps": warps, "enable_fp_fusion": False})
    return calls[-1]


def _jit(kernel: Any, grid: tuple[int, ...], arguments: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
    kernel[grid](*arguments, **constants, **options)


def what_is_launched_is_what_the_jit_launches() -> None:
    """Each of many signatures, in two orders: the kernel, grid, stream and arguments are the JIT's, and most launches are direct."""
    wanted = [_launch(arguments, _jit) for arguments in _arguments()]
    assert len({call[0] for call in wanted}) >= 13, "too few kernels for a test of what tells them apart"
    for order in (1, -1):
        for arguments, want in list(zip(_arguments(), wanted, strict=True))[::order]:
            for _ in range(2):
                found = _launch(arguments, direct.run)
                assert found[:4] == want[:4], (arguments[2:], found, want)
                assert found[4] == [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in (*arguments, 1024, True)]


def constants_devices_and_warps_count() -> None:
    """A kernel is one for its compile-time arguments, its warps, and the GPU."""
    arguments, active = _arguments()[0], driver.active
    cases = [{"block": 1024}, {"block": 512}, {"adds": False}, {"warps": 8}]
    wanted = [_launch(arguments, _jit, **case) for case in cases]  # type: ignore[arg-type]
    for _ in range(2):
        assert [_launch(arguments, direct.run, **case) for case in cases] == wanted  # type: ignore[arg-type]
    loaded: list[int] = []
    load = active.utils.load_binary
    active.utils.load_binary = lambda name, kernel, shared, device: (loaded.append(device), load(name, kernel, shared, device))[1]
    active.device, active.stream = 1, 9
    found = _launch(arguments, direct.run)
    assert found[2] == 9 and loaded == [1], "a kernel is loaded on each GPU"


def later_launches_do_without_the_jit() -> None:
    """The JIT sees the first launch alone, and all of them where hooks want to be called."""
    arguments, seen = _arguments()[0], []
    run = type(_scaled_kernel).run
    type(_scaled_kernel).run = lambda self, *args, **kwargs: (seen.append(self), run(self, *args, **kwargs))[1]
    for _ in range(3):
        _launch(arguments, direct.run)
    assert len(seen) == 1 and len(calls) == 3, (len(seen), len(calls))
    hooked: list[Any] = []
    knobs = triton.knobs.runtime
    if hasattr(knobs.launch_enter_hook, "add"):
        knobs.launch_enter_hook.add(hooked.append)
    else:
        knobs.launch_enter_hook = hooked.append
    _launch(arguments, direct.run)
    assert len(seen) == 2 and len(hooked) == 1, "a profiler's hook is called"
    if hasattr(knobs.launch_enter_hook, "remove"):
        knobs.launch_enter_hook.remove(hooked.append)
    else:
        knobs.launch_enter_hook = None
    _launch(arguments, direct.run)
    assert len(seen) == 2 and len(calls) == 5
    _scaled_kernel.add_pre_run_hook(lambda *args, **kwargs: hooked.append(args))
    _launch(arguments, direct.run)
    assert len(seen) == 3 and len(hooked) == 2, "the kernel's own hook is called"


def what_is_not_known_is_left_to_the_jit() -> None:
    """Another version of Triton, another maker's GPU, arguments of other types."""
    for version, backend in (("3.99.0", "cuda"), ("2.1.0", "cuda"), ("nightly", "cuda"), (triton.__version__, "hip")):
        direct._triton.cache_clear()
        before, triton.__version__ = triton.__version__, version
        driver.active.get_current_target = lambda backend=backend: GPUTarget(backend, 90, 32)
        assert direct._triton() is None, (version, backend)
        triton.__version__ = before
        del driver.active.get_current_target
    direct._triton.cache_clear()
    assert direct._triton() is not None
    assert direct.signature((None,)) is None and direct.signature((torch.float32,)) is None
    other = "a type that is not known here"
    direct.run(_Recorded(), (1,), (other,), {"A": 1}, {"num_warps": 4})
    assert calls == [((1,), (other,), {"A": 1, "num_warps": 4})] and not direct._compiled


def launches_of_the_package() -> None:
    """Our norms through the launcher: what is launched twice is the same kernel with its own tensors."""
    from megatron_sp.ops.kernels import norms

    launch.launcher = launch._run
    x, weight = torch.zeros(8, 64), torch.ones(64)
    for _ in range(2):
        norms.forward(x, weight, None, 1e-5, centered=False, zero_centered=False)
    first, second = calls
    assert first[:4] == second[:4] and first[4][0] == second[4][0] == x.data_ptr()
    norms.forward(torch.zeros(8 * 64 + 1)[1:].view(8, 64), weight, None, 1e-5, centered=False, zero_centered=False)
    assert calls[-1][0] != first[0], "an address that is not a multiple of 16 has a kernel of its own"


if __name__ == "__main__":
    driver.set_active(Driver())
    for check in sys.argv[1:]:
        calls.clear()
        direct._compiled.clear()
        getattr(sys.modules["__main__"], check)()
