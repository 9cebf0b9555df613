"""One or several processes that use a stored model together: process groups, layout, model and tokenizer, exit.

Errors that can be detected without the other ranks are reported before a rank waits for them.
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
from megatron_sp.checkpoint.pieces import GlobalTensor
from megatron_sp.comm.devices import gpu_of
from megatron_sp.comm.failed_ranks import first_line, is_peer_failure
from megatron_sp.comm.groups import ParallelGroups, destroy_process_group, init_process_group
from megatron_sp.comm.object_collectives import all_ranks_agree, broadcast_json, gather_json
from megatron_sp.config.rules import inference_violations
from megatron_sp.config.rules_kernels import decoding_obstacles, violation
from megatron_sp.config.schema import SENTENCEPIECE, WORDPIECE, Config, ModelConfig, ParallelConfig, raise_all
from megatron_sp.data.tokenizers import Tokenizer, build_tokenizer, choose_bos, kept
from megatron_sp.data.tokenizers.kept import name_path
from megatron_sp.inference.decoder import Capture
from megatron_sp.models.experts import expert_biases
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.ops.cuda_graphs import CudaGraphs
from megatron_sp.parallel.layers import shard_specs
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.utils.entry_point import leave
from megatron_sp.utils.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PEER,
    CheckpointError,
    ConfigError,
    DataError,
    PeerError,
    ReportedError,
)
from megatron_sp.utils.format import format_parameters
from megatron_sp.utils.host import num_cores
from megatron_sp.utils.launch import Launch, let_first_rank_speak

_TIMEOUT = timedelta(hours=1)  # the longest that the slowest rank may lag behind the fastest
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"  # their rows are the vocabulary
_OF_A_CLASSIFIER = "classification_head.weight"
# numbers-as-text take theirs from the model
_HAS_OWN_VOCABULARY = (*SENTENCEPIECE, "HuggingFaceTokenizer", "GPT2BPETokenizer", "ByteTokenizer", *WORDPIECE)


class Team:
    """The processes of one tool, in ``dp_size`` replicas of the model."""

    def __init__(self, launch: Launch, device: torch.device, groups: ParallelGroups | None) -> None:
        self.launch, self.device, self.rank, self.size = launch, device, launch.rank, launch.world_size
        self._control = None if groups is None else groups.control
        self.layout = ParallelContext() if groups is None else ParallelContext.of(groups)
        self.dp_rank, self.dp_size = (0, 1) if groups is None else (groups.dp_rank, groups.dp_size)
        self.is_first_of_replica = groups is None or groups.is_first_of_replica

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value (JSON). Collective."""
        return broadcast_json(value, self._control)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value (JSON). Collective."""
        return gather_json(value, self._control)

    def agree(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an error on any rank is raised on all. Collective."""
        return contextlib.nullcontext() if self._control is None else all_ranks_agree(self._control)

    def from_first(self, read: Callable[[], Any]) -> Any:
        """Call ``read`` on rank 0 for all ranks. Collective."""
        value = None
        with self.agree():
            if self.rank == 0:
                value = read()
        return self.broadcast(value)

    def checkpointer(self) -> Checkpointer:
        return Checkpointer(None, rank=self.rank, world_size=self.size, group=self._control)


# Before the processes join: from the checkpoint's state.json only


def stored_config(options: argparse.Namespace) -> Config:
    """Return the configuration stored in the checkpoint. Raises CheckpointError."""
    folder = find.candidates(Path(options.load), options.ckpt_step).folders[0]
    return stored_configuration(Checkpointer(None).read_state(folder), normalize=True)[0]


def check_layout(options: argparse.Namespace, world_size: int, *, copies: bool) -> None:
    """Raise ConfigError if so many processes, with several ``copies`` of the model or one, cannot use it."""
    tp, sp, cp, pp = options.tp_size, options.sp_size, options.cp_size, options.pp_size
    names = ("tensor-model", "sequence", "context", "pipeline-model")
    for name, size in zip(names, (tp, sp, cp, pp), strict=True):
        if size < 1:
            raise ConfigError(f"--{name}-parallel-size ({size}) must be at least 1")
    if options.num_threads is not None and options.num_threads < 1:
        raise ConfigError(f"--num-threads ({options.num_threads}) must be at least 1; leave it out to use all cores")
    if pp > 1:
        raise ConfigError(
            f"--pipeline-model-parallel-size ({pp}) must be 1 here: pipelines are for training, and a checkpoint of any"
            " number of stages loads without one; leave it out, or share the model with"
            f" --tensor-model-parallel-size {pp}"
        )
    if cp > 1 and not copies:
        raise ConfigError(
            f"--context-parallel-size ({cp}) must be 1 here: text is generated by the ranks of tp and sp; context"
            " parallelism is for training and evaluation"
        )
    product = tp * sp * cp
    if world_size == product == 1:
        return
    config = stored_config(options)
    # not the run's layout and batches: its pipeline, for one, is none of these processes
    config.parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel_size=sp, context_parallel_size=cp)
    for name in ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule", "eval_global_batch_size"):
        setattr(config.batch, name, None)
    raise_all(inference_violations(config, world_size))
    if not copies and world_size != product:
        raise ConfigError(
            f"the number of processes ({world_size}) must be tensor_model_parallel_size * sequence_parallel_size"
            f" ({tp} * {sp} = {product}): this tool uses one copy of the model; start {product} processes, or"
            " raise one of the two"
        )


def check_graphs(options: argparse.Namespace) -> None:
    """Raise ConfigError if --cuda-graphs on cannot be had."""
    if options.cuda_graphs == "on":
        has_gpu = options.device != "cpu" and torch.cuda.is_available()
        obstacles = decoding_obstacles(stored_config(options).model, has_gpu=has_gpu)
        raise_all([violation(obstacle) for obstacle in obstacles])


def capture(options: argparse.Namespace, team: Team, model: ModelConfig) -> Capture | None:
    """Return how steps are captured; None: they are eager."""
    if options.cuda_graphs == "off" or team.device.type != "cuda":
        return None
    obstacles = decoding_obstacles(model, has_gpu=True)
    for obstacle in obstacles:
        team.say(f"captured steps: not used, {obstacle.reason}")
    must = options.cuda_graphs == "on"
    return None if obstacles else Capture(lambda: CudaGraphs(team.device), must=must, of_all=team.gather, tell=team.say)


# Joining


def choose_device(choice: str, launch: Launch) -> torch.device:
    """Return the device of this rank. Raises ConfigError if it does not exist."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU (`megatron-sp doctor` says why); use --device cpu")
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if launch.world_size == 1:
        return torch.device("cuda")
    device = gpu_of(launch.local_rank)
    torch.cuda.set_device(device)
    return device


def join(options: argparse.Namespace, launch: Launch) -> Team:
    """Choose the device and join the other processes. Collective; raises PeerError."""
    device = choose_device(options.device, launch)
    if options.num_threads or launch.world_size > 1:
        # torchrun's default of one thread per process leaves the other cores idle
        torch.set_num_threads(options.num_threads or max(1, num_cores() // launch.local_world_size))
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


# The model


class Stored(NamedTuple):
    """A stored model and the checkpointer that reads it."""

    folder: Path
    config: Config
    tokenizer: Tokenizer
    step: object
    checkpointer: Checkpointer

    def load(
        self, cls: type[LanguageModel], device: torch.device, dtype: torch.dtype, layout: ParallelContext | None = None
    ) -> LanguageModel:
        """Load the model, or this rank's part of it, for inference."""
        with torch.device("meta"):  # initial weights need not be drawn
            model = cls(self.config.model, self.config.kernels, seed=0, dtype=dtype, layout=layout)
        model.to_empty(device=device)
        specs, wanted = shard_specs(model), {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            if parameter.shape != specs[name].shape:
                parameter.zero_()  # rows that pad the vocabulary are not on the disk
            wanted[name] = GlobalTensor.of_shard(specs[name], parameter.detach())
        wanted |= {name: GlobalTensor.whole(bias) for name, bias in expert_biases(model).items()}
        self.checkpointer.load(self.folder, wanted, partial=True, cast=True)
        return model.eval()


class Loaded(NamedTuple):
    """A loaded model and a line that describes it."""

    model: LanguageModel
    stored: Stored
    description: str


def find_stored(
    run: str | Path, step: int | None, what: str, instead: dict[str, str], warn: Callable[[str], None],
    tokenizer_file: str | None = None, checkpointer: Checkpointer | None = None,
) -> Stored:  # fmt: skip
    """Find a run's checkpoint of the kind ``what`` ("GPT", "BERT"), its configuration and its tokenizer.

    Args:
        instead: what to use for other kinds: the end of a sentence.
        tokenizer_file: a file or folder of a tokenizer instead of the run's own.
        checkpointer: one that has already found ``run``, a step folder.
    """
    if checkpointer is None:
        checkpointer = Checkpointer(None)
        run = checkpointer.find(run, step)
    folder = Path(run)
    state = checkpointer.read_state(folder)
    config, warnings = stored_configuration(state, normalize=True)
    for warning in warnings:
        warn(warning)
    shapes = checkpointer.tensor_shapes(folder)
    if isinstance(foreign := state.get("foreign_model"), dict):
        raise CheckpointError(
            f"{folder} holds a {foreign.get('class')} of transformers, which runs and evaluates it; megatron-sp convert"
            f" --to hf --input {folder} --output FOLDER writes its folder, megatron-sp schedule train --skip-train"
            " evaluates it by its validation data"
        )
    if WORD_EMBEDDINGS not in shapes:
        raise CheckpointError(f"{folder} holds no {what}: it has no tensor {WORD_EMBEDDINGS}")
    kind = "classifier" if _OF_A_CLASSIFIER in shapes else "BERT" if config.model.is_bert else "GPT"
    if kind != what:
        raise CheckpointError(f"{folder} holds a {kind}, {instead[kind]}")
    vocab_size = config.model.vocab_size = shapes[WORD_EMBEDDINGS][0][0]
    data = config.data
    if tokenizer_file is None:
        kept.take(data, kept.Record.from_json(state.get("tokenizer")), folder)
    else:
        path = Path(tokenizer_file)
        is_model_file = not path.is_dir() and path.suffix != ".json"
        if data.tokenizer_type in WORDPIECE and is_model_file:
            data.vocab_file = str(path)  # case is as in training
        elif data.tokenizer_type in SENTENCEPIECE and is_model_file:
            data.tokenizer_model = str(path)  # and so is BOS
        else:
            name_path(data, path)
    has_own = data.tokenizer_type in _HAS_OWN_VOCABULARY or bool(data.tokenizer_model or data.vocab_file)
    tokenizer = build_tokenizer(data, None if has_own else vocab_size)
    if tokenizer.vocab_size > vocab_size:
        sizes = f"the tokenizer has {tokenizer.vocab_size} tokens, the model's vocabulary only {vocab_size}"
        raise DataError(f"{sizes}: it is not the model's own; give that with --tokenizer-model")
    return Stored(folder, config, tokenizer, state.get("step"), checkpointer)


def load(
    options: argparse.Namespace, team: Team, cls: type[LanguageModel], what: str, instead: dict[str, str]
) -> Loaded:
    """Load this rank's part of a stored model. Collective; else as ``find_stored``."""
    reader = team.checkpointer()
    folder = reader.find(options.load, options.ckpt_step)
    with team.agree():
        warn = lambda line: team.say(f"warning: {line}")
        stored = find_stored(folder, None, what, instead, warn, options.tokenizer_model, reader)
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
    """Run a tool; a reported error becomes one message and the exit code."""
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
