"""Sources that lie about sizes, names and numbers, and places that cannot be: one message, an exit code, and nothing written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.convert_models import MODELS, Tensors, contents, random_model, run, write_run

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.families import FAMILIES
from megatron_sp.convert.families.family import Settings
from megatron_sp.convert.formats.megatron_args import tokenizer_size
from megatron_sp.convert.formats.megatron_dist import named_tensors
from megatron_sp.convert.formats.native import _count
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_CONFIG, EXIT_DISK, CheckpointError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_run(random_model("llama"), tmp_path / "source")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 1 << 31, "--hidden-size (2147483648) must be at most 1048576"),
        ("num_layers", None, "--num-layers is required"),
        ("num_layers", 1 << 40, "--num-layers (1099511627776) must be at most 4096"),
        ("num_layers", 4096, "num_layers (4096) must not exceed the number of tensors"),
    ],
)
def test_a_run_whose_state_lies_about_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: int | None, message: str
) -> None:
    model = random_model("llama")
    setattr(model.config, field, value)
    assert run("--input", write_run(model, tmp_path / "run"), "--to", "hf", "--output", tmp_path / "out") == EXIT_CHECKPOINT
    told = capsys.readouterr().err
    assert "describes a model that cannot be" in told and message in told


@pytest.mark.parametrize("shape", [(), (37,), (0, 24)])
def test_a_table_of_words_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: tuple[int, ...]) -> None:
    model = random_model("llama")
    model.store = Tensors({**contents(model), "embedding.word_embeddings.weight": torch.zeros(shape)})
    assert run("--input", write_run(model, tmp_path / "run"), "--to", "hf", "--output", tmp_path / "out") == EXIT_CHECKPOINT
    assert f"embedding.word_embeddings.weight is {list(shape)}, and must be a table" in capsys.readouterr().err


def test_a_classifier_without_classes_and_a_name_that_steers_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "hf"
    assert run("--input", write_run(random_model("bert-classifier"), tmp_path / "run"), "--to", "hf", "--output", folder) == 0
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "cls.\x1b[2J": torch.ones(2)}, folder / "model.safetensors")
    assert run("--input", folder, "--to", "megatron_sp", "--output", tmp_path / "shown", "--show-tensors") == 0
    assert "cls.\\x1b[2J -> dropped: heads of pretraining" in capsys.readouterr().out
    save_file({**tensors, "classifier.weight": torch.ones(())}, folder / "model.safetensors")
    assert run("--input", folder, "--to", "megatron_sp", "--output", tmp_path / "out") == EXIT_CHECKPOINT
    assert "classifier.weight" in capsys.readouterr().err


def test_a_folder_that_is_named_as_of_a_billion_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "iter_0000001" / "mp_rank_999999999999_999"
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").touch()
    assert run("--input", tmp_path, "--from", "megatron", "--to", "hf", "--output", tmp_path / "out") == EXIT_CHECKPOINT
    assert "mp_rank_00_000, mp_rank_01_000" in capsys.readouterr().err


def test_a_stack_of_a_billion_blocks() -> None:
    tensor = SimpleNamespace(shape=(1 << 40, 4), dtype="float32", chunks=[])
    folder: Any = SimpleNamespace(tensors={"decoder.layers.mlp.linear_fc1.weight": tensor}, path="ckpt")
    with pytest.raises(CheckpointError, match="has 1,099,511,627,776 blocks"):
        named_tensors(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vocab.json", "[1, 2]"), ("vocab.json", "[" * 100_000), ("vocab.json", '{"a": Infinity}'), ("vocab.json", '{"a": [1]}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": Infinity}}}'), ("tokenizer.json", '{"model": []}'), ("tokenizer.model", "no proto"),
    ],
)  # fmt: skip
def test_tokenizers_that_cannot_be_counted(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        tokenizer_size(tmp_path)


def test_a_tokenizer_with_a_third_of_a_million_merges_is_counted(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(1000)}
    document = {"model": {"vocab": words, "merges": [["a", "b"]] * 340_000}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert tokenizer_size(tmp_path) == 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--set", "vocab-size=5", "--vocab-size", "5"],
            "--set, --vocab-size would change nothing for --from megatron_sp: --set is for megatron, megatron-dist, megatron-deepspeed",
        ),
        (["--target-tensor-parallel-size", "2"], "--target-tensor-parallel-size would change nothing for --to hf"),
        (
            ["--megatron-names", "legacy"],
            "--megatron-names would change nothing for --to hf: --megatron-names is for megatron; leave it out",
        ),
        (["--max-metadata-mb", "4"], "--max-metadata-mb would change nothing for --from megatron_sp"),
        (["--to", "megatron-dist", "--megatron-names", "legacy"], "--megatron-names would change nothing for --to megatron-dist"),
        (["--to", "megatron", "--deepspeed-layout", "universal"], "is for megatron-deepspeed; leave it out"),
        (["--to", "megatron", "--deepspeed-qkv-layout", "interleaved"], "--deepspeed-qkv-layout would change nothing for --to megatron"),
        (["--to", "megatron_sp", "--max-shard-size", "1MB"], "--max-shard-size would change nothing for --to megatron_sp"),
        (["--step", "-1"], "--step (-1) must be at least 0"),
        (["--report", "nowhere/report.json"], "--report nowhere/report.json cannot be written: there is no folder nowhere"),
    ],
)
def test_flags_that_would_do_nothing(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run("--input", source, "--to", "hf", "--output", tmp_path / "out", *words) == EXIT_CONFIG
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--input", source, "--to", "hf", "--output", tmp_path / ("x" * 300)) == EXIT_DISK
    assert run("--input", source, "--to", "hf", "--output", tmp_path / "new" / "er" / ("x" * 250)) == EXIT_DISK
    assert run("--input", tmp_path / ("x" * 300), "--to", "hf", "--output", tmp_path / "out") == EXIT_CHECKPOINT
    assert capsys.readouterr().err.count("File name too long") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_counts_that_are_none_are_not_known() -> None:
    assert [_count({"step": value}, "step") for value in (7, float("nan"), True, -1, "7", 10**30)] == [7, 0, 0, 0, 0, 0]


def test_a_step_that_is_not_there_is_asked_for_by_the_flag_of_this_command(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--input", source, "--to", "hf", "--output", tmp_path / "out", "--step", "3") == EXIT_CHECKPOINT
    assert "(--step 3)" in capsys.readouterr().err


def test_what_a_mistral_does_not_say_is_as_transformers_has_it() -> None:
    document = FAMILIES["mistral"].document(ModelConfig(**{**MODELS["mistral"][0], "num_attention_heads": 16, "num_query_groups": 4}))
    for name in ("sliding_window", "num_key_value_heads"):
        del document[name]
    config = FAMILIES["mistral"].config(Settings(document, "config.json"), {})
    assert (config.window_size, config.num_query_groups) == (4096, 8)
    config = FAMILIES["mistral"].config(Settings({**document, "sliding_window": None, "num_key_value_heads": None}, "config.json"), {})
    assert (config.window_size, config.num_query_groups) == (None, 16)


_QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("entries", "window"),
    [
        ({}, None),
        (_QWEN2_WINDOW, 5),
        ({**_QWEN2_WINDOW, "use_sliding_window": False}, None),
        ({**_QWEN2_WINDOW, "sliding_window": None}, None),
        ({"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ({"use_sliding_window": True, "sliding_window": 5}, None),  # max_window_layers is 28: no layer comes so late
        ({**_QWEN2_WINDOW, "max_window_layers": 28, "layer_types": ["sliding_attention"] * 3}, 5),
        ({**_QWEN2_WINDOW, "layer_types": ["full_attention"] * 3}, None),
        ({**_QWEN2_WINDOW, "max_window_layers": 1}, "2 of 3 layers have a window (max_window_layers 1, layer_types)"),
        ({**_QWEN2_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, "2 of 3 layers have a window"),
        ({**_QWEN2_WINDOW, "layer_types": ["sliding_attention"]}, "layer_types has 1 entries, and there are 3 layers"),
        ({**_QWEN2_WINDOW, "layer_types": ["linear_attention"] * 3}, "'linear_attention', which is another attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "gives every layer a window, and use_sliding_window and sliding_window give none"),
        ({**_QWEN2_WINDOW, "sliding_window": 0}, "sliding_window must be at least 1"),
    ],
)
def test_the_window_of_a_qwen2_is_that_of_all_its_layers(entries: dict[str, Any], window: int | str | None) -> None:
    document = FAMILIES["qwen2"].document(ModelConfig(**MODELS["qwen2"][0]))
    del document["use_sliding_window"]
    settings = Settings({**document, **entries}, "config.json")
    if isinstance(window, str):
        with pytest.raises(CheckpointError, match=re.escape(window)):
            FAMILIES["qwen2"].config(settings, {})
    else:
        assert FAMILIES["qwen2"].config(settings, {}).window_size == window
