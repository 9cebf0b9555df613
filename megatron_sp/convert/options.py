"""Options of a conversion, and ``--set NAME=VALUE``: settings of the model that the files do not specify."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_sp.config.fields import field_kinds
from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.archive.dist_folder import MAX_METADATA_BYTES
from megatron_sp.convert.model import nearest
from megatron_sp.utils.errors import ConfigError


class Overrides(dict[str, Any]):
    """Values of fields of ``ModelConfig``, by name."""

    @classmethod
    def parse(cls, words: Iterable[str]) -> Overrides:
        """Parse the NAME=VALUE words of the command line."""
        overrides, kinds = cls(), field_kinds(ModelConfig)
        for word in words:
            name, _, text = word.partition("=")
            field = name.strip().lstrip("-").replace("-", "_")
            if field not in kinds or not text:
                raise ConfigError(f"--set {word[:100]}: it must be NAME=VALUE with a setting of the"
                                  f" model{nearest(field, kinds)}")  # fmt: skip
            try:
                overrides[field] = kinds[field].parse(text.split())
            except ValueError as error:
                raise ConfigError(f"--set {word[:100]}: {error}") from None
        return overrides

    def count(self, name: str, default: int | None) -> int | None:
        """Return a setting that must be at least 1, or the default."""
        value = self.get(name, default)
        if value is not None and value < 1:
            raise ConfigError(f"--set {name.replace('_', '-')}={value} must be at least 1")
        return value

    def apply(self, config: ModelConfig) -> None:
        for name, value in self.items():
            setattr(config, name, value)


@dataclass
class Options:
    """Options of a conversion, named like the flags."""

    step: int | None = None  # step of the checkpoint to read; None: the newest
    # row order of the fused projections in files that do not specify it
    qkv_layout: Literal["interleaved", "flat", "v0", "v1"] | None = None
    vocab_size: int | None = None  # entries of the vocabulary, for files that only have the padded number of rows
    tokenizer: Path | None = None  # folder or file to take the tokenizer from, instead of the source's own
    optimizer: bool = True  # convert the optimizer's state too, if the source has it and the target supports it
    dtype: torch.dtype | None = None  # dtype of the written weights; None: unchanged
    given: Overrides = field(default_factory=Overrides)  # settings of the model that the files do not specify
    # naming scheme of the parameters in Megatron's files
    megatron_names: Literal["core", "core-local", "legacy"] = "core"
    # layout to write for megatron-deepspeed; None: zero1 with the optimizer's state, else module
    deepspeed_layout: Literal["module", "zero1", "universal"] | None = None
    # row order of the fused projections to write for megatron-deepspeed
    deepspeed_qkv_layout: Literal["interleaved", "flat"] = "flat"
    tp: int = 1  # tensor and pipeline parallel sizes to write for, if the format has one file per rank
    pp: int = 1
    ep: int = 1  # number of ranks to write shares of the experts for, likewise
    max_metadata_mb: int = MAX_METADATA_BYTES >> 20  # largest .metadata of megatron-dist to read, in MiB
    max_shard_bytes: int = 5 << 30  # approximate maximum size of a safetensors file
    output: Path | None = None
