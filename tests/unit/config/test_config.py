"""The configuration: every rule with its message, shorthands, and reading a stored one."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from typing import Any

import pytest

from megatron_sp.config.fields import MAX_COUNT, MAX_NUMBER, field_kinds
from megatron_sp.config.rules import normalize, validate, violations
from megatron_sp.config.rules_training import step_violation
from megatron_sp.config.schema import GROUPS, Config, diff
from megatron_sp.data.gpt_dataset import split_bounds
from megatron_sp.utils.errors import EXIT_CONFIG, ConfigError

GROUP_OF = {name: group for group, cls in GROUPS.items() for name in field_kinds(cls)}


def config(**fields: Any) -> Config:
    """A sound configuration with some fields replaced."""
    result = Config()
    values = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 100, "train_iters": 10,
        "lr": 1e-3, "mock_data": True, **fields,
    }  # fmt: skip
    for name, value in values.items():
        setattr(getattr(result, GROUP_OF[name]), name, value)
    return normalize(result)


def message(world_size: int = 1, **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(config(**fields), world_size)
    assert caught.value.exit_code == EXIT_CONFIG
    return str(caught.value)


def test_the_sound_configuration_is_sound() -> None:
    validate(config())
    validate(config(), 8)


# what cannot be said by words alone, for it is about a field that is not set; the others are in messages.txt
RULES: list[tuple[dict[str, Any], str]] = [
    ({"num_layers": None}, "--num-layers is required"),
    ({"num_layers": None, "seq_length": None}, "--num-layers, --seq-length are required"),
    ({"seq_length_curriculum": ("fixed_linear", "8", "32", "9", "4"), "train_iters": None, "train_tokens": 90, "start_weight_decay": 0.1,
        "end_weight_decay": 0.2, "weight_decay_incr_style": "linear"},
        "--weight-decay-incr-style changes the weight decay over --train-samples or --train-iters"),
    ({"train_iters": None}, "the length of the run is missing"), ({"lr": None}, "--lr is required to train"),
    ({"train_iters": None, "train_samples": 100, "lr_warmup_iters": 5},
        "--lr-warmup-iters cannot go with --train-samples: the schedule counts what the run counts; use the -samples forms"),
    ({"model_family": "bert", "tokenizer_type": "ByteTokenizer", "vocab_size": None, "eod_id": 0},
        "--eod-id is about documents in GPT's stream of tokens"),
    ({"vocab_size": None}, "the vocabulary is unknown"),
    ({"tokenizer_type": "NullTokenizer", "vocab_size": None}, "NullTokenizer needs --vocab-size"),
    ({"use_checkpoint_args": True, "num_layers": None}, "--use-checkpoint-args needs --load DIR"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), RULES, ids=[expected[:60] for _, expected in RULES])
def test_each_rule_is_the_only_message(fields: dict[str, Any], expected: str) -> None:
    text = message(**fields)
    assert expected in text
    assert "\n" not in text  # nothing else is wrong


@pytest.mark.parametrize(("processes", "fields"), [
    (3, {"num_attention_heads": 7, "hidden_size": 70, "sequence_parallel_size": 3}),  # uneven heads
    (4, {"num_query_groups": 1, "sequence_parallel_size": 4}),  # more ranks than key/value heads
    (4, {"num_query_groups": 2, "tensor_model_parallel_size": 4}),
    (8, {"seq_length": 1, "sequence_parallel_size": 4, "tensor_model_parallel_size": 1}),  # any length
    (4, {"sequence_parallel_size": 2, "sp_overlap_mode": "auto", "sp_head_chunks": 2}),
    (2, {"sequence_parallel_size": 2, "sp_overlap_mode": "chunked", "sp_overlap_comm": True}),
    (1, {"sp_overlap_mode": "none"}),
])  # fmt: skip
def test_sound_layouts(processes: int, fields: dict[str, Any]) -> None:
    validate(config(**fields), processes)


_FLAGS = {
    "--tp-size": "tensor_model_parallel_size", "--sp-size": "sequence_parallel_size",
    "--num-attention-heads": "num_attention_heads", "--num-query-groups": "num_query_groups",
    "--ffn-hidden-size": "ffn_hidden_size",
}  # fmt: skip
_VALUES = r"(\d+(?:, \d+)*(?: or \d+)?)"


def suggestions(text: str) -> list[tuple[str, int]]:
    """(flag or "processes", value) for everything a message recommends."""
    found = re.findall(rf"(--[a-z-]+) {_VALUES}", text) + [("processes", v) for v in re.findall(rf"(?:use|or) {_VALUES} processes", text)]
    return [(name, int(value)) for name, values in found for value in re.findall(r"\d+", values)]


def kinds(texts: list[str]) -> set[str]:
    """The rules behind messages, whatever the numbers."""
    return {re.sub(r"\d+(\.\d+)?", "N", text).split(":")[0].split("; use")[0] for text in texts}


def test_what_a_message_recommends_works() -> None:
    """Some layouts of a grid: with a recommended value the message is gone and no other has come."""
    tried: dict[str, int] = {}
    sizes = itertools.product((1, 2, 3, 6, 8), (1, 2, 3, 4), (1, 2, 3, 4), (4, 7, 10, 12), (None, 1, 2, 4, 5), (None, 30, 36), (None, 8))
    for processes, tp, sp, heads, groups, ffn, width in random.Random(0).sample(list(sizes), 60):
        fields: dict[str, Any] = {
            "tensor_model_parallel_size": tp, "sequence_parallel_size": sp, "num_attention_heads": heads,
            "hidden_size": 840, "num_query_groups": groups, "ffn_hidden_size": ffn, "kv_channels": width,
            "position_embedding_type": "rope", "global_batch_size": 12,
        }  # fmt: skip
        texts = violations(config(**fields), processes)
        for text in texts:
            for name, value in suggestions(text):
                changed = fields if name == "processes" else {**fields, _FLAGS[name]: value}
                left = violations(config(**changed), value if name == "processes" else processes)
                assert kinds(left) <= kinds(texts) - kinds([text]), (processes, fields, text, name, value, left)
                tried[name] = tried.get(name, 0) + 1
    assert tried.keys() == {"processes", *_FLAGS} and min(tried.values()) > 3, tried


def test_every_lowest_value_is_allowed_and_the_next_lower_is_not() -> None:
    for cls in GROUPS.values():
        for name in field_kinds(cls):
            low = cls.__dataclass_fields__[name].metadata["low"]
            if low is not None:
                refused = f"--{name.replace('_', '-')} ({{}}) must be at least {low:g}"
                assert refused.format(low - 1) in message(**{name: low - 1})
                try:
                    validate(config(**{name: low}))
                except ConfigError as error:  # another rule may object, this one may not
                    assert refused.format(low) not in str(error)


def test_every_number_has_a_largest_value_and_the_next_higher_is_refused() -> None:
    """Far above what anybody trains; nothing after the rules has to be afraid of overflow, or of taking for ever."""
    for cls in GROUPS.values():
        for name, kind in field_kinds(cls).items():
            if kind.base in ("int", "float") and not kind.many:
                high = cls.__dataclass_fields__[name].metadata["high"]
                high = high if high is not None else MAX_COUNT if kind.base == "int" else MAX_NUMBER
                beyond = high + 1 if kind.base == "int" else 2.0 * high
                if beyond < math.inf:
                    text = message(**{name: beyond, "fp16": True, "save": "x"})  # else they are dropped
                    assert f"--{name.replace('_', '-')} (" in text and " must be at most " in text


@pytest.mark.parametrize(("path", "expected"), [
    ("/tmp/" + "a" * 300, "has a name of 300 bytes, and the longest have 200"), ("\u4e2d" * 100, "has a name of 300 bytes"),
    ("/x" * 3000, "has 6000 bytes, and paths have at most 3000"),
    ("a\0b", "a text with a zero byte in it cannot be a name"),
])  # fmt: skip
def test_paths_that_no_system_takes(path: str, expected: str) -> None:
    for name in ("save", "vocab_file", "tensorboard_dir"):
        text = message(**{name: path})
        assert expected in text and len(text) < 200
    assert expected in message(train_data_path=("x", path), mock_data=False)


def test_sizes_that_fit_one_process_may_not_fit_four() -> None:
    fields = {"global_batch_size": 6, "micro_batch_size": 2}
    validate(config(**fields), 3)
    assert "(2 * 4 = 8): 6 = 0 * 8 + 6; use 8" in message(world_size=4, **fields)


def test_no_processes() -> None:
    assert "the number of processes (0) must be at least 1" in message(world_size=0)


def test_several_mistakes_are_numbered_in_one_message() -> None:
    text = message(hidden_size=66, lr=None, bf16=True, fp16=True)
    assert text.startswith("3 things are wrong:\n  1. hidden_size")
    assert "\n  2. --lr is required" in text and "\n  3. --bf16 and --fp16" in text


def test_a_huge_number_of_heads_is_answered_at_once() -> None:
    text = message(num_attention_heads=2**16, hidden_size=2**16, num_query_groups=7)
    assert "must be a multiple of num_query_groups (7)" in text and len(text) < 500


@pytest.mark.parametrize("fields", [
    {"hidden_size": 66, "kv_channels": 16}, {"position_embedding_type": "rope", "rotary_percent": 0.5},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"global_batch_size": 16, "micro_batch_size": 2, "rampup_batch_size": (4, 4, 100)},
    {"train_iters": None, "train_samples": 100, "lr_warmup_samples": 50, "lr_decay_samples": 80},
    {"skip_train": True, "train_iters": None, "lr": None, "load": "x"},
    {"load": "x", "use_checkpoint_args": True, "num_layers": None, "hidden_size": None},
    {"save": "x", "auto_resume": True, "load": "y", "finetune": True}, {"split": "100"}, {"split": "969, 30, 1"}, {"split": "98/2/0"},
    {"mock_data": False, "train_data_path": ("x",), "valid_data_path": ("y",)}, {"vocab_size": None, "tokenizer_type": "ByteTokenizer"},
    {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5, "lr_warmup_iters": 5},
    {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1, "end_weight_decay": 0.0}, {"peak_tflops": "h100-bf16"},
    {"peak_tflops": "0.5"}, {"lr": 0.0}, {"max_position_embeddings": 32},
    {"position_embedding_type": "rope", "rotary_percent": 0.125}, {"use_flash_attn": True, "bf16": True, "kv_channels": 256},
    {"global_batch_size": 4, "rampup_batch_size": (1, 1, 1)}, {"seed": 2**32 - 1},
    {"fp16": True, "initial_loss_scale": 2.0, "min_loss_scale": 2.0},
])  # fmt: skip
def test_unusual_but_sound(fields: dict[str, Any]) -> None:
    validate(config(**fields))


def test_shorthands() -> None:
    assert config(num_query_groups=2).model.group_query_attention
    assert config(use_flash_attn=True).kernels.attention_backend == "flash"
    assert config(recompute_activations=True).kernels.recompute_granularity == "selective"
    full = config(recompute_granularity="full").kernels
    assert (full.recompute_method, full.recompute_num_layers) == ("uniform", 1)
    assert config().data.tokenizer_type == "NullTokenizer"
    assert config(tokenizer_model="m").data.tokenizer_type == "SentencePieceTokenizer"
    assert config(vocab_file="v").data.tokenizer_type == "BertWordPieceLowerCase"
    assert config(vocab_size=None).data.tokenizer_type is None


def test_normalizing_twice_is_normalizing_once() -> None:
    once = config(recompute_granularity="full", num_query_groups=2, use_flash_attn=True)
    again, _ = Config.from_dict(once.to_dict())
    assert normalize(again) == once


def test_derived_sizes() -> None:
    assert config(geglu=True, hidden_size=768, num_attention_heads=12).model.ffn_size == 2048
    model = config(swiglu=True, hidden_size=768, num_attention_heads=12).model
    assert model.ffn_size == 2048 and model.head_dim == 64 and model.num_groups == 12 and model.max_positions == 32
    assert config().model.ffn_size == 256
    from_files = config(split="1/2", mock_data=False, data_path=("x",))
    assert split_bounds(from_files.data.split, 30) == [(0, 10), (10, 30), (30, 30)]
    with pytest.raises(ConfigError, match="shape is incomplete"):
        _ = Config().model.head_dim


def test_a_stored_configuration_comes_back_through_json() -> None:
    before = config(rampup_batch_size=(2, 2, 9), data_path=("a", "b"), profile_ranks=(0, 3))
    after, warnings = Config.from_dict(json.loads(json.dumps(before.to_dict())))
    assert after == before and warnings == []
    assert isinstance(after.data.data_path, tuple) and isinstance(after.optimizer.lr, float)


def test_a_stored_configuration_of_another_version() -> None:
    stored: dict[str, Any] = {"model": {"num_layers": 3, "new_thing": 1}, "space": {}, "precision": 4}
    after, warnings = Config.from_dict(stored)
    assert after.model.num_layers == 3 and after.optimizer == Config().optimizer
    assert [w.split("'")[1] for w in warnings] == ["model.new_thing", "space", "precision"]


@pytest.mark.parametrize(("stored", "expected"), [
    ([], "an object of groups, got list"),
    ({"model": {"num_layers": "3"}}, "'model.num_layers' of the stored configuration: expected an integer, got str '3'"),
    ({"model": {"num_layers": True}}, "expected an integer, got bool True"),
    ({"model": {"num_layers": 3.0}}, "expected an integer, got float"),
    ({"model": {"swiglu": 1}}, "expected true or false, got int 1"),
    ({"model": {"init_method_std": None}}, "expected a number, got NoneType"),
    ({"model": {"init_method_std": math.nan}}, "expected a number, got float nan"),
    ({"model": {"normalization": "x" * 500}}, "expected one of LayerNorm, RMSNorm"),
    ({"data": {"data_path": "abc"}}, "expected one or more texts, got str"),
    ({"data": {"data_path": ["a", 1]}}, "got int 1"),
])  # fmt: skip
def test_a_stored_configuration_of_the_wrong_type(stored: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(stored)
    assert expected in str(caught.value) and len(str(caught.value)) < 250


def test_diff_names_what_changed() -> None:
    assert diff(config(), config()) == {}
    assert diff(config(), config(num_layers=3, lr=0.5)) == {"model.num_layers": (2, 3), "optimizer.lr": (1e-3, 0.5)}


def test_ignored_flags_do_not_make_a_difference() -> None:
    other = config()
    other.ignored_flags = ("--x",)
    assert other == config() and "ignored_flags" not in other.to_dict()


def test_settings_of_nccl_are_dropped_where_there_is_none() -> None:
    """They change no result; each is named with the reason. Numbers that NCCL would refuse stay for the rules."""
    from megatron_sp.config.rules import drop_unused

    given = {"nccl_sp_ctas": 8, "nccl_dp_ctas": 4, "nccl_cta_policy": "zero"}
    c = config(device="cpu", **given)
    said = [*c.ignored_flags, *drop_unused(c)]
    assert (c.parallel.nccl_sp_ctas, c.parallel.nccl_dp_ctas, c.parallel.nccl_cta_policy) == (None, None, "default")
    assert [line.partition(" ")[0] for line in said if "gloo" in line] == ["--nccl-sp-ctas", "--nccl-dp-ctas", "--nccl-cta-policy"]
    c = config(**given)
    said = [*c.ignored_flags, *drop_unused(c)]
    assert (c.parallel.nccl_sp_ctas, c.parallel.nccl_dp_ctas, c.parallel.nccl_cta_policy) == (None, 4, "zero")
    assert "--nccl-sp-ctas (without --sequence-parallel-size or --context-parallel-size above 1 it has no effect)" in said
    assert config(**given, context_parallel_size=2).parallel.nccl_sp_ctas == 8


def test_sizes_that_are_over_may_be_those_of_fewer_ranks() -> None:
    fields = {"step_batch_size_schedule": ("0:2 1K:6 2K:8",), "micro_batch_size": 2, "load": "x"}
    resumed = config(**fields)
    validate(resumed, 4)
    assert resumed.batch.global_batch_size == 8
    assert step_violation(resumed.batch, 32, 4, 1000 // 32) == (
        "step_batch_size_schedule: 6 must be a multiple of micro_batch_size * data-parallel size (2 * 4 = 8), as every batch size is:"
        " 6 = 0 * 8 + 6"
    )
    assert step_violation(resumed.batch, 32, 4, 2000 // 32) is None
    assert step_violation(resumed.batch, 32, 1, 0) is None
