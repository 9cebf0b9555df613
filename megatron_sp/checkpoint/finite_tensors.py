"""A look at each tensor that is rewritten: a checkpoint with a NaN in it trains nothing, and must not pass for a good one."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sp.utils.errors import CheckpointError

_TOLD = 8


class FiniteTensors:
    """Finds numbers that are not finite, or too large for the dtype they are written in; one pass over each tensor, with nothing allocated.

    Args:
        allow: tell of them (``notes``) instead of refusing the tensor.
    """

    def __init__(self, *, allow: bool) -> None:
        self._allow = allow
        self._found: dict[str, str] = {}

    def look(self, name: str, tensor: Tensor, written: torch.dtype) -> Tensor:
        """Return the tensor.

        Args:
            written: dtype that it is going to have.
        Raises:
            CheckpointError: it has numbers that are not finite, or would not be any more.
        """
        problem = _describe(tensor, written)
        if problem is not None:
            self._found[name] = f"{name} has {problem}"
            if not self._allow:
                raise CheckpointError(
                    f"{self._found[name]}: nothing can be trained or computed with such a tensor. Take another checkpoint"
                    f"{' or another --dtype' if 'too large' in problem else ''}; --allow-non-finite writes it all the same"
                )
        return tensor

    def notes(self) -> list[str]:
        """Return a line about each tensor with such numbers, of many only about the first."""
        lines = list(self._found.values())
        more = len(lines) - _TOLD
        return lines[:_TOLD] + ([f"{more} more tensors have numbers that are not finite"] if more > 0 else [])


def _describe(tensor: Tensor, written: torch.dtype) -> str | None:
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    if tensor.dtype.itemsize == 1:  # of 8-bit floats torch has no smallest and largest
        tensor = tensor.float()
    low, high = (float(end) for end in torch.aminmax(tensor))
    largest = torch.finfo(written).max if written.is_floating_point else float("inf")
    if -largest <= low and high <= largest:  # false for NaN, which aminmax hands on
        return None
    nan, finite = int(tensor.isnan().sum()), tensor.isfinite()
    infinite = tensor.numel() - nan - int(finite.sum())
    lost = int((finite & ~tensor.to(written).isfinite()).sum())
    count, names = f"of {tensor.numel():,}", str(written).removeprefix("torch.")
    if nan or infinite:
        kinds = [f"{number:,} {kind}" for number, kind in ((nan, "NaN"), (infinite, "infinite")) if number]
        return f"{' and '.join(kinds)} {count} numbers"
    return f"{lost:,} {count} numbers that are too large for {names} (up to {max(-low, high):.3g})" if lost else None
