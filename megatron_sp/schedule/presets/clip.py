"""Preset of CLIP: a text tower and an image tower, each with its own sequence-parallel region, or one of them alone."""

from __future__ import annotations

from typing import Any

from megatron_sp.schedule.presets.common import Blocks, around, config_of, drops, module_or_none
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.presets.vit import require_even
from megatron_sp.schedule.schedule import Schedule
from megatron_sp.utils.errors import ConfigError

_TOWERS = {"text_model": "text_config", "vision_model": "vision_config"}


@register_preset("clip", "clip_text_model", "clip_vision_model")
def clip(s: Schedule, seq: bool) -> Blocks:
    """Write the lines. Raises ConfigError: both towers with sp above 1, or patches + 1 that are to be split and not divisible by tp."""
    config = config_of(s)
    towers = {name: getattr(config, of, config) for name, of in _TOWERS.items() if module_or_none(s, name) is not None}
    if len(towers) == 2 and (sp := s.mesh.sp.size()) > 1:
        raise ConfigError(
            f"CLIP has text and images, two sequences of which each has its own length, and Ulysses (sp {sp}) cuts one: give these ranks"
            " to tp or dp, or train one of its towers"
        )
    made = [_write_tower(s, f"{name}.", tower, seq) for name, tower in towers.items()] or [_write_tower(s, "", config, seq)]
    if seq:
        for other in made[:-1]:
            s.sequence(other.first, other.last)
    blocks = made[-1]
    return blocks._replace(glob=f"{{{','.join(towers)}}}.encoder.layers.*") if len(towers) == 2 else blocks


def _write_tower(s: Schedule, base: str, config: Any, seq: bool) -> Blocks:
    blocks, (enter, leave) = f"{base}encoder.layers.*", around(seq)

    s[f"{blocks}.self_attn"].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{blocks}.self_attn.{{q,k,v}}_proj"].column(input="prepared", heads=config.num_attention_heads)
    s[f"{blocks}.self_attn.out_proj"].row(leave)

    s[f"{blocks}.mlp"].sync("fwd_pre", enter)
    s[f"{blocks}.mlp.fc1"].column(input="prepared")
    s[f"{blocks}.mlp.fc2"].row(leave)

    if drops(config):
        s[blocks if seq else f"{blocks}.self_attn"].rng("tp")
    is_text = module_or_none(s, f"{base}final_layer_norm") is not None
    if seq and not is_text:
        require_even(config, s.mesh.tp.size())
    # the norm after the image blocks sees the class token only, so the sequence is whole again before it
    last = f"{base}final_layer_norm" if is_text else f"{base}encoder.layers.{config.num_hidden_layers - 1}"
    return Blocks(blocks, f"{base}encoder.layers.0", last)
