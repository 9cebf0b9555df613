"""Differentiable all-to-all that starts at one point of a model and is waited for at another, in forward and backward.

    forward    launch(x) starts sending     ...other layers compute...            y = land(token) waits
    backward   waits for its gradient       ...their gradients are computed...    starts sending the gradient back

An empty tensor connects the two points in the autograd graph. The autograd engine runs later nodes first: of several
exchanges that land together, all gradients are sent before the first of them is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle, all_to_all_async
from megatron_sp.comm.groups import Group


class AsyncAllToAll:
    """All-to-all of equal parts, and later of their gradients."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._there: Handle | None = None
        self._back: Handle | None = None
        self._shape = torch.Size()

    def launch(self, x: Tensor) -> Tensor:
        """Start sending ``x`` [ranks, ...], the r-th part to rank r; return a token for ``land``."""
        token: Tensor = _Launch.apply(x, self)
        return token

    def land(self, token: Tensor) -> Tensor:
        """Wait for the exchange; return [ranks, ...], the r-th part from rank r."""
        landed: Tensor = _Land.apply(token, self)
        return landed

    def start(self, x: Tensor) -> Handle:
        """Start an exchange of all parts."""
        self._shape, send = x.shape, x.contiguous().view(-1)
        counts = [send.numel() // self._group.size()] * self._group.size()
        return all_to_all_async(send, counts, torch.empty_like(send), counts, self._group)

    def end(self, handle: Handle | None) -> Tensor:
        """Wait for an exchange and return what was received."""
        assert handle is not None, "an exchange was landed twice, or was never launched"
        return handle.wait().view(self._shape)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: AsyncAllToAll) -> Tensor:
        ctx.flight = flight
        flight._there = flight.start(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        handle, ctx.flight._back = ctx.flight._back, None
        return ctx.flight.end(handle), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: AsyncAllToAll) -> Tensor:
        ctx.flight = flight
        handle, flight._there = flight._there, None
        return flight.end(handle)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.flight._back = ctx.flight.start(grad)
        return grad.new_empty(0), None
