"""Preset of ViT; the convolution that makes patches stays whole, and a class token precedes the patches."""

from __future__ import annotations

from typing import Any

from megatron_sp.schedule.presets.common import Blocks, around, base_of, config_of, differ
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.schedule import Schedule
from megatron_sp.utils.errors import ConfigError


@register_preset("vit")
def vit(s: Schedule, seq: bool) -> Blocks:
    """Write the lines. Raises ConfigError: tp does not divide the number of tokens, which are to be split."""
    config, blocks, (enter, leave) = config_of(s), f"{base_of(s)}layers.*", around(seq)

    s[f"{blocks}.attention"].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{blocks}.attention.{{q,k,v}}_proj"].column(input="prepared", heads=config.num_attention_heads)
    s[f"{blocks}.attention.o_proj"].row(leave)

    s[f"{blocks}.mlp"].sync("fwd_pre", enter)
    s[f"{blocks}.mlp.fc1"].column(input="prepared")
    s[f"{blocks}.mlp.fc2"].row(leave)

    differ(s, blocks, f"{blocks}.attention", seq=seq)
    if seq:
        require_even(config, s.mesh.tp.size())
    return Blocks(blocks, f"{base_of(s)}layers.0", f"{base_of(s)}layernorm")


def require_even(config: Any, tp: int) -> None:
    """Check that tp divides the number of patches plus the class token. Raises ConfigError (E12)."""
    image, patch = (tuple(n) if isinstance(n, (tuple, list)) else (n, n) for n in (config.image_size, config.patch_size))
    patches = (image[0] // patch[0]) * (image[1] // patch[1])
    if (patches + 1) % tp:
        raise ConfigError(
            f"{patches} patches and the class token are {patches + 1} tokens, which must be a multiple of tp ({tp}) to be cut along the"
            " sequence: leave seq out, or choose another image_size or patch_size (E12)"
        )
