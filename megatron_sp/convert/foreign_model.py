"""Runs of foreign models (``megatron-sp schedule train``), written as the Hugging Face folders that they came from.

The checkpoint keeps the class and the configuration of a model of transformers, and its tensors under their own names:
transformers makes the model, and writes it. No code comes out of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_sp.checkpoint.stream import NativeReader
from megatron_sp.config.schema import Config
from megatron_sp.convert.formats.format import Progress
from megatron_sp.convert.formats.native import find_step, tokenizer_of
from megatron_sp.convert.model import OPTIMIZER
from megatron_sp.convert.options import Options
from megatron_sp.convert.tokenizers import copy_files
from megatron_sp.ops import availability
from megatron_sp.utils.errors import CheckpointError, ConfigError


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without entries that may make transformers fetch or run something."""
    code = ("auto_map", "quantization_config", "use_kernels")  # classes, quantizers and kernels by name
    rest = {n: value for n, value in config.items() if n not in code and not n.endswith("_implementation")}
    return {name: without_code(value) if isinstance(value, dict) else value for name, value in rest.items()}


class ForeignModel:
    """A foreign model in a checkpoint; also what writes it (``command.convert``)."""

    name, holds_optimizer = "hf", False

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
        net = self._built()
        buffers = {name for name, _ in net.named_buffers()} & set(net.state_dict())
        wanted = {name for name, _ in net.named_parameters()} | buffers
        if wanted != set(self._tensors):
            missing, extra = sorted(wanted - set(self._tensors)), sorted(set(self._tensors) - wanted)
            raise CheckpointError(f"{self._reader.step_dir} does not hold the tensors of a {self._class}: missing"
                                  f" {missing[:3]}, left over {extra[:3]}")  # fmt: skip
        state = {}
        for name, info in self._tensors.items():
            tensor = self._reader.read(name)
            narrow = tensor.is_floating_point() and options.dtype is not None and name not in self._kept(net)
            state[name] = tensor.to(options.dtype) if narrow else tensor
            progress(info.num_bytes)
        net.load_state_dict(state, strict=False, assign=True)
        net.tie_weights()
        net.save_pretrained(path, max_shard_size=options.max_shard_bytes)
        copy_files(self._tokenizer, path)

    def _built(self) -> Any:
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

    def _kept(self, made: Any) -> set[str]:
        kinds = {info.dtype for info in self._tensors.values()}
        if not kinds & {torch.bfloat16, torch.float16}:
            return {name for name, _ in made.named_buffers()}
        return {name for name, info in self._tensors.items() if info.dtype == torch.float32}
