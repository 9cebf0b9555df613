"""``megatron-dist``: Megatron-core's distributed checkpoints (torch_dist), whose tensors are whole."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.archive.dist_folder import DistFolder, DistFolderWriter, NewChunk, StoredChunk
from megatron_sp.convert.archive.torch_files import Object, TensorRecord, TorchFile, require_dtype
from megatron_sp.convert.archive.torch_writer import write_torch_file
from megatron_sp.convert.copies import Copy, Correspondence, Gathered, Scattered, TensorInfo, View
from megatron_sp.convert.families.family import Settings
from megatron_sp.convert.formats.counters import of_megatron, scheduled_of
from megatron_sp.convert.formats.megatron_args import (
    config_of,
    facts_of,
    namespace,
    neighbours_of,
    padded_size,
    true_size,
)
from megatron_sp.convert.formats.megatron_files import TRACKER, iteration_folder, rank_folders
from megatron_sp.convert.formats.megatron_layout import (
    Cut,
    Shard,
    canonical,
    extra_states,
    ignored,
    shard_copies,
    written,
)
from megatron_sp.convert.formats.megatron_write import make_plan, optimizer_groups, require_layout, size
from megatron_sp.convert.model import (
    KINDS,
    OPTIMIZER,
    Model,
    Options,
    Progress,
    match_tensors,
    parameter_shapes,
    require_sound,
)
from megatron_sp.convert.tokenizers import find_files
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.files import fsync_dir, write_synced
from megatron_sp.utils.strict_json import is_count, parse_object, read_small_file

BACKEND, COMMON = "metadata.json", "common.pt"
_MAX_JSON_BYTES = 1 << 20
_OTHER = {
    r"(master|exp_avg|exp_avg_sq)\..*|(chained_\d+\.)?optimizer\..*":
        "the optimizer's, which --no-optimizer leaves behind",
    r"(rng_state|rerun_state_machine).*": "random states, which there are none of here",
}  # fmt: skip


class MegatronDist:
    """Checkpoints of Megatron-LM in the format ``torch_dist``."""

    name = "megatron-dist"
    holds_optimizer = True

    def recognises(self, path: Path) -> bool:
        folder = iteration_folder(path, None)
        if folder is None or not (folder / ".metadata").exists():
            return False
        return not rank_folders(folder) and not (path / "latest").exists()

    def read(self, path: Path, options: Options) -> Model:
        folder = iteration_folder(path, options.step)
        if folder is None or not (folder / ".metadata").exists():
            raise CheckpointError(f"{path} has no .metadata, and so is not a torch_dist checkpoint: give its folder or"
                                  " one of its iterations")  # fmt: skip
        if (folder / BACKEND).exists():
            document = parse_object(read_small_file(folder / BACKEND, _MAX_JSON_BYTES), str(folder / BACKEND))
            if (backend := document.get("sharded_backend")) != "torch_dist":
                raise CheckpointError(f"{folder / BACKEND}: the backend is {json.dumps(backend)[:60]}: only torch_dist"
                                      " can be converted; save it as that")  # fmt: skip
        return _read(folder, DistFolder(folder, options.max_metadata_mb << 20), options)

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        _write(model, path, options, progress)

    def size(self, model: Model, options: Options) -> int:
        return size(make_plan(model, _of_one_rank(options), ep=0))


def _read(folder: Path, dist: DistFolder, options: Options) -> Model:
    if (folder / COMMON).exists():
        common: Any = TorchFile(folder / COMMON).tree
    else:
        states = (name for name in dist.objects if name == "common_state" or name.startswith("common_state/"))
        common = next((dist.read_object(name) for name in states), {})
    if not isinstance(common, dict):
        raise CheckpointError(f"{folder}: the common state must be a dict, found a {type(common).__name__}")
    num_updates, loss_scale = of_megatron(common)
    args = common.get("args")
    document = args.attributes if isinstance(args, Object) and args.name == "argparse.Namespace" else {}
    if document.get("ckpt_format") == "fsdp_dtensor" or any(key.startswith("model.module.") for key in dist.tensors):
        raise CheckpointError(f"{folder} is of Megatron's FSDP (fsdp_dtensor), which cannot be converted: save it as"
                              " torch_dist")  # fmt: skip
    settings, store = Settings(document, str(folder)), DistStore(dist)
    if options.optimizer:
        refuse_buffers(dist)
    version = common.get("checkpoint_version", 3.0)
    if version not in (2.0, 3.0):
        raise CheckpointError(f"{folder}: checkpoint_version is {str(version)[:60]}: only 2.0 and 3.0 can be converted"
                              " in this format")  # fmt: skip
    weights = {name: info.shape for name, info in store.tensors().items()}
    # the two halves of a gated MLP may be stored under keys of their own
    halves = {name: shape for name, shape in weights.items() if name.endswith((".weight_w", ".bias_w"))}
    known = {**weights, **{name[:-2]: (2 * shape[0], *shape[1:]) for name, shape in halves.items()}}
    layers = [name for name in weights if name.endswith("self_attention.linear_proj.weight")]
    num_layers = sum(name.startswith(("decoder.", "encoder.")) for name in layers)
    facts = facts_of(folder, known, known, tp=1, num_layers=num_layers)
    vocab_size = true_size(settings, facts.padded_vocab_size, settings.count("tensor_model_parallel_size", 1), options)
    config = config_of(settings, facts, options.given, vocab_size, legacy=False)
    require_sound(config, len(weights), str(folder))
    order = options.qkv_layout or "interleaved"
    cut = Cut(config, 1, order, facts.padded_vocab_size, ep=0, neighbours=neighbours_of(settings, config, order))
    shapes, place = parameter_shapes(config), [Shard("", 0, 0, config.num_layers or 0, True, True)]
    heads = {""} if not config.untie_embeddings_and_output_weights and "output_layer.weight" in weights else set()
    copies, filled = shard_copies(cut, shapes, place, tied_heads=heads)
    ours = dict(shapes)
    present = {name.partition(".")[0] for name in weights if name.partition(".")[2] in shapes}
    kinds = [kind for kind in KINDS if kind in present and options.optimizer]
    if kinds and config.has_experts:
        raise ConfigError(f"{folder}: the optimizer's state of a mixture of experts cannot be converted: give"
                          " --no-optimizer")  # fmt: skip
    for kind in kinds:
        more, padding = shard_copies(cut, shapes, place, kind=f"{kind}.", ours=f"{OPTIMIZER}{kind}.")
        copies += _as_stored(more, padding, cut, shapes, weights)
        filled |= padding
        ours |= {f"{OPTIMIZER}{kind}.{n}": s for n, s in shapes.items()}
    correspondence = Correspondence.of(ours, _halves(copies, weights), filled)
    dropped = {**ignored(), **_OTHER}
    fitted = match_tensors(str(folder), correspondence, store, dropped, tied={}, shown=store.shown())
    step, samples = common.get("iteration"), document.get("consumed_train_samples")
    consumed = samples if is_count(samples) else 0
    return Model(
        config, Gathered(fitted.correspondence, store), step=step if is_count(step) else 0,
        consumed_samples=consumed, scheduled_samples=scheduled_of(common, consumed), fates=fitted.fates,
        tokenizer=find_files(options.tokenizer) if options.tokenizer else {},
        num_updates=num_updates, loss_scale=loss_scale,
    )  # fmt: skip


def _as_stored(
    copies: list[Copy], padding: Mapping[str, int], cut: Cut, shapes: Mapping[str, tuple[int, ...]],
    there: Mapping[str, tuple[int, ...]]
) -> Iterator[Copy]:  # fmt: skip
    for copy in copies:
        stored, shape = there.get(copy.theirs.name), shapes[copy.theirs.name.partition(".")[2]]
        padded = (cut.padded_vocab_size, *shape[1:]) if copy.theirs.name in padding else shape
        if stored is not None and is_flattened(stored, padded):
            if cut.neighbours:
                raise ConfigError("rotary_interleaved is True, and the optimizer's state is stored in rows of the"
                                  " ranks' shares: that cannot be converted together; give --no-optimizer")  # fmt: skip
            yield from unflattened(copy, padded, stored)
        else:
            yield copy


def _halves(copies: list[Copy], there: Mapping[str, tuple[int, ...]]) -> list[Copy]:
    renamed = []
    for copy in copies:
        name, rows = copy.theirs.name, copy.theirs.index[:1]
        if copy.theirs.stored and f"{name}_w" in there and name not in there and rows:
            first = rows[0]
            assert isinstance(first, slice)
            copy = copy._replace(theirs=type(copy.theirs)(f"{name}_v" if first.start else f"{name}_w"))
        renamed.append(copy)
    return renamed


_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
_BUFFERS = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(gbuf_idx|param_state$|per_bucket)")
_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "master", "param": "master"}
_MAX_BLOCKS = 1 << 12  # names are made for each block before it is known to exist
_MAX_NAMES = 100_000  # names of all blocks: a hundred layers have some 5,000, with the optimizer's
_MAX_SHARES = 1 << 14  # shards of one tensor
_STACKED = re.compile(r"((?:decoder|encoder)\.layers\.)(?!\d+\.)(.+)")


class Source(NamedTuple):
    """A tensor of the folder, or one block of it."""

    key: str
    block: int | None


class DistStore:
    """Tensors by our names, and ``kind.name`` for the optimizer's (a ``TensorStore``); unknown tensors keep their key.

    Keys are those of core with Transformer Engine. Blocks that are all alike are stacked in one tensor along the first
    dim, without a number in the key; a block is read from it without the others. Adam's state has the keys
    ``optimizer.state.{exp_avg,exp_avg_sq,fp32_param,param}.<key>``: like the parameter, or each rank's share of it as
    one row, [parts along each dim, elements of a part]. Source: megatron-core 0.16.1,
    dist_checkpointing/strategies/torch.py, distrib_optimizer.py :: sharded_param_state_*.
    """

    def __init__(self, folder: DistFolder) -> None:
        self._folder = folder
        self.sources: dict[str, Source] = {}
        stack = "encoder" if "lm_head.dense.weight" in folder.tensors else "decoder"
        for key, tensor in folder.tensors.items():
            state = _STATE.fullmatch(key)
            prefix, bare = (f"{_KINDS[state[1]]}.", state[2]) if state else ("", key)
            stacked = _STACKED.fullmatch(bare)
            if stacked is None or not tensor.shape:
                self._add(prefix + canonical(bare, stack), Source(key, None))
                continue
            if tensor.shape[0] > _MAX_BLOCKS:
                raise CheckpointError(f"{folder.path}: {key[:200]} has {tensor.shape[0]:,} blocks, more than the"
                                      f" {_MAX_BLOCKS:,} that are read")  # fmt: skip
            if len(self.sources) + tensor.shape[0] > _MAX_NAMES:
                raise CheckpointError(f"{folder.path} has more than {_MAX_NAMES:,} blocks of tensors: it is of no"
                                      " model")  # fmt: skip
            for i in range(tensor.shape[0]):
                self._add(prefix + canonical(f"{stacked[1]}{i}.{stacked[2]}", stack), Source(key, i))
        self._tensors = {name: self._info(source) for name, source in self.sources.items()}

    def _add(self, name: str, source: Source) -> None:
        if name in self.sources:
            raise CheckpointError(f"{self._folder.path}: {source.key[:200]} and {self.sources[name].key[:200]} are the"
                                  " same parameter")  # fmt: skip
        self.sources[name] = source

    def _info(self, source: Source) -> TensorInfo:
        tensor = self._folder.tensors[source.key]
        dtype = require_dtype(tensor.dtype, f"{self._folder.path}: {source.key[:200]}")
        return TensorInfo(tensor.shape if source.block is None else tensor.shape[1:], dtype)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def shown(self) -> dict[str, str]:
        """Return the keys in the folder by our names; with the number of the block if it is stacked."""
        return {name: s.key if s.block is None else f"{s.key}[{s.block}]" for name, s in self.sources.items()}

    def read(self, name: str) -> Tensor:
        source, info = self.sources[name], self._tensors[name]
        if source.block is None:
            return self._folder.read(source.key)
        result = torch.empty(info.shape, dtype=info.dtype)
        for chunk in self._folder.tensors[source.key].chunks:
            offsets, sizes = chunk.rect
            if offsets[0] <= source.block < offsets[0] + sizes[0]:
                part = self._read_block(source.key, chunk, source.block - offsets[0])
                result[tuple(slice(o, o + s) for o, s in zip(offsets[1:], sizes[1:], strict=True))] = part
        return result

    def _read_block(self, key: str, chunk: StoredChunk, number: int) -> Tensor:
        place = chunk.place
        file = TorchFile(self._folder.path / place.file, (place.offset, place.length))
        record = file.tree
        wanted = (chunk.rect.sizes, self._folder.tensors[key].dtype)
        if not isinstance(record, TensorRecord) or (record.shape, record.dtype) != wanted:
            raise CheckpointError(f"{file.path}: the chunk of {key[:200]} at byte {place.offset} is not what .metadata"
                                  " says: it is damaged")  # fmt: skip
        offset = record.offset + number * record.stride[0]
        return replace(record, offset=offset, shape=record.shape[1:], stride=record.stride[1:]).read()


def refuse_buffers(folder: DistFolder) -> None:
    """Check that the optimizer's state names its parameters."""
    for key in (*folder.tensors, *folder.objects):
        if _BUFFERS.match(key):
            raise CheckpointError(f"{folder.path}: the optimizer's state is in buffers of ranks (dp_reshardable,"
                                  f" {key[:100]}), which do not name parameters: save it in Megatron with"
                                  " --dist-ckpt-optim-fully-reshardable, or give --no-optimizer to convert the weights"
                                  " alone")  # fmt: skip


def unflattened(copy: Copy, ours: tuple[int, ...], stored: tuple[int, ...]) -> Iterator[Copy]:
    """Yield the equivalent of a copy for a tensor that is stored as rows of the ranks' shares.

    ``stored`` is (parts along each dim, elements of a part).
    """
    parts = stored[:-1]
    sizes = tuple(size // count for size, count in zip(ours, parts, strict=True))
    for part in itertools.product(*map(range, parts)):
        first = tuple(i * size for i, size in zip(part, sizes, strict=True))
        inside = _inside(copy, ours, first, sizes)
        if inside is not None:
            region, inner = inside
            yield Copy(region, View(copy.theirs.name, (*parts, *sizes), (*part, *inner), stored=stored), copy.replica)


def _inside(
    copy: Copy, whole: tuple[int, ...], first: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[View, tuple[slice, ...]] | None:  # fmt: skip
    low, high = _rows(copy.theirs, whole[0])
    mine_low, _ = _rows(copy.ours, whole[0])
    start, end = max(low, first[0]), min(high, first[0] + sizes[0])
    if start >= end:
        return None
    rows = slice(mine_low + start - low, mine_low + end - low)
    rest = tuple(slice(f, f + s) for f, s in zip(first[1:], sizes[1:], strict=True))
    inside = slice(start - first[0], end - first[0]), *(slice(0, s) for s in sizes[1:])
    return View(copy.ours.name, None, (rows, *rest)), inside


def _rows(view: View, count: int) -> tuple[int, int]:
    assert view.shape is None and view.order is None
    if not view.index:
        return 0, count
    rows = view.index[0]
    assert isinstance(rows, slice)
    return rows.start or 0, count if rows.stop is None else rows.stop


def is_flattened(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether ``stored`` is the shape of a tensor of shape ``wanted`` that is stored as rows of shares."""
    pairs = list(zip(wanted, stored, strict=False))
    if len(stored) != len(wanted) + 1 or math.prod(stored[:-1]) > _MAX_SHARES:
        return False
    return all(n and size % n == 0 for size, n in pairs) and stored[-1] == math.prod(size // n for size, n in pairs)


_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(\d+)\.(.+)")
_STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master": "fp32_param"}


class Stack(NamedTuple):
    """One tensor of the folder."""

    key: str
    names: list[str]  # our names of its blocks, or its only name
    is_stacked: bool  # the first dim is that of the blocks


def _of_one_rank(options: Options) -> Options:
    return replace(options, tp=1, pp=1, megatron_names="core")


def _write(model: Model, path: Path, options: Options, progress: Progress) -> None:
    require_layout(model, options)
    assert model.config.vocab_size and model.config.num_layers
    rows = padded_size(model.config.vocab_size, model.config.make_vocab_size_divisible_by, options.tp)
    plan = make_plan(model, _of_one_rank(options), ep=0, padded=rows)
    folder = path / (f"iter_{model.step:07d}" if model.step else "release")
    folder.mkdir(parents=True)
    cut = Cut(model.config, options.tp, "interleaved", plan.cut.padded_vocab_size, ep=0)
    dtype = next(iter(plan.weights.tensors().values())).dtype
    with DistFolderWriter(folder) as writer:
        for kind, store in (("", plan.weights), *plan.states.items()):
            prefix = f"optimizer.state.{_STATES[kind]}." if kind else ""
            for stack in _stacks(store, model.config):
                _add_stack(writer, prefix, stack, store, cut, model.config.num_layers // options.pp, progress)
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


def _add_stack(
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
