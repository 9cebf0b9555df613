"""Places of torch and of the package that fake tensors do not pass through: their stand-ins for the fake device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fake_gpu.device import CUDA, Device


def install(device: Device) -> None:
    """Replace ``Module.to`` and what makes a tensor of a storage."""
    _install_to()
    _install_bytes_of(device)
    _install_examples()


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
                        fake = nn.Parameter(parameter.data.to(device, non_blocking=True), requires_grad=parameter.requires_grad)
                        moved[id(parameter)] = (fake, parameter)
                    module._parameters[name] = moved[id(parameter)][0]
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, FakeTensor):
                    module._buffers[name] = buffer.to(device)
        return self

    nn.Module.to = to  # type: ignore[method-assign,assignment]


def draw_no_weights() -> None:
    """Make initial weights on the device, without contents, and leave them out of the fingerprint."""
    import megatron_sp.parallel.init as init
    from megatron_sp.training.fingerprint import Fingerprint

    init.draw_normal = lambda shape, *_: torch.empty(shape, device=CUDA)
    Fingerprint.add = lambda self, named: None  # type: ignore[method-assign]
