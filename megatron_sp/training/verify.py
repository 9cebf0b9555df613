"""Verification of a layout (--verify-parallelism): one step in it, compared with the same step on one process.

Every parameter's gradient is compared by the project's error measure: max|a - b| / (max|b| + 1e-3 * rms of all
gradients); loss and gradient norm by their relative error. The one-process model is on rank 0, which reads the samples
of all data-parallel ranks; its gradients are broadcast one by one, and each rank compares its own part. Weights are the
initial ones, with noise on biases and norms so that no gradient is zero by symmetry. Hidden dropout stays on, since its
masks do not depend on the layout; attention dropout is off, since inside a fused kernel its masks would. For an
external model both are off.

With --sp-overlap-mode auto every mode that may be chosen is verified.

With experts the loads must be equal, too. A token for which two experts score alike to rounding may choose another one
in another layout; the smallest margin of the batch is reported, and where it is that small the layout makes the choices
of the one process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.comm.collectives import all_reduce, broadcast
from megatron_sp.comm.groups import SINGLE_RANK, ParallelGroups
from megatron_sp.comm.object_collectives import all_ranks_agree, broadcast_json
from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.config.schema import Config
from megatron_sp.data.loader import BatchLoader
from megatron_sp.estimate.pipeline_choice import settle_schedule
from megatron_sp.models.experts import expert_biases
from megatron_sp.ops.attention_choice import choose_kernel
from megatron_sp.optim.optimizer import LossScaler
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch
from megatron_sp.parallel.layers import name_generator, shard_specs
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.parallel.router_pass import Watched
from megatron_sp.training.kernel_selection import use_of
from megatron_sp.training.microbatches import BatchPlan, require_same_sequences, row_dealer
from megatron_sp.training.parts import Task
from megatron_sp.training.pipelined import Pipeline, build_pipeline
from megatron_sp.training.probe import modes_to_try, words_for
from megatron_sp.training.run import set_vocab_size
from megatron_sp.training.setup import expert_parallel
from megatron_sp.training.sharding import build_sharded, named_parameters
from megatron_sp.training.step import StepOptions, StepParts, TrainStep, on_device
from megatron_sp.utils.errors import EXIT_NUMERICS, EXIT_OK
from megatron_sp.utils.launch import Launch

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
_NOISE = 0.1  # standard deviation of what is added to biases and norm weights
_SMALL_MARGIN = 1e-6  # of scores or logits: rounding of a layout's own sums is below it
_MICRO_BATCHES = 2  # for each data-parallel rank: enough to see accumulation
_SHOWN = 5
_SHARE_OF_MEMORY = 0.7
# what a step asks of its groups, for one process that takes it while the others wait
_ALONE: Any = SimpleNamespace(
    rank=0, dp_rank=0, dp_size=1, tp_rank=0, is_first_of_replica=True, world=SINGLE_RANK, cp=SINGLE_RANK, pp=SINGLE_RANK
)


@dataclass(frozen=True)
class _Outcome:
    """Loss, gradient norm and gradients by name of one step, without padding rows of the vocabulary."""

    loss: float
    grad_norm: float
    grads: dict[str, tuple[ShardSpec, Tensor]]
    loads: list[list[int]] = field(default_factory=list)
    watched: Watched | None = None


def verify_parallelism(config: Config, task: Task, launch: Launch, groups: ParallelGroups) -> int:
    """Compare the layout with one process and print the result. Collective.

    Returns:
        The exit code: 0, or 5 if anything differs.
    """
    say: Callable[[str], None] = partial(print, flush=True) if launch.rank == 0 else lambda _: None
    chosen = config.parallel.verify_dtype or ("fp64" if groups.device.type == "cpu" else "fp32")
    dtype = torch.float64 if chosen == "fp64" else torch.float32
    if dtype == torch.float32:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    tokenizer = task.build_tokenizer(config)
    set_vocab_size(config, tokenizer)
    if note := settle_schedule(config, groups.world_size):
        say(note)
    if config.model.attention_dropout > 0:
        say(
            f"verify: attention dropout ({config.model.attention_dropout}) is off: inside a fused kernel its mask"
            " depends on the layout"
        )
        config.model.attention_dropout = 0.0
    if task.torch_dropout and config.model.hidden_dropout > 0:
        say(
            f"verify: hidden dropout ({config.model.hidden_dropout}) is off: an external model draws other masks in"
            " another layout"
        )
        config.model.hidden_dropout = 0.0
    _fit_layers(config, launch, groups, dtype, say)
    plan = BatchPlan.from_config(config.batch, groups.dp_size, config.model.seq_length)
    per_rank = min(_MICRO_BATCHES, plan.num_microbatches(0))
    num_samples = per_rank * plan.micro_batch_size * groups.dp_size
    with all_ranks_agree(groups.control):
        dataset = task.build_datasets(config, tokenizer, (num_samples, 0, 0)).train
        assert dataset is not None
        deal_rows = row_dealer(config, dataset, groups.dp_size)
    order, seed = config.data.dataloader_type, config.batch.seed

    def batches(dp_rank: int) -> list[MicroBatch]:
        loader = BatchLoader(
            dataset, micro_batch_size=plan.micro_batch_size, dp_rank=dp_rank, dp_size=groups.dp_size, order=order,
            seed=seed, deal_rows=deal_rows,
        )  # fmt: skip
        with loader:
            return [on_device(micro, groups.device) for micro in loader.step(0, per_rank)]

    step = _Step(config, task, dtype, groups)
    all_batches = [batches(rank) for rank in range(groups.dp_size)] if launch.rank == 0 else []
    reference = None
    exactly = task.exactly if dtype == torch.float64 and groups.device.type == "cpu" else nullcontext
    if all_batches:
        with exactly():
            reference = step.run(ParallelContext(), None, [micro for of_rank in all_batches for micro in of_rank])
    tp_seq = " with sequence parallel" if config.parallel.sequence_parallel else ""
    sizes = f"tp {groups.tp.size()}{tp_seq}, sp {groups.sp.size()}"
    sizes += f", cp {groups.cp.size()}" if groups.cp.size() > 1 else ""
    sizes += f", pp {groups.pp.size()} ({config.parallel.pipeline_kind})" if groups.pp.size() > 1 else ""
    say(
        f"verify: {sizes}, dp {groups.dp_size} against one process: {config.model.num_layers} layers,"
        f" {str(dtype).removeprefix('torch.')}, {num_samples} sequences of {config.model.seq_length} tokens in"
        f" {per_rank} micro-batches for each data-parallel rank"
    )
    replayed = _settle_routing(config, reference, groups, per_rank, say)
    own_batches, good, pipeline = batches(groups.dp_rank), True, build_pipeline(config, groups)
    experts = expert_parallel(config, groups)
    for mode in modes_to_try(config):
        layout = ParallelContext.of(
            groups, tp_seq=config.parallel.sequence_parallel, mode=mode[0], num_chunks=mode[1],
            overlap=mode[0] != "none" and config.parallel.overlaps_exchanges, cp_chunks=config.parallel.cp_chunks,
            cp_stages_ahead=config.parallel.num_stages_ahead, cp_keep_kv=config.parallel.cp_keep_kv,
            stages=() if pipeline is None else pipeline.own_stages, num_slices=config.parallel.num_pipeline_slices,
            ep=experts,
        )  # fmt: skip
        with exactly():
            outcome = step.run(layout, groups, own_batches, pipeline, replayed)
        title = f"exchanges {words_for(mode)}" if groups.sp.size() > 1 else "layout"
        good = _compare(title, outcome, reference, groups, TOLERANCE[dtype], say) and good
    say("verify: the layout equals one process" if good else "verify: FAILED, the layout does not equal one process")
    return EXIT_OK if good else EXIT_NUMERICS


class _ObservedStep(TrainStep):
    """A training step whose routers are watched, or are told what to choose."""

    watched: Watched | None = None
    replayed: dict[int, Tensor] | None = None  # choices to be made, by the id of the micro-batch

    def context_of(self, batch: MicroBatch, key: int | Tensor) -> ForwardContext:
        if self.routers is not None:
            self.routers.watched = self.watched
        context = super().context_of(batch, key)
        if context.routers is not None and self.replayed is not None:
            context.routers.replayed = self.replayed[id(batch)]
        return context


class _Step:
    """Builder of a model in a layout, for one step's forward and backward passes."""

    def __init__(self, config: Config, task: Task, dtype: torch.dtype, groups: ParallelGroups) -> None:
        self.config, self.task, self.groups = config, task, groups
        backend = config.kernels.attention_backend
        backend = backend if backend in ("fused", "unfused", "local") else "auto"
        use = replace(use_of(config, groups.device), dtype=dtype, dropout=0.0)
        kernel = choose_kernel(backend, groups.device.type, dtype, use=use).name
        self.options = StepOptions(config.batch.seed, config.model.hidden_dropout > 0, kernel)
        config.precision.bf16 = config.precision.fp16 = config.parallel.offload_optimizer = False  # there is no update
        config.precision.fp64 = dtype == torch.float64

    def run(
        self, layout: ParallelContext, groups: ParallelGroups | None, micro_batches: list[MicroBatch],
        pipeline: Pipeline | None = None, replayed: list[Tensor] | None = None,
    ) -> _Outcome:  # fmt: skip
        # without groups all of it on this process; ``replayed``: choices of experts to be made, for each micro-batch
        seed = self.config.batch.seed
        sharded = build_sharded(
            self.task.build_model, self.config, layout, groups, self.groups.device,
            prepare=lambda model, unit: _add_noise(named_parameters(model, unit), shard_specs(model), seed),
        )  # fmt: skip
        if groups is not None:
            require_same_sequences(micro_batches, groups)
        for name, bias in expert_biases(sharded.model).items():
            noise = torch.randn(bias.shape, generator=name_generator(seed, name), dtype=torch.float64)
            bias += (_NOISE * noise).to(bias)
        scaler = LossScaler(enabled=False, fixed=None, initial=1.0, minimum=1.0, window=1, hysteresis=1)
        optimizer = sharded.optimizer(self.config, groups)
        parts = StepParts(sharded.model, sharded.weights, sharded.gradients, optimizer, scaler, pipeline)
        step = _ObservedStep(parts, self.task.loss, _ALONE if groups is None else groups, self.options)
        step.watched = Watched() if groups is None else None
        if replayed is not None:
            step.replayed = {id(batch): choices for batch, choices in zip(micro_batches, replayed, strict=True)}
        summary = step.passes(micro_batches, step.local_totals(micro_batches), 1)

        values, num_terms = summary.cpu(), len(self.task.loss.names)
        sums, counts = values[1 : 1 + num_terms], values[1 + num_terms : 1 + 2 * num_terms]
        total, loads = torch.where(counts > 0, sums / counts, 0.0).sum(), list[list[int]]()
        if step.routers is not None and step.routers.weights is not None:
            weights, terms = step.routers.weights(), values[4 + 2 * num_terms : 6 + 2 * num_terms]
            total = total + terms[0] * weights.balance.cpu() + terms[1] * weights.z.cpu()
            loads = step.routers.loads_in(values).long().tolist()
        grads: dict[str, tuple[ShardSpec, Tensor]] = {}
        for unit in sharded.units:
            whole = unit.gathered(unit.grad_shard)
            grads |= {slot.name: (slot.spec, slot.view(whole)) for slot in unit.slots}
        return _Outcome(float(total), float(values[0]), grads, loads, step.watched)


def _settle_routing(
    config: Config, reference: _Outcome | None, groups: ParallelGroups, per_rank: int, say: Callable[[str], None]
) -> list[Tensor] | None:  # fmt: skip
    # Report the smallest margin of the one process's choices; return this rank's if they must be replayed. Collective.
    # reference: the outcome on one process, on rank 0; per_rank: the micro-batches of a data-parallel rank.
    if not config.model.has_experts:
        return None
    watched = None if reference is None else reference.watched
    margin = float(broadcast_json(None if watched is None else watched.margin, groups.control))
    again = margin < _SMALL_MARGIN
    say(
        f"verify: the smallest margin of a choice of experts is {margin:.1e}"
        + (f", below {_SMALL_MARGIN:g}: the layout makes the choices of the one process" if again else "")
    )
    if not again:
        return None
    choices = None if watched is None else watched.choices()
    shapes = broadcast_json(None if choices is None else [list(choice.shape) for choice in choices], groups.control)
    replayed = []
    for index, shape in enumerate(shapes):
        whole = torch.empty(shape, dtype=torch.int64) if choices is None else choices[index].cpu()
        replayed.append(broadcast(whole.contiguous(), groups.control).to(groups.device))
    return replayed[groups.dp_rank * per_rank : (groups.dp_rank + 1) * per_rank]


def _add_noise(params: list[tuple[str, nn.Parameter]], specs: dict[str, ShardSpec], seed: int) -> None:
    for name, param in params:
        spec = specs[name]
        if param.ndim == 1:
            generator = name_generator(seed, f"noise/{name}")
            noise = torch.randn(spec.shape, generator=generator, dtype=torch.float64) * _NOISE
            for offsets, view in spec.pieces(param.data):
                view += noise[_place(offsets, view)].to(view)


def _place(offsets: tuple[int, ...], view: Tensor) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))


def _compare(
    title: str, got: _Outcome, want: _Outcome | None, groups: ParallelGroups, tolerance: float,
    say: Callable[[str], None],
) -> bool:  # fmt: skip
    # Print the errors of loss, gradient norm and the worst gradients; return whether all are within the tolerance.
    # Collective. want: outcome on one process, on rank 0; None on other ranks.
    control = groups.control
    rms = 0.0
    if want is not None:
        whole = [grad for _, grad in want.grads.values()]
        rms = math.sqrt(sum(float(g.double().square().sum()) for g in whole) / max(1, sum(g.numel() for g in whole)))
    want_loss, want_norm, rms = broadcast_json(None if want is None else [want.loss, want.grad_norm, rms], control)
    rows = [
        ("loss", _error(got.loss, want_loss), want_loss),
        ("gradient norm", _error(got.grad_norm, want_norm), want_norm),
    ]
    if got.loads:
        loads = broadcast_json(None if want is None else want.loads, control)
        rows.append(("loads of experts", 0.0 if loads == got.loads else math.inf, float(max(map(max, got.loads)))))
    first = len(rows)
    # a rank of a pipeline has some of the parameters
    all_shapes = None if want is None else [[name, list(spec.shape)] for name, (spec, _) in want.grads.items()]
    dtype = next(grad.dtype for _, grad in got.grads.values())
    for name, shape in broadcast_json(all_shapes, control):
        whole_grad = torch.empty(shape, dtype=dtype)
        if want is not None:
            spec, grad = want.grads[name]
            for offsets, view in spec.pieces(grad):
                whole_grad[_place(offsets, view)] = view.cpu()
        broadcast(whole_grad, control)
        pieces = [] if name not in got.grads else list(got.grads[name][0].pieces(got.grads[name][1]))
        differences = [
            (view.cpu() - whole_grad[_place(offsets, view)]).abs().max() for offsets, view in pieces if view.numel()
        ]
        worst = torch.stack(differences).max().double() if differences else torch.zeros((), dtype=torch.float64)
        worst = all_reduce(worst.nan_to_num(nan=math.inf), control, "max")
        largest = float(whole_grad.abs().max())
        rows.append((name, float(worst) / max(largest + 1e-3 * rms, 1e-300), largest))
    failed = [row for row in rows if not row[1] <= tolerance]
    say(f"verify: {title}: {'FAILED' if failed else 'equal'}, {len(rows) - first} gradients, tolerance {tolerance:g}")
    for name, error, size in [*rows[:first], *sorted(rows[first:], key=lambda row: -row[1])[:_SHOWN]]:
        say(f"  {name:<60} error {error:9.2e}   size {size:9.3e}{'' if error <= tolerance else '   <- differs'}")
    return not failed


def _error(got: float, want: float) -> float:
    difference = abs(got - want)
    return math.inf if math.isnan(difference) else difference / max(abs(want), 1e-300)


def _fit_layers(
    config: Config, launch: Launch, groups: ParallelGroups, dtype: torch.dtype, say: Callable[[str], None]
) -> None:
    model, parallel = config.model, config.parallel
    assert (
        model.num_layers and model.hidden_size and model.seq_length and model.vocab_size and model.num_attention_heads
    )
    h, heads = model.hidden_size, (model.num_attention_heads + 2 * model.num_groups) * model.head_dim
    width = model.ffn_size * (2 if model.is_gated else 1)
    tokens = model.seq_length * config.batch.micro_batch_size
    here = launch.local_world_size if groups.device.type == "cpu" else 1  # ranks that share this memory
    others = here / parallel.tensor_model_parallel_size
    weights = h * heads + h * model.num_attention_heads * model.head_dim + h * width + h * model.ffn_size
    kept = tokens * (3 * h + 2 * heads + 2 * width)  # activations of a layer between forward and backward
    layer = 4 * weights * (1 + others) + kept * (
        1 + here / (parallel.sequence_parallel_size * parallel.context_parallel_size)
    )
    ends = 4 * 2 * model.vocab_size * h * (1 + others)
    room = _SHARE_OF_MEMORY * _free_memory(groups.device) / dtype.itemsize - ends
    at_least = parallel.pipeline_model_parallel_size * parallel.stages_per_pipeline_rank
    fits = max(at_least, min(model.num_layers, int(room // layer)))
    fits = int(all_reduce(torch.tensor([fits]), groups.control, "min"))
    if fits < model.num_layers:
        say(
            f"verify: {model.num_layers} layers on one process do not fit into memory: {fits} are compared, all layers"
            " being alike"
        )
        model.num_layers = fits
        parallel.decoder_first_pipeline_num_layers = parallel.decoder_last_pipeline_num_layers = None
        parallel.pipeline_model_parallel_layout = None


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
