"""Moments of a step of a pipeline rank in closed form: passes of its stages, each beside what the rank holds of other micro-batches.

    F    blocks of the stage, forward
    B    loss and head on the last stage, then the stage backward
    W    the gradients that B has put off

Beside them (``estimate/pipeline_states.py`` counts them):

    between F and B    what the stage's blocks save, and on the last stage its output
    between B and W    the operands of the blocks' products (``optim/gradients.py :: put_off``)
    messages           of those received or sent, and from one stage of the rank to another
    gradients          of the units of all stages that have been written, and reductions under way
"""

from __future__ import annotations

from dataclasses import replace

from megatron_sp.estimate.memory_passes import PassMoments
from megatron_sp.estimate.memory_plan import Line, Moment, total
from megatron_sp.estimate.memory_put_off import operands_of_blocks
from megatron_sp.estimate.memory_rank import RankForm
from megatron_sp.estimate.memory_zero import gradient_lines
from megatron_sp.estimate.pipeline_gradients import StageGradients
from megatron_sp.estimate.pipeline_states import PassState


def pipeline_moments(form: RankForm) -> list[Moment]:
    """Return the moments of a step of a pipeline rank."""
    share = form.shape.share
    stages, moments = form.of_passes(), list[Moment]()
    for state in share.states:
        gradients = StageGradients(form.zero, share, state)
        beside = _beside(form, stages, state)
        of_action = _moments_of(stages[state.stage * share.num_slices + state.slice].with_gradients(gradients), state)
        moments += [replace(moment, lines=(*moment.lines, *beside)) for moment in of_action]
    after = StageGradients(form.zero, share, None)
    moments += [Moment("backward", "reductions after all passes", gradient_lines(held)) for held in after.finishing()]
    return [*moments, Moment("update", "optimizer", gradient_lines(after.after()))]


def pipeline_host(form: RankForm) -> int:
    """Return the bytes of offloaded activations in host memory, of all passes that a rank has between F and B at a time.

    Buffers are used again for storages of the same size, so not by slices of other lengths.
    """
    share = form.shape.share
    hosts = [stage.activations.host for stage in form.of_passes()]
    most = [0] * share.num_slices
    for state in share.states:
        counts = list(state.alive)
        if state.kind != "W":
            counts[state.stage * share.num_slices + state.slice] += 1
        for number in range(share.num_slices):
            of_slice = slice(number, None, share.num_slices)
            now = sum(count * host for count, host in zip(counts[of_slice], hosts[of_slice], strict=True))
            most[number] = max(most[number], now)
    return sum(most)


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
    share, saved, put_off = form.shape.share, 0, 0
    for stage, alive, waiting in zip(stages, state.alive, state.waiting, strict=True):
        output = stage.shape.stream if stage.shape.share.has_head else 0
        saved += alive * (total(stage.activations.kept_by_blocks()) + output)
        put_off += waiting * operands_of_blocks(form.workload.model, stage.shape, stage.attention)
    # those of the action's own micro-batch are counted with its pass
    own = int(state.kind == "B" and state.slice < share.num_slices - 1)
    partial = (
        sum(state.partial[index] * layers for index, layers in enumerate(share.of_stages))
        - own * share.of_stages[state.stage]
    )
    messages = sum(count * stage.shape.stream for count, stage in zip(state.messages, stages, strict=False))
    return [
        Line("activations of other micro-batches", saved), Line("operands of gradients that are put off", put_off),
        Line("gradients of the keys of all slices", partial * form.attention.d_keys), Line("messages between stages", messages),
    ]  # fmt: skip
