"""A conversion that is killed leaves nothing that could be taken for its result."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from convert_models import MODELS, Tensors, assert_equal, contents, stored, write_run

from megatron_sp.cli import main
from megatron_sp.config import ModelConfig
from megatron_sp.convert.model import Model, parameter_shapes

MOMENTS = 20
SHAPE = {**MODELS["gpt2"][0], "num_layers": 6, "hidden_size": 64, "ffn_hidden_size": 256}


def model() -> Model:
    config = ModelConfig(**SHAPE)
    generator = torch.Generator().manual_seed(0)
    return Model(config, Tensors({n: torch.randn(shape, generator=generator) for n, shape in parameter_shapes(config).items()}))


def convert(source: Path, target: str, output: Path) -> int:
    several = ["--max-shard-size", "300KB"] if target == "hf" else []
    return main(["convert", "--input", str(source), "--to", target, "--output", str(output), *several])


def in_child(source: Path, target: str, output: Path) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            code = convert(source, target, output)
        finally:
            os._exit(code)
    return pid


OTHERS = ("megatron_sp", "megatron", "megatron-dist", "megatron-deepspeed")


@pytest.mark.parametrize("target", ["hf", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_killed_at_random_moments(tmp_path: Path, target: str) -> None:
    source = write_run(model(), tmp_path / "run")
    began = time.monotonic()
    os.waitpid(in_child(source, target, tmp_path / "whole"), 0)
    seconds, draw = time.monotonic() - began, random.Random(0)
    expected = sorted(p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*"))
    killed = 0
    for moment in range(MOMENTS):
        output = tmp_path / f"out-{moment}"
        pid = in_child(source, target, output)
        time.sleep(seconds * draw.random())
        os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        if output.exists():
            assert sorted(p.relative_to(output) for p in output.rglob("*")) == expected
    assert killed > MOMENTS // 5  # the others were done before
    left = [path for path in tmp_path.iterdir() if ".part-" in path.name]
    assert all(path.name.startswith(".out-") for path in left)
    assert convert(source, target, tmp_path / "at last") == 0
    if target == "megatron_sp":
        assert_equal(stored(tmp_path / "at last"), contents(model()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_at_all(tmp_path: Path, number: int) -> None:
    source = write_run(model(), tmp_path / "run")
    pid = in_child(source, "hf", tmp_path / "out")
    while not (parts := list(tmp_path.glob(".out.part-*/*.safetensors"))):
        time.sleep(0.001)
    os.kill(pid, number)
    _, status = os.waitpid(pid, 0)
    assert parts and sorted(os.listdir(tmp_path)) == (["run"] if os.waitstatus_to_exitcode(status) else ["out", "run"])


def test_what_an_earlier_kill_left_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_run(model(), tmp_path / "run")
    (tmp_path / ".out.part-0123456789ab").mkdir()
    assert convert(source, "hf", tmp_path / "out") == 0
    message = capsys.readouterr().err
    assert f"{tmp_path / '.out.part-0123456789ab'} is left over" in message and "delete it" in message
