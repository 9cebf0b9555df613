"""Preset of BERT and RoBERTa, with any head."""

from __future__ import annotations

from megatron_sp.schedule.presets.common import Blocks, around, base_of, config_of, differ
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.schedule import Schedule


@register_preset("bert", "roberta")
def bert(s: Schedule, seq: bool) -> Blocks:
    """Write the lines."""
    config, layers, (enter, leave) = config_of(s), f"{base_of(s)}encoder.layer", around(seq)
    blocks, heads = f"{layers}.*", config.num_attention_heads

    s[f"{blocks}.attention.self"].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{blocks}.attention.self.{{query,key,value}}"].column(input="prepared", heads=heads)
    s[f"{blocks}.attention.output.dense"].row(leave)

    s[f"{blocks}.intermediate"].sync("fwd_pre", enter)
    s[f"{blocks}.intermediate.dense"].column(input="prepared")
    s[f"{blocks}.output.dense"].row(leave)

    differ(s, blocks, f"{blocks}.attention.self", seq=seq)
    # there is no norm after the last layer: it is the layer's own
    return Blocks(blocks, f"{layers}.0", f"{layers}.{config.num_hidden_layers - 1}")
