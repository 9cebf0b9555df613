"""Preset of Falcon, which has one projection for q, k and v, packed in one of three ways:

new decoder architecture   group after group: some queries, one key, one value; split between groups
one head after another     q, k and v of each
multi_query                all queries, then one key and one value, which all heads share: attention stays whole, the MLP is split
"""

from __future__ import annotations

from typing import Any

from megatron_sp.schedule.presets.common import Blocks, around, base_of, config_of, differ
from megatron_sp.schedule.presets.registry import register_preset
from megatron_sp.schedule.schedule import Schedule
from megatron_sp.utils.errors import ConfigError


@register_preset("falcon")
def falcon(s: Schedule, seq: bool) -> Blocks:
    """Write the lines. Raises ConfigError: sp above 1; alibi; or multi_query with a sequence that is to be split."""
    config, blocks, (enter, leave) = config_of(s), f"{base_of(s)}h.*", around(seq)
    _require_covered(config, s.mesh.sp.size(), seq)
    attention, queries = f"{blocks}.self_attention", config.num_attention_heads

    if config.new_decoder_architecture or not config.multi_query:
        groups = config.num_kv_heads if config.new_decoder_architecture else queries
        s[attention].sync("fwd_pre", enter, arg="hidden_states")
        s[f"{attention}.query_key_value"].column(input="prepared", blocks=1, heads=groups)
        if groups != queries:
            s[attention].set("num_heads", divide="tp")  # those of the groups follow
        s[f"{attention}.dense"].row(leave)

    s[f"{blocks}.mlp"].sync("fwd_pre", enter)
    s[f"{blocks}.mlp.dense_h_to_4h"].column(input="prepared")
    s[f"{blocks}.mlp.dense_4h_to_h"].row(leave)

    differ(s, blocks, seq=seq)  # dropout comes only after the sums
    return Blocks(blocks, f"{base_of(s)}h.0", f"{base_of(s)}ln_f")


def _require_covered(config: Any, sp: int, seq: bool) -> None:
    if sp > 1:
        raise ConfigError(
            f"Falcon computes its attention itself, so Ulysses (sp {sp}) has no place to trade heads: give these ranks to tp or dp"
        )
    if config.alibi:
        raise ConfigError(
            "Falcon with slopes (alibi) adds a number for each head to its mask, which the preset does not cover: write its lines with"
            " schedule(model, mesh), as docs/reference/schedule_presets.md does for Bloom"
        )
    if seq and config.multi_query and not config.new_decoder_architecture:
        raise ConfigError(
            "Falcon with multi_query has one key and value for all heads, so its attention stays whole on every rank, and wants all"
            " positions there: leave seq out"
        )
