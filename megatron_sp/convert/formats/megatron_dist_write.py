"""Writer of ``torch_dist`` folders: whole tensors, blocks stacked, in the chunks that ranks of tp x pp would write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.archive.dist_folder import DistFolderWriter, NewChunk
from megatron_sp.convert.archive.torch_writer import write_torch_file
from megatron_sp.convert.copies import Scattered
from megatron_sp.convert.formats.format import Progress
from megatron_sp.convert.formats.megatron_args import namespace
from megatron_sp.convert.formats.megatron_facts import padded_size
from megatron_sp.convert.formats.megatron_files import TRACKER
from megatron_sp.convert.formats.megatron_names import extra_states, written
from megatron_sp.convert.formats.megatron_shards import Cut
from megatron_sp.convert.formats.megatron_write import make_plan, optimizer_groups, require_layout
from megatron_sp.convert.model import Model
from megatron_sp.convert.options import Options
from megatron_sp.utils.files import fsync_dir, write_synced

_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(\d+)\.(.+)")
_STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master": "fp32_param"}


class Stack(NamedTuple):
    """One tensor of the folder."""

    key: str
    names: list[str]  # our names of its blocks, or its only name
    is_stacked: bool  # the first dim is that of the blocks


def whole(options: Options) -> Options:
    return replace(options, tp=1, pp=1, megatron_names="core")


def write(model: Model, path: Path, options: Options, progress: Progress) -> None:
    require_layout(model, options)
    assert model.config.vocab_size and model.config.num_layers
    rows = padded_size(model.config.vocab_size, model.config.make_vocab_size_divisible_by, options.tp)
    plan = make_plan(model, whole(options), ep=0, padded=rows)
    folder = path / (f"iter_{model.step:07d}" if model.step else "release")
    folder.mkdir(parents=True)
    cut = Cut(model.config, options.tp, "interleaved", plan.cut.padded_vocab_size, ep=0)
    dtype = next(iter(plan.weights.tensors().values())).dtype
    with DistFolderWriter(folder) as writer:
        for kind, store in (("", plan.weights), *plan.states.items()):
            prefix = f"optimizer.state.{_STATES[kind]}." if kind else ""
            for stack in _stacks(store, model.config):
                _add(writer, prefix, stack, store, cut, model.config.num_layers // options.pp, progress)
        for key, rank in _extra_keys(plan.weights, model.config, model.config.num_layers // options.pp, options.tp):
            writer.add_object(key, [None], rank)  # Megatron stores None where no FP8 was used
        writer.finish()
    args = namespace(model, tp=options.tp, pp=options.pp, padded_vocab_size=rows, legacy=False, params_dtype=dtype)
    args.ckpt_format = "torch_dist"
    common = {"args": args, "checkpoint_version": 3.0, "iteration": model.step}
    common["num_floating_point_operations_so_far"] = 0
    if plan.states:
        common |= optimizer_groups(model, plan)
    write_torch_file(folder / "common.pt", common)
    backend = {
        "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
        "common_backend_version": 1,
    }  # fmt: skip
    write_synced(folder / "metadata.json", json.dumps(backend).encode())
    write_synced(path / TRACKER, str(model.step or "release").encode())
    fsync_dir(folder)
    fsync_dir(path)


def _extra_keys(store: Scattered, config: ModelConfig, layers_per_stage: int, tp: int) -> Iterator[tuple[str, int]]:
    names = [name.partition("/")[2] for name in store.tensors()]
    layers, differ = config.num_layers or 0, _differs(config)
    prefix = next(name for name in names if _LAYER.fullmatch(name)).partition("layers.")[0]
    for number in range(layers):
        of_layer = [name for name in names if (layer := _LAYER.fullmatch(name)) and int(layer[2]) == number]
        norms = [name for name in of_layer if name.endswith(("q_layernorm.weight", "k_layernorm.weight"))]
        norms = [name.replace(".weight", "._extra_state") for name in norms]
        if number in config.expert_layers(layers):
            norms.append(f"{prefix}layers.{number}.pre_mlp_layernorm._extra_state")  # elsewhere a part of linear_fc1
        core = f"{prefix}layers.{number}.self_attention.core_attention._extra_state"
        for key in [*extra_states(of_layer), *norms, core]:
            shared = key if differ else key.replace(f".layers.{number}.", ".layers.", 1)
            place = [] if differ else [(number, layers)]
            rank = number // layers_per_stage * tp
            if ".mlp.experts." not in key:
                yield _object_key(shared, place), rank
                continue
            shared, experts = shared.replace(".mlp.experts.", ".mlp.experts.experts."), config.num_experts or 0
            for i in range(experts):
                yield _object_key(shared, [*place, (i, experts)]), rank
    yield f"{prefix}final_layernorm._extra_state/shard_0_1", (layers // layers_per_stage - 1) * tp


def _object_key(key: str, positions: list[tuple[int, int]]) -> str:
    which, of_how_many = zip(*positions or [(0, 1)], strict=True)
    return f"{key}/shard_{'.'.join(map(str, which))}_{'.'.join(map(str, of_how_many))}"


def _stacks(store: Scattered, config: ModelConfig) -> Iterator[Stack]:
    by_key: dict[str, list[str]] = {}
    with_experts, differ = config.expert_layers(config.num_layers or 0), _differs(config)
    for name in store.tensors():
        bare = name.partition("/")[2]
        layer = _LAYER.fullmatch(bare)
        key = written(bare, "core", separate_norm=layer is not None and int(layer[2]) in with_experts)
        key = key.replace(".mlp.experts.", ".mlp.experts.experts.")
        if layer is not None and not differ:
            key = key.replace(f".layers.{layer[2]}.", ".layers.", 1)
        by_key.setdefault(key, []).append(name)
    for key, names in by_key.items():
        yield Stack(key, names, not differ and _LAYER.fullmatch(names[0].partition("/")[2]) is not None)


def _differs(config: ModelConfig) -> bool:
    return config.has_experts and config.moe_layer_freq != "1"


def _add(
    writer: DistFolderWriter, prefix: str, stack: Stack, store: Scattered, cut: Cut, layers_per_stage: int,
    progress: Progress
) -> None:  # fmt: skip
    info = store.tensors()[stack.names[0]]
    last = _Last(store, progress)
    chunks = []
    for number, name in enumerate(stack.names):
        layer = _LAYER.fullmatch(name.partition("/")[2])
        stage = 0 if layer is None else int(layer[2]) // layers_per_stage
        for rank, offsets, sizes in _shares(cut, name.partition("/")[2], info.shape):
            front = ((number,), (1,)) if stack.is_stacked else ((), ())
            make = partial(last.part, name, offsets, sizes, stack.is_stacked)
            chunks.append(NewChunk((*front[0], *offsets), (*front[1], *sizes), make, stage * cut.tp + rank))
    shape = (len(stack.names), *info.shape) if stack.is_stacked else info.shape
    writer.add_tensor(prefix + stack.key, shape, info.dtype, chunks)


def _shares(cut: Cut, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    if cut.is_replicated(name):
        yield 0, (0,) * len(shape), shape
        return
    stacked = ".mlp.experts." in name
    dim = (2 if ".linear_fc2." in name else 1) if stacked else 1 if cut.is_cut_along_columns(name) else 0
    halves = 2 if cut.is_gated and ".linear_fc1." in name else 1
    width = shape[dim] // halves // cut.tp
    for half in range(halves):
        for rank in range(cut.tp):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = (half * cut.tp + rank) * width, width
            yield rank, tuple(offsets), tuple(sizes)


class _Last:
    def __init__(self, store: Scattered, progress: Progress) -> None:
        self._store, self._progress = store, progress
        self._name, self._tensor = "", torch.empty(0)

    def part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], stacked: bool) -> Tensor:
        if self._name != name:
            self._tensor = torch.empty(0)  # free it before the next one is read
            self._tensor, self._name = self._store.read(name), name
        part = self._tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].contiguous()
        self._progress(part.numel() * part.element_size())
        return part[None] if stacked else part
