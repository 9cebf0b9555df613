"""Programs started by other launchers than torchrun, or with half of a launcher's variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.training import TINY, train

from megatron_sp.commands import cli
from megatron_sp.commands.pretrain import parse_config
from megatron_sp.utils.entry_point import code_of
from megatron_sp.utils.errors import EXIT_CONFIG


def by_mpirun(rank: int) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(PMI_RANK=str(rank), PMI_SIZE="2", MPI_LOCALRANKID=str(rank), MPI_LOCALNRANKS="2")


def test_mpiruns_processes_are_the_ranks_of_one_job(tmp_path: Path) -> None:
    """They were as many trainings as processes, alike to the last bit."""
    said = train(tmp_path, "--use-mpi", "--sp-size", 2, "--train-iters", 1, ranks=2, setup=by_mpirun).expect(0, "2 x cpu (dp 1, sp 2")
    assert said.texts[0].count("ignored: --use-mpi (ranks are those of whatever has started this") == 1
    assert "step 1/1" in said.texts[0] and "step 1/1" not in said.texts[1]


@pytest.mark.parametrize("words", ["evaluate --load nowhere --text x", "generate --load nowhere", "serve --load nowhere"])
def test_a_tool_with_half_of_the_variables(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert code_of(lambda: cli.main(words.split())) == EXIT_CONFIG
    assert "error: this process's place in its job is not clear: WORLD_SIZE is 'two', not a number" in capsys.readouterr().err


@pytest.mark.parametrize("action", [(), ("--dry-run",)])
def test_a_training_with_half_of_the_variables(
    action: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank says it: the variables are its own. A dry run asks for the number of processes only."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        parse_config([*TINY, "--mock-data", "--vocab-size", "60", "--train-iters", "1", *action], prog="pretrain_gpt.py", family="gpt")
    assert end.value.code == (0 if action else EXIT_CONFIG)
    assert ("LOCAL_RANK is not set; MASTER_PORT is not set" in capsys.readouterr().err) == (not action)
