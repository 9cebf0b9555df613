"""``megatron-sp plan``: parse machine and model from the command line, search, and print the plan."""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import math

from megatron_sp.config.flags.arguments import draft_config
from megatron_sp.config.rules import normalize, violations
from megatron_sp.config.rules_experts import share_violations
from megatron_sp.config.rules_layout import can_delay
from megatron_sp.config.schema import Config, raise_all
from megatron_sp.planner import report
from megatron_sp.planner.advice import find_changes, least_memory
from megatron_sp.planner.context_rows import ContextRows, context_svg, mask_of_row
from megatron_sp.planner.dry_run import complete
from megatron_sp.planner.hardware import CPU, GIB, find_gpu, find_link
from megatron_sp.planner.machine import Machine, cards_of
from megatron_sp.planner.parallel_plans import Given, default_batch
from megatron_sp.planner.search import FINALISTS, search
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.format import format_bytes
from megatron_sp.utils.host import num_cores

MOST_GPUS = 1 << 20


def run(args: argparse.Namespace, words: list[str]) -> int:
    """Search, and print the plan, by flags of the planner (``args``) and of the model (``words``).

    Raises:
        ConfigError: a flag is wrong, or no layout fits.
    """
    problems = [
        f"--{name.replace('_', '-')} ({getattr(args, name)}) must be at least 1"
        for name in ("gpus", "nodes", "cards", "top") if getattr(args, name) is not None and getattr(args, name) < 1
    ]  # fmt: skip
    if args.gpus > MOST_GPUS:
        problems.append(f"--gpus ({args.gpus}) must be at most {MOST_GPUS}")
    if args.reserve_gib is not None and not 0 <= args.reserve_gib < math.inf:
        problems.append(f"--reserve-gib ({args.reserve_gib:g}) must be at least 0")
    raise_all(problems)
    base, given, extra = read_model(words, args.gpus, args.gpu == CPU)
    mask = mask_of_row(base, args.documents)
    if args.picture is not None:
        from megatron_sp.planner.picture import check_picture

        check_picture(args.picture, base.parallel.context_parallel_size > 1)
    machine = read_machine(args, base)
    found = search(base, given, machine, num_cores(), max(FINALISTS, 3 * args.top))
    if not found.candidates:
        raise ConfigError(_nothing_fits(base, given, machine, [f"{each.who}: {each.why}" for each in found.rejected]))
    best = found.best_of_each()[: args.top]
    rows = ContextRows.of(best[0].config, mask) if best[0].layout.cp > 1 else None
    if args.json:
        record = report.as_dict(found, base, machine, extra, args.top)
        print(json.dumps(record | ({"context": rows.as_dict()} if rows else {}), indent=1))
    else:
        parts = [report.text(found, base, machine, extra, args.top)]
        if rows is not None:
            parts.append(rows.text())
        elif args.documents:
            parts.append(
                "--documents: layout 1 has no context parallelism, for which they are; add --context-parallel-size N"
            )
        print(*parts, sep="\n\n")
    if args.picture is not None:
        from megatron_sp.planner.picture import draw, is_svg

        below = context_svg(rows.plan) if rows and is_svg(args.picture) else ""
        draw(best, args.picture, f"{machine.gpus} x {machine.gpu.name}: predicted memory and speed", below)
    return 0


def read_machine(args: argparse.Namespace, base: Config) -> Machine:
    """Return the machine that the flags describe; ``cpu-core`` is measured.

    Raises:
        ConfigError: unknown names, or inconsistent numbers.
    """
    if args.gpu == CPU:
        names = ("nodes", "link", "inside-link", "cards")
        given = [f"--{name}" for name in names if getattr(args, name.replace("-", "_")) is not None]
        if given:
            raise ConfigError(f"--gpu {CPU} means processes of this machine alone: leave {' and '.join(given)} out")
        from megatron_sp.planner.calibrate import measure_machine

        return measure_machine(args.gpus, base, args.reserve_gib)
    gpu = find_gpu(args.gpu)
    nodes = args.nodes or max(1, math.ceil(args.gpus / 8))
    if args.gpus % nodes:
        near = [n for n in range(1, args.gpus + 1) if args.gpus % n == 0]
        choice = sorted(sorted(near, key=lambda n: abs(n - nodes))[:3])
        said = "" if args.nodes else ", so that none has more than 8 GPUs"
        each, rest = divmod(args.gpus, nodes)
        raise ConfigError(
            f"--gpus ({args.gpus}) must be a multiple of --nodes ({nodes}{said}): {args.gpus} = {each} * {nodes} +"
            f" {rest}; use --nodes {', '.join(map(str, choice))}, or --gpus {each * nodes or nodes} or"
            f" {(each + 1) * nodes}"
        )
    between = find_link(args.link, "--link", between_nodes=True) if args.link else None
    if nodes > 1 and between is None:
        ways = "what joins them (such as ib-400g or eth-100g); or give --nodes 1"
        raise ConfigError(f"{nodes} nodes need --link NAME, {ways}")
    inside = find_link(args.inside_link or gpu.link, "--inside-link", between_nodes=False)
    cards = args.cards or cards_of(between, args.gpus // nodes)
    return Machine(gpu, args.gpus, nodes, inside, between, cards, gpu.memory_bytes, args.reserve_gib)


def read_model(words: list[str], gpus: int, cpu: bool) -> tuple[Config, Given, list[str]]:
    """Return the configuration that the flags describe, its fixed fields, and flags for the planner's assumptions.

    Raises:
        ConfigError: a flag is wrong.
    """
    names = ("gpus", "gpu", "nodes", "link", "inside-link", "cards", "reserve-gib", "top", "picture", "documents")
    for word in words:  # a mistyped flag of the planner, before the model's flags are parsed
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, [f"--{flag}" for flag in names], n=1, cutoff=0.85)
        if near and word.startswith("--"):
            raise ConfigError(f"{name} is unknown: did you mean {near[0]}?")
    config, given = draft_config(words)
    extra = []
    if config.parallel.offload_optimizer:
        raise ConfigError(
            "--offload-optimizer: its copies are not part of the prediction; leave it out, --dry-run shows the memory"
            " of such a run"
        )
    if not cpu and not given & {("precision", name) for name in ("bf16", "fp16", "fp64")}:
        config.precision.bf16 = True
        extra.append("--bf16")
    config.kernels.device = "cpu" if cpu else config.kernels.device
    _fill_in(config)
    tp_seq, chunks = config.parallel.sequence_parallel, config.parallel.moe_chunks
    normalize(config)  # this drops them while tp and ep are 1, which the search chooses later
    if ("parallel", "tensor_model_parallel_size") not in given:
        config.parallel.sequence_parallel = tp_seq
    if ("parallel", "expert_model_parallel_size") not in given:
        config.parallel.moe_chunks = chunks if config.model.has_experts else 1
    if ("batch", "micro_batch_size") not in given:
        config.batch.micro_batch_size = 1
    if config.batch.global_batch_size is None and config.model.seq_length:
        config.batch.global_batch_size = gpus * config.batch.micro_batch_size if cpu else default_batch(config, gpus)
        extra.append(f"--global-batch-size {config.batch.global_batch_size}")
    batch = config.batch
    batch.rampup_batch_size = batch.step_batch_size_schedule = batch.eval_global_batch_size = None
    if config.parallel.use_distributed_optimizer:
        given.add(("parallel", "zero_stage"))
    one = config.parallel.replica_size
    raise_all([*violations(_on_trial(config, given), one), *share_violations(config)])
    complete(config, one)
    return config, frozenset(given), extra


def _on_trial(config: Config, given: set[tuple[str, str]]) -> Config:
    # a copy without settings that depend on sizes that the planner has yet to choose
    config = copy.deepcopy(config)
    parallel = config.parallel
    if config.model.has_experts and parallel.expert_model_parallel_size > 0:
        parallel.expert_model_parallel_size = 1  # among how many ranks they are shared, depends on dp
    if ("parallel", "sequence_parallel_size") not in given:
        parallel.sp_overlap_mode, parallel.sp_head_chunks = None, None
        parallel.sp_overlap_comm = parallel.split_qkv_linear = False
    if ("parallel", "context_parallel_size") not in given:
        parallel.cp_chunks, parallel.cp_stages_ahead, parallel.cp_keep_kv = None, None, False
    parallel.delay_wgrad &= can_delay(parallel)
    if ("parallel", "tensor_model_parallel_size") not in given:
        parallel.sequence_parallel = False
    if ("parallel", "pipeline_model_parallel_size") not in given:
        parallel.pipeline_schedule = parallel.pipeline_slices = None
        parallel.num_virtual_stages_per_pipeline_rank = parallel.num_layers_per_virtual_pipeline_stage = None
        parallel.decoder_first_pipeline_num_layers = parallel.decoder_last_pipeline_num_layers = None
        parallel.pipeline_model_parallel_layout = None
    return config


def _fill_in(config: Config) -> None:
    # settings that a run requires but a plan does not
    optimizer, batch, data = config.optimizer, config.batch, config.data
    optimizer.lr = optimizer.lr if optimizer.lr is not None else max(1e-4, optimizer.min_lr)
    if batch.train_iters is None and batch.train_samples is None:
        batch.train_iters = 10**6
    paths = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    splits = (data.train_weighted_split_paths, data.valid_weighted_split_paths, data.test_weighted_split_paths)
    if not any((*paths, *splits)):
        data.mock_data = True


def _nothing_fits(base: Config, given: Given, machine: Machine, reasons: list[str]) -> str:
    least = least_memory(base, given, machine)
    if least is None:
        return "no layout is possible:\n" + "\n".join(f"  {reason}" for reason in reasons)
    needs, layout = least
    lines = [
        f"nothing fits: the layout that needs least ({layout.words(machine.gpus)}) needs {format_bytes(needs)} on each"
        f" {machine.gpu.name}, which has {machine.memory_bytes / GIB:.1f} GiB:"
        f" {format_bytes(needs - machine.memory_bytes)} too much"
    ]
    for change in find_changes(base, given, machine):
        fits = "fits" if change.fits else f"still {format_bytes(change.needs - change.have)} too much"
        lines.append(f"  {change.what}: needs {format_bytes(change.needs)} of {change.have / GIB:.1f} GiB, {fits}")
    return "\n".join(lines)
