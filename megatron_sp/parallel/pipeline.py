"""Execution of a pipeline schedule on one rank: the actions of its list, with their messages."""

#     F   x from the rank above (received one action ahead)  ->  y = stage(x)  ->  y to the rank below, without waiting
#     B   dy from the rank below, or from the loss of y      ->  dx            ->  dx to the rank above, without waiting
#     W   the gradients of the weights, which B has put off (``PipelinePlan.splits``); else B has computed them
#
# Messages from one rank to another are sent and received in the order in which the sender makes them, in a group in
# which both do nothing else.

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

    # shape, dtype and device of what a stage hands on
    def shape(self, action: Action) -> tuple[tuple[int, ...], torch.dtype, torch.device]: ...

    # a stage's output; the first one has no input, and without gradients the last one computes its losses, too
    def forward(self, action: Action, x: Tensor | None) -> Tensor: ...

    # what is to be differentiated, from the last stage's output; called when its backward pass begins
    def loss(self, action: Action, y: Tensor) -> Tensor: ...

    # with ``put_off`` gradients of weights are kept under that name
    def before_backward(self, action: Action, put_off: Action | None) -> None: ...

    def after_backward(self, action: Action) -> None: ...

    # the gradients that were put off under ``action``, if any were; the micro-batch is complete then
    def weights(self, action: Action) -> None: ...


class Position:
    """Place of this rank in a schedule, for messages about a step that does not end; other threads read it."""

    action: Action | None = None  # what is computed, or waits for its input; None outside of a schedule
    awaits: str = ""  # the message that is waited for, in words; empty: none

    def __str__(self) -> str:
        if (action := self.action) is None:
            return ""
        awaits = self.awaits
        return f"action {action}" + (f", which waits for {awaits}" if awaits else "")


class Channels:
    """Groups between this rank of a pipeline and its neighbours, by (source, target) pipeline ranks."""

    def __init__(self, groups: Mapping[tuple[int, int], Group], ranks: Sequence[int], me: int) -> None:
        self._groups, self._ranks, self.me = groups, list(ranks), me  # ``ranks``: in the world, of each pipeline rank
        self.recorder: Recorder | None = None  # records messages whose action is given (--report-overlap)
        self.position = Position()

    def send(self, x: Tensor, target: int, made_by: Action | None = None) -> Handle:
        record = self._record("send", x, (self.me, target), made_by)
        return send_async(x, self._groups[self.me, target], self._ranks[target], _result_of(made_by)).recorded(record)

    # messages of a pipeline rank arrive in the order in which they are sent
    def receive(self, into: Tensor, source: int, made_by: Action | None = None) -> Handle:
        record = self._record("receive", into, (source, self.me), made_by)
        handle = receive_async(into, self._groups[source, self.me], self._ranks[source], _result_of(made_by))
        return handle.recorded(record)

    def _record(self, op: str, x: Tensor, pipe: tuple[int, int], made_by: Action | None) -> CollectiveRecord | None:
        if self.recorder is None or made_by is None:
            return None
        sends, receives = ((x.numel(),), ()) if op == "send" else ((), (x.numel(),))
        site = CallSite(self.recorder, "pp", made_by.stage, pipe, "forward" if made_by.kind == "F" else "backward")
        return site.start(op, sends, receives, x.dtype, str(made_by))


def _result_of(action: Action | None) -> str:
    return "" if action is None else f"{action} of pipeline stage {action.stage}"


class _Mail:
    def __init__(self, plan: PipelinePlan, channels: Channels, work: StageWork) -> None:
        self._channels, self._work, self._rank_of = channels, work, plan.rank_of
        self._received: dict[Action, Handle] = {}  # by what made it
        self._targets = {message.action: message.target for message in plan.messages(channels.me)}
        self._sent: dict[int, deque[Handle]] = {target: deque() for target in self._targets.values()}
        self._gone = dict.fromkeys(self._sent, 0)  # how many to each target are no longer in ``_sent``
        self._posts, self._received_by = plan.posts(channels.me), plan.received_before(channels.me)

    def post(self, index: int) -> None:
        # the receives that are due before action ``index``; what comes early waits in its buffer
        for message in self._posts.get(index, ()):
            shape, dtype, device = self._work.shape(message.action)
            into = empty(shape, dtype=dtype, device=device)
            self._received[message.action] = self._channels.receive(into, message.source, message.action)

    def take(self, made_by: Action) -> Tensor:
        handle, position = self._received.pop(made_by), self._channels.position
        position.awaits = handle.expected
        try:
            received = handle.wait()
        finally:
            position.awaits = ""
        # what its maker had received before it made this can be let go of. gloo does not say when a message has gone:
        # without this all of a step's would be kept
        source = self._rank_of[made_by.stage]
        while self._gone.get(source, 0) < self._received_by[made_by]:
            self._forget(source)
        return received

    def send(self, made_by: Action, x: Tensor) -> None:
        target = self._targets[made_by]
        self._sent[target].append(self._channels.send(x, target, made_by))
        self.forget_sent()

    def forget_sent(self, *, wait: bool = False) -> None:
        # let go of what has gone, with ``wait`` of all once it has
        for target, sent in self._sent.items():
            while sent and (wait or sent[0].is_completed):
                self._forget(target)

    def _forget(self, target: int) -> None:
        self._sent[target].popleft().wait()
        self._gone[target] += 1


class _Pass:
    """A stage between its F and its B: the input as autograd knows it, and the end of its graph."""

    def __init__(self, x: Tensor | None, y: Tensor, loss: Callable[[Tensor], Tensor] | None) -> None:
        self.x, self.grad = x, list[Tensor | None]()  # of the output, which the pass lets go of once it has been read
        # the loss is computed when backward begins: the head makes the gradient of its weight together with it, and one
        # for each micro-batch between F and B would take the memory of the weight each
        self._loss = loss
        self._end = _End.apply(self.grad, y) if loss is None else y

    def backward(self) -> Tensor | None:
        # return the gradient of the input
        ends = [self._end if self._loss is None else self._loss(self._end)]
        del self._end  # the values of the output, which the head has saved if it needs them
        torch.autograd.backward(ends.pop())
        return None if self.x is None else self.x.grad


class _End(torch.autograd.Function):
    # a scalar in place of a stage's output, of which backward needs the graph and not the values

    @staticmethod
    def forward(ctx: Any, grad: list[Tensor | None], y: Tensor) -> Tensor:
        ctx.grad = grad
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[None, Tensor | None]:  # type: ignore[override]
        return None, ctx.grad.pop()


class Timeline:
    """When this rank computed what in a step, without the waits for messages before it."""

    def __init__(self, clock: Clock | None = None) -> None:
        # of the device: on a GPU moments are CUDA events of the stream that computes, so nothing is waited for here
        self._clock: Clock = clock or WallClock()
        self.spans: list[tuple[Action, Moment, Moment]] = []  # action, begin and end, in order

    def begins(self, action: Action) -> None:
        self.spans.append((action, self._clock.now(), None))

    def ends(self) -> None:
        action, start, _ = self.spans[-1]
        self.spans[-1] = action, start, self._clock.now()


def run_pipeline(
    plan: PipelinePlan, channels: Channels, work: StageWork, timeline: Timeline | None = None,
    before: Callable[[Action], None] | None = None,
) -> None:  # fmt: skip
    """Go through this rank's actions of a plan that passes ``check_plan``. Collective; WaitError: a neighbour was late.

    Args:
        before: called before each action, when it may yet have to wait for its input.
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
        arrived: Tensor | None = None
        if source is not None:
            arrived = local.pop(source) if plan.rank_of[source.stage] == channels.me else mail.take(source)
        result: Tensor | None = None
        if timeline is not None:
            timeline.begins(action)
        if action.kind == "F":
            x = None if arrived is None else arrived.requires_grad_(torch.is_grad_enabled())
            y = work.forward(action, x)
            if torch.is_grad_enabled():
                passes[action] = _Pass(x, y, partial(work.loss, action) if action.stage == last else None)
            result = None if action.stage == last else y.detach()
            del x, y
        elif action.kind == "B":
            work.before_backward(action, action._replace(kind="W") if plan.splits else None)
            of_action = passes.pop(action._replace(kind="F"))
            of_action.grad.append(arrived)
            arrived = None  # backward needs it for its first operation alone
            result = of_action.backward()
            del of_action
            work.after_backward(action)
        else:
            work.weights(action)
        del arrived
        if timeline is not None:
            timeline.ends()
        if result is None:
            continue
        if plan.rank_of[action.stage + (1 if action.kind == "F" else -1)] == channels.me:
            local[action] = result
        else:
            mail.send(action, result.contiguous())
        del result
    position.action = None
    mail.forget_sent(wait=True)
