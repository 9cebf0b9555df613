"""Checks of a resumed run: its learning-rate schedule, data, tokenizer and model must be those of the checkpoint."""

# The first two would go wrong silently: the loss goes on falling while the rate jumps, or while samples repeat. A dry
# run checks the model, too, so torch is not imported here.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_sp.checkpoint.manifest import stored_configuration
from megatron_sp.config.rules import is_read, normalize, validate
from megatron_sp.config.rules_model import resolve_gelu
from megatron_sp.config.schema import Config, DataConfig, ModelConfig, OptimizerConfig, default_type, diff
from megatron_sp.data.tokenizers import Tokenizer, kept
from megatron_sp.optim.lr_schedule import LRSchedule
from megatron_sp.utils.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from megatron_sp.comm.groups import Group
    from megatron_sp.data.build import Datasets
    from megatron_sp.training.train_state import SampleHistory


def resume_schedule(stored: dict[str, Any], optimizer: OptimizerConfig, schedule: LRSchedule) -> LRSchedule:
    """Return the learning-rate schedule with which a run goes on. Raises ConfigError, CheckpointError."""
    old, new = stored.get("schedule"), schedule.state()
    if optimizer.use_checkpoint_opt_param_scheduler and isinstance(old, dict):
        try:
            return LRSchedule(**old)
        except TypeError:
            raise CheckpointError(
                "state.json: the schedule of the checkpoint cannot be read; use --override-opt-param-scheduler"
            ) from None
    if optimizer.override_opt_param_scheduler:
        return schedule
    # older versions rounded --lr-warmup-fraction
    if isinstance(old, dict) and old.get("warmup") == round(new["warmup"]):
        schedule = replace(schedule, warmup=old["warmup"])
        new = schedule.state()
    if old is not None and old != new:  # None: converted, it is not known
        old = old if isinstance(old, dict) else {}
        names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
        rows = "\n".join(f"  {name}: {old.get(name)} in the checkpoint, {new.get(name)} here" for name in names)
        raise ConfigError(
            f"the learning-rate schedule is not the checkpoint's (lengths in samples):\n{rows}\nadd"
            " --override-opt-param-scheduler to use this one from here on, or --use-checkpoint-opt-param-scheduler to"
            " keep the old"
        )
    return schedule


def resume_samples(
    stored: dict[str, Any], datasets: Datasets, config: Config, group: Group, tell: Callable[[str], None]
) -> SampleHistory:  # fmt: skip
    """Read the samples of the checkpoint's last steps again, and return them as the history. Collective.

    Raises DataError if the data differ, without --accept-data-change.
    """
    from megatron_sp.training.train_state import SampleHistory

    then = stored.get("evaluation_data")
    for name, now in datasets.evaluation_fingerprints.items():
        if isinstance(then, dict) and then.get(name, now) != now:
            what = name.replace("valid", "validation", 1)
            tell(
                f"note: the {what} data have changed, or are repeated differently: do not compare their losses with"
                " earlier ones"
            )
    old, new = stored.get("data_fingerprint"), datasets.fingerprint
    if old is None or datasets.train is None:  # converted, it is not known; or there is nothing to train on
        return SampleHistory()
    if "samples" not in stored:
        tell(
            "the checkpoint was written by an older version and has no digests of its samples: only sizes and a few"
            " probes tell that the data are the same"
        )
    history = SampleHistory.from_json(stored.get("samples", []))
    difference = history.first_difference(datasets.train, config.data.dataloader_type, config.batch.seed, group)
    if old == new and difference is None:
        return history
    what = (
        f"the {history.words()} were read again, and the first that differs is {difference}"
        if difference is not None
        else ""
    )
    if difference is not None and old == new and config.data.dataloader_type == "cyclic":
        what += (
            f" (if no file has changed, the order has: --dataloader-type cyclic draws it from the number of samples,"
            f" {len(datasets.train)} now, which for blends and synthetic data follows from the number of steps)"
        )
    if old != new:
        reason = "data files, split, sequence length, seed, tokenizer or number of epochs differ"
        reason += ", so samples would repeat or be left out"
        what = f"(fingerprint {old}, now {new}) {reason}{'; ' * bool(what)}{what}"
    if not config.checkpoint.accept_data_change:
        raise DataError(
            f"the training data is not what the checkpoint was trained on: {what}. Restore it (`megatron-sp data verify"
            " PREFIX` compares files with their digests), or add --accept-data-change to go on with it as it is"
        )
    tell(f"--accept-data-change: the training data is not what the checkpoint was trained on: {what}")
    return SampleHistory()


def find_tokenizer(
    data: DataConfig, stored: dict[str, Any], source: Path, *, goes_on: bool, is_adopted: bool,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Point the configuration to the run's own copy of the tokenizer, if it is adopted or its files are missing."""
    # when a run goes on, the flags should name its tokenizer, which ``require_same_tokenizer`` checks
    if not goes_on and not is_adopted:
        return
    record = kept.Record.from_json(stored.get("tokenizer"))
    if is_adopted:
        kept.take(data, record, source)
        return
    folder = None if record is None else kept.find(record, source)
    gone = [path for path in kept.own_files(data).values() if not path.exists()]
    if record is None or folder is None or not gone:
        return
    if (data.tokenizer_type or default_type(data, None)) == record.type:
        kept.name_kept(data, record, folder)
        tell(f"{gone[0]} no longer exists: the run's own copy of its tokenizer is used, {folder}")


def require_same_tokenizer(
    tokenizer: Tokenizer, stored: dict[str, Any], source: Path, *, accept: bool, tell: Callable[[str], None]
) -> None:
    """Raise DataError, or report it, if a tokenizer is not the checkpoint's."""
    record = kept.Record.from_json(stored.get("tokenizer"))
    if record is None or record.fingerprint in (None, tokenizer.fingerprint()):
        return
    what = (
        f"the tokenizer is not the {record.type} that the checkpoint was trained with: its files, its type, its size or"
        " the id that ends documents differ"
    )
    if accept:
        tell(f"--accept-data-change: {what}")
        return
    folder, way = kept.find(record, source), ""
    if folder is not None:
        data = DataConfig()
        kept.name_kept(data, record, folder)
        named = [(f"--{name.replace('_', '-')}", getattr(data, name)) for name in _TOKENIZER[1:]]
        flags = " ".join(f"{flag} {path}" for flag, path in named if path)
        way = f"take the run's own copy (--tokenizer-type {record.type} {flags}), "
    raise DataError(
        f"{what}, so the same ids mean other text: {way}restore it, or add --accept-data-change to go on with this one"
    )


_BIASES = ("qkv_bias", "proj_bias", "mlp_bias")
MODEL: dict[str, tuple[str, ...]] = {
    **{
        name: (name,)
        for name in (
            "model_family", "num_layers", "hidden_size", "num_attention_heads", "position_embedding_type",
            "rotary_percent",
            "normalization", "norm_epsilon", "apply_layernorm_1p", "norm_placement", "qk_layernorm",
            "qk_layernorm_scope",
            "use_parallel_residual", "untie_embeddings_and_output_weights", "vocab_size", "num_experts",
            "moe_router_topk",
            "moe_layer_freq", "moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_num_groups",
            "moe_router_group_topk", "moe_router_enable_expert_bias",
        )
    },
    "kv_channels": ("head_dim",), "group_query_attention": ("num_groups",), "num_query_groups": ("num_groups",),
    "ffn_hidden_size": ("ffn_size",), "swiglu": ("activation",), "geglu": ("activation",), "relu": ("activation",),
    "squared_relu": ("activation",), "gelu_approximate": ("activation", "head_activation"),
    "bert_head_activation": ("head_activation",),
    "disable_bias_linear": _BIASES, "add_qkv_bias": _BIASES[:1], "add_proj_bias": _BIASES[1:2],
    "add_mlp_bias": _BIASES[2:],
    "num_tokentypes": ("token_types",), "bert_no_binary_head": ("has_order_head", "token_types"),
    "moe_ffn_hidden_size": ("expert_ffn_size",), "moe_shared_expert_intermediate_size": ("shared_expert_size",),
}  # fmt: skip
"""Fields that are the model, and what of it is compared: flags may say the same in other words."""
NEW_RUNS: dict[str, tuple[str, ...]] = {
    "rotary_base": ("rotary_base",), "rotary_seq_len_interpolation_factor": ("rotary_seq_len_interpolation_factor",),
    "window_size": ("window_size",), "use_rope_scaling": ("rope_scaling",), "rope_scaling_factor": ("rope_scaling",),
    "rope_scaling_low_freq_factor": ("rope_scaling",), "rope_scaling_high_freq_factor": ("rope_scaling",),
    "rope_scaling_original_length": ("rope_scaling",),
    # with one expert for each token the router is not trained otherwise
    "moe_router_pre_softmax": ("moe_router_pre_softmax",),
}  # fmt: skip
"""Fields that a new run may change, and what is compared."""
RUNS = (
    "seq_length", "max_position_embeddings", "attention_dropout", "hidden_dropout", "init_method_std",
    "make_vocab_size_divisible_by", "moe_router_dtype", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_z_loss_coeff", "moe_router_bias_update_rate",
)  # fmt: skip
"""Fields that each process of a run may set anew. Of a table of learned positions the length is the model's."""

_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
_OF_EXPERTS = {
    "expert_ffn_size",
    "shared_expert_size",
    *(name for name in (*MODEL, *NEW_RUNS) if name.startswith("moe_")),
}
_OF_ROTARY = {"rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor", "rope_scaling"}


def take_model(stored: dict[str, Any] | None, config: Config, world_size: int) -> bool:
    """Settle the model of a run with --use-checkpoint-args; return whether the checkpoint's tokenizer is taken.

    Raises ConfigError for a flag that says something else, or a rule violated; CheckpointError.
    """
    takes_tokenizer = stored is not None and _adopt(stored, config)
    config.model_is_settled = True
    validate(normalize(config), world_size)
    return takes_tokenizer


def _adopt(stored: dict[str, Any], config: Config) -> bool:
    # take from the checkpoint what no flag says of model and tokenizer
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
    # the number of positions: the table's where they are learned, elsewhere at least as many as a sequence has
    length, given, table_rows = (
        merged.seq_length or 0,
        said.get("max_position_embeddings"),
        _value(old, "max_positions"),
    )
    if merged.position_embedding_type == "learned_absolute" and table_rows is not None:
        if length > table_rows or given not in (None, table_rows):
            what = f"seq_length ({length})" if length > table_rows else f"max_position_embeddings ({given})"
            raise ConfigError(f"{what} {_OF_TABLE.format(table_rows)}")
        merged.max_position_embeddings = table_rows  # also where a sequence is shorter now
    elif given is None and length > (merged.max_position_embeddings or length):
        merged.max_position_embeddings = None
    # a flag that begins or ends the loss for an even load does so alone, without its counterpart in the checkpoint
    if merged.moe_aux_loss_coeff and merged.moe_router_load_balancing_type == "none":
        names_kind, names_coefficient = (
            name in said for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
        )
        if names_coefficient and not names_kind:
            merged.moe_router_load_balancing_type = None
        elif names_kind and not names_coefficient:
            merged.moe_aux_loss_coeff = 0.0
    takes_tokenizer = not any(config.says("data", name) for name in _TOKENIZER) and "vocab_size" not in said
    if takes_tokenizer:
        data = stored_configuration(stored)[0].data
        for name in (*_TOKENIZER, *(() if config.says("data", "eod_id") else ("eod_id",))):
            setattr(config.data, name, getattr(data, name))
    for name in vars(merged):
        setattr(config.model, name, getattr(old if name in MODEL else merged, name))
    return takes_tokenizer


_OF_TABLE = (
    "is not the number of learned positions in the checkpoint, {0}: a table has no rows for later ones, so use"
    " sequences of {0} tokens or less; models with rotary positions can be continued with longer ones"
)


def keep_gelu(stored: dict[str, Any], config: Config) -> list[str]:
    """Take the kinds of GELU from the checkpoint where no flag says which; return a line for each."""
    # once the defaults were not Megatron's
    old, model, lines = stored_configuration(stored, normalize=True)[0].model, config.model, list[str]()
    of_mlp, of_head = (
        config.says("model", name) or name in config.preset_fields
        for name in ("gelu_approximate", "bert_head_activation")
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
    """Take the vocabulary of a NullTokenizer from an old checkpoint; return a line about it."""
    # --vocab-size counted the end of documents, too
    old, size = stored_configuration(stored)[0], config.model.vocab_size or 0
    if not config.adds_null_end or old.data.tokenizer_type != "NullTokenizer" or old.model.vocab_size != size - 1:
        return []
    config.model.vocab_size = size - 1
    return [
        f"--vocab-size {size - 1}: the checkpoint was trained with as many ids, the last one to end documents; a new"
        f" training has {size}"
    ]


def check_model(stored: dict[str, Any], config: Config, *, finetunes: bool) -> list[str]:
    """Compare the stored configuration with this one; return a line about each harmless difference.

    Raises CheckpointError, with the differences, if the model is another one.
    """
    old, _ = stored_configuration(stored)
    resolve_gelu(old.model)
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
            + "\ngive the checkpoint's values, or leave these flags out and take them from it with"
            " --use-checkpoint-args"
        )
    rows = [] if finetunes else list(_differences(old.model, config.model, NEW_RUNS))
    if rows:
        raise CheckpointError(
            "the run of this checkpoint has computed something else with its weights:\n"
            + "\n".join(rows)
            + "\ngive the checkpoint's values to go on with it; or add --finetune, to begin a new run with its weights"
            " and these values"
        )
    silent = ("checkpoint.", "logging.", "data.num_workers")
    keeps = config.optimizer.use_checkpoint_opt_param_scheduler and not finetunes

    def taken(key: str) -> str:
        is_kept = keeps and key.startswith(_OF_SCHEDULE)
        return " (not taken: --use-checkpoint-opt-param-scheduler keeps the former)" if is_kept else ""

    return [
        f"{key}: {a} -> {b}{taken(key)}" for key, (a, b) in diff(old, config).items()
        if not key.startswith(silent) and any(is_read(each, *key.split(".")) for each in (old, config))
    ]  # fmt: skip


_OF_SCHEDULE = (
    "optimizer.lr", "optimizer.min_lr", "optimizer.decoupled_", "optimizer.weight_decay",
    "optimizer.start_weight_decay", "optimizer.end_weight_decay",
)  # fmt: skip
"""Beginnings of the fields that make a run's schedule (``optim/lr_schedule.py``)."""


def _differences(old: ModelConfig, new: ModelConfig, compared: dict[str, tuple[str, ...]]) -> Iterator[str]:
    for name in dict.fromkeys(name for names in compared.values() for name in names):
        before, now = _value(old, name), _value(new, name)
        if before != now and _matters(name, old, new):
            yield f"  {name}: {before} in the checkpoint, {now} here"


def _matters(name: str, old: ModelConfig, new: ModelConfig) -> bool:
    # whether both models have a property: of what one does not have, its absence is the difference
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
