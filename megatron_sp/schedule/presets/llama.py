"""Preset of Llama and models with the same modules: Mistral, Qwen2 (biases at q, k, v), Qwen3 (a norm within each head)."""

from __future__ import annotations

from megatron_sp.schedule.presets.common import Blocks, around, base_of, config_of, differ, module_or_none, share_key_values
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.schedule import Schedule


@register_preset("llama", "mistral", "qwen2", "qwen3")
def llama(s: Schedule, seq: bool) -> Blocks:
    """Write the lines."""
    config, blocks, (enter, leave) = config_of(s), f"{base_of(s)}layers.*", around(seq)
    heads, key_values = config.num_attention_heads, config.num_key_value_heads

    s[f"{blocks}.self_attn"].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{blocks}.self_attn.q_proj"].column(input="prepared", heads=heads)
    s[f"{blocks}.self_attn.{{k,v}}_proj"].column(input="prepared", heads=key_values, replicas=True)
    s[f"{blocks}.self_attn.o_proj"].row(leave)
    share_key_values(s, f"{blocks}.self_attn", heads, key_values)
    if module_or_none(s, f"{base_of(s)}layers.0.self_attn.q_norm") is not None:
        s[f"{blocks}.self_attn.{{q,k}}_norm"].sum_gradients()  # whole on every rank, and used on its heads

    s[f"{blocks}.mlp"].sync("fwd_pre", enter)
    s[f"{blocks}.mlp.{{gate,up}}_proj"].column(input="prepared")
    s[f"{blocks}.mlp.down_proj"].row(leave)

    differ(s, blocks, f"{blocks}.self_attn", seq=seq)
    return Blocks(blocks, f"{base_of(s)}layers.0", f"{base_of(s)}norm")
