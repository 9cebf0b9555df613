"""Preset of GPT-NeoX (Pythia): one projection with q, k and v adjacent within each head; sequential or parallel attention and MLP."""

from __future__ import annotations

from megatron_sp.schedule.presets.common import Blocks, around, base_of, config_of, differ
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.schedule import Schedule


@register_preset("gpt_neox")
def gpt_neox(s: Schedule, seq: bool) -> Blocks:
    """Write the lines."""
    config, blocks, (enter, leave) = config_of(s), f"{base_of(s)}layers.*", around(seq)

    s[f"{blocks}.attention"].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{blocks}.attention.query_key_value"].column(input="prepared", blocks=1, heads=config.num_attention_heads)  # cut between heads
    s[f"{blocks}.attention.dense"].row(leave)

    s[f"{blocks}.mlp"].sync("fwd_pre", enter)
    s[f"{blocks}.mlp.dense_h_to_4h"].column(input="prepared")
    s[f"{blocks}.mlp.dense_4h_to_h"].row(leave)

    differ(s, blocks, f"{blocks}.attention", seq=seq)
    return Blocks(blocks, f"{base_of(s)}layers.0", f"{base_of(s)}final_layer_norm")
