"""Preset of Whisper, with or without its decoder, or of the decoder alone.

The two convolutions at the audio input stay whole; with both stacks there are two sequence-parallel regions, and the
encoder's result is whole between them. The MLP of a layer is not a separate module.
"""

from __future__ import annotations

from typing import Any

from megatron_sp.schedule.presets.common import Around, Blocks, around, base_of, config_of, differ, module_or_none
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.schedule import Schedule
from megatron_sp.utils.errors import ConfigError


@register_preset("whisper")
def whisper(s: Schedule, seq: bool) -> Blocks:
    """Write the lines. Raises ConfigError: sp above 1, audio positions that tp does not divide, or activation_dropout without ``seq``."""
    config, ends = config_of(s), around(seq)
    stacks = [name for name in ("encoder", "decoder") if module_or_none(s, f"{base_of(s)}{name}") is not None]
    _require_covered(config, s, stacks, seq)
    for name in stacks:
        _write_stack(s, f"{base_of(s)}{name}", getattr(config, f"{name}_attention_heads"), ends)
    layers = f"{base_of(s)}{stacks[0] if len(stacks) == 1 else '{encoder,decoder}'}.layers.*"
    attention = f"{layers}.{'self_attn' if stacks == ['encoder'] else '{self_attn,encoder_attn}'}"
    if len(stacks) == 2:
        attention = f"{base_of(s)}{{encoder.layers.*.self_attn,decoder.layers.*.self_attn,decoder.layers.*.encoder_attn}}"
        if seq:
            s.sequence(f"{base_of(s)}encoder.layers.0", f"{base_of(s)}encoder.layer_norm")
    differ(s, layers, attention, seq=seq)
    last = f"{base_of(s)}{stacks[-1]}"
    return Blocks(layers, f"{last}.layers.0", f"{last}.layer_norm")


def _write_stack(s: Schedule, stack: str, heads: int, ends: Around) -> None:
    blocks = f"{stack}.layers.*"
    kinds = ["self_attn", "encoder_attn"] if stack.endswith("decoder") else ["self_attn"]
    for attention in (f"{blocks}.{kind}" for kind in kinds):
        s[attention].sync("fwd_pre", ends.enter, arg="hidden_states")
        s[f"{attention}.{{q,k,v}}_proj"].column(input="prepared", heads=heads)
        s[f"{attention}.out_proj"].row(ends.leave)
    if "encoder_attn" in kinds:
        s[f"{blocks}.encoder_attn"].sync("fwd_pre", "copy", arg="key_value_states")
    s[f"{blocks}.fc1"].sync("fwd_pre", ends.enter).column(input="prepared")
    s[f"{blocks}.fc2"].row(ends.leave)


def _require_covered(config: Any, s: Schedule, stacks: list[str], seq: bool) -> None:
    tp, sp = s.mesh.tp.size(), s.mesh.sp.size()
    if sp > 1:
        raise ConfigError(
            f"Whisper has sound and text, two sequences of which each has its own length, and Ulysses (sp {sp}) cuts one: give these ranks"
            " to tp or dp"
        )
    if seq and "encoder" in stacks and config.max_source_positions % tp:
        raise ConfigError(
            f"max_source_positions ({config.max_source_positions}) must be a multiple of tp ({tp}) to be cut along the sequence: leave seq"
            " out (E12)"
        )
    if tp > 1 and not seq and config.activation_dropout > 0:
        raise ConfigError(
            f"activation_dropout ({config.activation_dropout}) of Whisper's layers works on what is split, in the same module as dropout on"
            " what is whole, and random numbers are told apart by module: set it to 0, or take seq=True"
        )
