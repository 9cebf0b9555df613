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

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_sp.ops import availability

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


@torch.no_grad()
def adamw_(
    params: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamStep, kernel: Literal["torch", "apex"] = "torch"
) -> None:
    """Update ``params`` and both moments in place; all four are contiguous and of one shape, [n], n > 0.

    Args:
        kernel: ``apex`` needs all four in fp32 on a GPU (``fused_kernels.choose_fused_kernels`` sees to it).
    """
    if kernel == "apex":
        _apex_adamw_(params, grads, exp_avg, exp_avg_sq, step)
        return
    counts = [torch.full((), step.count - 1.0, dtype=torch.float32, device=params.device)]  # the kernel adds 1 itself
    adamw(
        [params], [grads], [exp_avg], [exp_avg_sq], [], counts, fused=True, amsgrad=False, lr=step.lr,
        beta1=step.beta1, beta2=step.beta2, weight_decay=step.weight_decay, eps=step.eps, maximize=False,
    )  # fmt: skip


def _apex_adamw_(params: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamStep) -> None:
    tensors = (grads, params, exp_avg, exp_avg_sq)
    dtypes = {t.dtype for t in tensors}
    assert dtypes == {torch.float32}, f"apex reads all tensors in the type of the first: {dtypes}"
    availability.load("amp_C").multi_tensor_adam(
        _CHUNK, _no_op_flag(params.device), [list(t.split(_LARGEST)) for t in tensors], step.lr, step.beta1, step.beta2, step.eps,
        step.count, _DECOUPLED, True, step.weight_decay,
    )  # fmt: skip


@cache
def _no_op_flag(device: torch.device) -> Tensor:
    """Return the flag that stops apex's kernels when it is not 0; steps with infinite gradients are skipped before they come here."""
    return torch.zeros(1, dtype=torch.int32, device=device)
