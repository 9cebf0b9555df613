"""``megatron-dist``: Megatron-core's distributed checkpoints (torch_dist), whose tensors are whole.

Keys are those of core with Transformer Engine. Blocks that are all alike are stacked in one tensor along the first dim,
without a number in the key. Adam's state has the keys ``optimizer.state.{exp_avg,exp_avg_sq,fp32_param,param}.<key>``:
like the parameter, or each rank's share of it as one row, [parts along each dim, elements of a part]. Written are the
chunks that ranks of tp x pp would write. Source: megatron-core 0.16.1, dist_checkpointing/strategies/torch.py,
distrib_optimizer.py :: sharded_param_state_*.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.archive.dist_folder import DistFolder, DistFolderWriter, NewChunk
from megatron_sp.convert.archive.torch_files import TorchFile, attributes_of, require_dtype
from megatron_sp.convert.archive.torch_writer import write_torch_file
from megatron_sp.convert.copies import Copy, Correspondence, Gathered, LastRead, Scattered, Shape, Store, TensorInfo

from megatron_sp.convert.copies import View  # isort: skip
from megatron_sp.convert.families.family import Settings
from megatron_sp.convert.formats.counters import of_megatron, scheduled_of
from megatron_sp.convert.formats.megatron_args import config_of, facts_of, namespace, neighbours_of, padded_size
from megatron_sp.convert.formats.megatron_files import TRACKER, iteration_folder, rank_folders
from megatron_sp.convert.formats.megatron_layout import IGNORED, Cut, Shard, canonical, extra_states, shard_copies

from megatron_sp.convert.formats.megatron_layout import written  # isort: skip
from megatron_sp.convert.formats.megatron_write import make_plan, optimizer_groups, require_layout, size
from megatron_sp.convert.model import KINDS, OPTIMIZER, Model, Options, Progress, match_tensors, parameter_shapes
from megatron_sp.convert.tokenizers import find_files
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.files import fsync_dir, write_synced
from megatron_sp.utils.strict_json import is_count, parse_object, read_small_file

BACKEND, COMMON = "metadata.json", "common.pt"
_MAX_JSON_BYTES = 1 << 20
_MAX_BLOCKS = 1 << 12  # names are made for each block before it is known to exist
_MAX_NAMES = 100_000  # names of all blocks: a hundred layers have some 5,000, with the optimizer's
_MAX_SHARES = 1 << 14  # shards of one tensor
_OTHER = {
    r"(master|exp_avg|exp_avg_sq)\..*|(chained_\d+\.)?optimizer\..*":
        "the optimizer's, which --no-optimizer leaves behind",
    r"(rng_state|rerun_state_machine).*": "random states, which there are none of here",
}  # fmt: skip
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
_BUFFERS = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(gbuf_idx|param_state$|per_bucket)")
_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "master", "param": "master"}
_STACKED = re.compile(r"((?:decoder|encoder)\.layers\.)(?!\d+\.)(.+)")
_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(\d+)\.(.+)")


class MegatronDist:
    """Checkpoints of Megatron-LM in the format ``torch_dist``."""

    name, holds_optimizer = "megatron-dist", True

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
            backend = parse_object(read_small_file(folder / BACKEND, _MAX_JSON_BYTES), str(folder / BACKEND))
            if (name := backend.get("sharded_backend")) != "torch_dist":
                raise CheckpointError(f"{folder / BACKEND}: the backend is {json.dumps(name)[:60]}: only torch_dist"
                                      " can be converted; save it as that")  # fmt: skip
        dist = DistFolder(folder, options.max_metadata_mb << 20)
        if (folder / COMMON).exists():
            common: Any = TorchFile(folder / COMMON).tree
        else:
            states = (name for name in dist.objects if name == "common_state" or name.startswith("common_state/"))
            common = next((dist.read_object(name) for name in states), {})
        if not isinstance(common, dict):
            raise CheckpointError(f"{folder}: the common state must be a dict, found a {type(common).__name__}")
        num_updates, loss_scale = of_megatron(common)
        document = attributes_of(common.get("args"))
        if document.get("ckpt_format") == "fsdp_dtensor" or any(n.startswith("model.module.") for n in dist.tensors):
            raise CheckpointError(f"{folder} is of Megatron's FSDP (fsdp_dtensor), which cannot be converted: save it"
                                  " as torch_dist")  # fmt: skip
        settings, (store, shown) = Settings(document, str(folder)), named_tensors(dist)
        for key in (*dist.tensors, *dist.objects) if options.optimizer else ():
            if _BUFFERS.match(key):
                raise CheckpointError(f"{folder}: the optimizer's state is in buffers of ranks (dp_reshardable,"
                                      f" {key[:100]}), which do not name parameters: save it in Megatron with"
                                      " --dist-ckpt-optim-fully-reshardable, or give --no-optimizer to convert the"
                                      " weights alone")  # fmt: skip
        version = common.get("checkpoint_version", 3.0)
        if version not in (2.0, 3.0):
            raise CheckpointError(f"{folder}: checkpoint_version is {str(version)[:60]}: only 2.0 and 3.0 can be"
                                  " converted in this format")  # fmt: skip
        weights = {name: info.shape for name, info in store.tensors().items()}
        # the two halves of a gated MLP may be stored under keys of their own
        halves = {name: shape for name, shape in weights.items() if name.endswith((".weight_w", ".bias_w"))}
        known = {**weights, **{name[:-2]: (2 * shape[0], *shape[1:]) for name, shape in halves.items()}}
        layers = [name for name in weights if name.endswith("self_attention.linear_proj.weight")]
        num_layers = sum(name.startswith(("decoder.", "encoder.")) for name in layers)
        facts = facts_of(folder, known, known, tp=1, num_layers=num_layers)
        tp = settings.count("tensor_model_parallel_size", 1)
        config = config_of(settings, facts, options, folder, len(weights), tp=tp, legacy=False)
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
            for copy in more:
                stored, shape = weights.get(copy.theirs.name), shapes[copy.theirs.name.partition(".")[2]]
                if copy.theirs.name in padding:
                    shape = (cut.padded_vocab_size, *shape[1:])
                if stored is None or not is_flattened(stored, shape):
                    copies.append(copy)
                elif cut.neighbours:
                    raise ConfigError("rotary_interleaved is True, and the optimizer's state is stored in rows of the"
                                      " ranks' shares: that cannot be converted together; give"
                                      " --no-optimizer")  # fmt: skip
                else:
                    copies += _unflattened(copy, shape, stored)
            filled |= padding
            ours |= {f"{OPTIMIZER}{kind}.{n}": s for n, s in shapes.items()}
        for i, copy in enumerate(copies):
            name, rows = copy.theirs.name, copy.theirs.index[:1]
            if copy.theirs.stored and f"{name}_w" in weights and name not in weights and rows:
                assert isinstance(rows[0], slice)
                copies[i] = copy._replace(theirs=View(f"{name}_v" if rows[0].start else f"{name}_w"))
        correspondence = Correspondence.of(ours, copies, filled)
        fates = match_tensors(str(folder), correspondence, store, {**IGNORED, **_OTHER}, shown=shown)
        step, samples = common.get("iteration"), document.get("consumed_train_samples")
        consumed = samples if is_count(samples) else 0
        return Model(
            config, Gathered(correspondence, store), step=step if is_count(step) else 0,
            consumed_samples=consumed, scheduled_samples=scheduled_of(common, consumed), fates=fates,
            tokenizer=find_files(options.tokenizer) if options.tokenizer else {},
            num_updates=num_updates, loss_scale=loss_scale,
        )  # fmt: skip

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        require_layout(model, options)
        config = model.config
        assert config.vocab_size and config.num_layers
        rows, layers = (
            padded_size(config.vocab_size, config.make_vocab_size_divisible_by, options.tp),
            config.num_layers,
        )
        plan = make_plan(model, _of_one_rank(options), ep=0, padded=rows)
        folder, layers_per_stage = path / (f"iter_{model.step:07d}" if model.step else "release"), layers // options.pp
        folder.mkdir(parents=True)
        cut = Cut(config, options.tp, "interleaved", plan.cut.padded_vocab_size, ep=0)
        dtype = next(iter(plan.weights.tensors().values())).dtype
        states = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master": "fp32_param"}
        with DistFolderWriter(folder) as writer:
            for kind, store in (("", plan.weights), *plan.states.items()):
                prefix = f"optimizer.state.{states[kind]}." if kind else ""
                _add_tensors(writer, prefix, store, cut, layers_per_stage, progress)
            for key, rank in _extra_keys(plan.weights, config, layers_per_stage, options.tp):
                writer.add_object(key, [None], rank)  # Megatron stores None where no FP8 was used
            writer.finish()
        args = namespace(model, tp=options.tp, pp=options.pp, padded_vocab_size=rows, legacy=False, params_dtype=dtype)
        args.ckpt_format = "torch_dist"
        common = {"args": args, "checkpoint_version": 3.0, "iteration": model.step}
        common["num_floating_point_operations_so_far"] = 0
        if plan.states:
            common |= optimizer_groups(model, plan)
        write_torch_file(folder / COMMON, common)
        backend = {
            "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
            "common_backend_version": 1,
        }  # fmt: skip
        write_synced(folder / BACKEND, json.dumps(backend).encode())
        write_synced(path / TRACKER, str(model.step or "release").encode())
        fsync_dir(folder)
        fsync_dir(path)

    def size(self, model: Model, options: Options) -> int:
        return size(make_plan(model, _of_one_rank(options), ep=0))


def _of_one_rank(options: Options) -> Options:
    return replace(options, tp=1, pp=1, megatron_names="core")


def named_tensors(folder: DistFolder) -> tuple[Store, dict[str, str]]:
    """Return the tensors by our names, and ``kind.name`` for the optimizer's, and the keys in the folder.

    A block is read from a stacked tensor without the others. Unknown tensors keep their key.
    """
    described: dict[str, TensorInfo] = {}
    sources: dict[str, tuple[str, int | None]] = {}  # the key, and the number of the block if it is stacked
    stack = "encoder" if "lm_head.dense.weight" in folder.tensors else "decoder"
    for key, tensor in folder.tensors.items():
        state = _STATE.fullmatch(key)
        prefix, bare = (f"{_KINDS[state[1]]}.", state[2]) if state else ("", key)
        stacked = _STACKED.fullmatch(bare)
        blocks: dict[str, int | None] = {bare: None}
        if stacked is not None and tensor.shape:
            if tensor.shape[0] > _MAX_BLOCKS:
                raise CheckpointError(f"{folder.path}: {key[:200]} has {tensor.shape[0]:,} blocks, more than the"
                                      f" {_MAX_BLOCKS:,} that are read")  # fmt: skip
            if len(sources) + tensor.shape[0] > _MAX_NAMES:
                raise CheckpointError(f"{folder.path} has more than {_MAX_NAMES:,} blocks of tensors: it is of no"
                                      " model")  # fmt: skip
            blocks = {f"{stacked[1]}{i}.{stacked[2]}": i for i in range(tensor.shape[0])}
        for of_block, block in blocks.items():
            name = prefix + canonical(of_block, stack)
            if name in sources:
                raise CheckpointError(f"{folder.path}: {key[:200]} and {sources[name][0][:200]} are the same parameter")
            sources[name] = key, block
            dtype = require_dtype(tensor.dtype, f"{folder.path}: {key[:200]}")
            described[name] = TensorInfo(tensor.shape if block is None else tensor.shape[1:], dtype)

    shown = {name: key if block is None else f"{key}[{block}]" for name, (key, block) in sources.items()}
    return Store(described, lambda name: folder.read(*sources[name])), shown


def _unflattened(copy: Copy, ours: Shape, stored: Shape) -> Iterator[Copy]:
    """Yield the equivalent of a copy for a tensor that is stored as rows of the ranks' shares.

    ``ours`` is the shape of the tensor as the copy has it, ``stored`` (parts along each dim, elements of a part).
    """
    parts = stored[:-1]
    sizes = tuple(size // count for size, count in zip(ours, parts, strict=True))
    low, high = _rows(copy.theirs, ours[0])
    first_of_ours, _ = _rows(copy.ours, ours[0])
    for part in itertools.product(*map(range, parts)):
        first = tuple(i * size for i, size in zip(part, sizes, strict=True))
        start, end = max(low, first[0]), min(high, first[0] + sizes[0])
        if start < end:
            rows = slice(first_of_ours + start - low, first_of_ours + end - low)
            rest = tuple(slice(f, f + s) for f, s in zip(first[1:], sizes[1:], strict=True))
            inside = slice(start - first[0], end - first[0]), *(slice(0, s) for s in sizes[1:])
            share = View(copy.theirs.name, (*parts, *sizes), (*part, *inside), stored=stored)
            yield Copy(View(copy.ours.name, None, (rows, *rest)), share, copy.replica)


def _rows(view: View, count: int) -> tuple[int, int]:
    assert view.shape is None and view.order is None
    if not view.index:
        return 0, count
    rows = view.index[0]
    assert isinstance(rows, slice)
    return rows.start or 0, count if rows.stop is None else rows.stop


def is_flattened(stored: Shape, wanted: Shape) -> bool:
    """Return whether ``stored`` is the shape of a tensor of shape ``wanted`` that is stored as rows of shares."""
    pairs = list(zip(wanted, stored, strict=False))
    if len(stored) != len(wanted) + 1 or math.prod(stored[:-1]) > _MAX_SHARES:
        return False
    return all(n and size % n == 0 for size, n in pairs) and stored[-1] == math.prod(size // n for size, n in pairs)


def _stacks_blocks(config: ModelConfig) -> bool:
    return not config.has_experts or config.moe_layer_freq == "1"  # all blocks are alike


def _extra_keys(store: Scattered, config: ModelConfig, layers_per_stage: int, tp: int) -> Iterator[tuple[str, int]]:
    # (key, rank) of each of Transformer Engine's own states, without which Megatron does not load a folder
    names = [name.partition("/")[2] for name in store.tensors()]
    layers, is_stacked = config.num_layers or 0, _stacks_blocks(config)
    prefix = next(name for name in names if _LAYER.fullmatch(name)).partition("layers.")[0]

    def object_key(key: str, positions: list[tuple[int, int]]) -> str:
        which, of_how_many = zip(*positions or [(0, 1)], strict=True)
        return f"{key}/shard_{'.'.join(map(str, which))}_{'.'.join(map(str, of_how_many))}"

    for number in range(layers):
        of_layer = [name for name in names if (layer := _LAYER.fullmatch(name)) and int(layer[2]) == number]
        norms = [name for name in of_layer if name.endswith(("q_layernorm.weight", "k_layernorm.weight"))]
        norms = [name.replace(".weight", "._extra_state") for name in norms]
        if number in config.expert_layers(layers):
            norms.append(f"{prefix}layers.{number}.pre_mlp_layernorm._extra_state")  # elsewhere a part of linear_fc1
        core = f"{prefix}layers.{number}.self_attention.core_attention._extra_state"
        for key in [*extra_states(of_layer), *norms, core]:
            shared = key.replace(f".layers.{number}.", ".layers.", 1) if is_stacked else key
            place = [(number, layers)] if is_stacked else []
            rank = number // layers_per_stage * tp
            if ".mlp.experts." not in key:
                yield object_key(shared, place), rank
                continue
            shared, experts = shared.replace(".mlp.experts.", ".mlp.experts.experts."), config.num_experts or 0
            for i in range(experts):
                yield object_key(shared, [*place, (i, experts)]), rank
    yield f"{prefix}final_layernorm._extra_state/shard_0_1", (layers // layers_per_stage - 1) * tp


def _add_tensors(
    writer: DistFolderWriter, prefix: str, store: Scattered, cut: Cut, layers_per_stage: int, progress: Progress
) -> None:
    config, by_key = cut.config, dict[str, list[str]]()
    with_experts, is_stacked = config.expert_layers(config.num_layers or 0), _stacks_blocks(config)
    for name in store.tensors():
        bare = name.partition("/")[2]
        layer = _LAYER.fullmatch(bare)
        key = written(bare, "core", separate_norm=layer is not None and int(layer[2]) in with_experts)
        key = key.replace(".mlp.experts.", ".mlp.experts.experts.")
        if layer is not None and is_stacked:
            key = key.replace(f".layers.{layer[2]}.", ".layers.", 1)
        by_key.setdefault(key, []).append(name)
    for key, names in by_key.items():
        info, last, chunks = store.tensors()[names[0]], LastRead(store), []
        of_block = is_stacked and _LAYER.fullmatch(names[0].partition("/")[2]) is not None
        for number, name in enumerate(names):
            bare = name.partition("/")[2]
            layer = _LAYER.fullmatch(bare)
            stage = 0 if layer is None else int(layer[2]) // layers_per_stage
            for rank, offsets, sizes in _shares(cut, bare, info.shape):
                front = ((number,), (1,)) if of_block else ((), ())
                make = partial(_part, last, name, offsets, sizes, of_block, progress)
                chunks.append(NewChunk((*front[0], *offsets), (*front[1], *sizes), make, stage * cut.tp + rank))
        shape = (len(names), *info.shape) if of_block else info.shape
        writer.add_tensor(prefix + key, shape, info.dtype, chunks)


def _part(last: LastRead, name: str, offsets: Shape, sizes: Shape, of_block: bool, progress: Progress) -> Tensor:
    part = last.read(name)[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].contiguous()
    progress(part.numel() * part.element_size())
    return part[None] if of_block else part


def _shares(cut: Cut, name: str, shape: Shape) -> Iterator[tuple[int, Shape, Shape]]:
    # (tp rank, offsets, sizes) of what the ranks write of a tensor
    if cut.is_replicated(name):
        yield 0, (0,) * len(shape), shape
        return
    stacked = ".mlp.experts." in name
    dim = (2 if ".linear_fc2." in name else 1) if stacked else 1 if cut.is_cut_along_columns(name) else 0
    halves = 2 if cut.config.swiglu and ".linear_fc1." in name else 1
    width = shape[dim] // halves // cut.tp
    for half in range(halves):
        for rank in range(cut.tp):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = (half * cut.tp + rank) * width, width
            yield rank, tuple(offsets), tuple(sizes)
