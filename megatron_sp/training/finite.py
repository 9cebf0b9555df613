"""Checks for non-finite numbers beyond those within a step: the weights after an update, validation, the end of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.utils.errors import NumericsError

_WAY_OUT = "Lower --lr, give it a warm-up, or resume an earlier checkpoint with --ckpt-step"
_END = 2  # non-finite steps in a row at the end of a run that are an error: a single one can be the fault of a sample


def require_finite_weights(weights: Iterable[Tensor], groups: ParallelGroups, step: int) -> None:
    """Check that the weights are finite: an update can overflow even if its gradients are finite. Collective.

    Raises:
        NumericsError: on every rank, if any rank's part has a NaN or an infinity.
    """
    finite = [_is_finite(part) for part in weights if part.numel()]
    bad = bool(finite) and not bool(torch.stack(finite).all())  # one look at the device, however many units there are
    flag = torch.tensor([float(bad)])
    if bool(all_reduce(flag, groups.control, "max") > 0):
        raise NumericsError(
            f"the weights are not finite after step {step}: an update overflowed. Nothing is saved of them; older checkpoints are as they"
            f" were. {_WAY_OUT}."
        )


def _is_finite(part: Tensor) -> Tensor:
    """Return whether all elements are finite, as a scalar tensor where they are."""
    low, high = torch.aminmax(part.detach())
    return torch.isfinite(low) & torch.isfinite(high)


def require_finite_loss(kind: str, loss: float, step: int) -> None:
    """Raise NumericsError if the mean loss of a validation or test is not finite; the same on every rank."""
    if not math.isfinite(loss):
        raise NumericsError(f"{kind} at step {step}: the mean loss is {loss}. Either the weights or a sample are unusable. {_WAY_OUT}.")


def require_sound_end(bad_steps: int, step: int) -> None:
    """Raise NumericsError if the run ends in a row of at least two non-finite steps; the same on every rank."""
    if bad_steps >= _END:
        raise NumericsError(f"the run ends at step {step} with {bad_steps} non-finite steps in a row, all skipped. {_WAY_OUT}.")
