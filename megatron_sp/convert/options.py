"""What the command line says about a conversion, for readers and writers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from megatron_sp.convert.archive.dist_file import MAX_METADATA_BYTES
from megatron_sp.convert.overrides import Overrides

QKV_LAYOUTS = ("interleaved", "flat", "v0", "v1")


@dataclass
class Options:
    """Attributes are named like flags.

    Attributes:
        step: of the checkpoint that is read; None: the newest.
        qkv_layout: of the fused projection in files that do not say it.
        vocab_size: entries of the vocabulary, where files only know the padded number of rows.
        tokenizer: folder or file to take the tokenizer from, instead of the source's own.
        optimizer: take the optimizer's state along, where the source has it and the target can hold it.
        dtype: of the written weights; None: as they are.
        given: settings of the model that files do not say.
        megatron_names: of the parameters in Megatron's files.
        deepspeed_layout: what megatron-deepspeed is written as; None: with the optimizer's state zero1, else module.
        deepspeed_qkv_layout: order of the rows of fused projections that it is written with.
        tp, pp: ranks to write for, where a format has files of ranks.
        max_metadata_mb: MiB of megatron-dist's .metadata that are read.
        max_shard_bytes: files are cut at about this size.
        output: the folder that everything will be in at last.
    """

    step: int | None = None
    qkv_layout: Literal["interleaved", "flat", "v0", "v1"] | None = None
    vocab_size: int | None = None
    tokenizer: Path | None = None
    optimizer: bool = True
    dtype: torch.dtype | None = None
    given: Overrides = field(default_factory=Overrides)
    megatron_names: Literal["core", "core-local", "legacy"] = "core"
    deepspeed_layout: Literal["module", "zero1", "universal"] | None = None
    deepspeed_qkv_layout: Literal["interleaved", "flat"] = "flat"
    tp: int = 1
    pp: int = 1
    max_metadata_mb: int = MAX_METADATA_BYTES >> 20
    max_shard_bytes: int = 5 << 30
    output: Path | None = None
