"""Rules between the model's fields: sizes, activation, rotary positions, and what only GPT or only BERT supports."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_sp.config.fields import flag_name
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.utils.numbers import division


# a rule is a condition and a sentence
# fmt: off
def resolve_groups(config: Config) -> Iterator[str]:
    """Make --group-query-attention and --num-query-groups agree; idempotent. Yield a line where one has no effect."""
    model, groups = config.model, config.model.num_query_groups
    where = config.given.get(("model", "num_query_groups"), "")
    if not config.knows_model:
        return
    if ("model", "group_query_attention") in config.given and not model.group_query_attention:
        if groups is not None:  # all arguments of Megatron in a file: false, and its default of 1
            model.num_query_groups = None
            why = "without --group-query-attention: each query head has its own key and value"
            yield f"{where or '--num-query-groups'} ({why})"
    elif groups is not None:
        # Megatron-DeepSpeed's --num-key-value-heads always counts
        is_megatrons = where.endswith(("num-query-groups", "num_query_groups"))
        if is_megatrons and not model.group_query_attention and groups != model.num_attention_heads:
            config.understood += (f"{where} {groups} (these are the key/value heads, with or without"
                " --group-query-attention; Megatron-LM would have one for each of the"
                f" {model.num_attention_heads} query heads)",)
        model.group_query_attention = True
    elif model.group_query_attention:
        model.num_query_groups = 1
        config.understood += (
            "--group-query-attention (without --num-query-groups it is one key/value head for all, as in Megatron-LM)",)


def resolve_gelu(model: ModelConfig) -> None:
    """Say which GELU the model has where no flag does, for a checkpoint to hold what was trained; idempotent."""
    if model.is_bert:
        model.bert_head_activation = model.head_activation  # first: it depends on whether the next field was given
    model.gelu_approximate = "tanh" if model.has_tanh_gelu else "none"


def shape_violations(config: Config) -> Iterator[str]:
    """Yield a message for each violated rule of the model's shape and variants."""
    model = config.model
    hidden, heads, length = model.hidden_size, model.num_attention_heads, model.seq_length
    shape = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    missing = [flag_name(name) for name in shape if getattr(model, name) is None]
    if missing:
        are = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} required"
        yield f"{are}: give the shape of the model, or --load DIR --use-checkpoint-args"
    if hidden and heads and not model.kv_channels and hidden % heads:
        yield (f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads}): {division(hidden, heads)};"
            " change one of them, or give --kv-channels (width of a head)")
    if hidden and model.ffn_hidden_size is None and model.ffn_size == 0:
        yield (f"the MLP would have no width: with --{'swiglu' if model.swiglu else 'geglu'} it is 8/3 * hidden_size"
            f" ({hidden}), rounded down to a multiple of 64, and that is 0; give --ffn-hidden-size")
    groups = model.num_query_groups
    if heads and groups and heads % groups:
        tp = config.parallel.tensor_model_parallel_size
        legal = [str(n) for n in range(1, min(heads, 256) + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
        rule = f"num_attention_heads ({heads}) must be a multiple of num_query_groups ({groups})"
        yield f"{rule}: {division(heads, groups)}; use {', '.join(legal)}"
    is_rotary = model.position_embedding_type == "rope"
    if is_rotary and not 0 < model.rotary_percent <= 1:
        yield f"rotary_percent ({model.rotary_percent}) must be in (0, 1]: it is the share of each head that is rotated"
    elif is_rotary and model.knows_head_dim and (model.rotary_dim < 2 or model.rotary_dim % 2):
        yield ("the rotated width must be even and at least 2, for channels turn in pairs: int(head_dim"
            f" {model.head_dim} * rotary_percent {model.rotary_percent}) = {model.rotary_dim}; change --rotary-percent"
            " or --kv-channels")
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(model, name) >= 1:
            yield f"{name} ({getattr(model, name)}) must be in [0, 1): it is the share that is dropped"
    if model.norm_epsilon <= 0:
        rule = "must be above 0: it keeps the division by the standard deviation finite"
        yield f"norm_epsilon ({model.norm_epsilon}) {rule}"
    if length and model.max_position_embeddings and model.max_position_embeddings < length:
        yield (f"max_position_embeddings ({model.max_position_embeddings}) must be at least seq_length ({length}):"
            f" raise --max-position-embeddings to {length} or leave it out")
    yield from variant_violations(model)


def variant_violations(model: ModelConfig) -> Iterator[str]:
    """Check what does not depend on the model's sizes."""
    chosen = [flag_name(name) for name in ("swiglu", "geglu", "relu", "squared_relu") if getattr(model, name)]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other: give one activation"
    if model.qk_layernorm_scope == "all":
        if not model.qk_layernorm:
            yield "--qk-layernorm-scope all is about norms of queries and keys: add --qk-layernorm, or leave it out"
        elif model.normalization != "RMSNorm":
            yield (f"--qk-layernorm-scope all is for RMSNorm, and normalization is {model.normalization}: add"
                " --normalization RMSNorm")
    is_rotary, factor = model.position_embedding_type == "rope", model.rotary_seq_len_interpolation_factor
    if is_rotary and model.rotary_base <= 0:
        yield f"rotary_base ({model.rotary_base}) must be above 0"
    interpolation = f"--rotary-seq-len-interpolation-factor {factor:g}"
    for flag, given in (("--use-rope-scaling", model.use_rope_scaling), (interpolation, factor != 1)):
        if given and not is_rotary:
            yield f"{flag} is about rotary positions: add --position-embedding-type rope, or leave it out"
    if model.use_rope_scaling and factor != 1:
        yield f"--use-rope-scaling and {interpolation} are two ways to make the same sequences longer: give one"
    for name in ("rotary_seq_len_interpolation_factor", "rope_scaling_factor", "rope_scaling_low_freq_factor"):
        if getattr(model, name) <= 0:
            yield f"{name} ({getattr(model, name):g}) must be above 0"
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if high <= low:
        rule = f"rope_scaling_high_freq_factor ({high:g}) must be above rope_scaling_low_freq_factor ({low:g})"
        yield f"{rule}: frequencies between the two are stretched in part"
    yield from _bert(model)


def _bert(model: ModelConfig) -> Iterator[str]:
    head, window = model.bert_head_activation, model.window_size
    if not model.is_bert:
        for flag, given in (
            ("norm-placement post", model.norm_placement == "post"), ("num-tokentypes", model.num_tokentypes),
            ("bert-no-binary-head", model.bert_no_binary_head), (f"bert-head-activation {head}", head),
        ):
            if given:
                yield f"--{flag} is for BERT (pretrain_bert.py), and this is a GPT: leave it out"
        return
    for flag, given, instead in (
        ("use-parallel-residual", model.use_parallel_residual, "here attention comes first, then the MLP"),
        (f"window-size {window}", window, "BERT's tokens see all of their sequence"),
        ("untie-embeddings-and-output-weights", model.untie_embeddings_and_output_weights,
         "BERT predicts masked tokens with the embedding's own table"),
    ):
        if given:
            yield f"--{flag} is for GPT: {instead}; leave it out"
    if model.has_order_head and model.num_tokentypes == 1:
        yield ("num_tokentypes (1) must be at least 2 (or 0) with the sentence-order task, whose samples have two"
            " segments: leave it out, or add --bert-no-binary-head")
