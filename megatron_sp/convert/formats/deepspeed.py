"""``megatron-deepspeed``: checkpoints of Megatron-DeepSpeed of any ZeRO stage, with pipelines, and universal ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.convert.archive.torch_files import TensorRecord, TorchFile
from megatron_sp.convert.copies import Correspondence, Gathered, TensorInfo, TensorStore, is_same
from megatron_sp.convert.families.family import Settings
from megatron_sp.convert.formats import deepspeed_write
from megatron_sp.convert.formats.counters import scale_of_deepspeed, scheduled_of, whole
from megatron_sp.convert.formats.deepspeed_files import (
    ModelStates,
    PipelineNames,
    StepFolder,
    as_dict,
    find,
    is_pipeline,
    is_there,
    number,
    plain_name,
    step_in_name,
)  # fmt: skip
from megatron_sp.convert.formats.deepspeed_write import prefix_of
from megatron_sp.convert.formats.deepspeed_zero import (
    FILES,
    MASTER,
    MOMENTS,
    STEP,
    Share,
    Shares,
    Stored,
    Stretches,
    dtype_of,
    gather,
    parameters,
    read_parameter,
    require_devices,
)
from megatron_sp.convert.formats.megatron_args import config_of, facts_of, neighbours_of, true_size
from megatron_sp.convert.formats.megatron_files import Written, require_one_save
from megatron_sp.convert.formats.megatron_layout import HEAD, Cut, QkvOrder, Shard, canonical, ignored, shard_copies
from megatron_sp.convert.model import (
    OPTIMIZER,
    Coverage,
    Fate,
    LossScale,
    Model,
    Options,
    Progress,
    match_tensors,
    parameter_shapes,
    require_sound,
)  # fmt: skip
from megatron_sp.convert.tokenizers import find_files
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.strict_json import is_count

_OLD_ORDERS: dict[float, QkvOrder] = {0.0: "v0", 1.0: "v1"}


class MegatronDeepSpeed:
    """Checkpoints of Megatron-DeepSpeed: ZeRO stages, pipelines and universal ones."""

    name = "megatron-deepspeed"
    holds_optimizer = True

    def recognises(self, path: Path) -> bool:
        return is_there(path)

    def read(self, path: Path, options: Options) -> Model:
        folder = find(path, options.step)
        ranks = Loader(folder, moments=options.optimizer).load()
        return _Reading(folder, ranks, options).model()

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        deepspeed_write.write(model, path, options, progress)

    def size(self, model: Model, options: Options) -> int:
        return deepspeed_write.size(model, options)


class _Reading:
    def __init__(self, folder: StepFolder, ranks: Ranks, options: Options) -> None:
        self.folder, self.ranks, self.options = folder, ranks, options
        args = ranks.states.args
        self.settings = Settings(args.attributes if args else {}, str(ranks.states.path))
        first = ranks.names(0)
        num_layers = len({name.split(".")[2] for name in first if ".layers." in name})
        self.facts = facts_of(folder.path, first, first, tp=ranks.tp, num_layers=num_layers)
        sizes = options if options.vocab_size is not None else replace(options, vocab_size=ranks.vocab_size)
        vocab_size = true_size(self.settings, self.facts.padded_vocab_size, ranks.tp, sizes)
        self.config = config_of(self.settings, self.facts, options.given, vocab_size, legacy=True)
        require_sound(self.config, len(first), str(folder.path))
        order = self._order()
        neighbours = neighbours_of(self.settings, self.config, order)
        self.cut = Cut(self.config, ranks.tp, order, self.facts.padded_vocab_size, neighbours=neighbours)
        self.shapes = parameter_shapes(self.config)

    def model(self) -> Model:
        weights = Weights(self.ranks, wide=self._takes_copies())
        fitted = self._fit(weights, self.shapes)
        parts: list[tuple[str, Gathered]] = [("", Gathered(fitted.correspondence, weights))]
        for kind in self._kinds():
            store = kept(self.ranks, kind)
            parts.append((f"{OPTIMIZER}{kind}.", Gathered(self._fit(store, self._trained()).correspondence, store)))
        states, notes = self.ranks.states, []
        if self.options.optimizer and states.settings.get("optimizer") and not self.ranks.kept:
            notes.append("the optimizer's state of ZeRO stage 0 has no names of parameters and is left behind; the"
                         " weights are all there")  # fmt: skip
        if not self.settings.document:
            notes.append("it holds no arguments: sizes are taken from its tensors, the rest from --set or Megatron's"
                         " defaults")  # fmt: skip
        step = states.count("iteration", "global_steps") or step_in_name(self.folder.path) or self.ranks.step or 0
        return Model(
            self.config, _Together(parts), step=step, consumed_samples=self._consumed(),
            scheduled_samples=scheduled_of(states.settings, self._consumed()),
            fates=[*fitted.fates, *self.ranks.dropped],
            tokenizer=find_files(self.options.tokenizer) if self.options.tokenizer else {}, notes=notes,
            num_updates=self.ranks.step, loss_scale=self.ranks.loss_scale,
        )  # fmt: skip

    def _consumed(self) -> int:
        value = self.settings.document.get("consumed_train_samples")
        return value if is_count(value) else self.ranks.states.count("global_samples")

    def _order(self) -> QkvOrder:
        # the user may have to give it: it has changed without a new checkpoint version
        stated = self.ranks.states.settings.get(deepspeed_write.QKV_LAYOUT)  # present in files that were written here
        version = self.ranks.states.settings.get("checkpoint_version")
        if self.options.qkv_layout is not None:
            return self.options.qkv_layout
        if stated in ("interleaved", "flat"):
            return stated
        if isinstance(version, int | float) and float(version) in _OLD_ORDERS:
            return _OLD_ORDERS[float(version)]
        if self.config.num_groups == self.ranks.tp:
            return "interleaved"  # with one group per rank both orders are the same
        raise ConfigError(f"{self.folder.path} does not say in which order the rows of queries, keys and values are:"
                          " give --qkv-layout flat if Megatron-DeepSpeed of December 2024 (pull request 441) or later"
                          " wrote it, --qkv-layout interleaved if an earlier one did")  # fmt: skip

    def _places(self) -> list[Shard]:
        assert self.config.num_layers
        return [Shard(prefix_of(rank), rank, 0, self.config.num_layers, True, True) for rank in range(self.ranks.tp)]

    def _fit(self, store: TensorStore, shapes: Mapping[str, tuple[int, ...]]) -> Coverage:
        is_tied = self.config.is_bert or not self.config.untie_embeddings_and_output_weights
        prefixes = map(prefix_of, range(self.ranks.tp)) if is_tied else ()
        tied = {prefix for prefix in prefixes if prefix + HEAD in store.tensors()}
        copies, filled = shard_copies(self.cut, shapes, self._places(), tied_heads=tied)
        correspondence = Correspondence.of(dict(shapes), copies, filled)
        dropped = {rf"tp[0-9]+\.{pattern}": why for pattern, why in ignored().items()}
        return match_tensors(str(self.folder.path), correspondence, store, dropped, tied={}, shown=self.ranks.shown)

    def _trained(self) -> dict[str, tuple[int, ...]]:
        copies, _ = shard_copies(self.cut, self.shapes, self._places())
        trained = self.ranks.kept[MASTER]
        frozen = {copy.ours.name for copy in copies if copy.theirs.name not in trained}
        return {name: shape for name, shape in self.shapes.items() if name not in frozen}

    def _kinds(self) -> Iterable[str]:
        if not self.options.optimizer or any(kind not in self.ranks.kept for kind in MOMENTS):
            return ()
        kept_in = {name: stored.info.dtype for name, stored in self.ranks.kept[MASTER].items()}
        is_narrow = any(self.ranks.computed_in(name, kind).itemsize < kind.itemsize for name, kind in kept_in.items())
        return (MASTER, *MOMENTS) if is_narrow and not self._takes_copies() else MOMENTS

    def _takes_copies(self) -> bool:
        return self.options.dtype is not None and self.options.dtype.itemsize >= torch.float32.itemsize


class _Together:
    """Several stores as one, each with its own name prefix (a ``TensorStore``)."""

    def __init__(self, parts: list[tuple[str, Gathered]]) -> None:
        self._parts = {f"{prefix}{name}": (store, name) for prefix, store in parts for name in store.tensors()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: store.tensors()[own] for name, (store, own) in self._parts.items()}

    def read(self, name: str) -> Tensor:
        store, own = self._parts[name]
        return store.read(own)


_UNUSED_COPY = "the head's copy of it, which the model does not use"
_PARTITIONED = "empty: ZeRO stage 3 keeps it in the optimizer's files"


@dataclass
class Ranks:
    """Contents of a whole checkpoint, by tensor parallel rank."""

    states: ModelStates  # model states of the first file
    tp: int  # number of tensor parallel ranks
    modules: dict[str, Stored] = field(default_factory=dict)  # the model's own weights, possibly in 16 bits
    # dtypes of the model's own weights, also of those that only the optimizer stores
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    kept: dict[str, dict[str, Stored | Share]] = field(default_factory=dict)  # the optimizer's tensors, by kind
    step: int | None = None  # updates of the optimizer; None: unknown
    loss_scale: LossScale | None = None  # loss scale of fp16; None: there is none
    dropped: list[Fate] = field(default_factory=list)  # tensors that do not belong to the model
    shown: dict[str, str] = field(default_factory=dict)  # names used in the files
    vocab_size: int | None = None  # number of entries without padding, if the files state it

    def computed_in(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Return the dtype of a weight in the model, given the dtype of its stored copy, which is no narrower."""
        computed = self.dtypes.get(name) or self._common_dtype or stored
        return computed if computed.itemsize < stored.itemsize else stored

    @cached_property
    def _common_dtype(self) -> torch.dtype | None:
        args = self.states.args.attributes if self.states.args else {}
        by_flags = {
            dtype for flag, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if args.get(flag) is True
        }
        every = set(self.dtypes.values()) or by_flags
        return every.pop() if len(every) == 1 else None

    def names(self, tp_rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a rank's tensors by our names."""
        prefix = prefix_of(tp_rank)
        everything = {**self.modules, **self.kept.get(MASTER, {})}
        return {name.removeprefix(prefix): x.shape for name, x in everything.items() if name.startswith(prefix)}


class Loader:
    """Loader of a step folder in any layout: one set of tensors for each tensor parallel rank.

    Data parallel ranks, pipeline stages and universal folders are resolved here: the names are those of a Megatron
    checkpoint of as many ranks, ``tp0.decoder.layers.0.self_attention.linear_qkv.weight``.
    """

    def __init__(self, folder: StepFolder, *, moments: bool) -> None:
        self.folder, self.moments = folder, moments
        models = folder.models or {mp: files[0] for mp, files in sorted(folder.zero_models.items())}
        self.states = {mp: ModelStates.of(path) for mp, path in models.items()}
        self.layers = dict(self._layer_tensors())
        of_states = (name for states in self.states.values() for name in (*states.module, *states.shapes))
        self._raw = [*self.layers, *of_states, *folder.universal]
        self.is_pipeline = bool(folder.layers) or is_pipeline(self._raw)
        self.tp = self._tp()
        self.pipeline: PipelineNames | None = None
        if self.is_pipeline:
            self.pipeline = PipelineNames({name.rpartition("|")[2] for name in self._raw}, str(folder.path))
        self.stack = "encoder" if any(name.startswith("lm_head.dense.") for name in self._raw) else "decoder"
        self.ranks = Ranks(self.states[0], self.tp)

    def load(self) -> Ranks:
        models = self.folder.zero_models or {mp: {0: path} for mp, path in self.folder.models.items()}
        places = [(mp, dp, path) for mp, by_dp in models.items() for dp, path in by_dp.items()]
        require_one_save({(m, d): Written.of(path, as_dict(TorchFile(path).tree, str(path))) for m, d, path in places})
        self._add_modules()
        if self.folder.universal:
            self._add_universal()
        elif self.folder.optimizers:
            self._add_zero()
        elif self.folder.zero_models:
            raise CheckpointError(f"{self.folder.path} is of ZeRO stage 3, where the weights are in the files"
                                  " *_optim_states.pt, and there are none: copy them too")  # fmt: skip
        return self.ranks

    def _layer_tensors(self) -> Iterator[tuple[str, Stored]]:
        for layer, by_tp in sorted(self.folder.layers.items()):
            for tp_rank, path in sorted(by_tp.items()):
                for name, item in as_dict(TorchFile(path).tree, str(path)).items():
                    if isinstance(item, TensorRecord) and isinstance(name, str):
                        yield f"{tp_rank}|{layer}.{plain_name(name)}", Stored.whole(item)

    def _tp(self) -> int:
        num_mp = len(self.states)
        if self.folder.layers:
            tp = len(next(iter(self.folder.layers.values())))
        else:
            args = self.states[0].args
            stated = number(args.attributes.get("tensor_model_parallel_size")) if args else None
            tp = int(stated) if stated and stated >= 1 else num_mp
        if num_mp % tp:
            raise CheckpointError(f"{self.folder.path} has {num_mp} mp ranks, which are not a multiple of its {tp}"
                                  " tensor parallel ranks: files are missing")  # fmt: skip
        if num_mp != tp and not self.is_pipeline:
            raise CheckpointError(f"{self.folder.path} has {num_mp} mp ranks for {tp} tensor parallel ranks, but no"
                                  " stages of a pipeline: files are missing, or left over from another"
                                  " save")  # fmt: skip
        return tp

    def _name(self, raw: str, stage: int) -> str | None:
        name = self.pipeline.translate(raw, first_stage=stage == 0) if self.pipeline else raw
        return None if name is None else canonical(name, self.stack)

    def _put(self, into: dict[str, Any], mp: int, raw: str, found: Stored | Share) -> None:
        """Add a tensor under our name, unless it is an unused copy."""
        stage, tp_rank = divmod(mp, self.tp)
        name, shown = self._name(raw, stage), f"mp_rank_{mp:02d}: {raw}"
        if name is None:
            if into is self.ranks.modules or into is self.ranks.kept.get(MASTER):
                self.ranks.dropped.append(Fate(shown, "", _UNUSED_COPY))
            return
        full = prefix_of(tp_rank) + name
        if full in into:
            raise CheckpointError(f"{self.folder.path}: {shown} is there twice, as {self.ranks.shown[full]} too: it is"
                                  " a mixture of two saves")  # fmt: skip
        into[full] = found
        self.ranks.shown.setdefault(full, shown)

    def _add_modules(self) -> None:
        for key, stored in self.layers.items():
            tp_rank, _, raw = key.partition("|")
            self._put(self.ranks.modules, int(tp_rank), raw, stored)
        for mp, states in self.states.items():
            for raw, record in states.module.items():
                if self.folder.zero_models and 0 in record.shape:
                    self.ranks.dropped.append(Fate(f"mp_rank_{mp:02d}: {raw}", "", _PARTITIONED))
                    if (name := self._name(raw, mp // self.tp)) is not None:
                        self.ranks.dtypes[prefix_of(mp % self.tp) + name] = dtype_of(record)
                else:
                    self._put(self.ranks.modules, mp, raw, Stored.whole(record))
        self.ranks.dtypes |= {name: stored.dtype for name, stored in self.ranks.modules.items()}

    def _add_zero(self) -> None:
        for mp, states in self.states.items():
            if self.folder.zero_models:
                require_devices(self.folder.zero_models[mp], self.folder.optimizers[mp])
            of_all = [states]
            if states.frozen_shapes and self.folder.zero_models:
                of_all += [ModelStates.of(path) for rank, path in sorted(self.folder.zero_models[mp].items()) if rank]
            first, by_kind = gather(of_all, self.folder.optimizers[mp], moments=self.moments)
            if mp and first.step != self.ranks.step:
                raise CheckpointError(f"{self.folder.path}: the optimizer of mp_rank_{mp:02d} has made {first.step}"
                                      f" steps, that of mp_rank_00 {self.ranks.step}: the files are of different"
                                      " saves")  # fmt: skip
            self.ranks.step, self.ranks.loss_scale = first.step, first.loss_scale
            for kind, tensors in by_kind.items():
                into = self.ranks.kept.setdefault(kind, {})
                for raw, stored in tensors.items():
                    self._put(into, mp, raw, stored)

    def _add_universal(self) -> None:
        info = self.ranks.states.universal_info
        original, padded = (number(info.get(name)) for name in ("original_vocab_size", "padded_vocab_size"))
        shapes: dict[str, tuple[int, ...]] = {}
        for states in reversed(self.states.values()):
            shapes |= {**{name: record.shape for name, record in states.module.items()}, **states.shapes}
        for raw, folder in parameters(self.folder.universal):
            shape = shapes.get(raw)
            for kind, file in FILES.items():
                if (kind == MASTER or self.moments) and (folder / file).exists():
                    shares = read_parameter(folder / file, shape, self.tp, int(padded) if padded else None)
                    for tp_rank, share in enumerate(shares):
                        self._put(self.ranks.kept.setdefault(kind, {}), tp_rank, raw, share)
        path = next(iter(self.folder.universal.values())) / STEP
        self.ranks.step = whole(TorchFile(path).tree) if path.exists() else None
        if (path := self.folder.path / "zero" / "optimizer_state.pt").exists():
            self.ranks.loss_scale = scale_of_deepspeed(as_dict(TorchFile(path).tree, str(path)).get("loss_scaler"))
        self.ranks.vocab_size = int(original) if original else None


class Weights:
    """The weights of all ranks, where the optimizer's copies must round to the model's own (a ``TensorStore``)."""

    def __init__(self, ranks: Ranks, *, wide: bool) -> None:
        self._modules, self._masters = Stretches(ranks.modules), kept(ranks, MASTER)
        self._shown, self._kept = ranks.shown, ranks.kept.get(MASTER, {})
        self._tensors = {**self._modules.tensors(), **self._masters.tensors()}
        if not wide:
            for name, info in self._tensors.items():
                self._tensors[name] = TensorInfo(info.shape, ranks.computed_in(name, info.dtype))

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        if name not in self._masters.tensors():
            return self._modules.read(name)
        master = self._masters.read(name)
        if name in self._modules.tensors():
            self._compare(name, master)
        return master.to(self._tensors[name].dtype)

    def _compare(self, name: str, master: Tensor) -> None:
        own = self._modules.tensors()[name]
        if own.shape != tuple(master.shape):
            raise CheckpointError(f"{self._shown[name]} is {list(own.shape)} in the model and {list(master.shape)} in"
                                  " the optimizer's: they are of different saves")  # fmt: skip
        stored = self._kept[name]
        # padding is not in universal files
        flat = master.reshape(-1)[: stored.num_stored if isinstance(stored, Share) else None]
        for start, block in self._modules.blocks(name):
            wide = flat[start : start + block.numel()].to(own.dtype)
            if not is_same(wide, block[: wide.numel()]):
                raise CheckpointError(f"{self._shown[name]}: the model's weights are not those of the optimizer rounded"
                                      f" to {own.dtype}: the files are of different saves")  # fmt: skip


def kept(ranks: Ranks, kind: str) -> TensorStore:
    tensors = ranks.kept.get(kind, {})
    shares = {name: item for name, item in tensors.items() if isinstance(item, Share)}
    stored = {name: item for name, item in tensors.items() if isinstance(item, Stored)}
    return Shares(shares) if shares else Stretches(stored)
