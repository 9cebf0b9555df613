"""Flags without effect in a run: each is named in one line, from what its field says of its conditions."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_sp.config.fields import described, field_kinds
from megatron_sp.config.flags.arguments import config_as_yaml, config_from_args
from megatron_sp.config.rules import drop_unused, normalize
from megatron_sp.config.schema import GROUPS, Config, diff

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data --lr 1e-3 --train-iters 4"
    " --lr-decay-style constant --eval-iters 0 --relu --device cpu"
)
CONDITIONAL = [
    (group, item) for group, cls in GROUPS.items() for item in dataclasses.fields(cls) if item.metadata["only"]
]  # fmt: skip


def parse(more: str = "") -> Config:
    return config_from_args(shlex.split(f"{BASE} {more}"))


def words(group: str, item: dataclasses.Field[Any]) -> str:
    """A flag with a value that is allowed, and that is not the default."""
    kind, flag = field_kinds(GROUPS[group])[item.name], item.name.replace("_", "-")
    if kind.base == "bool":
        return f"--no-{flag}" if item.default else f"--{flag}"
    if item.name == "qk_layernorm_scope":  # another value is an error
        return "--qk-layernorm-scope head"
    if kind.base == "choice":
        return f"--{flag} {next(choice for choice in kind.choices if choice != item.default)}"
    # a decay of WSD is counted as the run counts
    return {
        "split": "--split 9,1", "lr_wsd_decay_samples": "--train-samples 4 --lr-wsd-decay-samples 2",
        "lr_decay_samples": "--train-samples 4 --lr-decay-samples 6",
        "weight_decay": "--start-weight-decay 0.1 --end-weight-decay 0.1 --weight-decay 0.5", "min_lr": "--min-lr 1e-4",
        "lr_warmup_init": "--lr-warmup-init 1e-4", "sgd_momentum": "--sgd-momentum 0.5", "adam_beta1": "--adam-beta1 0.5",
        "adam_beta2": "--adam-beta2 0.5", "rope_scaling_low_freq_factor": "--rope-scaling-low-freq-factor 2",
    }.get(item.name, f"--{flag} {'name' if kind.base == 'str' else 6}")  # fmt: skip


@pytest.mark.parametrize(("group", "item"), CONDITIONAL, ids=[item.name for _, item in CONDITIONAL])
def test_each_is_named_once_and_reset(group: str, item: dataclasses.Field[Any]) -> None:
    told = words(group, item)
    more = "--optimizer sgd" if item.name.startswith("adam") else "--vocab-size 300 --tokenizer-type ByteTokenizer" * (group == "data")
    text = f"{BASE} {more} {told}"
    config = config_from_args(shlex.split(text.replace("--train-iters 4", "") if "--train-samples" in told else text))
    condition = next(c for c in item.metadata["only"] if not c.holds(config))
    assert [line for line in config.ignored_flags if line.startswith(f"{told.split('--')[-1].split()[0]:}".join(("--", " (")))] == [
        f"--{told.split('--')[-1].split()[0]} ({condition.reason})"
    ]
    assert condition.keeps or getattr(getattr(config, group), item.name) == item.default
    lines = config.ignored_flags
    assert normalize(config).ignored_flags == lines, "once is enough"


@pytest.mark.parametrize("told", ["--rope-scaling-factor 8", "--rotary-base 10000", "--hysteresis 2", "--adam-beta1 0.9 --optimizer sgd",
                                  "--qk-layernorm-scope head"])  # fmt: skip
def test_the_default_is_named_too_where_it_was_typed(told: str) -> None:
    assert [line.split(" ")[0] for line in parse(told).ignored_flags] == [told.split(" ")[0]]


def test_a_flag_that_another_leaves_without_effect() -> None:
    assert "--no-load-optim (--finetune loads weights alone)" in parse("--load x --finetune --no-load-optim").ignored_flags
    assert parse("--lr-decay-iters 9 --lr-warmup-fraction 0.5").ignored_flags == parse().ignored_flags, "a share of this horizon"


def test_a_kind_of_loss_without_a_coefficient() -> None:
    experts = "--num-experts 4 --moe-router-load-balancing-type"
    (line,) = parse(f"{experts} global_aux_loss").ignored_flags
    assert line == "--moe-router-load-balancing-type (without --moe-aux-loss-coeff it has no effect)"
    assert parse(f"{experts} none").ignored_flags == parse(f"{experts} global_aux_loss --moe-aux-loss-coeff 1").ignored_flags == ()


@pytest.mark.parametrize("told", [
    "--no-moe-router-pre-softmax", "--overlap-param-gather", "--position-embedding-type rope --rotary-base 5",
    "--vocab-file x --merge-file y --tokenizer-type GPT2BPETokenizer",
    "--preset llama-1b --position-embedding-type learned_absolute --num-query-groups 4 --no-relu",
])  # fmt: skip
def test_what_was_not_asked_for_and_what_counts_is_not_named(told: str) -> None:
    assert parse(told).ignored_flags == ()


def test_a_file_of_all_fields_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(config_as_yaml(parse()))
    assert config_from_args(["--config", str(tmp_path / "run.yaml")]).ignored_flags == ()
    (tmp_path / "run.yaml").write_text(config_as_yaml(parse()).replace("rotary_base: 10000.0", "rotary_base: 5.0"))
    (line,) = config_from_args(["--config", str(tmp_path / "run.yaml")]).ignored_flags
    assert line.startswith("run.yaml line ") and line.endswith("rotary_base (without --position-embedding-type rope it has no effect)")


def test_a_configuration_that_nobody_typed() -> None:
    config = Config()
    config.model.rotary_base = 5.0
    assert drop_unused(config) == ["--rotary-base (without --position-embedding-type rope it has no effect)"]
    assert diff(config, Config()) == {}


def test_help_says_what_a_flag_needs() -> None:
    texts = {item.name: described(item) for _, item in CONDITIONAL}
    assert texts["moe_router_topk"] == "with --num-experts: experts of each token"
    assert texts["moe_router_bias_update_rate"].startswith("with --num-experts and --moe-router-enable-expert-bias: ")
    assert all(f"with {item.metadata['only'][0].needs}" not in item.metadata["help"] for _, item in CONDITIONAL), "said twice"
