"""AdamW (arXiv:1711.05101) on a flat tensor, by torch's fused kernel or by NVIDIA apex's.

    m = b1 * m + (1 - b1) * g                    v = b2 * v + (1 - b2) * g^2
    p = p - lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay * p)

Both kernels compute this, with eps outside the root, the second moment corrected first, and decay on the old p. They
round differently, and apex's takes every number in fp32, so that its 1 - b2 is off by up to 2^-24 / (1 - b2). The state
is the same: a run may change kernels between two steps.

Facts about apex, from NVIDIA/apex: csrc/multi_tensor_adam.cu and csrc/multi_tensor_apply.cuh (all four tensors are read
in the type of the first; arithmetic is fp32, even on fp64; the no-op flag is passed, and not looked at),
apex/optimizers/fused_adam.py and apex/multi_tensor_apply (order of arguments, chunk size), pull requests 1765 and 1825
(tensors of 2^31 elements and more; before them illegal memory accesses, issue 1654).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from megatron_sp.ops import availability
from megatron_sp.ops.memory import host_empty

_CHUNK = 2048 * 32  # elements for one block of threads, as apex itself has it
_LARGEST = 2**30  # elements of one tensor: an index fits 32 bits in every version
_DECOUPLED = 1  # mode of weight decay; 0 would add it to the gradient (L2)


@dataclass(frozen=True)
class AdamStep:
    """Numbers of one step; ``count`` includes this step, so the first one is 1."""

    count: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class UpdateScalars:
    """Numbers that differ between steps, as tensors on the device of the weights: they may change under a captured graph.

    Attributes:
        lr: learning rate, a scalar; fp32 on a GPU, fp64 on the host, as torch's kernels read it.
        count: number of the update, from 1, an fp32 scalar.
        divisor: by which gradients are divided, an fp32 scalar; None: they are used as they are.
        skip: 1 if nothing is to be updated, else 0, an fp32 scalar; None: 0.
    """

    lr: Tensor
    count: Tensor
    divisor: Tensor | None = None
    skip: Tensor | None = None

    @classmethod
    def create(
        cls, lr: float, count: int, device: torch.device, divisor: Tensor | None = None, skip: Tensor | None = None
    ) -> UpdateScalars:  # fmt: skip
        """Copy the numbers to the device, without waiting for it."""
        if device.type == "cpu":
            return cls(torch.tensor(lr, dtype=torch.float64), torch.tensor(float(count)), divisor, skip)
        numbers = host_empty((2,), torch.float32, device)
        numbers[0], numbers[1] = lr, count
        on_device = numbers.to(device, non_blocking=True)
        return cls(on_device[0], on_device[1], divisor, skip)


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avg: Sequence[Tensor], exp_avg_sq: Sequence[Tensor], step: AdamStep,
    kernel: Literal["torch", "apex"] = "torch", scalars: UpdateScalars | None = None,
) -> None:  # fmt: skip
    """Update ``params`` and both moments in place, several tensors in one call.

    Args:
        params, grads, exp_avg, exp_avg_sq: of one length; the i-th of all four are contiguous and of one shape, [n], n > 0.
        kernel: ``apex`` needs all four in fp32 on a GPU (``fused_kernels.choose_fused_kernels`` sees to it).
        scalars: used instead of the step's rate and count; gradients that they scale are written back. For torch's
            kernel only. None: the step's.
    """
    if kernel == "apex":
        assert scalars is None, "apex takes numbers of the host"
        _apex_adamw_(params, grads, exp_avg, exp_avg_sq, step)
        return
    scalars = scalars or UpdateScalars.create(step.lr, step.count, params[0].device)
    torch.ops.aten._fused_adamw_.tensor_lr(
        params, grads, exp_avg, exp_avg_sq, [], [scalars.count] * len(params), lr=scalars.lr, beta1=step.beta1, beta2=step.beta2,
        weight_decay=step.weight_decay, eps=step.eps, amsgrad=False, maximize=False, grad_scale=scalars.divisor, found_inf=scalars.skip,
    )  # fmt: skip


def _apex_adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avg: Sequence[Tensor], exp_avg_sq: Sequence[Tensor], step: AdamStep
) -> None:  # fmt: skip
    tensors = (grads, params, exp_avg, exp_avg_sq)
    dtypes = {t.dtype for of_kind in tensors for t in of_kind}
    assert dtypes == {torch.float32}, f"apex reads all tensors in the type of the first: {dtypes}"
    lists = [[piece for tensor in of_kind for piece in tensor.split(_LARGEST)] for of_kind in tensors]
    availability.load("amp_C").multi_tensor_adam(
        _CHUNK, _no_op_flag(params[0].device), lists, step.lr, step.beta1, step.beta2, step.eps, step.count, _DECOUPLED, True,
        step.weight_decay,
    )  # fmt: skip


@cache
def _no_op_flag(device: torch.device) -> Tensor:
    """Return the flag that stops apex's kernels when it is not 0; steps with infinite gradients are skipped before they come here."""
    return torch.zeros(1, dtype=torch.int32, device=device)
