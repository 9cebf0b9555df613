"""Checkpoints of other programs where one of ours is looked for: each is named, with the command that converts it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support.convert_models import random_model, write_run

from megatron_sp.checkpoint import find
from megatron_sp.checkpoint.find import identify
from megatron_sp.commands.cli import main
from megatron_sp.utils.errors import CheckpointError

TRACKER, RANK = "latest_checkpointed_iteration.txt", "mp_rank_00/model_optim_rng.pt"
CASES: dict[str, tuple[tuple[str, ...], str, str]] = {  # files, what they are, the end of the line
    "megatron": ((TRACKER, f"iter_0000010/{RANK}"), "a checkpoint of Megatron-LM (iter_0000010)", "X-megatron_sp"),
    "pipeline": ((f"iter_0000010/{RANK}", "iter_0000020/mp_rank_00_000/model_optim_rng.pt"), "0000010, iter_0000020)", "-megatron_sp"),
    "release": ((TRACKER, f"release/{RANK}"), "a checkpoint of Megatron-LM (release)", "X-megatron_sp"),
    "an iteration": ((RANK,), "a checkpoint of Megatron-LM. ", "X-megatron_sp"),
    "distributed": (("iter_0000010/.metadata",), "a distributed checkpoint (torch_dist) of Megatron-LM", "X-megatron_sp"),
    "deepspeed": (
        ("latest", TRACKER, "global_step10/mp_rank_00_model_states.pt"), "a checkpoint of DeepSpeed (global_step10)", "--qkv-layout flat"
    ),
    "a step": (("zero_pp_rank_0_mp_rank_00_model_states.pt",), "a checkpoint of DeepSpeed (X)", "--qkv-layout flat"),
    "universal": (
        ("global_step10_universal/mp_rank_00_model_states.pt",), "a universal checkpoint of DeepSpeed (global_step10_u", "--qkv-layout flat"
    ),
    "hugging face": (("config.json", "model-00001-of-00002.safetensors"), "a model of Hugging Face", "X-megatron_sp"),
    "of its trainer": (("config.json", "pytorch_model.bin", "latest", "global_step3/x_model_states.pt"), "Hugging Face", "--from hf"),
    "inside": ((f"checkpoints/{TRACKER}", f"checkpoints/iter_0000010/{RANK}"), "Megatron-LM", "checkpoints-megatron_sp"),
}  # fmt: skip


def make(folder: Path, files: tuple[str, ...]) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("global_step10" if Path(name).name == "latest" else "10")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_it_is_named_with_the_command_that_converts_it(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, what, end = CASES[case]
    folder = make(tmp_path / "X", files)
    with pytest.raises(CheckpointError) as caught:
        find.candidates(folder, None)
    assert main(["ckpt", "ls", str(folder)]) == 0 and str(caught.value).split(" ", 1)[1] in capsys.readouterr().out
    message, line, *_ = str(caught.value).split("\n")
    assert message.startswith(f"{folder} has no checkpoint of megatron_sp, but ") and what in message
    assert line.startswith("  megatron-sp convert --input ") and line.endswith(end)
    assert not find.is_vacant(folder)  # so that --load X --save X does not begin beside it
    with pytest.raises(CheckpointError, match="--step 7"):
        find.require_own(folder, 7)


@pytest.mark.parametrize("files", [(), ("notes.txt", "config.json"), ("metadata.json",), ("release/notes.txt",), ("latest.txt",)])
def test_other_files_are_nobodys_checkpoint(files: tuple[str, ...], tmp_path: Path) -> None:
    assert identify(make(tmp_path, files)) is None


@pytest.mark.parametrize("files", [(TRACKER,), ("latest",), ("global_step10/notes.txt",)])
def test_what_is_left_of_one_has_no_command(files: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="folders with its tensors are not there"):
        find.require_own(make(tmp_path, files), None)


@pytest.mark.often("hf", "megatron-deepspeed")
@pytest.mark.parametrize("target", ["megatron", "megatron-dist", "megatron-deepspeed", "hf"])
def test_the_command_converts_it(target: str, tmp_path: Path) -> None:
    run = write_run(random_model("llama"), tmp_path / "run")
    assert main(["convert", "--input", str(run), "--to", target, "--output", str(tmp_path / "a folder")]) == 0
    found = identify(tmp_path / "a folder")
    assert found is not None
    program, *words = shlex.split(found.way_out(None).split("\n")[1])
    assert program == "megatron-sp" and main(words) == 0 and find.has_steps(Path(found.output))
