"""Preset of GPT-2: one projection for q, k and v with a transposed weight (``Conv1D``); its width attribute is updated automatically."""

from __future__ import annotations

from megatron_sp.schedule.presets.common import Blocks, around, base_of, config_of, differ, drops
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.schedule import Schedule


@register_preset("gpt2")
def gpt2(s: Schedule, seq: bool) -> Blocks:
    """Write the lines."""
    config, blocks, (enter, leave) = config_of(s), f"{base_of(s)}h.*", around(seq)

    s[f"{blocks}.attn"].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{blocks}.attn.c_attn"].column(input="prepared", blocks=3, heads=config.n_head)
    s[f"{blocks}.attn.c_proj"].row(leave)

    s[f"{blocks}.mlp"].sync("fwd_pre", enter)
    s[f"{blocks}.mlp.c_fc"].column(input="prepared")
    s[f"{blocks}.mlp.c_proj"].row(leave)

    differ(s, blocks, f"{blocks}.attn", seq=seq)
    if drops(config) and not seq:
        s[f"{blocks}.attn.resid_dropout"].rng("same")  # after the sum, inside of the module that differs
    return Blocks(blocks, f"{base_of(s)}h.0", f"{base_of(s)}ln_f")
