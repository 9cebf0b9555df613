"""One optimizer step: all micro-batches in, one update out, the same decision on every rank.

    counts of loss tokens  --all_reduce-->  (under the first forward)
    for each micro-batch:  forward, loss sums / global counts, backward (gradients go into the flat buffers)
    each unit's gradients  --all_reduce(sum), or to shards-->  (under the rest of the last backward)
    grad norm, finite?  ->  clip, unscale and AdamW in one pass, or nothing
    each unit's parameters  --all_gather from shards-->  (under the next forward; ZeRO stages 1 and 2)

Nothing is averaged: the loss is divided by the *global* number of loss tokens, so gradients are summed over
micro-batches and ranks, and a rank without loss tokens is no special case.

Norm and losses travel to the host while the update runs: whether it takes place is decided on the device, and again, by
the same numbers, on the host. Where the host updates (--offload-optimizer, apex), it decides first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import Handle, all_reduce_async
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.ops.attention import KernelName
from megatron_sp.ops.memory import host_empty, to_device
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.optimizer import FlatOptimizer, LossScaler, is_finite
from megatron_sp.optim.weights import UnitWork, WholeWeights
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch, UnitEvents, micro_batch_context
from megatron_sp.training.routers import RouterReport, count_first, with_routers
from megatron_sp.training.same_sequences import require_same_sequences
from megatron_sp.utils.faults import NO_FAULTS, FaultPlan

if TYPE_CHECKING:
    from megatron_sp.comm.recorder import Recorder
    from megatron_sp.parallel.router_pass import RouterStep
    from megatron_sp.training.pipelined import Pipeline


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Move a micro-batch to the device, except for what the host reads (documents, lengths, digests, places), which would cause a sync."""
    on_host = ("documents", "length", "digests", "places")
    return {name: t if name in on_host else t.to(device, non_blocking=True) for name, t in batch.items()}


class LossFunction(Protocol):
    """Function that returns the sums of one micro-batch's loss terms, before division: one scalar tensor for each term."""

    def __call__(self, model: nn.Module, batch: MicroBatch, context: ForwardContext, events: UnitEvents | None) -> list[Tensor]: ...


@dataclass(frozen=True)
class Loss:
    """Loss terms of a task.

    Attributes:
        names: names of the terms in the log; the first one is "the loss" of the run.
        counts: returns the divisor of each term's sum for a micro-batch (known before any forward pass).
        sums: returns the sum of each term.
        causal: True for a causal attention mask; else tokens attend to their whole sequence.
        metrics: names of the values that ``sums`` and ``counts`` append to the loss terms when gradients are off, for
            validation only.
        of_tokens: True if the first term is a mean over tokens, so that its exponential is a perplexity.
        hidden: returns what a stage of a pipeline hands on, with that stage in the context; None: the task has no pipeline.
    """

    names: tuple[str, ...]
    counts: Callable[[MicroBatch], list[Tensor]]
    sums: LossFunction
    causal: bool = True
    metrics: tuple[str, ...] = ()
    of_tokens: bool = True
    hidden: Callable[[nn.Module, MicroBatch, ForwardContext, UnitEvents | None], Tensor] | None = None

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of what a validation reports: the terms and the metrics."""
        return (*self.names, *self.metrics)


@dataclass
class StepResult:
    """Result of a step, the same on every rank.

    Attributes:
        losses: each loss term divided by its count, over all ranks.
        grad_norm: norm of the unscaled gradients, before clipping.
        updated: True if the weights were updated.
        overflow: True for an ordinary fp16 overflow (lowers the loss scale; not an error).
        stop_requested: True if any rank received a signal or ran out of time.
        num_loss_tokens: divisor of the first loss term.
        sample_ids: ids of the samples, in the order of the global batch.
        sample_digests: digests of the samples in the same order (``data/digests.py``); empty if the step was given
            none.
        routers: of a model with experts.
        decoupled_lr: learning rate of word embeddings and output layer, if they have one of their own.
    """

    losses: list[float]
    grad_norm: float
    updated: bool
    overflow: bool
    stop_requested: bool
    num_loss_tokens: float
    sample_ids: list[int] = field(default_factory=list)
    sample_digests: list[int] = field(default_factory=list)
    routers: RouterReport | None = None
    decoupled_lr: float | None = None


@dataclass(frozen=True)
class StepParts:
    """The model and what updates it.

    Attributes:
        model: writes its gradients into ``gradients``.
        weights, gradients, optimizer, scaler: see optim/.
        pipeline: stages and schedules; None: the model is not cut.
    """

    model: nn.Module
    weights: WholeWeights
    gradients: FlatGradients
    optimizer: FlatOptimizer
    scaler: LossScaler
    pipeline: Pipeline | None = None


@dataclass(frozen=True)
class StepOptions:
    """How forward passes are computed.

    Attributes:
        seed: of dropout.
        drops: True if any dropout rate is above 0.
        kernel: attention kernel.
        torch_dropout: see ``run.Task``.
        repeats_attention: recomputed blocks keep nothing of it.
    """

    seed: int
    drops: bool
    kernel: KernelName
    torch_dropout: bool = False
    repeats_attention: bool = False


class StepNumbers(NamedTuple):
    """Numbers that differ between steps, in the order in which graphs have them on the device."""

    step: float
    scale: float
    lr: float
    decoupled_lr: float
    update: float


class Replayed(NamedTuple):
    """Outcome of a step's passes as replays of captured graphs.

    Attributes:
        known: what ``TrainStep.passes`` returns.
        update: replays the update, too; None: it was not captured.
    """

    known: Tensor
    update: Callable[[], None] | None


class StepReplays(Protocol):
    """Interface of captured steps (``training/graphs.py``)."""

    def replay(self, micro_batches: list[MicroBatch], mine: Tensor, numbers: StepNumbers, weight_decay: float) -> Replayed | None:
        """Replay the passes of a step (arguments as of ``TrainStep.passes``); None: it is to run eagerly. Collective."""


class TrainStep:
    """A training step; ``run`` performs one.

    Args:
        parts: the model and what updates it.
        loss: terms of the task.
        groups: process groups.
        options: seed, dropout and attention kernel.
        faults: injected faults.
        recorder: records collectives and computation, and where a step and its passes begin (--report-overlap).

    Attributes:
        before_update: called before the weights change; a copy of them on another stream synchronizes here.
        graphs: captured steps; None: all run eagerly.
    """

    def __init__(
        self, parts: StepParts, loss: Loss, groups: ParallelGroups, options: StepOptions, faults: FaultPlan = NO_FAULTS,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.model, self.weights, self.gradients = parts.model, parts.weights, parts.gradients
        self.optimizer, self.scaler, self.events = parts.optimizer, parts.scaler, UnitWork(parts.weights, parts.gradients)
        self.pipeline = parts.pipeline
        self.loss, self.groups, self.options, self.faults, self.recorder = loss, groups, options, faults, recorder
        self.before_update: Callable[[], None] = lambda: None
        self.graphs: StepReplays | None = None
        self.routers: RouterStep | None = None
        self._num_told = 0  # numbers of the routers at the end of what the host is to know

    def run(
        self, micro_batches: list[MicroBatch], step: int, *, lr: float, weight_decay: float, stop: bool = False,
        digests: Sequence[Tensor] = (), places: Sequence[Tensor] = (), decoupled_lr: float | None = None,
    ) -> StepResult:  # fmt: skip
        """Perform step number ``step`` (from 1).

        Args:
            micro_batches: this rank's micro-batches, in order; at least one.
            step: number of the step; a key of dropout.
            lr, weight_decay: learning rate and weight decay of this step.
            decoupled_lr: learning rate of word embeddings and output layer (default: ``lr``).
            stop: True if this rank wants to stop after the step.
            digests: digests of each micro-batch's samples, float64 [b] on the host; the result has those of the global
                batch.
            places: places of each micro-batch's samples in the global batch, int64 [b] on the host; needed with ``digests``.
        Raises:
            DataError: ranks that share sequences have read different ones.
        """
        require_same_sequences(micro_batches, self.groups)
        self.seed(step)
        if self.recorder is not None:
            self.recorder.start_step()
        mine, num_terms = self._own_totals(micro_batches, stop, digests, places), len(self.loss.names)
        replayed: Replayed | None = None
        if self.graphs is not None:
            numbers = StepNumbers(step, self.scaler.scale, lr, lr if decoupled_lr is None else decoupled_lr, self.optimizer.num_updates + 1)
            replayed = self.graphs.replay(micro_batches, mine, numbers, weight_decay)
        known = self.passes(micro_batches, mine, step) if replayed is None else replayed.known
        of_routers = known[len(known) - self._num_told :]
        reading, is_queued = _Reading(known), self.optimizer.updates_on_device
        self.faults.at("optim.step", step)
        if is_queued:
            self.before_update()
            if replayed is not None and replayed.update is not None:
                replayed.update()
                self.optimizer.num_updates += 1
            else:
                skip = self.is_left_out(known)
                self.optimizer.step_on_device(
                    lr, weight_decay, known[0], self.scaler.scale, skip, updated=self.weights.refresh, decoupled_lr=decoupled_lr
                )
                self._update_biases(of_routers, skip)
        values = reading.wait()  # the only point of the step where the host waits for the device
        grad_norm = values[0]
        terms, counts = values[1 : 1 + num_terms], values[1 + num_terms : 1 + 2 * num_terms]
        stops, sequences, tokens, *of_samples = values[1 + 2 * num_terms : len(values) - len(of_routers)]
        means = [s / c if c > 0 else 0.0 for s, c in zip(terms, counts, strict=True)]
        result = self._decide(
            means, grad_norm, (lr, decoupled_lr), weight_decay, is_queued, stop_requested=stops > 0, num_loss_tokens=counts[0]
        )
        if not is_queued and result.updated:
            self._update_biases(of_routers, None)
        if self.routers is not None:
            result.routers = RouterReport.of(self.routers, values[len(values) - len(of_routers) :], sequences, tokens)
            self.routers.weights = None  # a circle, which no collector is to look for
            self.routers = None
        result.sample_digests = [int(digest) for digest in of_samples]
        if self.recorder is not None:
            self.recorder.end_step()
        return result

    def seed(self, step: int) -> None:
        """Seed torch's generator for dropout that draws from it (in kernels, in external models): a resumed run draws the same."""
        if self.options.drops and (self.options.torch_dropout or self.options.kernel != "reference"):
            rank = self.groups.dp_rank if self.options.torch_dropout else self.groups.rank
            torch.manual_seed(_step_seed(self.options.seed, step, rank))

    def passes(self, micro_batches: list[MicroBatch], mine: Tensor, step: int) -> Tensor:
        """Run forward and backward of all micro-batches, and reduce gradients, losses and counts. Collective.

        Args:
            micro_batches: of this rank.
            mine: its share of the totals, fp64; becomes their sums.
            step: number of the step.
        Returns:
            What the host is to know of the step, fp64 on the device: the norm of the unscaled gradients, the sum of each loss term, the
            totals, and what the routers tell.
        """
        handle = all_reduce_async(mine, self.groups.world)
        self.gradients.start_step()
        losses = Losses(len(self.loss.names), mine, handle, self.scaler.scale)
        make_routers = getattr(self.model, "router_step", None)
        self.routers = None if make_routers is None else make_routers(losses.device)
        if (routers := self.routers) is not None:
            routers.weights = lambda: routers.weights_from(*losses.router_counts(), self.scaler.scale)
        if self.pipeline is None:
            self._forward_backward(micro_batches, step, losses)
        else:
            self._pipelined(self.pipeline, micro_batches, step, losses)
        if self.recorder is not None:
            self.recorder.enter("update")
        return self.reduced(losses, self.scaler.scale, poisoned=self.faults.poisons("grad", step))

    def reduced(self, losses: Losses, scale: float | Tensor, *, poisoned: bool = False) -> Tensor:
        """Reduce losses and gradients after the last backward pass, and return what ``passes`` does. Collective.

        Args:
            losses: of the step.
            scale: factor of its loss.
            poisoned: the gradients are to be NaN (fault injection).
        """
        sums = losses.finish()
        # all tp ranks have the same sums: only the first of them contributes its own
        sums, told = sums if self.groups.tp_rank == 0 else torch.zeros_like(sums), None
        if self.routers is not None:
            told = self.routers.told()
            sums = torch.cat([sums, told])
        self._num_told = 0 if told is None else len(told)
        handle = all_reduce_async(sums, self.groups.world)
        if poisoned:
            self.gradients.poison()
        self.gradients.finish_step()
        norm = self.optimizer.grad_norm()
        norm = norm if _is_one(scale) else norm / scale
        sums = handle.wait()
        of_terms, of_routers = sums[: len(sums) - self._num_told], sums[len(sums) - self._num_told :]
        of_terms = of_terms.masked_fill(losses.is_empty, 0.0)
        return torch.cat([norm.to(sums.device).reshape(1), of_terms, losses.totals, of_routers])

    def is_left_out(self, known: Tensor) -> Tensor:
        """Return whether the update is to be left out, a bool scalar, given what ``passes`` returns: the norm or a sum is not finite."""
        looked_at = known[: 1 + len(self.loss.names)]
        return (looked_at - looked_at).any()  # NaN where a number is not finite, which counts as true

    def _own_totals(
        self, micro_batches: list[MicroBatch], stop: bool, digests: Sequence[Tensor], places: Sequence[Tensor]
    ) -> Tensor:  # fmt: skip
        """Return this rank's share of [count of each term, ranks that want to stop, sequences, tokens, digest of each sample], fp64.

        All ranks of a data-parallel replica have the same whole sequences, so only one of them contributes its counts.
        """
        counts = _counts(self.loss, micro_batches)
        if not self.groups.is_first_of_replica:
            counts.zero_()
        mine = float(self.groups.is_first_of_replica)
        sizes = [tuple(batch["tokens"].shape) for batch in micro_batches] if "tokens" in micro_batches[0] else []
        others = [float(stop), mine * sum(b for b, _ in sizes), mine * sum(b * s for b, s in sizes)]
        numbers = torch.cat([torch.tensor(others, dtype=torch.float64), self._in_batch_order(digests, places)])
        return torch.cat([counts, to_device(numbers, counts.device)])

    def _in_batch_order(self, digests: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
        """Return float64 [samples of the global batch] on the host: the digests of this rank's samples at their places, 0 elsewhere."""
        of_batch = torch.zeros(self.groups.dp_size * sum(mine.numel() for mine in digests), dtype=torch.float64)
        if digests and self.groups.is_first_of_replica:
            of_batch[torch.cat(list(places))] = torch.cat(list(digests))
        return of_batch

    def _context(self, batch: MicroBatch, key: int | Tensor) -> ForwardContext:
        options = self.options
        context = micro_batch_context(
            batch, seed=options.seed, step=key, drops=options.drops, kernel=options.kernel, causal=self.loss.causal,
            repeats_attention=options.repeats_attention,
        )  # fmt: skip
        return context if self.routers is None else with_routers(context, self.routers, batch)

    def _update_biases(self, told: Tensor, skip: Tensor | None) -> None:
        if self.routers is not None:
            self.model.update_expert_biases(self.routers.loads_in(told), skip)  # type: ignore[operator]

    def _loss(self, batch: MicroBatch, context: ForwardContext, step: int, losses: Losses) -> Tensor:
        """Return what is to be differentiated for a micro-batch: the sum of its terms' shares, scaled."""
        terms = self.loss.sums(self.model, batch, context, self.events)
        if self.faults.poisons("loss", step):
            terms = [term * float("nan") for term in terms]
        self.faults.at("step.forward", step)
        return losses.add(terms)

    def _forward_backward(self, micro_batches: list[MicroBatch], step: int, losses: Losses) -> None:
        """Run forward and backward of every micro-batch."""
        key = _on_device(step, losses.device) if self.options.drops else step
        hidden, forward = self.loss.hidden, UnitWork(self.weights, None)
        if self.routers is not None and hidden is not None and len(micro_batches) > 1:
            count_first(
                self.routers, self.model, self.weights, len(micro_batches),
                lambda index: hidden(self.model, micro_batches[index], self._context(micro_batches[index], key), forward),
            )  # fmt: skip
            self.seed(step)  # the passes that follow drop the same
        self.weights.start_step(len(micro_batches))
        for index, batch in enumerate(micro_batches):
            self.micro_batch(batch, key, losses, step, is_last=index == len(micro_batches) - 1, is_only=len(micro_batches) == 1)

    def micro_batch(
        self, batch: MicroBatch, key: int | Tensor, losses: Losses, step: int, *, is_last: bool, is_only: bool = False
    ) -> None:  # fmt: skip
        """Run forward and backward of a micro-batch; the last one of a step reduces gradients.

        Args:
            key: number of the step as a key of dropout; may be a scalar on the device.
            step: the same number, for injected faults.
        """
        if self.recorder is not None:
            self.recorder.enter("forward")
        context = self._context(batch, key)
        loss = self._loss(batch, context, step, losses)
        if self.routers is not None and is_only:
            self.routers.settle()
        if is_last:
            self.gradients.last_micro_batch()
        if self.recorder is not None:
            self.recorder.enter("backward")
        loss.backward()
        del loss
        if context.routers is not None:
            context.routers.finish()
        self.gradients.finish_micro_batch()
        self.faults.at("step.backward", step)

    def _pipelined(self, pipeline: Pipeline, micro_batches: list[MicroBatch], step: int, losses: Losses) -> None:
        """Run forward and backward of every micro-batch through this rank's stages. Collective over the pipeline."""
        from megatron_sp.parallel.pipeline import Timeline
        from megatron_sp.training.pipelined import PipelinedPasses

        key = _on_device(step, losses.device) if self.options.drops else step
        recorder = self.recorder if self.recorder is not None and self.recorder.recording else None
        timeline = None if recorder is None else Timeline(recorder.clock)
        hidden = self.loss.hidden
        assert hidden is not None, "a task without stages, which the flags refuse"
        if self.routers is not None and self.routers.counts_first:
            with self.routers.counting(), torch.no_grad():
                PipelinedPasses(
                    pipeline, self.model, micro_batches, context_of=lambda index: self._context(micro_batches[index], key), hidden=hidden,
                    loss=lambda index, context: hidden(self.model, micro_batches[index], context, UnitWork(self.weights, None)),
                    events=UnitWork(self.weights, None), weights=self.weights, gradients=None,
                ).run()  # fmt: skip
            self.seed(step)
        PipelinedPasses(
            pipeline, self.model, micro_batches, context_of=lambda index: self._context(micro_batches[index], key),
            hidden=hidden, loss=lambda index, context: self._loss(micro_batches[index], context, step, losses),
            events=self.events, weights=self.weights, gradients=self.gradients,
            faults=(lambda place: self.faults.at(place, step)) if self.faults.faults else None, recorder=recorder,
        ).run(timeline)  # fmt: skip
        if recorder is not None and timeline is not None:
            recorder.actions = timeline.spans

    def _decide(
        self, losses: list[float], grad_norm: float, rates: tuple[float, float | None], weight_decay: float, is_queued: bool, *,
        stop_requested: bool, num_loss_tokens: float,
    ) -> StepResult:  # fmt: skip
        """Return the step's result; update the weights unless the device has been told to (``is_queued``)."""
        lr, decoupled_lr = rates
        finite_loss, finite_grad = is_finite(*losses), is_finite(grad_norm)
        scale = self.scaler.scale
        ordinary = self.scaler.update(overflow=not finite_grad) and finite_loss
        updated = finite_loss and finite_grad
        if is_queued and not updated:
            self.optimizer.take_back()
        if updated and not is_queued:
            self.before_update()
            self.optimizer.step(lr, weight_decay, grad_norm, scale, updated=self.weights.refresh, decoupled_lr=decoupled_lr)
        self.weights.forget()
        return StepResult(
            losses, grad_norm, updated, ordinary and not finite_grad, stop_requested, num_loss_tokens, decoupled_lr=decoupled_lr
        )


class Losses:
    """Sums of a step's loss terms on this rank, and the loss of each micro-batch.

    The totals travel during the first forward pass: only its backward needs the counts in them.

    Args:
        num_terms: loss terms of the task.
        totals: [count of each term, ...], fp64, on their way.
        handle: to wait for before they are read.
        scale: factor of the loss; a scalar on the device where it may change under a captured graph.

    Attributes:
        totals: as given.
        is_empty: bool [terms], true for a term without tokens on any rank, whose sum counts as 0; known once the totals are.
    """

    is_empty: Tensor

    def __init__(self, num_terms: int, totals: Tensor, handle: Handle, scale: float | Tensor) -> None:
        self.totals, self._handle, self._num_terms, self._scale = totals, handle, num_terms, scale
        self._sums: Tensor | None = None
        self._inverse_counts: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the sums."""
        return self.totals.device

    def add(self, terms: list[Tensor]) -> Tensor:
        """Add a micro-batch's terms; return its loss, in which each term has its share of the step's, scaled."""
        inverse_counts = self._settle()
        sums = torch.stack([term.detach().double() for term in terms])
        self._sums = sums if self._sums is None else self._sums.add_(sums)
        shares = [term * inverse.to(term.dtype) for term, inverse in zip(terms, inverse_counts, strict=True)]
        loss = sum(shares[1:], shares[0])
        if _is_one(self._scale):
            return loss
        return loss * (self._scale.to(loss.dtype) if isinstance(self._scale, Tensor) else self._scale)

    def router_counts(self) -> tuple[Tensor, Tensor]:
        """Return the sequences and the tokens of the step, scalars."""
        self._settle()
        return self.totals[self._num_terms + 1], self.totals[self._num_terms + 2]

    def _settle(self) -> Tensor:
        """Wait for the totals, once, and return one over each count; 0 for a count of 0."""
        if self._inverse_counts is None:
            self._handle.wait()
            counts = self.totals[: self._num_terms]
            self.is_empty = counts == 0
            self._inverse_counts = counts.reciprocal().masked_fill_(self.is_empty, 0.0)
        return self._inverse_counts

    def finish(self) -> Tensor:
        """Return this rank's sums of the terms, fp64 [terms], and let the totals be read."""
        self._settle()  # a rank of a pipeline without the head has not
        if self._sums is None:
            self._sums = torch.zeros(self._num_terms, dtype=torch.float64, device=self.device)
        return self._sums


def _on_device(step: int, device: torch.device) -> int | Tensor:
    """Return a number for kernels of a GPU, where it would be part of a captured graph otherwise; on the CPU as it is."""
    if device.type != "cuda":
        return step
    number = host_empty((), torch.int64, device).fill_(step)
    return number.to(device, non_blocking=True)


class _Reading:
    """Values of a tensor on their way to the host; what is queued after them runs meanwhile."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._arrived = values, None
        if values.is_cuda:
            self._values = host_empty(values.shape, values.dtype, values.device)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.current_stream(values.device).record_event()

    def wait(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._values.tolist()
        return values


def _is_one(scale: float | Tensor) -> bool:
    return not isinstance(scale, Tensor) and scale == 1.0


def _counts(loss: Loss, micro_batches: list[MicroBatch]) -> Tensor:
    """Return the count of each loss term (without gradients of each metric, too) over micro-batches, fp64."""
    found = [torch.stack([count.double() for count in loss.counts(batch)]) for batch in micro_batches]
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def _step_seed(seed: int, step: int, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8], "little") >> 1


@torch.no_grad()
def evaluate_batches(
    model: nn.Module, loss: Loss, micro_batches: list[MicroBatch], kernel: KernelName, groups: ParallelGroups, weights: WholeWeights,
    pipeline: Pipeline | None = None,
) -> Tensor:  # fmt: skip
    """Return [sums..., counts...] of loss terms and metrics over micro-batches, fp64, to be summed over ranks; no dropout or gradients."""
    require_same_sequences(micro_batches, groups)
    events = UnitWork(weights, None)
    counts = _counts(loss, micro_batches)
    sums = torch.zeros_like(counts)

    def context_of(index: int) -> ForwardContext:
        return micro_batch_context(micro_batches[index], seed=0, step=0, drops=False, kernel=kernel, causal=loss.causal)

    def add(index: int, context: ForwardContext) -> Tensor:
        terms = loss.sums(model, micro_batches[index], context, events)
        sums.add_(torch.stack([term.double() for term in terms]))
        return terms[0]

    if pipeline is not None:
        from megatron_sp.training.pipelined import PipelinedPasses

        assert loss.hidden is not None, "a task without stages, which the flags refuse"
        PipelinedPasses(
            pipeline,
            model,
            micro_batches,
            context_of=context_of,
            hidden=loss.hidden,
            loss=add,
            events=events,
            weights=weights,
            gradients=None,
        ).run()
    else:
        weights.start_step(len(micro_batches), model.unit_order(backward=False))  # type: ignore[operator]
        for index in range(len(micro_batches)):
            add(index, context_of(index))
    return torch.cat([sums * float(groups.tp_rank == 0), counts * float(groups.is_first_of_replica)])
