"""Places of torch and of the package that fake tensors do not pass through: their stand-ins for the fake device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fake_gpu.device import CUDA, Device, is_on_device


def install(device: Device) -> None:
    """Replace ``Module.to``, ``Module.to_empty`` and what makes a tensor of a storage; watch what handles of collectives keep."""
    _install_to()
    _install_bytes_of(device)
    _install_examples()
    _install_handles(device)
    _install_rms_norm(device)


def _install_rms_norm(device: Device) -> None:
    """torch's RMSNorm, which without a GPU's kernel is taken apart before it gets to the device."""
    from megatron_sp.ops import norm

    plain = norm._torchs_rms_norm

    def rms_norm(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not is_on_device(x):
            return plain(x, scale, eps)
        y, rstd = torch.empty_like(x), torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        device.use(device.stream, [x, scale], [y, rstd], "_fused_rms_norm")
        device.count("aten._fused_rms_norm.default", [x, scale], [y, rstd])
        return y, (rstd,)

    norm._torchs_rms_norm = rms_norm


def _install_handles(device: Device) -> None:
    """A handle keeps its operand, and can be made to forget it."""
    from megatron_sp.comm.collectives import Handle

    plain = Handle.__init__

    def begin(self: Handle, work: Any, result: Tensor, name: str, finish: Any = None, operand: Tensor | None = None, **more: Any) -> None:
        forgets = work is not None and operand is not None and device.drops("operand", depth=1)
        plain(self, work, result, name, finish, None if forgets else operand, **more)

    Handle.__init__ = begin  # type: ignore[method-assign]


def _install_bytes_of(device: Device) -> None:
    """The storage of a fake tensor is one of the meta device: a tensor on it must be told that it is on this one."""
    import megatron_sp.parallel.offload as offload

    plain = offload._bytes_of

    def bytes_of(storage: torch.UntypedStorage) -> Tensor:
        if storage.device.type != "meta":
            return plain(storage)
        return FakeTensor(device.fake, torch.empty(0, dtype=torch.uint8, device="meta").set_(storage), CUDA)  # type: ignore[call-overload]

    offload._bytes_of = bytes_of


def _install_examples() -> None:
    """What is computed here has no numbers to be right or wrong: a kernel is good if its example runs."""
    import megatron_sp.ops.attention_choice as attention_choice

    attention_choice._TOLERANCE = dict.fromkeys(attention_choice._TOLERANCE, float("inf"))


def _install_to() -> None:
    """``param.data = fake`` is refused, so a parameter is replaced by a new one."""
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by identity: a tied parameter stays one; kept, so no identity is reused

    def to(self: nn.Module, device: Any, *_: Any, **__: Any) -> nn.Module:
        if torch.device(device).type == "cpu":
            return self
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, FakeTensor):
                    if id(parameter) not in moved:
                        there = torch.empty_like(parameter.data, device=device) if parameter.is_meta else parameter.data.to(device)
                        fake = nn.Parameter(there, requires_grad=parameter.requires_grad)
                        moved[id(parameter)] = (fake, parameter)
                    module._parameters[name] = moved[id(parameter)][0]
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, FakeTensor):
                    module._buffers[name] = buffer.to(device)
        return self

    def to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        if torch.device(device).type == "cpu":
            return plain_to_empty(self, device=device, recurse=recurse)
        return to(self, device)

    plain_to_empty = nn.Module.to_empty
    nn.Module.to, nn.Module.to_empty = to, to_empty  # type: ignore[method-assign,assignment]


def install_large(device: Device) -> None:
    """Draw no initial weights and no bits to compare them by, and hand no contents of large tensors to the host."""
    import sys

    from megatron_sp.parallel import layers
    from megatron_sp.training.sharding import Fingerprint

    drawn = layers.draw_normal

    def draw_normal(shape: tuple[int, ...], *_: Any) -> Tensor:
        return torch.empty(shape, device="meta")

    for module in list(sys.modules.values()):
        if getattr(module, "draw_normal", None) is drawn:
            module.draw_normal = draw_normal  # type: ignore[attr-defined]
    Fingerprint.add = lambda *_, **__: None  # type: ignore[method-assign]
