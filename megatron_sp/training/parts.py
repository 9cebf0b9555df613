"""The parts of a run, from its task to its reporter; ``run.prepare`` builds them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.comm.failed_ranks import Peers
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.config.schema import Config
from megatron_sp.data.build import Datasets
from megatron_sp.data.loader import BatchLoader
from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.ops.fused_kernels import FusedKernels
from megatron_sp.optim.lr_schedule import LRSchedule
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.training.kernel_selection import AttentionChoice
from megatron_sp.training.memory_estimate import MemoryEstimate
from megatron_sp.training.metrics import Console, MetricsLog
from megatron_sp.training.microbatches import BatchPlan
from megatron_sp.training.report import StepReporter
from megatron_sp.training.setup import RunStatus
from megatron_sp.training.signals import KillSwitch, StopSignals, Watchdog
from megatron_sp.training.step import Loss, StepParts, TrainStep
from megatron_sp.training.train_state import Progress, TrainState
from megatron_sp.utils.faults import FaultPlan
from megatron_sp.utils.launch import Launch

if TYPE_CHECKING:
    from megatron_sp.config.curriculum import Curriculum
    from megatron_sp.training.overlap import OverlapReport
    from megatron_sp.training.pipelined import Pipeline


@dataclass(frozen=True)
class Task:
    """A training task, as an entry script defines it."""

    name: str  # first part of the run folder's name if --save is not given
    build_tokenizer: Callable[[Config], Tokenizer]  # the model's vocabulary follows from it
    build_datasets: Callable[[Config, Tokenizer, tuple[int, int, int]], Datasets]  # for (train, valid, test) samples
    # (config, layout, on_unit) -> this rank's part of the model, on the CPU, with ``units()`` and ``unit_order()``;
    # calls ``on_unit`` with the model and each unit as soon as the unit is built
    build_model: Callable[..., nn.Module]
    loss: Loss
    # with --finetune, parameters with these prefixes may be missing in the checkpoint; they are freshly initialized
    new_parameters: tuple[str, ...] = ()
    finish: Callable[[Run], None] | None = None  # called when the run is complete, on every rank
    # dropout draws from torch's generator, which must be the same on all ranks of a replica: a model from elsewhere
    torch_dropout: bool = False
    of_model: Callable[[Config], Task] | None = None  # the task of a model that --use-checkpoint-args makes known
    # makes a context in which a model computes in fp64 what it otherwise casts to fp32, for comparisons
    exactly: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def is_own(self) -> bool:
        # False for a model from elsewhere
        return not self.torch_dropout


@dataclass(frozen=True)
class RunContext:
    """Everything that is known before anything is built: what to train, on which ranks, into which folder."""

    config: Config  # ``prepare`` still sets the vocabulary size, and with --use-checkpoint-args the model's shape
    task: Task
    launch: Launch
    groups: ParallelGroups
    peers: Peers
    run_dir: Path
    status: RunStatus
    console: Console
    watchdog: Watchdog
    signals: StopSignals
    kill_switch: KillSwitch
    faults: FaultPlan
    started: float = field(default_factory=time.monotonic)
    sizes: Literal["given", "timed"] = "given"  # how those of sp and cp came about


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run starts from."""

    folder: Path  # its step folder
    stored: dict[str, Any]  # its ``state.json``
    goes_on: bool  # the run resumes from its own checkpoint: all state is loaded, whatever the flags for --load say
    continues_own: bool  # the records in the run folder are this run's own, too
    finetunes: bool  # only the weights are loaded; the run starts anew
    adopts_tokenizer: bool  # no flag names a tokenizer, so the checkpoint's is used

    def layout_like(self, record: dict[str, Any]) -> dict[str, Any]:
        # the layout that the checkpoint was written in, with its choices, if it is ``record``; else empty
        stored = self.stored.get("layout")
        if not isinstance(stored, dict):
            return {}
        choices = ("sp_overlap", "attention", "sizes", "cuda_graphs")
        axes = {key: value for key, value in stored.items() if key not in choices}
        return stored if {"cp": 1, "pp": 1, "ep": 1, **axes} == record else {}  # older checkpoints do not name these


@dataclass(frozen=True)
class StepPlan:
    """The steps of a run: which ones, in which batches, at which learning rates."""

    batches: BatchPlan
    start: Progress  # before the first step of this process
    train_iters: int  # number of the run's last step
    lr_schedule: LRSchedule
    curriculum: Curriculum | None = None  # length of the sequences by step; None: whole samples


@dataclass(frozen=True)
class RunData:
    """Data sets of a run, and a loader for each."""

    datasets: Datasets
    train_loader: BatchLoader | None
    evaluated: Mapping[str, tuple[tuple[str, BatchLoader], ...]]  # names and loaders of the sets of "valid" and "test"


@dataclass(frozen=True)
class RunLayout:
    """Division of the model among the ranks, as the layers see it and as a checkpoint records it."""

    parallel: ParallelContext
    overlap: dict[str, Any]  # resolved mode of the sp exchanges: {"mode", "chunks"}
    overlap_report: OverlapReport | None
    record: dict[str, Any]  # ``layout`` of ``state.json``
    pipeline: Pipeline | None = None  # None: the model is not cut


@dataclass(frozen=True)
class Run:
    """A prepared run. Of all this only ``state`` and the tensors in ``parts`` change with the steps."""

    context: RunContext
    origin: Origin | None  # checkpoint that was loaded; None: a fresh start
    checkpointer: Checkpointer
    plan: StepPlan
    data: RunData
    layout: RunLayout
    memory_estimate: MemoryEstimate
    parts: StepParts
    state: TrainState
    attention: AttentionChoice
    fused: FusedKernels
    train_step: TrainStep
    evaluated: list[str]  # what former processes of this run have evaluated at its first step: "valid", "test"
    metrics: MetricsLog
    reporter: StepReporter

    @property
    def continues_own(self) -> bool:
        # the records in the run folder are this run's own
        return self.origin is not None and self.origin.continues_own
