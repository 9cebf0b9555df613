"""One optimizer step: all micro-batches in, one update out, the same decision on every rank.

    counts of loss tokens  --all_reduce-->  (under the first forward)
    for each micro-batch:  forward, loss sums / global counts, backward (gradients go into the flat buffers)
    each unit's gradients  --all_reduce(sum), or to shards-->  (under the rest of the last backward)
    grad norm, finite?  ->  clip, unscale and AdamW in one pass, or nothing
    each unit's parameters  --all_gather from shards-->  (under the next forward; ZeRO stages 1 and 2)

Nothing is averaged: the loss is divided by the *global* number of loss tokens, so gradients are summed over
micro-batches and ranks, and a rank without loss tokens is no special case.
"""

# What the host learns of a step is one fp64 vector on the device, the *summary*:
#
#     gradient norm | sum of each loss term | count of each term | votes to stop, sequences, tokens | sample digests
#     | router counters
#
# It travels to the host while the update runs: whether that takes place is decided on the device, and again, by the
# same numbers, on the host. Where the host updates (--offload-optimizer, apex), it decides first.

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import Handle, all_reduce_async
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.ops.allocator import host_empty, to_device
from megatron_sp.ops.attention import KernelName
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler, is_finite
from megatron_sp.optim.weights import UnitWork, WholeWeights
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch, UnitEvents, micro_batch_context
from megatron_sp.training import microbatches
from megatron_sp.utils.faults import NO_FAULTS, FaultPlan

if TYPE_CHECKING:
    from megatron_sp.comm.recorder import Recorder
    from megatron_sp.parallel.router_pass import RouterStep
    from megatron_sp.training.graphs import StepGraphs
    from megatron_sp.training.pipelined import Pipeline
    from megatron_sp.training.report import RouterReport

ModelPass = Callable[[nn.Module, MicroBatch, ForwardContext, UnitEvents | None], Tensor]
LossFunction = Callable[[nn.Module, MicroBatch, ForwardContext, UnitEvents | None], list[Tensor]]


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Move a micro-batch to the device, but for what the host reads: that would cause a sync."""
    on_host = ("documents", "length", "digests", "places")
    return {name: t if name in on_host else t.to(device, non_blocking=True) for name, t in batch.items()}


@dataclass(frozen=True)
class Loss:
    """Loss terms of a task, as sums and counts: the step divides by the counts of all ranks."""

    # with gradients off, sums and counts append the values of ``metrics``, for validation

    names: tuple[str, ...]  # of the terms in the log; the first one is "the loss" of the run
    counts: Callable[[MicroBatch], list[Tensor]]  # divisor of each term's sum, known before any forward pass
    sums: LossFunction  # sum of each term over a micro-batch, scalars
    causal: bool = True  # attention mask; False: tokens attend to their whole sequence
    metrics: tuple[str, ...] = ()
    of_tokens: bool = True  # the first term is a mean over tokens: its exponential is a perplexity
    hidden: ModelPass | None = None  # output of the pipeline stage in the context; None: the task has no stages

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of what a validation reports."""
        return (*self.names, *self.metrics)


@dataclass
class StepResult:
    """Result of a step, the same on every rank."""

    losses: list[float]  # each term divided by its count, over all ranks
    grad_norm: float  # of the unscaled gradients, before clipping
    updated: bool
    overflow: bool  # an ordinary fp16 overflow: it lowers the loss scale, and is no error
    stop_requested: bool  # any rank received a signal or ran out of time
    num_loss_tokens: float  # divisor of the first term
    sample_ids: list[int] = field(default_factory=list)  # in the order of the global batch
    sample_digests: list[int] = field(default_factory=list)  # in the same order (``data/dataset.py``)
    routers: RouterReport | None = None  # of a model with experts
    decoupled_lr: float | None = None  # of word embeddings and output layer, if they have one of their own


@dataclass(frozen=True)
class StepParts:
    """The model and what updates it."""

    model: nn.Module
    weights: WholeWeights
    gradients: FlatGradients
    optimizer: FlatOptimizer
    scaler: LossScaler
    pipeline: Pipeline | None = None


@dataclass(frozen=True)
class StepOptions:
    seed: int
    drops: bool  # any dropout rate is above 0
    kernel: KernelName  # of attention
    torch_dropout: bool = False  # see ``run.Task``
    repeats_attention: bool = False  # recomputed blocks keep nothing of attention


class TrainStep:
    """A training step; ``run`` performs one."""

    # before_update is called before the weights change: a copy of them on another stream synchronizes there

    def __init__(
        self, parts: StepParts, loss: Loss, groups: ParallelGroups, options: StepOptions,
        faults: FaultPlan = NO_FAULTS, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.model, self.weights, self.gradients = parts.model, parts.weights, parts.gradients
        self.optimizer, self.scaler, self.pipeline = parts.optimizer, parts.scaler, parts.pipeline
        self.events = UnitWork(parts.weights, parts.gradients)
        self.loss, self.groups, self.options, self.faults, self.recorder = loss, groups, options, faults, recorder
        self.before_update: Callable[[], None] = lambda: None
        self.graphs: StepGraphs | None = None
        self.routers: RouterStep | None = None  # of the current step, of a model with experts

    def run(
        self, micro_batches: list[MicroBatch], step: int, *, lr: float, weight_decay: float, stop: bool = False,
        digests: Sequence[Tensor] = (), places: Sequence[Tensor] = (), decoupled_lr: float | None = None,
    ) -> StepResult:  # fmt: skip
        """Perform step number ``step`` (from 1), a key of dropout. Collective. Raises DataError.

        Args:
            decoupled_lr: learning rate of word embeddings and output layer (default: ``lr``).
            stop: this rank wants to stop after the step.
            digests: digests of each micro-batch's samples, float64 [b] on the host.
            places: their places in the global batch, int64 [b] on the host.
        """
        microbatches.require_same_sequences(micro_batches, self.groups)
        self.seed(step)
        if self.recorder is not None:
            self.recorder.start_step()
        totals = self.local_totals(micro_batches, stop, digests, places)
        replayed = None
        if self.graphs is not None:
            replayed = self.graphs.replay(micro_batches, totals, step, lr, decoupled_lr, weight_decay)
        summary, replay_update = replayed or (self.passes(micro_batches, totals, step), None)
        on_host, copied = summary, None
        if summary.is_cuda:
            on_host = host_empty(summary.shape, summary.dtype, summary.device)
            on_host.copy_(summary, non_blocking=True)
            copied = torch.cuda.current_stream(summary.device).record_event()
        self.faults.at("optim.step", step)
        optimizer, scale, queued = self.optimizer, self.scaler.scale, self.optimizer.updates_on_device
        if queued:  # the device decides by the numbers that the host has not read yet
            self.before_update()
            if replay_update is not None:
                replay_update()
                optimizer.num_updates += 1
            else:
                skip = self.is_left_out(summary)
                optimizer.step_on_device(
                    lr, weight_decay, summary[0], scale, skip, updated=self.weights.refresh, decoupled_lr=decoupled_lr
                )
                self._update_expert_biases(summary, skip)

        # the only point of the step where the host waits for the device; the fields are read in their order
        if copied is not None:
            copied.synchronize()
        values, num_terms = iter(on_host.tolist()), len(self.loss.names)
        grad_norm = next(values)
        sums, counts = list(islice(values, num_terms)), list(islice(values, num_terms))
        stops, sequences, tokens = islice(values, 3)
        num_samples = self.groups.dp_size * sum(own.numel() for own in digests)
        sample_digests = [int(digest) for digest in islice(values, num_samples)]
        losses = [s / c if c > 0 else 0.0 for s, c in zip(sums, counts, strict=True)]

        finite_loss, finite_grad = is_finite(*losses), is_finite(grad_norm)
        ordinary = self.scaler.update(overflow=not finite_grad) and finite_loss
        updated = finite_loss and finite_grad
        if queued and not updated:
            optimizer.take_back()
        if updated and not queued:
            self.before_update()
            optimizer.step(lr, weight_decay, grad_norm, scale, updated=self.weights.refresh, decoupled_lr=decoupled_lr)
        self.weights.forget()
        if updated and not queued:
            self._update_expert_biases(summary, None)
        result = StepResult(
            losses, grad_norm, updated, overflow=ordinary and not finite_grad, stop_requested=stops > 0,
            num_loss_tokens=counts[0], sample_digests=sample_digests, decoupled_lr=decoupled_lr,
        )  # fmt: skip
        if self.routers is not None:
            from megatron_sp.training.report import RouterReport

            result.routers = RouterReport.of(self.routers, list(values), sequences, tokens)
            self.routers.weights = None  # break the reference cycle
            self.routers = None
        if self.recorder is not None:
            self.recorder.end_step()
        return result

    def seed(self, step: int) -> None:
        # for dropout that draws from torch's generator (in kernels, in external models)
        options = self.options
        if options.drops and (options.torch_dropout or options.kernel != "reference"):
            rank = self.groups.dp_rank if options.torch_dropout else self.groups.rank
            key = hashlib.sha256(f"{options.seed}/{step}/{rank}".encode()).digest()
            torch.manual_seed(int.from_bytes(key[:8], "little") >> 1)

    def local_totals(
        self, micro_batches: list[MicroBatch], stop: bool = False, digests: Sequence[Tensor] = (),
        places: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        # this rank's share of [count of each term, votes to stop, sequences, tokens, sample digests], fp64; the ranks
        # of a replica have the same whole sequences, so only one of them contributes them
        counts, is_first = _counts(self.loss, micro_batches), self.groups.is_first_of_replica
        if not is_first:
            counts.zero_()
        sizes = [tuple(batch["tokens"].shape) for batch in micro_batches] if "tokens" in micro_batches[0] else []
        sequences, tokens = sum(b for b, _ in sizes) * is_first, sum(b * s for b, s in sizes) * is_first
        numbers = torch.tensor([float(stop), float(sequences), float(tokens)], dtype=torch.float64)
        by_place = torch.zeros(self.groups.dp_size * sum(own.numel() for own in digests), dtype=torch.float64)
        if digests and is_first:
            by_place[torch.cat(list(places))] = torch.cat(list(digests))
        return torch.cat([counts, to_device(torch.cat([numbers, by_place]), counts.device)])

    def passes(self, micro_batches: list[MicroBatch], totals: Tensor, step: int) -> Tensor:
        """Run forward and backward, reduce gradients and losses; return the summary. Collective."""
        # totals, fp64, becomes the sums over all ranks
        handle = all_reduce_async(totals, self.groups.world)
        self.gradients.start_step()
        losses = Losses(len(self.loss.names), totals, handle, self.scaler.scale)
        make_routers = getattr(self.model, "router_step", None)
        self.routers = None if make_routers is None else make_routers(totals.device)
        if (routers := self.routers) is not None:
            first, scale = len(self.loss.names) + 1, self.scaler.scale  # behind the votes to stop
            routers.weights = lambda: routers.weights_from(*losses.counted()[first : first + 2], scale)
        key: int | Tensor = step
        if self.options.drops and totals.is_cuda:  # a captured graph would hold the number itself
            key = host_empty((), torch.int64, totals.device).fill_(step).to(totals.device, non_blocking=True)
        if self.pipeline is None:
            hidden, forward = self.loss.hidden, UnitWork(self.weights, None)
            if self.routers is not None and hidden is not None and len(micro_batches) > 1:
                run = lambda batch: hidden(self.model, batch, self.context_of(batch, key), forward)
                count_first(self.routers, self.model, self.weights, micro_batches, run)
                self.seed(step)  # the passes that follow drop the same
            self.weights.start_step(len(micro_batches))
            last = len(micro_batches) - 1
            for index, batch in enumerate(micro_batches):
                self.micro_batch(batch, key, losses, step, is_last=index == last, is_only=last == 0)
        else:
            from megatron_sp.training.pipelined import run_pipelined_step

            run_pipelined_step(self, self.pipeline, micro_batches, key, losses, step)
        if self.recorder is not None:
            self.recorder.enter("update")
        return self.reduced(losses, self.scaler.scale, poisoned=self.faults.poisons("grad", step))

    def micro_batch(
        self, batch: MicroBatch, key: int | Tensor, losses: Losses, step: int, *, is_last: bool, is_only: bool = False
    ) -> None:  # fmt: skip
        """Run forward and backward of a micro-batch."""
        # key: the step for dropout, which may be a scalar on the device; step is for faults
        if self.recorder is not None:
            self.recorder.enter("forward")
        context = self.context_of(batch, key)
        loss = self.loss_of(batch, context, losses, step)
        if self.routers is not None and is_only:
            self.routers.settle()
        if is_last:
            self.gradients.last_micro_batch()
        if self.recorder is not None:
            self.recorder.enter("backward")
        loss.backward()
        del loss  # with it goes the graph, before the next forward allocates
        if context.routers is not None:
            context.routers.finish()
        self.gradients.finish_micro_batch()
        self.faults.at("step.backward", step)

    def context_of(self, batch: MicroBatch, key: int | Tensor) -> ForwardContext:
        options = self.options
        context = micro_batch_context(
            batch, seed=options.seed, step=key, drops=options.drops, kernel=options.kernel, causal=self.loss.causal,
            repeats_attention=options.repeats_attention,
        )  # fmt: skip
        if self.routers is None:
            return context
        return with_routers(context, self.routers, batch)

    def loss_of(self, batch: MicroBatch, context: ForwardContext, losses: Losses, step: int) -> Tensor:
        """Return a micro-batch's loss, scaled, to be differentiated."""
        terms = self.loss.sums(self.model, batch, context, self.events)
        if self.faults.poisons("loss", step):
            terms = [term * float("nan") for term in terms]
        self.faults.at("step.forward", step)
        return losses.add(terms)

    def reduced(self, losses: Losses, scale: float | Tensor, *, poisoned: bool = False) -> Tensor:
        """Reduce losses and gradients after the last backward pass; return the summary. Collective."""
        sums, num_terms = losses.finish(), len(self.loss.names)
        if self.groups.tp_rank != 0:  # all tp ranks have the same sums: the first of them contributes them
            sums = torch.zeros_like(sums)
        if self.routers is not None:
            sums = torch.cat([sums, self.routers.counters()])
        handle = all_reduce_async(sums, self.groups.world)  # under the rest of the gradients' reduction
        if poisoned:
            self.gradients.poison()
        self.gradients.finish_step()
        norm = self.optimizer.grad_norm()
        if isinstance(scale, Tensor) or scale != 1.0:
            norm = norm / scale
        sums = handle.wait()
        # a term without tokens counts as 0, even if its sum is not finite
        terms = sums[:num_terms].masked_fill(losses.is_empty, 0.0)
        return torch.cat([norm.to(sums.device).reshape(1), terms, losses.totals, sums[num_terms:]])

    def is_left_out(self, summary: Tensor) -> Tensor:
        """Return, as a bool scalar, whether the norm or the sum of a term is not finite."""
        norm_and_terms = summary[: 1 + len(self.loss.names)]
        return (norm_and_terms - norm_and_terms).any()  # NaN where a number is not finite, which counts as true

    def _update_expert_biases(self, summary: Tensor, skip: Tensor | None) -> None:
        if self.routers is not None:
            self.model.update_expert_biases(self.routers.loads_in(summary), skip)  # type: ignore[operator]


def with_routers(
    context: ForwardContext, routers: RouterStep, batch: MicroBatch, replayed: Tensor | None = None
) -> ForwardContext:
    rows, length = batch["tokens"].shape
    return replace(context, routers=routers.micro_batch(rows, length, replayed))


def count_first(
    routers: RouterStep, model: nn.Module, weights: WholeWeights, micro_batches: Sequence[Any],
    run: Callable[[Any], object],
) -> None:  # fmt: skip
    """Run forward passes without gradients, if the loads must be known before. Collective."""
    if not routers.counts_first:
        return
    with routers.counting(), torch.no_grad():
        weights.start_step(len(micro_batches), model.unit_order(backward=False))  # type: ignore[operator]
        for batch in micro_batches:
            run(batch)


class Losses:
    """Sums of a step's loss terms on this rank."""

    # The totals, fp64 [count of each term, ...], travel during the first forward pass: only its backward needs them.
    # is_empty, bool [terms]: the term has no token on any rank.

    is_empty: Tensor
    _inverse_counts: Tensor  # 0 for a count of 0

    def __init__(self, num_terms: int, totals: Tensor, handle: Handle, scale: float | Tensor) -> None:
        self.totals, self._handle, self._num_terms, self._scale = totals, handle, num_terms, scale
        self._sums: Tensor | None = None
        self._has_counts = False

    def add(self, terms: list[Tensor]) -> Tensor:
        """Add a micro-batch's terms; return its loss, scaled."""
        self.counted()
        sums = torch.stack([term.detach().double() for term in terms])
        self._sums = sums if self._sums is None else self._sums.add_(sums)
        shares = [term * inverse.to(term.dtype) for term, inverse in zip(terms, self._inverse_counts, strict=True)]
        loss = sum(shares[1:], shares[0])
        if isinstance(self._scale, Tensor):
            return loss * self._scale.to(loss.dtype)
        return loss if self._scale == 1.0 else loss * self._scale

    def counted(self) -> Tensor:
        """Wait for the totals of all ranks, and return them."""
        if not self._has_counts:
            self._has_counts = True
            self._handle.wait()
            counts = self.totals[: self._num_terms]
            self.is_empty = counts == 0
            self._inverse_counts = counts.reciprocal().masked_fill_(self.is_empty, 0.0)
        return self.totals

    def finish(self) -> Tensor:
        """Return the sums, fp64 [terms]."""
        self.counted()  # a rank of a pipeline without the head has not
        if self._sums is None:
            self._sums = torch.zeros(self._num_terms, dtype=torch.float64, device=self.totals.device)
        return self._sums


def _counts(loss: Loss, micro_batches: list[MicroBatch]) -> Tensor:
    counts = [torch.stack([count.double() for count in loss.counts(batch)]) for batch in micro_batches]
    return counts[0] if len(counts) == 1 else torch.stack(counts).sum(0)


@torch.no_grad()
def evaluate_batches(
    model: nn.Module, loss: Loss, micro_batches: list[MicroBatch], kernel: KernelName, groups: ParallelGroups,
    weights: WholeWeights, pipeline: Pipeline | None = None,
) -> Tensor:  # fmt: skip
    """Return [sums..., counts...] over micro-batches, fp64, to be summed over ranks."""
    microbatches.require_same_sequences(micro_batches, groups)
    events = UnitWork(weights, None)
    counts = _counts(loss, micro_batches)
    sums = torch.zeros_like(counts)

    context_of = lambda index: micro_batch_context(
        micro_batches[index], seed=0, step=0, drops=False, kernel=kernel, causal=loss.causal
    )  # fmt: skip

    def add(index: int, context: ForwardContext) -> Tensor:
        terms = loss.sums(model, micro_batches[index], context, events)
        sums.add_(torch.stack([term.double() for term in terms]))
        return terms[0]

    if pipeline is not None:
        from megatron_sp.training.pipelined import PipelinedPasses

        assert loss.hidden is not None, "a task without stages, which the flags refuse"
        PipelinedPasses(
            pipeline, model, micro_batches, context_of=context_of, hidden=loss.hidden, loss=add, events=events,
            weights=weights, gradients=None,
        ).run()  # fmt: skip
    else:
        weights.start_step(len(micro_batches), model.unit_order(backward=False))  # type: ignore[operator]
        for index in range(len(micro_batches)):
            add(index, context_of(index))
    return torch.cat([sums * float(groups.tp_rank == 0), counts * float(groups.is_first_of_replica)])
