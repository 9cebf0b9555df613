"""``megatron``: the classic checkpoints of Megatron-LM, with one file per tensor and pipeline parallel rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.archive.torch_files import TensorRecord, TorchFile
from megatron_sp.convert.copies import Correspondence, Gathered
from megatron_sp.convert.families.family import Settings
from megatron_sp.convert.formats import megatron_write
from megatron_sp.convert.formats.counters import of_megatron, scheduled_of
from megatron_sp.convert.formats.megatron_args import Facts, config_of, facts_of, neighbours_of, true_size
from megatron_sp.convert.formats.megatron_files import (
    DISTRIBUTED,
    ModelChunk,
    Opened,
    RankFile,
    RankFiles,
    Stored,
    iteration_folder,
    open_ranks,
    places,
    rank_folders,
)  # fmt: skip
from megatron_sp.convert.formats.megatron_layout import (
    HEAD,
    Cut,
    QkvOrder,
    Shard,
    ignored,
    is_decayed,
    registered,
    shard_copies,
)
from megatron_sp.convert.model import (
    OPTIMIZER,
    Fate,
    LossScale,
    Model,
    Options,
    Progress,
    match_tensors,
    parameter_shapes,
    require_sound,
)
from megatron_sp.convert.tokenizers import find_files
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.strict_json import is_count

_ORDERS: dict[float, QkvOrder] = {0.0: "v0", 1.0: "v1", 2.0: "interleaved", 3.0: "interleaved"}


class Megatron:
    """Checkpoints of Megatron-LM with one ``.pt`` file for each rank."""

    name = "megatron"
    holds_optimizer = True

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
        return _read(folder, open_ranks(folders), options)

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        megatron_write.write(model, megatron_write.make_plan(model, options), path, options, progress)

    def size(self, model: Model, options: Options) -> int:
        return megatron_write.size(megatron_write.make_plan(model, options))


def _read(folder: Path, opened: Opened, options: Options) -> Model:
    settings, shards = Settings(opened.args, str(opened.files[0].file.path)), places(opened)
    notes: list[str] = []
    _require_ranks(opened, settings, folder)
    facts = _facts(opened, shards)
    vocab_size = true_size(settings, facts.padded_vocab_size, opened.tp, options)
    config = config_of(settings, facts, options.given, vocab_size, legacy=opened.is_legacy)
    require_sound(config, sum(len(chunk.tensors) for chunk in opened.chunks), str(folder))
    order = _order(opened, config, options, notes)
    cut = Cut(config, opened.tp, order, facts.padded_vocab_size, opened.ep, neighbours_of(settings, config, order))
    needs_groups = order != "interleaved" or cut.neighbours  # every rank must have whole groups then
    if needs_groups and config.num_groups % cut.tp:
        raise CheckpointError(f"{folder}: {config.num_groups} groups of heads cannot be shared by {cut.tp} tp ranks in"
                              f" the order {order}")  # fmt: skip
    store = RankFiles()
    for chunk in opened.chunks:
        for name, stored in chunk.tensors.items():
            store.add(chunk.prefix + name, stored)
    is_tied = config.is_bert or not config.untie_embeddings_and_output_weights
    shapes = parameter_shapes(config)
    heads = {chunk.prefix for chunk in opened.chunks if is_tied and HEAD in chunk.tensors}
    copies, filled = shard_copies(cut, shapes, shards, tied_heads=heads)
    ours = dict(shapes)
    fates: list[Fate] = []
    found = Found((), [])
    if options.optimizer:
        if config.has_experts and any("optimizer" in file.tree for file in opened.files):
            raise ConfigError(f"{folder}: the optimizer's state of a mixture of experts cannot be converted: give"
                              " --no-optimizer")  # fmt: skip
        found = find_optimizer(opened, store)
        fates += found.fates
        for kind in found.kinds:
            names = {"kind": f"{kind}.", "ours": f"{OPTIMIZER}{kind}."}
            more, padding = shard_copies(cut, shapes, shards, tied_heads=heads, **names)
            copies, filled = copies + more, {**filled, **padding}
            ours |= {f"{OPTIMIZER}{kind}.{n}": s for n, s in shapes.items()}
    else:
        for rank in [file.rank.path.name for file in opened.files if "optimizer" in file.tree]:
            fates.append(Fate(f"{rank}:optimizer", "", "the optimizer's, which --no-optimizer leaves behind"))
    dropped = {f"[^/]+/(model[0-9]+/)?{pattern}": reason for pattern, reason in ignored().items()}
    correspondence = Correspondence.of(ours, copies, filled)
    fitted = match_tensors(str(folder), correspondence, store, dropped, tied={}, shown=store.shown())
    if settings.document == {}:
        notes.append("it holds no arguments: sizes are taken from its tensors, the rest from --set or Megatron's"
                     " defaults")  # fmt: skip
    iteration, consumed = opened.common("iteration"), opened.args.get("consumed_train_samples")
    consumed = consumed if is_count(consumed) else 0
    return Model(
        config, Gathered(fitted.correspondence, store), step=iteration if is_count(iteration) else 0,
        consumed_samples=consumed, scheduled_samples=scheduled_of(opened.files[0].tree, consumed),
        fates=[*fitted.fates, *fates], tokenizer=find_files(options.tokenizer) if options.tokenizer else {},
        notes=notes, num_updates=found.num_updates, loss_scale=found.loss_scale,
    )  # fmt: skip


def _facts(opened: Opened, there: list[Shard]) -> Facts:
    by_prefix = {chunk.prefix: chunk.shapes() for chunk in opened.chunks}
    first = next(by_prefix[place.prefix] for place in there if place.is_first and place.tp_rank == place.ep_rank == 0)
    last = next(by_prefix[place.prefix] for place in there if place.is_last and place.tp_rank == place.ep_rank == 0)
    of_first = [place for place in there if place.tp_rank == place.ep_rank == 0]
    with_layers: dict[str, tuple[int, ...]] = {}
    for place in of_first:  # a stage may have layers of one kind only, with or without experts
        with_layers = {**by_prefix[place.prefix], **with_layers}
    num_layers = sum(place.num_layers for place in of_first)
    return facts_of(opened.files[0].file.path, {**with_layers, **first}, last, tp=opened.tp, num_layers=num_layers)


def _order(opened: Opened, config: ModelConfig, options: Options, notes: list[str]) -> QkvOrder:
    order: QkvOrder = options.qkv_layout or _order_of_version(opened, notes)
    if order in ("v0", "v1") and config.num_groups != config.num_attention_heads:
        raise ConfigError(f"the rows of queries, keys and values cannot be in the order {order}, which knows no groups"
                          f" of heads: the model has {config.num_attention_heads} heads and {config.num_groups} groups;"
                          " give --qkv-layout interleaved or flat")  # fmt: skip
    return order


def _order_of_version(opened: Opened, notes: list[str]) -> QkvOrder:
    version, where = opened.common("checkpoint_version"), opened.files[0].file.path
    if version is None:
        if not opened.is_legacy:
            raise ConfigError(f"{where} has no checkpoint_version: give --qkv-layout interleaved (since 2021), or v0 or"
                              " v1 of older files")  # fmt: skip
        notes.append("no checkpoint_version: taken as version 0, whose rows of q, k and v lie one after the other;"
                     " --qkv-layout says otherwise")  # fmt: skip
        return "v0"
    if isinstance(version, bool) or not isinstance(version, (int, float)) or float(version) not in _ORDERS:
        raise CheckpointError(f"{where}: checkpoint_version is {str(version)[:60]}: only 0, 1.0, 2.0 and 3.0 can be"
                              " converted")  # fmt: skip
    return _ORDERS[float(version)]


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


class Found(NamedTuple):
    """Kinds of tensors that every parameter has, and the fates of others."""

    kinds: tuple[str, ...]
    fates: list[Fate]
    num_updates: int | None = None  # Adam's update count, if it is stored
    loss_scale: LossScale | None = None  # state of fp16's loss scaling


class Parameter(NamedTuple):
    """A parameter of a rank; ``find`` handles them in the order in which modules register them."""

    chunk: ModelChunk
    name: str  # our name, with the layer's number within the file
    weight: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.record.shape


def find_optimizer(opened: Opened, store: RankFiles) -> Found:
    """Add the optimizer's tensors to a store, as ``prefix + kind + "." + name``."""
    has = [_has_state(file) for file in opened.files]
    if not any(has):
        return Found((), [])
    if not all(has):
        without = opened.files[has.index(False)].file.path.parent
        raise CheckpointError(f"{without} has no state of the optimizer, and other ranks have: copy all files, or"
                              f" {_WAY_OUT}")  # fmt: skip
    fates: list[Fate] = []
    is_half = False
    for file in opened.files:
        parameters = list(_parameters(opened, file))
        is_half = parameters[0].weight.record.dtype in _HALF
        if (file.rank.path / DISTRIBUTED).exists():
            _add_distributed(opened, file, parameters, store, fates, is_half)
        else:
            _add_plain(file, parameters, store, is_half)
    first = opened.files[0]
    return Found(("master", *_MOMENTS) if is_half else _MOMENTS, fates, *of_megatron(first.tree))


def _has_state(file: RankFile) -> bool:
    if (file.rank.path / DISTRIBUTED).exists():
        return True
    state = _inner(file).get("state")
    return isinstance(state, dict) and any(isinstance(one, dict) and "exp_avg" in one for one in state.values())


def _inner(file: RankFile) -> Mapping[Any, Any]:
    outer = file.tree.get("optimizer")
    if isinstance(outer, list):
        raise CheckpointError(f"{file.file.path} has several chained optimizers, whose parameters cannot be told apart:"
                              f" {_WAY_OUT}")  # fmt: skip
    if not isinstance(outer, dict):
        return {}
    inside = (outer[key] for key in ("optimizer", "optimizer_state_dict") if isinstance(outer.get(key), dict))
    return next(inside, outer)


def _parameters(opened: Opened, file: RankFile) -> Iterator[Parameter]:
    dropped = ignored()
    for chunk in opened.chunks:
        if chunk.rank != file.rank:
            continue
        by_listed = {stored.shown.rsplit(":", 1)[-1]: name for name, stored in chunk.tensors.items()}
        for listed in registered([x for x in by_listed if not any(re.fullmatch(pattern, x) for pattern in dropped)]):
            name = by_listed[listed]
            yield Parameter(chunk, name, chunk.tensors[name])


def _add(store: RankFiles, parameter: Parameter, tensors: Mapping[str, Stored], is_half: bool) -> None:
    prefix = parameter.chunk.prefix
    for kind in ("master", *_MOMENTS) if is_half else _MOMENTS:
        store.add(f"{prefix}{kind}.{parameter.name}", tensors[kind])
    if "master" in tensors:
        first = f"{prefix}{'master' if is_half else 'exp_avg'}.{parameter.name}"
        store.checks[first] = prefix + parameter.name, tensors["master"]


def _add_plain(file: RankFile, parameters: list[Parameter], store: RankFiles, is_half: bool) -> None:
    inner, where = _inner(file), file.file.path
    groups, state = inner.get("param_groups"), inner["state"]
    groups = groups if isinstance(groups, list) else [None]
    lists = [group.get("params") if isinstance(group, dict) else None for group in groups]
    if not all(isinstance(part, list) and all(isinstance(number, int) for number in part) for part in lists):
        raise CheckpointError(f"{where}: the optimizer has no groups of parameters: {_WAY_OUT}")
    numbers: list[list[Any]] = [part for part in lists if part]
    masters = _masters(file, [len(part) for part in numbers]) if is_half else [[] for _ in numbers]
    for part, copies, members in zip(numbers, masters, _members(file, parameters, numbers, state), strict=True):
        for i, (number, parameter) in enumerate(zip(part, members, strict=True)):
            records = {kind: state[number].get(kind) for kind in _MOMENTS}
            if is_half:
                records["master"] = copies[i]
            tensors = {}
            for kind, record in records.items():
                if not isinstance(record, TensorRecord) or record.shape != parameter.shape:
                    raise CheckpointError(f"{where}: {kind} number {number} is not of the shape of"
                                          f" {parameter.weight.shown}: {_WAY_OUT}")  # fmt: skip
                tensors[kind] = Stored(record, f"{file.rank.path.name}:optimizer.{kind}.{number}")
            _add(store, parameter, tensors, is_half)


def _masters(file: RankFile, lengths: list[int]) -> list[list[Any]]:
    outer = file.tree["optimizer"]
    lists = (outer[key] for key in ("fp32_from_fp16_params", "fp32_from_fp16") if isinstance(outer.get(key), list))
    copies = [group for group in next(lists, []) if group]
    if (counts := [len(group) for group in copies]) != lengths:
        raise CheckpointError(f"{file.file.path}: groups of {lengths} parameters, but of {counts} fp32 copies: which is"
                              f" which cannot be told; {_WAY_OUT}")  # fmt: skip
    return copies


def _members(
    file: RankFile, parameters: list[Parameter], numbers: list[list[Any]], state: Mapping[Any, Any]
) -> list[list[Parameter]]:
    decayed = [p for p in parameters if is_decayed(p.name, p.shape)]
    others = [p for p in parameters if not is_decayed(p.name, p.shape)]
    for candidate in ([parameters], [decayed, others], [others, decayed]):
        groups = [group for group in candidate if group]
        if [len(group) for group in groups] == [len(part) for part in numbers] and _shapes_fit(groups, numbers, state):
            return groups
    raise CheckpointError(f"{file.file.path}: the optimizer has groups of {[len(part) for part in numbers]} parameters,"
                          f" the model {len(decayed)} with and {len(others)} without weight decay: which is which"
                          f" cannot be told; {_WAY_OUT}")  # fmt: skip


def _shapes_fit(groups: list[list[Parameter]], numbers: list[list[Any]], state: Mapping[Any, Any]) -> bool:
    for group, part in zip(groups, numbers, strict=True):
        for parameter, number in zip(group, part, strict=True):
            one = state.get(number)
            if not isinstance(one, dict) or getattr(one.get("exp_avg"), "shape", None) != parameter.shape:
                return False
    return True


def _add_distributed(
    opened: Opened, file: RankFile, parameters: list[Parameter], store: RankFiles, fates: list[Fate], is_half: bool
) -> None:  # fmt: skip
    opened_file = TorchFile(file.rank.path / DISTRIBUTED)
    chunks = list({id(p.chunk): p.chunk for p in parameters}.values())
    buffers = _buffers(opened_file, len(chunks))
    for number, (chunk, rows) in enumerate(zip(chunks, buffers, strict=True)):
        shown = f"{file.rank.path.name}/{DISTRIBUTED}:{number}"
        of_chunk = [p for p in parameters if p.chunk is chunk]
        starts = _starts(opened, opened_file, of_chunk, rows["param"])
        for parameter, start in zip(of_chunk, starts, strict=True):
            tensors = {}
            for kind, key in (("master", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                tensors[kind] = Stored(rows[key].part(start, parameter.shape), f"{shown}.{key}[{start}:]")
            _add(store, parameter, tensors, is_half)
        if not is_half:
            fates.append(Fate(f"{shown}.param", "", "the weights again, which are fp32 already"))


def _buffers(file: TorchFile, count: int) -> list[dict[str, TensorRecord]]:
    tree = file.tree if isinstance(file.tree, dict) else {}
    numbers = [key for key in tree if isinstance(key, int)]
    if sorted(numbers) != list(range(count)):
        raise CheckpointError(f"{file.path} has {len(numbers)} rows of parameters for {count} models of a rank: its"
                              f" form is not known here; {_WAY_OUT}")  # fmt: skip
    return [_rows(file, tree[number]) for number in range(count)]


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


def _starts(opened: Opened, file: TorchFile, parameters: list[Parameter], row: TensorRecord) -> list[int]:
    """Return the start of each parameter in the flat buffers."""
    length = row.shape[0]
    fitting = {starts for starts, total in _layouts(opened.args, opened.pp, parameters) if total == length}
    if len(fitting) != 1:
        raise CheckpointError(f"{file.path} has rows of {length:,} numbers for parameters of"
                              f" {sum(math.prod(p.shape) for p in parameters):,}:"
                              f" {'no' if not fitting else 'more than one'} known way of laying them out has this"
                              f" length; {_WAY_OUT}")  # fmt: skip
    return list(fitting.pop())


def _layouts(args: Mapping[str, Any], pp: int, parameters: list[Parameter]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (starts, total length) of every layout that Megatron has used."""
    yield _laid_out(parameters, 1, None, set())
    dp = args.get("data_parallel_size")
    bucket = args.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * (dp if isinstance(dp, int) else 1))
    is_shared = pp > 1 and not args.get("untie_embeddings_and_output_weights")
    shared = {"embedding.word_embeddings.weight", "output_layer.weight"} if is_shared else set()
    for alignment in (1, _ALIGNMENT):
        yield _laid_out(parameters, alignment, None, shared)
        yield _laid_out(parameters, alignment, int(bucket), shared)


def _laid_out(
    parameters: list[Parameter], alignment: int, bucket_size: int | None, shared: set[str]
) -> tuple[tuple[int, ...], int]:
    # as in Megatron's buffer, without the padding at the end of buckets, which files do not contain
    starts: dict[str, int] = {}
    behind, at, is_empty = 0, 0, True  # total length of the previous buckets; position in this one
    for parameter in reversed(parameters):
        at = -(-at // alignment) * alignment
        alone = parameter.name in shared
        if alone and not is_empty:
            behind, at = behind + at, 0
        starts[parameter.name] = behind + at
        at, is_empty = at + math.prod(parameter.shape), False
        if alone or (bucket_size is not None and at >= bucket_size):
            behind, at, is_empty = behind + at, 0, True
    return tuple(starts[p.name] for p in parameters), behind + at
