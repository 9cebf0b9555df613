"""A conversion that is killed leaves nothing that could be taken for its result."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch
from support.convert_models import MODELS, Tensors, assert_equal, contents, stored, write_run

from megatron_sp.commands.cli import main
from megatron_sp.config.schema import ModelConfig
from megatron_sp.convert.model import Model, parameter_shapes

MOMENTS = 12
SHAPE = {**MODELS["gpt2"][0], "num_layers": 6, "hidden_size": 64, "ffn_hidden_size": 256}


def model() -> Model:
    config = ModelConfig(**SHAPE)
    generator = torch.Generator().manual_seed(0)
    return Model(config, Tensors({n: torch.randn(shape, generator=generator) for n, shape in parameter_shapes(config).items()}))


def convert(source: Path, target: str, output: Path) -> int:
    several = ["--max-shard-size", "300KB"] if target == "hf" else []
    return main(["convert", "--input", str(source), "--to", target, "--output", str(output), *several])


# Builtins that change what is on the disk, or may: before one of these calls by our code a signal finds what it would
# find at any moment.
CHANGES = {"open", "mkdir", "write", "pwrite", "truncate", "ftruncate", "flush", "close", "fsync", "replace", "rename", "unlink", "rmdir"}


def in_child(source: Path, target: str, output: Path, number: int = 0, at: int = -1) -> tuple[int, int, int]:
    """Convert in a forked child that gets signal ``number`` just before its change ``at``.

    Returns:
        exit code, negative for a signal that ended it; how many changes it was about to make before it ended by itself,
        and before the first that wrote.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, changes, reading = 1, itertools.count(), [0]
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts a suite in its background has it ignored

        def before(frame: FrameType, event: str, function: object) -> None:
            name = getattr(function, "__name__", "") if event == "c_call" and "megatron_sp" in frame.f_code.co_filename else ""
            if name not in CHANGES or isinstance(getattr(function, "__self__", None), str):  # a text has a replace() too
                return
            index = next(changes)
            if name in ("write", "pwrite") and not reading[0]:
                reading[0] = index
            if index == at:
                os.kill(os.getpid(), number)

        try:
            torch.set_num_threads(1)
            threading.setprofile(before)
            sys.setprofile(before)
            code = convert(source, target, output)
            sys.setprofile(None)
        finally:
            os.write(writes, f"{next(changes)} {reading[0]}".encode())
            os._exit(code)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        made, read = map(int, (pipe.read() or "0 0").split())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), made, read


OTHERS = ("megatron_sp", "megatron", "megatron-dist", "megatron-deepspeed")


@pytest.mark.parametrize("target", ["hf", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_killed_on_the_way(tmp_path: Path, target: str) -> None:
    """Spread over the whole conversion; a few of the last changes come when all is in its place."""
    source = write_run(model(), tmp_path / "run")
    code, changes, _ = in_child(source, target, tmp_path / "whole")
    assert code == 0 and changes > 4 * MOMENTS
    expected = sorted(p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*"))
    for moment in range(MOMENTS):
        output = tmp_path / f"out-{moment}"
        assert in_child(source, target, output, signal.SIGKILL, at=(changes - 1) * moment // MOMENTS)[0] == -signal.SIGKILL
        if output.exists():
            assert sorted(p.relative_to(output) for p in output.rglob("*")) == expected
    left = [path for path in tmp_path.iterdir() if ".part-" in path.name]
    assert left and all(path.name.startswith(".out-") for path in left)
    assert convert(source, target, tmp_path / "at last") == 0
    if target == "megatron_sp":
        assert_equal(stored(tmp_path / "at last"), contents(model()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_at_all(tmp_path: Path, number: int) -> None:
    source = write_run(model(), tmp_path / "run")
    _, changes, reading = in_child(source, "hf", tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole")
    for at in (reading // 2, *(reading + (changes - reading) * quarter // 4 for quarter in range(4))):
        code, made, _ = in_child(source, "hf", tmp_path / "out", number, at)
        may_end_it = at < reading  # nothing is there yet, so it may end as any program
        assert (code == 130 or (may_end_it and code == -number)) and os.listdir(tmp_path) == ["run"], (code, made, at)


def test_what_an_earlier_kill_left_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_run(model(), tmp_path / "run")
    (tmp_path / ".out.part-0123456789ab").mkdir()
    assert convert(source, "hf", tmp_path / "out") == 0
    message = capsys.readouterr().err
    assert f"{tmp_path / '.out.part-0123456789ab'} is left over" in message and "delete it" in message
