"""Execution of a pipeline schedule on one rank: the actions of its list, with their messages.

    F   x from the rank above (received one action ahead)  ->  y = stage(x)  ->  y to the rank below, without waiting
    B   dy from the rank below, or from the loss of y      ->  dx            ->  dx to the rank above, without waiting
    W   the gradients of the weights, which B has put off (``PipelinePlan.splits``); else B has computed them

Messages from one rank to another are sent and received in the order in which the sender makes them, in a group in which both
do nothing else. A receive is posted one action before it is needed, or earlier if one behind it is; what has been
received early waits in its buffer. The output of a stage is not kept: backward needs its graph, not its values. What has been sent is
kept until a message comes back that was made later than it was received (``PipelinePlan.received_before``).

What is computed is not known here (``StageWork``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_sp.comm.collectives import Handle, receive_async, send_async
from megatron_sp.comm.groups import Group
from megatron_sp.comm.recorder import CallSite, Clock, CollectiveRecord, Moment, Recorder, WallClock
from megatron_sp.ops.allocator import empty
from megatron_sp.parallel.pipeline_plan import Action, PipelinePlan


class StageWork(Protocol):
    """Interface of what a pipeline computes (``training/pipelined.py``)."""

    def shape(self, action: Action) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        """Return shape, dtype and device of what a stage hands on."""

    def forward(self, action: Action, x: Tensor | None) -> Tensor:
        """Return the output of a stage; without gradients the last one computes its losses, too.

        Args:
            x: what the stage before has returned; None for the first one.
        """

    def loss(self, action: Action, y: Tensor) -> Tensor:
        """Return what is to be differentiated, from the output of the last stage; called when its backward pass begins."""

    def before_backward(self, action: Action, put_off: Action | None) -> None:
        """Prepare for the backward pass of ``action``; with ``put_off`` gradients of weights are kept under that name."""

    def after_backward(self, action: Action) -> None:
        """The backward pass has run."""

    def weights(self, action: Action) -> None:
        """Compute the gradients that were put off under ``action``, if any were, and complete the micro-batch."""


class Position:
    """Place of this rank in a schedule, for messages about a step that does not end. Other threads read it."""

    action: Action | None = None  # what is computed, or waits for its input; None outside of a schedule
    awaits: str = ""  # the message that is waited for, in words; empty: none

    def __str__(self) -> str:
        action, awaits = self.action, self.awaits
        if action is None:
            return ""
        return f"action {action}" + (f", which waits for {awaits}" if awaits else "")


class Channels:
    """Groups between this rank of a pipeline and its neighbours.

    Args:
        groups: of each pair (source, target) of pipeline ranks that this rank is one of (``comm.groups.pipes``).
        ranks: rank in the world of each pipeline rank.
        me: this one.

    Attributes:
        recorder: records messages whose action is given (--report-overlap); None: nothing does.
        position: where this rank is.
    """

    def __init__(self, groups: Mapping[tuple[int, int], Group], ranks: Sequence[int], me: int) -> None:
        self._groups, self._ranks, self.me = groups, list(ranks), me
        self.recorder: Recorder | None = None
        self.position = Position()

    def send(self, x: Tensor, target: int, made_by: Action | None = None) -> Handle:
        """Start sending to a pipeline rank what an action has made."""
        record = self._record("send", x, (self.me, target), made_by)
        return send_async(x, self._groups[self.me, target], self._ranks[target], _result_of(made_by)).recorded(record)

    def receive(self, into: Tensor, source: int, made_by: Action | None = None) -> Handle:
        """Start receiving from a pipeline rank what an action makes; messages arrive in the order in which they are sent."""
        record = self._record("receive", into, (source, self.me), made_by)
        return receive_async(into, self._groups[source, self.me], self._ranks[source], _result_of(made_by)).recorded(
            record
        )

    def _record(self, op: str, x: Tensor, pipe: tuple[int, int], made_by: Action | None) -> CollectiveRecord | None:
        if self.recorder is None or made_by is None:
            return None
        sends, receives = ((x.numel(),), ()) if op == "send" else ((), (x.numel(),))
        site = CallSite(self.recorder, "pp", made_by.stage, pipe, "forward" if made_by.kind == "F" else "backward")
        return site.start(op, sends, receives, x.dtype, str(made_by))


def _result_of(action: Action | None) -> str:
    return "" if action is None else f"{action} of pipeline stage {action.stage}"


class _Mail:
    """Messages of one step: receives that are posted in time, and sends that nobody waits for."""

    def __init__(self, plan: PipelinePlan, channels: Channels, work: StageWork) -> None:
        self._channels, self._work, self._rank_of = channels, work, plan.rank_of
        self._received: dict[Action, Handle] = {}  # by what made it
        self._targets = {message.action: message.target for message in plan.messages(channels.me)}
        self._sent: dict[int, deque[Handle]] = {target: deque() for target in self._targets.values()}
        self._gone = dict.fromkeys(self._sent, 0)  # how many to each target are no longer in ``_sent``
        self._posts, self._received_by = plan.posts(channels.me), plan.received_before(channels.me)

    def post(self, index: int) -> None:
        # post the receives that are due before action ``index``
        for message in self._posts.get(index, ()):
            shape, dtype, device = self._work.shape(message.action)
            into = empty(shape, dtype=dtype, device=device)
            self._received[message.action] = self._channels.receive(into, message.source, message.action)

    def take(self, made_by: Action) -> Tensor:
        # wait for a message, and let go of those that its maker had received before it made this one
        handle, position = self._received.pop(made_by), self._channels.position
        position.awaits = handle.expected
        try:
            received = handle.wait()
        finally:
            position.awaits = ""
        # gloo does not say when a message has gone: without this all of a step's would be kept
        source = self._rank_of[made_by.stage]
        while self._gone.get(source, 0) < self._received_by[made_by]:
            self._forget(source)
        return received

    def send(self, made_by: Action, x: Tensor) -> None:
        target = self._targets[made_by]
        self._sent[target].append(self._channels.send(x, target, made_by))
        self.forget_sent()

    def forget_sent(self) -> None:
        for target, sent in self._sent.items():
            while sent and sent[0].is_completed:
                self._forget(target)

    def finish(self) -> None:
        for target, sent in self._sent.items():
            while sent:
                self._forget(target)

    def _forget(self, target: int) -> None:
        self._sent[target].popleft().wait()
        self._gone[target] += 1


class _Pass:
    """A stage between its F and its B: the input as autograd knows it, and the end of its graph.

    Args:
        x: input.
        y: output.
        loss: of the output, on the last stage. It is computed when backward begins: the head makes the gradient of its weight
            together with the loss, and one for each micro-batch between F and B would take the memory of the weight each.
    """

    def __init__(self, x: Tensor | None, y: Tensor, loss: Callable[[Tensor], Tensor] | None) -> None:
        self.x, self._holder, self._loss = x, _Holder(), loss
        self._end = _End.apply(self._holder, y) if loss is None else y

    def take_gradient(self, grad: Tensor | None) -> None:
        """Take the gradient of the output, from which ``backward`` begins, and which it lets go of; None: it begins from the loss."""
        self._holder.grad = grad

    def backward(self) -> Tensor | None:
        # run backward; return the gradient of the input
        ends = [self._end if self._loss is None else self._loss(self._end)]
        del self._end  # the values of the output, which the head has saved if it needs them
        torch.autograd.backward(ends.pop())
        return None if self.x is None else self.x.grad


class _Holder:
    grad: Tensor | None = None


class _End(torch.autograd.Function):
    """Scalar that stands for the output of a stage, whose values are not kept; its backward passes the output's gradient on."""

    @staticmethod
    def forward(ctx: Any, holder: _Holder, y: Tensor) -> Tensor:
        ctx.holder = holder
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[None, Tensor | None]:  # type: ignore[override]
        grad, ctx.holder.grad = ctx.holder.grad, None
        return None, grad


class Timeline:
    """When this rank computed what in a step, without the waits for messages before it.

    Args:
        clock: that of the device; on a GPU moments are CUDA events of the stream that computes, so nothing is waited for
            here. The default is the host's, in seconds.

    Attributes:
        spans: (action, begin, end), in order.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or WallClock()
        self.spans: list[tuple[Action, Moment, Moment]] = []

    def begins(self, action: Action) -> None:
        """An action has all that it needs."""
        self.spans.append((action, self._clock.now(), None))

    def ends(self) -> None:
        """It has been computed, and its result is being sent."""
        action, start, _ = self.spans[-1]
        self.spans[-1] = action, start, self._clock.now()


def run_pipeline(
    plan: PipelinePlan, channels: Channels, work: StageWork, timeline: Timeline | None = None,
    before: Callable[[Action], None] | None = None,
) -> None:  # fmt: skip
    """Go through this rank's actions of a plan. Collective over the pipeline.

    Args:
        plan: passes ``check_plan``; may consist of F alone (``forward_plan``), then without gradients.
        channels: groups to the neighbours.
        timeline: records when each action was computed.
        before: called before each action, when it may yet have to wait for its input.
    Raises:
        WaitError: a neighbour died, or was late.
    """
    mail, passes, last = _Mail(plan, channels, work), dict[Action, _Pass](), plan.num_stages - 1
    local: dict[Action, Tensor] = {}  # from one stage of this rank to the next
    position = channels.position
    for index, action in enumerate(plan.actions[channels.me]):
        position.action = action
        mail.post(index)
        mail.forget_sent()
        if before is not None:
            before(action)
        source = plan.source(action)
        arrived = (
            None
            if source is None
            else local.pop(source)
            if plan.rank_of[source.stage] == channels.me
            else mail.take(source)
        )
        made: Tensor | None = None
        if timeline is not None:
            timeline.begins(action)
        if action.kind == "F":
            x = None if arrived is None else arrived.requires_grad_(torch.is_grad_enabled())
            y = work.forward(action, x)
            if torch.is_grad_enabled():
                passes[action] = _Pass(x, y, partial(work.loss, action) if action.stage == last else None)
            made = None if action.stage == last else y.detach()
            del x, y
        elif action.kind == "B":
            work.before_backward(action, action._replace(kind="W") if plan.splits else None)
            of_action = passes.pop(action._replace(kind="F"))
            of_action.take_gradient(arrived)
            arrived = None  # backward needs it for its first operation alone
            made = of_action.backward()
            del of_action
            work.after_backward(action)
        else:
            work.weights(action)
        del arrived
        if timeline is not None:
            timeline.ends()
        if made is None:
            continue
        if plan.rank_of[action.stage + (1 if action.kind == "F" else -1)] == channels.me:
            local[action] = made
        else:
            mail.send(action, made.contiguous())
        del made
    position.action = None
    mail.finish()
