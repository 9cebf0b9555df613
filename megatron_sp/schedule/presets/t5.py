"""Preset of T5, with or without its decoder.

The first block of each stack computes an attention bias per head and distance for all its blocks, which is split by
heads, too. With a decoder there are two sequence-parallel regions, and the encoder's result is whole between them.
"""

from __future__ import annotations

from megatron_sp.schedule.presets.common import Blocks, around, base_of, config_of, differ, module_or_none
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.schedule import Schedule
from megatron_sp.utils.errors import ConfigError


@register_preset("t5")
def t5(s: Schedule, seq: bool) -> Blocks:
    """Write the lines. Raises ConfigError: sp above 1."""
    config, (enter, leave) = config_of(s), around(seq)
    has_decoder = module_or_none(s, f"{base_of(s)}decoder") is not None
    stacks = f"{base_of(s)}{'{encoder,decoder}' if has_decoder else 'encoder'}"
    if (sp := s.mesh.sp.size()) > 1:
        raise ConfigError(
            f"T5's attention has a bias of positions for each head, which Ulysses (sp {sp}) does not trade: give these ranks to tp or dp"
        )
    blocks, heads = f"{stacks}.block.*", config.num_heads
    attention, mlp = (
        f"{blocks}.layer.*.{'{SelfAttention,EncDecAttention}' if has_decoder else 'SelfAttention'}",
        f"{blocks}.layer.*.DenseReluDense",
    )

    s[attention].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{attention}.{{q,k,v}}"].column(input="prepared", heads=heads)
    s[f"{attention}.relative_attention_bias"].column(heads=heads)
    s[f"{attention}.o"].row(leave)
    if has_decoder:
        s[f"{blocks}.layer.1.EncDecAttention"].sync("fwd_pre", "copy", arg="key_value_states")

    s[mlp].sync("fwd_pre", enter)
    s[f"{mlp}.wi{'_*' if config.is_gated_act else ''}"].column(input="prepared")
    s[f"{mlp}.wo"].row(leave)

    differ(s, blocks, attention, mlp, seq=seq)
    last = f"{base_of(s)}{'decoder' if has_decoder else 'encoder'}"
    if has_decoder and seq:
        s.sequence(f"{base_of(s)}encoder.block.0", f"{base_of(s)}encoder.final_layer_norm")
    return Blocks(blocks, f"{last}.block.0", f"{last}.final_layer_norm")
