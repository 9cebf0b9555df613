"""AdamW (arXiv:1711.05101) on flat tensors, by torch's fused kernel or by NVIDIA apex's, with the same state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from megatron_sp.ops import availability
from megatron_sp.ops.allocator import host_empty

# m = b1 * m + (1 - b1) * g                    v = b2 * v + (1 - b2) * g^2
# p = p - lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay * p)      rounded differently by the two kernels
_CHUNK = 2048 * 32  # elements for one block of threads, as apex itself has it
_LARGEST = 2**30  # elements of one tensor: an index fits 32 bits in every version (apex 1765, 1825, issue 1654)
_DECOUPLED = 1  # mode of weight decay; 0 would add it to the gradient (L2)


@dataclass(frozen=True)
class AdamStep:
    """Numbers of one step."""

    count: int  # this one included
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class UpdateScalars:
    """Scalars on the device of the weights: they may change under a captured graph."""

    lr: Tensor  # a scalar; fp32 on a GPU, fp64 on the host, as torch's kernels read it
    count: Tensor  # of the update, from 1, an fp32 scalar
    divisor: Tensor | None = None  # of the gradients, an fp32 scalar
    skip: Tensor | None = None  # an fp32 scalar: 1 if nothing is to be updated, else 0

    @classmethod
    def create(
        cls, lr: float, count: int, device: torch.device, divisor: Tensor | None = None, skip: Tensor | None = None
    ) -> UpdateScalars:  # fmt: skip
        # without waiting for the device
        if device.type == "cpu":
            return cls(torch.tensor(lr, dtype=torch.float64), torch.tensor(float(count)), divisor, skip)
        numbers = host_empty((2,), torch.float32, device)
        numbers[0], numbers[1] = lr, count
        on_device = numbers.to(device, non_blocking=True)
        return cls(on_device[0], on_device[1], divisor, skip)


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avg: Sequence[Tensor], exp_avg_sq: Sequence[Tensor],
    step: AdamStep, kernel: Literal["torch", "apex"] = "torch", scalars: UpdateScalars | None = None,
) -> None:  # fmt: skip
    """Update contiguous ``params`` and both moments in place; ``scalars`` replace the step's rate and count."""
    if kernel == "apex":
        assert scalars is None, "apex takes numbers of the host"
        # csrc/multi_tensor_adam.cu: all four are read in the type of the first; it takes every number in fp32, so that
        # its 1 - b2 is off by up to 2^-24 / (1 - b2)
        tensors = (grads, params, exp_avg, exp_avg_sq)
        dtypes = {t.dtype for of_kind in tensors for t in of_kind}
        assert dtypes == {torch.float32}, f"apex reads all tensors in the type of the first: {dtypes}"
        lists = [[part for tensor in of_kind for part in tensor.split(_LARGEST)] for of_kind in tensors]
        availability.load("amp_C").multi_tensor_adam(
            _CHUNK, _no_op_flag(params[0].device), lists, step.lr, step.beta1, step.beta2, step.eps, step.count,
            _DECOUPLED, True, step.weight_decay,
        )  # fmt: skip
        return
    scalars = scalars or UpdateScalars.create(step.lr, step.count, params[0].device)
    torch.ops.aten._fused_adamw_.tensor_lr(
        params, grads, exp_avg, exp_avg_sq, [], [scalars.count] * len(params), lr=scalars.lr, beta1=step.beta1,
        beta2=step.beta2, weight_decay=step.weight_decay, eps=step.eps, amsgrad=False, maximize=False,
        grad_scale=scalars.divisor, found_inf=scalars.skip,
    )  # fmt: skip


@cache
def _no_op_flag(device: torch.device) -> Tensor:
    # not 0 would stop apex's kernels; steps with infinite gradients are skipped before they come here
    return torch.zeros(1, dtype=torch.int32, device=device)
