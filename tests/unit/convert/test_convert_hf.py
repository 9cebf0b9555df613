"""Conversion to Hugging Face's folders and back: bit for bit, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.convert_models import MODELS, assert_equal, contents, random_model, run, stored, write_run
from torch import Tensor, serialization

from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.families.family import Settings
from megatron_sp.convert.formats import FORMATS
from megatron_sp.convert.model import Options
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_CONFIG

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def to_hf(source: Path, target: Path, *more: Any) -> None:
    assert run("--input", source, "--to", "hf", "--output", target, *more) == 0


def to_native(source: Path, target: Path, *more: Any) -> None:
    assert run("--input", source, "--to", "megatron_sp", "--output", target, *more) == 0


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to be copied and damaged."""
    path = tmp_path_factory.mktemp("convert")
    to_hf(write_run(random_model("llama"), path / "run"), path / "hf")
    return path / "hf"


ORDINARY = ("gpt2-untied", "llama-biases", "llama-3", "mistral", "qwen2-window", "neox-few-biases", "mixtral-window", "qwen3-moe-one",
            "olmoe-heads", "bert-one-segment", "bert-classifier", "megatron-bert")  # fmt: skip


@pytest.mark.parametrize("name", [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.long) for name in MODELS])
def test_there_and_back(tmp_path: Path, name: str) -> None:
    dtype = list(DTYPES.values())[sorted(MODELS).index(name) % 4]
    model = random_model(name, dtype)
    to_hf(write_run(model, tmp_path / "run"), tmp_path / "hf")
    to_native(tmp_path / "hf", tmp_path / "again")
    assert_equal(stored(tmp_path / "again"), contents(model))
    to_hf(tmp_path / "again", tmp_path / "hf2", "--max-shard-size", "2KB")
    assert_equal(tensors_of(tmp_path / "hf2"), tensors_of(tmp_path / "hf"))
    assert json.loads((tmp_path / "hf2" / "config.json").read_text()) == json.loads((tmp_path / "hf" / "config.json").read_text())
    index = json.loads((tmp_path / "hf2" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    to_native(tmp_path / "hf2", tmp_path / "third")
    assert_equal(stored(tmp_path / "third"), contents(model))


def test_nothing_is_changed_where_the_configuration_says_the_same(tmp_path: Path, llama: Path) -> None:
    folder = damaged(tmp_path, llama, eos_token_id=5, transformers_version="4.99", rope_theta=5000)
    to_native(folder, tmp_path / "run")
    to_hf(tmp_path / "run", tmp_path / "hf")
    assert (tmp_path / "hf" / "config.json").read_text() == (folder / "config.json").read_text()


def test_what_it_says_of_dtypes_is_kept_while_they_are(tmp_path: Path, llama: Path) -> None:
    """Pythia's files say float16 of whatever they hold, and many say bfloat16 of tensors some of which are wider."""
    folder = damaged(tmp_path, llama, torch_dtype="float16", hidden_act="swish")
    found = tensors_of(folder)
    found["model.norm.weight"] = found["model.norm.weight"].bfloat16()
    save_file(found, folder / "model.safetensors")
    to_native(folder, tmp_path / "run")
    to_hf(tmp_path / "run", tmp_path / "hf")
    assert (tmp_path / "hf" / "config.json").read_text() == (folder / "config.json").read_text()
    to_hf(tmp_path / "run", tmp_path / "cast", "--dtype", "bfloat16")
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_cast(tmp_path: Path, llama: Path) -> None:
    to_native(llama, tmp_path / "run", "--dtype", "bfloat16")
    expected = {name: t.bfloat16() for name, t in contents(random_model("llama")).items()}
    assert_equal(stored(tmp_path / "run"), expected)
    to_hf(tmp_path / "run", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_every_tensor_is_reported(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = damaged(tmp_path, llama)
    extra = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    save_file({**tensors_of(folder), **extra}, folder / "model.safetensors")
    to_native(folder, tmp_path / "run", "--show-tensors")
    report = json.loads((tmp_path / "run" / "conversion.json").read_text())
    assert {row["source"] for row in report["tensors"]} == set(tensors_of(folder))
    dropped = [row for row in report["tensors"] if not row["to"]]
    assert dropped == [{"source": next(iter(extra)), "to": "", "note": "rotary frequencies, which are worked out"}]
    assert f"{next(iter(extra))} -> dropped: rotary" in capsys.readouterr().out


def test_names_of_a_bare_model_and_of_older_files(tmp_path: Path) -> None:
    to_hf(write_run(random_model("gpt2"), tmp_path / "gpt2"), tmp_path / "hf")
    old = {name.removeprefix("transformer."): t for name, t in tensors_of(tmp_path / "hf").items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 16, 16)}, tmp_path / "hf" / "model.safetensors")
    to_native(tmp_path / "hf", tmp_path / "again")
    assert_equal(stored(tmp_path / "again"), contents(random_model("gpt2")))

    to_hf(write_run(random_model("bert"), tmp_path / "bert"), tmp_path / "hf-bert")
    path = tmp_path / "hf-bert" / "model.safetensors"
    named = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t for n, t in load_file(path).items()
    }
    table = named["bert.embeddings.word_embeddings.weight"]
    save_file({**named, "cls.predictions.decoder.weight": table.clone()}, path)
    to_native(tmp_path / "hf-bert", tmp_path / "again-bert")
    assert_equal(stored(tmp_path / "again-bert"), contents(random_model("bert")))


def test_the_optimizer_stays_behind_and_the_message_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_model("llama", torch.bfloat16, optimizer=True)
    to_hf(write_run(model, tmp_path / "run"), tmp_path / "hf")
    assert "note: the optimizer's state is left out: hf cannot hold it" in capsys.readouterr().err
    to_native(tmp_path / "run", tmp_path / "same")
    assert_equal(stored(tmp_path / "same"), contents(model))
    to_native(tmp_path / "run", tmp_path / "weights", "--no-optimizer")
    assert_equal(stored(tmp_path / "weights"), {n: t for n, t in contents(model).items() if not n.startswith("optimizer.")})


def damaged(tmp_path: Path, folder: Path, **config: Any) -> Path:
    """A copy with other entries in config.json."""
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    document = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**document, **config}, indent=2) + "\n")
    return copy


def refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: Any) -> str:
    """The message; nothing was written."""
    capsys.readouterr()
    assert run("--from", "hf", "--input", folder, "--to", "megatron_sp", "--output", tmp_path / "out", *more) == EXIT_CHECKPOINT
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, ["model_type is 'mamba'", "llama"]),
        ({"model_type": None}, ["model_type is 'None'"]),
        ({"hidden_size": "24"}, ["hidden_size must be int", "'24'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers must be at least 1"]),
        ({"num_hidden_layers": 1 << 40}, ["num_hidden_layers must be", "below 2**31"]),
        ({"num_attention_heads": None}, ["has no num_attention_heads"]),
        ({"hidden_act": "relu"}, ["hidden_act is 'relu'"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_type is 'yarn'", "linear and llama3"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type is 'dynamic'", "same up to max_position_embeddings"]),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, ["rope_type is 'longrope'"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, ["rope_parameters has entries of its own for 'full_attention'"]),
        ({"vocab_size": 38}, ["model.embed_tokens.weight is [37, 24], [38, 24] is expected"]),
        ({"num_hidden_layers": 2}, ["model.layers.2", "has no place in this model"]),
        ({"num_hidden_layers": 4}, ["model.layers.3.input_layernorm.weight is missing"]),
        ({"num_attention_heads": 5}, ["config.json describes a model that cannot be", "num_attention_heads (5)"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps must be a finite number"]),
        ({"rope_theta": float("nan")}, ["rope_theta must be a finite number, found nan"]),
        ({"hidden_size": 1 << 30, "intermediate_size": 1 << 30}, ["--hidden-size (1073741824) must be at most 1048576"]),
        ({"num_hidden_layers": 1 << 30}, ["--num-layers (1073741824) must be at most 4096"]),
        ({"num_hidden_layers": 4096}, ["num_layers (4096) must not exceed the number of tensors"]),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be(
    tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], words: list[str]
) -> None:
    message = refused(damaged(tmp_path, llama, **config), tmp_path, capsys)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("entries", "base", "factor"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_theta": 7.0}, 5.0, 1.0),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0, "rope_scaling": None}, 7.0, 1.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_scaling": {"type": "linear", "factor": 2}}, 10000.0, 2.0),
    ],
)
def test_positions_are_said_in_one_place(entries: dict[str, Any], base: float, factor: float) -> None:
    """As transformers has it: where there is a rope_scaling, it hears nothing of rope_parameters, not even their base."""
    for where, kind in (("rope_theta", None), ("rotary_emb_base", "rotary_pct")):
        config, named = ModelConfig(), {where if name == "rope_theta" else name: value for name, value in entries.items()}
        Settings(named, "config.json").take_rotary(config, base=where, percent=kind)
        assert (config.rotary_base, config.rotary_seq_len_interpolation_factor) == (base, factor)


def test_what_has_changed_is_said_where_it_is_heard(tmp_path: Path, llama: Path) -> None:
    """A model that came with rope_parameters, and was trained here with another base."""
    source = damaged(tmp_path, llama, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0})
    model = FORMATS["hf"].read(source, Options())
    model.config.rotary_base = 7.0
    FORMATS["hf"].write(model, tmp_path / "out", Options(), lambda _: None)
    again = FORMATS["hf"].read(tmp_path / "out", Options()).config
    assert (again.rotary_base, again.rotary_seq_len_interpolation_factor) == (7.0, 2.0)
    assert "rope_parameters" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("named", "keep", "extra", "words"),
    [
        ("BertModel", "bert.", {}, ["architectures is ['BertModel']", "neither the head for masked tokens", "BertForMaskedLM"]),
        ("BertForTokenClassification", "bert.e", {"classifier.weight": [5, 24]}, ["['BertForTokenClassification']", "after the pooler"]),
        ("BertForNextSentencePrediction", "bert.", {"cls.seq_relationship.weight": [2, 24]}, ["neither the head for masked tokens"]),
        ("BertForPreTraining", "", {}, ["type_vocab_size is 1"]),
    ],
)  # fmt: skip
def test_a_bert_without_a_head_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str, keep: str, extra: dict[str, list[int]], words: list[str]
) -> None:
    folder = damaged(tmp_path, bert_folder(tmp_path), architectures=[named], type_vocab_size=2 if keep else 1)
    found = {name: t for name, t in tensors_of(folder).items() if name.startswith(keep)}
    save_file({**found, **{name: torch.ones(shape) for name, shape in extra.items()}}, folder / "model.safetensors")
    message = refused(folder, tmp_path, capsys)
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", ["bert", "megatron-bert"])
def test_a_bert_without_kinds_of_segments(tmp_path: Path, name: str) -> None:
    """Their class always has a table of them, ours not: it is zero."""
    MODELS["bare"] = ({**MODELS[name][0], "bert_no_binary_head": True, "num_tokentypes": 0}, 0)
    try:
        model = random_model("bare")
    finally:
        del MODELS["bare"]
    assert run("--input", write_run(model, tmp_path / "run"), "--to", "hf", "--output", tmp_path / "hf") == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["type_vocab_size"] == 1
    assert not tensors_of(tmp_path / "hf")["bert.embeddings.token_type_embeddings.weight"].any()
    assert run("--input", tmp_path / "hf", "--to", "megatron_sp", "--output", tmp_path / "again") == 0
    assert_equal(stored(tmp_path / "again"), contents(model))


def bert_folder(tmp_path: Path) -> Path:
    to_hf(write_run(random_model("bert"), tmp_path / "run"), tmp_path / "bert")
    return tmp_path / "bert"


def test_a_misspelled_tensor_is_named_with_the_nearest(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = damaged(tmp_path, llama)
    found = tensors_of(folder)
    found["model.layers.1.mlp.gate_prj.weight"] = found.pop("model.layers.1.mlp.gate_proj.weight")
    save_file(found, folder / "model.safetensors")
    message = refused(folder, tmp_path, capsys)
    assert "model.layers.1.mlp.gate_proj.weight is missing (nearest: model.layers.1.mlp.gate_prj.weight)" in message
    assert "model.layers.1.mlp.gate_prj.weight has no place in this model (nearest: model.layers.1.mlp.gate_proj.weight" in message


def test_a_head_that_is_tied_and_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_hf(write_run(random_model("llama-tied"), tmp_path / "run"), tmp_path / "hf")
    found = tensors_of(tmp_path / "hf")
    save_file({**found, "lm_head.weight": found["model.embed_tokens.weight"] + 1}, tmp_path / "hf" / "model.safetensors")
    assert "lm_head.weight must be the same as model.embed_tokens.weight" in refused(tmp_path / "hf", tmp_path, capsys)


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """What rewrites the header of a safetensors file."""

    def changed(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return changed


def overlap(entries: dict[str, Any]) -> None:
    a, b = (entries[f"model.layers.{i}.input_layernorm.weight"] for i in (0, 1))
    b["data_offsets"] = a["data_offsets"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (header(overlap), "overlaps|hole"), (header(lambda entries: entries["model.norm.weight"].update(shape=[1 << 40])), "data_offsets"),
        (lambda data: struct.pack("<Q", 1 << 40) + data[8:], "says that its header has 1,099,511,627,776"),
        *((lambda data, keep=keep: data[:keep], "") for keep in (0, 5, 100, -1)),
    ],
)  # fmt: skip
def test_files_that_lie_or_are_cut(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str], change: Any, words: str) -> None:
    folder = damaged(tmp_path, llama)
    (folder / "model.safetensors").write_bytes(change((folder / "model.safetensors").read_bytes()))
    message = refused(folder, tmp_path, capsys)
    assert "model.safetensors" in message and re.search(words, message)


def test_links_and_names_out_of_the_folder(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = damaged(tmp_path, llama)
    (folder / "tokenizer.json").symlink_to("/etc/hostname")
    assert "is a symbolic link" in refused(folder, tmp_path, capsys)
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert "is a symbolic link" in refused(folder, tmp_path, capsys)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere"}}))
    assert "names the file '../elsewhere'" in refused(folder, tmp_path, capsys)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/etc/hostname")
    assert "is a symbolic link" in refused(folder, tmp_path, capsys)


def test_an_incomplete_download(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_hf(write_run(random_model("gpt2"), tmp_path / "run"), tmp_path / "hf", "--max-shard-size", "4KB")
    second = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    second.rename(tmp_path / "kept")
    assert f"{second.name} cannot be read" in refused(tmp_path / "hf", tmp_path, capsys)
    first = sorted((tmp_path / "hf").glob("*.safetensors"))[0]
    shutil.copy(first, second)
    assert "is in" in refused(tmp_path / "hf", tmp_path, capsys)


def as_pickles(folder: Path, tensors: dict[str, Tensor], number: int) -> None:
    """The weights as transformers wrote them before safetensors."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    if number == 1:
        serialization.save(tensors, folder / "pytorch_model.bin")
        return
    names = {name: f"pytorch_model-{i % number + 1:05d}-of-{number:05d}.bin" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        serialization.save({name: tensors[name] for name in names if names[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("number", [1, 3])
def test_files_of_torch_save(tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """With a tied head that is there twice in one storage, and buffers."""
    to_hf(write_run(random_model("gpt2"), tmp_path / "first"), tmp_path / "hf")
    found = tensors_of(tmp_path / "hf")
    more = {"lm_head.weight": found["transformer.wte.weight"], "transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.bool)}
    as_pickles(tmp_path / "hf", {**found, **more}, number)
    to_native(tmp_path / "hf", tmp_path / "run", "--verify")
    assert "transformers is asked to read safetensors alone" in capsys.readouterr().err
    assert_equal(stored(tmp_path / "run"), contents(random_model("gpt2")))
    if number == 3:
        (tmp_path / "hf" / "pytorch_model-00002-of-00003.bin").unlink()
        assert "pytorch_model-00002-of-00003.bin" in refused(tmp_path / "hf", tmp_path, capsys)


def test_files_of_torch_save_that_are_no_weights(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = damaged(tmp_path, llama)
    for saved, words in (({"model": {"a": torch.ones(2)}}, "'model' is not a tensor"), ([torch.ones(2)], "holds a list")):
        as_pickles(folder, saved, 1)  # type: ignore[arg-type]
        assert words in (message := refused(folder, tmp_path, capsys)) and "state_dict()" in message


def test_no_weights_are_there(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = damaged(tmp_path, llama)
    (folder / "model.safetensors").rename(folder / "flax.safetensors")
    assert "has neither model.safetensors nor" in (message := refused(folder, tmp_path, capsys)) and "but flax.safetensors" in message


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (["--input", "nowhere"], "nowhere is not there", EXIT_CHECKPOINT),
        (["--max-shard-size", "5XB"], "--max-shard-size (5XB) must be a size", EXIT_CONFIG),
        (["--vocab-size", "0"], "--vocab-size (0) must be at least 1", EXIT_CONFIG),
        (["--from", "megatron_sp"], "no", EXIT_CHECKPOINT), (["--output", "."], "is there already", EXIT_CHECKPOINT),
        (["--input", "/dev"], "give --from with one of megatron_sp, hf", EXIT_CHECKPOINT),
    ],
)  # fmt: skip
def test_words_that_cannot_be(
    tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str, code: int
) -> None:
    assert run("--input", llama, "--to", "megatron_sp", "--output", tmp_path / "out", *words) == code
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name, more, said", [
    ("llama", {"qk_layernorm": True, "apply_layernorm_1p": True}, "llama: qk_layernorm is True, not False"),
    ("llama", {"window_size": 3, "add_proj_bias": True}, "llama: window_size is 3, not None; proj_bias is True, not False"),
    ("gpt2", {"squared_relu": True}, "gpt2: squared_relu is True, not False"),
    ("gpt2", {"use_parallel_residual": True}, "gpt2: use_parallel_residual is True, not False"),
    ("megatron-bert", {"bert_head_activation": "relu"}, "bert: head_activation is relu, not gelu"),
    ("megatron-bert", {"gelu_approximate": None}, "not gelu_tanh (there blocks and head have one activation, as a run with --gelu-approx"),
])  # fmt: skip
def test_a_model_that_no_class_of_theirs_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, more: dict[str, Any], said: str
) -> None:
    MODELS["odd"] = ({**MODELS[name][0], **more}, 0)
    try:
        source = write_run(random_model("odd"), tmp_path / "run")
    finally:
        del MODELS["odd"]
    assert run("--input", source, "--to", "hf", "--output", tmp_path / "out") == EXIT_CHECKPOINT
    message = capsys.readouterr().err
    assert "no class of Hugging Face" in message and said in message
    assert sorted(os.listdir(tmp_path)) == ["run"]
