"""Steps captured in CUDA graphs (--cuda-graphs): launched again by one call each, without Python and autograd.

copy the micro-batch into static inputs, the step's numbers into one tensor
first | middle ... | last micro-batch   forward, backward; with the collectives of tp, sp, cp and ZeRO inside
norm                                    sums of losses and gradients over the ranks, norm, the summary
(the host reads; a save in the background waits here)
update                                  decision, clipping, AdamW, 16-bit weights, their gather
"""

# A graph has one kind of micro-batch: the first of a step overwrites gradients, the last reduces them, an only one
# does both. What differs between steps is a number on the device: the step (a key of dropout), loss scale, learning
# rates, count of updates. Gradients, activations and all else that is allocated during the captures lie in one pool.
# Captured in the order in which they run, graphs may reuse each other's memory, and do: of a shape all are made anew,
# or none.
#
# Each graph ends with nothing under way: reductions and gathers that an eager step carries over to the next
# micro-batch are waited for. So gathers after an update (ZeRO 1, 2) run beside the update only, and a unit that the
# next micro-batch would find (ZeRO 3) is gathered again.
#
# ``auto`` trusts nothing (``StepGraphs``): after the warm-up steps the same micro-batches run eagerly and as replays
# with deterministic kernels, loss and gradients are compared to the bit, both are timed with the run's kernels, and
# the faster is kept. A timed step begins with an update that is left out, so that gathers after it count: under the
# passes, or before them.
#
# Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html (CUDA graphs), torch/cuda/graphs.py; NCCL's user guide
# (Using NCCL with CUDA graphs); ProcessGroupNCCL keeps captured collectives from its watchdog (pytorch pull request
# 102542), so that a rank that hangs in a replay is found by ``training/signals.py``.

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_sp.comm.collectives import all_reduce_async
from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.config.rules_kernels import Obstacle, obstacles, violation
from megatron_sp.config.schema import Config, LoggingConfig, raise_all
from megatron_sp.ops.allocator import host_empty
from megatron_sp.ops.attention_choice import activate
from megatron_sp.ops.cuda_graphs import Graph, GraphMaker, first_words
from megatron_sp.optim.flat import FlatUnit, KeptGrads
from megatron_sp.parallel.forward_context import MicroBatch
from megatron_sp.training.step import Losses, TrainStep
from megatron_sp.utils.errors import ConfigError

_ROUNDS = 3  # of each timing
_CHUNK = 1 << 24  # elements of a gradient whose bits are summed at a time


class StepNumbers(NamedTuple):
    """Numbers that differ between steps, in the order of the device."""

    step: float
    scale: float
    lr: float
    decoupled_lr: float
    update: float


Replayed = tuple[Tensor, Callable[[], None] | None]
"""A step's summary, and what replays its update, if that was captured."""
Kind = tuple[bool, bool]
"""Whether a micro-batch is the first, and the last, of its step."""


def kinds(num_micro_batches: int) -> list[Kind]:
    """Return the kind of each micro-batch of a step, in order."""
    return [(i == 0, i == num_micro_batches - 1) for i in range(num_micro_batches)]


class CapturedStep:
    """Graphs of the steps of one shape. Capture and replay are collective."""

    def __init__(
        self, step: TrainStep, maker: GraphMaker, micro_batches: Sequence[MicroBatch], totals: Tensor,
        weight_decay: float,
    ) -> None:  # fmt: skip
        self._step, self._weight_decay, self.maker = step, weight_decay, maker
        device = totals.device
        self._inputs = {name: torch.empty_like(t, device=device).copy_(t) for name, t in micro_batches[0].items()}
        self._numbers = torch.zeros(len(StepNumbers._fields), dtype=torch.float64, device=device)
        # factor of the loss: part of the graphs if it never changes
        self._scale = self._number("scale") if step.scaler.dynamic else step.scaler.scale
        self._static_totals = torch.empty_like(totals)
        self._graphs: dict[Kind, Graph] = {}
        self._update: Graph | None = None
        self._losses: Losses
        self._summary: Tensor
        step.weights.forget()
        step.weights.settle()
        step.gradients.start_step()
        try:
            for kind in dict.fromkeys(kinds(len(micro_batches))):
                self._graphs[kind] = maker.capture(partial(self._record_micro_batch, kind))
            self._norm = maker.capture(self._record_norm)
            if step.optimizer.updates_on_device:
                self._update = maker.capture(self._record_update)
        except RuntimeError:
            step.gradients.abandon()
            step.weights.abandon()
            raise
        self._grads: list[tuple[FlatUnit, KeptGrads]] = [(unit, unit.kept_grads()) for unit in step.gradients.units]

    # what is captured

    def _number(self, name: str) -> Tensor:
        return self._numbers[StepNumbers._fields.index(name)]

    def _record_micro_batch(self, kind: Kind) -> None:
        step, (is_first, is_last) = self._step, kind
        if is_first:
            handle = all_reduce_async(self._static_totals, step.groups.world)
            self._losses = Losses(len(step.loss.names), self._static_totals, handle, self._scale)
        step.weights.start_step(1)
        step.micro_batch(self._inputs, self._number("step").long(), self._losses, 0, is_last=is_last)
        step.gradients.settle()
        step.weights.forget()
        step.weights.settle()

    def _record_norm(self) -> None:
        self._summary = self._step.reduced(self._losses, self._scale)

    def _record_update(self) -> None:
        step, first = self._step, StepNumbers._fields.index("lr")
        step.optimizer.step_by_numbers(
            self._numbers[first : first + 2], self._number("update"), self._weight_decay, self._summary[0], self._scale,
            step.is_left_out(self._summary), updated=step.weights.refresh,
        )  # fmt: skip
        step.weights.settle()

    # what is replayed

    def replay(
        self, micro_batches: Sequence[MicroBatch], totals: Tensor, numbers: StepNumbers, weight_decay: float
    ) -> Replayed:
        """Replay the passes of a step. Collective."""
        # another weight decay than at the capture leaves the update to the host
        self._step.weights.settle()
        self._static_totals.copy_(totals)
        host = host_empty((len(numbers),), torch.float64, self._numbers.device)
        host.copy_(torch.tensor(numbers, dtype=torch.float64))
        self._numbers.copy_(host, non_blocking=True)
        for batch, kind in zip(micro_batches, kinds(len(micro_batches)), strict=True):
            for name, static in self._inputs.items():
                static.copy_(batch[name], non_blocking=True)
            self._graphs[kind].replay()
        self._norm.replay()
        for unit, kept in self._grads:
            unit.put_grads(kept)
        update = self._update if weight_decay == self._weight_decay else None
        return self._summary, None if update is None else update.replay

    def replay_left_out(self) -> None:
        # replay an update that changes nothing, with the gathers after it; of a step that has been replayed. Collective
        if self._update is not None:
            self._summary[0].fill_(math.nan)
            self._update.replay()


def shape_of(micro_batches: Sequence[MicroBatch], totals: Tensor) -> tuple[Any, ...]:
    """Return what the graphs of a step depend on."""
    batch = [(name, tuple(t.shape), t.dtype) for name, t in micro_batches[0].items()]
    return tuple(dict.fromkeys(kinds(len(micro_batches)))), tuple(batch), totals.numel()


@dataclass(frozen=True)
class Trial:
    """Outcome of capturing a step on one rank."""

    problem: str = ""  # why replays cannot be used; empty if they can
    eager_s: float = 0.0  # seconds of a step; 0 if nothing was timed
    replay_s: float = 0.0


def decide(trials: Sequence[Trial]) -> tuple[bool, str]:
    """Return whether replays are used, given the trials of all ranks, and why."""
    for rank, trial in enumerate(trials):
        if trial.problem:
            return False, trial.problem if len(trials) == 1 else f"rank {rank}: {trial.problem}"
    eager, replayed = (1e3 * max(getattr(trial, name) for trial in trials) for name in ("eager_s", "replay_s"))
    times = f"a step takes {replayed:.3g} ms, eagerly {eager:.3g}"
    if replayed > eager:
        return False, f"slower: {times}"
    return True, f"the bits of an eager step; {times}"


class StepGraphs:
    """Captured steps of a run: when to capture, and whether to use it.

    Args:
        mode: auto: replays are compared with eager steps; on: an error if a capture fails.
        is_eager: returns whether a step, by its number, is to run eagerly, for what records it.
        kept: the choice of the run before a resume.
    """

    def __init__(
        self, step: TrainStep, new_maker: Callable[[], GraphMaker], *, mode: Literal["auto", "on"], warmup: int,
        is_eager: Callable[[int], bool], tell: Callable[[str], None], kept: bool | None = None,
        decided: Callable[[bool], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._step, self._new_maker, self._warmup, self._is_eager = step, new_maker, warmup, is_eager
        self._must, self._tell, self._decided = mode == "on", tell, decided
        self._choice: bool | None = True if mode == "on" else kept
        self._why = "--cuda-graphs on" if mode == "on" else "as before the resume"
        self._shape: tuple[Any, ...] = ()
        self._num_eager = 0
        self._captured: CapturedStep | None = None
        self._has_told = False
        if self._choice is not None:
            decided(self._choice)

    @property
    def num_bytes(self) -> int:
        return 0 if self._captured is None else self._captured.maker.num_bytes

    def replay(
        self, micro_batches: list[MicroBatch], totals: Tensor, step: int, lr: float, decoupled_lr: float | None,
        weight_decay: float,
    ) -> Replayed | None:  # fmt: skip
        """Replay the passes of a step; None: it is to run eagerly. Collective."""
        scale, update = self._step.scaler.scale, self._step.optimizer.num_updates + 1
        numbers = StepNumbers(step, scale, lr, lr if decoupled_lr is None else decoupled_lr, update)
        recorder = self._step.recorder
        if self._choice is False or self._is_eager(step) or (recorder is not None and recorder.recording):
            return None
        shape = shape_of(micro_batches, totals)
        if shape != self._shape:
            self._captured = None
            self._shape, self._num_eager = shape, 0
        if self._captured is None:
            if self._num_eager < self._warmup:
                self._num_eager += 1
                return None
            self._captured = self._first(micro_batches, totals, numbers, weight_decay)
            self._step.seed(step)
        return None if self._captured is None else self._captured.replay(micro_batches, totals, numbers, weight_decay)

    def _first(
        self, micro_batches: list[MicroBatch], totals: Tensor, numbers: StepNumbers, weight_decay: float
    ) -> CapturedStep | None:
        # capture the steps of a new shape, if that is or becomes the choice; return None if it does not
        captured: CapturedStep | None = None
        if self._choice is None:
            captured, trial = self._try(micro_batches, totals, numbers, weight_decay)
            self._choice, self._why = decide(self._of_all(trial))
            self._decided(self._choice)
        else:
            captured, problem = self._capture(micro_batches, totals, weight_decay)
            is_good, why = decide(self._of_all(Trial(problem)))
            if not is_good:
                self._choice, self._why = False, why
                if self._must:
                    raise ConfigError(f"--cuda-graphs on cannot be: {why}; use --cuda-graphs auto or off")
                self._decided(False)
        if not self._choice:
            captured = None
            self._tell(f"captured steps: not used, {self._why}")
        elif not self._has_told:
            self._tell(f"captured steps: used from step {int(numbers.step)} on ({self._why})")
        self._has_told = True
        return captured

    def _of_all(self, trial: Trial) -> list[Trial]:
        own_trial = [trial.problem, trial.eager_s, trial.replay_s]
        return [Trial(*of_rank) for of_rank in gather_json(own_trial, self._step.groups.control)]

    def _capture(
        self, micro_batches: list[MicroBatch], totals: Tensor, weight_decay: float
    ) -> tuple[CapturedStep | None, str]:
        # capture; return the graphs, or why there are none
        try:
            return CapturedStep(self._step, self._new_maker(), micro_batches, totals, weight_decay), ""
        except RuntimeError as error:
            return None, f"the capture failed: {first_words(error)}"

    def _try(
        self, micro_batches: list[MicroBatch], totals: Tensor, numbers: StepNumbers, weight_decay: float
    ) -> tuple[CapturedStep | None, Trial]:  # fmt: skip
        # compare replays with eager passes, and time both. Collective: all are through a part before the next begins
        number, optimizer = int(numbers.step), self._step.optimizer

        def eagerly() -> Tensor:
            self._step.seed(number)
            summary = self._step.passes(micro_batches, totals.clone(), number)
            self._step.weights.forget()
            return summary

        def replayed(captured: CapturedStep) -> Tensor:
            self._step.seed(number)
            return captured.replay(micro_batches, totals, numbers, weight_decay)[0]

        def eager_step() -> None:
            if optimizer.updates_on_device:
                left_out = torch.ones((), dtype=torch.bool, device=summary.device)
                optimizer.step_on_device(
                    numbers.lr, weight_decay, summary[0], numbers.scale, left_out, self._step.weights.refresh,
                    numbers.decoupled_lr,
                )  # fmt: skip
                optimizer.take_back()
            eagerly()

        summary = eagerly()
        eager_s = self._seconds(eager_step)
        with deterministic_kernels(self._step):
            try:
                wanted, problem = self._bits(eagerly()), ""
            except RuntimeError as error:
                wanted, problem = [], f"without deterministic kernels there is nothing to compare: {first_words(error)}"
            captured = None
            if all(not trial.problem for trial in self._of_all(Trial(problem))):
                captured, problem = self._capture(micro_batches, totals, weight_decay)
            if any(trial.problem for trial in self._of_all(Trial(problem))) or captured is None:
                return None, Trial(problem)
            problem = self._difference(wanted, self._bits(replayed(captured)))
        del captured
        again, failure = self._capture(micro_batches, totals, weight_decay)
        problem = problem or failure
        if any(trial.problem for trial in self._of_all(Trial(problem))) or again is None:
            return None, Trial(problem)
        replayed(again)

        def replayed_step() -> None:
            again.replay_left_out()
            replayed(again)

        return again, Trial("", eager_s, self._seconds(replayed_step))

    def _bits(self, summary: Tensor) -> list[int]:
        units = [unit.grad_shard for unit in self._step.gradients.units if unit.slots]
        digests: list[int] = torch.stack([digest(summary), *(digest(grads) for grads in units)]).tolist()
        return digests

    def _difference(self, wanted: list[int], replayed: list[int]) -> str:
        units = [unit for unit in self._step.gradients.units if unit.slots]
        names = ["loss or norm", *(f"the gradients of {unit.name}" for unit in units)]
        differ = [name for name, a, b in zip(names, wanted, replayed, strict=True) if a != b]
        return f"a replay has other bits than an eager step: {', '.join(differ[:3])}" if differ else ""

    def _seconds(self, run: Callable[[], object]) -> float:
        # the median time of a call, after one that is not timed
        run()
        seconds = list[float]()
        is_cuda = self._step.gradients.units[0].device.type == "cuda"
        synchronize = torch.cuda.synchronize if is_cuda else lambda: None
        for _ in range(_ROUNDS):
            synchronize()
            began = time.perf_counter()
            run()
            synchronize()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)


def digest(x: Tensor) -> Tensor:
    # int64 scalar of a tensor's bits and places; with one digest two are equal, but for 2^-64
    bits = x.detach().reshape(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in bits.split(_CHUNK):
        mixed = part.long() ^ (torch.arange(part.numel(), device=x.device) * 0x9E3779B97F4A7C1)
        mixed = (mixed ^ (mixed >> 31)) * 0x7FB5D329728EA185  # sums alone would miss two numbers that change places
        total = total * 0x5851F42D4C957F2D + (mixed ^ (mixed >> 29)).sum()
    return total


@contextlib.contextmanager
def deterministic_kernels(step: TrainStep) -> Iterator[None]:
    # let a step compute with kernels that repeat to the bit; cuDNN's attention, which does not, gives way to torch's
    options, was_on = step.options, torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    variable = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    try:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch looks at it in every product
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if options.kernel == "cudnn":
            step.options = replace(options, kernel="sdpa")
            activate("sdpa")
        yield
    finally:
        if step.options is not options:
            step.options = options
            activate(options.kernel)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(was_on, warn_only=warns)
        if variable is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]


def why_not_captured(config: Config, device_type: str, *, is_own: bool) -> list[Obstacle]:
    """Return why the steps of a run cannot be captured; empty if they can."""
    lacks = obstacles(config)
    if not is_own:
        lacks.append(Obstacle("what a model from elsewhere reads on the host is not known", "train one of ours"))
    if device_type != "cuda" and config.kernels.device != "cpu":
        lacks.append(Obstacle("torch sees no GPU, and a CPU has no graphs", "use a GPU"))
    return lacks


def require_captured(config: Config, *, is_own: bool) -> None:
    """Raise ConfigError, with every reason, if --cuda-graphs on cannot be had."""
    if config.kernels.cuda_graphs == "on" and not config.parallel.verify_parallelism and not config.batch.skip_train:
        lacks = why_not_captured(config, "cuda" if torch.cuda.is_available() else "cpu", is_own=is_own)
        raise_all([violation(lack) for lack in lacks])


def is_profiled(logging: LoggingConfig, begun: int, step: int) -> bool:
    """Return whether --profile may see a step of a run that began after step ``begun``."""
    if not logging.profile or begun >= logging.profile_step_end:
        return False
    first = max(logging.profile_step_start, begun)
    return first <= step <= first + logging.profile_step_end - logging.profile_step_start + 1
