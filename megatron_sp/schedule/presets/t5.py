"""The encoder of T5. Its first block makes a bias of attention, one for each head and distance, for all blocks: split by heads as well."""

from __future__ import annotations

from megatron_sp.schedule.presets.common import Blocks, around, base_of, config_of, differ
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.schedule import Schedule
from megatron_sp.utils.errors import ConfigError


@register_preset("t5")
def t5(s: Schedule, seq: bool) -> Blocks:
    """Write the lines. Raises ConfigError: the model has a decoder, or sp is more than 1."""
    config, encoder, (enter, leave) = config_of(s), f"{base_of(s)}encoder", around(seq)
    if any(path.rpartition(".")[2] == "decoder" for path, _ in s.model.named_modules()):
        raise ConfigError(
            f"{type(s.model).__name__} has a decoder, and the preset of t5 covers the encoder alone: take T5EncoderModel, or write the"
            " lines with schedule(model, mesh)"
        )
    if (sp := s.mesh.sp.size()) > 1:
        raise ConfigError(
            f"T5's attention has a bias of positions for each head, which Ulysses (sp {sp}) does not trade: give these ranks to tp or dp"
        )
    blocks, heads = f"{encoder}.block.*", config.num_heads
    attention, mlp = f"{blocks}.layer.0.SelfAttention", f"{blocks}.layer.1.DenseReluDense"

    s[attention].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{attention}.{{q,k,v}}"].column(input="prepared", heads=heads)
    s[f"{attention}.relative_attention_bias"].column(heads=heads)
    s[f"{attention}.o"].row(leave)

    s[mlp].sync("fwd_pre", enter)
    s[f"{mlp}.wi{'_*' if config.is_gated_act else ''}"].column(input="prepared")
    s[f"{mlp}.wo"].row(leave)

    differ(s, blocks, attention, mlp, seq=seq)
    return Blocks(blocks, f"{encoder}.block.0", f"{encoder}.final_layer_norm")
