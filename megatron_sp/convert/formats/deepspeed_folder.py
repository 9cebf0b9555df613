"""Contents of a folder saved by DeepSpeed, identified by the names of its files.

    latest, latest_universal                                     name of the newest step folder
    global_step5/mp_rank_00_model_states.pt                      weights of a tensor parallel rank, settings
                 layer_03-model_01-model_states.pt               with pipeline stages: weights of a layer and tensor parallel rank
                 [bf16_]zero_pp_rank_1_mp_rank_00_optim_states.pt    ZeRO: optimizer state of a data parallel rank
                 zero_pp_rank_1_mp_rank_00_model_states.pt       stage 3: replaces mp_rank_00_model_states.pt
                 zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt  made by ds_to_universal.py

Source: deepspeed 0.19.8, runtime/engine.py :: _get_ckpt_name, runtime/pipe/module.py :: ckpt_layer_path,
checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from megatron_sp.convert.folders import require_inside
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import read_small_file

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
    """The files of one step.

    Attributes:
        path: the folder.
        models: model states by model parallel rank (stage * tp + tp rank).
        layers: layer files by layer number and tensor parallel rank.
        zero_models, optimizers: files by model parallel rank and data parallel rank.
        universal: folders of parameters, by name.
    """

    path: Path
    models: dict[int, Path] = field(default_factory=dict)
    layers: Ranks = field(default_factory=lambda: defaultdict(dict))
    zero_models: Ranks = field(default_factory=lambda: defaultdict(dict))
    optimizers: Ranks = field(default_factory=lambda: defaultdict(dict))
    universal: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> StepFolder:
        """List a folder.

        Raises:
            CheckpointError: there is no model, files of some ranks are missing, or it is a mixture of experts or of two
                saves.
        """
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
                raise CheckpointError(f"{self.path} has {other.name} and {name}, which are of one rank: it is a mixture of two saves")
            ranks[int(match[2])][int(match[1])] = file
        elif _EXPERT.fullmatch(name):
            raise CheckpointError(f"{file} holds experts: mixtures of experts cannot be converted, for there is no such model here")

    def _check(self) -> None:
        if not self.models and not self.zero_models:
            raise CheckpointError(f"{self.path} has no file mp_rank_NN_model_states.pt or zero_pp_rank_N_mp_rank_NN_model_states.pt: it is"
                                  " no checkpoint of DeepSpeed, or the files of the model are missing")  # fmt: skip
        if self.models and self.zero_models:
            raise CheckpointError(f"{self.path} has model states of ZeRO stage 3 and of a lower stage: it is a mixture of two saves")
        self._require_all("mp_rank", self.models or self.zero_models)
        for what, ranks in (("model states", self.zero_models), ("optimizer states", self.optimizers)):
            for rank, files in ranks.items():
                self._require_all(f"{what} of mp_rank_{rank:02d}: zero_pp_rank", files)
            sizes = {len(files) for files in ranks.values()}
            if len(sizes) > 1:
                raise CheckpointError(
                    f"{self.path}: mp ranks have {' and '.join(map(str, sorted(sizes)))} files of {what}: some are missing"
                )
        if self.optimizers and self.optimizers.keys() != (self.models or self.zero_models).keys():
            raise CheckpointError(f"{self.path} has optimizer states of mp ranks {sorted(self.optimizers)} and model states of"
                                  f" {sorted(self.models or self.zero_models)}: they must be the same; copy what is missing")  # fmt: skip
        for layer, by_tp in self.layers.items():
            if by_tp.keys() != self.layers[min(self.layers)].keys() or by_tp.keys() != set(range(len(by_tp))):
                raise CheckpointError(f"{self.path}: layer {layer} has files of the tp ranks {sorted(by_tp)}: some are missing")

    def _require_all(self, what: str, ranks: dict[int, Path] | Ranks) -> None:
        if missing := sorted(set(range(max(ranks) + 1)) - ranks.keys()):
            raise CheckpointError(f"{self.path}: {what} goes to {max(ranks)}, but {missing[:8]} are missing: copy all files")

    @property
    def num_mp(self) -> int:
        """Number of model parallel ranks: tp times stages."""
        return len(self.models or self.zero_models)


def is_there(path: Path) -> bool:
    """Return whether a folder, or a direct subfolder, has files named as by DeepSpeed."""
    return any(path.glob("*_model_states.pt")) or any(path.glob("*/*_model_states.pt"))


def find(path: Path, step: int | None) -> StepFolder:
    """Return the requested step folder.

    Args:
        path: a step folder, or its parent.
        step: number of the step; None: the folder that ``latest`` names.
    Raises:
        CheckpointError: there is no such folder, or it is ambiguous which one is meant.
    """
    if any(path.glob("*_model_states.pt")):
        if step is not None and (match := _STEP_FOLDER.fullmatch(path.name)) and int(match[1]) != step:
            raise CheckpointError(f"--step {step}, but --input is {path.name}: give the folder above it, or no --step")
        return StepFolder.of(path)
    folders = {p.name: p for p in sorted(path.iterdir()) if p.is_dir() and any(p.glob("*_model_states.pt"))}
    name = _name_of_step(path, folders, step) if step is not None else _newest(path, folders)
    require_inside(folders[name], path)
    return StepFolder.of(folders[name])


def _name_of_step(path: Path, folders: dict[str, Path], step: int) -> str:
    for name in (f"global_step{step}", f"global_step{step}_universal"):
        if name in folders:
            return name
    raise CheckpointError(f"{path} has no global_step{step}: there are {', '.join(folders) or 'none'}")


def _newest(path: Path, folders: dict[str, Path]) -> str:
    """Return the name in the first tracker file that exists, or the only step folder."""
    for mark, pattern in (("latest", "{}"), ("latest_universal", "{}"), ("latest_checkpointed_iteration.txt", "global_step{}")):
        if (path / mark).exists() or (path / mark).is_symlink():
            text = read_small_file(path / mark, 4096).decode("utf-8", "replace").strip()
            name = pattern.format(text)
            if not _PLAIN_NAME.fullmatch(name):
                raise CheckpointError(f"{path / mark} names {name[:100]!r}, which is not a plain name of a folder: give --step N")
            if name not in folders:
                raise CheckpointError(
                    f"{path / mark} names {name}, which is not there: there are {', '.join(folders) or 'none'}; give --step N"
                )
            return name
    if len(folders) != 1:
        raise CheckpointError(f"{path} has no file named latest, and {', '.join(folders) or 'no step folder'}: give --step N")
    return next(iter(folders))


def step_in_name(folder: Path) -> int:
    """Return N of a folder named global_stepN; 0 for other names."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else 0
