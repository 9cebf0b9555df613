"""Checkpoints that a pipeline has written, where there is none: text, evaluation, finetuning, and other programs' formats."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.training import NO_DROPOUT, Program, assert_same_tensors, bert, records, run_once, saved_steps, state, tensors, train

from megatron_sp.commands import evaluate, fill_mask, finetune, generate, serve
from megatron_sp.commands.cli import main

FLAGS = (*NO_DROPOUT, "--num-layers", 4, "--zero-stage", 1, "--micro-batch-size", 1, "--init-method-std", 0.2)
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "alone": (1, ("--fp64",)),
    "interleaved": (2, ("--fp64", "--pp-size", 2, "--pipeline-schedule", "interleaved")),
    "zbv": (2, ("--fp64", "--pp-size", 2, "--pipeline-schedule", "zbv")),
    "uneven, bf16": (2, ("--bf16", "--pp-size", 2, "--decoder-first-pipeline-num-layers", 3)),
    "untied, bf16": (2, ("--bf16", "--pp-size", 2, "--num-layers-per-virtual-pipeline-stage", 1, "--untie-embeddings-and-output-weights")),
}  # fmt: skip
PIPELINES = ["interleaved", pytest.param("zbv", marks=pytest.mark.long)]
BYTES = ("--mock-data", "--tokenizer-type", "ByteTokenizer", "--vocab-size", 259)  # two ids more than bytes need
TEXT = "The quick brown fox jumps over the lazy dog, and back."


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return run_once(tmp_path_factory, LAYOUTS, *FLAGS, *BYTES)


def words(*given: object) -> list[str]:
    return [str(word) for word in (*given, "--device", "cpu")]


def program(tool: Callable[[list[str]], int], *given: object) -> Program:
    return lambda _: sys.exit(tool(words(*given)))


def text_of(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert generate.main(words("--load", run, "--prompt", "ab", "--dtype", "float64", "--greedy", "--max-new-tokens", 12)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", PIPELINES)
def test_text_is_that_of_a_run_without_a_pipeline(
    name: str, runs: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want = text_of(runs("alone"), capsys)
    assert text_of(runs(name), capsys) == want
    given = ("--load", runs(name), "--prompt", "ab", "--dtype", "float64", "--greedy", "--max-new-tokens", 12)
    layout = ("--tp-size", 2)  # the stages of the checkpoint are none of these processes
    ended = train(tmp_path, ranks=2, program=program(generate.main, *given, *layout)).expect(0, "(tp 2, sp 1, dp 1)")
    assert want in ended.texts[0]


@pytest.mark.parametrize("layout", ["tp", *(pytest.param(each, marks=pytest.mark.long) for each in ("alone", "dp", "dp 3"))])
@pytest.mark.parametrize("name", PIPELINES)
def test_evaluation_is_that_of_a_run_without_a_pipeline(name: str, layout: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    ranks, flags = {"alone": (1, ()), "tp": (2, ("--tp-size", 2)), "dp": (2, ()), "dp 3": (3, ())}[layout]
    found: list[dict[str, Any]] = []
    for run, count, more in ((runs("alone"), 1, ()), (runs(name), ranks, flags)):
        out = tmp_path / f"{len(found)}.json"
        given = ("--load", run, "--text", tmp_path / "text.txt", "--dtype", "float64", "--json", out, *more)
        train(tmp_path, ranks=count, program=program(evaluate.main, *given)).expect(0)
        found.append(json.loads(out.read_text())["results"])
    assert found[1].keys() == found[0].keys() and found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-9)


@pytest.mark.parametrize("tool, given", [
    (generate.main, ("--prompt", "ab")), (evaluate.main, ("--text", "text.txt")), (serve.main, ("--port", 0)),
], ids=["generate", "evaluate", "serve"])  # fmt: skip
def test_a_pipeline_of_a_tool_is_refused_with_the_way_out(
    tool: Callable[[list[str]], int], given: tuple[object, ...], runs: Callable[[str], Path], tmp_path: Path
) -> None:
    asks = program(tool, "--load", runs("interleaved"), *given, "--pipeline-model-parallel-size", 2)
    ended = train(tmp_path, ranks=2, program=asks).expect(2)
    assert ended.texts[0].count("error:") == 1 and ended.texts[1] == ""
    assert "--pipeline-model-parallel-size (2) must be 1 here" in ended.texts[0] and "--tensor-model-parallel-size 2" in ended.texts[0]


@pytest.fixture(scope="module")
def bert_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A BERT that one process has trained, and one that a pipeline has."""
    folder = tmp_path_factory.mktemp("bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    data = ("--mock-data", "--vocab-file", folder / "vocab.txt")
    for name, ranks, more in (("alone", 1, ()), ("pp", 2, ("--pp-size", 2))):
        flags = (*FLAGS, "--fp64", "--train-iters", 2, "--save", folder / name, *more)
        train(folder, *flags, ranks=ranks, data=data, program=bert).expect(0)
    return {name: folder / name for name in ("alone", "pp")}


def test_masked_words_are_those_of_a_run_without_a_pipeline(bert_runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for run in bert_runs.values():
        assert fill_mask.main(words("--load", run, "--text", "w1 [MASK] w3")) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != ""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples") / "examples.jsonl"
    path.write_text("".join(json.dumps({"text": f"w{i} w{i + 1}", "label": "ab"[i % 2]}) + "\n" for i in range(12)))
    return path


@pytest.mark.long  # masked words show the same of the weights
def test_a_classifier_is_that_of_a_run_without_a_pipeline(bert_runs: dict[str, Path], examples: Path, tmp_path: Path) -> None:
    found = []
    for name, run in bert_runs.items():
        flags = (*NO_DROPOUT, "--fp64", "--num-layers", 4, "--epochs", 1, "--pretrained-checkpoint", run, "--save", tmp_path / name)
        given = ("--task", "jsonl", "--train-data", examples, "--valid-data", examples, *flags, "--log-interval", 1)
        train(tmp_path, *given, data=(), program=finetune.main).expect(0, "finetuning from")
        found.append([r["loss"] for r in records(tmp_path / name)])
    assert len(found[0]) > 1 and found[1] == pytest.approx(found[0], rel=1e-9)


WAYS: dict[str, tuple[object, ...]] = {
    "megatron pp 2": ("megatron", "--target-pipeline-parallel-size", 2),
    "megatron tp 2 pp 4": ("megatron", "--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 4),
    "megatron-dist": ("megatron-dist",), "megatron-deepspeed": ("megatron-deepspeed", "--target-tensor-parallel-size", 2),
}  # fmt: skip
OFTEN = [("uneven, bf16", "megatron pp 2"), ("untied, bf16", "megatron-dist")]  # the rest is marked long
CASES = [
    pytest.param(name, way, marks=() if (name, way) in OFTEN else pytest.mark.long)
    for name in ("uneven, bf16", "untied, bf16") for way in WAYS
]  # fmt: skip


@pytest.mark.often("uneven, bf16-megatron pp 2")
@pytest.mark.parametrize("name, way", CASES)
def test_other_formats_and_back(name: str, way: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    """Weights and optimizer come back with all their bits, and the pipeline goes on from them as if nothing had been."""
    there = ("--input", runs(name), "--step", 3, "--output", tmp_path / "there", "--to", *WAYS[way])
    back = ("--input", tmp_path / "there", "--output", tmp_path / "again", "--to", "megatron_sp")
    for given in (there, back):
        assert main(["convert", *map(str, given)]) == 0
    assert_same_tensors(tensors(tmp_path / "again"), tensors(runs(name), 3))
    ranks, flags = LAYOUTS[name]
    more = ("--load", tmp_path / "again", "--save", tmp_path / "on", "--override-opt-param-scheduler")
    train(tmp_path, *FLAGS, *flags, *more, ranks=ranks, data=BYTES).expect(0, "resumed from")
    assert saved_steps(tmp_path / "on") == [6] and state(tmp_path / "on")["num_updates"] == 6
    assert_same_tensors(tensors(tmp_path / "on"), tensors(runs(name), 6))


@pytest.mark.parametrize("name", PIPELINES)
def test_hugging_faces_files_are_those_of_a_run_without_a_pipeline(name: str, runs: Callable[[str], Path], tmp_path: Path) -> None:
    found = []
    for each in ("alone", name):
        given = ("--input", runs(each), "--output", tmp_path / each, "--to", "hf", "--dtype", "float32")
        assert main(["convert", *map(str, given)]) == 0
        assert main(["convert", "--input", str(tmp_path / each), "--output", str(tmp_path / f"{each} again"), "--to", "megatron_sp"]) == 0
        found.append(tensors(tmp_path / f"{each} again"))
    assert found[0].keys() == found[1].keys()
    assert all((found[1][key] - want).abs().max() < 1e-6 for key, want in found[0].items())
