"""``megatron-deepspeed``: checkpoints of Megatron-DeepSpeed of any ZeRO stage, with pipelines, and universal ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.archive.torch_files import TensorRecord, TorchFile
from megatron_sp.convert.copies import Correspondence, Gathered, Shape, Store, TensorInfo, TensorStore, is_same
from megatron_sp.convert.families.family import Settings
from megatron_sp.convert.formats import deepspeed_write
from megatron_sp.convert.formats.counters import scale_of_deepspeed, scheduled_of, whole
from megatron_sp.convert.formats.deepspeed_files import ModelStates, PipelineNames, StepFolder, as_dict, find

from megatron_sp.convert.formats.deepspeed_files import is_pipeline, number, plain_name  # isort: skip
from megatron_sp.convert.formats.deepspeed_write import prefix_of
from megatron_sp.convert.formats.deepspeed_zero import FILES, MASTER, MOMENTS, Share, Stored, dtype_of, gather

from megatron_sp.convert.formats.deepspeed_zero import read_parameter, require_devices, store_of  # isort: skip
from megatron_sp.convert.formats.megatron_args import config_of, facts_of, neighbours_of
from megatron_sp.convert.formats.megatron_files import Written, require_one_save
from megatron_sp.convert.formats.megatron_layout import HEAD, IGNORED, Cut, QkvOrder, Shard, canonical, shard_copies
from megatron_sp.convert.model import OPTIMIZER, Fate, LossScale, Model, Options, Progress, match_tensors

from megatron_sp.convert.model import parameter_shapes  # isort: skip
from megatron_sp.convert.tokenizers import find_files
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.strict_json import is_count

_OLD_ORDERS: dict[float, QkvOrder] = {0.0: "v0", 1.0: "v1"}
_UNUSED_COPY = "the head's copy of it, which the model does not use"
_PARTITIONED = "empty: ZeRO stage 3 keeps it in the optimizer's files"


class MegatronDeepSpeed:
    """Checkpoints of Megatron-DeepSpeed: ZeRO stages, pipelines and universal ones."""

    name, holds_optimizer = "megatron-deepspeed", True

    def recognises(self, path: Path) -> bool:
        return any(path.glob("*_model_states.pt")) or any(path.glob("*/*_model_states.pt"))

    def read(self, path: Path, options: Options) -> Model:
        ranks = Ranks(find(path, options.step), moments=options.optimizer)
        folder, states, kept = ranks.folder, ranks.states, ranks.kept
        settings, first, notes = Settings(states.args, str(states.path)), ranks.names(0), list[str]()
        num_layers = len({name.split(".")[2] for name in first if ".layers." in name})
        facts = facts_of(folder.path, first, first, tp=ranks.tp, num_layers=num_layers)
        of_files = options if options.vocab_size is not None else replace(options, vocab_size=ranks.vocab_size)
        config = config_of(settings, facts, of_files, folder.path, len(first), tp=ranks.tp, legacy=True)
        order = _order(ranks, config, options)
        neighbours = neighbours_of(settings, config, order)
        cut = Cut(config, ranks.tp, order, facts.padded_vocab_size, neighbours=neighbours)
        places = [Shard(prefix_of(rank), rank, 0, config.num_layers or 0, True, True) for rank in range(ranks.tp)]
        is_tied = config.is_bert or not config.untie_embeddings_and_output_weights
        dropped = {rf"tp[0-9]+\.{pattern}": why for pattern, why in IGNORED.items()}

        def fit(store: TensorStore, shapes: dict[str, Shape]) -> tuple[Gathered, list[Fate]]:
            tied = {place.prefix for place in places if is_tied and place.prefix + HEAD in store.tensors()}
            copies, filled = shard_copies(cut, shapes, places, tied_heads=tied)
            correspondence = Correspondence.of(dict(shapes), copies, filled)
            fates = match_tensors(str(folder.path), correspondence, store, dropped, shown=ranks.shown)
            return Gathered(correspondence, store), fates

        shapes = parameter_shapes(config)
        wide = options.dtype is not None and options.dtype.itemsize >= torch.float32.itemsize
        weights, fates = fit(_weights(ranks, wide=wide), shapes)
        stores: dict[str, Store] = {"": weights}  # by what precedes their names
        if options.optimizer and all(kind in kept for kind in MOMENTS):
            copies, _ = shard_copies(cut, shapes, places)
            frozen = {copy.ours.name for copy in copies if copy.theirs.name not in kept[MASTER]}
            trained = {name: shape for name, shape in shapes.items() if name not in frozen}
            infos = {name: stored.info.dtype for name, stored in kept[MASTER].items()}
            is_narrow = any(ranks.computed_in(name, dtype).itemsize < dtype.itemsize for name, dtype in infos.items())
            for kind in (MASTER, *MOMENTS) if is_narrow and not wide else MOMENTS:
                stores[f"{OPTIMIZER}{kind}."] = fit(store_of(kept[kind]), trained)[0]
        if options.optimizer and states.settings.get("optimizer") and not kept:
            notes.append("the optimizer's state of ZeRO stage 0 has no names of parameters and is left behind; the"
                         " weights are all there")  # fmt: skip
        if not settings.document:
            notes.append("it holds no arguments: sizes are taken from its tensors, the rest from --set or Megatron's"
                         " defaults")  # fmt: skip
        consumed = settings.document.get("consumed_train_samples")
        consumed = consumed if is_count(consumed) else states.count("global_samples")
        where = {f"{prefix}{name}": (store, name) for prefix, store in stores.items() for name in store.tensors()}
        described = {name: store.tensors()[own] for name, (store, own) in where.items()}
        return Model(
            config, Store(described, lambda name: where[name][0].read(where[name][1])),
            step=states.count("iteration", "global_steps") or folder.step or ranks.step or 0, consumed_samples=consumed,
            scheduled_samples=scheduled_of(states.settings, consumed), fates=[*fates, *ranks.dropped],
            tokenizer=find_files(options.tokenizer) if options.tokenizer else {}, notes=notes, num_updates=ranks.step,
            loss_scale=ranks.loss_scale,
        )  # fmt: skip

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        deepspeed_write.write(model, path, options, progress)

    def size(self, model: Model, options: Options) -> int:
        return deepspeed_write.size(model, options)


def _order(ranks: Ranks, config: ModelConfig, options: Options) -> QkvOrder:
    # the user may have to give it: it has changed without a new checkpoint version
    stated = ranks.states.settings.get(deepspeed_write.QKV_LAYOUT)  # present in files that were written here
    version = ranks.states.settings.get("checkpoint_version")
    if options.qkv_layout is not None:
        return options.qkv_layout
    if stated in ("interleaved", "flat"):
        return stated
    if isinstance(version, int | float) and float(version) in _OLD_ORDERS:
        return _OLD_ORDERS[float(version)]
    if config.num_groups == ranks.tp:
        return "interleaved"  # with one group per rank both orders are the same
    raise ConfigError(f"{ranks.folder.path} does not say in which order the rows of queries, keys and values are:"
                      " give --qkv-layout flat if Megatron-DeepSpeed of December 2024 (pull request 441) or later"
                      " wrote it, --qkv-layout interleaved if an earlier one did")  # fmt: skip


class Ranks:
    """All tensors of a step folder, located without reading them: one set for each tensor parallel rank.

    Data parallel ranks, pipeline stages and universal folders are resolved here: the names are those of a Megatron
    checkpoint of as many ranks, ``tp0.decoder.layers.0.self_attention.linear_qkv.weight``.
    """

    def __init__(self, folder: StepFolder, *, moments: bool) -> None:
        self.modules: dict[str, Stored] = {}  # the model's own weights, possibly in 16 bits
        # dtypes of the model's own weights, also of those that only the optimizer stores
        self.dtypes: dict[str, torch.dtype] = {}
        self.kept: dict[str, dict[str, Stored | Share]] = {}  # the optimizer's tensors, by kind
        self.step: int | None = None  # updates of the optimizer; None: unknown
        self.loss_scale: LossScale | None = None  # loss scale of fp16; None: there is none
        self.dropped: list[Fate] = []  # tensors that do not belong to the model
        self.shown: dict[str, str] = {}  # names used in the files
        self.vocab_size: int | None = None  # number of entries without padding, if the files state it
        self.folder, self.moments = folder, moments
        models = folder.models or {mp: files[0] for mp, files in sorted(folder.zero_models.items())}
        self.all_states = {mp: ModelStates.of(path) for mp, path in models.items()}
        self.states = self.all_states[0]
        self.layers: dict[tuple[int, str], Stored] = {}  # of files of layers: by tp rank and "layer.name"
        for layer, by_tp in sorted(folder.layers.items()):
            for tp_rank, path in sorted(by_tp.items()):
                for name, item in as_dict(TorchFile(path).tree, str(path)).items():
                    if isinstance(item, TensorRecord) and isinstance(name, str):
                        self.layers[tp_rank, f"{layer}.{plain_name(name)}"] = Stored.all_of(item)
        names = [name for _, name in self.layers]
        names += [name for states in self.all_states.values() for name in (*states.module, *states.shapes)]
        names += folder.universal
        # with files of layers the names in them are of a pipeline, whatever they are
        with_stages = bool(folder.layers) or is_pipeline(names)
        num_mp = tp = len(self.all_states)
        if folder.layers:
            tp = len(next(iter(folder.layers.values())))
        elif (stated := number(self.states.args.get("tensor_model_parallel_size"))) and stated >= 1:
            tp = int(stated)
        if num_mp % tp:
            raise CheckpointError(f"{folder.path} has {num_mp} mp ranks, which are not a multiple of its {tp} tensor"
                                  " parallel ranks: files are missing")  # fmt: skip
        if num_mp != tp and not with_stages:
            raise CheckpointError(f"{folder.path} has {num_mp} mp ranks for {tp} tensor parallel ranks, but no stages"
                                  " of a pipeline: files are missing, or left over from another save")  # fmt: skip
        self.tp, self.pipeline = tp, PipelineNames(set(names), str(folder.path)) if with_stages else None
        self.stack = "encoder" if any(name.startswith("lm_head.dense.") for name in names) else "decoder"
        self._locate()

    def _locate(self) -> None:
        folder = self.folder
        models = folder.zero_models or {mp: {0: path} for mp, path in folder.models.items()}
        places = [(mp, dp, path) for mp, by_dp in models.items() for dp, path in by_dp.items()]
        require_one_save({(m, d): Written.of(path, as_dict(TorchFile(path).tree, str(path))) for m, d, path in places})
        for (tp_rank, raw), stored in self.layers.items():
            self._put(self.modules, tp_rank, raw, stored)
        for mp, states in self.all_states.items():
            for raw, record in states.module.items():
                if not folder.zero_models or 0 not in record.shape:
                    self._put(self.modules, mp, raw, Stored.all_of(record))
                    continue
                self.dropped.append(Fate(f"mp_rank_{mp:02d}: {raw}", "", _PARTITIONED))
                if (name := self._name(raw, mp // self.tp)) is not None:
                    self.dtypes[prefix_of(mp % self.tp) + name] = dtype_of(record)
        self.dtypes |= {name: stored.info.dtype for name, stored in self.modules.items()}
        if folder.universal:
            self._add_universal()
        elif folder.optimizers:
            self._add_zero()
        elif folder.zero_models:
            raise CheckpointError(f"{folder.path} is of ZeRO stage 3, where the weights are in the files"
                                  " *_optim_states.pt, and there are none: copy them too")  # fmt: skip

    def _name(self, raw: str, stage: int) -> str | None:
        name = self.pipeline.translate(raw, first_stage=stage == 0) if self.pipeline else raw
        return None if name is None else canonical(name, self.stack)

    def _put(self, into: dict[str, Any], mp: int, raw: str, stored: Stored | Share) -> None:
        """Add a tensor under our name, unless it is an unused copy."""
        stage, tp_rank = divmod(mp, self.tp)
        name, shown = self._name(raw, stage), f"mp_rank_{mp:02d}: {raw}"
        if name is None:
            if into is self.modules or into is self.kept.get(MASTER):
                self.dropped.append(Fate(shown, "", _UNUSED_COPY))
            return
        full = prefix_of(tp_rank) + name
        if full in into:
            raise CheckpointError(f"{self.folder.path}: {shown} is there twice, as {self.shown[full]} too: it is"
                                  " a mixture of two saves")  # fmt: skip
        into[full] = stored
        self.shown.setdefault(full, shown)

    def _add_zero(self) -> None:
        for mp, states in self.all_states.items():
            of_all = [states]
            if self.folder.zero_models:
                require_devices(self.folder.zero_models[mp], self.folder.optimizers[mp])
                others = sorted(self.folder.zero_models[mp].items()) if states.frozen_shapes else ()
                of_all += [ModelStates.of(path) for rank, path in others if rank]
            first, by_kind = gather(of_all, self.folder.optimizers[mp], moments=self.moments)
            if mp and first.step != self.step:
                raise CheckpointError(f"{self.folder.path}: the optimizer of mp_rank_{mp:02d} has made {first.step}"
                                      f" steps, that of mp_rank_00 {self.step}: the files are of different"
                                      " saves")  # fmt: skip
            self.step, self.loss_scale = first.step, first.loss_scale
            for kind, tensors in by_kind.items():
                into = self.kept.setdefault(kind, {})
                for raw, stored in tensors.items():
                    self._put(into, mp, raw, stored)

    def _add_universal(self) -> None:
        info = self.states.settings.get("universal_checkpoint_info")
        info = info if isinstance(info, dict) else {}
        original, padded = (number(info.get(name)) for name in ("original_vocab_size", "padded_vocab_size"))
        shapes: dict[str, Shape] = {}
        for states in reversed(self.all_states.values()):
            shapes |= {**{name: record.shape for name, record in states.module.items()}, **states.shapes}
        for raw, folder in self.folder.universal.items():
            if not (folder / FILES[MASTER]).exists():
                raise CheckpointError(f"{folder} has no {FILES[MASTER]}: the checkpoint is incomplete")
            for kind, file in FILES.items():
                if (kind == MASTER or self.moments) and (folder / file).exists():
                    shares = read_parameter(folder / file, shapes.get(raw), self.tp, int(padded) if padded else None)
                    for tp_rank, share in enumerate(shares):
                        self._put(self.kept.setdefault(kind, {}), tp_rank, raw, share)
        path = next(iter(self.folder.universal.values())) / "step.pt"
        self.step = whole(TorchFile(path).tree) if path.exists() else None
        if (path := self.folder.path / "zero" / "optimizer_state.pt").exists():
            self.loss_scale = scale_of_deepspeed(as_dict(TorchFile(path).tree, str(path)).get("loss_scaler"))
        self.vocab_size = int(original) if original else None

    def computed_in(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Return the dtype of a weight in the model, given the dtype of its stored copy, which is no narrower."""
        computed = self.dtypes.get(name)
        if computed is None:  # that of all other weights, or of the run's flags
            flags = (("bf16", torch.bfloat16), ("fp16", torch.float16))
            by_flags = {dtype for flag, dtype in flags if self.states.args.get(flag) is True}
            every = set(self.dtypes.values()) or by_flags
            computed = every.pop() if len(every) == 1 else stored
        return computed if computed.itemsize < stored.itemsize else stored

    def names(self, tp_rank: int) -> dict[str, Shape]:
        """Return the shapes of a rank's tensors by our names."""
        prefix, everything = prefix_of(tp_rank), {**self.modules, **self.kept.get(MASTER, {})}
        return {name.removeprefix(prefix): x.info.shape for name, x in everything.items() if name.startswith(prefix)}


def _weights(ranks: Ranks, *, wide: bool) -> Store:
    """Return the weights of all ranks, where the optimizer's copies must round to the model's own.

    ``wide`` keeps the numbers of the copies; otherwise they are rounded to what the model computes with.
    """
    modules, masters = ranks.modules, ranks.kept.get(MASTER, {})
    described = {name: one.info for name, one in {**modules, **masters}.items()}
    if not wide:
        infos = described.items()
        described = {name: TensorInfo(info.shape, ranks.computed_in(name, info.dtype)) for name, info in infos}

    def read(name: str) -> Tensor:
        if name not in masters:
            return modules[name].read()
        stored = masters[name]
        master = stored.read()
        if name in modules:
            own = modules[name].info
            if own.shape != tuple(master.shape):
                raise CheckpointError(f"{ranks.shown[name]} is {list(own.shape)} in the model and {list(master.shape)}"
                                      " in the optimizer's: they are of different saves")  # fmt: skip
            # padding is not in universal files
            flat = master.reshape(-1)[: stored.num_stored if isinstance(stored, Share) else None]
            for start, block in modules[name].blocks():
                rounded = flat[start : start + block.numel()].to(own.dtype)
                if not is_same(rounded, block[: rounded.numel()]):
                    raise CheckpointError(f"{ranks.shown[name]}: the model's weights are not those of the optimizer"
                                          f" rounded to {own.dtype}: the files are of different saves")  # fmt: skip
        return master.to(described[name].dtype)

    return Store(described, read)
