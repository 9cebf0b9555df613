"""A conversion whose disk is full, or that is stopped, leaves nothing behind that could be taken for its result."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.convert_models import random_model, write_run

from megatron_sp.commands.cli import main
from megatron_sp.convert import command
from megatron_sp.convert.arguments import FORMAT_NAMES
from megatron_sp.utils.errors import EXIT_DISK

TARGETS = (*FORMAT_NAMES, "universal")
LONG = pytest.mark.long
LIMITS = (pytest.param(0, marks=LONG), pytest.param(600, marks=LONG), 20_000)  # the first file, one of settings, one of weights


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the optimizer's state."""
    return write_run(random_model("llama", optimizer=True), tmp_path_factory.mktemp("disk") / "run")


def words(source: Path, target: str, output: Path) -> list[str]:
    more = ["--deepspeed-layout", "universal"] if target == "universal" else []
    to = "megatron-deepspeed" if target == "universal" else target
    return ["convert", "--input", str(source), "--to", to, "--output", str(output), *more]


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_full_disk(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str], target: str, limit: int) -> None:
    output = tmp_path / "deep" / "out"
    with no_file_above(limit):
        assert main(words(source, target, output)) == EXIT_DISK
    assert f"{output} was not written:" in (message := capsys.readouterr().err) and "File too large" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["megatron", *(pytest.param(name, marks=LONG) for name in TARGETS if name != "megatron")])
def test_a_signal_behind_the_last_file(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    """All is written, and nothing is there by its name yet."""
    written: list[Path] = []

    def stop(path: Path) -> None:
        written.extend(path.rglob("*"))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command, "fsync_dir", stop)
    assert main(words(source, target, tmp_path / "out")) == 130
    assert len(written) > 2 and list(tmp_path.iterdir()) == []
    assert f"{tmp_path / 'out'} was not written: a signal stopped" in capsys.readouterr().err
