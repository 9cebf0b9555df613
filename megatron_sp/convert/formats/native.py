"""``megatron_sp``: a run of this package, read from its newest valid checkpoint, written with a single one.

A run of a foreign model (``megatron-sp schedule train``) has tensors under that model's own names, its class and its
configuration: transformers makes the model, and writes its folder. No code comes out of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_sp import __version__
from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.manifest import STATE_NAME
from megatron_sp.checkpoint.stream import NativeReader, Source, TensorInfo, write_checkpoint
from megatron_sp.config.rules import normalize
from megatron_sp.config.rules_model import resolve_gelu
from megatron_sp.config.schema import Config, DataConfig
from megatron_sp.config.schema_model import is_expert_bias
from megatron_sp.convert.copies import Copy, Correspondence, Store, View
from megatron_sp.convert.model import KINDS, OPTIMIZER, LossScale, Model, Options, Progress, match_tensors

from megatron_sp.convert.model import parameter_shapes, require_inside, require_sound  # isort: skip
from megatron_sp.convert.tokenizers import copy_files, enter_tokenizer, find_files, find_named
from megatron_sp.data.tokenizers import kept
from megatron_sp.models.experts import stored_dtype
from megatron_sp.ops import availability
from megatron_sp.utils.errors import CheckpointError, ConfigError, DataError
from megatron_sp.utils.strict_json import is_count

WORD_EMBEDDINGS, CLASSES = "embedding.word_embeddings.weight", "classification_head.weight"
TOKENIZER_FOLDER = "tokenizer"
_NOTE = ("a training goes on from here with the optimizer's state, the number of its updates, the loss scale, the step"
         " and the consumed samples; the learning rate's schedule, the data and random states are not taken from the"
         " files: they are as the flags of the training say")  # fmt: skip


class Native:
    """Checkpoints of this project."""

    name, holds_optimizer = "megatron_sp", True

    def recognises(self, path: Path) -> bool:
        steps = ("MANIFEST.json", "step-[0-9]*", "checkpoints/step-[0-9]*")
        return any(any(path.glob(pattern)) for pattern in steps)

    def read(self, path: Path, options: Options) -> Model:
        folder = find_step(path, options.step)
        require_inside(folder, path)
        reader = NativeReader(folder, verified=True)
        state, tensors = reader.state, reader.tensors()
        try:
            config, _ = Config.from_dict(state.get("config"))
            normalize(config)
        except ConfigError as error:  # the error is in a file, not in a flag
            raise CheckpointError(f"{folder / STATE_NAME}: {error}") from None
        if WORD_EMBEDDINGS not in tensors:
            raise CheckpointError(f"{folder} has no tensor {WORD_EMBEDDINGS}: it holds no language model")
        rows = {}
        for name in (WORD_EMBEDDINGS, CLASSES):
            shape = tensors[name].shape if name in tensors else (0, 0)
            if name in tensors and (len(shape) != 2 or not shape[0]):
                raise CheckpointError(f"{folder}: {name} is {list(shape)}, and must be a table with at least one row")
            rows[name] = shape[0]
        config.model.vocab_size, num_classes = rows[WORD_EMBEDDINGS], rows[CLASSES]
        require_sound(config.model, len(tensors), str(folder))
        shapes = parameter_shapes(config.model, num_classes)
        wanted = dict(shapes)
        for name in tensors:
            kind, _, parameter = name.removeprefix(OPTIMIZER).partition(".")
            if name.startswith(OPTIMIZER) and kind in KINDS and parameter in shapes:
                wanted[name] = shapes[parameter]
        correspondence = Correspondence.of(wanted, (Copy(View(name), View(name)) for name in wanted))
        fates = match_tensors(str(folder), correspondence, reader, {})
        converted = state.get("converted")
        tokenizer, notes = tokenizer_of(config, state, folder, options)
        return Model(
            config.model, reader, step=_count(state, "step"), consumed_samples=_count(state, "consumed_samples"),
            scheduled_samples=_count(state, "scheduled_samples") if "scheduled_samples" in state else None,
            num_classes=num_classes, fates=fates, tokenizer=tokenizer, notes=notes,
            tokenizer_type=_tokenizer_type(config, state) if options.tokenizer is None else None,
            eod_id=config.data.eod_id, settings={**(converted if isinstance(converted, dict) else {}), "native": state},
            num_updates=_count(state, "num_updates") if "num_updates" in state else None,
            loss_scale=_loss_scale(state.get("loss_scaler")),
        )  # fmt: skip

    def write(self, model: Model, path: Path, options: Options, progress: Progress) -> None:
        path.mkdir()
        store = _as_written(model, options)
        state = _state(model, store, path, options)
        tensors = {}
        for name, info in store.tensors().items():
            tensors[name] = Source(info.shape, info.dtype, partial(store.read, name))
        if model.tokenizer:
            (path / TOKENIZER_FOLDER).mkdir()
            copy_files(model.tokenizer, path / TOKENIZER_FOLDER)
            state["tokenizer"] = _record(model, state, path / TOKENIZER_FOLDER)
        write_checkpoint(path, model.step, tensors, state, progress=progress)

    def size(self, model: Model, options: Options) -> int:
        return sum(info.num_bytes for info in _as_written(model, options).tensors().values())


def find_step(path: Path, step: int | None) -> Path:
    """Return the folder of a step, or of the newest complete one. Raises CheckpointError if it is not there."""
    try:
        return Checkpointer(None).find(path, step)
    except CheckpointError as error:  # the message names a flag of a training
        raise CheckpointError(str(error).replace("--ckpt-step", "--step")) from None


def _as_written(model: Model, options: Options) -> Store:
    # the tensors perhaps in another dtype, or without the optimizer. With Adam's moments, float32 weights that become
    # narrower are also written as the master copies of a 16-bit optimizer.
    stored, described, wide = model.store.tensors(), dict[str, TensorInfo](), dict[str, str]()
    for name, info in stored.items():
        of_optimizer = name.startswith(OPTIMIZER)
        if of_optimizer and not options.optimizer:
            continue
        dtype = info.dtype if of_optimizer else stored_dtype(name, info.dtype, options.dtype)
        described[name] = TensorInfo(info.shape, dtype)
        copy, narrows = f"{OPTIMIZER}master.{name}", info.dtype == torch.float32 and dtype.itemsize < 4
        if narrows and options.optimizer and f"{OPTIMIZER}exp_avg.{name}" in stored and copy not in stored:
            described[copy], wide[copy] = info, name
    return Store(described, lambda name: model.store.read(wide.get(name, name)).to(described[name].dtype))


def _count(state: dict[str, Any], name: str) -> int:
    value = state.get(name, 0)
    return value if is_count(value) else 0


def _loss_scale(state: Any) -> LossScale | None:
    if not isinstance(state, dict) or state.get("dynamic") is not True:
        return None
    scale, good_steps, left = (state.get(name) for name in ("scale", "good_steps", "hysteresis_left"))
    if not isinstance(scale, float) or not 0 < scale < math.inf:
        return None
    if not isinstance(good_steps, int) or not isinstance(left, int):
        return None
    return {"dynamic": True, "scale": scale, "good_steps": good_steps, "hysteresis_left": left}


def tokenizer_of(
    config: Config, state: dict[str, Any], folder: Path, options: Options
) -> tuple[dict[str, Path], list[str]]:
    """Return the files of the tokenizer that a run used, and notes for the user if there are none."""
    if options.tokenizer is not None:
        return find_files(options.tokenizer), []
    record = kept.Record.from_json(state.get("tokenizer"))
    beside = kept.find(record, folder) if record is not None else folder.parent.parent / TOKENIZER_FOLDER
    if beside is not None and beside.is_dir():
        return find_files(beside), []
    try:
        kept.take(config.data, record, folder)
    except DataError as error:
        return {}, [f"no tokenizer goes along: {error}".replace("--tokenizer-model", "--tokenizer")]
    paths = (config.data.tokenizer_model, config.data.vocab_file, config.data.merge_file)
    named = [Path(path) for path in paths if path]
    kind = _tokenizer_type(config, state)
    if not named and kind is not None:
        return {}, [f"no tokenizer goes along: {kind} has no files"]
    return find_named(named), []


def _tokenizer_type(config: Config, state: dict[str, Any]) -> str | None:
    record = kept.Record.from_json(state.get("tokenizer"))
    if record is not None:
        return record.type
    flags = state["config"].get("data")
    return config.data.tokenizer_type if isinstance(flags, dict) and flags.get("tokenizer_type") else None


def _record(model: Model, state: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    data = DataConfig()
    enter_tokenizer(data, {name: folder / name for name in model.tokenizer}, folder)
    before, kind = kept.Record.from_json(state.get("tokenizer")), model.tokenizer_type or data.tokenizer_type
    if kind is None:
        return None
    record = kept.record_of(folder, kind, set(model.tokenizer))
    same = before is not None and before.type == kind and before.files == {n: record.files.get(n) for n in before.files}
    return (record._replace(fingerprint=before.fingerprint) if before is not None and same else record)._asdict()


def _state(model: Model, store: Store, path: Path, options: Options) -> dict[str, Any]:
    native = model.settings.get("native")
    has_optimizer = any(name.startswith(OPTIMIZER) for name in store.tensors())
    if isinstance(native, dict):  # a rewritten checkpoint: everything except the optimizer's part is unchanged
        old = {name: value for name, value in native.items() if name not in ("format_version", "step")}
        return {**old, "has_optimizer": has_optimizer}
    if has_optimizer:
        model.notes.append(_NOTE)
    config = Config(model=replace(model.config))
    resolve_gelu(config.model)
    weights = {name: info for name, info in store.tensors().items() if not name.startswith(OPTIMIZER)}
    dtypes = {info.dtype for name, info in weights.items() if not is_expert_bias(name)}
    config.precision.bf16, config.precision.fp16 = dtypes == {torch.bfloat16}, dtypes == {torch.float16}
    enter_tokenizer(config.data, model.tokenizer, (options.output or path) / TOKENIZER_FOLDER)
    return {
        "consumed_samples": model.consumed_samples, "scheduled_samples": model.scheduled, "consumed_tokens": 0,
        "bad_steps": 0, "skipped_steps": 0,
        "num_updates": model.updates if has_optimizer else 0, "has_optimizer": has_optimizer,
        "loss_scaler": (model.loss_scale if has_optimizer else None) or {"dynamic": False},
        "schedule": None, "data_fingerprint": None, "layout": {"world_size": 1}, "config": config.to_dict(),
        "versions": {"megatron_sp": __version__, "torch": str(torch.__version__)}, "converted": model.settings,
    }  # fmt: skip


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without entries that may make transformers fetch or run something."""
    code = ("auto_map", "quantization_config", "use_kernels")  # classes, quantizers and kernels by name
    rest = {n: value for n, value in config.items() if n not in code and not n.endswith("_implementation")}
    return {name: without_code(value) if isinstance(value, dict) else value for name, value in rest.items()}


class ForeignModel:
    """A foreign model in a checkpoint; also what writes it (``command.convert``)."""

    def __init__(self, reader: NativeReader, described: Mapping[str, Any], options: Options) -> None:
        self._reader, self._class = reader, str(described.get("class"))
        config = described.get("config")
        if not isinstance(config, dict):
            raise CheckpointError(f"{reader.step_dir}: state.json does not say what model it is: foreign_model has no"
                                  " config")  # fmt: skip
        self._config: dict[str, Any] = config
        self._tensors = {name: info for name, info in reader.tensors().items() if not name.startswith(OPTIMIZER)}
        run, _ = Config.from_dict(reader.state.get("config"))
        self._tokenizer, self.notes = tokenizer_of(run, reader.state, reader.step_dir, options)

    @staticmethod
    def read(path: Path, options: Options) -> ForeignModel | None:
        """Return the model of a run; None if it is one of this project's own."""
        reader = NativeReader(find_step(path, options.step), verified=True)
        described = reader.state.get("foreign_model")
        return ForeignModel(reader, described, options) if isinstance(described, dict) else None

    def describe(self) -> str:
        step = self._reader.state.get("step")
        size = sum(torch.Size(info.shape).numel() for info in self._tensors.values())
        return f"{self._class} of transformers, {size:,} numbers, step {step}"

    def size(self, model: object, options: Options) -> int:
        return sum(info.num_bytes for info in self._tensors.values())

    def write(self, model: object, path: Path, options: Options, progress: Progress) -> None:
        net = self._build()
        buffers = {name for name, _ in net.named_buffers()}
        wanted = {name for name, _ in net.named_parameters()} | (buffers & set(net.state_dict()))
        if wanted != set(self._tensors):
            missing, extra = sorted(wanted - set(self._tensors)), sorted(set(self._tensors) - wanted)
            raise CheckpointError(f"{self._reader.step_dir} does not hold the tensors of a {self._class}: missing"
                                  f" {missing[:3]}, left over {extra[:3]}")  # fmt: skip
        # --dtype leaves buffers as they are; of a 16-bit model what is in fp32 for its own reasons
        unchanged = buffers
        if {torch.bfloat16, torch.float16} & {info.dtype for info in self._tensors.values()}:
            unchanged = {name for name, info in self._tensors.items() if info.dtype == torch.float32}
        state: dict[str, Tensor] = {}
        for name, info in self._tensors.items():
            tensor = self._reader.read(name)
            narrow = tensor.is_floating_point() and options.dtype is not None and name not in unchanged
            state[name] = tensor.to(options.dtype) if narrow else tensor
            progress(info.num_bytes)
        net.load_state_dict(state, strict=False, assign=True)
        net.tie_weights()
        net.save_pretrained(path, max_shard_size=options.max_shard_bytes)
        copy_files(self._tokenizer, path)

    def _build(self) -> Any:
        try:
            library = availability.load("transformers")
        except RuntimeError as error:
            raise ConfigError(f"the run is of a model of transformers, and {error}: pip install -e '.[hf]'") from None
        kind, known = self._config.get("model_type"), library.CONFIG_MAPPING
        cls = getattr(library, self._class, None) if self._class.isidentifier() else None
        if kind not in known or not (isinstance(cls, type) and issubclass(cls, library.PreTrainedModel)):
            raise ConfigError(f"transformers {library.__version__} has no {self._class} ({kind}), of which the run is:"
                              " use the version that trained it")  # fmt: skip
        try:
            with torch.device("meta"):
                return cls(known[kind].from_dict(without_code(self._config)))
        except Exception as error:  # transformers raises exception classes of its own for what it rejects
            raise CheckpointError(f"{self._reader.step_dir}: state.json does not describe a {self._class}:"
                                  f" {error}") from None  # fmt: skip
