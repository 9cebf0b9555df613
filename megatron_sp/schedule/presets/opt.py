"""Preset of OPT, whose MLP is not a separate module and flattens batch and positions, [b, s, h] -> [b * s, h], before its first layer.

With the sequence split, ranks therefore gather along the first dim there: this changes the order of the rows, which
does not matter to an MLP, and the reduce_scatter after it splits along the same dim again.
"""

from __future__ import annotations

from megatron_sp.schedule.presets.common import Blocks, around, base_of, config_of, differ, module_or_none
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.schedule import Schedule


@register_preset("opt")
def opt(s: Schedule, seq: bool) -> Blocks:
    """Write the lines."""
    config, decoder, (enter, leave) = config_of(s), f"{base_of(s)}decoder", around(seq)
    blocks, rows = f"{decoder}.layers.*", 0

    s[f"{blocks}.self_attn"].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{blocks}.self_attn.{{q,k,v}}_proj"].column(input="prepared", heads=config.num_attention_heads)
    s[f"{blocks}.self_attn.out_proj"].row(leave)

    s[f"{blocks}.fc1"].sync("fwd_pre", enter, axis=rows).column(input="prepared")
    s[f"{blocks}.fc2"].row(leave, axis=rows)

    differ(s, blocks, f"{blocks}.self_attn", seq=seq)
    norm, last = f"{decoder}.final_layer_norm", f"{decoder}.layers.{config.num_hidden_layers - 1}"
    # where norms stand after their layers, none stands after the last
    return Blocks(blocks, f"{decoder}.layers.0", last if module_or_none(s, norm) is None else norm)
