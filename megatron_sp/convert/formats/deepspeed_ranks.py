"""Loader of a DeepSpeed checkpoint in any layout, as tensors of tensor parallel ranks under our names.

Data parallel ranks, pipeline stages and universal folders are resolved here: the result is one set of tensors for each
tensor parallel rank, ``tp0.decoder.layers.0.self_attention.linear_qkv.weight``, as in a Megatron checkpoint of as many
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp.convert.archive.torch_files import TensorRecord
from megatron_sp.convert.copies import TensorInfo, TensorStore, is_same
from megatron_sp.convert.formats.counters import scale_of_deepspeed
from megatron_sp.convert.formats.deepspeed_files import Files, Stored, Stretches, dtype_of
from megatron_sp.convert.formats.deepspeed_folder import StepFolder
from megatron_sp.convert.formats.deepspeed_names import PipelineNames, is_pipeline
from megatron_sp.convert.formats.deepspeed_owners import require_devices, written_by
from megatron_sp.convert.formats.deepspeed_states import ModelStates, as_dict, number, plain_name
from megatron_sp.convert.formats.deepspeed_universal import FILES, STEP, Share, Shares, parameters, read_parameter
from megatron_sp.convert.formats.deepspeed_zero import MASTER, gather, whole_number
from megatron_sp.convert.formats.megatron_names import canonical
from megatron_sp.convert.formats.rank_order import require_one_save
from megatron_sp.convert.model import Fate, LossScale
from megatron_sp.utils.errors import CheckpointError

_UNUSED_COPY = "the head's copy of it, which the model does not use"
_PARTITIONED = "empty: ZeRO stage 3 keeps it in the optimizer's files"


def _dtypes_in(states: ModelStates) -> set[torch.dtype]:
    """Return the dtypes in the arguments of the run, for files without any of the model's own weights."""
    args = states.args.attributes if states.args else {}
    return {dtype for flag, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if args.get(flag) is True}


def prefix_of(tp_rank: int) -> str:
    """Return the name prefix of a rank's tensors."""
    return f"tp{tp_rank}."


@dataclass
class Ranks:
    """Contents of a whole checkpoint, by tensor parallel rank.

    Attributes:
        states: model states of the first file.
        tp: number of tensor parallel ranks.
        modules: the model's own weights, possibly in 16 bits.
        dtypes: dtypes of the model's own weights, also of those that only the optimizer stores.
        kept: the optimizer's tensors, by kind.
        step: updates of the optimizer; None: unknown.
        loss_scale: loss scale of fp16; None: there is none.
        dropped: tensors that do not belong to the model.
        shown: names used in the files.
        vocab_size: number of entries without padding, if the files state it.
    """

    states: ModelStates
    tp: int
    modules: dict[str, Stored] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    kept: dict[str, dict[str, Stored | Share]] = field(default_factory=dict)
    step: int | None = None
    loss_scale: LossScale | None = None
    dropped: list[Fate] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)
    vocab_size: int | None = None

    def computed_in(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Return the dtype of a weight in the model, given the dtype in which it is stored, which is at least as wide."""
        found = self.dtypes.get(name) or self._common_dtype or stored
        return found if found.itemsize < stored.itemsize else stored

    @cached_property
    def _common_dtype(self) -> torch.dtype | None:
        every = set(self.dtypes.values()) or _dtypes_in(self.states)
        return every.pop() if len(every) == 1 else None

    def names(self, tp_rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a rank's tensors by our names."""
        prefix = prefix_of(tp_rank)
        everything = {**self.modules, **self.kept.get(MASTER, {})}
        return {name.removeprefix(prefix): stored.shape for name, stored in everything.items() if name.startswith(prefix)}


class Loader:
    """Loader of a step folder.

    Args:
        moments: whether to load the optimizer's moments.
    """

    def __init__(self, files: Files, folder: StepFolder, *, moments: bool) -> None:
        self.files, self.folder, self.moments = files, folder, moments
        self.states = {mp: ModelStates.of(files, path) for mp, path in self._model_files().items()}
        self.layers = dict(self._layer_tensors())
        self._raw = [*self.layers, *(name for s in self.states.values() for name in (*s.module, *s.shapes)), *folder.universal]
        self.is_pipeline = bool(folder.layers) or is_pipeline(self._raw)
        self.tp = self._tp()
        self.pipeline = (
            PipelineNames({n.partition("|")[2] if "|" in n else n for n in self._raw}, str(folder.path)) if self.is_pipeline else None
        )
        self.stack = "encoder" if any(name.startswith("lm_head.dense.") for name in self._raw) else "decoder"
        self.ranks = Ranks(self.states[0], self.tp)

    def load(self) -> Ranks:
        """Load everything in the folder. Raises CheckpointError."""
        require_one_save(written_by(self.files, self.folder.zero_models or {mp: {0: path} for mp, path in self.folder.models.items()}))
        self._add_modules()
        if self.folder.universal:
            self._add_universal()
        elif self.folder.optimizers:
            self._add_zero()
        elif self.folder.zero_models:
            raise CheckpointError(f"{self.folder.path} is of ZeRO stage 3, where the weights are in the files *_optim_states.pt, and there"
                                  " are none: copy them too")  # fmt: skip
        return self.ranks

    def _model_files(self) -> dict[int, Path]:
        return self.folder.models or {mp: files[0] for mp, files in sorted(self.folder.zero_models.items())}

    def _layer_tensors(self) -> Iterator[tuple[str, Stored]]:
        """Yield the tensors in the files of layers, named "<tp rank>|<layer>.<name>"."""
        for layer, by_tp in sorted(self.folder.layers.items()):
            for tp_rank, path in sorted(by_tp.items()):
                for name, item in as_dict(self.files.tree(path), str(path)).items():
                    if isinstance(item, TensorRecord) and isinstance(name, str):
                        yield f"{tp_rank}|{layer}.{plain_name(name)}", Stored.whole(path, item)

    def _tp(self) -> int:
        """Return the number of ranks that share each tensor: all, unless there are stages."""
        num_mp = self.folder.num_mp
        if self.folder.layers:
            tp = len(next(iter(self.folder.layers.values())))
        else:
            tp = self._tp_of_args() or num_mp
        if num_mp % tp:
            raise CheckpointError(f"{self.folder.path} has {num_mp} mp ranks, which are not a multiple of its {tp} tensor parallel ranks:"
                                  " files are missing")  # fmt: skip
        if num_mp != tp and not self.is_pipeline:
            raise CheckpointError(f"{self.folder.path} has {num_mp} mp ranks for {tp} tensor parallel ranks, but no stages of a pipeline:"
                                  " files are missing, or left over from another save")  # fmt: skip
        return tp

    def _tp_of_args(self) -> int:
        args = self.states[0].args
        found = number(args.attributes.get("tensor_model_parallel_size")) if args else None
        return int(found) if found and found >= 1 else 0

    def _name(self, raw: str, stage: int) -> str | None:
        """Return our name of a parameter; None for an unused copy."""
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
            raise CheckpointError(
                f"{self.folder.path}: {shown} is there twice, as {self.ranks.shown[full]} too: it is a mixture of two saves"
            )
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
                        self.ranks.dtypes[prefix_of(mp % self.tp) + name] = dtype_of(states.path, record)
                else:
                    self._put(self.ranks.modules, mp, raw, Stored.whole(states.path, record))
        self.ranks.dtypes |= {name: stored.dtype for name, stored in self.ranks.modules.items()}

    def _add_zero(self) -> None:
        for mp, states in self.states.items():
            if self.folder.zero_models:
                require_devices(self.files, self.folder.zero_models[mp], self.folder.optimizers[mp])
            of_all = [states]
            if states.frozen_shapes and self.folder.zero_models:
                of_all += [ModelStates.of(self.files, path) for rank, path in sorted(self.folder.zero_models[mp].items()) if rank]
            found = gather(self.files, of_all, self.folder.optimizers[mp], moments=self.moments)
            self._same_step(found.step, mp)
            self.ranks.loss_scale = found.loss_scale
            for kind, tensors in found.tensors.items():
                into = self.ranks.kept.setdefault(kind, {})
                for raw, stored in tensors.items():
                    self._put(into, mp, raw, stored)

    def _same_step(self, step: int | None, mp: int) -> None:
        if mp and step != self.ranks.step:
            raise CheckpointError(f"{self.folder.path}: the optimizer of mp_rank_{mp:02d} has made {step} steps, that of mp_rank_00"
                                  f" {self.ranks.step}: the files are of different saves")  # fmt: skip
        self.ranks.step = step

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
                    shares = read_parameter(self.files, folder / file, shape, self.tp, int(padded) if padded else None)
                    for tp_rank, share in enumerate(shares):
                        self._put(self.ranks.kept.setdefault(kind, {}), tp_rank, raw, share)
        self.ranks.step = self._universal_step()
        if (path := self.folder.path / "zero" / "optimizer_state.pt").exists():
            self.ranks.loss_scale = scale_of_deepspeed(as_dict(self.files.tree(path), str(path)).get("loss_scaler"))
        self.ranks.vocab_size = int(original) if original else None

    def _universal_step(self) -> int | None:
        folder = next(iter(self.folder.universal.values()))
        path = folder / STEP
        return whole_number(self.files, path, self.files.tree(path)) if path.exists() else None


class Weights:
    """The weights of all ranks; the optimizer's copies are checked against the model's own weights (a ``TensorStore``).

    Args:
        wide: return the optimizer's copies where there are any, instead of the weights rounded as the model computes
            with them.
    """

    def __init__(self, files: Files, ranks: Ranks, *, wide: bool) -> None:
        self._modules, self._masters = Stretches(files, ranks.modules), kept(files, ranks, MASTER)
        self._shown, self._kept = ranks.shown, ranks.kept.get(MASTER, {})
        self._tensors = {**self._modules.tensors(), **self._masters.tensors()}
        if not wide:
            self._tensors |= {name: TensorInfo(info.shape, ranks.computed_in(name, info.dtype)) for name, info in self._tensors.items()}

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
        """Check that the model's own weights are those of the optimizer, rounded. Raises CheckpointError."""
        own = self._modules.tensors()[name]
        if own.shape != tuple(master.shape):
            raise CheckpointError(f"{self._shown[name]} is {list(own.shape)} in the model and {list(master.shape)} in the optimizer's:"
                                  " they are of different saves")  # fmt: skip
        stored = self._kept[name]
        flat = master.reshape(-1)[: stored.num_stored if isinstance(stored, Share) else None]  # padding is not in universal files
        for at, block in self._modules.blocks(name):
            wide = flat[at : at + block.numel()].to(own.dtype)
            if not is_same(wide, block[: wide.numel()]):
                raise CheckpointError(f"{self._shown[name]}: the model's weights are not those of the optimizer rounded to {own.dtype}: the"
                                      " files are of different saves")  # fmt: skip


def kept(files: Files, ranks: Ranks, kind: str) -> TensorStore:
    """Return the optimizer's tensors of one kind."""
    found = ranks.kept.get(kind, {})
    shares = {name: item for name, item in found.items() if isinstance(item, Share)}
    return Shares(files, shares) if shares else Stretches(files, {name: item for name, item in found.items() if isinstance(item, Stored)})
