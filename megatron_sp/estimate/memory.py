"""Memory of one rank in closed form: memory held throughout, and the additional memory of a training step at its peak.

    resident    parameters, master weights (16-bit models), optimizer state, the micro-batches; with ZeRO their shards, and buffers
    forward     activations of every block saved for backward, plus the LM head: one chunk of logits, its gradient, the table's gradient
    backward    from the last block to the first: activations of the blocks below, gradients of the blocks above
    update      all gradients

Gradients take memory from the first one of a step to the start of the next step (``optim/flat.py``), so backward frees
activations while it produces gradients, and the peak is at the head, at a block's backward, at a reduction, or at the
update, depending on the shapes. All of these are computed, tensor by tensor, following ``models/transformer.py``,
``parallel/ulysses.py``, ``parallel/linear.py`` and ``parallel/lm_head.py``: the head in ``estimate/memory_head.py``,
the blocks in ``estimate/memory_block.py``, from the sizes that ``estimate/memory_rank.py`` puts together.

Only tensors are counted, as an allocator does: no fragmentation, NCCL buffers, or working memory inside a kernel. This
module does not import torch: a plan needs no devices. ``tests/dist/test_memory_form.py`` compares it with measured
steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from megatron_sp.estimate.memory_block import BlockMoments, place_of
from megatron_sp.estimate.memory_head import HeadMoments
from megatron_sp.estimate.memory_plan import Line, MemoryPlan, Moment, total
from megatron_sp.estimate.memory_rank import RankForm, forms_of_ranks
from megatron_sp.estimate.memory_zero import gradient_lines
from megatron_sp.estimate.workload import Workload
from megatron_sp.utils.numbers import round_up, window_tile


def memory_plan(workload: Workload, optimizer: Literal["adam", "sgd"] = "adam") -> MemoryPlan:
    """Return the memory of the rank that holds most.

    Args:
        workload: configuration of the run, and layout.
        optimizer: optimizer whose state is counted.
    """
    return max((_of_rank(form, optimizer) for form in forms_of_ranks(workload)), key=lambda plan: plan.peak)


def _of_rank(form: RankForm, optimizer: Literal["adam", "sgd"]) -> MemoryPlan:
    shape, zero = form.shape, form.zero
    head = HeadMoments(form)
    block = BlockMoments(form, head.params())
    moments = [*block.forward()]
    if shape.share.has_head:
        moments = [*head.forward(), *moments, *head.backward()]
    for layer in _telling_layers(form):
        moments += block.backward(layer)
    # or, of the same width, a copy without other ranks' rows
    widened = Line("table's gradient, widened", shape.sp_tokens * shape.h * shape.wide if shape.is_16_bit or shape.tp > 1 else 0)
    moments.append(Moment("backward", "embedding", (*gradient_lines(zero.at(0)), *block.stream_gradients(), widened)))
    moments += _reductions(form, head)
    if others := _of_other_passes(form):
        moments = [replace(moment, lines=(*moment.lines, *others)) for moment in moments]
    moments.append(Moment("update", "optimizer", gradient_lines(zero.after())))
    return MemoryPlan(_resident(form, optimizer), tuple(moments), form.activations.host, _optimizer_host(form, optimizer))


def _of_other_passes(form: RankForm) -> list[Line]:
    """Return what a pipeline rank holds of other micro-batches than the one that it computes: nothing without a pipeline."""
    shape, share = form.shape, form.shape.share
    if share.others == 0 and share.waiting == 0 and shape.layers == form.workload.model.num_layers:
        return []
    of_rank = total(form.activations.kept_by_blocks())
    # a product's operands: inputs of the four products of a block, and the gradients of their outputs
    operands = 3 * shape.whole_stream + (2 * form.attention.qkv_rows + form.attention.proj_columns) * shape.sp_tokens * shape.e // 2
    operands += shape.sp_tokens * (shape.ffn + shape.ffn_in) * shape.e + shape.stream
    return [
        Line("activations of other micro-batches", share.others * of_rank // share.stages),
        Line("operands of gradients that are put off", share.waiting * operands * shape.layers // share.stages),
        Line("messages between stages", 3 * shape.stream),
    ]  # fmt: skip


def _resident(form: RankForm, optimizer: str) -> tuple[Line, ...]:
    """Return the memory held for the whole run."""
    shape, zero = form.shape, form.zero
    kept = zero.num_params // zero.parts * shape.wide
    if shape.cuda and form.workload.parallel.offload_optimizer:
        kept = 0
    data = shape.num_micro_batches * shape.micro_batch * shape.whole_length * (8 + 8 + 4 + 8 * form.workload.model.is_bert)
    return (
        Line("parameters", zero.kept_params * shape.e), Line("buffers for whole parameters", zero.buffers * shape.e),
        Line("master weights", kept if shape.is_16_bit else 0),
        Line("optimizer state", kept * (2 if optimizer == "adam" else 1)),
        Line("micro-batches", data), Line("tables of the forward pass", _tables(form)),
        Line("activations' copies in host memory", 0 if shape.cuda else form.activations.host),
    )  # fmt: skip


def _optimizer_host(form: RankForm, optimizer: str) -> int:
    """Return the bytes of --offload-optimizer in a GPU's host: master weights, state, gradients, and what is sent back in 16 bits."""
    shape, zero = form.shape, form.zero
    if not (shape.cuda and form.workload.parallel.offload_optimizer):
        return 0
    each = shape.wide * (4 if optimizer == "adam" else 3) + (shape.e if shape.is_16_bit else 0)
    return zero.num_params // zero.parts * each


def _tables(form: RankForm) -> int:
    """Return the bytes of positions, rotary tables, dropout's token keys and sliding-window masks."""
    shape, model = form.shape, form.workload.model
    rotary = shape.length * model.rotary_dim // 2 * 2 * max(4, shape.wide) if model.position_embedding_type == "rope" else 0
    keys = 8 * (shape.all_tokens + shape.tp_seq_tokens) if shape.dropout or model.attention_dropout > 0 else 0
    return 8 * shape.length + rotary + keys + _window_masks(form)


def _window_masks(form: RankForm) -> int:
    """Return the bytes of sliding-window masks: one for all tiles but the last; a GPU's kernels for 16 bits need none."""
    window, length, shape = form.workload.model.window_size, form.shape.length, form.shape
    if (shape.cuda and shape.is_16_bit) or form.attention.uses_reference or window is None or window == 1 or window >= length:
        return 0
    if shape.context is not None:
        return window_tile(window) * (window - 1 + window_tile(window)) * shape.e
    rest, tile = length - window, window_tile(window)
    sizes = {min(tile, rest), rest % tile}
    apart = 16 if shape.cuda else 1
    return sum(queries * round_up(window - 1 + queries, apart) for queries in sizes) * shape.e


def _telling_layers(form: RankForm) -> list[int]:
    """Return the layers, last first, that can be at the peak: memory that changes evenly from block to block is largest at an end."""
    layers, recomputed = form.shape.layers, form.shape.recomputed
    chunks = {last - first for first, last in recomputed}
    even = not chunks or (chunks == {1} and len(recomputed) == layers)
    ends = {0, 1, layers - 2, layers - 1} if even else set(range(layers))
    return sorted((layer for layer in ends if 0 <= layer < layers), reverse=True)


def _reductions(form: RankForm, head: HeadMoments) -> list[Moment]:
    """Return the moments of gradient reductions: when backward leaves a unit, and after the backward pass."""
    shape, zero, layers = form.shape, form.zero, form.shape.layers
    packed = [Line("what tp ranks sum, packed", form.shared_gradients(unit) * shape.wide) for unit in range(layers + 2)]
    stream = [Line("gradient of the stream", shape.stream), Line("gradient of the head's input", shape.head_stream)]
    blocks = form.activations.kept_by_blocks()
    made = [
        Moment("backward", "reduction of the head", (*gradient_lines(held), head.params(), *blocks, *stream))
        for held in zero.reducing(layers + 1)
    ]
    for layer in _telling_layers(form):
        kept = form.activations.kept_below(layer)
        for held in zero.reducing(layer + 1):
            lines = (*gradient_lines(held), *kept, *stream, packed[layer + 1])
            made.append(Moment("backward", f"{place_of(layer, layers)} block, reduction", lines))
    made += [Moment("backward", "reductions after the backward pass", (*gradient_lines(held), packed[0])) for held in zero.reducing(0)]
    return made
