"""``megatron``: the classic checkpoints of Megatron-LM, with one file per tensor and pipeline parallel rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.copies import Correspondence, Gathered
from megatron_sp.convert.coverage import match_tensors
from megatron_sp.convert.families.settings import Settings
from megatron_sp.convert.formats import megatron_optimizer, megatron_write
from megatron_sp.convert.formats.counters import scheduled_of
from megatron_sp.convert.formats.format import Progress
from megatron_sp.convert.formats.megatron_args import config_of, neighbours_of
from megatron_sp.convert.formats.megatron_facts import Facts, facts_of
from megatron_sp.convert.formats.megatron_files import ModelChunk, Opened, RankFiles, open_ranks, places
from megatron_sp.convert.formats.megatron_folder import iteration_folder, rank_folders
from megatron_sp.convert.formats.megatron_names import ignored
from megatron_sp.convert.formats.megatron_shards import HEAD, Cut, QkvOrder, Shard, shard_copies
from megatron_sp.convert.formats.megatron_vocab import true_size
from megatron_sp.convert.model import OPTIMIZER, Fate, Model, parameter_shapes, require_sound
from megatron_sp.convert.options import Options
from megatron_sp.convert.tokenizer_files import find_files
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
            raise CheckpointError(
                f"{path} has no mp_rank_XX folders with a model_optim_rng.pt: give the checkpoint's folder or one of its iterations"
            )
        return _read(folder, open_ranks(folders), options)

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        megatron_write.write(model, megatron_write.make_plan(model, options), path, options, progress)

    def size(self, model: Model, options: Options) -> int:
        return megatron_write.size(megatron_write.make_plan(model, options))


def _read(folder: Path, opened: Opened, options: Options) -> Model:
    settings, there = Settings(opened.args, str(opened.files[0].file.path)), places(opened)
    notes: list[str] = []
    _require_ranks(opened, settings, folder)
    facts = _facts(opened, there)
    vocab_size = true_size(settings, facts.padded_vocab_size, opened.tp, options)
    config = config_of(settings, facts, options.given, vocab_size, legacy=opened.is_legacy)
    require_sound(config, sum(len(chunk.tensors) for chunk in opened.chunks), str(folder))
    order = _order(opened, config, options, notes)
    cut = Cut(config, opened.tp, order, facts.padded_vocab_size, opened.ep, neighbours_of(settings, config, order))
    _require_divisible(cut, folder)
    store = RankFiles()
    for chunk in opened.chunks:
        for name, stored in chunk.tensors.items():
            store.add(chunk.prefix + name, stored)
    shapes, heads = parameter_shapes(config), _tied_heads(opened.chunks, config)
    copies, filled = shard_copies(cut, shapes, there, tied_heads=heads)
    ours = dict(shapes)
    fates: list[Fate] = []
    found = megatron_optimizer.Found((), [])
    if options.optimizer:
        if config.has_experts and any("optimizer" in file.tree for file in opened.files):
            raise ConfigError(f"{folder}: the optimizer's state of a mixture of experts cannot be converted: give --no-optimizer")
        found = megatron_optimizer.find(opened, store)
        fates += found.fates
        for kind in found.kinds:
            more, padding = shard_copies(cut, shapes, there, kind=f"{kind}.", ours=f"{OPTIMIZER}{kind}.", tied_heads=heads)
            copies, filled, ours = (
                copies + more,
                {**filled, **padding},
                {**ours, **{f"{OPTIMIZER}{kind}.{n}": s for n, s in shapes.items()}},
            )
    else:
        ranks = [file.rank.path.name for file in opened.files if "optimizer" in file.tree]
        fates += [Fate(f"{rank}:optimizer", "", "the optimizer's, which --no-optimizer leaves behind") for rank in ranks]
    fitted = match_tensors(str(folder), Correspondence.of(ours, copies, filled), store, _dropped(), tied={}, shown=store.shown())
    if settings.document == {}:
        notes.append("it holds no arguments: sizes are taken from its tensors, the rest from --set or Megatron's defaults")
    iteration, consumed = opened.common("iteration"), _count(opened.args, "consumed_train_samples")
    return Model(
        config, Gathered(fitted.correspondence, store), step=iteration if is_count(iteration) else 0,
        consumed_samples=consumed, scheduled_samples=scheduled_of(opened.files[0].tree, consumed), fates=[*fitted.fates, *fates],
        tokenizer=find_files(options.tokenizer) if options.tokenizer else {}, notes=notes,
        num_updates=found.num_updates, loss_scale=found.loss_scale,
    )  # fmt: skip


def _dropped() -> dict[str, str]:
    return {f"[^/]+/(model[0-9]+/)?{pattern}": reason for pattern, reason in ignored().items()}


def _facts(opened: Opened, there: list[Shard]) -> Facts:
    by_prefix = {chunk.prefix: chunk.shapes() for chunk in opened.chunks}
    first = next(by_prefix[place.prefix] for place in there if place.is_first and place.tp_rank == place.ep_rank == 0)
    last = next(by_prefix[place.prefix] for place in there if place.is_last and place.tp_rank == place.ep_rank == 0)
    of_first = [place for place in there if place.tp_rank == place.ep_rank == 0]
    with_layers: dict[str, tuple[int, ...]] = {}
    for place in of_first:  # a stage may have layers of one kind only, with or without experts
        with_layers = {**by_prefix[place.prefix], **with_layers}
    num_layers = sum(place.num_layers for place in of_first)
    try:
        return facts_of({**with_layers, **first}, last, tp=opened.tp, num_layers=num_layers)
    except KeyError as error:
        has = ", ".join(name[:80] for name in list(first)[:5])
        raise CheckpointError(
            f"{opened.files[0].file.path} has no {error.args[0]}, but {has or 'no tensors'}: it is neither a GPT nor a BERT"
        ) from None


def _order(opened: Opened, config: ModelConfig, options: Options, notes: list[str]) -> QkvOrder:
    """Return the row order of the fused projections: that of --qkv-layout, or of the checkpoint version."""
    if options.qkv_layout is not None:
        order: QkvOrder = options.qkv_layout
    else:
        order = _order_of_version(opened, notes)
    if order in ("v0", "v1") and config.num_groups != config.num_attention_heads:
        raise ConfigError(
            f"the rows of queries, keys and values cannot be in the order {order}, which knows no groups of heads: the model has"
            f" {config.num_attention_heads} heads and {config.num_groups} groups; give --qkv-layout interleaved or flat"
        )
    return order


def _order_of_version(opened: Opened, notes: list[str]) -> QkvOrder:
    version, where = opened.common("checkpoint_version"), opened.files[0].file.path
    if version is None:
        if not opened.is_legacy:
            raise ConfigError(f"{where} has no checkpoint_version: give --qkv-layout interleaved (since 2021), or v0 or v1 of older files")
        notes.append(
            "no checkpoint_version: taken as version 0, whose rows of q, k and v lie one after the other; --qkv-layout says otherwise"
        )
        return "v0"
    if isinstance(version, bool) or not isinstance(version, (int, float)) or float(version) not in _ORDERS:
        raise CheckpointError(f"{where}: checkpoint_version is {str(version)[:60]}: only 0, 1.0, 2.0 and 3.0 can be converted")
    return _ORDERS[float(version)]


def _require_ranks(opened: Opened, settings: Settings, folder: Path) -> None:
    said = [settings.count(f"{axis}_model_parallel_size", found) for axis, found in (("tensor", opened.tp), ("pipeline", opened.pp))]
    ep = settings.count("expert_model_parallel_size", opened.ep)
    if ep != opened.ep:
        raise CheckpointError(
            f"{folder} has files of {opened.ep} shares of the experts, and {ep} were written: copy all of them to one place"
        )
    experts_tp = settings.count("expert_tensor_parallel_size", None)
    if experts_tp not in (None, opened.tp) and settings.document.get("num_experts"):
        raise CheckpointError(
            f"{folder}: experts are split over {experts_tp} ranks (expert_tensor_parallel_size) and the rest over {opened.tp}: only the"
            " same number can be converted; save it as torch_dist"
        )
    if said != [opened.tp, opened.pp]:
        raise CheckpointError(
            f"{folder} has files of {opened.tp} x {opened.pp} ranks (tp x pp), and was written by {said[0]} x {said[1]} of them: copy"
            " all of their folders to one place"
        )


def _require_divisible(cut: Cut, folder: Path) -> None:
    """Check that every rank has whole groups, which orders other than interleaved require."""
    if (cut.qkv != "interleaved" or cut.neighbours) and cut.config.num_groups % cut.tp:
        raise CheckpointError(
            f"{folder}: {cut.config.num_groups} groups of heads cannot be shared by {cut.tp} tp ranks in the order {cut.qkv}"
        )


def _tied_heads(chunks: list[ModelChunk], config: ModelConfig) -> set[str]:
    """Return the prefixes of chunks with a copy of the tied embedding after the last block."""
    if config.untie_embeddings_and_output_weights and not config.is_bert:
        return set()
    return {chunk.prefix for chunk in chunks if HEAD in chunk.tensors}


def _count(args: Mapping[str, Any], name: str) -> int:
    value = args.get(name)
    return value if is_count(value) else 0
