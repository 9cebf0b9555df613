"""Rotary position tables from a model's configuration."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sp.config.schema import ModelConfig
from megatron_sp.ops.rotary import RotaryStretch, rotary_tables


def rotary_of(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Return cos and sin for positions, int64 [s] or [s, b], in ``dtype``; None without rotary embedding."""
    if config.position_embedding_type != "rope":
        return None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return rotary_tables(positions, config.rotary_dim, config.rotary_base, wide, stretch_of(config))


def stretch_of(config: ModelConfig) -> RotaryStretch:
    if not config.use_rope_scaling:
        return RotaryStretch(config.rotary_seq_len_interpolation_factor)
    return RotaryStretch(
        config.rope_scaling_factor, config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor,
        config.rope_scaling_original_length,
    )  # fmt: skip
