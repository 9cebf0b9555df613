"""Attention on the heads of one chunk, between the exchanges of Ulysses: where other ways of mixing positions go in.

A ``Core`` makes q, k and v of what a rank has received and computes attention with them. Where it names a kernel whose
backward can be called (``Core.call``), a chunk's attention is a call without a graph, else an ordinary autograd graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.attention_kernels import KeptTensors, LseKernel
from megatron_sp.ops.custom_backward import gradients_of
from megatron_sp.parallel.heads import Share

Heads = tuple[Tensor, Tensor | None, Tensor | None]  # q, k and v of a chunk
KernelCall = tuple[LseKernel, Tensor, Tensor, Tensor]  # a kernel and its q, k and v
# keys and values that other chunks of their group use, too, by the number of the group's key/value head
Shared = dict[int, tuple[Tensor, Tensor]]


class Core:
    """Attention on the heads of one chunk; autograd differentiates it, unless ``call`` names a kernel."""

    # those that ``prepare`` uses and no main_grad holds; their gradients go through autograd
    parameters: Sequence[Tensor] = ()

    def prepare(self, recv_buffers: dict[str, Tensor], share: Share) -> Heads:
        """Return q [s, m, r, d], k [s, m, 1, d] and v [s, m, 1, d_v] from the received parts, [s, b, width] each.

        k and v are None for a chunk that uses those of another one. May modify the buffers.
        """
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, share: Share, kept: KeptTensors | None) -> Tensor:
        """Return [s, m, r, d_v], in the order of the share's queries; ``kept`` as of ``attend_with``."""
        raise NotImplementedError

    def call(
        self, recv_buffers: dict[str, Tensor], share: Share, shared: tuple[Tensor, Tensor] | None
    ) -> KernelCall | None:
        """Return the kernel that computes the attention, and its operands, made without a graph; None: autograd must.

        ``shared`` are keys and values that an earlier chunk has brought. Buffers are modified only for a kernel.
        """
        return None

    def prepare_backward(self, grads: Heads, shapes: dict[str, torch.Size], share: Share) -> dict[str, Tensor]:
        """Return the gradients of the received parts after ``call``, perhaps in the memory of the heads'."""
        raise NotImplementedError


@dataclass
class Graph:
    recv_buffers: dict[str, Tensor]  # leaves
    heads: Heads  # made from them
    leaves: tuple[Tensor, Tensor, Tensor]  # the same detached, the attention's inputs
    out: Tensor


@dataclass
class Call:
    shapes: dict[str, torch.Size]  # of the received parts
    kernel: LseKernel
    tensors: tuple[Tensor, ...]  # q, k, v, output, lse

    @property
    def out(self) -> Tensor:
        return self.tensors[3]

    def release(self) -> tuple[Tensor, ...]:
        released, self.tensors, self._count = self.tensors, (), len(self.tensors)
        return released

    def restore(self, saved: Iterator[Tensor]) -> None:
        self.tensors = tuple(islice(saved, self._count))


def attend(
    core: Core, buffers: dict[str, Tensor], share: Share, shared: Shared, results: KeptTensors | None, *, train: bool
) -> Graph | Call:  # fmt: skip
    # the attention of a share from what has been received; its keys and values are added to ``shared``. ``results``
    # keeps the results for a backward that makes the heads again, or has them; ``train``: backward follows
    group = share.uses.start
    call = core.call(buffers, share, shared.get(group)) if train else None
    if call is not None:
        kernel, *operands = call
        shared[group] = operands[1], operands[2]
        computed = kernel.forward(*operands) if results is None else results.take("attention")
        return Call({part: buffer.shape for part, buffer in buffers.items()}, kernel, (*operands, *computed))
    if train:
        buffers = {part: buffer.detach().requires_grad_() for part, buffer in buffers.items()}
    with torch.set_grad_enabled(train):
        inside = {part: _Alias.apply(buffer) for part, buffer in buffers.items()} if train else buffers
        q, k, v = heads = core.prepare(dict(inside), share)
        if k is not None and v is not None:
            shared[group] = _leaf(k, train), _leaf(v, train)
        elif train and not shared[group][0].requires_grad:  # a call has brought them
            shared[group] = _leaf(shared[group][0], train), _leaf(shared[group][1], train)
        leaves = (_leaf(q, train), *shared[group])
        out = core.attend(*leaves, share, results)
    return Graph(buffers, heads, leaves, out)


def attend_backward(
    core: Core, state: Graph | Call, sources: dict[int, Graph], d_out: Tensor, share: Share,
    d_shared: dict[int, list[Tensor]],
) -> tuple[dict[str, Tensor], list[Tensor | None]]:  # fmt: skip
    # the gradients of a chunk's received parts, and those of the core's parameters. ``sources``: of heads that are
    # remade, the states with the groups' keys and values. ``d_shared``: gradients of keys and values from a group's
    # later chunks, whose backward ran first
    group, none = share.uses.start, [None] * len(core.parameters)
    if isinstance(state, Call):
        d_q, *d_kv = state.kernel.backward(d_out, *state.tensors)
    else:
        d_q, *d_kv = gradients_of(state.leaves, [state.out], [d_out])
    if group in d_shared:
        d_kv = [a + b for a, b in zip(d_kv, d_shared.pop(group), strict=True)]
    if not share.keys:
        d_shared[group] = d_kv
    if isinstance(state, Call):
        grads: Heads = (d_q, d_kv[0], d_kv[1]) if share.keys else (d_q, None, None)
        return core.prepare_backward(grads, state.shapes, share), [*none]
    outputs, gradients = [state.heads[0]], [d_q]
    buffers = {part: buffer for part, buffer in state.recv_buffers.items() if part != "kv"}
    if share.keys:
        source = sources.pop(group, state)
        outputs += [head for head in source.heads[1:] if head is not None]
        gradients += d_kv
        buffers |= {part: buffer for part, buffer in source.recv_buffers.items() if part == "kv"}
    trained = [p for p in core.parameters if p.requires_grad]  # autograd refuses a frozen one
    of_all = gradients_of([*buffers.values(), *trained], outputs, gradients, allow_unused=True)
    d_buffers = {}
    for (part, buffer), gradient in zip(buffers.items(), of_all, strict=False):
        d_buffers[part] = torch.zeros_like(buffer) if gradient is None else gradient
    of_trained = iter(of_all[len(buffers) :])
    return d_buffers, [next(of_trained) if p.requires_grad else None for p in core.parameters]


def _leaf(x: Tensor, train: bool) -> Tensor:
    return x.detach().requires_grad_() if train else x


class _Alias(torch.autograd.Function):
    # the same memory, neither a leaf nor a view, so that it can be rotated in place and still have a gradient
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        alias = torch.empty(0, dtype=x.dtype, device=x.device)
        return alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad
