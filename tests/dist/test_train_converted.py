"""Training goes on from what a conversion has written, in any layout."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.convert_models import Tensors, contents, random_model, write_run
from support.errors import FP32, assert_law
from support.training import NO_DROPOUT, records, state, tensors, train

from megatron_sp.commands.cli import main
from megatron_sp.convert.model import Model

OWN = ("--use-checkpoint-args", "--num-layers", 3, "--hidden-size", 24, "--seq-length", 16)  # not those of all tests' tiny model
SHAPE = (*OWN, "--attention-dropout", 0, "--hidden-dropout", 0, "--optimizer", "sgd", "--lr", "0.1")
LAYOUTS = {"tp2 sp2": (4, ("--tp-size", 2, "--sequence-parallel", "--sp-size", 2)), "dp2 stage 3": (2, ("--zero-stage", 3))}


def small(name: str) -> Model:
    """One of the models, with weights of a size that trains."""
    model = random_model(name)
    return replace(model, store=Tensors({n: t / 10 + (1 if t.ndim == 1 and "norm" in n else 0) for n, t in contents(model).items()}))


@pytest.fixture(scope="module")
def from_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint that came from Hugging Face's files."""
    folder = tmp_path_factory.mktemp("converted")
    write_run(small("llama"), folder / "first")
    for source, target, output in (("first", "hf", "hf"), ("hf", "megatron_sp", "run")):
        assert main(["convert", "--input", str(folder / source), "--to", target, "--output", str(folder / output)]) == 0
    return folder / "run"


@pytest.mark.often("tp2 sp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_finetuning_is_the_same_in_every_layout(tmp_path: Path, from_hf: Path, layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    data = ("--mock-data", "--vocab-size", 37)
    for name, count, more in (("one", 1, ()), ("many", ranks, flags)):
        words = (*SHAPE, "--load", from_hf, "--finetune", "--save", tmp_path / name, "--train-iters", 3, *more)
        train(tmp_path, *words, ranks=count, data=data).expect(0, "finetuning from")
    one, many = (records(tmp_path / name, "train") for name in ("one", "many"))
    for a, b in zip(one, many, strict=True):
        assert_law({k: torch.tensor(b[k]) for k in ("loss", "grad_norm")}, {k: torch.tensor(a[k]) for k in ("loss", "grad_norm")}, FP32)
    assert_law(tensors(tmp_path / "many"), tensors(tmp_path / "one"), FP32)


def test_a_resume_without_a_schedule_or_data_in_the_checkpoint(tmp_path: Path) -> None:
    """They are not known; the step is, and the optimizer's state."""
    model = small("gpt2")
    moments = {f"optimizer.{kind}.{n}": t.abs() for kind in ("exp_avg", "exp_avg_sq") for n, t in contents(model).items()}
    stored = replace(model, store=Tensors({**contents(model), **moments}), step=7, consumed_samples=28)
    write_run(stored, tmp_path / "run")
    words = (*OWN, "--load", tmp_path / "run", "--save", tmp_path / "on", "--train-iters", 9)
    train(tmp_path, *words, data=("--mock-data", "--vocab-size", 37)).expect(0, "resumed from")
    assert [record["step"] for record in records(tmp_path / "on", "train")] == [8, 9]


WAYS: dict[str, tuple[object, ...]] = {
    "zero 1": ("megatron-deepspeed", "--target-tensor-parallel-size", 2),
    "universal": ("megatron-deepspeed", "--deepspeed-layout", "universal"),
    "megatron": ("megatron", "--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2), "torch_dist": ("megatron-dist",),
}  # fmt: skip


@pytest.mark.often("zero 1")
@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_behind_another_format_as_without_it(tmp_path: Path, way: str) -> None:
    """fp16 with two skipped steps at its beginning: updates are not steps, and the loss scale is not the first one."""
    flags = (
        *NO_DROPOUT, "--fp16", "--initial-loss-scale", 2.0**22, "--hysteresis", 1, "--train-iters", 6, "--lr-decay-style", "cosine",
        "--save-interval", 4,
    )  # fmt: skip
    train(tmp_path, *flags, "--save", tmp_path / "whole").expect(0)
    for source, step, words in (("whole", ("--step", 4), WAYS[way]), ("there", ("--vocab-size", 60), ("megatron_sp",))):
        words = ("--input", tmp_path / source, *step, "--output", tmp_path / ("there" if step[0] == "--step" else "again"), "--to", *words)
        assert main(["convert", *map(str, words)]) == 0
    layout = ("--tp-size", 2, "--zero-stage", 2)
    train(tmp_path, *flags, *layout, "--load", tmp_path / "again", "--save", tmp_path / "on", ranks=4).expect(0, "resumed from")
    whole, on = (records(tmp_path / name, "train") for name in ("whole", "on"))
    assert 0 < whole[3]["skipped_steps"] < 4 and state(tmp_path / "on")["num_updates"] == state(tmp_path / "whole")["num_updates"]
    same = ("step", "lr", "consumed_samples", "loss_scale")
    for a, b in zip(whole[4:], on, strict=True):
        assert {k: a[k] for k in same} == {k: b[k] for k in same}
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-4)


def test_a_conversion_without_an_optimizer_says_how_to_go_on(tmp_path: Path, from_hf: Path) -> None:
    words = (*SHAPE, "--load", from_hf, "--save", tmp_path / "x")
    train(tmp_path, *words, data=("--mock-data", "--vocab-size", 37)).expect(3, "has no optimizer state", "--finetune")


def test_float32_of_16_bits_is_told_and_the_exact_weights_are_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama = ("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope")
    train(tmp_path, *NO_DROPOUT, *llama, "--bf16", "--save", tmp_path / "run", "--untie-embeddings-and-output-weights").expect(0)
    flags = ("--to", "hf", "--dtype", "float32")
    assert main(["convert", "--input", str(tmp_path / "run"), "--output", str(tmp_path / "wide"), *flags]) == 0
    said = capsys.readouterr().err
    assert "note: the weights are in bfloat16, and float32 has the same numbers in more bytes; the optimizer's master copies" in said
    offered = re.search(r"megatron-sp (ckpt merge .*) makes a run", said)
    assert offered is not None
    assert main(shlex.split(offered[1].replace("DIR", str(tmp_path / "masters")))) == 0
    capsys.readouterr()
    assert main(["convert", "--input", str(tmp_path / "masters"), "--output", str(tmp_path / "exact"), *flags]) == 0
    assert "more bytes" not in capsys.readouterr().err
    kept = tensors(tmp_path / "run")
    assert all(torch.equal(t, kept[f"optimizer.master.{n}"]) for n, t in tensors(tmp_path / "masters").items())
