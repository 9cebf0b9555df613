"""``megatron-sp chaos``: what it refuses, what it damages, what it compares; a whole one is in the long tests."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ckpts
from support.waiting import PATIENCE_S, wait_until

from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.commit import list_steps
from megatron_sp.commands import cli
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import CheckpointError, ConfigError

cli.load_chaos()
from chaos import faults, jobs  # noqa: E402
from chaos.campaign import MARK, Campaign, Tally, claim, differences, require_settled  # noqa: E402
from chaos.jobs import Job, Watch, in_child  # noqa: E402

# Whose folder


def test_a_folder_with_somebodys_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files already"):
        claim(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("stranger", ["thesis.tex", "round-x", "clean-up", "round-001-more"])
def test_beside_an_earlier_call_nothing_of_others_is_removed(tmp_path: Path, stranger: str) -> None:
    claim(tmp_path)
    (tmp_path / stranger).mkdir()
    (tmp_path / "round-001").mkdir()
    with pytest.raises(ConfigError, match=stranger):
        claim(tmp_path)
    assert (tmp_path / stranger).exists() and (tmp_path / "round-001").exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder, precious = tmp_path / "chaos", tmp_path / "precious"
    claim(folder)
    precious.mkdir()
    (precious / "file").touch()
    (folder / "clean").symlink_to(precious)
    with pytest.raises(ConfigError, match="clean"):
        claim(folder)
    assert (precious / "file").exists()


def test_an_earlier_call_is_cleared_away(tmp_path: Path) -> None:
    claim(tmp_path / "new")
    (tmp_path / "new" / "round-001" / "checkpoints").mkdir(parents=True)
    (tmp_path / "new" / "clean").mkdir()
    claim(tmp_path / "new")
    assert sorted(os.listdir(tmp_path / "new")) == [MARK, "output"]


@pytest.mark.parametrize("words, text", [
    (["--faults", "0"], "--faults"),
    (["--ranks", "99999999"], "--ranks (99999999) must be from 1 to 64"), (["--patience", "nan"], "--patience (nan)"),
    (["--patience", "0"], "--patience"),
    (["--", "python", "x.py", "--save", "y"], "leave --save out"), (["--", "python", "x.py", "--save=y"], "leave --save out"),
    (["--fault", "3"], "unrecognized argument"),
])  # fmt: skip
def test_bad_words_are_refused_before_anything_is_made(
    tmp_path: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chaos", str(tmp_path / "x"), *words]) == 2
    assert text in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_without_the_repository_the_door_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "CHAOS", tmp_path / "tools" / "chaos")
    assert cli.main(["chaos", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: megatron-sp chaos is a program of the repository") and "pip install -e ." in error
    assert not (tmp_path / "x").exists()


def test_help_has_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["chaos", "--help"])
    assert end.value.code == 0 and "--patience SECONDS" in capsys.readouterr().out


# What is damaged


def test_whatever_is_damaged_is_noticed_and_the_one_before_is_sound(tmp_path: Path) -> None:
    sound = tmp_path / "sound"
    ckpts.save(sound, 1, 2, 3)
    said = set()
    for seed in range(40):
        run = tmp_path / "run"
        shutil.copytree(sound, run)
        done = faults.damage(run, random.Random(seed))
        assert done is not None and done[0] == 3
        said.add(done[1].rpartition(": ")[2])
        checkpointer = Checkpointer(None)
        with pytest.raises(CheckpointError):
            checkpointer.verify(run / "checkpoints" / "step-000003")
        assert checkpointer.find(run, fallback=True).name == "step-000002"
        shutil.rmtree(run)
    assert said == {"a bit flipped", "cut", "emptied", "deleted"}


def test_the_only_sound_checkpoint_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path
    ckpts.save(run, 1, 2)
    (run / "checkpoints" / "step-000001" / "MANIFEST.json").unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert faults.damage(run, random.Random(0)) is None and list(list_steps(run / "checkpoints")) == [1, 2]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


# What is compared


def logged(run: Path, *losses: float, step: int = 1) -> Path:
    with open(run / "metrics.jsonl", "a") as file:
        for number, loss in enumerate(losses, step):
            file.write(json.dumps({"kind": "train", "step": number, "time": 1.0, "loss_hex": loss.hex()}) + "\n")
    return run


def test_equal_runs_and_others(tmp_path: Path) -> None:
    tensors = ckpts.make_tensors()

    def run(name: str, *steps: int, losses: tuple[float, ...] = (3.0, 2.0), having: dict[str, torch.Tensor] | None = None) -> Path:
        ckpts.save(tmp_path / name, *steps, tensors=having or tensors)
        return logged(tmp_path / name, *losses)

    clean = run("clean", 2)
    assert differences(clean, run("same", 1, 2)) == []
    name = next(iter(tensors))
    other = {**tensors, name: tensors[name].clone()}
    other[name].view(-1)[0] += 1
    assert differences(clean, run("other", 2, having=other)) == [f"{name} has other bits"]
    assert "step-000001" in differences(clean, run("short", 1, losses=(3.0,)))[0]
    assert "the loss of step 2 is" in differences(clean, run("log", 2, losses=(3.0, 2.5)))[0]
    twice = logged(run("twice", 2, losses=(3.0, 2.0, 9.0)), 8.0, step=3)
    assert differences(clean, twice) == ["step 3 was repeated with different results"]
    assert "no checkpoint" in differences(clean, logged(tmp_path, 1.0))[0]


# Processes


NO_OVERLAP = {"sp_overlap": {"mode": "none", "chunks": 1}}


@pytest.mark.parametrize("flags, layout, kernel, asks", [
    ({"sp_overlap_comm": True}, {"sp_overlap": {"mode": "split-qkv", "chunks": 1}}, "", "add --sp-overlap-mode split-qkv, which"),
    ({"sp_overlap_mode": "auto"}, {"sp_overlap": {"mode": "chunked", "chunks": 2}}, "",
     "add --sp-overlap-mode chunked --sp-head-chunks 2, which"),
    ({"sp_overlap_mode": "chunked"}, {"sp_overlap": {"mode": "chunked", "chunks": 2}}, "", None),
    ({"sp_overlap_comm": True, "sequence_parallel_size": 1}, {"sp_overlap": None}, "", None),
    ({"context_parallel_size": 4}, {**NO_OVERLAP, "sizes": "given"}, "", None),
    ({"context_parallel_size": 4}, {**NO_OVERLAP, "sizes": "timed"}, "",
     "give --sequence-parallel-size 2 --context-parallel-size 4, which it has chosen"),
    ({"sequence_parallel_size": 1}, {}, "flash3", "add --attention-backend flash3, which it has chosen now"),
    ({"sequence_parallel_size": 1}, {}, "sdpa", "add --attention-backend fused, which it has chosen now"),
    ({"sequence_parallel_size": 1}, {}, "sdpa-fa4", "add --attention-backend flash4, which it has chosen now"),
    ({"sequence_parallel_size": 1}, {}, None, None),
])  # fmt: skip
def test_what_timing_settles_is_refused(flags: dict[str, Any], layout: dict[str, Any], kernel: str | None, asks: str | None) -> None:
    """Restarted before its first save a run would choose anew, and the choice is in the last bits of its losses."""
    config = Config()
    for name, value in {"sequence_parallel_size": 2, **flags}.items():
        setattr(config.parallel, name, value)
    record: dict[str, Any] = {"config": config.to_dict(), "environment": {"layout": layout}}
    if kernel != "":  # None: it was not timed
        record["attention"] = {"kernel": kernel or "flash3", "ms": {kernel: 1.0, "cudnn": 2.0} if kernel else {}}
    if asks is None:
        require_settled(record)
        return
    with pytest.raises(ConfigError, match=asks):
        require_settled(record)


def test_only_what_we_have_started_gets_a_signal(tmp_path: Path) -> None:
    """A status file that names another process of this machine, this one, does not make it a rank."""
    process = subprocess.Popen(["/bin/sh", "-c", "setsid sleep 100 & wait"], start_new_session=True)
    process.returncode = 0
    job = Job(tmp_path, tmp_path / "output", [process.pid])
    wait_until(lambda: len(job.processes()) == 2)
    own = job.processes()
    assert own[0] == process.pid and os.getpid() not in own
    (tmp_path / "run_status.json").write_text(json.dumps({"pids": [os.getpid(), own[1]]}))
    assert job.ranks() == []
    (tmp_path / "run_status.json").write_text(json.dumps({"pids": own}))
    assert job.ranks() == own
    os.kill(process.pid, signal.SIGKILL)
    assert job.wait(lambda: False, PATIENCE_S) and job.code == -signal.SIGKILL
    assert job.processes() == own[1:], "what a launcher leaves behind is still known"
    job.kill()
    assert job.processes() == []


def test_the_records_of_an_attempt_are_those_since_its_start(tmp_path: Path) -> None:
    logged(tmp_path, 1.0, 2.0)
    watch = Watch(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 3}\nrubbish\n[1]\n{"kind": "train", "st')
        file.flush()
        assert [r["step"] for r in watch.of("train")] == [3]
        file.write('ep": 4}\n')
    assert [r["step"] for r in watch.of("train")] == [3, 4] and watch.of("save") == []
    assert Watch(tmp_path / "nowhere").look() == []


def test_a_child_answers_or_says_why_not() -> None:
    assert in_child(lambda: {"a": [1, 2]}) == {"a": [1, 2]}
    with pytest.raises(RuntimeError, match="KeyError: 'no such key'"):
        in_child(lambda: {}["no such key"])
    with pytest.raises(RuntimeError, match="has died"):
        in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_the_table(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, [], 3, 1, 2, 1.0, 1.0, print)
    campaign.tallies = {"a full disk": Tally(2, 0, 2, 0), "a rank killed": Tally(10, 10, 0, 15)}
    lines = campaign.table().splitlines()
    assert [line.split()[0:3] for line in lines[1:]] == [["a", "rank", "killed"], ["a", "full", "disk"]]
    assert lines[1].split()[3:] == ["10", "10", "0", "1.5"] and lines[2].split()[3:] == ["2", "0", "2", "-"]
    assert len({len(line) for line in lines}) == 1


def test_save_flags_are_those_of_a_resume(tmp_path: Path) -> None:
    assert jobs.save_flags(tmp_path) == ["--save", str(tmp_path), "--auto-resume", "--resume-fallback"]
