"""tools/plot_metrics.py: what is read, what a resume undoes, what is drawn."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.run_logs import LogWriter

from megatron_sp.commands import cli, plot


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """Steps 1 to 7, killed; resumed from step 5 to step 10; validations at 4, 6 (done again) and 8."""
    writer = LogWriter(tmp_path / "resumed")
    writer.write("start", 0, attempt=0)
    writer.steps(1, 4, loss=4.0)
    writer.write("valid", 4, loss=4.5, perplexity=90.0)
    writer.steps(5, 6, loss=4.0)
    writer.write("valid", 6, loss=9.9, perplexity=99.0)
    writer.steps(7, 7, loss=4.0)
    writer.time += 3600  # an hour of nothing
    writer.write("start", 5, attempt=1)
    writer.steps(6, 10, loss=3.0)
    writer.write("valid", 8, loss=3.5, perplexity=33.0)
    writer.write("save", 10, saved=True)
    return writer.folder


def test_a_resume_undoes_what_was_done_beyond_it(resumed: Path) -> None:
    run = plot.read_history(resumed)
    assert run.name == "resumed" and run.resumed == [5] and run.notes == []
    assert [(s, r["loss"]) for s, r in run.train.items()] == [(s, 4.0) for s in range(1, 6)] + [(s, 3.0) for s in range(6, 11)]
    assert {s: r["loss"] for s, r in run.valid.items()} == {4: 4.5, 8: 3.5}


def test_what_a_resume_has_not_done_again_yet_is_gone_too(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "a")
    writer.steps(1, 9, loss=4.0)
    writer.write("valid", 9, loss=4.0, perplexity=54.0)
    writer.write("start", 5, attempt=1)
    writer.steps(6, 6, loss=3.0)
    run = plot.read_history(tmp_path / "a")
    assert list(run.train) == [1, 2, 3, 4, 5, 6] and run.valid == {}


def test_the_axes(resumed: Path) -> None:
    run = plot.read_history(resumed)
    assert run.series("train", "loss", "step")[0] == list(range(1, 11))
    assert run.series("train", "loss", "tokens")[0] == [64 * s for s in range(1, 11)]
    assert run.series("valid", "loss", "tokens")[0] == [4 * 64, 8 * 64]  # taken from the training records
    minutes = run.series("train", "loss", "time")[0]
    assert minutes == sorted(minutes) and minutes[-1] < 5  # the hour between the processes does not count


def test_validation_between_logged_steps_gets_its_share_of_the_tokens(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "a")
    writer.write("valid", 0, loss=9.0, perplexity=8000.0)
    writer.steps(10, 10, loss=1.0)
    writer.write("valid", 12, loss=2.0, perplexity=7.4)
    assert plot.read_history(tmp_path / "a").series("valid", "loss", "tokens")[0] == [0.0, 768.0]


def test_two_resumes_from_the_same_step_and_one_from_before(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "a")
    writer.write("start", 0)
    for start, last, loss in ((0, 6, 1.0), (4, 8, 2.0), (4, 5, 3.0), (2, 9, 4.0)):
        if start:
            writer.write("start", start)
        writer.steps(start + 1, last, loss=loss)
    run = plot.read_history(tmp_path / "a")
    assert run.resumed == [2]
    assert [r["loss"] for r in run.train.values()] == [1.0, 1.0, *[4.0] * 7]


def test_a_torn_last_line_and_a_bad_one_are_left_out_and_said(resumed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = resumed / "metrics.jsonl"
    lines = path.read_text().split("\n")
    lines[2] = "\x00\x00garbage"
    lines[3] = '{"kind": "train", "step": "three"}'
    path.write_text("\n".join(lines) + '{"kind": "train", "step": 11, "lo')
    assert cli.main(["plot", str(resumed), "--text"]) == 0
    out, err = capsys.readouterr()
    assert "2 lines are not records and are left out, the first is line 3" in err
    assert "the last line is cut off" in err
    assert "step 10, train loss 3.0000, validation loss 3.5000, perplexity 33.00, resumed at step 5" in out


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "a")
    for step, loss in enumerate([1.0, "nan", None, 2.0, "inf"], 1):
        writer.write("train", step, loss=loss)
    values = plot.read_history(tmp_path / "a").series("train", "loss", "step")[1]
    assert values[0] == 1.0 and values[3] == 2.0 and math.isnan(values[1]) and math.isnan(values[2])
    assert cli.main(["plot", str(tmp_path / "a"), "-o", str(tmp_path / "a.png")]) == 0


@pytest.mark.parametrize(("name", "axis"), [("loss.png", "step"), ("loss.svg", "tokens"), ("loss.svg", "time")])
def test_pictures(resumed: Path, tmp_path: Path, name: str, axis: str) -> None:
    pytest.importorskip("matplotlib")
    long = LogWriter(tmp_path / "long")
    long.steps(1, 200, loss=2.0)
    output = tmp_path / name
    assert cli.main(["plot", str(resumed), str(long.folder / "metrics.jsonl"), "-o", str(output), "--x", axis]) == 0
    data = output.read_bytes()
    assert data.startswith(b"\x89PNG") or (
        b"<svg" in data and b"resumed: validation, last 3.500" in data and b"long: train (running mean)" in data
    )


def test_the_default_is_a_picture_in_the_run_folder(resumed: Path) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["plot", str(resumed)]) == 0
    assert (resumed / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_text_and_a_hint(
    resumed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["plot", str(resumed)]) == 0
    out, err = capsys.readouterr()
    assert "pip install matplotlib" in err and "train loss" in out and "█" in out
    assert not (resumed / "loss.png").exists()


@pytest.mark.parametrize(("content", "arguments", "code", "message"), [
    (None, [], 4, "metrics.jsonl cannot be read"),
    ("", [], 4, "no training or validation record yet (0 records"),
    ('{"kind": "start", "step": 0}\n', [], 4, "(1 records of other kinds)"),
    ('{"kind": "train", "step": 1, "loss": 1}\n', ["-o", "loss.gif"], 2, "must end in one of .png, .svg, .pdf"),
    ('{"kind": "train", "step": 1, "loss": 1}\n', ["-o", "/nowhere/loss.png"], 6, "/nowhere/loss.png cannot be written"),
])  # fmt: skip
def test_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, arguments: list[str], code: int, message: str
) -> None:
    if code == 6:
        pytest.importorskip("matplotlib")
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert cli.main(["plot", str(tmp_path), *arguments]) == code
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_help_needs_neither_torch_nor_matplotlib() -> None:
    script = (
        "import sys, runpy; sys.argv = ['plot_metrics.py', '--help']; sys.path.insert(0, 'tools')\n"
        "try: runpy.run_path('tools/plot_metrics.py', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
