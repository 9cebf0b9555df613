"""Whose model is trained: the checkpoint's, what the flags may say against it, and what happens before it is known."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config, ModelConfig
from megatron_sp.training.resume import MODEL, NEW_RUNS, RUNS, check_model, keep_gelu, keep_null_vocabulary, take_model
from megatron_sp.utils.errors import CheckpointError, ConfigError

SHAPE = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 32 --vocab-size 98"
RUN = "--mock-data --lr 1e-3 --train-iters 1"
ROPE = "--position-embedding-type rope"
EXPERTS = f"{ROPE} --num-experts 4 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"


def parse(flags: str, family: str | None = None) -> Config:
    return config_from_args(shlex.split(f"{RUN} {flags}"), family=family)


def stored(flags: str) -> dict[str, Any]:
    return {"config": parse(f"{SHAPE} {flags}").to_dict()}


def taken(before: str, flags: str = "", *, family: str | None = None) -> Config:
    """The configuration of a fine-tuning that was told ``flags``, of a model that was trained with ``before``."""
    config = parse(f"--load run --finetune --use-checkpoint-args {flags}", family)
    take_model(stored(before), config, 1)
    check_model(stored(before), config, finetunes=True)
    return config


def resumed(before: str, flags: str, *, finetunes: bool = False) -> list[str]:
    return check_model(stored(before), parse(f"{SHAPE} --load run {flags}"), finetunes=finetunes)


def test_each_field_of_the_model_is_of_one_kind() -> None:
    assert sorted((*MODEL, *NEW_RUNS, *RUNS)) == sorted(field.name for field in dataclasses.fields(ModelConfig))


@pytest.mark.parametrize(
    ("before", "flags", "row"),
    [
        (ROPE, "--num-layers 7", "num_layers: 2 in the checkpoint, 7 here"),
        (ROPE, "--position-embedding-type learned_absolute", "position_embedding_type: rope in the checkpoint, learned_absolute here"),
        (ROPE, "--vocab-size 99", "vocab_size: 98 in the checkpoint, 99 here"),
        (ROPE, "--num-query-groups 2", "num_groups: 4 in the checkpoint, 2 here"),
        (ROPE, "--rotary-percent 0.5", "rotary_percent: 1.0 in the checkpoint, 0.5 here"),
        (ROPE, "--norm-epsilon 1e-6", "norm_epsilon: 1e-05 in the checkpoint, 1e-06 here"),
        (ROPE, "--num-experts 4", "num_experts: None in the checkpoint, 4 here"),
        (EXPERTS, "--num-experts 1", "num_experts: 4 in the checkpoint, None here"),
        (EXPERTS, "--moe-router-topk 3", "moe_router_topk: 2 in the checkpoint, 3 here"),
        (EXPERTS, "--moe-layer-freq [0,1]", "moe_layer_freq: 1 in the checkpoint, [0,1] here"),
    ],
)  # fmt: skip
def test_a_flag_that_says_another_model_is_an_error(before: str, flags: str, row: str) -> None:
    with pytest.raises(ConfigError) as caught:
        taken(before, flags)
    assert row in str(caught.value) and str(caught.value).count("in the checkpoint") == 1


def test_a_program_for_another_family_is_an_error() -> None:
    with pytest.raises(ConfigError, match="model_family: gpt in the checkpoint, bert here"):
        taken("", family="bert")


@pytest.mark.parametrize(
    ("before", "flags"),
    [
        (ROPE, f"{SHAPE} {ROPE} --num-query-groups 4 --kv-channels 4 --ffn-hidden-size 64"), (EXPERTS, "--moe-layer-freq [1]*2"),
        (f"{ROPE} --swiglu --ffn-hidden-size 24", "--gelu-approximate none"), ("", "--rotary-percent 0.5"),
    ],
)  # fmt: skip
def test_the_same_model_in_other_words_is_the_same(before: str, flags: str) -> None:
    assert vars(taken(before, flags).model) == vars(taken(before).model) | {"rotary_percent": taken(before, flags).model.rotary_percent}


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--rotary-base 50", "rotary_base", 50.0), ("--window-size 4", "window_size", 4), ("--use-rope-scaling", "use_rope_scaling", True),
        ("--rotary-seq-len-interpolation-factor 2", "rotary_seq_len_interpolation_factor", 2.0), ("--seq-length 64", "seq_length", 64),
        ("--moe-aux-loss-coeff 2", "moe_aux_loss_coeff", 2.0), ("--moe-aux-loss-coeff 0", "moe_aux_loss_coeff", 0.0),
        ("--moe-z-loss-coeff 1", "moe_z_loss_coeff", 1.0), ("--hidden-dropout 0.3", "hidden_dropout", 0.3),
        ("--moe-router-load-balancing-type global_aux_loss", "moe_router_load_balancing_type", "global_aux_loss"),
        ("--moe-router-load-balancing-type none", "moe_aux_loss_coeff", 0.0), ("--moe-router-pre-softmax", "moe_router_pre_softmax", True),
    ],
)  # fmt: skip
def test_what_a_new_run_may_change_is_the_flags_where_given(flags: str, name: str, value: object) -> None:
    before = f"{EXPERTS} --hidden-dropout 0"
    config = taken(before, flags)
    assert getattr(config.model, name) == value != getattr(taken(before).model, name) and config.ignored_flags == ()
    changed = [line.split(":")[0] for line in check_model(stored(before), config, finetunes=True)]
    assert f"model.{name}" in changed


def test_what_no_flag_says_is_the_checkpoints() -> None:
    before = f"{EXPERTS} --hidden-dropout 0.3 --attention-dropout 0 --rotary-base 70 --window-size 5 --moe-router-dtype fp64"
    assert vars(taken(before).model) == vars(parse(f"{SHAPE} {before}").model)


def test_a_loss_begins_where_the_checkpoint_had_none() -> None:
    model = taken(f"{ROPE} --num-experts 4 --moe-router-load-balancing-type none", "--moe-aux-loss-coeff 0.1").model
    assert model.balance_kind == "sequence"


@pytest.mark.parametrize(
    ("before", "flags"),
    [
        (ROPE, "--use-rope-scaling --rope-scaling-factor 4"), (EXPERTS, "--moe-router-topk 2 --moe-aux-loss-coeff 0.5"),
        ("--normalization RMSNorm --qk-layernorm --qk-layernorm-scope all", "--qk-layernorm-scope all"),
        (f"{ROPE} --attention-dropout 0 --swiglu --ffn-hidden-size 24", "--swiglu --hidden-size 16"),
        (f"{ROPE} --kv-channels 6 --hidden-size 18", "--hidden-size 18 --num-attention-heads 4"),
    ],
)  # fmt: skip
def test_no_rule_and_no_line_about_a_model_that_is_not_known_yet(before: str, flags: str) -> None:
    assert parse(f"--load run --use-checkpoint-args {flags}").ignored_flags == ()
    assert taken(before, flags).ignored_flags == ()


def test_rules_and_lines_come_when_the_model_is_known() -> None:
    assert taken(ROPE, "--moe-aux-loss-coeff 2").ignored_flags == ("--moe-aux-loss-coeff (without --num-experts it has no effect)",)
    with pytest.raises(ConfigError, match="--use-rope-scaling is about rotary positions"):
        taken("", "--use-rope-scaling")
    with pytest.raises(ConfigError, match=r"num_attention_heads \(4\) must be a multiple of tensor_model_parallel_size \(3\)"):
        take_model(stored(ROPE), parse("--load run --use-checkpoint-args --tensor-model-parallel-size 3 --world-size 3 --dry-run"), 3)
    with pytest.raises(ConfigError, match="--num-layers, --hidden-size, --num-attention-heads, --seq-length are required"):
        take_model(None, parse("--save run --auto-resume --use-checkpoint-args --vocab-size 98"), 1)


def test_a_router_that_learns_nothing_can_be_taken_up_with_a_softmax_over_all() -> None:
    config = parse(f"{SHAPE} {EXPERTS}")
    config.model.moe_router_topk = 1
    before = {"config": config.to_dict()}
    with pytest.raises(ConfigError, match="never trains the router"):
        take_model(before, parse("--load run --finetune --use-checkpoint-args"), 1)
    take_model(before, parse("--load run --finetune --use-checkpoint-args --moe-router-pre-softmax"), 1)


def test_positions_of_a_longer_sequence() -> None:
    """A table has no more of them; rotary ones have no end, whatever the run before was planned for."""
    for flags in ("--seq-length 64", "--seq-length 33"):
        with pytest.raises(ConfigError, match="learned positions in the checkpoint, 32: a table has no rows for later ones"):
            taken("", flags)
    assert taken("--max-position-embeddings 40", "--seq-length 16").model.max_positions == 40
    with pytest.raises(CheckpointError, match="a table has no rows"):
        check_model(stored(""), parse(f"{SHAPE} --load run --finetune --seq-length 64"), finetunes=True)
    assert taken(f"{ROPE} --max-position-embeddings 40", "--seq-length 64").model.max_positions == 64
    assert taken(f"{ROPE} --max-position-embeddings 40", "--seq-length 39").model.max_positions == 40
    assert taken(f"{ROPE} --max-position-embeddings 40", "--seq-length 39 --max-position-embeddings 90").model.max_positions == 90


@pytest.mark.parametrize("flags, line", [
    ("--use-parallel-residual", "use_parallel_residual: False in the checkpoint, True here"),
    ("--relu", "activation: gelu_tanh in the checkpoint, relu here"),
    ("--gelu-approximate none", "activation: gelu_tanh in the checkpoint, gelu here"),
    ("--disable-bias-linear", "mlp_bias: True in the checkpoint, False here"),
])  # fmt: skip
def test_other_formulas_are_another_model(flags: str, line: str) -> None:
    for finetunes in (False, True):
        with pytest.raises(CheckpointError, match=line):
            resumed(ROPE, f"{ROPE} {flags}", finetunes=finetunes)


@pytest.mark.parametrize("flags, line", [
    ("--window-size 7", "window_size: None in the checkpoint, 7 here"),
    ("--rotary-base 7", "rotary_base: 10000.0 in the checkpoint, 7.0 here"),
    ("--rotary-seq-len-interpolation-factor 2", "rotary_seq_len_interpolation_factor: 1.0 in the checkpoint, 2.0 here"),
    ("--use-rope-scaling --rope-scaling-factor 32", r"rope_scaling: \(\) in the checkpoint, \(32.0, 1.0, 4.0, 8192\) here"),
])  # fmt: skip
def test_a_run_goes_on_as_it_was_and_a_new_one_may_see_farther(flags: str, line: str) -> None:
    with pytest.raises(CheckpointError, match=f"{line}\n.*add --finetune, to begin a new run"):
        resumed(ROPE, f"{ROPE} {flags}")
    assert any(flags.split()[0][2:].replace("-", "_") in changed for changed in resumed(ROPE, f"{ROPE} {flags}", finetunes=True))


def test_factors_of_what_is_off_are_no_difference() -> None:
    """Of a scaling that is not used, of biases that are there anyway, of rotary positions that there are not; BERT's head as it is."""
    resumed(ROPE, f"{ROPE} --add-mlp-bias")
    before = parse(f"{SHAPE} {ROPE}")
    before.model.rope_scaling_factor = 32.0
    check_model({"config": before.to_dict()}, parse(f"{SHAPE} {ROPE}"), finetunes=False)
    before = parse(SHAPE)
    before.model.rotary_base = 77.0
    check_model({"config": before.to_dict()}, parse(SHAPE), finetunes=False)


def test_a_configuration_that_nobody_typed_says_what_differs_from_the_defaults() -> None:
    config = Config()
    config.optimizer.lr, config.batch.train_iters, config.data.mock_data = 1e-3, 1, True
    config.checkpoint.load, config.checkpoint.use_checkpoint_args, config.model.rotary_base = "run", True, 50.0
    take_model(stored(ROPE), config, 1)
    assert (config.model.num_layers, config.model.rotary_base) == (2, 50.0)


def test_the_tokenizer_is_the_checkpoints_where_no_flag_names_one() -> None:
    for flags, type_of, size in (("", "NullTokenizer", 98), ("--tokenizer-type ByteTokenizer", "ByteTokenizer", 98)):
        config = parse(f"--load run --use-checkpoint-args {flags}")
        assert take_model(stored("--eod-id 5"), config, 1) is (not flags)
        assert (config.data.tokenizer_type, config.model.vocab_size) == (type_of, size)
    config = parse("--load run --use-checkpoint-args --preset gpt2-124m")  # which has a vocabulary
    assert take_model(stored("--eod-id 5"), config, 1) and config.data.eod_id == 5


def test_a_null_tokenizer_has_as_many_ids_as_the_checkpoint() -> None:
    """When --vocab-size counted its end of documents, a checkpoint had one id less than a new training has."""
    flags = SHAPE.replace("--vocab-size 98", "--tokenizer-type NullTokenizer --vocab-size 98")
    before, now = stored("--eod-id 97"), parse(flags)
    assert (before["config"]["model"]["vocab_size"], now.model.vocab_size) == (98, 99)
    (line,) = keep_null_vocabulary(before, now)
    assert line.startswith("--vocab-size 98: the checkpoint was trained with as many ids") and now.model.vocab_size == 98
    check_model(before, now, finetunes=False)
    now = parse(flags)
    assert keep_null_vocabulary({"config": now.to_dict()}, now) == [] and now.model.vocab_size == 99
    assert keep_null_vocabulary(stored("--tokenizer-type ByteTokenizer"), now) == []
    assert keep_null_vocabulary(before, parse(SHAPE)) == []


def as_before(flags: str) -> dict[str, Any]:
    """The configuration of a checkpoint of the time when GELU was the tanh approximation wherever nothing else was said."""
    config = parse(flags)
    config.model.gelu_approximate, config.model.bert_head_activation = "tanh", None
    return {"config": config.to_dict()}


BERT = "--preset bert-base"


@pytest.mark.parametrize(("flags", "lines"), [
    (BERT, ["--bert-head-activation gelu_tanh: the checkpoint was trained so; gelu would be a new training's"]),
    (f"{BERT} --disable-bias-linear", ["--gelu-approximate tanh: the checkpoint", "--bert-head-activation gelu_tanh: the checkpoint"]),
    (f"{SHAPE} --disable-bias-linear", ["--gelu-approximate tanh: the checkpoint was trained so; gelu would be a new training's"]),
    (SHAPE, []), ("--preset gpt2-124m", []),
])  # fmt: skip
def test_a_checkpoint_keeps_the_gelu_that_it_was_trained_with(flags: str, lines: list[str]) -> None:
    before, now = as_before(flags), parse(f"--load run {flags}")
    told = keep_gelu(before, now)
    assert len(told) == len(lines) and all(line.startswith(start) for line, start in zip(told, lines, strict=True))
    assert now.model.activation == "gelu_tanh" and (not now.model.is_bert or now.model.head_activation == "gelu_tanh")
    assert check_model(before, now, finetunes=False) == []
    assert keep_gelu({"config": now.to_dict()}, parse(flags)) == told  # the next checkpoint says it itself
    adopted = parse("--load run --finetune --use-checkpoint-args", "bert" if now.model.is_bert else None)
    take_model(before, adopted, 1)
    assert (adopted.model.activation, adopted.model.head_activation) == (now.model.activation, now.model.head_activation)


@pytest.mark.parametrize(("flags", "row"), [
    (f"{BERT} --bert-head-activation gelu", "head_activation: gelu_tanh in the checkpoint, gelu here"),
    (f"{SHAPE} --gelu-approximate none", "activation: gelu_tanh in the checkpoint, gelu here"),
])  # fmt: skip
def test_another_gelu_that_is_asked_for_is_refused(flags: str, row: str) -> None:
    now = parse(flags)
    assert keep_gelu(as_before(flags), now) == []
    with pytest.raises(CheckpointError, match=row):
        check_model(as_before(flags), now, finetunes=True)
