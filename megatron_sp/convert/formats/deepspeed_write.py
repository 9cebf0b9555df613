"""Writer of Megatron-DeepSpeed checkpoints: the weights alone, ZeRO 1 for one data parallel rank, or a universal one.

    latest, latest_checkpointed_iteration.txt
    global_step5/mp_rank_00_model_states.pt                          all three
                 [bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt    zero1
                 zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt  universal, with latest_universal

The parameters are in the order in which Megatron's modules register them, in two groups, with and without weight decay,
as in its optimizer. Source: as for reading, ``deepspeed_zero.py``, and deepspeed 0.19.8,
checkpoint/constants.py and checkpoint/ds_to_universal.py :: merge_tp_slices.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.archive.torch_files import Object
from megatron_sp.convert.archive.torch_writer import LazyFlat, write_torch_file
from megatron_sp.convert.copies import Scattered
from megatron_sp.convert.families.family import Sizes
from megatron_sp.convert.formats.counters import deepspeed_scaler
from megatron_sp.convert.formats.deepspeed_zero import FILES, MASTER, MOMENTS
from megatron_sp.convert.formats.megatron_args import namespace, note_of_activation, padded_size, require_fit
from megatron_sp.convert.formats.megatron_layout import Cut, QkvOrder, Shard, is_decayed, position, written
from megatron_sp.convert.formats.megatron_write import adam_settings, lazy, nested, require_layout, require_state

from megatron_sp.convert.formats.megatron_write import scattered, scheduler, training  # isort: skip
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


def prefix_of(tp_rank: int) -> str:
    return f"tp{tp_rank}."


def make_plan(model: Model, options: Options) -> Plan:
    """Return what to write. Raises ConfigError if the options do not fit the model."""
    require_fit(model, "Megatron-DeepSpeed", legacy=True)
    if options.pp != 1:
        raise ConfigError(f"--target-pipeline-parallel-size ({options.pp}) must be 1 for megatron-deepspeed: files of"
                          " stages are read, not written")  # fmt: skip
    require_layout(model, options)
    config, order = model.config, options.deepspeed_qkv_layout
    if order == "flat" and config.num_groups % options.tp:
        raise ConfigError(f"num_query_groups ({config.num_groups}) must be a multiple of --target-tensor-parallel-size"
                          f" ({options.tp})")  # fmt: skip
    assert config.vocab_size and config.num_layers
    shapes = parameter_shapes(config)
    shapes = {name: shapes[name] for name in sorted(shapes, key=lambda name: position(name, "legacy"))}
    has_moments = options.optimizer and set(MOMENTS) <= model.kinds()
    if options.deepspeed_layout in ("zero1", "universal") and not has_moments:
        raise ConfigError(f"--deepspeed-layout {options.deepspeed_layout} holds Adam's state, and"
                          f" {'--no-optimizer leaves it behind' if not options.optimizer else 'the source has none'}:"
                          " give --deepspeed-layout module for the weights alone")  # fmt: skip
    layout: Layout = options.deepspeed_layout or ("zero1" if has_moments else "module")
    if layout != "module":
        require_state(model, options)
    cut = Cut(
        config, options.tp, order, padded_size(config.vocab_size, config.make_vocab_size_divisible_by, options.tp)
    )
    places = [Shard(prefix_of(rank), rank, 0, config.num_layers, True, True) for rank in range(options.tp)]
    kept = {}
    for kind in () if layout == "module" else (MASTER, *MOMENTS):
        # without master copies the weights serve as such
        ours = f"{OPTIMIZER}{kind}." if kind in model.kinds() else ""
        if layout == "universal":
            in_full = Cut(config, 1, order, config.vocab_size)
            kept[kind] = scattered(model.store, shapes, in_full, places[:1], ours, torch.float32)
        else:
            kept[kind] = scattered(model.store, shapes, cut, places, ours, torch.float32)
    return Plan(
        model, options, layout, shapes, cut, scattered(model.store, shapes, cut, places, "", options.dtype), kept
    )


def size(model: Model, options: Options) -> int:
    """Return the bytes of all tensors."""
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
    c, cut = model.config, plan.cut
    ranks: dict[str, int] = {"tp": cut.tp, "pp": 1, "rank": rank, "padded_vocab_size": cut.padded_vocab_size}
    args = namespace(model, legacy=True, params_dtype=plan.dtype, **ranks)
    more = {
        "num_key_value_heads": c.num_groups, "normalization": c.normalization.lower(), "rope_theta": c.rotary_base,
        "num_experts": [1], "deepspeed": True, "no_pipeline_parallel": True, "ds_sequence_parallel_size": 1,
        "zero_stage": 1 if has_optimizer else 0,
    }  # fmt: skip
    return {
        "module": nested(module), "buffer_names": [], "optimizer": None,
        "param_shapes": shapes if has_optimizer else None, "frozen_param_shapes": None,
        "shared_params": {} if has_optimizer else None, "frozen_param_fragments": None,
        "lr_scheduler": scheduler(model) if has_optimizer else None, "data_sampler": None, "random_ltd": None,
        "skipped_steps": 0, "global_steps": model.step, "global_samples": model.consumed_samples, "dp_world_size": 1,
        "mp_world_size": plan.cut.tp, "ds_config": {}, "ds_version": _VERSION, "checkpoint_version": 3.0,
        "args": Namespace(**{**vars(args), **more}), "iteration": model.step, "tokens": 0,
        QKV_LAYOUT: plan.options.deepspeed_qkv_layout,
        "universal_checkpoint_info": _universal_info(plan.cut, list(module)),
    }  # fmt: skip


def _zero_states(plan: Plan, rank: int, progress: Progress) -> dict[str, Any]:
    # of the only data parallel rank, as stage 1 saves them: moments with padding, weights without
    prefix = prefix_of(rank)
    groups = [[prefix + name for name in group] for group in plan.groups()]
    counts = [sum(math.prod(plan.ranks.tensors()[name].shape) for name in group) for group in groups]
    padded = [-(-count // _EVEN) * _EVEN for count in counts]

    def flat(kind: str, index: int, numel: int) -> LazyFlat:
        return LazyFlat(numel, torch.float32, partial(_parts, plan.kept[kind], groups[index], numel, progress))

    states, fragments = {}, []
    for i, group in enumerate(groups):
        addresses, start = OrderedDict[str, Object](), 0
        for name in group:
            state = {"numel": math.prod(plan.ranks.tensors()[name].shape), "start": start}
            address = Object("deepspeed.utils.tensor_fragment.fragment_address", state=state)
            addresses[theirs(name.removeprefix(prefix))] = address
            start += state["numel"]
        fragments.append(addresses)
        states[i] = {"step": plan.model.updates, **{kind: flat(kind, i, padded[i]) for kind in MOMENTS}}
    return {
        "optimizer_state_dict": {
            **deepspeed_scaler(plan.model, training(plan.model).precision), "overflow": False, "clip_grad": 0.0,
            "base_optimizer_state": {"state": states, "param_groups": _param_groups(plan.model)},
            "single_partition_of_fp32_groups": [flat(MASTER, i, count) for i, count in enumerate(counts)],
            "zero_stage": 1, "group_paddings": [p - n for p, n in zip(padded, counts, strict=True)],
            "param_alignment_paddings": [[0] * len(group) for group in groups], "partition_count": [1] * len(groups),
            "ds_version": _VERSION, "param_slice_mappings": fragments,
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


def _param_groups(model: Model) -> list[dict[str, Any]]:
    # Adam's settings for the two groups, each of one flat parameter
    return [{"params": [index], **adam_settings(model, mult)} for index, mult in enumerate((1.0, 0.0))]


def _write_universal(plan: Plan, folder: Path, progress: Progress) -> None:
    folder.mkdir()
    for name in plan.shapes:
        (inside := folder / theirs(name)).mkdir()
        for kind, file in FILES.items():
            entry = _parameter_entry(plan.cut.config, plan.cut.qkv, theirs(name))
            write_torch_file(inside / file, {**entry, "param": lazy(plan.kept[kind], prefix_of(0) + name, progress)})
            plan.kept[kind].forget()
        write_torch_file(inside / "step.pt", plan.model.updates)
        fsync_dir(inside)
    state = {
        **deepspeed_scaler(plan.model, training(plan.model).precision), "overflow": False, "clip_grad": 0.0,
        "zero_stage": 1, "group_paddings": [0, 0], "partition_count": [1, 1], "ds_version": _VERSION,
        "param_groups": _param_groups(plan.model),
    }  # fmt: skip
    write_torch_file(folder / "optimizer_state.pt", state)
    fsync_dir(folder)


_ENTRIES_VERSION = 0.2  # version of the entries; 0.4 requires the widths of uneven shards, and there are none here
_VOCABULARY = re.compile(
    r"language_model\.embedding\.word_embeddings\.weight|language_model\.output_layer\.weight|lm_head\.bias"
)
_ROWS = re.compile(r".*(dense_4h_to_h|attention\.dense)\.weight")
_QKV = re.compile(r".*\.query_key_value\.(weight|bias)")
_FC1 = re.compile(r".*\.dense_h_to_4h\.(weight|bias)")


def _parameter_entry(config: ModelConfig, order: QkvOrder, name: str) -> dict[str, Any]:
    """Return the entries beside the tensor in the file of a parameter."""
    if _VOCABULARY.fullmatch(name):
        return {"cat_dim": 0, "vocab_tensor": True}
    if _ROWS.fullmatch(name):
        return {"cat_dim": 1}
    if _FC1.fullmatch(name) and config.swiglu:
        return {"cat_dim": 0, "param_n_sub_params": 2}
    if _QKV.fullmatch(name) and order == "flat":
        state = _three_blocks(config, name)
        return {"sub_param_shape": Object("deepspeed.checkpoint.universal_checkpoint.SubparamShape", state=state)}
    return {"cat_dim": 0} if _QKV.fullmatch(name) or _FC1.fullmatch(name) else {}


def _three_blocks(config: ModelConfig, name: str) -> dict[str, Any]:
    s = Sizes.of(config)
    rows = (s.n * s.d, s.g * s.d, s.g * s.d)
    shape: tuple[Any, ...] = (rows, s.h) if name.endswith("weight") else (rows,)
    return {"patterns": [_pattern(name)], "shape": shape, "partition_dim": 0}


def _pattern(name: str) -> str:
    return re.sub(r"layers\\\.\d+", r"layers\\.\\d+", re.escape(name)) + "$"


def _universal_info(cut: Cut, names: list[str]) -> dict[str, Any]:
    """Return ``universal_checkpoint_info`` of the model states, which ds_to_universal.py reads."""
    config = cut.config
    entries = {name: _parameter_entry(config, cut.qkv, name) for name in names}
    blocks = {_pattern(n): _three_blocks(config, n) for n, entry in entries.items() if "sub_param_shape" in entry}
    kinds = {
        "vocabulary_parameter_patterns": lambda entry: "vocab_tensor" in entry,
        "tp_replicated_parameter_patterns": lambda entry: not entry,
        "parameter_with_row_parallelism_patterns": lambda entry: entry.get("cat_dim") == 1,
        "parameter_with_2_sub_params_cat_dim_0": lambda entry: "param_n_sub_params" in entry,
    }
    patterns = {}
    for kind, is_of in kinds.items():
        patterns[kind] = list(dict.fromkeys(_pattern(name) for name, entry in entries.items() if is_of(entry)))
    return {
        "universal_checkpoint_version": _ENTRIES_VERSION, "original_vocab_size": config.vocab_size,
        "padded_vocab_size": cut.padded_vocab_size, **patterns, "parameter_with_sub_params": list(blocks.values()),
    }  # fmt: skip
