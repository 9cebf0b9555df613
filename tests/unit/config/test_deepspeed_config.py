"""DeepSpeed's JSON: what each key means here, what it must agree with, and what a wrong file is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_sp.config.flags.arguments import config_as_yaml, config_from_args
from megatron_sp.config.flags.settings import MAX_FILE_BYTES
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import ConfigError

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 100 --train-iters 10"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ds.json"


def parse(path: Path, data: Any, more: str = "", *, world_size: int = 1, lr: str | None = None) -> Config:
    """``--lr`` is given unless the file has an optimizer, which is not read beside it."""
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    if lr is None:
        lr = "" if '"optimizer": {' in path.read_text() else "--lr 1e-3"
    return config_from_args([*SHAPE.split(), *lr.split(), "--deepspeed_config", str(path), *more.split()], world_size=world_size)


def error(path: Path, data: Any, more: str = "", **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(path, data, more, **kwargs)
    return str(caught.value)


def field(config: Config, name: str) -> Any:
    group, _, attribute = name.partition(".")
    return getattr(getattr(config, group), attribute)


def zero(**block: Any) -> dict[str, Any]:
    return {"zero_optimization": block}


def test_the_learning_rate_comes_from_the_file(path: Path) -> None:
    block = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}
    assert parse(path, block, lr="").optimizer.lr == 3e-4
    assert parse(path, {"optimizer": {"type": "AdamW", "params": {}}}, lr="").optimizer.lr == 1e-3  # DeepSpeed's default
    assert "--lr is required to train" in error(path, {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, lr="")
    assert (
        parse(path, {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 2e-4, "warmup_max_lr": 2e-4}}}, lr="").optimizer.lr
        == 2e-4
    )


def test_an_optimizer_beside_a_rate_is_not_read(path: Path) -> None:
    """Megatron-DeepSpeed hands over its own, made from the flags; what the block says, and what it leaves out, has no effect there."""
    block = {"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.5, "weight_decay": 0.3}}}
    config = parse(path, block, "--adam-beta2 0.95", lr="--lr 1e-4")
    found = config.optimizer
    assert (found.optimizer, found.lr, found.weight_decay, found.adam_beta2) == ("adam", 1e-4, 0.01, 0.95)
    (note,) = (note for note in config.ignored_flags if "ds.json" in note)
    assert note.startswith('ds.json: optimizer ({"type": "OneBitLamb", ') and "the optimizer is that of --lr and the flags beside" in note


def test_agreement_is_no_error_and_defaults_of_deepspeed_argue_with_nobody(path: Path) -> None:
    data = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1, "overlap_comm": False}, "bf16": {"enabled": False}, "fp16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95]}},
    }  # fmt: skip
    more = (
        "--global-batch-size 8 --micro-batch-size 2 --clip-grad 1 --use-distributed-optimizer --no-overlap-grad-reduce --fp16"
        " --initial-loss-scale 1024 --weight-decay 0.1 --adam-beta2 0.95 --adam-eps 1e-6 --overlap-param-gather --optimizer adam"
    )
    config = parse(path, data, more, world_size=2)
    assert (config.parallel.zero_stage, config.precision.initial_loss_scale) == (1, 1024.0)
    assert (config.optimizer.weight_decay, config.optimizer.adam_eps, config.parallel.overlap_param_gather) == (0.1, 1e-6, True)


@pytest.mark.parametrize(("data", "more", "name", "value", "says"), [
    (zero(stage=2), "--zero-stage 1", "parallel.zero_stage", 2, "--zero-stage (1) (DeepSpeed reads this from its file alone"),
    (zero(stage=0), "--zero_stage=3", "parallel.zero_stage", 0, "so it counts: ds.json: zero_optimization.stage (0))"),
    (zero(stage=3), "--use-distributed-optimizer", "parallel.zero_stage", 3, "--use-distributed-optimizer (DeepSpeed reads"),
    (zero(stage=0), "--use-distributed-optimizer", "parallel.zero_stage", 0, "--use-distributed-optimizer (DeepSpeed reads"),
    ({"gradient_clipping": 0.5}, "--clip-grad 1.0", "optimizer.clip_grad", 0.5, "--clip-grad (1.0) (DeepSpeed reads"),
    ({"fp16": {"loss_scale": 0}}, "--fp16 --loss-scale 8", "precision.loss_scale", None, "loss_scale (0, which is dynamic))"),
    ({"fp16": {"initial_scale_power": 4}}, "--fp16 --initial-loss-scale 8", "precision.initial_loss_scale", 16.0, "(4, which is 16))"),
    ({"fp16": {"loss_scale_window": 500}}, "--fp16 --loss-scale-window 9", "precision.loss_scale_window", 500, "(9) (DeepSpeed"),
])  # fmt: skip
def test_what_only_deepspeed_reads_is_as_its_file_says_and_one_line_says_so(
    path: Path, data: Any, more: str, name: str, value: Any, says: str
) -> None:
    config = parse(path, data, more)
    assert field(config, name) == value
    (note,) = (note for note in config.ignored_flags if "DeepSpeed reads this" in note)
    assert says in note and "\n" not in note


def test_a_contradiction_with_the_yaml_file_names_its_line(path: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("lr: 0.1\nfp16: true\n")
    text = error(path, {"bf16": {"enabled": True}}, f"--config {tmp_path}/run.yaml", lr="")
    assert "ds.json: bf16.enabled (true) contradicts run.yaml line 2: fp16" in text
    (tmp_path / "run.yaml").write_text(f"lr: 0.1\ndeepspeed_config: {path}\n")
    assert config_from_args([*SHAPE.split(), "--config", f"{tmp_path}/run.yaml"], world_size=1).precision.bf16


def test_batch_sizes_count_data_parallel_ranks(path: Path) -> None:
    data = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert parse(path, data, "--tp-size 2", world_size=8).batch.global_batch_size == 2 * 3 * 4
    assert parse(path, {"train_batch_size": 24, "gradient_accumulation_steps": 3}, "--sp-size 2", world_size=8).batch.micro_batch_size == 2
    assert "the number of processes (6) must be a multiple" in error(path, data, "--tp-size 4", world_size=6)
    tokens = parse(path, {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}, "--lr-warmup-tokens 129")
    assert tokens.optimizer.lr_warmup_iters == 2  # 32 * 4 = 128 tokens a step


def test_parameters_of_no_optimizer(path: Path) -> None:
    says = 'optimizer.params ({"lr": 0.1}) has no optimizer.type: add "type": "AdamW"'
    assert says in error(path, {"optimizer": {"params": {"lr": 0.1}}})
    assert parse(path, {"optimizer": {"params": {}}}, lr="--lr 1e-3").optimizer.optimizer == "adam"


def test_tuning_is_listed_once_in_one_line(path: Path) -> None:
    data = {
        "steps_per_print": 10, "wall_clock_breakdown": False, "prescale_gradients": True,
        "activation_checkpointing": {"partition_activations": True},
        "zero_optimization": {"stage": 3, "reduce_scatter": True, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": "auto",
            "offload_optimizer": {"device": "cpu", "buffer_count": 4}, "offload_param": {"device": "none"}, "zero_quantized_weights": False,
            "zenflow": None}, "curriculum_learning": {"enabled": False}, "amp": {}, "_comment": "mine",
        "compression_training": {"a": {"enabled": False}},
        "data_types": {"grad_accum_dtype": "fp32"},
    }  # fmt: skip
    config = parse(path, data, "--use-mcore-models")
    assert len(config.ignored_flags) == 2
    note = config.ignored_flags[1]
    assert "\n" not in note and note.startswith(
        "ds.json: steps_per_print, wall_clock_breakdown, prescale_gradients, activation_checkpointing,"
    )
    for name in ("zero_optimization.reduce_bucket_size", "zero_optimization.offload_optimizer.buffer_count", "amp", "curriculum_learning"):
        assert name in note
    assert note.endswith("(DeepSpeed's own tuning, without a meaning here); _comment (unknown)")
    assert parse(path, {"zero_optimization": {"stage": 1}}).ignored_flags == ()
    assert len(parse(path, {f"k{i}": i for i in range(2000)}).ignored_flags[0]) < 1000


_ROUTED = {"enabled": True, "total_layer_num": 24, "random_ltd_layer_num": 22}
_SAMPLED = {"enabled": True, "curriculum_metrics": {"seqlen": {"min_difficulty": 80}}}


@pytest.mark.parametrize("data", [
    {"enabled": True, "seed": 1234, "data_sampling": {"enabled": False, "num_epochs": 1}, "data_routing": {"enabled": False}},
    {"enabled": True, "seed": 1234, "data_routing": {"enabled": True, "random_ltd": {**_ROUTED, "enabled": False}}, "data_sampling": {
        "enabled": True, "num_epochs": 1, "num_workers": 0, "curriculum_learning": {**_SAMPLED, "enabled": False}}},
    {"enabled": False, "data_routing": {"enabled": True, "random_ltd": _ROUTED}},
    {"enabled": True, "data_routing": {"random_ltd": _ROUTED}, "data_sampling": {"curriculum_learning": _SAMPLED}},
    {"data_sampling": {"enabled": True, "curriculum_learning": _SAMPLED}},
])  # fmt: skip
def test_data_efficiency_that_is_off_inside_is_accepted(path: Path, data: dict[str, Any]) -> None:
    (note,) = parse(path, {"data_efficiency": data}).ignored_flags
    assert note.startswith("ds.json: data_efficiency") and "unknown" not in note


WRONG: list[tuple[str, str]] = [
    ("", "is not valid JSON: Expecting value: line 1 column 1"),
    ('{"a": 1,\n "b": }', "is not valid JSON: Expecting value: line 2 column 7"), ('{"a": 1,}', "line 1 column"),
    ("[]", "must be a JSON object, not list"),
    ('{"bf16": {"enabled": true}, "bf16": {"enabled": false}}', "the name 'bf16' is given twice"),
    ('{"zero_optimization": {"stage": 1, "stage": 2}}', "the name 'stage' is given twice"),
    ('{"a":' * 40 + "1" + "}" * 40, "nested deeper than 32 levels"),
    ('{"a":' + "[" * 9000 + "]" * 9000 + "}", "nested too deeply"),
    ('{"a":[' + "1," * 20000 + "1]}", "more than 10,000 values"), ("#" * (MAX_FILE_BYTES + 1), "larger than"),
    ('{"gradient_clipping": NaN}', "gradient_clipping: expected a number"),
    ('{"gradient_clipping": Infinity}', "gradient_clipping: expected a number"),
    ('{"gradient_clipping": 1e999}', "gradient_clipping: expected a number"),
    ('{"gradient_clipping": -1}', "ds.json: gradient_clipping (-1) must be at least 0"),
    ('{"gradient_clipping": "1.0"}', "gradient_clipping: expected a number, got str '1.0'"),
    ('{"gradient_clipping": true}', "gradient_clipping: expected a number, got bool True"),
    ('{"train_batch_size": 1.5}', "train_batch_size: expected an integer, got float 1.5"),
    ('{"train_batch_size": 0}', "train_batch_size (0) must be at least 1"),
    ('{"train_batch_size": ' + "9" * 5000 + "}", "is not valid JSON"),
    ('{"gradient_clipping": ' + "9" * 4000 + "}", "gradient_clipping: "),
    ('{"gradient_accumulation_steps": 0}', "gradient_accumulation_steps: expected an integer of at least 1, got 0"),
    ('{"gradient_accumulation_steps": [1]}', "gradient_accumulation_steps: expected an integer of at least 1, got [1]"),
    ('{"zero_optimization": true}', "zero_optimization: expected an object {...}, got true"),
    ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage: expected 0, 1, 2 or 3, got 4"),
    ('{"zero_optimization": {"stage": true}}', "zero_optimization.stage: expected 0, 1, 2 or 3, got true"),
    ('{"zero_optimization": {"stage": [1]}}', "zero_optimization.stage: expected 0, 1, 2 or 3, got [1]"),
    ('{"zero_optimization": {"overlap_comm": 1}}', 'overlap_comm: expected true, false or "auto", got 1'),
    ('{"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}', 'device: expected "cpu" or "none", got "gpu"'),
    ('{"zero_optimization": {"offload_optimizer": {"device": ["cpu"]}}}', 'device: expected "cpu" or "none", got ["cpu"]'),
    ('{"zero_optimization": {"offload_optimizer": "cpu"}}', 'offload_optimizer: expected an object {...}, got "cpu"'),
    ('{"fp16": {"enabled": "yes"}}', "fp16.enabled: expected true or false, got str 'yes'"),
    ('{"fp16": {"enabled": true, "initial_scale_power": 1e999}}', "initial_scale_power: expected an integer from 0 to 127"),
    ('{"fp16": {"enabled": true, "initial_scale_power": 1024}}', "initial_scale_power: expected an integer from 0 to 127, got 1024"),
    ('{"fp16": {"enabled": true, "loss_scale": -8}}', "fp16.loss_scale (-8) must be at least 0"),
    ('{"fp16": {"enabled": true, "hysteresis": 0}}', "fp16.hysteresis (0) must be at least 1"),
    ('{"communication_data_type": "int8"}', 'communication_data_type: expected "fp32" or "bf16", got "int8"'),
    ('{"data_types": {"grad_accum_dtype": 32}}', 'grad_accum_dtype: expected "fp32", got 32'),
    ('{"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}', "betas: expected two numbers [beta1, beta2], got [0.9]"),
    ('{"optimizer": {"type": "Adam", "params": {"betas": [0.9, "x"]}}}', "betas: expected a number, got str 'x'"),
    ('{"optimizer": {"type": "Adam", "params": 3}}', "optimizer.params: expected an object {...}, got 3"),
    ('{"optimizer": "Adam"}', 'optimizer: expected an object {...}, got "Adam"'),
    ('{"scheduler": 3}', "scheduler: expected an object {...}, got 3"),
    ('{"graident_clipping": 1.0}', "ds.json: graident_clipping is unknown: did you mean gradient_clipping?"),
    ('{"zero_optimization": {"stag": 1}}', "zero_optimization.stag is unknown: did you mean stage?"),
    ('{"a\\u001b[31m": 1, "bf16": {"enabled": 1}}', "bf16.enabled: expected true or false, got int 1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_wrong_files(path: Path, text: str, says: str) -> None:
    said = error(path, text)
    assert says in said and "ds.json" in said
    assert "\n" not in said and len(said) < 600 and said.isprintable()


def test_everything_that_is_wrong_is_said_at_once(path: Path) -> None:
    data = {"gradient_clipping": 2, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "fp16": {"enabled": True}}
    text = error(path, data, "--clip-grad 1 --bf16 --zero-stage 2")
    assert text.startswith("2 things are wrong:") and all(part in text for part in ("--bf16", "offload_param"))


def test_files_that_cannot_be_read(path: Path) -> None:
    for flag in ("--deepspeed_config", "--deepspeed-config", "--deepscale_config"):
        with pytest.raises(ConfigError, match=r"--deepspeed_config /none/ds.json: cannot be read: No such file"):
            config_from_args([*SHAPE.split(), flag, "/none/ds.json"])
    with pytest.raises(ConfigError, match="--deepspeed_config: expected a text, got nothing"):
        config_from_args([*SHAPE.split(), "--deepspeed_config", "--bf16"])
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8"):
        config_from_args([*SHAPE.split(), "--deepspeed_config", str(path)])


def test_the_printed_configuration_holds_what_the_file_said(path: Path, tmp_path: Path) -> None:
    data = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "fp16": {"enabled": True},
        "x": 1,
    }  # fmt: skip
    config = parse(path, data, "--micro-batch-size 2")
    (tmp_path / "again.yaml").write_text(config_as_yaml(config))
    again = config_from_args(["--config", f"{tmp_path}/again.yaml"], world_size=1)
    assert again == config and again.parallel.zero_stage == 3
    assert "# ignored: ds.json: x (unknown)\n" in config_as_yaml(config)
