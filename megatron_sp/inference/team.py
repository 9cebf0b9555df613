"""One or several processes that use a stored model together: process groups, layout, errors and exit.

A single process needs no process group, no port and no launcher. Several are started by torchrun; their input and
output, prompts and results, go through rank 0. Errors that can be detected without the other ranks are reported before
a rank waits for them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_sp.checkpoint import find
from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.manifest import stored_configuration
from megatron_sp.comm.devices import gpu_of
from megatron_sp.comm.failed_ranks import first_line, is_peer_failure
from megatron_sp.comm.groups import ParallelGroups, destroy_process_group, init_process_group
from megatron_sp.comm.object_collectives import all_ranks_agree, broadcast_json, gather_json
from megatron_sp.config.rules import inference_violations
from megatron_sp.config.rules_graphs import decoding_obstacles, violation
from megatron_sp.config.schema import Config, ModelConfig, ParallelConfig, raise_all
from megatron_sp.data.tokenizers import choose_bos
from megatron_sp.inference.decoder import Capture
from megatron_sp.inference.stored_model import Stored, find_stored
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.ops.cuda_graphs import CudaGraphs
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.utils.entry_point import leave
from megatron_sp.utils.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PEER, ConfigError, PeerError, ReportedError
from megatron_sp.utils.format import format_parameters
from megatron_sp.utils.launch import Launch, let_first_rank_speak
from megatron_sp.utils.processes import num_cores

_TIMEOUT = timedelta(hours=1)  # the longest that the slowest rank may lag behind the fastest


class Team:
    """The processes of one tool.

    Attributes:
        launch, device: this process's place in the job, and its device.
        layout: parallel layout for the layers.
        dp_rank, dp_size: index of this process's replica of the model, and their number.
    """

    def __init__(self, launch: Launch, device: torch.device, groups: ParallelGroups | None) -> None:
        self.launch, self.device, self._groups = launch, device, groups
        self._control = None if groups is None else groups.control
        self.layout = ParallelContext() if groups is None else ParallelContext.of(groups)
        self.dp_rank, self.dp_size = (0, 1) if groups is None else (groups.dp_rank, groups.dp_size)
        self.is_first_of_replica = groups is None or groups.is_first_of_replica

    @property
    def rank(self) -> int:
        """This rank."""
        return self.launch.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.launch.world_size

    def say(self, line: str) -> None:
        """Print a line to stderr, on rank 0 only."""
        if self.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank, passed as JSON. Collective."""
        return broadcast_json(value, self._control)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank, passed as JSON. Collective."""
        return gather_json(value, self._control)

    def agree(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which an error on any rank is raised on all. Collective."""
        return contextlib.nullcontext() if self._control is None else all_ranks_agree(self._control)

    def from_first(self, read: Callable[[], Any]) -> Any:
        """Call ``read`` on rank 0 and return its result, passed as JSON, on every rank; an error is raised on all. Collective."""
        value = None
        with self.agree():
            if self.rank == 0:
                value = read()
        return self.broadcast(value)

    def checkpointer(self) -> Checkpointer:
        """Return a checkpointer for reading, whose ranks share the work of verification."""
        return Checkpointer(None, rank=self.rank, world_size=self.size, group=self._control)


class Loaded(NamedTuple):
    """A loaded model, its checkpoint, and a line that describes it."""

    model: LanguageModel
    stored: Stored
    description: str


def choose_device(choice: str, launch: Launch) -> torch.device:
    """Return the device of this rank.

    Raises:
        ConfigError: a GPU was requested and there is none, or this host has more processes than GPUs.
    """
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU (`megatron-sp doctor` says why); use --device cpu")
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if launch.world_size == 1:
        return torch.device("cuda")
    device = gpu_of(launch.local_rank)
    torch.cuda.set_device(device)
    return device


def stored_config(options: argparse.Namespace) -> Config:
    """Return the configuration stored in the checkpoint; weights are not read. Not collective. Raises CheckpointError."""
    folder = find.candidates(Path(options.load), options.ckpt_step).folders[0]
    return stored_configuration(Checkpointer(None).read_state(folder), normalize=True)[0]


def check_layout(options: argparse.Namespace, world_size: int, *, copies: bool) -> None:
    """Check that this number of processes can use the model, from the checkpoint's state.json only. Not collective.

    Args:
        options: parsed flags of ``add_model_flags``.
        copies: the tool can use several replicas of the model (dp).
    Raises:
        ConfigError: it cannot be used; the message has the values, the rule and a remedy.
        CheckpointError: there is no checkpoint.
    """
    sizes = {
        "--tensor-model-parallel-size": options.tp_size, "--sequence-parallel-size": options.sp_size,
        "--context-parallel-size": options.cp_size, "--pipeline-model-parallel-size": options.pp_size,
    }  # fmt: skip
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} ({size}) must be at least 1")
    if options.num_threads is not None and options.num_threads < 1:
        raise ConfigError(f"--num-threads ({options.num_threads}) must be at least 1; leave it out to use all cores")
    if options.pp_size > 1:
        raise ConfigError(
            f"--pipeline-model-parallel-size ({options.pp_size}) must be 1 here: pipelines are for training, and a checkpoint of any number"
            f" of stages loads without one; leave it out, or share the model with --tensor-model-parallel-size {options.pp_size}"
        )
    if options.cp_size > 1 and not copies:
        raise ConfigError(
            f"--context-parallel-size ({options.cp_size}) must be 1 here: text is generated by the ranks of tp and sp; context parallelism"
            " is for training and evaluation"
        )
    product = options.tp_size * options.sp_size * options.cp_size
    if world_size == product == 1:
        return
    config = stored_config(options)
    config.parallel = ParallelConfig(  # not the run's: its pipeline, for one, is none of these processes
        tensor_model_parallel_size=options.tp_size,
        sequence_parallel_size=options.sp_size,
        context_parallel_size=options.cp_size,
    )
    batch = config.batch
    batch.global_batch_size, batch.rampup_batch_size, batch.step_batch_size_schedule, batch.eval_global_batch_size = (
        None,
        None,
        None,
        None,
    )
    raise_all(inference_violations(config, world_size))
    if not copies and world_size != product:
        raise ConfigError(
            f"the number of processes ({world_size}) must be tensor_model_parallel_size * sequence_parallel_size"
            f" ({options.tp_size} * {options.sp_size} = {product}): this tool uses one copy of the model; start {product} processes, or"
            " raise one of the two"
        )


def check_graphs(options: argparse.Namespace) -> None:
    """Check that --cuda-graphs on can be had, from the checkpoint's state.json only. Not collective.

    Raises:
        ConfigError: it cannot, with every reason.
        CheckpointError: there is no checkpoint.
    """
    if options.cuda_graphs == "on":
        has_gpu = options.device != "cpu" and torch.cuda.is_available()
        raise_all(
            [violation(obstacle) for obstacle in decoding_obstacles(stored_config(options).model, has_gpu=has_gpu)]
        )


def capture(options: argparse.Namespace, team: Team, model: ModelConfig) -> Capture | None:
    """Return how steps are captured (--cuda-graphs); None: they are eager, which is said where there is a GPU."""
    if options.cuda_graphs == "off" or team.device.type != "cuda":
        return None
    for obstacle in (lacks := decoding_obstacles(model, has_gpu=True)):
        team.say(f"captured steps: not used, {obstacle.reason}")
    must = options.cuda_graphs == "on"
    return None if lacks else Capture(lambda: CudaGraphs(team.device), must=must, of_all=team.gather, tell=team.say)


def join(options: argparse.Namespace, launch: Launch) -> Team:
    """Choose the device and join the other processes. Collective. Raises PeerError: not all of them joined."""
    device = choose_device(options.device, launch)
    if (
        options.num_threads or launch.world_size > 1
    ):  # torchrun's default of one thread per process leaves the other cores idle
        cores = num_cores()
        torch.set_num_threads(options.num_threads or max(1, cores // launch.local_world_size))
    if launch.world_size == 1:
        return Team(launch, device, None)
    try:
        init_process_group(launch, device, "auto", _TIMEOUT)
        sizes = {"tp_size": options.tp_size, "sp_size": options.sp_size, "cp_size": options.cp_size}
        return Team(launch, device, ParallelGroups.create(device, **sizes, timeout=_TIMEOUT))
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        raise PeerError(f"the {launch.world_size} processes did not find each other: {first_line(error)}") from error


def load(
    options: argparse.Namespace, team: Team, cls: type[LanguageModel], what: str, instead: dict[str, str]
) -> Loaded:
    """Load this rank's part of a stored model. Collective.

    Args:
        options: parsed flags of ``add_model_flags``.
        cls, what, instead: as in ``find_stored`` and ``Stored.load``.
    Raises:
        CheckpointError, ConfigError, DataError: the checkpoint or the tokenizer cannot be used.
    """
    reader = team.checkpointer()
    folder = reader.find(options.load, options.ckpt_step)
    with team.agree():
        stored = find_stored(
            folder,
            None,
            what,
            instead,
            lambda line: team.say(f"warning: {line}"),
            options.tokenizer_model,
            checkpointer=reader,
        )
        choose_bos(stored.tokenizer, options.bos)
    on_gpu = team.device.type == "cuda"
    dtype = options.dtype if options.dtype != "auto" else stored.config.precision.params_dtype if on_gpu else "float32"
    model = stored.load(cls, team.device, getattr(torch, dtype), team.layout)
    count = sum(math.prod(spec.shape) for spec in shard_specs(model).values())  # as in the checkpoint
    context = f"cp {options.cp_size}, " if options.cp_size > 1 else ""
    axes = f"tp {options.tp_size}, sp {options.sp_size}, {context}dp {team.dp_size}"
    places = "" if team.size == 1 else f" over {team.size} processes ({axes})"
    size = f"{format_parameters(count)} parameters in {dtype}"
    description = f"{stored.folder}: {size} on {team.device.type}{places}, step {stored.step}"
    return Loaded(model, stored, description)


def run_tool(body: Callable[[Launch], None]) -> int:
    """Run a tool's work and leave the process group; reported errors become one message and an exit code.

    For the ``main`` of a program run by ``run_program``.

    Args:
        body: called with this process's place in the job.
    Returns:
        The exit code.
    """
    launch = Launch.from_env()
    failed: BaseException | None = None
    try:
        body(launch)
        code = EXIT_OK
    except ReportedError as error:
        failed, code = error, error.exit_code
        if launch.rank == 0 or not error.on_all_ranks:
            prefix = "" if error.on_all_ranks or launch.world_size == 1 else f"[rank {launch.rank}] "
            print(f"{prefix}error: {error}", file=sys.stderr, flush=True)
        else:
            let_first_rank_speak()
    except KeyboardInterrupt as error:
        failed, code = error, EXIT_INTERRUPTED
        print(file=sys.stderr)
    except RuntimeError as error:
        if launch.world_size == 1 or not is_peer_failure(error):
            raise
        failed, code = error, EXIT_PEER
        print(f"[rank {launch.rank}] error: another process is gone: {first_line(error)}", file=sys.stderr, flush=True)
    if failed is None or launch.world_size == 1:
        destroy_process_group()
        return code
    leave(code, as_usual=False)  # a broken process group would block an orderly exit
