"""The program behind scripts/pretrain_*.sh: variables and flags become a command, which is described and run.

    SMOKE=1    the same layout with the tiny sizes of scripts/recipes/smoke.yaml on CPU processes: tp, sp, cp, pp and ep are
               reduced to at most 2, dp to what ZeRO needs; the run folder is removed at the end, unless SAVE names one
    DRY_RUN=1  print the needs of the full size, as with --dry-run; nothing is started
    else       check number and memory of this host's GPUs against the prediction; then scripts/launch.sh takes over

A script names its variables' defaults and the file of its flags (scripts/recipes); the user's own flags come last and take
precedence. All are parsed before anything starts, so an impossible layout gives the message of the training program.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# puts the repository on the path: a script needs no installed package
from recipe_variables import ROOT, RankCounts, Variables

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.flags.settings import canonical
from megatron_sp.config.presets import PROGRAMS
from megatron_sp.config.schema import Config
from megatron_sp.estimate.suggestions import shortage
from megatron_sp.planner.dry_run import RunPlan, plan_run
from megatron_sp.planner.forecast import ASSUMED_GPU, ASSUMED_LINK, Forecast, machine_for
from megatron_sp.training.microbatches import BatchPlan
from megatron_sp.utils import streams
from megatron_sp.utils.entry_point import leave
from megatron_sp.utils.errors import EXIT_OK, ConfigError, ReportedError
from megatron_sp.utils.format import format_bytes, format_count, format_parameters

Start = Callable[[list[str], dict[str, str]], int]
_DATA_FLAGS = ("data-path", "train-data-path", "mock-data")
_TINY_EXPERTS = ("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--kv-channels", "8", "--moe-router-topk")
_OF_SEVERAL_HOSTS = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
_MADE_UP = [
    "",
    "  " + "*" * 88,
    "  *" + "NO DATA IS GIVEN: THIS TRAINS ON MADE-UP TOKENS, AND THE MODEL WILL BE OF NO USE".center(86) + "*",
    "  *" + "your own: DATA_PATH=PREFIX, and TOKENIZER_MODEL=FILE or VOCAB_FILE=FILE".center(86) + "*",
    "  " + "*" * 88,
]
_QUESTIONS = ("-h", "--help", "--print-config", "--dry-run")  # flags that are answered without a training run


@dataclass(frozen=True)
class Recipe:
    """Command of a script."""

    name: str  # name of the script, without path and suffix
    program: str  # pretrain_gpt.py or pretrain_bert.py
    variables: Variables
    flags: tuple[str, ...]  # all flags of the program
    config: Config  # configuration that follows from the flags
    save: str

    @property
    def world_size(self) -> int:
        """Number of processes on all hosts."""
        return self.variables.layout.processes

    @property
    def nproc(self) -> int:
        """Number of processes that this host starts."""
        return self.world_size if self.variables.smoke else self.variables.nproc

    @property
    def command(self) -> list[str]:
        """Command line that starts the processes of this host."""
        return ["bash", str(ROOT / "scripts" / "launch.sh"), str(self.nproc), str(ROOT / self.program), *self.flags]

    def batches(self) -> BatchPlan:
        """Return the sizes of the batches of all steps."""
        config = self.config
        return BatchPlan.from_config(
            config.batch, config.parallel.dp_size(self.world_size), config.model.seq_length or 0
        )

    def tokens_after(self, steps: int) -> int:
        # the number of tokens of the first ``steps`` steps
        return self.batches().samples_after(steps) * (self.config.model.seq_length or 0)


# --------------------------------------------------------------------------------------------------------------- flags


def build(
    script: str, program: str, own: Sequence[str], users: Sequence[str], environ: Mapping[str, str], scratch: str = ""
) -> Recipe:
    """Build the command of a script.

    Args:
        script: path of the script.
        own, users: flags of the script and of its user.
        environ: environment with the variables.
        scratch: run folder of a smoke test, unless SAVE names one.
    Raises:
        ConfigError: invalid variables or flags.
    """
    variables, name = Variables.read(environ), Path(script).stem
    if not (ROOT / program).is_file():
        raise ConfigError(f"{program} is not in {ROOT}")
    family = next((family for family, its_program in PROGRAMS.items() if its_program == program), None)
    save = variables.save or (scratch if variables.smoke else f"runs/{name.removeprefix('pretrain_')}")
    data = _data(variables, users)
    length = [] if variables.train_iters is None else ["--train-iters", str(variables.train_iters)]

    def parsed(layout: RankCounts, *more: str) -> tuple[list[str], Config]:
        flags = [*own, *_layout_flags(variables, layout), *data, *more, "--save", save, "--auto-resume", *users]
        return flags, config_from_args(flags, world_size=layout.processes, family=family)

    try:
        flags, config = parsed(
            variables.full_layout, *length
        )  # in a smoke test too: an impossible layout cannot be tried
        if variables.smoke:
            own = [*own, "--config", str(ROOT / "scripts/recipes/smoke.yaml")]
            flags, config = parsed(variables.smoke_layout, *_tiny(config, variables))
    except ConfigError as error:
        raise ConfigError(f"{error}\n  the variables are {variables.text()}") from None
    return Recipe(name, program, variables, tuple(flags), config, save)


def _layout_flags(variables: Variables, layout: RankCounts) -> list[str]:
    flags = ["--tensor-model-parallel-size", str(layout.tp), *(["--sequence-parallel"] if layout.tp > 1 else [])]
    flags += [
        "--sequence-parallel-size",
        str(layout.sp),
        *(["--sp-overlap-mode", variables.overlap] if layout.sp > 1 else []),
    ]
    flags += ["--context-parallel-size", str(layout.cp)] if layout.cp > 1 else []
    if layout.pp > 1:
        flags += ["--pipeline-model-parallel-size", str(layout.pp)]
        flags += ["--pipeline-schedule", variables.pp_schedule] if variables.pp_schedule else []
    flags += ["--expert-model-parallel-size", str(layout.ep)] if layout.ep > 1 else []
    flags += ["--zero-stage", str(variables.zero)]
    return flags + (["--recompute-granularity", variables.recompute] if variables.recompute != "none" else [])


def _data(variables: Variables, users: Sequence[str]) -> list[str]:
    """Return the flags of data and tokenizer: mock data in a smoke test, none if the user's own flags name the data.

    Raises:
        ConfigError: a file is missing, or the tokenizer's file is ambiguous.
    """
    path, spm, vocab = variables.data_path, variables.tokenizer_model, variables.vocab_file
    if path == "mock" and any(canonical(word.partition("=")[0]) in _DATA_FLAGS for word in users):
        return []
    if path == "mock" or variables.smoke:
        return ["--mock-data"]
    if not os.path.isfile(f"{path}.idx"):
        raise ConfigError(f"DATA_PATH={path}: there is no {path}.idx; megatron-sp preprocess makes it (see README.md)")
    if bool(spm) == bool(vocab) or not os.path.isfile(spm or vocab):
        raise ConfigError(
            f"TOKENIZER_MODEL={spm} VOCAB_FILE={vocab}: give the one file that {path} was made with, a SentencePiece"
            " model, a tokenizer.json, or a list of word pieces"
        )
    of_model = "HuggingFaceTokenizer" if spm.endswith(".json") else "SentencePieceTokenizer"
    tokenizer = [of_model, "--tokenizer-model", spm] if spm else ["BertWordPieceLowerCase", "--vocab-file", vocab]
    return ["--data-path", path, "--split", "99,1,0", "--tokenizer-type", *tokenizer]


def _tiny(full: Config, variables: Variables) -> list[str]:
    """Return the flags of a smoke test that depend on the full size.

    These are layers for all stages, key/value groups, experts, and where the full size has them gradient accumulation (a
    full pipeline) and ramp-up.
    """
    tp, sp, cp, pp, world_size, _ = variables.smoke_layout
    batch, dp, tiny_dp = (
        full.batch,
        full.parallel.dp_size(variables.full_layout.processes),
        world_size // (tp * sp * cp * pp),
    )
    accumulates = (batch.global_batch_size or 0) > batch.micro_batch_size * dp
    size = str(tiny_dp * (2 * pp if accumulates else 1))
    flags = ["--num-query-groups", "4"] if full.model.num_query_groups else []
    flags += [*_TINY_EXPERTS, str(min(full.model.moe_router_topk, 2))] if full.model.has_experts else []
    flags += ["--num-layers", str(pp * full.parallel.stages_per_pipeline_rank)] if pp > 1 else []
    flags += ["--rampup-batch-size", *[str(tiny_dp)] * 3] if batch.rampup_batch_size else []
    flags += ["--step-batch-size-schedule", f"0:{size}"] if batch.step_batch_size_schedule else []
    return [*flags, "--global-batch-size", size]


# ---------------------------------------------------------------------------------------------------------- description


def describe(recipe: Recipe, plan: RunPlan, memory: int | None = None) -> str:
    """Return a description of the run in a few lines.

    Args:
        memory: bytes of the smallest GPU of this host; None if unknown.
    """
    variables, data = recipe.variables, recipe.config.data
    title = (
        ", smoke test: the same layout with tiny sizes" if variables.smoke else ", dry run" if variables.dry_run else ""
    )
    stays = bool(variables.save) or not variables.smoke
    peak = f"{format_bytes(plan.memory.peak)} predicted for a process" + (
        f", of {format_bytes(memory)}" if memory else ""
    )
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


def _model(recipe: Recipe, plan: RunPlan) -> str:
    model, name = recipe.config.model, recipe.config.preset or recipe.program
    heads = f"{model.num_attention_heads} heads" + (
        f" with {model.num_groups} groups" if model.num_query_groups else ""
    )
    return (
        f"{'as of ' if recipe.variables.smoke else ''}{name}: {format_parameters(plan.num_params)} parameters,"
        f" {model.num_layers} layers, hidden {model.hidden_size}, {heads}, sequences of {model.seq_length:,} tokens,"
        f" {recipe.config.precision.params_dtype}"
    )


def _layout(recipe: Recipe, plan: RunPlan) -> str:
    parallel, hosts = recipe.config.parallel, 1 if recipe.variables.smoke else recipe.variables.nnodes
    where = (
        _many(recipe.world_size, "CPU process", "CPU processes")
        if plan.device == "cpu"
        else _many(recipe.world_size, "GPU", "GPUs")
    )
    exchanges = f" (exchanges: {parallel.overlap_mode})" if parallel.sequence_parallel_size > 1 else ""
    context = f", cp {parallel.context_parallel_size}" if parallel.context_parallel_size > 1 else ""
    experts = f", ep {parallel.expert_model_parallel_size}" if parallel.expert_model_parallel_size > 1 else ""
    stages = parallel.pipeline_model_parallel_size
    pipeline = f", pp {stages} ({parallel.pipeline_kind})" if stages > 1 else ""
    return (
        f"{where}{f' of {hosts} hosts' if hosts > 1 else ''}: tp {parallel.tensor_model_parallel_size}, sp"
        f" {parallel.sequence_parallel_size}{exchanges}{context}{experts}{pipeline}, dp"
        f" {parallel.dp_size(recipe.world_size)}, ZeRO stage {parallel.zero_stage}, recomputation:"
        f" {recipe.config.kernels.recompute_granularity or 'none'}"
    )


def _step(recipe: Recipe, plan: RunPlan) -> str:
    length, steps, batch = recipe.config.model.seq_length or 0, recipe.config.batch.train_iters, recipe.batches()
    whole = f"; {_many(steps, 'step', 'steps')}, {format_count(recipe.tokens_after(steps))} tokens" if steps else ""
    ramp = f" ({batch.first:,} at the start)" if batch.first != batch.full else ""
    micro_batches = _many(plan.num_micro_batches, "micro-batch", "micro-batches")
    return f"{_many(batch.full, 'sequence', 'sequences')}{ramp}, {batch.full * length:,} tokens, {micro_batches}{whole}"


def _speed(recipe: Recipe, plan: RunPlan) -> dict[str, str]:
    variables, steps = recipe.variables, recipe.config.batch.train_iters
    if not variables.dry_run or plan.device == "cpu":
        return {}
    machine = machine_for(
        recipe.world_size, variables.nnodes, variables.gpu_type, variables.link_type, ("GPU_TYPE", "LINK_TYPE")
    )
    speed = Forecast.of(recipe.config, machine)
    assumed = [] if variables.gpu_type else [f"GPU_TYPE={ASSUMED_GPU}"]
    assumed += [f"LINK_TYPE={ASSUMED_LINK}"] if machine.between and not variables.link_type else []
    rows = {"speed": speed.words() + (f"; assumed: {' '.join(assumed)}" if assumed else "")}
    if steps:
        tokens, count = recipe.tokens_after(steps), _many(steps, "step", "steps")
        rows["time"] = (
            f"{speed.length(tokens)} for {count}, without validation and saves; predicted as by `megatron-sp plan`"
        )
        if variables.price_per_gpu_hour is None:
            rows["cost"] = "PRICE_PER_GPU_HOUR=2.5, or what an hour of a GPU costs you, says it"
        else:
            price = speed.price(tokens, variables.price_per_gpu_hour)
            rows["cost"] = f"{price:,.0f}, at {variables.price_per_gpu_hour:g} for an hour of a GPU"
    return rows


def _many(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


# ------------------------------------------------------------------------------------------------------------ execution


def gpu_memory() -> list[int]:
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
            f"{_many(recipe.nproc, 'GPU is', 'GPUs are')} needed on this host, and there are {len(gpus)}{fewer}."
            f" SMOKE=1 {script} tries the layout with a tiny model on CPU processes, DRY_RUN=1 {script} says what"
            " the full size takes"
        )
    lines = shortage(recipe.config, recipe.world_size, "cuda", min(gpus[: recipe.nproc]), "on a GPU of this host")
    if lines:
        raise ConfigError(
            "\n".join(lines).removeprefix("warning: ") + f"\n  the variables are {recipe.variables.text()}"
        )


def _run(command: list[str], environ: dict[str, str]) -> int:
    # run a command and wait for its end even after Ctrl-C or SIGTERM, which the launcher handles
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
    # replace this process by a command, so that signals reach the launcher itself
    sys.stdout.flush()
    os.execvpe(command[0], command, environ)


def run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    start: Start = _become,
    gpus: Callable[[], list[int]] = gpu_memory,
) -> int:
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
    asks = any(word.split("=")[0] in _QUESTIONS for word in users)
    environ = {"PYTHON": sys.executable, **environ}
    with tempfile.TemporaryDirectory(prefix=f"{Path(script).stem}.") as scratch:
        recipe = build(script, program, own, users, environ, scratch)
        if recipe.variables.smoke and not asks:
            print(describe(recipe, plan_run(recipe.config, recipe.world_size)), flush=True)
            return _run(recipe.command, {name: text for name, text in environ.items() if name not in _OF_SEVERAL_HOSTS})
    if asks:
        return start([environ["PYTHON"], *recipe.command[3:]], {**environ, "WORLD_SIZE": str(recipe.world_size)})
    plan = plan_run(recipe.config, recipe.world_size)
    if recipe.variables.dry_run:
        print(describe(recipe, plan), plan.text(), sep="\n\n")
        return EXIT_OK
    gpu_bytes = gpus() if plan.device == "cuda" else []
    if plan.device == "cuda":
        check_gpus(recipe, gpu_bytes)
    if environ.get("NODE_RANK", "0") in ("", "0"):
        print(describe(recipe, plan, min(gpu_bytes, default=None)), flush=True)
    return start(recipe.command, environ)


def main(argv: Sequence[str]) -> int:
    """Run a script's command; return the exit code."""
    try:
        return run(argv, os.environ)
    except ReportedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    streams.survive()  # a training is not left undone because nobody takes what is said of it
    leave(main(sys.argv[1:]))
