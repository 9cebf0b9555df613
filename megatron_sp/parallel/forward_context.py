"""Inputs of a forward pass besides the activations, and the units of a model."""

# A unit is a part of the model whose parameters are reduced, sharded and gathered together: the embedding, each block,
# the head. Its boundary notifies ``UnitEvents`` when its gradients are complete and which unit is read next.

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron_sp.ops.attention import AttentionMask, KernelName, document_ends
from megatron_sp.ops.attention_kernels import KeptTensors, LseKernel
from megatron_sp.ops.dropout import DropoutKeys, DropoutRows
from megatron_sp.parallel.row_mask import RowMask

if TYPE_CHECKING:
    from megatron_sp.parallel.context_plan import ContextPlan
    from megatron_sp.parallel.pipeline_stages import Stage
    from megatron_sp.parallel.router_pass import RouterPass
    from megatron_sp.parallel.sequence_slices import RowSlice

MicroBatch = dict[str, Tensor]
TABLE = "table"  # unit of an embedding's table that the first and the last rank of a pipeline share


class StageInput(NamedTuple):
    """Stage of a pipeline, and what has been computed for it."""

    stage: Stage
    # [s/parts, b, h], the output of the stage before; None for the first stage. With ``part`` "head" the output of this
    # stage's blocks.
    x: Tensor | None = None
    # "blocks": embedding and blocks alone, without what the last stage does after them; "head": only that
    part: Literal["all", "blocks", "head"] = "all"


class Unit(NamedTuple):
    """Part of the model whose parameters are handled together."""

    name: str
    module: nn.Module
    # what it is one of many of, of about the same size, which are used one after another and can share buffers: blocks,
    # experts of a block; empty: it is the only one. "whole": it is not gathered for each use, so ZeRO stage 3 is 1 for
    # it.
    alike: Literal["", "block", "experts", "whole"] = ""


class Cache(Protocol):
    """Interface of a KV cache."""

    # append k and v [s_new, m, 1, d] of a layer; return all so far [s, m, 1, d]
    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    # position ids of the next ``num_new`` tokens, int64 [num_new] or [b, num_new]
    def positions(self, num_new: int, device: torch.device) -> Tensor: ...

    # mask of a layer with this window, for groups of heads of each sequence; to be called after ``extend``
    def mask(self, groups: int, window: int | None) -> AttentionMask: ...


@dataclass
class ForwardContext:
    """Inputs of a forward pass besides the activations."""

    mask: AttentionMask
    kernel: KernelName = "sdpa"
    # real positions of the sequence that this rank's cp rank has, those between Ulysses' exchanges; 0: not known yet
    length: int = 0
    whole_length: int = 0  # real positions of the sequence, of which the mask speaks
    # who has which positions and exchanges which keys; None with one cp rank, which has them all
    plan: ContextPlan | None = None
    # int64 [b, s], position ids of the tokens within their documents; None: 0, 1, 2, ... in every sequence.
    positions: Tensor | None = None
    # cos and sin of the cp rank's positions, each [L, rotated/2] or [L, b, rotated/2], or None
    rotary: tuple[Tensor, Tensor] | None = None
    # dropout keys of all positions, within the blocks of the cp rank's; None: no dropout (evaluation).
    # ``local_dropout``: those of this rank's positions.
    dropout: DropoutKeys | None = None
    local_dropout: DropoutKeys | None = None
    cache: Cache | None = None
    repeats_attention: bool = False  # the run's ranks have agreed that recomputed blocks keep nothing of attention
    # attention's results that the blocks' recomputation takes from their first pass; None: there is none, or it
    # computes them again
    kept: KeptTensors | None = None
    # ``kept`` has what the exchange back has brought, too, so that the recomputation runs none
    keeps_received: bool = False
    # blocks that are not recomputed keep attention's results, and make q, k and v again in backward
    remakes_heads: bool = False
    recompute_core: bool = False  # recompute the core attention in backward instead of saving its intermediates
    mlp_chunks: int = 1  # number of chunks of positions in which the MLP is computed
    stage: StageInput | None = None  # the stage that is computed, of a model that is cut into several; None: all of it
    row_slice: RowSlice | None = None  # the slice of the sequence that is computed; None: all of it
    # positions of this rank that are not padding at the end, outside of tensor-parallel regions; None: all
    num_tokens: int | None = None
    routers: RouterPass | None = None  # of a training step of a model with experts
    # ``attention.lse_kernel``'s answers, which are the same for all layers of a pass: by window, shapes and strides
    lse_kernels: dict[Any, LseKernel | None] = field(default_factory=dict, init=False)


def row_mask(mask: AttentionMask, length: int, window: int | None = None) -> RowMask:
    """Return an attention mask in numbers of the host."""
    lengths = mask.lengths_on_host()
    if lengths is None and mask.key_lengths is not None:  # the host would have to wait
        text = "context parallelism plans by the lengths of the sequences"
        raise RuntimeError(f"{text}, and the mask has them on the device alone")
    window = mask.window if window is None else window
    return RowMask(length, mask.causal, window, mask.documents, lengths)


class ResidualDropout(NamedTuple):
    """Dropout of a branch before it joins the stream."""

    rate: float
    rows: DropoutRows  # [s, b]


def micro_batch_context(
    batch: MicroBatch, *, seed: int, step: int | Tensor, drops: bool, kernel: KernelName, causal: bool = True,
    repeats_attention: bool = False,
) -> ForwardContext:  # fmt: skip
    """Create the forward context of a micro-batch, with dropout if ``drops``."""
    # a batch may have ``positions`` and ``documents`` [b, s] (--reset-position-ids, --reset-attention-mask), or the
    # ``length`` [b] of each sequence, after which there is padding; ``step`` may be on the device
    keys = None
    if drops:
        positions = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
        keys = DropoutKeys.create(seed, step, batch["sample_ids"], positions)
    documents = document_ends(batch["documents"]) if "documents" in batch else None
    mask = AttentionMask(causal=causal, documents=documents)
    if "length" in batch:
        on_host, device = batch["length"].device.type == "cpu", batch["tokens"].device
        lengths = tuple(batch["length"].tolist()) if on_host else None
        mask = AttentionMask(causal, batch["length"].to(device, non_blocking=True), lengths=lengths)
    return ForwardContext(
        mask=mask, kernel=kernel, dropout=keys, positions=batch.get("positions"), repeats_attention=repeats_attention
    )


class UnitEvents(Protocol):
    """Receiver of notifications."""

    # the parameters of a unit are about to be read, in a forward or a backward pass
    def before_use(self, unit: int) -> None: ...

    # all weight gradients of a unit are complete
    def backward_done(self, unit: int) -> None: ...


def unit_boundary(x: Tensor, events: UnitEvents | None, units: tuple[int, ...], below: tuple[int, ...] = ()) -> Tensor:
    """Return a unit's input, which in backward reports that its gradients are complete."""
    # units: of a block with experts its own and theirs. below: those whose backward comes next, none if it reads
    # nothing. The report comes when the input's own gradient is complete, in a hook, which costs the host a fifth of an
    # autograd function: every op computes its weight gradient in the same backward as its input gradient, and the
    # unit's input gradient is computed last
    if events is not None and x.requires_grad:
        x = x.view_as(x) if x.is_leaf else x  # a leaf's hook may come before gradients that autograd accumulates itself
        x.register_hook(partial(_tell, events, units, below))
    return x


def _tell(events: UnitEvents, units: tuple[int, ...], below: tuple[int, ...], grad: Tensor) -> None:
    for unit in reversed(units):
        events.backward_done(unit)
    for unit in below:
        events.before_use(unit)
