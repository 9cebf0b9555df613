"""The model zoo: parameter counts against the published ones and against real modules, and what --preset does to a command line."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
import torch
import yaml
from support.paths import ROOT

from megatron_sp.commands import cli
from megatron_sp.commands.pretrain import parse_config
from megatron_sp.config.flags.arguments import config_as_yaml, config_from_args
from megatron_sp.config.presets import PRESETS, preset_named
from megatron_sp.config.schema import Config, KernelConfig, ModelConfig
from megatron_sp.estimate.flops import count_parameters
from megatron_sp.models import bert, gpt
from megatron_sp.parallel import layers
from megatron_sp.training.resume import check_model, take_model
from megatron_sp.utils.errors import CheckpointError, ConfigError

REST = ("--mock-data", "--lr", "1e-4", "--train-iters", "10")
ROUNDED = {"gpt-125m": 125e6, "gpt-350m": 350e6, "gpt-760m": 760e6, "gpt-1.3b": 1.3e9, "gpt-2.7b": 2.7e9, "gpt-6.7b": 6.7e9,
           "gpt-13b": 13e9, "gpt-175b": 175e9}  # fmt: skip


def config_of(*flags: str, **options: object) -> Config:
    return config_from_args([*REST, *flags], **options)  # type: ignore[arg-type]


def test_the_number_is_about_that_of_a_paper_that_rounds() -> None:
    assert all(abs(PRESETS[name].num_params / published - 1) < 0.02 for name, published in ROUNDED.items())


def test_the_width_of_a_head() -> None:
    """No parameter count shows it: 64 in GPT-2, BERT and small ones, 96 and 80 in two models of the table, else 128."""
    others = {"gpt-760m": 96, "gpt-2.7b": 80, "phi3-mini": 96, "nemotron4-340b": 192}
    of_64 = {"gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1.5b", "gpt-125m", "gpt-350m", "llama-1b", "pythia-70m", "pythia-160m"}
    for name, preset in PRESETS.items():
        usual = 64 if name in of_64 or preset.family == "bert" else 128
        assert ModelConfig(**preset.flags).head_dim == others.get(name, usual), name


@pytest.mark.parametrize("name", PRESETS)
def test_the_number_is_that_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter of one layer of each kind is made, without storage, and the others are as these."""
    monkeypatch.setattr(layers, "draw_normal", lambda shape, *_: torch.empty(shape, device="meta"))
    preset = PRESETS[name]
    config = ModelConfig(**preset.flags, model_family=preset.family, make_vocab_size_divisible_by=1)
    make = bert.BertModel if preset.family == "bert" else gpt.GPTModel
    with_experts = [layer in config.expert_layers(config.num_layers) for layer in range(config.num_layers)]

    def size(*kinds: bool) -> int:
        pattern = {"moe_layer_freq": f"[{','.join(str(int(kind)) for kind in kinds)}]"} if config.has_experts else {}
        with torch.device("meta"):
            small = dataclasses.replace(config, num_layers=len(kinds), **pattern)
            return sum(p.numel() for p in make(small, KernelConfig(), seed=1, dtype=torch.bfloat16).parameters())

    first = with_experts[0]
    more = {kind: size(first, kind) - size(first) for kind in set(with_experts)}
    assert size(first) + sum(more[kind] for kind in with_experts[1:]) == preset.num_params == count_parameters(config)


@pytest.mark.parametrize("flags", [{"bert_no_binary_head": True}, {"num_tokentypes": 0}, {"normalization": "RMSNorm"}])
def test_the_number_of_a_bert_that_lacks_something(flags: dict[str, object]) -> None:
    config = ModelConfig(**{**PRESETS["bert-base"].flags, "num_layers": 1, "vocab_size": 128, "hidden_size": 24}, model_family="bert")
    config = dataclasses.replace(config, **flags)
    model = bert.BertModel(config, KernelConfig(), seed=1, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_whole_model(name: str) -> None:
    """Nothing but the preset is needed for the model's shape, the values arrive, and the rest is as without it."""
    family = PRESETS[name].family
    config, plain = config_of("--preset", name, family=family), Config()
    assert config == config_of("--preset", name) and config.model.model_family == family
    assert {field: getattr(config.model, field) for field in PRESETS[name].flags} == PRESETS[name].flags
    assert count_parameters(config.model) == PRESETS[name].num_params
    assert (config.parallel, config.kernels, config.precision, config.checkpoint) == (
        plain.parallel, plain.kernels, plain.precision, plain.checkpoint,
    )  # fmt: skip
    assert config.preset == name and config.preset_fields == PRESETS[name].flags.keys()


def test_a_preset_is_below_a_file_and_a_file_below_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: gpt2-355m\nmodel:\n  num_layers: 5\n  hidden_dropout: 0.3\n")
    config = config_of("--config", str(file), "--hidden-dropout", "0.2")
    model = config.model
    assert (model.hidden_size, model.num_layers, model.hidden_dropout, model.attention_dropout) == (1024, 5, 0.2, 0.1)
    assert config.preset == "gpt2-355m" and not {"num_layers", "hidden_dropout"} & config.preset_fields
    model = config_of("--num-layers", "7", "--config", str(file), "--preset", "GPT2-124m").model  # wherever it stands
    assert (model.hidden_size, model.num_layers, model.hidden_dropout) == (768, 7, 0.3)
    assert config_of("--preset", "GPT2-124M").preset == "gpt2-124m"
    assert config_of("--preset", "gpt2-124m", "--preset", "gpt2-774m").model.hidden_size == 1280
    file.write_text("model:\n  preset: gpt2-774m\n")
    assert config_of("--config", str(file)).model.hidden_size == 1280


def test_the_family_of_a_preset() -> None:
    """Who asks no program's question gets the preset's family; another one that is given contradicts it."""
    with pytest.raises(ConfigError, match="bert-base is a BERT model, and this program trains GPT"):
        config_of("--preset", "bert-base", "--model-family", "gpt")
    post = config_of("--preset", "bert-large-hf", "--norm-placement", "pre").model
    assert (post.is_bert, post.norm_placement, post.norm_epsilon, post.gelu_approximate) == (True, "pre", 1e-12, "none")


def test_flags_of_other_dialects_override_a_preset() -> None:
    model = config_of("--preset", "gpt2-124m", "--no-bias-gelu-fusion", "--use-rotary-position-embeddings").model
    assert (model.gelu_approximate, model.position_embedding_type) == ("none", "rope")
    model = config_of("--preset", "llama3-8b", "--num-key-value-heads", "4", "--no-swiglu").model
    assert (model.num_query_groups, model.swiglu) == (4, False)


def test_a_longer_sequence_lengthens_the_table_of_positions() -> None:
    assert config_of("--preset", "gpt-1.3b", "--seq-length", "65536").model.max_positions == 65536
    assert config_of("--preset", "gpt-1.3b", "--seq-length", "512").model.max_positions == 2048
    with pytest.raises(ConfigError, match=r"max_position_embeddings \(4096\) must be at least seq_length \(8192\)"):
        config_of("--preset", "gpt-1.3b", "--seq-length", "8192", "--max-position-embeddings", "4096")


def test_a_tokenizer_decides_about_the_vocabulary() -> None:
    assert config_of("--preset", "gpt2-124m").model.vocab_size == 50257
    assert config_of("--preset", "gpt2-124m", "--tokenizer-type", "NullTokenizer").model.vocab_size == 50257
    for flags in (("--tokenizer-type", "ByteTokenizer"), ("--tokenizer-model", "a.model"), ("--vocab-file", "vocab.txt")):
        assert config_of("--preset", "gpt2-124m", *flags).model.vocab_size is None
        assert config_of("--preset", "gpt2-124m", *flags, "--vocab-size", "60000").model.vocab_size == 60000


@pytest.mark.parametrize("flags, family, message", [
    (("--preset", "gtp2-124m"), "gpt", "--preset: 'gtp2-124m' is not a preset: did you mean gpt2-124m"),
    (("--preset", "x"), "gpt", "'x' is not a preset: `megatron-sp presets` lists them"),
    (("--preset",), "gpt", "--preset: expected a text, got nothing"),
    (("--preset=",), "gpt", "--preset: expected a text, got an empty text"),
    (("--preset", "bert-large"), "gpt", "bert-large is a BERT model, and this program trains GPT: start it with pretrain_bert.py"),
    (("--preset", "Llama3-8B"), "bert", "llama3-8b is a GPT model, and this program trains BERT: start it with pretrain_gpt.py"),
])  # fmt: skip
def test_a_preset_that_is_none(flags: tuple[str, ...], family: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(*flags, family=family)
    assert message in str(caught.value) and "required" not in str(caught.value)


def test_a_mistake_in_a_file_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("lr: 1e-4\npreset: gpt-1.2b\n")
    with pytest.raises(SystemExit) as end:
        parse_config(["--config", str(tmp_path / "run.yaml"), "--mock-data", "--train-iters", "1"], prog="pretrain_gpt.py", family="gpt")
    assert end.value.code == 2
    assert "run.yaml line 2: preset: 'gpt-1.2b' is not a preset: did you mean gpt-1.3b" in capsys.readouterr().err


def test_printed_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--print-config shows the values, not the name alone, so the file stays right when a preset changes."""
    words = ["--preset", "llama-1b", *REST, "--seq-length", "4096"]
    with pytest.raises(SystemExit) as end:
        parse_config([*words, "--print-config"], prog="pretrain_gpt.py", family="gpt")
    text = capsys.readouterr().out
    assert end.value.code == 0 and text.startswith("# preset: llama-1b\n")
    assert yaml.safe_load(text)["model"]["rotary_base"] == 500000.0
    (tmp_path / "run.yaml").write_text(text)
    assert config_from_args(["--config", str(tmp_path / "run.yaml")]) == config_from_args(words)
    assert "preset" not in config_as_yaml(config_of("--preset", "llama-1b")).split("\n", 1)[1]


def stored(*flags: str) -> dict[str, object]:
    return {"config": config_of(*flags).to_dict()}


def test_resuming_with_the_arguments_of_the_checkpoint() -> None:
    """They replace the preset's, its sequence length and dropout, too; what the command line names counts."""
    before = stored("--preset", "gpt2-124m", "--num-layers", "3", "--seq-length", "256", "--max-position-embeddings", "300")
    load = ("--load", "run", "--use-checkpoint-args")
    now = config_of("--preset", "gpt-1.3b", *load)
    take_model(before, now, 1)
    assert (now.model.num_layers, now.model.hidden_size, now.model.seq_length, now.model.max_positions) == (3, 768, 256, 300)
    assert now.model.hidden_dropout == 0.1
    now = config_of("--preset", "gpt-1.3b", *load, "--seq-length", "128", "--hidden-dropout", "0")
    take_model(before, now, 1)
    assert (now.model.num_layers, now.model.seq_length, now.model.hidden_dropout) == (3, 128, 0)


def test_resuming_with_another_preset_is_another_model() -> None:
    same = config_of("--preset", "gpt2-124m", "--hidden-dropout", "0")
    assert check_model(stored("--preset", "gpt2-124m"), same, finetunes=False) == ["model.hidden_dropout: 0.1 -> 0.0"]
    with pytest.raises(CheckpointError, match="hidden_size: 768 in the checkpoint, 1024 here"):
        check_model(stored("--preset", "gpt2-124m"), config_of("--preset", "gpt2-355m"), finetunes=True)


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(PRESETS) and lines[0].split()[:2] == ["name", "parameters"]
    (llama,) = [line for line in lines if line.startswith("llama3-8b")]
    for part in ("8,030,261,248", "32 (8 kv)", "14336", "8,192", "128,256", "rotary, RMSNorm, SwiGLU, own head", "arXiv:2407.21783"):
        assert part in llama
    assert cli.main(["presets", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bert-large"]["family"] == "bert" and record["gpt-13b"]["flags"]["hidden_size"] == 5120


def test_the_table_in_the_docs() -> None:
    tool = runpy.run_path(str(ROOT / "tools/dev/make_zoo_docs.py"))
    page = (ROOT / "docs/how-to/zoo.md").read_text(encoding="utf-8")
    assert tool["page"](page) == page, "run `make docs`"


def test_every_name_is_found_however_it_is_written() -> None:
    assert all(preset_named(name.upper()) is preset for name, preset in PRESETS.items())
    assert all(preset.source and preset.family in ("gpt", "bert") for preset in PRESETS.values())
