"""Preset of ModernBERT: fused q, k, v projection, fused gate and up of the MLP, alternating global and sliding-window attention."""

from __future__ import annotations

from megatron_sp.schedule.presets.common import Blocks, around, base_of, config_of, differ, drops
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.schedule import Schedule


@register_preset("modernbert")
def modernbert(s: Schedule, seq: bool) -> Blocks:
    """Write the lines."""
    config, blocks, (enter, leave) = config_of(s), f"{base_of(s)}layers.*", around(seq)

    s[f"{blocks}.attn"].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{blocks}.attn.Wqkv"].column(input="prepared", blocks=3, heads=config.num_attention_heads)
    s[f"{blocks}.attn.Wo"].row(leave)

    s[f"{blocks}.mlp"].sync("fwd_pre", enter)
    s[f"{blocks}.mlp.Wi"].column(input="prepared", blocks=2)
    s[f"{blocks}.mlp.Wo"].row(leave)

    differ(s, blocks, f"{blocks}.attn", f"{blocks}.mlp", seq=seq)
    if drops(config) and not seq:
        s[f"{blocks}.attn.out_drop"].rng("same")  # after the sum, inside of the module that differs
    return Blocks(blocks, f"{base_of(s)}layers.0", f"{base_of(s)}final_norm")
