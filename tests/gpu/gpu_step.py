"""A training step of the tiny model on one GPU, in which the host's waits are errors, or counted."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Literal

import torch
from support import tiny
from torch import Tensor

from megatron_sp.models.gpt import GPTModel
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.parallel.forward_context import ForwardContext

CUDA = torch.device("cuda")
Found = dict[str, Tensor | None]


def moved(batches: list[tiny.Batch]) -> list[tiny.Batch]:
    """The batches on the GPU."""
    return [{name: t.to(CUDA) for name, t in batch.items()} for batch in batches]


def num_waits(messages: Iterable[str]) -> int:
    """How many of torch's warnings tell of a wait of the host; the first time torch also warns that it may not see all of them."""
    return sum("called a synchronizing CUDA operation" in message for message in messages)


def gpu_step(
    model: GPTModel, gradients: FlatGradients, batches: list[tiny.Batch], contexts: list[ForwardContext],
    on_wait: Literal["error", "warn"] = "error",
) -> tuple[Found, int]:  # fmt: skip
    """As ``tiny.run_step``, of batches on the GPU; also how often the host has waited between first op and last (``warn``)."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=on_wait == "warn") as said:
        if on_wait == "warn":
            warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(on_wait)
        try:
            gradients.start_step()
            total = torch.zeros((), dtype=torch.float64, device=CUDA)
            for i, (batch, ctx) in enumerate(zip(batches, contexts, strict=True)):
                loss, _ = model(batch["tokens"], batch["labels"], batch["loss_mask"], ctx, tiny.Announce(gradients.unit_done))
                if i == len(batches) - 1:
                    gradients.last_micro_batch()
                loss.backward()
                total += loss.detach()
            gradients.finish_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad is None for p in model.parameters())
    waits = num_waits(str(warning.message) for warning in said or ())
    return {"loss": total.cpu(), **{name: g.cpu() for name, g in tiny.flat_grads(gradients).items()}}, waits
