"""``megatron-sp ckpt ls``: what it tells of runs in every state, and that it leaves them alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ckpts
from support.paths import ROOT
from support.run_logs import LogWriter

from megatron_sp.checkpoint.lock import RunLock
from megatron_sp.commands import cli
from megatron_sp.commands.ckpt import folders

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 2, 4 and 6; step 4 was logged, and once more after a resume at step 2."""
    weights = {name: t for name, t in ckpts.make_tensors().items() if "layers" not in name}
    world = {"world_size": 8, "dp": 2, "sp": 2, "tp": 2, "tp_seq": 1}
    ckpts.save(tmp_path / "run", 2, 4, 6, tensors=weights, state=ckpts.make_state(weights, world))
    log = LogWriter(tmp_path / "run")
    log.start(0)
    log.steps(1, 4, loss=9.0)
    log.start(2)
    log.steps(3, 4, loss=7.25)
    return tmp_path / "run"


def ls(capsys: Capture, *paths: Path) -> tuple[str, Any]:
    """Text and JSON of the same."""
    assert cli.main(["ckpt", "ls", *map(str, paths)]) == 0
    text = capsys.readouterr().out
    assert cli.main(["ckpt", "ls", "--json", *map(str, paths)]) == 0
    return text, json.loads(capsys.readouterr().out)


def line_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.split()[:1] == [name])


def leave_over(run: Path, name: str, of: str | None = None) -> Path:
    """A folder of this name, with one file or all of a step."""
    path = run / "checkpoints" / name
    if of is None:
        path.mkdir()
        (path / "rank00000-00000.safetensors").write_bytes(b"x" * 3000)
    else:
        (run / "checkpoints" / of).rename(path)
    return path


def test_a_run(run: Path, capsys: Capture) -> None:
    text, (found,) = ls(capsys, run)
    folder = run / "checkpoints"
    size = sum(file.stat().st_size for file in (folder / "step-000004").iterdir())
    assert text.splitlines()[0] == f"{folder}: 3 checkpoints, {3 * size / 1024:.1f} KiB"
    row = line_of(text, "step-000004")
    for cell in (f"{size / 1024:.1f} KiB", "3  ", "12  ", "658 fp32", "yes", "8: dp 2, sp 2, tp 2, tp_seq", "7.2500", "complete"):
        assert f"  {cell}" in row, cell
    assert row.endswith("complete") and line_of(text, "step-000006").endswith("complete, latest, a resume takes it")
    assert (found["latest"], found["resume"], found["writer"], found["leftovers"]) == (6, 6, None, [])
    second = found["checkpoints"][1]
    assert (second["step"], second["bytes"], second["files"], second["health"], second["loss"]) == (4, size, 3, "complete", 7.25)
    assert second["optimizer"] == ["exp_avg", "exp_avg_sq"] and second["layout"]["tp"] == 2
    assert found["checkpoints"][2]["loss"] is None


def test_it_changes_nothing_and_takes_no_lock(run: Path, capsys: Capture) -> None:
    leave_over(run, "step-000008.part-00ff")

    def tree() -> list[tuple[str, int, int]]:
        return sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*"))

    with RunLock(run):
        before = tree()
        ls(capsys, run)
        assert tree() == before
        assert (os.stat(run).st_mtime_ns, len(before)) == (os.stat(run).st_mtime_ns, len(tree()))


def test_while_a_job_saves(run: Path, capsys: Capture) -> None:
    leave_over(run, "step-000008.part-00ff")
    with RunLock(run):
        text, (found,) = ls(capsys, run)
    assert line_of(text, "step-000008.part-00ff").endswith("being written or deleted")
    assert f"a job is writing here: pid {os.getpid()}" in text and "--leftovers" not in text
    assert found["writer"]["alive"] is True and found["resume"] == 6


def test_a_folder_that_vanishes_meanwhile_is_left_out(run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    look_at = folders.look_at

    def look(path: Path, step: int, kind: str) -> folders.Entry:
        if step == 2:
            raise FileNotFoundError
        return look_at(path, step, kind)

    monkeypatch.setattr(folders, "look_at", look)
    assert [c["step"] for c in ls(capsys, run)[1][0]["checkpoints"]] == [4, 6]


def test_what_is_left_over(run: Path, capsys: Capture) -> None:
    leave_over(run, "step-000008.part-00ff")
    leave_over(run, "step-000004.replaced-0a", of="step-000004")
    leave_over(run, "step-000006.abandoned-0b", of="step-000006")
    text, (found,) = ls(capsys, run)
    assert text.splitlines()[0].startswith(f"{run}/checkpoints: 1 checkpoint, 3 left over, ")
    assert line_of(text, "step-000008.part-00ff").endswith("unfinished")
    assert line_of(text, "step-000006.abandoned-0b").endswith("abandoned") and "7.2500" not in text
    assert "the next job that saves here removes it" in text and "each can be loaded by its path" in text
    assert f"to delete what is left over: megatron-sp ckpt prune {run} --leftovers" in text
    assert {e["health"]: e["bytes"] > 2000 for e in found["leftovers"]} == {"unfinished": True, "set aside": True, "abandoned": True}
    assert "names step-000006, which is not there: the folders themselves decide" in text
    # set aside by a save that was cut short: newer than every step, so the next job puts it back
    assert found["resume"] == 4 and line_of(text, "step-000004.replaced-0a").endswith("set aside, a resume takes it")


def test_damage(run: Path, capsys: Capture) -> None:
    file = run / "checkpoints" / "step-000006" / "rank00000-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (run / "checkpoints" / "step-000002" / "MANIFEST.json").unlink()
    text, (found,) = ls(capsys, run)
    assert "damaged: rank00000-00000.safetensors has" in line_of(text, "step-000006") and ", latest" in line_of(text, "step-000006")
    assert "damaged: it has no MANIFEST.json" in line_of(text, "step-000002") and "  -  " in line_of(text, "step-000002")
    assert "a resume stops at step-000006, which is damaged: --resume-fallback takes step-000004" in text
    assert found["resume"] is None and [c["health"] for c in found["checkpoints"]] == ["damaged", "complete", "damaged"]
    ckpts.flip(run / "checkpoints" / "step-000004" / "state.json")
    assert "there is no complete one before it" in ls(capsys, run)[0]


def test_other_places(run: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    assert ls(capsys, tmp_path / "empty")[0] == f"{tmp_path}/empty: no checkpoint\n"
    weights = ckpts.make_tensors(optimizer=False)
    ckpts.save(tmp_path / "other", 1, tensors=weights)
    text, both = ls(capsys, tmp_path)
    assert [Path(found["run"]).name for found in both] == ["other", "run"]
    assert "step-000001 has no optimizer state: it loads with --finetune, or with --no-load-optim" in text
    assert [c["step"] for c in ls(capsys, run / "checkpoints")[1][0]["checkpoints"]] == [2, 4, 6]
    one = ls(capsys, run / "checkpoints" / "step-000004")
    assert [c["loss"] for c in one[1][0]["checkpoints"]] == [7.25] and one[1][0]["resume"] is None
    (run / "checkpoints" / "notes.txt").write_text("")
    (run / "checkpoints" / "\x1b[2J").write_text("x")
    assert "ignored, not a step folder: '\\x1b[2J', notes.txt" in ls(capsys, run)[0]
    assert cli.main(["ckpt", "ls", str(tmp_path / "run-1")]) == 3
    assert "nearest: run" in capsys.readouterr().err


def test_no_torch_is_needed(run: Path) -> None:
    program = (
        "import sys\nfrom megatron_sp.commands import cli\n"
        "for words in (['ls'], ['verify'], ['show'], ['prune', '--keep-last', '1', '--dry-run']):\n"
        f"    assert cli.main(['ckpt', words[0], {str(run)!r}, *words[1:]]) == 0\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_what_was_not_checked_is_said(run: Path, capsys: Capture) -> None:
    """A flipped bit is none of its business, and it does not look as if it were; a link is not taken for a step."""
    (run / "checkpoints" / "step-000008").symlink_to("step-000006")
    text, (found,) = ls(capsys, run)
    assert f"checked: manifests and sizes; not the files' contents, which megatron-sp ckpt verify {run} compares" in text
    assert "step-000008 is a symbolic link: not looked at, and a load refuses it" in text
    assert [entry["step"] for entry in found["checkpoints"]] == [2, 4, 6] and any("not the files'" in note for note in found["notes"])
