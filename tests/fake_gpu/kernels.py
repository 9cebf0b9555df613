"""Triton's kernels on the fake device: what they declare is checked, ordered and counted, and nothing is computed."""

from __future__ import annotations

from torch import Tensor

from fake_gpu.device import Device, is_on_device
from megatron_sp.ops.kernels import launch


def install(device: Device) -> None:
    """Replace the launcher."""

    def run(launched: launch.Launch) -> None:
        name = f"triton.{launched.name}"
        declared = [*launched.reads, *launched.writes]
        given = [x for x in launched.arguments if isinstance(x, Tensor)]
        elsewhere = [tuple(x.shape) for x in (*declared, *given) if not is_on_device(x)]
        if elsewhere:
            raise RuntimeError(f"{name}: tensors {elsewhere} are not on the device")
        known = {id(x) for x in declared}
        silent = [tuple(x.shape) for x in given if id(x) not in known and x.numel()]
        if silent:
            raise RuntimeError(f"{name} is given tensors {silent} that it does not declare")
        if not all(launched.grid) or len(launched.grid) > 3 or any(n > 65535 for n in launched.grid[1:]):
            raise RuntimeError(f"{name}: CUDA takes no grid of {launched.grid}")
        device.use(device.stream, list(launched.reads), list(launched.writes), name)
        device.count(name, list(launched.reads), list(launched.writes))

    launch.launcher = run
