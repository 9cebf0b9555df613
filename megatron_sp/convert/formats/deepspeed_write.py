"""Writer of Megatron-DeepSpeed checkpoints: the weights alone, ZeRO 1 for one data parallel rank, or a universal one.

    latest, latest_checkpointed_iteration.txt
    global_step5/mp_rank_00_model_states.pt                          all three
                 [bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt    zero1
                 zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt  universal, with latest_universal

The parameters are in the order in which Megatron's modules register them, in two groups, with and without weight decay,
as in its optimizer. Source: as for reading, ``deepspeed_zero.py`` and ``deepspeed_universal.py``.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_sp.convert.archive.torch_files import Object
from megatron_sp.convert.archive.torch_writer import LazyFlat, write_torch_file
from megatron_sp.convert.copies import Correspondence, Scattered
from megatron_sp.convert.formats.counters import deepspeed_scaler
from megatron_sp.convert.formats.deepspeed_zero import FILES, MASTER, MOMENTS, STEP, parameter_entry, universal_info
from megatron_sp.convert.formats.megatron_args import namespace, note_of_activation, padded_size, require_fit
from megatron_sp.convert.formats.megatron_layout import Cut, Shard, is_decayed, position, shard_copies, written
from megatron_sp.convert.formats.megatron_write import lazy, nested, require_layout, require_state, scheduler, training
from megatron_sp.convert.model import OPTIMIZER, Model, Options, Progress, parameter_shapes
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.files import fsync_dir, write_synced

QKV_LAYOUT = "qkv_layout"
"""An entry of ours in the model states, for no entry of theirs says it."""
_VERSION = "0.19.8"  # the DeepSpeed release whose files these resemble
_EVEN = 2  # elements that ZeRO rounds a rank's range up to
Layout = Literal["module", "zero1", "universal"]


@dataclass
class Plan:
    """Plan of the files to be written."""

    model: Model
    options: Options
    layout: Layout
    shapes: dict[str, tuple[int, ...]]  # shapes of our parameters, in the order of Megatron's modules
    cut: Cut  # split of the weights over the ranks of the model states
    ranks: Scattered  # the weights of these ranks, named "tp0.<our name>"
    # for zero1 and universal, the optimizer's tensors by kind; those of all ranks, or in full
    kept: dict[str, Scattered]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.ranks.tensors().values())).dtype

    def groups(self) -> list[list[str]]:
        """Return our names of the parameters with weight decay, and of those without."""
        decayed = {name: None for name, shape in self.shapes.items() if is_decayed(theirs(name), shape)}
        return [list(decayed), [name for name in self.shapes if name not in decayed]]


def theirs(name: str) -> str:
    return written(name, "legacy")


def make_plan(model: Model, options: Options) -> Plan:
    require_fit(model, "Megatron-DeepSpeed", legacy=True)
    if options.pp != 1:
        raise ConfigError(f"--target-pipeline-parallel-size ({options.pp}) must be 1 for megatron-deepspeed: files of"
                          " stages are read, not written")  # fmt: skip
    require_layout(model, options)
    config, order = model.config, options.deepspeed_qkv_layout
    if order == "flat" and config.num_groups % options.tp:
        raise ConfigError(f"num_query_groups ({config.num_groups}) must be a multiple of --target-tensor-parallel-size"
                          f" ({options.tp})")  # fmt: skip
    assert config.vocab_size
    shapes = parameter_shapes(config)
    shapes = {name: shapes[name] for name in sorted(shapes, key=lambda name: position(name, "legacy"))}
    layout = _layout(model, options)
    if layout != "module":
        require_state(model, options)
    rows = padded_size(config.vocab_size, config.make_vocab_size_divisible_by, options.tp)
    cut = Cut(config, options.tp, order, rows)
    whole = Cut(config, 1, order, config.vocab_size)
    scattered = partial(_scattered, model, shapes)
    kept = {}
    for kind in () if layout == "module" else (MASTER, *MOMENTS):
        is_there = any(name.startswith(f"{OPTIMIZER}{kind}.") for name in model.store.tensors())
        ours = f"{OPTIMIZER}{kind}." if is_there else ""  # without master copies the weights serve as such
        kept[kind] = scattered(whole if layout == "universal" else cut, ours, torch.float32)
    return Plan(model, options, layout, shapes, cut, scattered(cut, "", options.dtype), kept)


def _scattered(
    model: Model, shapes: dict[str, tuple[int, ...]], cut: Cut, ours: str, dtype: torch.dtype | None
) -> Scattered:
    assert model.config.num_layers
    places = [Shard(prefix_of(rank), rank, 0, model.config.num_layers, True, True) for rank in range(cut.tp)]
    copies, filled = shard_copies(cut, shapes, places, ours=ours)
    correspondence = Correspondence.of({ours + name: shape for name, shape in shapes.items()}, copies, filled)
    return Scattered(correspondence, model.store, dtype)


def prefix_of(tp_rank: int) -> str:
    return f"tp{tp_rank}."


def _layout(model: Model, options: Options) -> Layout:
    kinds = {name.split(".")[1] for name in model.store.tensors() if name.startswith(OPTIMIZER)}
    has_moments = options.optimizer and set(MOMENTS) <= kinds
    if options.deepspeed_layout in ("zero1", "universal") and not has_moments:
        raise ConfigError(f"--deepspeed-layout {options.deepspeed_layout} holds Adam's state, and"
                          f" {'--no-optimizer leaves it behind' if not options.optimizer else 'the source has none'}:"
                          " give --deepspeed-layout module for the weights alone")  # fmt: skip
    return options.deepspeed_layout or ("zero1" if has_moments else "module")


def size(model: Model, options: Options) -> int:
    plan = make_plan(model, options)
    return sum(info.num_bytes for store in (plan.ranks, *plan.kept.values()) for info in store.tensors().values())


def write(model: Model, path: Path, options: Options, progress: Progress) -> None:
    plan = make_plan(model, options)
    note_of_activation(model, legacy=True)
    name = f"global_step{model.step}" + ("_universal" if plan.layout == "universal" else "")
    folder = path / name
    folder.mkdir(parents=True)
    for rank in range(options.tp):
        write_torch_file(folder / f"mp_rank_{rank:02d}_model_states.pt", _model_states(plan, rank, progress))
        plan.ranks.forget()
        if plan.layout == "zero1":
            prefix = "bf16_" if plan.dtype == torch.bfloat16 else ""
            file = folder / f"{prefix}zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"
            write_torch_file(file, _zero_states(plan, rank, progress))
    if plan.layout == "universal":
        _write_universal(plan, folder / "zero", progress)
    write_synced(path / ("latest_universal" if plan.layout == "universal" else "latest"), name.encode())
    write_synced(path / "latest_checkpointed_iteration.txt", str(model.step).encode())
    fsync_dir(folder)
    fsync_dir(path)


def _model_states(plan: Plan, rank: int, progress: Progress) -> dict[str, Any]:
    model, prefix = plan.model, prefix_of(rank)
    module = {theirs(name): lazy(plan.ranks, prefix + name, progress) for name in plan.shapes}
    tensors, shapes = plan.ranks.tensors(), []
    for group in plan.groups():
        shapes.append(OrderedDict((theirs(name), torch.Size(tensors[prefix + name].shape)) for name in group))
    has_optimizer = bool(plan.kept)
    return {
        "module": nested(module), "buffer_names": [], "optimizer": None,
        "param_shapes": shapes if has_optimizer else None, "frozen_param_shapes": None,
        "shared_params": {} if has_optimizer else None, "frozen_param_fragments": None,
        "lr_scheduler": scheduler(model) if has_optimizer else None, "data_sampler": None, "random_ltd": None,
        "skipped_steps": 0, "global_steps": model.step, "global_samples": model.consumed_samples, "dp_world_size": 1,
        "mp_world_size": plan.cut.tp, "ds_config": {}, "ds_version": _VERSION, "args": _args(plan, rank),
        "checkpoint_version": 3.0, "iteration": model.step, "tokens": 0, QKV_LAYOUT: plan.options.deepspeed_qkv_layout,
        "universal_checkpoint_info": universal_info(plan.cut, list(module)),
    }  # fmt: skip


def _args(plan: Plan, rank: int) -> Namespace:
    c, cut = plan.model.config, plan.cut
    ranks: dict[str, int] = {"tp": cut.tp, "pp": 1, "rank": rank, "padded_vocab_size": cut.padded_vocab_size}
    args = namespace(plan.model, legacy=True, params_dtype=plan.dtype, **ranks)
    more = {
        "num_key_value_heads": c.num_groups, "normalization": c.normalization.lower(), "rope_theta": c.rotary_base,
        "num_experts": [1], "deepspeed": True, "no_pipeline_parallel": True, "ds_sequence_parallel_size": 1,
        "zero_stage": 1 if plan.kept else 0,
    }  # fmt: skip
    return Namespace(**{**vars(args), **more})


def _zero_states(plan: Plan, rank: int, progress: Progress) -> dict[str, Any]:
    # of the only data parallel rank, as stage 1 saves them: moments with padding, weights without
    prefix = prefix_of(rank)
    groups = [[prefix + name for name in group] for group in plan.groups()]
    counts = [sum(math.prod(plan.ranks.tensors()[name].shape) for name in group) for group in groups]
    padded = [-(-count // _EVEN) * _EVEN for count in counts]

    def flat(kind: str, index: int, numel: int) -> LazyFlat:
        return LazyFlat(numel, torch.float32, partial(_parts, plan.kept[kind], groups[index], numel, progress))

    states = {}
    for i in range(len(groups)):
        states[i] = {"step": plan.model.updates, **{kind: flat(kind, i, padded[i]) for kind in MOMENTS}}
    return {
        "optimizer_state_dict": {
            **deepspeed_scaler(plan.model, training(plan.model).precision), "overflow": False, "clip_grad": 0.0,
            "base_optimizer_state": {"state": states, "param_groups": param_groups(plan.model)},
            "single_partition_of_fp32_groups": [flat(MASTER, i, count) for i, count in enumerate(counts)],
            "zero_stage": 1, "group_paddings": [p - n for p, n in zip(padded, counts, strict=True)],
            "param_alignment_paddings": [[0] * len(group) for group in groups], "partition_count": [1] * len(groups),
            "ds_version": _VERSION, "param_slice_mappings": [_fragments(plan, prefix, group) for group in groups],
        },
        "ds_config": {}, "ds_version": _VERSION,
    }  # fmt: skip


def _parts(store: Scattered, names: list[str], numel: int, progress: Progress) -> Iterator[Tensor]:
    """Yield the flattened tensors in order, then zeros up to ``numel``."""
    done = 0
    for name in names:
        tensor = store.read(name).reshape(-1)
        progress(tensor.numel() * tensor.element_size())
        done += tensor.numel()
        yield tensor
        del tensor
    store.forget()
    if done < numel:
        yield torch.zeros(numel - done)


def _fragments(plan: Plan, prefix: str, group: list[str]) -> OrderedDict[str, Object]:
    addresses, start = OrderedDict[str, Object](), 0
    for name in group:
        numel = math.prod(plan.ranks.tensors()[name].shape)
        state = {"numel": numel, "start": start}
        address = Object("deepspeed.utils.tensor_fragment.fragment_address", state=state)
        addresses[theirs(name.removeprefix(prefix))] = address
        start += numel
    return addresses


def param_groups(model: Model) -> list[dict[str, Any]]:
    """Return Adam's settings for the two groups, each of one flat parameter."""
    o = training(model).optimizer
    return [
        {
            "params": [index], "wd_mult": mult, "lr_mult": 1.0, "lr": o.lr or 0.0,
            "betas": (o.adam_beta1, o.adam_beta2), "eps": o.adam_eps, "weight_decay": o.weight_decay * mult,
            "bias_correction": True, "step": model.updates,
        }
        for index, mult in enumerate((1.0, 0.0))
    ]  # fmt: skip


def _write_universal(plan: Plan, folder: Path, progress: Progress) -> None:
    folder.mkdir()
    for name in plan.shapes:
        (inside := folder / theirs(name)).mkdir()
        for kind, file in FILES.items():
            entry = parameter_entry(plan.cut.config, plan.cut.qkv, theirs(name))
            write_torch_file(inside / file, {**entry, "param": lazy(plan.kept[kind], prefix_of(0) + name, progress)})
            plan.kept[kind].forget()
        write_torch_file(inside / STEP, plan.model.updates)
        fsync_dir(inside)
    state = {
        **deepspeed_scaler(plan.model, training(plan.model).precision), "overflow": False, "clip_grad": 0.0,
        "zero_stage": 1, "group_paddings": [0, 0], "partition_count": [1, 1], "ds_version": _VERSION,
        "param_groups": param_groups(plan.model),
    }  # fmt: skip
    write_torch_file(folder / "optimizer_state.pt", state)
    fsync_dir(folder)
