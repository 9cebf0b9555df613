"""Whose model a run trains: what its checkpoint says, and what the flags may say against it.

    the model       shape and formulas: weights belong to no other, so a flag that says something else is an error
    the new run's   where tokens are and how far they see: --finetune begins a new run, which may continue the weights with
                    other values, for longer sequences; a run that goes on keeps them
    the run's       dropout, losses beside the main one, formats: each process of a run may have its own

With --use-checkpoint-args all of it is the checkpoint's where no flag was given. The lists below say of each field of
``ModelConfig`` to which of the three it belongs. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_sp.checkpoint.stored_config import stored_configuration
from megatron_sp.config.concessions import is_read
from megatron_sp.config.rules import normalize, validate
from megatron_sp.config.rules_model import settle_gelu
from megatron_sp.config.schema import Config, ModelConfig, diff
from megatron_sp.utils.errors import CheckpointError, ConfigError

_BIASES = ("qkv_bias", "proj_bias", "mlp_bias")
MODEL: dict[str, tuple[str, ...]] = {
    **{
        name: (name,)
        for name in (
            "model_family", "num_layers", "hidden_size", "num_attention_heads", "position_embedding_type", "rotary_percent",
            "normalization", "norm_epsilon", "apply_layernorm_1p", "norm_placement", "qk_layernorm", "qk_layernorm_scope",
            "use_parallel_residual", "untie_embeddings_and_output_weights", "vocab_size", "num_experts", "moe_router_topk",
            "moe_layer_freq", "moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_num_groups",
            "moe_router_group_topk", "moe_router_enable_expert_bias",
        )
    },
    "kv_channels": ("head_dim",), "group_query_attention": ("num_groups",), "num_query_groups": ("num_groups",),
    "ffn_hidden_size": ("ffn_size",), "swiglu": ("activation",), "geglu": ("activation",), "relu": ("activation",),
    "squared_relu": ("activation",), "gelu_approximate": ("activation", "head_activation"), "bert_head_activation": ("head_activation",),
    "disable_bias_linear": _BIASES, "add_qkv_bias": _BIASES[:1], "add_proj_bias": _BIASES[1:2], "add_mlp_bias": _BIASES[2:],
    "num_tokentypes": ("token_types",), "bert_no_binary_head": ("has_order_head", "token_types"),
    "moe_ffn_hidden_size": ("expert_ffn_size",), "moe_shared_expert_intermediate_size": ("shared_expert_size",),
}  # fmt: skip
"""Fields that are the model, and what of it is compared: flags may say the same in other words."""
NEW_RUNS: dict[str, tuple[str, ...]] = {
    "rotary_base": ("rotary_base",), "rotary_seq_len_interpolation_factor": ("rotary_seq_len_interpolation_factor",),
    "window_size": ("window_size",), "use_rope_scaling": ("rope_scaling",), "rope_scaling_factor": ("rope_scaling",),
    "rope_scaling_low_freq_factor": ("rope_scaling",), "rope_scaling_high_freq_factor": ("rope_scaling",),
    "rope_scaling_original_length": ("rope_scaling",),
    "moe_router_pre_softmax": ("moe_router_pre_softmax",),  # with one expert for each token the router is not trained otherwise
}  # fmt: skip
"""Fields that a new run may change, and what is compared."""
RUNS = (
    "seq_length", "max_position_embeddings", "attention_dropout", "hidden_dropout", "init_method_std", "make_vocab_size_divisible_by",
    "moe_router_dtype", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate",
)  # fmt: skip
"""Fields that each process of a run may set anew. Of a table of learned positions the length is the model's."""

_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
_OF_EXPERTS = {"expert_ffn_size", "shared_expert_size", *(name for name in (*MODEL, *NEW_RUNS) if name.startswith("moe_"))}
_OF_ROTARY = {"rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor", "rope_scaling"}


def take_model(stored: dict[str, Any] | None, config: Config, world_size: int) -> bool:
    """Settle the model of a run that was told --use-checkpoint-args, and check what could not be checked without it.

    Args:
        stored: ``state.json`` of the checkpoint; None: there is none yet, so that the flags alone say what is trained.
        world_size: number of processes.
    Returns:
        True if the checkpoint's tokenizer is taken, too; its paths are still those of the training
        (``run_tokenizer.find_tokenizer``).
    Raises:
        ConfigError: a flag says something else than the checkpoint, or a rule is violated.
        CheckpointError: the stored configuration cannot be used.
    """
    takes_tokenizer = False if stored is None else adopt_checkpoint_args(stored, config)
    config.model_is_settled = True
    validate(normalize(config), world_size)
    return takes_tokenizer


def adopt_checkpoint_args(stored: dict[str, Any], config: Config) -> bool:
    """Take from the checkpoint what no flag says of the model, and the tokenizer if no flag names one. As ``take_model``."""
    old = stored_configuration(stored)[0].model
    said = {name: getattr(config.model, name) for name in vars(old) if config.says("model", name)}
    old.vocab_size = old.vocab_size or said.get("vocab_size")
    merged = replace(old, **said)
    rows = list(_differences(old, merged, {name: MODEL[name] for name in said if name in MODEL}))
    if rows:
        raise ConfigError(
            "--use-checkpoint-args takes the model from the checkpoint, and the flags say another one:\n"
            + "\n".join(rows)
            + "\nleave these flags out: the weights are those of no other model"
        )
    _settle_positions(old, merged, said)
    _settle_balance(merged, said)
    takes_tokenizer = not any(config.says("data", name) for name in _TOKENIZER) and "vocab_size" not in said
    if takes_tokenizer:
        data = stored_configuration(stored)[0].data
        for name in (*_TOKENIZER, *(() if config.says("data", "eod_id") else ("eod_id",))):
            setattr(config.data, name, getattr(data, name))
    for name in vars(merged):
        setattr(config.model, name, getattr(old if name in MODEL else merged, name))
    return takes_tokenizer


def _settle_positions(old: ModelConfig, merged: ModelConfig, said: dict[str, Any]) -> None:
    """Set the number of positions: the table's where they are learned, elsewhere at least as many as a sequence has."""
    length, given = merged.seq_length or 0, said.get("max_position_embeddings")
    rows = _value(old, "max_positions")
    if merged.position_embedding_type == "learned_absolute" and rows is not None:
        if length > rows or given not in (None, rows):
            what = f"seq_length ({length})" if length > rows else f"max_position_embeddings ({given})"
            raise ConfigError(f"{what} {_OF_TABLE.format(rows)}")
        merged.max_position_embeddings = rows  # also where a sequence is shorter now
    elif given is None and length > (merged.max_position_embeddings or length):
        merged.max_position_embeddings = None


def _settle_balance(merged: ModelConfig, said: dict[str, Any]) -> None:
    """Let a flag that begins or ends the loss for an even load do so alone, without its counterpart in the checkpoint."""
    kind, coefficient = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
    if merged.moe_aux_loss_coeff and merged.moe_router_load_balancing_type == "none":
        if coefficient in said and kind not in said:
            merged.moe_router_load_balancing_type = None
        elif kind in said and coefficient not in said:
            merged.moe_aux_loss_coeff = 0.0


_OF_TABLE = (
    "is not the number of learned positions in the checkpoint, {0}: a table has no rows for later ones, so use sequences of {0} tokens or"
    " less; models with rotary positions can be continued with longer ones"
)


def keep_gelu(stored: dict[str, Any], config: Config) -> list[str]:
    """Take the kinds of GELU from the checkpoint where no flag says which: their defaults have not always been those of Megatron.

    Returns:
        A line for each that a new training would have otherwise.
    """
    old, model, lines = stored_configuration(stored, normalize=True)[0].model, config.model, list[str]()
    of_mlp, of_head = (
        config.says("model", name) or name in config.preset_fields for name in ("gelu_approximate", "bert_head_activation")
    )  # fmt: skip
    for name, what, is_said in (
        ("gelu_approximate", "activation", of_mlp), ("bert_head_activation", "head_activation", of_mlp or of_head)
    ):  # fmt: skip
        before, now = getattr(old, what), getattr(model, what)
        alike = old.is_bert == model.is_bert and before.removesuffix("_tanh") == now.removesuffix("_tanh")
        if not is_said and alike and before != now:
            setattr(model, name, getattr(old, name))
            flag = f"--{name.replace('_', '-')} {getattr(model, name)}"
            lines.append(f"{flag}: the checkpoint was trained so; {now} would be a new training's, and is not taken")
    return lines


def keep_null_vocabulary(stored: dict[str, Any], config: Config) -> list[str]:
    """Take the vocabulary of a NullTokenizer from a checkpoint of the time when --vocab-size counted the end of documents, too.

    Returns:
        A line about it, if it is so.
    """
    old, size = stored_configuration(stored)[0], config.model.vocab_size or 0
    if not config.adds_null_end or old.data.tokenizer_type != "NullTokenizer" or old.model.vocab_size != size - 1:
        return []
    config.model.vocab_size = size - 1
    return [
        f"--vocab-size {size - 1}: the checkpoint was trained with as many ids, the last one to end documents; a new training has {size}"
    ]


def check_model(stored: dict[str, Any], config: Config, *, finetunes: bool) -> list[str]:
    """Compare the stored configuration with this one.

    Args:
        finetunes: a new run begins with the weights.
    Returns:
        A line about each harmless difference, "group.field: old -> new".
    Raises:
        CheckpointError: the model is another one; the message lists the differences.
    """
    old, _ = stored_configuration(stored)
    settle_gelu(old.model)
    if old.model.vocab_size is None:
        old.model.vocab_size = config.model.vocab_size
    rows = list(_differences(old.model, config.model, MODEL))
    before, now = _value(old.model, "max_positions"), _value(config.model, "max_positions")
    if before != now and config.model.position_embedding_type == "learned_absolute":
        rows.append(f"  max_position_embeddings: {before} in the checkpoint, {now} here; it {_OF_TABLE.format(before)}")
    if rows:
        raise CheckpointError(
            "the checkpoint is of another model:\n"
            + "\n".join(rows)
            + "\ngive the checkpoint's values, or leave these flags out and take them from it with --use-checkpoint-args"
        )
    rows = [] if finetunes else list(_differences(old.model, config.model, NEW_RUNS))
    if rows:
        raise CheckpointError(
            "the run of this checkpoint has computed something else with its weights:\n"
            + "\n".join(rows)
            + "\ngive the checkpoint's values to go on with it; or add --finetune, to begin a new run with its weights and these values"
        )
    silent = ("checkpoint.", "logging.", "data.num_workers")
    keeps = config.optimizer.use_checkpoint_opt_param_scheduler and not finetunes

    def taken(key: str) -> str:
        return " (not taken: --use-checkpoint-opt-param-scheduler keeps the former)" if keeps and key.startswith(_OF_SCHEDULE) else ""

    return [
        f"{key}: {a} -> {b}{taken(key)}" for key, (a, b) in diff(old, config).items()
        if not key.startswith(silent) and any(is_read(each, *key.split(".")) for each in (old, config))
    ]  # fmt: skip


_OF_SCHEDULE = (
    "optimizer.lr", "optimizer.min_lr", "optimizer.decoupled_", "optimizer.weight_decay", "optimizer.start_weight_decay",
    "optimizer.end_weight_decay",
)  # fmt: skip
"""Beginnings of the fields that make a run's schedule (``optim/lr_schedule.py``)."""


def _differences(old: ModelConfig, new: ModelConfig, compared: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield a line about each property in which two models differ."""
    for name in dict.fromkeys(name for names in compared.values() for name in names):
        before, now = _value(old, name), _value(new, name)
        if before != now and _matters(name, old, new):
            yield f"  {name}: {before} in the checkpoint, {now} here"


def _matters(name: str, old: ModelConfig, new: ModelConfig) -> bool:
    """Return whether a property of two models is one that both have: of what one does not have, its absence is the difference."""
    both = (old, new)
    if name in _OF_EXPERTS and not all(model.has_experts for model in both):
        return False
    if name == "moe_layer_freq" and old.num_layers == new.num_layers:
        return old.expert_layers(old.num_layers or 0) != new.expert_layers(new.num_layers or 0)
    if name in _OF_ROTARY and not all(model.position_embedding_type == "rope" for model in both):
        return False
    if name == "head_activation" and not all(model.is_bert for model in both):
        return False
    return name != "qk_layernorm_scope" or all(model.qk_layernorm for model in both)


def _value(model: ModelConfig, name: str) -> Any:
    try:
        return getattr(model, name)
    except ValueError:  # an incomplete stored shape
        return None
