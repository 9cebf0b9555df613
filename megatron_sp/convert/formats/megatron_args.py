"""Conversion between Megatron's arguments, which are stored in its checkpoints, and the configuration of our model.

Arguments that change the model and have no counterpart here are refused by name. Missing arguments are derived from the
tensors, given by ``--set NAME=VALUE``, or assumed to be Megatron's default; otherwise the user
is asked for them.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_sp.config.flags.foreign_flags import STANDARD_SPECS
from megatron_sp.config.schema import ModelConfig
from megatron_sp.config.schema_model import layer_pattern
from megatron_sp.convert.families.family import Settings, pattern_of
from megatron_sp.convert.formats.megatron_layout import HEAD, WORDS
from megatron_sp.convert.model import Model, Options, require_sound
from megatron_sp.convert.tokenizers import MAX_BYTES, find_files
from megatron_sp.utils.errors import CheckpointError, ConfigError
from megatron_sp.utils.strict_json import parse_object, read_small_file

Shapes = Mapping[str, tuple[int, ...]]
_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(\d+)\.")
_ROUTER = re.compile(r"(?:decoder|encoder)\.layers\.\d+\.mlp\.router\.weight")


@dataclass
class Facts:
    """Facts about a whole model; None: the tensors do not determine it."""

    is_bert: bool  # it has a head for masked tokens
    num_layers: int  # number of layers of the whole model
    hidden_size: int
    padded_vocab_size: int  # rows of the embedding over all tp ranks
    ffn_size: int | None  # width of the MLP; that of one half if it is gated; None: all layers have experts
    is_gated: bool
    qkv_rows: int  # rows of the fused projection over all tp ranks
    positions: int | None
    token_types: int
    has_head: bool  # it has a weight of an output layer (with several stages this may be a copy of the embedding)
    has_order_head: bool
    has_bias: bool
    has_qkv_bias: bool
    has_norm_bias: bool
    head_dim: int | None  # from the norms of queries and keys
    attention_width: int  # columns of the output projection: heads * head_dim
    num_experts: int = 0  # experts of a layer, their width, and that of the shared one; 0: there are none
    expert_ffn_size: int = 0
    shared_ffn_size: int = 0
    has_expert_bias: bool = False


def facts_of(where: Path, first: Shapes, last: Shapes, *, tp: int, num_layers: int) -> Facts:
    """Derive the facts from the shapes of the tensors."""
    everything = {**last, **first}
    prefix = next((match[0] for name in first if (match := _LAYER.match(name))), "decoder.layers.0.")
    try:
        qkv, proj = (_table(first, f"{prefix}self_attention.{name}.weight") for name in ("linear_qkv", "linear_proj"))
        words = _table(first, WORDS)
        parts = (_mlp(everything, inside) for inside in ("", r"shared_experts\.", r"experts\.(0\.)?"))
        dense, shared, expert = parts
        if dense is None and expert is None:
            raise KeyError(f"{prefix}mlp.linear_fc1.weight")
    except KeyError as error:
        has = ", ".join(name[:80] for name in list(first)[:5])
        raise CheckpointError(f"{where} has no {error.args[0]}, but {has or 'no tensors'}: it is neither a GPT nor a"
                              " BERT") from None  # fmt: skip
    fc1, fc2 = dense or expert or ((), ())
    router = next((shape for name, shape in everything.items() if _ROUTER.fullmatch(name) and len(shape) == 2), (0, 0))
    positions, types, q_norm = (first.get(name, (0,))[0] for name in (
        "embedding.position_embeddings.weight", "embedding.tokentype_embeddings.weight",
        f"{prefix}self_attention.q_layernorm.weight"))  # fmt: skip
    return Facts(
        is_bert="lm_head.dense.weight" in last, num_layers=num_layers, hidden_size=words[1],
        padded_vocab_size=words[0] * tp, ffn_size=None if dense is None else dense[1][1] * tp,
        is_gated=fc1[0] == 2 * fc2[1], qkv_rows=qkv[0] * tp, positions=positions or None,
        token_types=types, has_head=HEAD in last, has_order_head="binary_head.weight" in last,
        has_bias=f"{prefix}self_attention.linear_proj.bias" in first,
        has_qkv_bias=f"{prefix}self_attention.linear_qkv.bias" in first,
        has_norm_bias=f"{prefix}input_layernorm.bias" in first, head_dim=q_norm or None,
        attention_width=proj[1] * tp, num_experts=router[0],
        expert_ffn_size=0 if expert is None else expert[1][1] * tp,
        shared_ffn_size=0 if shared is None else shared[1][1] * tp,
        has_expert_bias=any(name.endswith(".mlp.router.expert_bias") for name in everything),
    )  # fmt: skip


def _mlp(shapes: Shapes, inside: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    pattern = re.compile(rf"((?:decoder|encoder)\.layers\.\d+\.mlp\.{inside})linear_fc1\.weight")
    name = next((name for name in shapes if pattern.fullmatch(name)), None)
    if name is None:
        return None
    pair = {key: shapes[key] for key in (name, name.replace("linear_fc1", "linear_fc2"))}  # KeyError: half is missing
    if inside.startswith("experts") and all(len(shape) == 3 for shape in pair.values()):
        pair = {key: shape[1:] for key, shape in pair.items()}  # stacked
    first, second = (_table(pair, key) for key in pair)
    return first, second


def _table(shapes: Shapes, name: str) -> tuple[int, ...]:
    shape = shapes[name]
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{name} is {list(shape)[:8]}, and must be a table with rows and columns: it is damaged,"
                              " or of no model")  # fmt: skip
    return shape


_MAX_VALUES = 4_000_000  # a large vocabulary has some 250,000 words, and twice as many merges of three values each


def padded_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Return the number of rows of the table over all tp ranks."""
    unit = divisible_by * tp
    return (vocab_size + unit - 1) // unit * unit


def true_size(settings: Settings, padded: int, tp: int, options: Options) -> int:
    """Return the entries of the vocabulary: those of --vocab-size or --tokenizer, else those in the arguments."""
    given, what = options.vocab_size, "--vocab-size"
    if given is None and options.tokenizer is not None:
        given, what = tokenizer_size(options.tokenizer), f"--tokenizer {options.tokenizer}: its size"
    if given is not None:
        if given > padded:
            raise ConfigError(f"{what} ({given}) must be at most the {padded} rows that the vocabulary has in the"
                              " checkpoint")  # fmt: skip
        return given
    divisible_by = settings.count("make_vocab_size_divisible_by", None)
    stated = settings.count("vocab_size", None)
    if stated is not None:
        stated += settings.get("tokenizer_type", str, "") == "NullTokenizer"  # its end-of-text token is not counted
        fits = stated <= padded if divisible_by is None else padded_size(stated, divisible_by, tp) == padded
        if fits:
            return int(stated)
    if divisible_by is not None and divisible_by * tp == 1:
        return padded
    raise ConfigError(f"{settings.where} has {padded} rows of the vocabulary, of which the last may only fill it up,"
                      " and does not say how many are real: give --vocab-size N (the tokenizer's size), or --tokenizer"
                      f" PATH, or --vocab-size {padded} to keep all")  # fmt: skip


def tokenizer_size(path: Path) -> int | None:
    """Return the number of entries in a tokenizer's files, or None if they do not specify it."""
    files = find_files(path)
    name = next(
        (name for name in ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model") if name in files), ""
    )
    if not name:
        return None
    try:
        data = read_small_file(files[name], MAX_BYTES)
        if name == "tokenizer.model":
            import sentencepiece

            return int(sentencepiece.SentencePieceProcessor(model_proto=data).get_piece_size())
        if name == "vocab.txt":
            return len(data.decode("utf-8").splitlines())
        document = parse_object(data, str(files[name]), _MAX_VALUES)
        if name == "vocab.json":
            return int(max(document.values())) + 1
        words, added = document["model"]["vocab"], document.get("added_tokens") or []
        ids = list(words.values()) if isinstance(words, dict) else list(range(len(words)))
        return int(max([*ids, *(token["id"] for token in added)])) + 1
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{files[name]} cannot be read as a tokenizer: {str(error)[:200]}") from None


# arguments that we do not support: the values that change nothing, and what the model does with others.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "multi_latent_attention": ((None, False), "has multi-latent attention"),
    "attention_output_gate": ((None, False), "gates the output of attention"),
    "apply_residual_connection_post_layernorm": ((None, False), "takes the residual from after the norm"),
    "mtp_num_layers": ((None, 0), "has heads for further tokens"),
    "heterogeneous_layers_config_path": ((None, ""), "has layers of different kinds"),
    "is_hybrid_model": ((None, False), "is a hybrid of attention and state-space layers"),
    "hybrid_attention_ratio": ((None, 0, 0.0), "is a hybrid of attention and state-space layers"),
    "hybrid_mlp_ratio": ((None, 0, 0.0), "is a hybrid of attention and state-space layers"),
    "hybrid_override_pattern": ((None, ""), "is a hybrid of attention and state-space layers"),
    "experimental_attention_variant": ((None, ""), "has another kind of attention"),
    "linear_attention_freq": ((None, 0), "has linear attention"),
    "softmax_type": ((None, "vanilla"), "has another softmax"),
    "softmax_scale": ((None,), "scales attention scores in another way"),
    "qk_l2_norm": ((None, False), "normalizes queries and keys by their length"),
    "no_rope_freq": ((None, 0), "has layers without rotary positions"),
    "window_attn_skip_freq": ((None, 0), "has a window in some layers only"),
    "mrope_section": ((None,), "has positions of several kinds"),
    "glu_linear_offset": ((None, 0, 0.0), "adds to the linear half of the MLP"),
    "activation_func_clamp_value": ((None,), "clamps the MLP"),
    "quick_geglu": ((None, False), "has another activation"),
    "retro_add_retriever": ((None, False), "retrieves"),
    "use_alibi_position_embeddings": ((None, False), "has ALiBi positions"),
    "enable_hyper_connections": ((None, False), "has hyper-connections"),
    "use_mup": ((None, False), "scales activations (muP)"),
    "spec": ((None, "", []), "has layers of a specification of its own"),
    "embed_layernorm": ((None, False), "has a norm after the embedding"),
}  # fmt: skip


# the same for mixtures of experts
_NEUTRAL_OF_EXPERTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "moe_expert_capacity_factor": ((None,), "drops tokens of experts that are full"),
    "moe_shared_expert_gate": ((None, False), "has a gate of the shared expert"),
    "moe_use_shared_expert_gate": ((None, False), "has a gate of the shared expert"),
    "moe_apply_probs_on_input": ((None, False), "applies weights to the input of experts"),
    "moe_latent_size": ((None, 0), "has experts of another width than the rest"),
    "moe_router_force_load_balancing": ((None, False), "chooses experts at random"),
    "moe_n_hash_layers": ((None, 0), "chooses experts by tokens"),
    "moe_use_legacy_grouped_gemm": ((None, False), "keeps all experts of a rank in one matrix"),
}  # fmt: skip


# arguments that are fields of ours under the same name, and Megatron's defaults: read and written
_SAME: dict[str, Any] = {
    "attention_dropout": 0.1, "hidden_dropout": 0.1, "init_method_std": 0.02, "make_vocab_size_divisible_by": 128,
    "apply_layernorm_1p": False, "squared_relu": False,
}  # fmt: skip
_SAME_OF_ROPE: dict[str, Any] = {"rotary_percent": 1.0, "use_rope_scaling": False, "rope_scaling_factor": 8.0}
_SAME_OF_EXPERTS: dict[str, Any] = {
    "moe_router_topk": 2, "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None,
    "moe_router_group_topk": None, "moe_router_bias_update_rate": 1e-3, "moe_z_loss_coeff": None,
}  # fmt: skip
_COUNTS = ("make_vocab_size_divisible_by", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk")


def _set_same(config: ModelConfig, settings: Settings, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name, default in defaults.items():
        default = given.get(name, default)
        kind = bool if isinstance(default, bool) else float
        value = settings.count(name, default) if name in _COUNTS else settings.get(name, kind, default)
        setattr(config, name, value)


def _refuse(settings: Settings, neutral: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    for name, (allowed, why) in neutral.items():
        value = settings.document.get(name)
        if name == "spec" and isinstance(value, (list, tuple)) and all(word in STANDARD_SPECS for word in value):
            continue
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise CheckpointError(f"{settings.where}: {name} is {str(value)[:100]!r}, and so the model {why}, which"
                                  " cannot be converted")  # fmt: skip


def _stated(settings: Settings, given: Mapping[str, Any], name: str) -> int | None:
    count = settings.count(name, None)
    if count is None and (count := given.get(name)) is not None and count < 1:
        raise ConfigError(f"--set {name.replace('_', '-')}={count} must be at least 1")
    return count  # type: ignore[no-any-return]


def config_of(
    settings: Settings, facts: Facts, options: Options, where: Path, num_tensors: int, *, tp: int, legacy: bool
) -> ModelConfig:
    """Return the model of a checkpoint, from its arguments, its tensors and --set, which comes last."""
    given, vocab_size = options.given, true_size(settings, facts.padded_vocab_size, tp, options)
    _refuse(settings, _NEUTRAL)
    sizes = {"num_layers": facts.num_layers, "hidden_size": facts.hidden_size, "ffn_hidden_size": facts.ffn_size}
    for name, derived in sizes.items():
        if derived is not None and (stated := settings.count(name, derived)) != derived:
            raise CheckpointError(f"{settings.where}: {name} is {stated}, but {derived} by the tensors that are there:"
                                  " files are missing, or of another checkpoint")  # fmt: skip
    heads = _stated(settings, given, "num_attention_heads")
    if heads is None:
        raise ConfigError(f"{settings.where} does not say how many heads the model has: give --set"
                          " num-attention-heads=N")  # fmt: skip
    is_untied = not facts.is_bert and bool(settings.get("untie_embeddings_and_output_weights", bool, facts.has_head))
    head_dim = _stated(settings, given, "kv_channels") or facts.head_dim or facts.attention_width // heads
    if head_dim < 1:
        raise CheckpointError(f"{settings.where}: num_attention_heads is {heads}, more than the {facts.attention_width}"
                              " columns that all heads have together")  # fmt: skip
    bias = settings.get("add_bias_linear", bool, facts.has_bias)
    epsilon = settings.get("layernorm_epsilon", float, given.get("norm_epsilon", 1e-5))
    config = ModelConfig(
        model_family="bert" if facts.is_bert else "gpt", num_layers=facts.num_layers, hidden_size=facts.hidden_size,
        num_attention_heads=heads, kv_channels=head_dim, num_query_groups=_groups(settings, facts, heads, head_dim),
        ffn_hidden_size=facts.ffn_size or settings.count("ffn_hidden_size", facts.expert_ffn_size),
        vocab_size=vocab_size, normalization="LayerNorm" if facts.has_norm_bias else "RMSNorm",
        norm_epsilon=settings.get("norm_epsilon", float, epsilon),
        qk_layernorm=settings.get("qk_layernorm", bool, facts.head_dim is not None), disable_bias_linear=not bias,
        add_qkv_bias=not bias and facts.has_qkv_bias, untie_embeddings_and_output_weights=is_untied,
        bert_no_binary_head=facts.is_bert and not facts.has_order_head,
        num_tokentypes=facts.token_types if facts.is_bert else None,
    )  # fmt: skip
    _set_same(config, settings, _SAME, given)
    set_experts(config, settings, facts)
    _set_positions(config, settings, facts, given)
    _set_activation(config, settings, facts, given, legacy=legacy)
    window = settings.document.get("window_size")
    if window not in (None, (-1, -1), [-1, -1]):
        is_pair = isinstance(window, (tuple, list)) and len(window) == 2
        if not is_pair or not isinstance(window[0], int) or window[0] < 0 or window[1] not in (0, -1):
            raise CheckpointError(f"{settings.where}: window_size is {str(window)[:100]}: only (N, 0), the N tokens"
                                  " before a token, can be converted")  # fmt: skip
        config.window_size = window[0] + 1
    for name, value in given.items():
        setattr(config, name, value)
    require_sound(config, num_tensors, str(where))
    return config


def _groups(settings: Settings, facts: Facts, heads: int, head_dim: int) -> int:
    groups = (facts.qkv_rows // head_dim - heads) // 2
    stated = settings.count("num_query_groups", None) if settings.get("group_query_attention", bool, False) else None
    stated = stated or settings.count("num_key_value_heads", None)
    count = int(stated or groups)
    is_whole = heads * head_dim == facts.attention_width and (heads + 2 * count) * head_dim == facts.qkv_rows
    if not is_whole or count < 1 or heads % count:
        raise CheckpointError(f"{settings.where}: the projections of queries, keys and values have {facts.qkv_rows}"
                              f" rows, which {heads} heads of {head_dim} channels with {count} groups of keys and"
                              " values do not make up")  # fmt: skip
    return count


def _set_positions(config: ModelConfig, settings: Settings, facts: Facts, given: Mapping[str, Any]) -> None:
    kind = settings.get("position_embedding_type", str, None)
    if settings.get("use_rotary_position_embeddings", bool, False):
        kind = "rope"
    kind = kind or ("learned_absolute" if facts.positions else given.get("position_embedding_type", None))
    if kind is None:
        raise ConfigError(f"{settings.where} has no table of positions and does not say why: give --set"
                          " position-embedding-type=rope or =none")  # fmt: skip
    if kind not in ("learned_absolute", "rope", "none"):
        raise CheckpointError(f"{settings.where}: position_embedding_type is {kind[:100]!r}: only learned_absolute,"
                              " rope and none can be converted")  # fmt: skip
    config.position_embedding_type = kind  # type: ignore[assignment]
    usual = given.get("max_position_embeddings", 2048)
    config.max_position_embeddings = facts.positions or settings.count("max_position_embeddings", usual)
    config.seq_length = settings.count("seq_length", config.max_position_embeddings)
    if kind != "rope":
        return
    if not settings.document and "rotary_base" not in given:
        raise ConfigError(f"{settings.where} does not say the base of its rotary positions: give --set"
                          " rotary-base=10000, or what it was")  # fmt: skip
    _set_same(config, settings, _SAME_OF_ROPE, {})
    config.rotary_base = settings.get("rotary_base", float, settings.get("rope_theta", float, 10000.0))
    config.rotary_seq_len_interpolation_factor = settings.get("rotary_seq_len_interpolation_factor", float, 1.0)


def neighbours_of(settings: Settings, config: ModelConfig, order: str) -> int:
    """Return how many channels of a head are rotated by pairs of neighbours (--rotary-interleaved)."""
    if config.position_embedding_type != "rope" or not settings.get("rotary_interleaved", bool, False):
        return 0
    if order != "interleaved":
        raise CheckpointError(f"{settings.where}: rotary_interleaved is True, which cannot be converted from files"
                              f" whose rows of queries, keys and values are in the order {order}")  # fmt: skip
    return config.rotary_dim


def _set_activation(
    config: ModelConfig, settings: Settings, facts: Facts, given: Mapping[str, Any], *, legacy: bool
) -> None:
    config.swiglu = settings.get("swiglu", bool, facts.is_gated)
    if facts.is_gated and not config.swiglu:
        raise CheckpointError(f"{settings.where}: the MLP is gated, and not by --swiglu: such a model cannot be"
                              " converted")  # fmt: skip
    openai = legacy and settings.get("openai_gelu", bool, False)
    fused = settings.get("bias_gelu_fusion", bool, True) and not config.disable_bias_linear
    if not config.swiglu and not config.squared_relu:  # the activation is a GELU
        config.gelu_approximate = "tanh" if openai or fused else "none"
    if facts.is_bert:
        config.bert_head_activation = "gelu_tanh" if openai else "gelu"


def needs_openai_gelu(config: ModelConfig) -> bool:
    """Return whether GELU is the tanh approximation outside of Megatron's fused kernel, which takes --openai-gelu."""
    of_head = config.is_bert and config.head_activation == "gelu_tanh"
    return config.activation == "gelu_tanh" and (of_head or config.disable_bias_linear)


def note_of_activation(model: Model, *, legacy: bool) -> None:
    """Add a note for the user about flags that Megatron does not read from a checkpoint."""
    if legacy and needs_openai_gelu(model.config):
        model.notes.append("give Megatron --openai-gelu --no-bias-gelu-fusion, which --use-checkpoint-args does not"
                           " take from the files")  # fmt: skip
    elif model.config.activation == "gelu" and not model.config.disable_bias_linear:
        model.notes.append("give Megatron --no-bias-gelu-fusion, which --use-checkpoint-args does not take from the"
                           " files")  # fmt: skip


def require_fit(model: Model, whose: str, *, legacy: bool) -> None:
    """Check that Megatron can compute what the model does."""
    if (what := _misfit(model.config, model.num_classes, legacy=legacy)) is None:
        return
    way_out = "it cannot be written for it"
    if not legacy and _misfit(model.config, model.num_classes, legacy=True) is None:
        way_out = ("versions before 2024 have it, as --openai-gelu; add --megatron-names legacy to --to megatron, or"
                   " use --to megatron-deepspeed")  # fmt: skip
    raise CheckpointError(f"the model has {what}, which {whose} has not: {way_out}")


def _misfit(c: ModelConfig, num_classes: int, *, legacy: bool) -> str | None:
    openai = legacy and needs_openai_gelu(c)
    is_alone = c.has_experts and c.moe_router_topk == 1 and c.moe_router_score_function == "softmax"
    is_tanh = c.activation == "gelu_tanh"
    problems = {
        "a classifier": num_classes > 0,
        "experts": legacy and c.has_experts,
        "experts with a weight of 1 each": is_alone and not c.moe_router_pre_softmax,
        "experts with biases and a router without one": c.has_experts and c.mlp_bias,
        "norms of queries and keys over all heads": c.qk_layernorm_scope == "all",
        "norms after attention and MLP": c.norm_placement != "pre",
        "parallel residuals": c.use_parallel_residual,
        "a gated GELU": c.geglu,
        "a ReLU": c.relu,
        "a bias in the output projection alone": c.proj_bias != (not c.disable_bias_linear),
        "a bias in the MLP alone": c.mlp_bias != (not c.disable_bias_linear),
        "rotary frequencies of another original length than 8192 or other factors than 1 and 4": c.use_rope_scaling
        and c.rope_scaling[1:] != (1.0, 4.0, 8192),
        "a head for masked tokens with another activation than exact GELU": c.is_bert
        and c.head_activation != ("gelu_tanh" if openai else "gelu"),
        "the tanh approximation of GELU without biases": is_tanh and c.disable_bias_linear and not openai,
    }  # fmt: skip
    return next((what for what, is_so in problems.items() if is_so), None)


def namespace(
    model: Model, *, tp: int, pp: int, padded_vocab_size: int, legacy: bool, params_dtype: Any, rank: int = 0,
    ep: int = 1
) -> Namespace:  # fmt: skip
    """Return the arguments that Megatron's --use-checkpoint-args, its check on --load, and our own reader need."""
    c, openai = model.config, legacy and needs_openai_gelu(model.config)
    name, factor = str(params_dtype).removeprefix("torch."), c.rotary_seq_len_interpolation_factor
    values: dict[str, Any] = {
        "num_layers": c.num_layers, "encoder_num_layers": c.num_layers, "hidden_size": c.hidden_size,
        "ffn_hidden_size": c.ffn_size, "num_attention_heads": c.num_attention_heads, "kv_channels": c.head_dim,
        "group_query_attention": c.num_groups != c.num_attention_heads, "num_query_groups": c.num_groups,
        "seq_length": c.seq_length, "encoder_seq_length": c.seq_length, "max_position_embeddings": c.max_positions,
        "position_embedding_type": c.position_embedding_type,
        "add_position_embedding": c.position_embedding_type == "learned_absolute",
        "use_rotary_position_embeddings": c.position_embedding_type == "rope", "rotary_base": _whole(c.rotary_base),
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None if factor == 1.0 else _whole(factor),
        "normalization": c.normalization, "norm_epsilon": c.norm_epsilon, "layernorm_epsilon": c.norm_epsilon,
        "qk_layernorm": c.qk_layernorm, "swiglu": c.swiglu, "openai_gelu": openai,
        "bias_gelu_fusion": c.activation == "gelu_tanh" and not openai, "onnx_safe": None,
        "add_bias_linear": not c.disable_bias_linear, "add_qkv_bias": c.add_qkv_bias,
        "untie_embeddings_and_output_weights": c.untie_embeddings_and_output_weights,
        "padded_vocab_size": padded_vocab_size, "vocab_size": c.vocab_size,
        "window_size": None if c.window_size is None else (c.window_size - 1, 0),
        "bert_binary_head": not c.bert_no_binary_head, "apply_query_key_layer_scaling": False,
        **{name: getattr(c, name) for name in (*_SAME, *_SAME_OF_ROPE)}, **_expert_arguments(c, ep),
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None, "num_layers_per_virtual_pipeline_stage": None,
        "use_mcore_models": not legacy, "use_legacy_models": legacy,
        "transformer_impl": "local" if legacy else "transformer_engine", "bf16": name == "bfloat16",
        "fp16": name == "float16", "params_dtype": params_dtype, "iteration": model.step,
        "consumed_train_samples": model.consumed_samples, "consumed_valid_samples": 0, "skipped_train_samples": 0,
        "use_distributed_optimizer": False, "ckpt_format": "torch", "data_parallel_random_init": False,
        "world_size": tp * pp * ep, "rank": rank, "data_parallel_size": ep,
    }  # fmt: skip
    return Namespace(**values)


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


_BALANCE = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def set_experts(config: ModelConfig, settings: Settings, facts: Facts) -> None:
    """Set the experts of a model from the arguments, and from the tensors what these do not say."""
    stated, where = settings.document.get("num_experts"), settings.where
    if stated not in (None, 0, 1, [1]) and stated != facts.num_experts:
        count = facts.num_experts or "none under the names that are known"
        there = f"the tensors have {count}"
        raise CheckpointError(f"{where}: num_experts is {str(stated)[:60]!r}, and so the model is a mixture of experts,"
                              f" and {there}: it cannot be converted")  # fmt: skip
    if not facts.num_experts:
        return
    _refuse(settings, _NEUTRAL_OF_EXPERTS)
    if not settings.document:
        raise ConfigError(f"{where} does not say how tokens choose experts: such files hold the arguments of the"
                          " training")  # fmt: skip
    config.num_experts = facts.num_experts
    config.moe_ffn_hidden_size = facts.expert_ffn_size
    config.moe_shared_expert_intermediate_size = facts.shared_ffn_size or None
    _set_same(config, settings, _SAME_OF_EXPERTS, {})
    config.moe_layer_freq = _layers(settings, config.num_layers or 0)
    scores = {"softmax": "softmax", "sigmoid": "sigmoid"}
    config.moe_router_score_function = settings.choice("moe_router_score_function", scores, "softmax")
    is_softmax = config.moe_router_score_function == "softmax"
    config.moe_router_pre_softmax = settings.get("moe_router_pre_softmax", bool, False) and is_softmax
    config.moe_router_enable_expert_bias = facts.has_expert_bias
    config.moe_router_dtype = "fp64" if settings.document.get("moe_router_dtype") == "fp64" else "fp32"
    kind, coeff = (settings.document.get(name) for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"))
    if isinstance(kind, list):
        kind = kind[0] if len(kind) == 1 else "none"
    if isinstance(coeff, list):
        coeff = coeff[0] if len(coeff) == 1 else 0.0
    if kind not in _BALANCE or not isinstance(coeff, (int, float)) or not coeff > 0:
        return
    config.moe_router_load_balancing_type = "global_aux_loss" if kind == "global_aux_loss" else "seq_aux_loss"
    config.moe_aux_loss_coeff = float(coeff)


def _layers(settings: Settings, num_layers: int) -> str:
    freq = settings.document.get("moe_layer_freq", 1)
    if isinstance(freq, int) and not isinstance(freq, bool) and freq >= 1:
        return str(freq)
    if not isinstance(freq, list) or len(freq) != num_layers or any(one not in (0, 1) for one in freq):
        raise CheckpointError(f"{settings.where}: moe_layer_freq is {str(freq)[:100]}: only a number or a 0 or 1 for"
                              " each layer can be converted")  # fmt: skip
    return pattern_of(map(bool, freq))


def _expert_arguments(c: ModelConfig, ep: int) -> dict[str, Any]:
    if not c.has_experts:
        return {"num_experts": None}
    pattern = [int(has) for has in layer_pattern(c.moe_layer_freq, c.num_layers or 0)]
    freq: int | list[int] = int(c.moe_layer_freq) if c.moe_layer_freq.isdigit() else pattern
    balance = c.moe_router_load_balancing_type or "seq_aux_loss"
    return {
        **{name: getattr(c, name) for name in _SAME_OF_EXPERTS}, "num_experts": c.num_experts,
        "moe_ffn_hidden_size": c.expert_ffn_size,
        "moe_shared_expert_intermediate_size": c.shared_expert_size or None, "moe_layer_freq": freq,
        "moe_router_score_function": c.moe_router_score_function, "moe_router_pre_softmax": c.moe_router_pre_softmax,
        "moe_router_enable_expert_bias": c.moe_router_enable_expert_bias,
        "moe_router_dtype": c.moe_router_dtype,
        "moe_router_load_balancing_type": balance if c.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": c.moe_aux_loss_coeff, "moe_grouped_gemm": True,
        "expert_model_parallel_size": ep,
    }  # fmt: skip
