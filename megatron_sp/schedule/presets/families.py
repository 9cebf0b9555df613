"""Presets of families: a function for each, in ordinary lines of a schedule."""

from __future__ import annotations

from typing import Any

from megatron_sp.schedule.presets.registry import (
    Around,
    Blocks,
    around,
    base_of,
    config_of,
    differ,
    drops,
    module_or_none,
    register_preset,
    share_key_values,
)
from megatron_sp.schedule.schedule import Schedule
from megatron_sp.utils.errors import ConfigError


@register_preset("bert", "roberta")
def bert(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of BERT and RoBERTa, with any head."""
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


@register_preset("gpt2")
def gpt2(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of GPT-2: one projection for q, k and v with a transposed weight (``Conv1D``); its width follows."""
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


@register_preset("gpt_neox")
def gpt_neox(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of GPT-NeoX (Pythia): one projection with q, k and v adjacent within each head."""
    config, blocks, (enter, leave) = config_of(s), f"{base_of(s)}layers.*", around(seq)

    s[f"{blocks}.attention"].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{blocks}.attention.query_key_value"].column(
        input="prepared", blocks=1, heads=config.num_attention_heads
    )  # cut between heads
    s[f"{blocks}.attention.dense"].row(leave)

    s[f"{blocks}.mlp"].sync("fwd_pre", enter)
    s[f"{blocks}.mlp.dense_h_to_4h"].column(input="prepared")
    s[f"{blocks}.mlp.dense_4h_to_h"].row(leave)

    differ(s, blocks, f"{blocks}.attention", seq=seq)
    return Blocks(blocks, f"{base_of(s)}layers.0", f"{base_of(s)}final_layer_norm")


@register_preset("llama", "mistral", "qwen2", "qwen3")
def llama(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of Llama and models with the same modules: Mistral, Qwen2 (biases at q, k, v), Qwen3 (a norm within each head)."""
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


@register_preset("opt")
def opt(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of OPT, whose MLP is not a separate module and flattens batch and positions, before its first layer.

    With the sequence split, ranks therefore gather along the first dim there: this changes the order of the rows, which
    does not matter to an MLP, and the reduce_scatter after it splits along the same dim again.
    """
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


@register_preset("t5")
def t5(s: Schedule, seq: bool) -> Blocks:
    """Write the lines. Raises ConfigError: sp above 1."""
    config, (enter, leave) = config_of(s), around(seq)
    has_decoder = module_or_none(s, f"{base_of(s)}decoder") is not None
    stacks = f"{base_of(s)}{'{encoder,decoder}' if has_decoder else 'encoder'}"
    if (sp := s.mesh.sp.size()) > 1:
        raise ConfigError(
            f"T5's attention has a bias of positions for each head, which Ulysses (sp {sp}) does not trade: give these ranks to tp or dp"
        )
    blocks, heads = f"{stacks}.block.*", config.num_heads
    attention, mlp = (
        f"{blocks}.layer.*.{'{SelfAttention,EncDecAttention}' if has_decoder else 'SelfAttention'}",
        f"{blocks}.layer.*.DenseReluDense",
    )

    s[attention].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{attention}.{{q,k,v}}"].column(input="prepared", heads=heads)
    s[f"{attention}.relative_attention_bias"].column(heads=heads)
    s[f"{attention}.o"].row(leave)
    if has_decoder:
        s[f"{blocks}.layer.1.EncDecAttention"].sync("fwd_pre", "copy", arg="key_value_states")

    s[mlp].sync("fwd_pre", enter)
    s[f"{mlp}.wi{'_*' if config.is_gated_act else ''}"].column(input="prepared")
    s[f"{mlp}.wo"].row(leave)

    differ(s, blocks, attention, mlp, seq=seq)
    last = f"{base_of(s)}{'decoder' if has_decoder else 'encoder'}"
    if has_decoder and seq:
        s.sequence(f"{base_of(s)}encoder.block.0", f"{base_of(s)}encoder.final_layer_norm")
    return Blocks(blocks, f"{last}.block.0", f"{last}.final_layer_norm")


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


@register_preset("modernbert")
def modernbert(s: Schedule, seq: bool) -> Blocks:
    """Write the lines of ModernBERT: fused q, k, v projection, fused gate and up of the MLP."""
    config, blocks, (enter, leave) = config_of(s), f"{base_of(s)}layers.*", around(seq)

    s[f"{blocks}.attn"].sync("fwd_pre", enter, arg="hidden_states")
    s[f"{blocks}.attn.Wqkv"].column(input="prepared", blocks=3, heads=config.num_attention_heads)
    s[f"{blocks}.attn.Wo"].row(leave)

    s[f"{blocks}.mlp"].sync("fwd_pre", enter)
    s[f"{blocks}.mlp.Wi"].column(input="prepared", blocks=2)
    s[f"{blocks}.mlp.Wo"].row(leave)

    differ(s, blocks, f"{blocks}.attn", f"{blocks}.mlp", seq=seq)
    if drops(config) and not seq:
        s[f"{blocks}.attn.out_drop"].rng("same")  # after the sum, inside of the module that differs
    return Blocks(blocks, f"{base_of(s)}layers.0", f"{base_of(s)}final_norm")


@register_preset("whisper")
def whisper(s: Schedule, seq: bool) -> Blocks:
    """Write the lines. Raises ConfigError: sp above 1, audio positions that tp does not divide, or activation_dropout without ``seq``."""
    config, ends = config_of(s), around(seq)
    stacks = [name for name in ("encoder", "decoder") if module_or_none(s, f"{base_of(s)}{name}") is not None]
    _require_covered_encoder_decoder(config, s, stacks, seq)
    for name in stacks:
        _write_stack(s, f"{base_of(s)}{name}", getattr(config, f"{name}_attention_heads"), ends)
    layers = f"{base_of(s)}{stacks[0] if len(stacks) == 1 else '{encoder,decoder}'}.layers.*"
    attention = f"{layers}.{'self_attn' if stacks == ['encoder'] else '{self_attn,encoder_attn}'}"
    if len(stacks) == 2:
        attention = (
            f"{base_of(s)}{{encoder.layers.*.self_attn,decoder.layers.*.self_attn,decoder.layers.*.encoder_attn}}"
        )
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


def _require_covered_encoder_decoder(config: Any, s: Schedule, stacks: list[str], seq: bool) -> None:
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
    image, patch = (
        tuple(n) if isinstance(n, (tuple, list)) else (n, n) for n in (config.image_size, config.patch_size)
    )
    patches = (image[0] // patch[0]) * (image[1] // patch[1])
    if (patches + 1) % tp:
        raise ConfigError(
            f"{patches} patches and the class token are {patches + 1} tokens, which must be a multiple of tp ({tp}) to be cut along the"
            " sequence: leave seq out, or choose another image_size or patch_size (E12)"
        )


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
    made = [_write_tower(s, f"{name}.", tower, seq) for name, tower in towers.items()] or [
        _write_tower(s, "", config, seq)
    ]
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
