"""Flags of experts: rules with their messages, patterns of layers, other projects' spellings."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.rules import inference_violations, model_violations, normalize, violations
from megatron_sp.config.schema import Config
from megatron_sp.config.schema_model import layer_pattern
from megatron_sp.utils.errors import ConfigError


def config(parallel: dict[str, Any] | None = None, **model: Any) -> Config:
    made = Config()
    made.optimizer.lr, made.batch.train_iters, made.data.mock_data = 1e-3, 1, True
    shape = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 64, "num_experts": 8}
    for name, value in {**shape, **model}.items():
        setattr(made.model, name, value)
    for name, value in (parallel or {}).items():
        setattr(made.parallel, name, value)
    return normalize(made)


RULES: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    ({"moe_router_topk": 9}, {}, 1, "moe_router_topk (9) must be at most num_experts (8)"),
    ({"moe_router_num_groups": 4}, {}, 1, "--moe-router-num-groups and --moe-router-group-topk belong together"),
    ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, {}, 1, "num_experts (8) must be a multiple of moe_router_num_groups (3)"),
    ({"moe_router_num_groups": 4, "moe_router_group_topk": 5}, {}, 1, "moe_router_group_topk (5) must be at most"),
    ({"moe_router_num_groups": 4, "moe_router_group_topk": 1, "moe_router_topk": 3}, {}, 1, "the experts of 1 groups (1 * 2 = 2)"),
    ({"moe_router_topk": 1}, {}, 1, "never trains the router: the weight of one expert alone is 1"),
    ({"moe_router_enable_expert_bias": True}, {}, 1, "add --moe-router-score-function sigmoid"),
    ({"moe_router_topk_scaling_factor": 0.0}, {}, 1, "moe_router_topk_scaling_factor (0) must be above 0"),
    ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}, {}, 1, "contradict each other"),
    ({"moe_layer_freq": "[1,0]"}, {}, 1, "is a pattern of 2 layers, and num_layers is 4"),
    ({"moe_layer_freq": "two"}, {}, 1, "is neither a number of layers nor a pattern"),
    ({"moe_layer_freq": "[0]*4"}, {}, 1, "has no layer with experts"),
    ({"model_family": "bert"}, {}, 1, "--num-experts is for GPT"),
    ({}, {"expert_model_parallel_size": 3}, 6, "num_experts (8) must be a multiple of expert_model_parallel_size (3)"),
    ({}, {"expert_model_parallel_size": 4}, 2, "must divide the ranks that have different tokens, sp * cp * dp = 2: use --ep-size 1, 2"),
    ({}, {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2}, 4,
        "sp * cp * dp = 2: use --ep-size 1, 2; with --sequence-parallel the ranks of tp are among them"),
    ({"num_experts": None}, {"expert_model_parallel_size": 2}, 2, "is about the experts of a model without any: add --num-experts N"),
    ({"moe_shared_expert_intermediate_size": 9}, {"tensor_model_parallel_size": 2}, 2,
        "moe_shared_expert_intermediate_size (9) must be a multiple of tensor_model_parallel_size (2)"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "parallel", "world", "text"), RULES, ids=lambda value: str(value)[:50])
def test_a_rule(model: dict[str, Any], parallel: dict[str, Any], world: int, text: str) -> None:
    found = violations(config(parallel, **model), world)
    assert any(text in line for line in found), found


def test_a_stored_model_is_used_with_a_shared_expert_that_can_be_split() -> None:
    """A part that is cut off would be silent: its weights would be nobody's."""
    found = inference_violations(config({"tensor_model_parallel_size": 4}, moe_shared_expert_intermediate_size=6), 4)
    assert (
        len(found) == 1 and "moe_shared_expert_intermediate_size (6) must be a multiple" in found[0] and "--tp-size 1, 2, 3, 6" in found[0]
    )
    assert inference_violations(config({"tensor_model_parallel_size": 2}, moe_shared_expert_intermediate_size=6), 2) == []


def test_what_fits_is_accepted() -> None:
    folded = {"expert_model_parallel_size": 8, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert violations(config(folded), 8) == []
    assert violations(config(moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk=4), 1) == []
    assert violations(config(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True), 1) == []
    assert violations(config(moe_router_topk=1, moe_router_score_function="sigmoid"), 1) == []
    assert violations(config(moe_router_topk=1, moe_router_pre_softmax=True), 1) == []


def test_a_model_whose_router_was_never_trained_is_still_used() -> None:
    made = config(moe_router_topk=1)
    assert model_violations(made) == inference_violations(made, 1) == []
    made.batch.skip_train, made.checkpoint.load = True, "run"
    assert violations(made, 1) == []


@pytest.mark.parametrize(("text", "layers", "want"), [
    ("1", 3, "111"), ("2", 5, "10101"), ("[0,1]*2", 4, "0101"), ("[0]+[1]*3", 4, "0111"), ("([0]*2+[1,0]*1)", 4, "0010"),
    (" [1, 0, 1] ", 3, "101"),
])  # fmt: skip
def test_patterns(text: str, layers: int, want: str) -> None:
    assert "".join("01"[has] for has in layer_pattern(text, layers)) == want


@pytest.mark.parametrize("text", ["", "0", "-1", "[2]", "[1]*", "[1]**2", "1+1", "__import__('os')", "[1]*99999", "[" * 50, "9" * 50])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(ConfigError, match="--moe-layer-freq"):
        layer_pattern(text, 4)


BASE = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data --lr 1e-3 --train-iters 1"


def parse(more: str) -> Config:
    return config_from_args(shlex.split(f"{BASE} {more}"))


def test_megatrons_spelling() -> None:
    made = parse(
        "--num-experts 8 --expert-model-parallel-size 1 --moe-router-topk 4 --moe-router-load-balancing-type aux_loss"
        " --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion"
        " --moe-router-dtype fp32 --moe-layer-freq ([0]+[1]*3) --expert-tensor-parallel-size 1 --moe-shared-expert-overlap"
    )
    model = made.model
    assert (model.num_experts, model.moe_router_topk, model.moe_aux_loss_coeff, model.moe_z_loss_coeff) == (8, 4, 1e-2, 1e-3)
    assert model.balance_kind == "sequence" and model.expert_layers(4) == (1, 2, 3)
    assert any("aux_loss (over a rank's micro-batch it would depend on the layout" in note for note in made.understood)


def test_a_softmax_of_sigmoids_is_nothing() -> None:
    """Recipes of DeepSeek-V3 for Megatron-LM have both flags; there sigmoids are not looked at by the first."""
    made = parse("--num-experts 8 --moe-router-score-function sigmoid --moe-router-pre-softmax")
    assert not made.model.moe_router_pre_softmax and any("--moe-router-pre-softmax (scores that are" in note for note in made.ignored_flags)


@pytest.mark.parametrize(("words", "layers", "topk", "balance", "whole"), [
    ("--deepspeed --num-experts 8", (1, 3), 1, 0.1, True),
    ("--deepspeed --num-experts 8 --topk 2", (1, 3), 2, 0.1, False),
    ("--num-experts 8 --expert-interval 3 --moe-loss-coeff 0.01", (2,), 1, 0.01, True),
    ("--num-experts 8 --expert-interval 1 --moe-expert-parallel-size 1 --disable-moe-token-dropping", (0, 1, 2, 3), 1, 0.1, True),
    ("--num-experts 8 8 --topk 1", (1, 3), 1, 0.1, True), ("--num-experts 1 8", (3,), 1, 0.1, True),
    ("--moe-num-experts 8", (0, 1, 2, 3), 1, 0.025, True),  # megablocks divides the coefficient by the layers
    ("--moe-num-experts=8 --moe-top-k=2 --moe-loss-weight=0.2 --moe-capacity-factor 1", (0, 1, 2, 3), 2, 0.05, True),
    ("--num-experts 8 --moe-router-topk 4 --deepspeed", (0, 1, 2, 3), 4, 0.0, False),  # Megatron's names: Megatron's defaults
    ("--num-experts 8 --topk 1 --moe-router-dtype fp32", (0, 1, 2, 3), 1, 0.0, True),
    ("--num-experts 8", (0, 1, 2, 3), 2, 0.0, False),
])  # fmt: skip
def test_defaults_of_who_is_quoted(words: str, layers: tuple[int, ...], topk: int, balance: float, whole: bool) -> None:
    model = parse(words).model
    assert model.num_experts == 8 and model.expert_layers(4) == layers
    assert (model.moe_router_topk, model.moe_aux_loss_coeff, model.moe_router_pre_softmax) == (topk, pytest.approx(balance), whole)


def test_what_was_not_said_is_told_once() -> None:
    told = "--num-experts 8 (what is not given is as in Megatron-DeepSpeed: --moe-router-topk 1, --moe-aux-loss-coeff 0.1, --moe-layer-freq"
    assert list(parse("--num-experts 8 --deepspeed").understood) == [f"{told} [0,1]*2, --moe-router-pre-softmax)"]
    assert parse("--num-experts 8 --deepspeed").remarks[0].startswith("note: --num-experts 8 (")
    assert any("Megatron's words, not Megatron-DeepSpeed's: --moe-aux-loss-coeff 0, experts in every layer" in note
               for note in parse("--num-experts 8 --topk 1 --moe-router-dtype fp32").understood)  # fmt: skip
    assert "in Megatron's words" in parse("--num-experts 8 --deepspeed --moe-router-topk 2").understood[0]
    assert any("second expert is the next best one" in note for note in parse("--num-experts 8 --topk 2").understood)


@pytest.mark.parametrize("flag", [
    "--moe-expert-capacity-factor 1.25", "--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy position",
    "--moe-train-capacity-factor 1.0", "--moe-eval-capacity-factor 1.0", "--moe-min-capacity 4", "--moe-token-dropping",
    "--moe-capacity-factor 1",
    "--disable-moe-token-dropping",
])  # fmt: skip
def test_without_capacities_every_token_is_computed(flag: str) -> None:
    said = f"{flag.split()[0]} (every token is computed: none is dropped, and none padded)"
    assert said in parse(f"--num-experts 8 {flag}").ignored_flags


def test_what_a_checkpoint_says_is_not_assumed() -> None:
    shapeless = "--load run --use-checkpoint-args --mock-data --lr 1e-3 --train-iters 1 --seq-length 16"
    for words in ("--deepspeed --num-experts 8", "--num-experts 8 --expert-interval 2 --moe-loss-coeff 0.01"):
        made = config_from_args(shlex.split(f"{shapeless} {words}"))
        assert made.understood == () and ("model", "moe_layer_freq") not in made.given
        assert made.model.moe_router_topk == 2 and not made.model.moe_router_pre_softmax


def test_megablocks_shares_experts_among_as_many_ranks_as_it_can() -> None:
    words = f"{BASE} --moe-num-experts 12 --moe-expert-model-parallelism"
    assert config_from_args(shlex.split(words), world_size=8).parallel.expert_model_parallel_size == 4


def test_a_dense_model_in_their_words() -> None:
    for words in ("--num-experts 1", "--num-experts 0", "--num-experts 1 1", "--moe-router-topk 4 --moe-aux-loss-coeff 0.1", "--deepspeed"):
        assert not parse(words).model.has_experts
    assert any("--moe-router-topk (without --num-experts it has no effect)" in note for note in parse("--moe-router-topk 4").ignored_flags)


def test_types_of_balance() -> None:
    assert config(moe_aux_loss_coeff=0.1).model.balance_kind == "sequence"
    assert config(moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="global_aux_loss").model.balance_kind == "global"
    assert config(moe_router_load_balancing_type="seq_aux_loss").model.balance_kind == "none"  # without a coefficient
