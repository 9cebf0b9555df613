"""Access to many torch files, and tensors assembled from stretches of the tensors in them.

A tensor of a ZeRO checkpoint is split over the files of all data parallel ranks. ``Stored`` lists the stretches of the
files that it consists of; ``Stretches`` reads them block by block into the tensor, so that memory holds only the tensor
and one block.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_sp.convert.archive.torch_files import TensorRecord, require_dtype
from megatron_sp.convert.copies import TensorInfo
from megatron_sp.convert.formats.format import require_inside
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import read_small_file

_BLOCK = 4 << 20  # elements that are read at once where a tensor has several parts


@dataclass(frozen=True)
class Stretch:
    """``count`` elements of a tensor in a file, in row-major order, from ``first`` on."""

    record: TensorRecord
    first: int
    count: int

    def read(self) -> Tensor:
        record = self.record
        if not is_contiguous(record):
            return record.read().reshape(-1)[self.first : self.first + self.count]
        return replace(record, offset=record.offset + self.first, shape=(self.count,), stride=(1,)).read()


@dataclass(frozen=True)
class Stored:
    """A tensor that is the concatenation of stretches."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stretches: tuple[Stretch, ...]

    @classmethod
    def whole(cls, record: TensorRecord, shape: tuple[int, ...] | None = None) -> Stored:
        """Describe a tensor of a file, optionally with another shape."""
        shape = record.shape if shape is None else shape
        numel = torch.Size(shape).numel()
        if numel != record.numel:
            raise CheckpointError(f"{record.file.path} has {record.numel:,} elements where {list(shape)} are {numel:,}:"
                                  " it is of another model, or damaged")  # fmt: skip
        return cls(tuple(shape), dtype_of(record), (Stretch(record, 0, numel),))

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.shape, self.dtype)


class Stretches:
    """Tensors by name, assembled from their stretches (a ``TensorStore``)."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = stored

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: stored.info for name, stored in self.stored.items()}

    def read(self, name: str) -> Tensor:
        stored = self.stored[name]
        if len(stored.stretches) == 1 and stored.stretches[0].count == stored.stretches[0].record.numel:
            return stored.stretches[0].record.read().contiguous().view(stored.shape)
        made = torch.empty(torch.Size(stored.shape).numel(), dtype=stored.dtype)
        for at, block in self.blocks(name):
            made[at : at + block.numel()] = block
        return made.view(stored.shape)

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the elements in order, as (position, [n]) with bounded n."""
        at = 0
        for stretch in self.stored[name].stretches:
            for first in range(0, stretch.count, _BLOCK):
                count = min(_BLOCK, stretch.count - first)
                yield at, Stretch(stretch.record, stretch.first + first, count).read()
                at += count


def is_contiguous(record: TensorRecord) -> bool:
    """Return whether the elements are stored in row-major order without gaps."""
    wanted = 1
    for size, stride in zip(reversed(record.shape), reversed(record.stride), strict=True):
        if size != 1 and stride != wanted:
            return False
        wanted *= size
    return True


def dtype_of(record: TensorRecord) -> torch.dtype:
    return require_dtype(record.dtype, f"{record.file.path}: a tensor")


EMBEDDING, BLOCKS = "language_model.embedding.", "language_model.encoder.layers."
FINAL_NORM, HEAD = "language_model.encoder.final_layernorm.", "language_model.output_layer."
TIED_COPY = "word_embeddings_for_head.weight"
_TIED = "tied_modules.embed."
_NUMBERED = re.compile(r"([0-9]{1,4})\.(.+)")
_IN_BLOCK = re.compile(r"(self_attention|attention|mlp|input_layernorm)\..+")
_IN_EMBEDDING = re.compile(r"(word_embeddings|position_embeddings|tokentype_embeddings)\..+")


def is_pipeline(names: Iterable[str]) -> bool:
    """Return whether the names are those of a pipeline with numbered layers."""
    return any(name.startswith(_TIED) or _NUMBERED.fullmatch(name) for name in names)


class PipelineNames:
    """Translator of the parameter names of a pipeline, whose layers are numbered, to those without a pipeline.

        1.word_embeddings.weight                     language_model.embedding.word_embeddings.weight
        tied_modules.embed.word_embeddings.weight    the same (first stage); word_embeddings_for_head.weight (last one)
        2.input_layernorm.weight                     language_model.encoder.layers.0.input_layernorm.weight
        26.weight                                    language_model.encoder.final_layernorm.weight
        27.lm_head.weight                            language_model.output_layer.weight

    The numbers differ between versions (some have a layer before the first block that only transposes dims), so the
    kind of a layer is determined by its parameters. Source: Megatron-DeepSpeed, gpt_model.py :: GPTModelPipe;
    deepspeed 0.19.8, runtime/pipe/module.py.
    """

    def __init__(self, names: Iterable[str], where: str) -> None:
        self._where = where
        numbered = [(int(m[1]), m[2]) for name in names if (m := _NUMBERED.fullmatch(name))]
        self._blocks = sorted({number for number, rest in numbered if _IN_BLOCK.fullmatch(rest)})
        if not self._blocks or self._blocks != list(range(self._blocks[0], self._blocks[-1] + 1)):
            raise CheckpointError(f"{where} has the layers {self._blocks[:20]} with attention: they must follow each"
                                  " other; files are missing")  # fmt: skip

    def translate(self, name: str, *, first_stage: bool = True) -> str | None:
        """Return the name without a pipeline; None for a copy that the model never uses."""
        if name.startswith(_TIED):
            return self._tied(name.removeprefix(_TIED), first_stage)
        match = _NUMBERED.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{self._where}: {name[:200]} is in no numbered layer, as all parameters of a"
                                  " pipeline are")  # fmt: skip
        number, rest = int(match[1]), match[2]
        if number in self._blocks:
            return f"{BLOCKS}{number - self._blocks[0]}.{rest}"
        if _IN_EMBEDDING.fullmatch(rest):
            return self._tied(rest, number < self._blocks[0])
        if number > self._blocks[-1] and rest in ("weight", "bias"):
            return FINAL_NORM + rest
        if number > self._blocks[-1] and rest.startswith("lm_head."):
            return HEAD + rest.removeprefix("lm_head.")
        raise CheckpointError(f"{self._where}: layer {number} has {rest[:200]}; layers of this pipeline are an"
                              f" embedding, blocks ({self._blocks[0]} to {self._blocks[-1]}), a norm and a"
                              " head")  # fmt: skip

    def _tied(self, rest: str, first_stage: bool) -> str | None:
        if first_stage:
            return EMBEDDING + rest
        return TIED_COPY if rest == "word_embeddings.weight" else None


_MODEL = re.compile(r"mp_rank_([0-9]{1,4})_model_states\.pt")
_LAYER = re.compile(r"layer_([0-9]{1,4})(?:-model_([0-9]{1,4}))?-model_states\.pt")
_ZERO = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{1,4})_(model|optim)_states\.pt")
_EXPERT = re.compile(r"(layer_[0-9]+_)?expert_[0-9]+_mp_rank_.*|expp_rank_.*")
_STEP_FOLDER = re.compile(r"global_step([0-9]{1,15})(_universal)?")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_UNIVERSAL = "zero"

Ranks = dict[int, dict[int, Path]]


@dataclass
class StepFolder:
    """The files of one step, identified by their names.

        latest, latest_universal                                     name of the newest step folder
        global_step5/mp_rank_00_model_states.pt                      weights of a tensor parallel rank, settings
            layer_03-model_01-model_states.pt                        with pipeline stages: weights of a layer and rank
            [bf16_]zero_pp_rank_1_mp_rank_00_optim_states.pt         ZeRO: optimizer state of a data parallel rank
            zero_pp_rank_1_mp_rank_00_model_states.pt                stage 3: replaces mp_rank_00_model_states.pt
            zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt       made by ds_to_universal.py

    Source: deepspeed 0.19.8, runtime/engine.py :: _get_ckpt_name, runtime/pipe/module.py :: ckpt_layer_path.
    """

    path: Path
    models: dict[int, Path] = field(default_factory=dict)  # model states by model parallel rank (stage * tp + tp rank)
    # layer files by layer number and tensor parallel rank
    layers: Ranks = field(default_factory=lambda: defaultdict(dict))
    # files by model parallel rank and data parallel rank
    zero_models: Ranks = field(default_factory=lambda: defaultdict(dict))
    optimizers: Ranks = field(default_factory=lambda: defaultdict(dict))
    universal: dict[str, Path] = field(default_factory=dict)  # folders of parameters, by name

    @classmethod
    def of(cls, path: Path) -> StepFolder:
        found = cls(path)
        for file in sorted(path.iterdir()):
            found._add(file)
        if (path / _UNIVERSAL).is_dir():
            found.universal = {p.name: p for p in sorted((path / _UNIVERSAL).iterdir()) if p.is_dir()}
            for folder in found.universal.values():
                require_inside(folder, path)
        found._check()
        return found

    def _add(self, file: Path) -> None:
        name = file.name
        if match := _MODEL.fullmatch(name):
            self.models[int(match[1])] = file
        elif match := _LAYER.fullmatch(name):
            self.layers[int(match[1])][int(match[2] or 0)] = file
        elif match := _ZERO.fullmatch(name):
            ranks = self.zero_models if match[3] == "model" else self.optimizers
            if other := ranks[int(match[2])].get(int(match[1])):
                raise CheckpointError(f"{self.path} has {other.name} and {name}, which are of one rank: it is a mixture"
                                      " of two saves")  # fmt: skip
            ranks[int(match[2])][int(match[1])] = file
        elif _EXPERT.fullmatch(name):
            raise CheckpointError(f"{file} holds experts: mixtures of experts cannot be converted, for there is no such"
                                  " model here")  # fmt: skip

    def _check(self) -> None:
        if not self.models and not self.zero_models:
            raise CheckpointError(f"{self.path} has no file mp_rank_NN_model_states.pt or"
                                  " zero_pp_rank_N_mp_rank_NN_model_states.pt: it is no checkpoint of DeepSpeed, or the"
                                  " files of the model are missing")  # fmt: skip
        if self.models and self.zero_models:
            raise CheckpointError(f"{self.path} has model states of ZeRO stage 3 and of a lower stage: it is a mixture"
                                  " of two saves")  # fmt: skip
        self._require_all("mp_rank", self.models or self.zero_models)
        for what, ranks in (("model states", self.zero_models), ("optimizer states", self.optimizers)):
            for rank, files in ranks.items():
                self._require_all(f"{what} of mp_rank_{rank:02d}: zero_pp_rank", files)
            sizes = {len(files) for files in ranks.values()}
            if len(sizes) > 1:
                raise CheckpointError(f"{self.path}: mp ranks have {' and '.join(map(str, sorted(sizes)))} files of"
                                      f" {what}: some are missing")  # fmt: skip
        if self.optimizers and self.optimizers.keys() != (self.models or self.zero_models).keys():
            raise CheckpointError(f"{self.path} has optimizer states of mp ranks {sorted(self.optimizers)} and model"
                                  f" states of {sorted(self.models or self.zero_models)}: they must be the same; copy"
                                  " what is missing")  # fmt: skip
        for layer, by_tp in self.layers.items():
            if by_tp.keys() != self.layers[min(self.layers)].keys() or by_tp.keys() != set(range(len(by_tp))):
                raise CheckpointError(f"{self.path}: layer {layer} has files of the tp ranks {sorted(by_tp)}: some are"
                                      " missing")  # fmt: skip

    def _require_all(self, what: str, ranks: dict[int, Path] | Ranks) -> None:
        if missing := sorted(set(range(max(ranks) + 1)) - ranks.keys()):
            raise CheckpointError(f"{self.path}: {what} goes to {max(ranks)}, but {missing[:8]} are missing: copy all"
                                  " files")  # fmt: skip

    @property
    def num_mp(self) -> int:
        """Number of model parallel ranks: tp times stages."""
        return len(self.models or self.zero_models)


def is_there(path: Path) -> bool:
    """Return whether a folder, or a direct subfolder, has files named as by DeepSpeed."""
    return any(path.glob("*_model_states.pt")) or any(path.glob("*/*_model_states.pt"))


def find(path: Path, step: int | None) -> StepFolder:
    """Return the folder of a step, or of the newest one. Raises CheckpointError if it is not there."""
    if any(path.glob("*_model_states.pt")):
        if step is not None and (match := _STEP_FOLDER.fullmatch(path.name)) and int(match[1]) != step:
            raise CheckpointError(f"--step {step}, but --input is {path.name}: give the folder above it, or no --step")
        return StepFolder.of(path)
    folders = {p.name: p for p in sorted(path.iterdir()) if p.is_dir() and any(p.glob("*_model_states.pt"))}
    if step is None:
        name = _newest(path, folders)
    else:
        name = next((name for name in (f"global_step{step}", f"global_step{step}_universal") if name in folders), "")
        if not name:
            raise CheckpointError(f"{path} has no global_step{step}: there are {', '.join(folders) or 'none'}")
    require_inside(folders[name], path)
    return StepFolder.of(folders[name])


def _newest(path: Path, folders: dict[str, Path]) -> str:
    for mark, pattern in (
        ("latest", "{}"),
        ("latest_universal", "{}"),
        ("latest_checkpointed_iteration.txt", "global_step{}"),
    ):
        if (path / mark).exists() or (path / mark).is_symlink():
            text = read_small_file(path / mark, 4096).decode("utf-8", "replace").strip()
            name = pattern.format(text)
            if not _PLAIN_NAME.fullmatch(name):
                raise CheckpointError(f"{path / mark} names {name[:100]!r}, which is not a plain name of a folder: give"
                                      " --step N")  # fmt: skip
            if name not in folders:
                raise CheckpointError(f"{path / mark} names {name}, which is not there: there are"
                                      f" {', '.join(folders) or 'none'}; give --step N")  # fmt: skip
            return name
    if len(folders) != 1:
        raise CheckpointError(f"{path} has no file named latest, and {', '.join(folders) or 'no step folder'}: give"
                              " --step N")  # fmt: skip
    return next(iter(folders))


def step_in_name(folder: Path) -> int:
    """Return N of a folder named global_stepN; 0 for other names."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else 0
