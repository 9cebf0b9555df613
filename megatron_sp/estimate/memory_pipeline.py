"""Moments of a step of a pipeline rank in closed form: passes of its stages, each beside what the rank holds of other micro-batches.

    F    blocks of the stage, forward
    B    loss and head on the last stage, then the stage backward
    W    the gradients that B has put off

Beside them (``estimate/pipeline_states.py`` counts them):

    between F and B    what the stage's blocks save, and on the last stage its output
    between B and W    the operands of the blocks' products (``optim/gradients.py :: put_off``)
    messages           of those received or sent, and from one stage of the rank to another
    gradients          of the units of all stages that have been written, and reductions under way

With slices the pass that is computed counts as one of a whole sequence, which is more than it takes.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_sp.estimate.memory_passes import PassMoments
from megatron_sp.estimate.memory_plan import Line, Moment, total
from megatron_sp.estimate.memory_put_off import PutOffForm
from megatron_sp.estimate.memory_rank import RankForm
from megatron_sp.estimate.memory_zero import gradient_lines
from megatron_sp.estimate.pipeline_gradients import StageGradients
from megatron_sp.estimate.pipeline_states import PassState


def pipeline_moments(form: RankForm) -> list[Moment]:
    """Return the moments of a step of a pipeline rank."""
    share = form.shape.share
    stages, moments = [form.of_stage(index) for index in range(share.stages)], list[Moment]()
    for state in share.states:
        gradients = StageGradients(form.zero, share, state)
        beside = _beside(form, stages, state)
        of_action = _moments_of(stages[state.stage].with_gradients(gradients), state)
        moments += [replace(moment, lines=(*moment.lines, *beside)) for moment in of_action]
    after = StageGradients(form.zero, share, None)
    moments += [Moment("backward", "reductions after all passes", gradient_lines(held)) for held in after.finishing()]
    return [*moments, Moment("update", "optimizer", gradient_lines(after.after()))]


def pipeline_host(form: RankForm) -> int:
    """Return the bytes of offloaded activations in host memory, of all passes that a rank has between F and B at a time."""
    share, most = form.shape.share, 0
    hosts = [form.of_stage(index).activations.host for index in range(share.stages)]
    for state in share.states:
        own = hosts[state.stage] if state.kind != "W" else 0
        of_others = zip(_by_stage(state.alive, len(state.messages)), hosts, strict=True)
        most = max(most, own + round(sum(count * host for count, host in of_others)))
    return most


def _moments_of(stage: RankForm, state: PassState) -> list[Moment]:
    """Return the moments of one action."""
    passes = PassMoments(stage)
    if state.kind == "F":
        return passes.forward()
    if state.kind == "B":
        return [*(replace(moment, phase="backward") for moment in passes.head()), *passes.backward()]
    return passes.weights()


def _beside(form: RankForm, stages: list[RankForm], state: PassState) -> list[Line]:
    """Return what a rank holds of other passes than the one that it computes."""
    saved, slices = 0.0, len(state.messages)
    for stage, count in zip(stages, _by_stage(state.alive, slices), strict=True):
        output = form.shape.stream if stage.shape.share.has_head else 0
        saved += count * (total(stage.activations.kept_by_blocks()) + output)
    operands = PutOffForm(form.workload.model, form.shape, form.attention).block
    put_off = sum(count * stage.shape.layers for stage, count in zip(stages, _by_stage(state.waiting, slices), strict=True))
    return [
        Line("activations of other micro-batches", round(saved)),
        Line("operands of gradients that are put off", round(put_off * operands)),
        Line("messages between stages", sum(state.messages) * form.shape.stream // slices),
    ]  # fmt: skip


def _by_stage(counts: tuple[int, ...], slices: int) -> list[float]:
    """Return how many passes of whole sequences the counted ones are, of each stage; slices count as equal parts."""
    return [sum(counts[first : first + slices]) / slices for first in range(0, len(counts), slices)]
