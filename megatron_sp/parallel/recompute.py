"""Activation recomputation (arXiv:1604.06174)."""

# Dropout masks are hashes (``ops/dropout.py``), so a recomputed forward pass is the same without saving RNG states. The
# exception is attention dropout inside a fused kernel, which draws from torch's generator.
#
# torch.utils.checkpoint is not used: it packs every saved tensor, and recomputes once for every autograd graph inside;
# the attention block (``parallel/ulysses.py``) has graphs of its own. Here the function is simply called twice.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_sp.ops.attention_kernels import KeptTensors
from megatron_sp.ops.custom_backward import run_backward


def recompute(
    fn: Callable[..., Tensor], *args: Any, draws_random: bool = False, kept: KeptTensors | None = None
) -> Tensor:
    """Call ``fn(*args)`` saving only its arguments, and what it has ``kept``; backward calls it again.

    ``draws_random``: ``fn`` uses torch's generators, which then draw the same numbers again.
    """
    if not torch.is_grad_enabled():
        return fn(*args)
    # fn may use parameters, so the result has a gradient even if no argument has
    trainable = torch.empty(0, requires_grad=True)
    return _Recompute.apply(trainable, fn, draws_random, kept, *args)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, trainable: Tensor, fn: Callable[..., Tensor], draws_random: bool, kept: KeptTensors | None, *args: Any
    ) -> Tensor:  # fmt: skip
        ctx.fn, ctx.random_state = fn, None
        if draws_random:
            of_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
            ctx.random_state = torch.get_rng_state(), of_gpu
        ctx.tensor_at = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        ctx.others = [None if isinstance(a, Tensor) else a for a in args]
        ctx.kept = kept
        out = fn(*args)  # no gradients in here: nothing is saved
        ctx.save_for_backward(*(args[i] for i in ctx.tensor_at), *(() if kept is None else kept.release()))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        args, need = list(ctx.others), ctx.needs_input_grad[4:]
        saved = list(ctx.saved_tensors)
        for i, tensor in zip(ctx.tensor_at, saved, strict=False):
            args[i] = tensor.detach().requires_grad_(need[i])
        if ctx.kept is not None:
            ctx.kept.restore(saved[len(ctx.tensor_at) :])
        del saved
        ctx.maybe_clear_saved_tensors()  # from here on what is kept lives as long as the recomputed graph needs it
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices, enabled=ctx.random_state is not None), torch.enable_grad():
            if ctx.random_state is not None:
                torch.set_rng_state(ctx.random_state[0])
                if ctx.random_state[1] is not None:
                    torch.cuda.set_rng_state(ctx.random_state[1])
            out = ctx.fn(*args)
        if out.requires_grad:
            run_backward(out, grad)
        return None, None, None, None, *(a.grad if isinstance(a, Tensor) else None for a in args)
