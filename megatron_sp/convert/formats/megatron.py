"""``megatron``: the classic checkpoints of Megatron-LM, with one file per tensor and pipeline parallel rank."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.archive.torch_files import TensorRecord, TorchFile
from megatron_sp.convert.copies import Correspondence, Gathered
from megatron_sp.convert.families.family import Settings
from megatron_sp.convert.formats import megatron_write
from megatron_sp.convert.formats.counters import of_megatron, scheduled_of
from megatron_sp.convert.formats.megatron_args import config_of, facts_of, neighbours_of
from megatron_sp.convert.formats.megatron_files import DISTRIBUTED, ModelChunk, Opened, RankFile, RankFiles, Stored

from megatron_sp.convert.formats.megatron_files import iteration_folder, open_ranks, rank_folders  # isort: skip
from megatron_sp.convert.formats.megatron_layout import HEAD, IGNORED, WORDS, Cut, QkvOrder, is_decayed, registered

from megatron_sp.convert.formats.megatron_layout import shard_copies  # isort: skip
from megatron_sp.convert.model import OPTIMIZER, Fate, Model, Options, Progress, match_tensors, parameter_shapes
from megatron_sp.convert.tokenizers import find_files
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.strict_json import is_count

_ORDERS: dict[float, QkvOrder] = {0.0: "v0", 1.0: "v1", 2.0: "interleaved", 3.0: "interleaved"}


class Megatron:
    """Checkpoints of Megatron-LM with one ``.pt`` file for each rank."""

    name, holds_optimizer = "megatron", True

    def recognises(self, path: Path) -> bool:
        if (path / "latest").exists():  # DeepSpeed writes Megatron's tracker file beside its own
            return False
        folder = iteration_folder(path, None)
        return folder is not None and bool(rank_folders(folder))

    def read(self, path: Path, options: Options) -> Model:
        folder = iteration_folder(path, options.step)
        folders = rank_folders(folder) if folder else []
        if not folder or not folders:
            raise CheckpointError(f"{path} has no mp_rank_XX folders with a model_optim_rng.pt: give the checkpoint's"
                                  " folder or one of its iterations")  # fmt: skip
        opened = open_ranks(folders)
        settings, shards, notes = Settings(opened.args, str(opened.files[0].file.path)), opened.shards(), list[str]()
        _require_ranks(opened, settings, folder)
        by_prefix = {c.prefix: {n: stored.record.shape for n, stored in c.tensors.items()} for c in opened.chunks}
        of_first = [shard for shard in shards if shard.tp_rank == shard.ep_rank == 0]
        shapes_of_all: dict[str, tuple[int, ...]] = {}
        for shard in of_first:  # a stage may have layers of one kind only, with or without experts
            shapes_of_all = {**by_prefix[shard.prefix], **shapes_of_all}
        first, last = (next(s for s in of_first if s.is_first), next(s for s in of_first if s.is_last))
        shapes_of_all |= by_prefix[first.prefix]
        num_layers = sum(shard.num_layers for shard in of_first)
        where = opened.files[0].file.path
        facts = facts_of(where, shapes_of_all, by_prefix[last.prefix], tp=opened.tp, num_layers=num_layers)
        num_tensors = sum(len(chunk.tensors) for chunk in opened.chunks)
        config = config_of(settings, facts, options, folder, num_tensors, tp=opened.tp, legacy=opened.is_legacy)
        order = _order(opened, config, options, notes)
        cut = Cut(config, opened.tp, order, facts.padded_vocab_size, opened.ep, neighbours_of(settings, config, order))
        needs_groups = order != "interleaved" or cut.neighbours  # every rank must have whole groups then
        if needs_groups and config.num_groups % cut.tp:
            raise CheckpointError(f"{folder}: {config.num_groups} groups of heads cannot be shared by {cut.tp} tp ranks"
                                  f" in the order {order}")  # fmt: skip
        store = RankFiles()
        for chunk in opened.chunks:
            for name, stored in chunk.tensors.items():
                store.add(chunk.prefix + name, stored)
        is_tied = config.is_bert or not config.untie_embeddings_and_output_weights
        shapes = parameter_shapes(config)
        heads = {chunk.prefix for chunk in opened.chunks if is_tied and HEAD in chunk.tensors}
        copies, filled = shard_copies(cut, shapes, shards, tied_heads=heads)
        ours, fates, num_updates, loss_scale = dict(shapes), list[Fate](), None, None
        with_state = [file for file in opened.files if "optimizer" in file.tree]
        if not options.optimizer:
            for file in with_state:
                name = f"{file.rank.path.name}:optimizer"
                fates.append(Fate(name, "", "the optimizer's, which --no-optimizer leaves behind"))
        elif with_state and config.has_experts:
            raise ConfigError(f"{folder}: the optimizer's state of a mixture of experts cannot be converted: give"
                              " --no-optimizer")  # fmt: skip
        elif kinds := find_optimizer(opened, store, fates):
            num_updates, loss_scale = of_megatron(opened.files[0].tree)
            for kind in kinds:
                names = {"kind": f"{kind}.", "ours": f"{OPTIMIZER}{kind}."}
                more, padding = shard_copies(cut, shapes, shards, tied_heads=heads, **names)
                copies, filled = copies + more, {**filled, **padding}
                ours |= {f"{OPTIMIZER}{kind}.{n}": s for n, s in shapes.items()}
        correspondence = Correspondence.of(ours, copies, filled)
        dropped = {f"[^/]+/(model[0-9]+/)?{pattern}": reason for pattern, reason in IGNORED.items()}
        shown = {name: stored.shown for name, stored in store.stored.items()}
        fates = [*match_tensors(str(folder), correspondence, store, dropped, shown=shown), *fates]
        if settings.document == {}:
            notes.append("it holds no arguments: sizes are taken from its tensors, the rest from --set or Megatron's"
                         " defaults")  # fmt: skip
        iteration, consumed = opened.files[0].tree.get("iteration"), opened.args.get("consumed_train_samples")
        consumed = consumed if is_count(consumed) else 0
        return Model(
            config, Gathered(correspondence, store), step=iteration if is_count(iteration) else 0,
            consumed_samples=consumed, scheduled_samples=scheduled_of(opened.files[0].tree, consumed), fates=fates,
            tokenizer=find_files(options.tokenizer) if options.tokenizer else {}, notes=notes, num_updates=num_updates,
            loss_scale=loss_scale,
        )  # fmt: skip

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        megatron_write.write(model, megatron_write.make_plan(model, options), path, options, progress)

    def size(self, model: Model, options: Options) -> int:
        return megatron_write.size(megatron_write.make_plan(model, options))


def _order(opened: Opened, config: ModelConfig, options: Options, notes: list[str]) -> QkvOrder:
    version, where = opened.files[0].tree.get("checkpoint_version"), opened.files[0].file.path
    if options.qkv_layout is not None:
        order: QkvOrder = options.qkv_layout
    elif version is None:
        if not opened.is_legacy:
            raise ConfigError(f"{where} has no checkpoint_version: give --qkv-layout interleaved (since 2021), or v0 or"
                              " v1 of older files")  # fmt: skip
        notes.append("no checkpoint_version: taken as version 0, whose rows of q, k and v lie one after the other;"
                     " --qkv-layout says otherwise")  # fmt: skip
        order = "v0"
    elif isinstance(version, bool) or not isinstance(version, (int, float)) or float(version) not in _ORDERS:
        raise CheckpointError(f"{where}: checkpoint_version is {str(version)[:60]}: only 0, 1.0, 2.0 and 3.0 can be"
                              " converted")  # fmt: skip
    else:
        order = _ORDERS[float(version)]
    if order in ("v0", "v1") and config.num_groups != config.num_attention_heads:
        raise ConfigError(f"the rows of queries, keys and values cannot be in the order {order}, which knows no groups"
                          f" of heads: the model has {config.num_attention_heads} heads and {config.num_groups} groups;"
                          " give --qkv-layout interleaved or flat")  # fmt: skip
    return order


def _require_ranks(opened: Opened, settings: Settings, folder: Path) -> None:
    tp = settings.count("tensor_model_parallel_size", opened.tp)
    pp = settings.count("pipeline_model_parallel_size", opened.pp)
    ep = settings.count("expert_model_parallel_size", opened.ep)
    if ep != opened.ep:
        raise CheckpointError(f"{folder} has files of {opened.ep} shares of the experts, and {ep} were written: copy"
                              " all of them to one place")  # fmt: skip
    experts_tp = settings.count("expert_tensor_parallel_size", None)
    if experts_tp not in (None, opened.tp) and settings.document.get("num_experts"):
        raise CheckpointError(f"{folder}: experts are split over {experts_tp} ranks (expert_tensor_parallel_size) and"
                              f" the rest over {opened.tp}: only the same number can be converted; save it as"
                              " torch_dist")  # fmt: skip
    if (tp, pp) != (opened.tp, opened.pp):
        raise CheckpointError(f"{folder} has files of {opened.tp} x {opened.pp} ranks (tp x pp), and was written by"
                              f" {tp} x {pp} of them: copy all of their folders to one place")  # fmt: skip


# Adam's state has two forms. The plain optimizer numbers its parameters, in one or two groups (with and without weight
# decay), and has fp32 copies of 16-bit weights. The distributed optimizer has three flat buffers for each model of a
# rank in distrib_optim.pt: parameters from the last to the first, each at the next multiple of 64 (since 2024-08) or
# without gaps, bucket after bucket. Neither contains names, so the order is taken from the file's own list of
# parameters, lengths must match exactly, and each weight must be its rounded fp32 copy when that is read; everything
# else is refused rather than guessed. Source: megatron-core 0.16.1, distrib_optimizer.py ::
# get_parameter_state_dp_zero, param_and_grad_buffer.py, optimizer/__init__.py.
_WAY_OUT = "give --no-optimizer to convert the weights alone"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_HALF = (torch.bfloat16, torch.float16)
_ALIGNMENT = 64


class Parameter(NamedTuple):
    """A parameter of a rank."""

    chunk: ModelChunk
    name: str  # our name, with the layer's number within the file
    shape: tuple[int, ...]


def find_optimizer(opened: Opened, store: RankFiles, fates: list[Fate]) -> Sequence[str]:
    """Add the optimizer's tensors to a store, as ``prefix + kind + "." + name``, and return their kinds."""
    inners, has = [], []
    for file in opened.files:
        outer = file.tree.get("optimizer")
        is_distributed = (file.rank.path / DISTRIBUTED).exists()
        if isinstance(outer, list) and not is_distributed:
            raise CheckpointError(f"{file.file.path} has several chained optimizers, whose parameters cannot be told"
                                  f" apart: {_WAY_OUT}")  # fmt: skip
        inner = outer if isinstance(outer, dict) else {}
        inside = (inner[key] for key in ("optimizer", "optimizer_state_dict") if isinstance(inner.get(key), dict))
        inners.append(next(inside, inner))
        state = inners[-1].get("state")
        states = state.values() if isinstance(state, dict) else ()
        has.append(is_distributed or any(isinstance(one, dict) and "exp_avg" in one for one in states))
    if not any(has):
        return ()
    if not all(has):
        without = opened.files[has.index(False)].file.path.parent
        raise CheckpointError(f"{without} has no state of the optimizer, and other ranks have: copy all files, or"
                              f" {_WAY_OUT}")  # fmt: skip
    kinds: tuple[str, ...] = ()
    for file, inner in zip(opened.files, inners, strict=True):
        parameters: list[Parameter] = []  # in the order in which modules register them
        for chunk in opened.chunks:
            if chunk.rank == file.rank:
                listed = {stored.shown.rsplit(":", 1)[-1]: name for name, stored in chunk.tensors.items()}
                kept = [name for name in listed if not any(re.fullmatch(pattern, name) for pattern in IGNORED)]
                names = [listed[name] for name in registered(kept)]
                parameters += [Parameter(chunk, name, chunk.tensors[name].record.shape) for name in names]
        first = parameters[0]
        is_half = first.chunk.tensors[first.name].record.dtype in _HALF
        kinds = ("master", *_MOMENTS) if is_half else _MOMENTS
        if (file.rank.path / DISTRIBUTED).exists():
            added = _distributed(opened, file, parameters, fates, is_half)
        else:
            added = _plain(file, inner, parameters, is_half)
        for parameter, tensors in added:
            prefix = parameter.chunk.prefix
            for kind in kinds:
                store.add(f"{prefix}{kind}.{parameter.name}", tensors[kind])
            if "master" in tensors:
                checked = f"{prefix}{kinds[0]}.{parameter.name}"
                store.checks[checked] = prefix + parameter.name, tensors["master"]
    return kinds


Added = Iterator[tuple[Parameter, dict[str, Stored]]]  # a parameter, and its tensors of the optimizer by kind


def _plain(file: RankFile, inner: Mapping[Any, Any], parameters: list[Parameter], is_half: bool) -> Added:
    where, groups, state = file.file.path, inner.get("param_groups"), inner["state"]
    groups = groups if isinstance(groups, list) else [None]
    lists = [group.get("params") if isinstance(group, dict) else None for group in groups]
    if not all(isinstance(part, list) and all(isinstance(number, int) for number in part) for part in lists):
        raise CheckpointError(f"{where}: the optimizer has no groups of parameters: {_WAY_OUT}")
    numbers: list[list[Any]] = [part for part in lists if part]
    counts, masters = [len(part) for part in numbers], [list[Any]() for _ in numbers]
    if is_half:
        outer = file.tree["optimizer"]
        found = (outer[key] for key in ("fp32_from_fp16_params", "fp32_from_fp16") if isinstance(outer.get(key), list))
        masters = [group for group in next(found, []) if group]
        if (of_copies := [len(group) for group in masters]) != counts:
            raise CheckpointError(f"{where}: groups of {counts} parameters, but of {of_copies} fp32 copies: which is"
                                  f" which cannot be told; {_WAY_OUT}")  # fmt: skip
    decayed = [p for p in parameters if is_decayed(p.name, p.shape)]
    others = [p for p in parameters if not is_decayed(p.name, p.shape)]
    for candidate in ([parameters], [decayed, others], [others, decayed]):
        members = [group for group in candidate if group]
        if [len(group) for group in members] != counts:
            continue
        pairs = zip(itertools.chain(*members), itertools.chain(*numbers), strict=True)
        states = ((p.shape, state.get(number)) for p, number in pairs)
        if all(isinstance(s, dict) and getattr(s.get("exp_avg"), "shape", None) == shape for shape, s in states):
            break
    else:
        raise CheckpointError(f"{where}: the optimizer has groups of {counts} parameters, the model {len(decayed)} with"
                              f" and {len(others)} without weight decay: which is which cannot be told;"
                              f" {_WAY_OUT}")  # fmt: skip
    for part, copies, group in zip(numbers, masters, members, strict=True):
        for i, (number, parameter) in enumerate(zip(part, group, strict=True)):
            records = {kind: state[number].get(kind) for kind in _MOMENTS}
            if is_half:
                records["master"] = copies[i]
            tensors = {}
            for kind, record in records.items():
                if not isinstance(record, TensorRecord) or record.shape != parameter.shape:
                    shown = parameter.chunk.tensors[parameter.name].shown
                    raise CheckpointError(f"{where}: {kind} number {number} is not of the shape of {shown}: {_WAY_OUT}")
                tensors[kind] = Stored(record, f"{file.rank.path.name}:optimizer.{kind}.{number}")
            yield parameter, tensors


def _distributed(
    opened: Opened, file: RankFile, parameters: list[Parameter], fates: list[Fate], is_half: bool
) -> Added:
    buffers = TorchFile(file.rank.path / DISTRIBUTED)
    tree = buffers.tree if isinstance(buffers.tree, dict) else {}
    chunks = list({id(p.chunk): p.chunk for p in parameters}.values())
    numbers = [key for key in tree if isinstance(key, int)]
    if sorted(numbers) != list(range(len(chunks))):
        raise CheckpointError(f"{buffers.path} has {len(numbers)} rows of parameters for {len(chunks)} models of a"
                              f" rank: its form is not known here; {_WAY_OUT}")  # fmt: skip
    rows = [_rows(buffers, tree[number]) for number in range(len(chunks))]
    for number, chunk in enumerate(chunks):
        shown = f"{file.rank.path.name}/{DISTRIBUTED}:{number}"
        of_chunk = [p for p in parameters if p.chunk is chunk]
        length = rows[number]["param"].shape[0]
        fitting = {starts for starts, total in _layouts(opened.args, opened.pp, of_chunk) if total == length}
        if len(fitting) != 1:
            raise CheckpointError(f"{buffers.path} has rows of {length:,} numbers for parameters of"
                                  f" {sum(math.prod(p.shape) for p in of_chunk):,}:"
                                  f" {'no' if not fitting else 'more than one'} known way of laying them out has this"
                                  f" length; {_WAY_OUT}")  # fmt: skip
        for parameter, start in zip(of_chunk, fitting.pop(), strict=True):
            tensors = {}
            for kind, key in (("master", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                tensors[kind] = Stored(rows[number][key].part(start, parameter.shape), f"{shown}.{key}[{start}:]")
            yield parameter, tensors
        if not is_half:
            fates.append(Fate(f"{shown}.param", "", "the weights again, which are fp32 already"))


def _rows(file: TorchFile, by_dtype: Any) -> dict[str, TensorRecord]:
    inner = next(iter(by_dtype.values())) if isinstance(by_dtype, dict) and len(by_dtype) == 1 else None
    rows: dict[str, TensorRecord] = {}
    for key in ("param", *_MOMENTS):
        row = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(row, list) and len(row) == 1:  # older than 2024-02: a single tensor for each bucket
            row = row[0]
        if not isinstance(row, TensorRecord) or len(row.shape) != 1 or row.stride != (1,) or row.dtype != torch.float32:
            raise CheckpointError(f"{file.path}: {key} is not one row of fp32 numbers: its form is not known here;"
                                  f" {_WAY_OUT}")  # fmt: skip
        rows[key] = row
    if len({row.shape for row in rows.values()}) != 1:
        raise CheckpointError(f"{file.path}: its rows have different lengths: it is damaged; {_WAY_OUT}")
    return rows


def _layouts(args: Mapping[str, Any], pp: int, parameters: list[Parameter]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (starts, total length) of every layout of the flat buffers that Megatron has used."""
    dp = args.get("data_parallel_size")
    bucket = args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * (dp if isinstance(dp, int) else 1))
    is_shared = pp > 1 and not args.get("untie_embeddings_and_output_weights")
    shared = {WORDS, HEAD} if is_shared else set[str]()
    ways: list[tuple[int, int | None, set[str]]] = [(1, None, set())]
    ways += [(alignment, size, shared) for alignment in (1, _ALIGNMENT) for size in (None, int(bucket))]
    for alignment, bucket_size, alone in ways:
        # as in Megatron's buffer, without the padding at the end of buckets, which files do not contain
        starts: dict[str, int] = {}
        behind, position, is_empty = 0, 0, True  # total length of the previous buckets; position in this one
        for parameter in reversed(parameters):
            position = -(-position // alignment) * alignment
            if parameter.name in alone and not is_empty:
                behind, position = behind + position, 0
            starts[parameter.name] = behind + position
            position, is_empty = position + math.prod(parameter.shape), False
            if parameter.name in alone or (bucket_size is not None and position >= bucket_size):
                behind, position, is_empty = behind + position, 0, True
        yield tuple(starts[p.name] for p in parameters), behind + position
