"""``megatron-deepspeed``: checkpoints of Megatron-DeepSpeed with any ZeRO stage, with pipeline stages, and universal ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_sp.convert.copies import Correspondence, Gathered, TensorInfo, TensorStore
from megatron_sp.convert.coverage import Coverage, match_tensors
from megatron_sp.convert.families.settings import Settings
from megatron_sp.convert.formats import deepspeed_write
from megatron_sp.convert.formats.counters import scheduled_of
from megatron_sp.convert.formats.deepspeed_files import Files
from megatron_sp.convert.formats.deepspeed_folder import StepFolder, find, is_there, step_in_name
from megatron_sp.convert.formats.deepspeed_ranks import Loader, Ranks, Weights, kept, prefix_of
from megatron_sp.convert.formats.deepspeed_zero import MASTER, MOMENTS
from megatron_sp.convert.formats.format import Progress
from megatron_sp.convert.formats.megatron_args import config_of, neighbours_of
from megatron_sp.convert.formats.megatron_facts import Facts, facts_of
from megatron_sp.convert.formats.megatron_names import ignored
from megatron_sp.convert.formats.megatron_shards import HEAD, Cut, QkvOrder, Shard, shard_copies
from megatron_sp.convert.formats.megatron_vocab import true_size
from megatron_sp.convert.model import OPTIMIZER, Model, parameter_shapes, require_sound
from megatron_sp.convert.options import Options
from megatron_sp.convert.tokenizer_files import find_files
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
        folder, files = find(path, options.step), Files()
        ranks = Loader(files, folder, moments=options.optimizer).load()
        return _Reading(folder, files, ranks, options).model()

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        deepspeed_write.write(model, path, options, progress)

    def size(self, model: Model, options: Options) -> int:
        return deepspeed_write.size(model, options)


class _Reading:
    """Conversion of the tensors of ranks to a model of ours."""

    def __init__(self, folder: StepFolder, files: Files, ranks: Ranks, options: Options) -> None:
        self.folder, self.files, self.ranks, self.options = folder, files, ranks, options
        args = ranks.states.args
        self.settings = Settings(args.attributes if args else {}, str(ranks.states.path))
        self.facts = self._facts()
        self.config = config_of(self.settings, self.facts, options.given, self._vocab_size(), legacy=True)
        require_sound(self.config, len(ranks.names(0)), str(folder.path))
        order = self._order()
        neighbours = neighbours_of(self.settings, self.config, order)
        self.cut = Cut(self.config, ranks.tp, order, self.facts.padded_vocab_size, neighbours=neighbours)
        self.shapes = parameter_shapes(self.config)

    def model(self) -> Model:
        weights = Weights(self.files, self.ranks, wide=self._takes_copies())
        fitted = self._fit(weights, self.shapes)
        parts: list[tuple[str, Gathered]] = [("", Gathered(fitted.correspondence, weights))]
        for kind in self._kinds():
            store = kept(self.files, self.ranks, kind)
            parts.append((f"{OPTIMIZER}{kind}.", Gathered(self._fit(store, self._trained()).correspondence, store)))
        states = self.ranks.states
        step = states.count("iteration", "global_steps") or step_in_name(self.folder.path) or self.ranks.step or 0
        return Model(
            self.config, _Together(parts), step=step, consumed_samples=self._consumed(),
            scheduled_samples=scheduled_of(states.settings, self._consumed()), fates=[*fitted.fates, *self.ranks.dropped],
            tokenizer=find_files(self.options.tokenizer) if self.options.tokenizer else {}, notes=self._notes(),
            num_updates=self.ranks.step, loss_scale=self.ranks.loss_scale,
        )  # fmt: skip

    def _consumed(self) -> int:
        value = self.settings.document.get("consumed_train_samples")
        return value if is_count(value) else self.ranks.states.count("global_samples")

    def _facts(self) -> Facts:
        first = self.ranks.names(0)
        try:
            return facts_of(first, first, tp=self.ranks.tp, num_layers=len({n.split(".")[2] for n in first if ".layers." in n}))
        except KeyError as error:
            has = ", ".join(name[:80] for name in list(first)[:5])
            raise CheckpointError(
                f"{self.folder.path} has no {error.args[0]}, but {has or 'no tensors'}: it is neither a GPT nor a BERT"
            ) from None

    def _vocab_size(self) -> int:
        options = self.options
        if options.vocab_size is None and self.ranks.vocab_size is not None:
            options = replace(options, vocab_size=self.ranks.vocab_size)
        return true_size(self.settings, self.facts.padded_vocab_size, self.ranks.tp, options)

    def _order(self) -> QkvOrder:
        """Return the row order of fused projections; the user may have to give it, as it has changed without a new checkpoint version."""
        said = self.ranks.states.settings.get(deepspeed_write.QKV_LAYOUT)  # present in files that were written here
        version = self.ranks.states.settings.get("checkpoint_version")
        if self.options.qkv_layout is not None:
            return self.options.qkv_layout
        if said in ("interleaved", "flat"):
            return said
        if isinstance(version, int | float) and float(version) in _OLD_ORDERS:
            return _OLD_ORDERS[float(version)]
        if self.config.num_groups == self.ranks.tp:
            return "interleaved"  # with one group per rank both orders are the same
        raise ConfigError(
            f"{self.folder.path} does not say in which order the rows of queries, keys and values are: give --qkv-layout flat if"
            " Megatron-DeepSpeed of December 2024 (pull request 441) or later wrote it, --qkv-layout interleaved if an earlier one did"
        )

    def _places(self) -> list[Shard]:
        assert self.config.num_layers
        return [Shard(prefix_of(rank), rank, 0, self.config.num_layers, True, True) for rank in range(self.ranks.tp)]

    def _fit(self, store: TensorStore, shapes: Mapping[str, tuple[int, ...]]) -> Coverage:
        prefixes = {prefix_of(rank) for rank in range(self.ranks.tp)} if self._is_tied() else set()
        tied = {prefix for prefix in prefixes if prefix + HEAD in store.tensors()}
        copies, filled = shard_copies(self.cut, shapes, self._places(), tied_heads=tied)
        correspondence = Correspondence.of(dict(shapes), copies, filled)
        dropped = {rf"tp[0-9]+\.{pattern}": why for pattern, why in ignored().items()}
        return match_tensors(str(self.folder.path), correspondence, store, dropped, tied={}, shown=self.ranks.shown)

    def _is_tied(self) -> bool:
        return self.config.is_bert or not self.config.untie_embeddings_and_output_weights

    def _trained(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters that the optimizer has; the others were frozen."""
        copies, _ = shard_copies(self.cut, self.shapes, self._places())
        there = self.ranks.kept[MASTER]
        frozen = {copy.ours.name for copy in copies if copy.theirs.name not in there}
        return {name: shape for name, shape in self.shapes.items() if name not in frozen}

    def _kinds(self) -> Iterable[str]:
        """Return the kinds of the optimizer's tensors to convert: its fp32 copies too, unless they become the weights."""
        if not self.options.optimizer or any(kind not in self.ranks.kept for kind in MOMENTS):
            return ()
        return (MASTER, *MOMENTS) if not self._takes_copies() and self._is_narrow() else MOMENTS

    def _takes_copies(self) -> bool:
        """Return whether the weights are made from the optimizer's fp32 copies, which is so if the requested dtype is not narrower."""
        return self.options.dtype is not None and self.options.dtype.itemsize >= torch.float32.itemsize

    def _is_narrow(self) -> bool:
        """Return whether the model computes with narrower weights than the optimizer keeps."""
        there = {name: stored.info.dtype for name, stored in self.ranks.kept[MASTER].items()}
        return any(self.ranks.computed_in(name, dtype).itemsize < dtype.itemsize for name, dtype in there.items())

    def _notes(self) -> list[str]:
        notes = []
        if self.options.optimizer and self.ranks.states.settings.get("optimizer") and not self.ranks.kept:
            notes.append("the optimizer's state of ZeRO stage 0 has no names of parameters and is left behind; the weights are all there")
        if not self.settings.document:
            notes.append("it holds no arguments: sizes are taken from its tensors, the rest from --set or Megatron's defaults")
        return notes


class _Together:
    """Several stores as one, each with its own name prefix (a ``TensorStore``)."""

    def __init__(self, parts: list[tuple[str, Gathered]]) -> None:
        self._parts = {f"{prefix}{name}": (store, name) for prefix, store in parts for name in store.tensors()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: store.tensors()[own] for name, (store, own) in self._parts.items()}

    def read(self, name: str) -> Tensor:
        store, own = self._parts[name]
        return store.read(own)
