"""--verify: what is the same is found the same, and each kind of mistake in the files of another program is found, with the layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.convert_models import MODELS, Tensors, contents, random_model, stored, write_run
from torch import Tensor

from megatron_sp.commands.cli import main
from megatron_sp.convert import verify as sides
from megatron_sp.convert.formats import FORMATS
from megatron_sp.convert.model import Options
from megatron_sp.convert.reference import NEXT
from megatron_sp.convert.verify import Result, tell_all, verify
from megatron_sp.ops.availability import Kernel
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_NUMERICS, EXIT_OK, ConfigError

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")


def converted(folder: Path, name: str, dtype: torch.dtype = torch.float32, *more: str) -> tuple[Path, Path]:
    """A run and what became of it as a folder of Hugging Face's."""
    run = write_run(scaled(random_model(name, dtype)), folder / "run")
    assert main(["convert", "--input", str(run), "--to", "hf", "--output", str(folder / "hf"), *more]) == EXIT_OK
    return run, folder / "hf"


def scaled(model: Any) -> Any:
    """Smaller weights: attention that looks at one key alone would not notice much."""
    model.store.contents = {name: tensor * (0.3 if tensor.ndim > 1 else 0.7) for name, tensor in model.store.contents.items()}
    return model


def compared(run: Path, folder: Path, text: str | None = None, **options: Any) -> tuple[int, str]:
    lines: list[str] = []
    code = verify(FORMATS["megatron_sp"], run, FORMATS["hf"], folder, Options(**options), text, lines.append)
    return code, "\n".join(lines)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ("gpt2", "qwen2", "llama-one-group", "megatron-bert")
                                               else pytest.mark.long) for n in MODELS])  # fmt: skip
def test_our_model_and_transformers_agree(tmp_path: Path, name: str) -> None:
    run, folder = converted(tmp_path, name)
    code, told = compared(run, folder)
    assert code == EXIT_OK, told
    assert f"against transformers {transformers.__version__}, " in told and f" on {folder}, in float32" in told
    outputs = {"bert": 2, "megatron-bert": 2}.get(name, 1)
    assert told.count(": ok") == outputs and told.endswith("verify: the same") and "NOT" not in told


def test_without_transformers_the_check_is_said_to_be_a_weak_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = converted(tmp_path, "gpt2", torch.float64)
    assert "in float64" in compared(run, folder)[1]
    monkeypatch.setattr(sides, "host_memory_bytes", lambda: 1000)
    assert "without an independent reference: transformers would take" in compared(run, folder)[1]
    monkeypatch.setattr(sides.availability, "installed", lambda name: Kernel(name, False))
    code, told = compared(run, folder)
    assert code == EXIT_OK and f"against megatron_sp, from hf on {folder}" in told
    assert "without an independent reference: transformers is not installed" in told


def test_weights_that_the_conversion_rounds_are_rounded_before_they_are_compared(tmp_path: Path) -> None:
    run, folder = converted(tmp_path, "gpt2", torch.float32, "--dtype", "bfloat16")
    code, told = compared(run, folder)
    assert code == EXIT_OK and "in float32 (weights rounded to bfloat16)" in told


def swap_q_and_k(t: dict[str, Tensor]) -> None:
    a, b = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qk")
    t[a], t[b] = t[b], t[a]


def swap_thirds(t: dict[str, Tensor]) -> None:
    name = "transformer.h.1.attn.c_attn.weight"
    q, k, v = t[name].chunk(3, dim=1)
    t[name] = torch.cat([k, q, v], dim=1)


def turn(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(t: dict[str, Tensor]) -> None:
        t[name] = t[name].t()

    return change


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(t: dict[str, Tensor]) -> None:
        t[name] = torch.zeros_like(t[name])

    return change


def other_second_segment(t: dict[str, Tensor]) -> None:
    t["bert.embeddings.token_type_embeddings.weight"][1, 0] += 0.1


def poison(t: dict[str, Tensor]) -> None:
    t["transformer.h.2.ln_1.weight"][0] = torch.nan


def nothing(t: dict[str, Tensor]) -> None:
    pass


MISTAKES: list[tuple[str, Callable[[dict[str, Tensor]], None], dict[str, Any], str]] = [
    ("llama-heads", swap_q_and_k, {}, "layer 1"), ("gpt2", swap_thirds, {}, "layer 1"),
    ("gpt2", turn("transformer.h.2.attn.c_proj.weight"), {}, "layer 2"),
    ("gpt2", drop("transformer.h.0.mlp.c_proj.bias"), {}, "layer 0"),
    ("gpt2", drop("transformer.ln_f.bias"), {}, "next-token logits"),
    ("gpt2", poison, {}, "layer 2"),
    ("gpt2", nothing, {"activation_function": "gelu"}, "layer 0"),
    ("gpt2", nothing, {"layer_norm_epsilon": 1e-6}, "layer 0"), ("llama", nothing, {"rope_theta": 5500.0}, "layer 0"),
    ("llama", nothing, {"rms_norm_eps": 1e-5}, "layer 0"), ("bert", other_second_segment, {}, "embedding"),
    ("bert", drop("cls.predictions.bias"), {}, "masked-token logits"),
    ("bert", drop("bert.pooler.dense.bias"), {}, "order logits"),
    ("bert-classifier", drop("classifier.bias"), {}, "class logits"),
    ("megatron-bert", turn("bert.encoder.layer.1.attention.output.dense.weight"), {}, "layer 1"),
]  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {name: converted(tmp_path_factory.mktemp(name), name) for name in {name for name, _, _, _ in MISTAKES}}


@pytest.mark.parametrize(("name", "change", "settings", "where"), MISTAKES)
def test_each_kind_of_mistake_is_found_and_the_first_layer_named(
    tmp_path: Path,
    pairs: dict[str, tuple[Path, Path]],
    name: str,
    change: Callable[[dict[str, Tensor]], None],
    settings: dict[str, Any],
    where: str,
) -> None:
    run, good = pairs[name]
    tensors = load_file(good / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    document = json.loads((good / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | settings))
    code, told = compared(run, tmp_path)
    assert code == EXIT_NUMERICS, told
    assert f"the first difference is in: {where} (" in told and "ABOVE the limit of 2e-05" in told
    assert told.endswith(f"verify: NOT the same: do not use {tmp_path}")


def test_runs_are_compared_with_runs_and_folders_with_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = converted(tmp_path, "llama-tied")
    for source, kind in ((run, "megatron_sp"), (folder, "hf")):
        target = tmp_path / f"again-{kind}"
        assert main(["convert", "--input", str(source), "--to", kind, "--output", str(target), "--verify"]) == EXIT_OK
        assert "verify: the same" in capsys.readouterr().err


def test_text_goes_through_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    run, folder = converted(tmp_path, "bert")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "for", "statement", "is", "##s"]
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    code, told = compared(run, folder)
    assert code == EXIT_OK and "  text: masked-token logits" in told and told.count(": ok") == 4
    code, told = compared(run, folder, "the for statement is the")
    assert code == EXIT_OK and "  text: order logits" in told
    with open(folder / "vocab.txt", "a") as file:
        file.write("".join(f"more{i}\n" for i in range(40)))
    assert "note: the tokenizer has 50 tokens, the model 37: no text is compared" in compared(run, folder)[1]
    (folder / "vocab.txt").unlink()
    with pytest.raises(ConfigError, match="--verify-text needs a tokenizer, and neither side has one"):
        compared(run, folder, "the")


def test_a_text_without_a_token_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    run, folder = converted(tmp_path, "gpt2")
    document = {"version": "1.0", "model": {"type": "BPE", "vocab": {"</s>": 0, "a": 1}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    code, told = compared(run, folder, "xyz")
    assert code == EXIT_OK and "note: the tokenizer has no token for the text: none is compared" in told
    assert "  text: next-token logits" in compared(run, folder, "xaz")[1]


def test_a_classifier_that_was_trained_on_what_was_converted_names_its_classes(tmp_path: Path) -> None:
    """Its run still carries the config.json of the pretraining, which speaks of none."""
    _, pretrained = converted(tmp_path, "bert")
    model = random_model("bert-classifier")
    model.settings["hf"] = json.loads((pretrained / "config.json").read_text())
    FORMATS["hf"].write(model, tmp_path / "tuned", Options(), lambda num_bytes: None)
    document = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert len(document["id2label"]) == len(document["label2id"]) == 5
    assert document["architectures"] == ["BertForSequenceClassification"]


def test_the_ranks_of_deepspeed_compute_with_narrow_weights_beside_the_wide_ones_that_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bf16 with the optimizer's state: --dtype float32 takes its fp32 copies, and what the files compute with is their rounding."""
    model = random_model("llama", torch.bfloat16, optimizer=True)
    tensors = contents(model)
    for name in model.weights():
        wide = 0.1 * tensors[f"optimizer.master.{name}"]
        tensors |= {f"optimizer.master.{name}": wide, name: wide.bfloat16()}
    write_run(replace(model, store=Tensors(tensors)), tmp_path / "run")
    words = ["--to", "megatron-deepspeed", "--output", str(tmp_path / "ds"), "--verify"]
    assert main(["convert", "--input", str(tmp_path / "run"), *words]) == EXIT_OK, capsys.readouterr().err
    words = ["--to", "megatron_sp", "--output", str(tmp_path / "again"), "--verify", "--vocab-size", "37", "--dtype", "float32"]
    assert main(["convert", "--input", str(tmp_path / "ds"), *words]) == EXIT_OK, capsys.readouterr().err
    assert "(weights rounded to bfloat16)" in capsys.readouterr().err
    assert torch.equal(stored(tmp_path / "again")["output_layer.weight"], tensors["optimizer.master.output_layer.weight"])


@pytest.mark.parametrize("target", ["megatron_sp", "hf"])
def test_a_weight_with_a_nan_is_refused_both_ways(tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless that is asked for; then both sides have it, and what it spoils is not compared."""
    model = scaled(random_model("llama"))
    model.store.contents["embedding.word_embeddings.weight"][5, 0] = torch.nan
    model.store.contents["output_layer.weight"][2, 1] = torch.inf
    source, other = write_run(model, tmp_path / "run"), tmp_path / "other"
    words = ["convert", "--to", target, "--output", str(other), "--verify"]
    assert main([*words, "--input", str(source)]) == EXIT_CHECKPOINT
    assert "embedding.word_embeddings.weight has 1 NaN of" in capsys.readouterr().err and not other.exists()
    assert main([*words, "--input", str(source), "--allow-non-finite"]) == EXIT_OK
    told = capsys.readouterr().err
    assert "note: output_layer.weight has 1 infinite of" in told and "% of the numbers are not finite on either side" in told
    assert main(["convert", "--input", str(other), "--to", "megatron_sp", "--output", str(tmp_path / "back")]) == EXIT_CHECKPOINT
    assert "embedding.word_embeddings.weight has 1 NaN of" in capsys.readouterr().err


def test_a_difference_that_is_not_finite_on_one_side_alone() -> None:
    a, b = torch.tensor([[1.0, torch.nan, torch.inf]]), torch.tensor([[1.0, torch.nan, torch.inf]])
    assert Result.of("x", a, b) == ("x", 0.0, 1.0, 1.0, pytest.approx(2 / 3))
    b[0, 1] = 1.0
    assert Result.of("x", a, b).error != 0.0
    assert not tell_all("", [Result.of(NEXT, torch.full((1, 2), torch.nan), torch.full((1, 2), torch.nan))], 1.0, lambda line: None)
