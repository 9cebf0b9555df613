"""How fast a run is in the layout that it has, and what it costs: the planner's time without a search."""

# A dry run is made on any machine, so the one that it is for has to be named, or is assumed. ``rough_seconds`` is the
# time by a rough form: FLOPs, bytes of memory and of exchanges, and what of these is hidden. It orders the layouts of a
# search, of which the best are then run and their timelines replayed (``timeline.py``).

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

from megatron_sp.config.rules_kernels import obstacles
from megatron_sp.config.schema import Config
from megatron_sp.estimate.flops import head_share, mlp_parameters, seen_share, step_flops_per_token
from megatron_sp.estimate.rough import RoughRank
from megatron_sp.planner.hardware import find_gpu, find_link
from megatron_sp.planner.machine import Machine, cards_of
from megatron_sp.planner.timeline import Product, Scores, StepTime
from megatron_sp.utils.format import format_duration

ASSUMED_GPU, ASSUMED_LINK = "h100-80g", "ib-400g"


_EXPOSED = {"none": 1.0, "split-qkv": 0.7}  # of Ulysses' exchanges
_BUBBLE = {"zb1p": 0.6, "zbv": 0.3, "slices": 0.3}  # of that of 1F1B


def machine_for(
    gpus: int, nodes: int = 0, gpu: str = "", link: str = "", flags: tuple[str, str] = ("--gpu", "--link")
) -> Machine:
    """Return a machine of so many GPUs, with at most 8 on each node unless ``nodes`` is given.

    ``gpu`` and ``link`` are names of the planner's tables (empty: what is assumed); messages call them ``flags``.

    Raises:
        ConfigError: an unknown name.
    """
    nodes = nodes or next(count for count in range(math.ceil(gpus / 8), gpus + 1) if gpus % count == 0)
    kind = find_gpu(gpu or ASSUMED_GPU, flags[0])
    between = find_link(link or ASSUMED_LINK, flags[1], between_nodes=True)
    inside = find_link(kind.link, flags[1], between_nodes=False)
    cards = cards_of(between, gpus // nodes)
    return Machine(kind, gpus, nodes, inside, between if nodes > 1 else None, cards, kind.memory_bytes)


def settle_overlap(config: Config, machine: Machine) -> tuple[Config, str]:
    """Return a copy of a configuration with the mode predicted as fastest for ``--sp-overlap-mode auto``, and its name.

    A run measures the modes when it starts. What is not auto is returned as it is, with an empty name.
    """
    parallel = config.parallel
    if parallel.overlap_mode != "auto" or parallel.sequence_parallel_size == 1:
        return config, ""
    ranks = parallel.tensor_model_parallel_size * parallel.sequence_parallel_size
    heads = max(1, (config.model.num_attention_heads or 1) // ranks)
    wanted = [parallel.sp_head_chunks] if parallel.sp_head_chunks is not None else [2, 4]
    chunked = [("chunked", count) for count in wanted if count <= heads]
    tried = []
    for mode, chunks in [("none", None), ("split-qkv", None), *chunked]:
        trial = copy.copy(config)
        trial.parallel = copy.copy(parallel)
        trial.parallel.sp_overlap_comm = trial.parallel.split_qkv_linear = False
        trial.parallel.sp_overlap_mode, trial.parallel.sp_head_chunks = mode, chunks  # type: ignore[assignment]
        seconds = rough_seconds(RoughRank(trial, machine.gpus, "cuda"), machine)
        tried.append((seconds, trial, f"{mode} x{chunks}" if chunks else mode))
    _, best, name = min(tried, key=lambda entry: entry[0])
    return best, name


def step_flops(config: Config, gpus: int) -> tuple[int, float]:
    """Return tokens and model FLOPs of a step, counting the query-key pairs that the mask leaves."""
    batch, model = config.batch, config.model
    samples = batch.global_batch_size or batch.micro_batch_size * config.parallel.dp_size(gpus)
    tokens = samples * (model.seq_length or 0)
    return tokens, step_flops_per_token(model, head_share(config))[model.is_bert] * tokens


@dataclass(frozen=True)
class Forecast:
    """Predicted speed of a run."""

    machine: Machine
    time: StepTime
    tokens: int  # of a step
    model_flops: float  # of a step, for MFU

    @classmethod
    def of(cls, config: Config, machine: Machine) -> Forecast:
        # forecast for a validated configuration with its vocabulary and global batch size
        config, _ = settle_overlap(config, machine)
        from megatron_sp.planner.fake_run import step_time  # torch takes a second

        return cls(machine, step_time(config, machine), *step_flops(config, machine.gpus))

    @property
    def tokens_per_second(self) -> float:
        # predicted tokens per second of all GPUs together
        return self.tokens / self.time.seconds

    def words(self) -> str:
        # speed and machine in a line
        machine = self.machine
        mfu = self.model_flops / self.time.seconds / (machine.gpu.peak_tflops * 1e12 * machine.gpus)
        links = f"{machine.inside.name}{f', {machine.between.name} between hosts' if machine.between else ''}"
        return (
            f"{self.time.seconds:.3g} s a step, {self.tokens_per_second:,.0f} tokens/s"
            f" ({self.tokens_per_second / machine.gpus:,.0f} a GPU, MFU {mfu:.0%}) on {machine.gpu.name} ({links})"
        )

    def length(self, tokens: int) -> str:
        # how long so many tokens take
        seconds = tokens / self.tokens_per_second
        return f"{seconds / 86400:.1f} days" if seconds > 2 * 86400 else format_duration(seconds)

    def price(self, tokens: int, per_gpu_hour: float) -> float:
        # what so many tokens cost
        return tokens / self.tokens_per_second / 3600 * self.machine.gpus * per_gpu_hour


def rough_seconds(rank: RoughRank, machine: Machine) -> float:
    """Return the seconds of a step of a rank."""
    config, gpu = rank.config, machine.gpu
    model, parallel, kernels, count = config.model, config.parallel, config.kernels, rank.count
    assert model.seq_length and model.hidden_size
    layers, share = len(rank.layers), rank.with_experts / max(1, len(rank.layers))
    # of a layer and micro-batch, forward
    width = max(1, model.ffn_size // rank.tp)
    flops = 2.0 * rank.tokens * width * rank.h
    filled = Product(rank.tokens, width, rank.h, 1, rank.e).seconds(gpu) / flops  # seconds of a FLOP
    products = 2.0 * rank.tokens * rank.layer[0] * filled
    if share:
        of_experts = rank.tokens / rank.parts * model.moe_router_topk
        products += share * 2.0 * of_experts * mlp_parameters(model, model.expert_ffn_size) * filled
    pairs = rank.queries * rank.all_tokens * model.seq_length * seen_share(model)
    attention = Scores(pairs, rank.d, rank.all_tokens, is_backward=False, is_older=False).seconds(gpu)
    (qkv, out), (wide, inner) = rank.heads, rank.mlp
    moved = (10 * rank.stream + 2 * (wide + inner) + 2 * (qkv + out)) / (gpu.memory_gbs * 1e9)
    forward = products + attention + moved
    # a part of the heads copies its rows of the weights, and adds those of their gradients (``split_projection.py``)
    rows = rank.h * (rank.queries + 2 * rank.keys) * rank.sp * rank.d
    of_parts = {"chunked": 2 * rank.wide + 2 * rank.e, "split-qkv": 2 * rank.wide + 4 * rank.e}
    copied = rows * of_parts.get(parallel.overlap_mode, 0) / (gpu.memory_gbs * 1e9) * (rank.sp > 1)
    slower = 2.5 * attention * gpu.attention_forward_tflops / gpu.attention_backward_tflops
    backward = copied + 2 * products + slower + 2 * moved
    again = rank.again
    repeated = again * (products + moved) + (again * attention if kernels.recompute_attention == "full" else 0)
    repeated += attention if kernels.recompute_granularity == "selective" else 0.0
    head = 6.0 * rank.tokens * rank.rows * rank.h / (gpu.matmul_tflops * 1e12) * rank.has_head
    each = (layers * (forward + backward + repeated) + head) / gpu.sustained
    computed = count * each + 2 * count * rank.num_params * rank.wide / (gpu.memory_gbs * 1e9)
    update = 34 * (rank.shard if parallel.zero_stage else rank.num_params) / (gpu.memory_gbs * 1e9)
    exposed, hidden = _inside(rank, machine, layers * attention * count)
    gradients = _of_replicas(rank, machine)
    late = max(0.0, gradients - 0.9 * computed * (1 if parallel.zero_stage > 1 else 0.6 / count))
    total = computed + update + exposed + late + gpu.overlap_cost * (hidden + gradients - late)
    is_captured = kernels.cuda_graphs != "off" and not obstacles(config)
    python = 0.0 if is_captured else 1e-3 * gpu.host_ms * count * (layers * (1 + again / 3 + 0.2 * (rank.sp > 1)) + 1)
    copies = bubble = 0.0
    if kernels.offload_activations:
        copies = 2 * max(0.0, count * (rank.plan().host / (gpu.host_gbs * 1e9) - layers * forward))
    if rank.pp > 1:
        bubble = (rank.pp - 1) / parallel.stages_per_pipeline_rank * each * _BUBBLE.get(parallel.pipeline_kind, 1.0)
    return max(total + copies, python) + bubble


def _inside(rank: RoughRank, machine: Machine, attention: float) -> tuple[float, float]:
    # seconds of a step's exchanges within the layers that are exposed, and that are hidden
    config, parallel, model = rank.config, rank.config.parallel, rank.config.model
    tp, sp, cp, ep = rank.tp, rank.sp, rank.cp, parallel.expert_model_parallel_size
    times, passes = len(rank.layers) * rank.count, 2 + rank.again
    exposed = hidden = 0.0

    def add(op: str, group: str, ranks: int, number: float, num_bytes: float, share: float) -> None:
        nonlocal exposed, hidden
        seconds = times * number * machine.seconds(op, group, ranks, tp, 1, num_bytes, sp)
        exposed, hidden = exposed + share * seconds, hidden + (1 - share) * seconds

    if tp > 1:
        add("all_reduce", "tp", tp, 2 * passes, 2 * rank.whole * (tp - 1) / tp, 0.8)
    if sp > 1:
        heads = (model.num_attention_heads or 0) + 2 * model.num_groups
        sent = rank.tokens * (heads + (model.num_attention_heads or 0)) / 2 / tp * rank.d * rank.e * (sp - 1) / sp
        parts = {"none": 1, "split-qkv": 2}.get(parallel.overlap_mode, parallel.sp_head_chunks or 2)
        share = _EXPOSED.get(parallel.overlap_mode, 1 / parts)
        times_sent = 2 + rank.again * (config.kernels.recompute_attention != "none")
        add("all_to_all", "sp", sp, 2 * times_sent * parts, sent / parts, share)
    if ep > 1:
        share = rank.with_experts / len(rank.layers)
        rows = share * rank.tokens / rank.parts * min(model.moe_router_topk, ep) * (ep - 1) / ep
        group = "ep" if rank.parts == tp else "ep within dp x cp x sp"
        add("all_to_all", group, ep, 2 * passes, rows * rank.h * rank.e, 1 / parallel.moe_chunks)
    if cp > 1:
        rows = (cp - 1) * 2 * rank.keys * rank.all_tokens * rank.d
        seconds = times * machine.seconds("all_to_all", "cp", cp, tp, 3, rows * (2 * rank.e + rank.wide), sp)
        exposed, hidden = exposed + max(0.0, seconds - 3 * attention), hidden + min(seconds, 3 * attention)
    return exposed, hidden


def _of_replicas(rank: RoughRank, machine: Machine) -> float:
    # seconds in which gradients are reduced and parameters gathered
    stage, count, ep = rank.config.parallel.zero_stage, rank.count, rank.config.parallel.expert_model_parallel_size
    times, gathers = count if stage > 1 else 1, 2 * count if stage == 3 else 1 if stage else 0
    group, experts = "dp x sp" if rank.cp == 1 else "dp x cp x sp", rank.layer[1] * len(rank.layers)
    seconds = 0.0
    for name, ranks, params in (
        (group, rank.replicas, rank.num_params - experts),
        (f"{group}{' x tp' if rank.parts > 1 else ''} / {ep}", rank.replicas * rank.parts // ep, experts),
    ):
        if ranks > 1 and params:
            num_bytes = params * (ranks - 1) / ranks * (times * rank.wide * (1 if stage else 2) + gathers * rank.e)
            number = (len(rank.layers) + 2) * (times + gathers)
            seconds += machine.seconds("all_gather", name, ranks, rank.tp, number, num_bytes, rank.sp)
    return seconds
