"""Memory of one rank in closed form: memory held throughout, and the additional memory of a training step at its peak.

    resident    parameters, master weights (16-bit models), optimizer state, the micro-batches; with ZeRO their shards, and buffers
    forward     activations of every block saved for backward, plus the LM head: one chunk of logits, its gradient, the table's gradient
    backward    from the last block to the first: activations of the blocks below, gradients of the blocks above
    update      all gradients

Gradients take memory from the first one of a step to the start of the next step (``optim/flat.py``), so backward frees
activations while it produces gradients, and the peak is at the head, at a block's backward, at a reduction, or at the
update, depending on the shapes. All of these are computed, tensor by tensor, following ``models/transformer.py``,
``parallel/ulysses.py``, ``parallel/linear.py`` and ``parallel/lm_head.py``: the head in ``estimate/memory_head.py``,
the blocks in ``estimate/memory_block.py``, from the sizes that ``estimate/memory_rank.py`` puts together, and passes of a
pipeline's stages beside each other in ``estimate/memory_pipeline.py``.

Only tensors are counted, as an allocator does: no fragmentation, NCCL buffers, or working memory inside a kernel. This
module does not import torch: a plan needs no devices. ``tests/dist/test_memory_form.py`` compares it with measured
steps.
"""

from __future__ import annotations

from typing import Literal

from megatron_sp.estimate.memory_passes import PassMoments
from megatron_sp.estimate.memory_pipeline import pipeline_host, pipeline_moments
from megatron_sp.estimate.memory_plan import Line, MemoryPlan, Moment
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
    return max((_of_rank(form, optimizer) for form in _largest(forms_of_ranks(workload))), key=lambda plan: plan.peak)


def _largest(forms: list[RankForm]) -> list[RankForm]:
    """Return the pipeline ranks of which one holds most: the ends, and between them the first of those with the same layers.

    In every schedule a rank has as many passes between F and B as the next one, or more.
    """
    found = {(form.shape.share.of_stages, form.shape.share.experts): form for form in reversed(forms[1:-1])}
    return [*forms[:1], *found.values(), *forms[1:][-1:]]


def plans_of_ranks(workload: Workload, optimizer: Literal["adam", "sgd"] = "adam") -> list[MemoryPlan]:
    """Return the memory of each pipeline rank, without a pipeline of the one; arguments are those of ``memory_plan``."""
    return [_of_rank(form, optimizer) for form in forms_of_ranks(workload)]


def _of_rank(form: RankForm, optimizer: Literal["adam", "sgd"]) -> MemoryPlan:
    if form.shape.share.is_cut:
        moments = pipeline_moments(form)
    else:
        passes = PassMoments(form)
        moments = [*passes.head(), *passes.forward(), *passes.backward()]
        moments.append(Moment("update", "optimizer", gradient_lines(form.zero.after())))
    return MemoryPlan(_resident(form, optimizer), tuple(moments), _host(form), _optimizer_host(form, optimizer))


def _host(form: RankForm) -> int:
    """Return the bytes of offloaded activations in host memory."""
    return pipeline_host(form) if form.shape.share.is_cut else form.activations.host


def _resident(form: RankForm, optimizer: str) -> tuple[Line, ...]:
    """Return the memory held for the whole run."""
    shape, zero = form.shape, form.zero
    kept = zero.updated_params * shape.wide
    if shape.cuda and form.workload.parallel.offload_optimizer:
        kept = 0
    data = (
        shape.num_micro_batches * shape.micro_batch * shape.whole_length * (8 + 8 + 4 + 8 * form.workload.model.is_bert)
    )
    return (
        Line("parameters", zero.kept_params * shape.e), Line("buffers for whole parameters", zero.buffers * shape.e),
        Line("master weights", kept if shape.is_16_bit else 0),
        Line("optimizer state", kept * (2 if optimizer == "adam" else 1)),
        Line("micro-batches", data), Line("tables of the forward pass", _tables(form)),
        Line("activations' copies in host memory", 0 if shape.cuda else _host(form)),
    )  # fmt: skip


def _optimizer_host(form: RankForm, optimizer: str) -> int:
    """Return the bytes of --offload-optimizer in a GPU's host: master weights, state, gradients, and what is sent back in 16 bits."""
    shape, zero = form.shape, form.zero
    if not (shape.cuda and form.workload.parallel.offload_optimizer):
        return 0
    each = shape.wide * (4 if optimizer == "adam" else 3) + (shape.e if shape.is_16_bit else 0)
    return zero.updated_params * each


def _tables(form: RankForm) -> int:
    """Return the bytes of positions, rotary tables, dropout's token keys and sliding-window masks."""
    shape, model = form.shape, form.workload.model
    rotary = (
        shape.length * model.rotary_dim // 2 * 2 * max(4, shape.wide) if model.position_embedding_type == "rope" else 0
    )
    keys = 8 * (shape.all_tokens + shape.tp_seq_tokens) if shape.dropout or model.attention_dropout > 0 else 0
    return 8 * shape.length + rotary + keys + _window_masks(form)


def _window_masks(form: RankForm) -> int:
    """Return the bytes of the sliding-window mask that all tiles share; a GPU's kernels for 16 bits need none."""
    window, length, shape = form.workload.model.window_size, form.shape.length, form.shape
    if (
        (shape.cuda and shape.is_16_bit)
        or form.attention.uses_reference
        or window is None
        or window == 1
        or window >= length
    ):
        return 0
    tile = window_tile(window)
    return tile * round_up(window - 1 + tile, 16 if shape.cuda else 1) * shape.e
