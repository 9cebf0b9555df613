"""Execution of the scripts scripts/pretrain_*.sh: describe a script's command and run it.

SMOKE=1    tiny sizes on CPU processes; the run folder is removed at the end, unless SAVE names one
DRY_RUN=1  print the needs of the full size, as with --dry-run; nothing is started
else       check number and memory of this host's GPUs against the prediction; then scripts/launch.sh takes over
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_sp.commands.recipe import Recipe, build
from megatron_sp.estimate.suggestions import shortage
from megatron_sp.planner.dry_run import RunPlan, plan_run
from megatron_sp.planner.forecast import ASSUMED_GPU, ASSUMED_LINK, Forecast, machine_for
from megatron_sp.utils.errors import EXIT_OK, ConfigError, ReportedError
from megatron_sp.utils.format import format_bytes, format_count, format_parameters

Start = Callable[[list[str], dict[str, str]], int]
_OF_SEVERAL_HOSTS = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
_MADE_UP = [
    "",
    "  " + "*" * 88,
    "  *" + "NO DATA IS GIVEN: THIS TRAINS ON MADE-UP TOKENS, AND THE MODEL WILL BE OF NO USE".center(86) + "*",
    "  *" + "your own: DATA_PATH=PREFIX, and TOKENIZER_MODEL=FILE or VOCAB_FILE=FILE".center(86) + "*",
    "  " + "*" * 88,
]
_QUESTIONS = ("-h", "--help", "--print-config", "--dry-run")  # flags that are answered without a training run


def describe(recipe: Recipe, plan: RunPlan, memory: int | None = None) -> str:
    """Return a description of the run in a few lines.

    Args:
        memory: bytes of the smallest GPU of this host; None if unknown.
    """
    variables, data = recipe.variables, recipe.config.data
    title = ", smoke test: the same layout with tiny sizes" if variables.smoke else ", dry run" if variables.dry_run else ""
    stays = bool(variables.save) or not variables.smoke
    peak = f"{format_bytes(plan.memory.peak)} predicted for a process" + (f", of {format_bytes(memory)}" if memory else "")
    rows = {
        "model": _model(recipe, plan),
        "layout": _layout(recipe, plan),
        "step": _step(recipe, plan),
        "memory": f"{peak}; tensors alone",
        **_speed(recipe, plan),
        "data": " ".join(data.data_path or data.train_data_path) or "made up",
        "run folder": f"{recipe.save}; {'the same command goes on from its newest checkpoint' if stays else 'removed at the end'}",
        "command": shlex.join(recipe.command),
    }
    made_up = _MADE_UP if data.mock_data and not variables.smoke else []
    return "\n".join([f"{recipe.name}{title}", *(f"  {key:<10}  {value}" for key, value in rows.items()), *made_up])


def _speed(recipe: Recipe, plan: RunPlan) -> dict[str, str]:
    """Return rows with the predicted time of a dry run's training and, where the price of a GPU is known, its cost."""
    variables, steps = recipe.variables, recipe.config.batch.train_iters
    if not variables.dry_run or plan.device == "cpu":
        return {}
    machine = machine_for(recipe.world_size, variables.nnodes, variables.gpu_type, variables.link_type, ("GPU_TYPE", "LINK_TYPE"))
    speed = Forecast.of(recipe.config, machine)
    assumed = [] if variables.gpu_type else [f"GPU_TYPE={ASSUMED_GPU}"]
    assumed += [f"LINK_TYPE={ASSUMED_LINK}"] if machine.between and not variables.link_type else []
    rows = {"speed": speed.words() + (f"; assumed: {' '.join(assumed)}" if assumed else "")}
    if steps:
        tokens = recipe.tokens_after(steps)
        many = _many(steps, "step", "steps")
        rows["time"] = f"{speed.length(tokens)} for {many}, without validation and saves; predicted as by `megatron-sp plan`"
        if variables.price_per_gpu_hour is not None:
            price = speed.price(tokens, variables.price_per_gpu_hour)
            rows["cost"] = f"{price:,.0f}, at {variables.price_per_gpu_hour:g} for an hour of a GPU"
        else:
            rows["cost"] = "PRICE_PER_GPU_HOUR=2.5, or what an hour of a GPU costs you, says it"
    return rows


def _model(recipe: Recipe, plan: RunPlan) -> str:
    model, name = recipe.config.model, recipe.config.preset or recipe.program
    heads = f"{model.num_attention_heads} heads" + (f" with {model.num_groups} groups" if model.num_query_groups else "")
    return (
        f"{'as of ' if recipe.variables.smoke else ''}{name}: {format_parameters(plan.num_params)} parameters, {model.num_layers} layers,"
        f" hidden {model.hidden_size}, {heads}, sequences of {model.seq_length:,} tokens, {recipe.config.precision.params_dtype}"
    )


def _layout(recipe: Recipe, plan: RunPlan) -> str:
    parallel, hosts = recipe.config.parallel, 1 if recipe.variables.smoke else recipe.variables.nnodes
    where = _many(recipe.world_size, "CPU process", "CPU processes") if plan.device == "cpu" else _many(recipe.world_size, "GPU", "GPUs")
    exchanges = f" (exchanges: {parallel.overlap_mode})" if parallel.sequence_parallel_size > 1 else ""
    context = f", cp {parallel.context_parallel_size}" if parallel.context_parallel_size > 1 else ""
    p = parallel.pipeline_model_parallel_size
    experts = f", ep {parallel.expert_model_parallel_size}" if parallel.expert_model_parallel_size > 1 else ""
    pipeline = f", pp {p} ({parallel.pipeline_kind})" if p > 1 else ""
    return (
        f"{where}{f' of {hosts} hosts' if hosts > 1 else ''}: tp {parallel.tensor_model_parallel_size}, sp"
        f" {parallel.sequence_parallel_size}{exchanges}{context}{experts}{pipeline}, dp {parallel.dp_size(recipe.world_size)},"
        f" ZeRO stage {parallel.zero_stage}, recomputation: {recipe.config.kernels.recompute_granularity or 'none'}"
    )


def _step(recipe: Recipe, plan: RunPlan) -> str:
    length, steps = recipe.config.model.seq_length or 0, recipe.config.batch.train_iters
    batch = recipe.batches
    whole = f"; {_many(steps, 'step', 'steps')}, {format_count(recipe.tokens_after(steps))} tokens" if steps else ""
    ramp = f" ({batch.first:,} at the start)" if batch.first != batch.full else ""
    each = _many(plan.num_micro_batches, "micro-batch", "micro-batches")
    return f"{_many(batch.full, 'sequence', 'sequences')}{ramp}, {batch.full * length:,} tokens, {each}{whole}"


def _many(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def gpu_memory() -> list[int]:
    """Return the memory of every GPU of this host in bytes."""
    import torch

    return [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]


def check_gpus(recipe: Recipe, gpus: Sequence[int]) -> None:
    """Check that this host has a GPU with enough memory for each process.

    Raises:
        ConfigError: it does not; the message has suggestions.
    """
    script = f"bash scripts/{recipe.name}.sh"
    if len(gpus) < recipe.nproc:
        fewer = f"; NPROC_PER_NODE={len(gpus)} {script} takes those" if gpus else ""
        raise ConfigError(
            f"{_many(recipe.nproc, 'GPU is', 'GPUs are')} needed on this host, and there are {len(gpus)}{fewer}. SMOKE=1 {script} tries the"
            f" layout with a tiny model on CPU processes, DRY_RUN=1 {script} says what the full size takes"
        )
    lines = shortage(recipe.config, recipe.world_size, "cuda", min(gpus[: recipe.nproc]), "on a GPU of this host")
    if lines:
        raise ConfigError("\n".join(lines).removeprefix("warning: ") + f"\n  the variables are {recipe.variables.text()}")


def _run(command: list[str], environ: dict[str, str]) -> int:
    """Run a command and wait for its end even after Ctrl-C or SIGTERM, which the launcher handles, so that the caller can clean up."""
    child: subprocess.Popen[bytes] | None = None
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        if child is not None:
            child.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        child = subprocess.Popen(command, env=environ)
        if stopped:  # before there was a child to signal
            child.terminate()
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def _become(command: list[str], environ: dict[str, str]) -> int:
    """Replace this process by a command, so that signals reach the launcher itself."""
    sys.stdout.flush()
    os.execvpe(command[0], command, environ)


def run(argv: Sequence[str], environ: Mapping[str, str], *, start: Start = _become, gpus: Callable[[], list[int]] = gpu_memory) -> int:
    """Describe and run the command of a script, given as ``SCRIPT PROGRAM FLAGS... -- FLAGS OF THE USER``.

    Args:
        start: starts a real run.
        gpus: returns the memory of this host's GPUs.
    Returns:
        The exit code.
    Raises:
        ReportedError: invalid variables or flags, or an unsuitable host.
    """
    script, program, *flags = argv
    cut = flags.index("--")
    own, users = flags[:cut], flags[cut + 1 :]
    environ = {"PYTHON": sys.executable, **environ}
    with tempfile.TemporaryDirectory(prefix=f"{Path(script).stem}.") as scratch:
        recipe = build(script, program, own, users, environ, scratch)
        if recipe.variables.smoke and not _is_question(users):
            print(describe(recipe, plan_run(recipe.config, recipe.world_size)), flush=True)
            return _run(recipe.command, {name: text for name, text in environ.items() if name not in _OF_SEVERAL_HOSTS})
    if _is_question(users):
        return start([environ["PYTHON"], *recipe.command[3:]], {**environ, "WORLD_SIZE": str(recipe.world_size)})
    plan = plan_run(recipe.config, recipe.world_size)
    if recipe.variables.dry_run:
        print(describe(recipe, plan), plan.text(), sep="\n\n")
        return EXIT_OK
    found = gpus() if plan.device == "cuda" else []
    if plan.device == "cuda":
        check_gpus(recipe, found)
    if environ.get("NODE_RANK", "0") in ("", "0"):
        print(describe(recipe, plan, min(found, default=None)), flush=True)
    return start(recipe.command, environ)


def _is_question(users: Sequence[str]) -> bool:
    """Return whether the user's flags ask for output instead of a run, such as --help."""
    return any(word.split("=")[0] in _QUESTIONS for word in users)


def main(argv: Sequence[str]) -> int:
    """Entry point of scripts/recipe.py; returns the exit code."""
    try:
        return run(argv, os.environ)
    except ReportedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
