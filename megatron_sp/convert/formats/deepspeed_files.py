"""The files of a step folder of DeepSpeed, found by their names; their model states; the names of pipelines."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_sp.convert.archive.torch_files import Object, TensorRecord, TorchFile, attributes_of
from megatron_sp.convert.formats.megatron_files import flattened
from megatron_sp.convert.model import require_inside
from megatron_sp.utils.errors import CheckpointError
from megatron_sp.utils.strict_json import read_small_file

_MODEL = re.compile(r"mp_rank_([0-9]{1,4})_model_states\.pt")
_LAYER = re.compile(r"layer_([0-9]{1,4})(?:-model_([0-9]{1,4}))?-model_states\.pt")
_ZERO = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{1,4})_(model|optim)_states\.pt")
_EXPERT = re.compile(r"(layer_[0-9]+_)?expert_[0-9]+_mp_rank_.*|expp_rank_.*")
_STEP_FOLDER = re.compile(r"global_step([0-9]{1,15})(_universal)?")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")

Ranks = dict[int, dict[int, Path]]


@dataclass
class StepFolder:
    """The files of one step, identified by their names.

    Source: deepspeed 0.19.8, runtime/engine.py :: _get_ckpt_name, runtime/pipe/module.py :: ckpt_layer_path.
    """

    # latest, latest_universal                                     name of the newest step folder
    # global_step5/mp_rank_00_model_states.pt                      weights of a tensor parallel rank, settings
    #     layer_03-model_01-model_states.pt                        with pipeline stages: weights of a layer and rank
    #     [bf16_]zero_pp_rank_1_mp_rank_00_optim_states.pt         ZeRO: optimizer state of a data parallel rank
    #     zero_pp_rank_1_mp_rank_00_model_states.pt                stage 3: replaces mp_rank_00_model_states.pt
    #     zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt       made by ds_to_universal.py
    path: Path
    step: int  # N of global_stepN; 0 for other names
    models: dict[int, Path] = field(default_factory=dict)  # model states by model parallel rank (stage * tp + tp rank)
    # layer files by layer number and tensor parallel rank
    layers: Ranks = field(default_factory=lambda: defaultdict(dict))
    # files by model parallel rank and data parallel rank
    zero_models: Ranks = field(default_factory=lambda: defaultdict(dict))
    optimizers: Ranks = field(default_factory=lambda: defaultdict(dict))
    universal: dict[str, Path] = field(default_factory=dict)  # folders of parameters, by name

    @classmethod
    def of(cls, path: Path) -> StepFolder:
        """Find the files of a folder."""
        match = _STEP_FOLDER.fullmatch(path.name)
        step = cls(path, int(match[1]) if match else 0)
        for file in sorted(path.iterdir()):
            if match := _MODEL.fullmatch(file.name):
                step.models[int(match[1])] = file
            elif match := _LAYER.fullmatch(file.name):
                step.layers[int(match[1])][int(match[2] or 0)] = file
            elif match := _ZERO.fullmatch(file.name):
                ranks = step.zero_models if match[3] == "model" else step.optimizers
                if other := ranks[int(match[2])].get(int(match[1])):
                    raise CheckpointError(f"{path} has {other.name} and {file.name}, which are of one rank: it is a"
                                          " mixture of two saves")  # fmt: skip
                ranks[int(match[2])][int(match[1])] = file
            elif _EXPERT.fullmatch(file.name):
                raise CheckpointError(f"{file} holds experts: mixtures of experts cannot be converted, for there is no"
                                      " such model here")  # fmt: skip
        if (path / "zero").is_dir():
            step.universal = {p.name: p for p in sorted((path / "zero").iterdir()) if p.is_dir()}
            for folder in step.universal.values():
                require_inside(folder, path)
        step._require_all()
        return step

    def _require_all(self) -> None:
        path, models = self.path, self.models or self.zero_models
        if not models:
            raise CheckpointError(f"{path} has no file mp_rank_NN_model_states.pt or"
                                  " zero_pp_rank_N_mp_rank_NN_model_states.pt: it is no checkpoint of DeepSpeed, or the"
                                  " files of the model are missing")  # fmt: skip
        if self.models and self.zero_models:
            raise CheckpointError(f"{path} has model states of ZeRO stage 3 and of a lower stage: it is a mixture of"
                                  " two saves")  # fmt: skip
        numbered = [("mp_rank", set(models))]
        of_zero = (("model states", self.zero_models), ("optimizer states", self.optimizers))
        for what, ranks in of_zero:
            numbered += [(f"{what} of mp_rank_{rank:02d}: zero_pp_rank", set(files)) for rank, files in ranks.items()]
        for what, numbers in numbered:
            if missing := sorted(set(range(max(numbers) + 1)) - numbers):
                raise CheckpointError(f"{path}: {what} goes to {max(numbers)}, but {missing[:8]} are missing: copy all"
                                      " files")  # fmt: skip
        for what, ranks in of_zero:
            sizes = {len(files) for files in ranks.values()}
            if len(sizes) > 1:
                raise CheckpointError(f"{path}: mp ranks have {' and '.join(map(str, sorted(sizes)))} files of"
                                      f" {what}: some are missing")  # fmt: skip
        if self.optimizers and self.optimizers.keys() != models.keys():
            raise CheckpointError(f"{path} has optimizer states of mp ranks {sorted(self.optimizers)} and model"
                                  f" states of {sorted(models)}: they must be the same; copy what is"
                                  " missing")  # fmt: skip
        for layer, by_tp in self.layers.items():
            if by_tp.keys() != self.layers[min(self.layers)].keys() or by_tp.keys() != set(range(len(by_tp))):
                raise CheckpointError(f"{path}: layer {layer} has files of the tp ranks {sorted(by_tp)}: some are"
                                      " missing")  # fmt: skip


def find(path: Path, step: int | None) -> StepFolder:
    """Return the folder of a step, or of the newest one."""
    if any(path.glob("*_model_states.pt")):
        if step is not None and (match := _STEP_FOLDER.fullmatch(path.name)) and int(match[1]) != step:
            raise CheckpointError(f"--step {step}, but --input is {path.name}: give the folder above it, or no --step")
        return StepFolder.of(path)
    folders = {p.name: p for p in sorted(path.iterdir()) if p.is_dir() and any(p.glob("*_model_states.pt"))}
    marks = {"latest": "", "latest_universal": "", "latest_checkpointed_iteration.txt": "global_step"}
    mark = next((mark for mark in marks if (path / mark).exists() or (path / mark).is_symlink()), None)
    if step is not None:
        name = next((name for name in (f"global_step{step}", f"global_step{step}_universal") if name in folders), "")
        if not name:
            raise CheckpointError(f"{path} has no global_step{step}: there are {', '.join(folders) or 'none'}")
    elif mark is not None:
        name = marks[mark] + read_small_file(path / mark, 4096).decode("utf-8", "replace").strip()
        if not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(f"{path / mark} names {name[:100]!r}, which is not a plain name of a folder: give"
                                  " --step N")  # fmt: skip
        if name not in folders:
            raise CheckpointError(f"{path / mark} names {name}, which is not there: there are"
                                  f" {', '.join(folders) or 'none'}; give --step N")  # fmt: skip
    elif len(folders) == 1:
        name = next(iter(folders))
    else:
        raise CheckpointError(f"{path} has no file named latest, and {', '.join(folders) or 'no step folder'}: give"
                              " --step N")  # fmt: skip
    require_inside(folders[name], path)
    return StepFolder.of(folders[name])


Shapes = dict[str, tuple[int, ...]]


@dataclass
class ModelStates:
    """Contents of a ``*_model_states.pt`` file: weights of a rank, shapes for ZeRO's files, settings of the run.

    Source: deepspeed 0.19.8, runtime/engine.py :: _common_checkpoint_state; Megatron-DeepSpeed, checkpointing.py ::
    save_checkpoint.
    """

    path: Path
    settings: dict[str, Any]  # all entries of the file
    # its weights by name; empty where pipeline stages store them in files of layers
    module: dict[str, TensorRecord] = field(default_factory=dict)
    # names and shapes of the trained parameters by group, in the order in which ZeRO flattens them; empty without it
    groups: list[Shapes] = field(default_factory=list)
    # those of parameters that are not trained; in stage 3 a part is one rank's
    frozen_shapes: Shapes = field(default_factory=dict)
    frozen_parts: dict[str, TensorRecord] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)  # names of a tensor that has another name, too

    @classmethod
    def of(cls, path: Path) -> ModelStates:
        tree = as_dict(TorchFile(path).tree, str(path))
        if "module" not in tree:
            raise CheckpointError(f"{path} has no entry 'module', which model states of DeepSpeed have: it is another"
                                  " kind of file")  # fmt: skip
        for name in ("ds_autoep_layers", "autoep_layers"):
            if tree.get(name):
                raise CheckpointError(f"{path} is of a mixture of experts ({name}), which cannot be converted: there is"
                                      " no such model here")  # fmt: skip
        states = cls(path, tree)
        states.module = _weights(tree["module"], path)
        groups = tree.get("param_shapes", [])
        groups = [] if groups is None else groups if isinstance(groups, list) else [groups]
        states.groups = [_shapes(group, path) for group in groups]
        states.frozen_shapes = _shapes(tree.get("frozen_param_shapes") or {}, path)
        states.frozen_parts = _weights(tree.get("frozen_param_fragments"), path)
        shared = tree.get("shared_params")
        shared = as_dict({} if shared is None else shared, f"{path}, shared_params")
        if not all(isinstance(a, str) and isinstance(b, str) for a, b in shared.items()):
            raise CheckpointError(f"{path}: shared_params must be names, it is damaged")
        states.shared = {plain_name(a): plain_name(b) for a, b in shared.items()}
        return states

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of the training; empty if there are none."""
        return attributes_of(self.settings.get("args"))

    @property
    def shapes(self) -> Shapes:
        """The shapes of all groups."""
        return {name: shape for group in self.groups for name, shape in group.items()}

    def count(self, *names: str) -> int:
        """Return the first of these entries that is a non-negative number, as an integer; 0 if none is."""
        for name in names:
            if (value := number(self.settings.get(name))) is not None and value >= 0:
                return int(value)
        return 0


def as_dict(value: Any, where: str) -> dict[Any, Any]:
    """Return a dict of a file. Raises CheckpointError if it is none."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a dict, and holds {type(value).__name__}: it is another kind of file,"
                              " or damaged")  # fmt: skip
    return value


def number(value: Any) -> int | float | None:
    """Return a finite number, or the value of an enumeration's member; None: it is neither."""
    if isinstance(value, Object) and len(value.args) == 1:
        value = value.args[0]
    return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63 else None


def plain_name(name: str) -> str:
    return name.removeprefix("module.")


def _weights(tree: Any, path: Path) -> dict[str, TensorRecord]:
    tree = as_dict({} if tree is None else tree, f"{path}, module")
    return {plain_name(name): record for name, record in flattened(path, tree).items()}


def _shapes(value: Any, path: Path) -> Shapes:
    shapes: Shapes = {}
    for name, shape in as_dict(value, f"{path}, param_shapes").items():
        sizes = tuple(shape) if isinstance(shape, tuple | list) else (None,)
        plain = all(isinstance(n, int) and 0 <= n < 1 << 40 for n in sizes)
        if not isinstance(name, str) or not plain:
            raise CheckpointError(f"{path}: param_shapes says {str(shape)[:100]!r} of {str(name)[:200]!r}, which is not"
                                  " a shape: it is damaged")  # fmt: skip
        shapes[plain_name(name)] = sizes
    return shapes


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

    Source: Megatron-DeepSpeed, gpt_model.py :: GPTModelPipe; deepspeed 0.19.8, runtime/pipe/module.py.
    """

    # 1.word_embeddings.weight                     language_model.embedding.word_embeddings.weight
    # tied_modules.embed.word_embeddings.weight    the same (first stage); word_embeddings_for_head.weight (last one)
    # 2.input_layernorm.weight                     language_model.encoder.layers.0.input_layernorm.weight
    # 26.weight                                    language_model.encoder.final_layernorm.weight
    # 27.lm_head.weight                            language_model.output_layer.weight
    #
    # The numbers differ between versions (some have a layer before the first block that only transposes dims), so the
    # kind of a layer is determined by its parameters.
    def __init__(self, names: Iterable[str], where: str) -> None:
        self._where = where
        numbered = [(int(m[1]), m[2]) for name in names if (m := _NUMBERED.fullmatch(name))]
        self._blocks = sorted({number for number, rest in numbered if _IN_BLOCK.fullmatch(rest)})
        if not self._blocks or self._blocks != list(range(self._blocks[0], self._blocks[-1] + 1)):
            raise CheckpointError(f"{where} has the layers {self._blocks[:20]} with attention: they must follow each"
                                  " other; files are missing")  # fmt: skip

    def translate(self, name: str, *, first_stage: bool = True) -> str | None:
        """Return the name without a pipeline; None for a copy that the model never uses."""
        match, blocks = _NUMBERED.fullmatch(name), self._blocks
        if name.startswith(_TIED):
            rest, in_embedding = name.removeprefix(_TIED), True
        elif match is None:
            raise CheckpointError(f"{self._where}: {name[:200]} is in no numbered layer, as all parameters of a"
                                  " pipeline are")  # fmt: skip
        else:
            number, rest = int(match[1]), match[2]
            in_embedding, first_stage = _IN_EMBEDDING.fullmatch(rest) is not None, number < blocks[0]
            if number in blocks:
                return f"{BLOCKS}{number - blocks[0]}.{rest}"
        if in_embedding and first_stage:
            return EMBEDDING + rest
        if in_embedding:
            return TIED_COPY if rest == "word_embeddings.weight" else None
        if number > blocks[-1] and rest in ("weight", "bias"):
            return FINAL_NORM + rest
        if number > blocks[-1] and rest.startswith("lm_head."):
            return HEAD + rest.removeprefix("lm_head.")
        raise CheckpointError(f"{self._where}: layer {number} has {rest[:200]}; layers of this pipeline are an"
                              f" embedding, blocks ({blocks[0]} to {blocks[-1]}), a norm and a head")  # fmt: skip
