"""The examples: unmodified models of transformers in the training loop, resumed in other layouts, under their own names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.training import NO_DROPOUT, assert_same_run, records, tensors, train

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

sys.path.insert(0, str(ROOT / "examples"))

import train_hf_bert  # noqa: E402
import train_hf_llama  # noqa: E402

from megatron_sp.commands import cli  # noqa: E402
from megatron_sp.commands.schedule.train import parse_external  # noqa: E402
from megatron_sp.training.loop import pretrain  # noqa: E402

COMMON = (*NO_DROPOUT, "--fp64", "--save-interval", 2, "--adam-eps", "1e-3")


def llama(words: list[str]) -> None:
    config, folder = parse_external(words, description="", family="gpt", prog="train_hf_llama.py")
    pretrain(config, train_hf_llama.llama_task(folder))


def bert(words: list[str]) -> None:
    config, folder = parse_external(words, description="", family="bert", prog="train_hf_bert.py")
    pretrain(config, train_hf_bert.bert_task(folder))


PROGRAMS: dict[str, tuple[Any, tuple[object, ...]]] = {
    "llama": (llama, ("--num-query-groups", 2)), "bert": (bert, ("--bert-no-binary-head",)),
}  # fmt: skip
LAYOUTS: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    # what begins, and what goes on after two of four steps
    "llama": (
        ("--sequence-parallel-size", 2, "--zero-stage", 3, "--split-qkv-linear", "--sp-overlap-comm"),
        ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--zero-stage", 1),
    ),
    "bert": (("--tensor-model-parallel-size", 2), ("--context-parallel-size", 2, "--zero-stage", 1)),
    "llama cp": (
        ("--context-parallel-size", 2, "--zero-stage", 1, "--recompute-granularity", "full"),
        ("--context-parallel-size", 2, "--cp-chunks", 3, "--cp-keep-kv"),
    ),
}


@pytest.mark.often("llama cp")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if "bert" in n else ()) for n in LAYOUTS])
def test_an_example_resumes_in_another_layout(tmp_path: Path, name: str) -> None:
    program, shape = PROGRAMS[name.partition(" ")[0]]
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(tmp_path, *shape, *COMMON, "--train-iters", 4, "--save", whole, program=program).expect(0)
    first, second = LAYOUTS[name]
    train(tmp_path, *shape, *COMMON, *first, "--train-iters", 4, "--exit-interval", 2, "--save", run, ranks=2, program=program).expect(0)
    train(tmp_path, *shape, *COMMON, *second, "--train-iters", 4, "--save", run, "--auto-resume", ranks=2, program=program).expect(0)
    got, want = tensors(run), tensors(whole)
    assert got.keys() == want.keys()
    names = {n.removeprefix("optimizer.exp_avg.") for n in got if n.startswith("optimizer.exp_avg.")}
    first_query = "bert.encoder.layer.0.attention.self.query.weight" if name == "bert" else "model.layers.0.self_attn.q_proj.weight"
    assert first_query in names
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-7, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}")
    losses = [[r["loss"] for r in records(folder)] for folder in (run, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def by_command(words: list[str]) -> None:
    raise SystemExit(cli.main(["schedule", "train", "auto", *words]))


def test_a_folder_is_trained_from_by_the_command_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """A run that stopped half-way ends as one that did not."""
    torch.manual_seed(3)
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 20, "max_position_embeddings": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=60, num_key_value_heads=2))
    folder = tmp_path / "llama"
    model.save_pretrained(folder)
    flags = ("--model", folder, *NO_DROPOUT, "--train-iters", 4, "--tp", 2, "--bf16", "--recompute-granularity", "full", "--zero-stage", 1)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(tmp_path, *flags, "--save", whole, ranks=2, program=by_command).expect(0)
    train(tmp_path, *flags, "--save", halves, "--exit-interval", 2, ranks=2, program=by_command).expect(0)
    train(tmp_path, *flags, "--save", halves, "--auto-resume", ranks=2, program=by_command).expect(0)
    assert_same_run(halves, whole)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ((*NO_DROPOUT, "--mlp-chunks", 2), "--mlp-chunks changes megatron_sp's own blocks"),
        ((*NO_DROPOUT, "--recompute-granularity", "selective"), "recomputes all of its blocks"),
        ((*NO_DROPOUT, "--model", "nowhere"), "nowhere/config.json cannot be read"),
        ((*NO_DROPOUT, "--cp-size", 2, "--cp-comm-type", "auto"), "name the sizes"),
    ],
)
def test_what_a_external_model_cannot_follow_is_refused(tmp_path: Path, flags: tuple[object, ...], part: str) -> None:
    train(tmp_path, *flags, "--train-iters", 1, ranks=2 if "--cp-size" in flags else 1, program=llama).expect(2, part)
