"""Records are JSON whatever they hold, trackers and disks may fail, and only rank 0 writes."""

from __future__ import annotations

import json
import math
import types
from pathlib import Path

import pytest

from megatron_sp.config import LoggingConfig
from megatron_sp.ops import availability
from megatron_sp.training.metrics import MetricsLog
from megatron_sp.utils.run_log import read_records


class Writer:
    """Stands in for TensorBoard's."""

    def __init__(self, folder: str, max_queue: int) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


def test_values_that_json_does_not_have(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, LoggingConfig(), 0, {})
    log.write(
        "train",
        step=1,
        loss=float("nan"),
        up=float("inf"),
        down=-float("inf"),
        nothing=None,
        name="é\n",
        small=1e-300,
        inner={"a": [math.nan]},
    )
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line.count("\n") == 1
    record = json.loads(line, parse_constant=lambda text: pytest.fail(text))
    assert (record["loss"], record["up"], record["down"], record["nothing"], record["name"], record["small"]) == (
        "nan", "inf", "-inf", None, "é\n", 1e-300,
    )  # fmt: skip
    assert record["inner"] == {"a": ["nan"]}
    assert [float(record[k]) for k in ("up", "down")] == [float("inf"), -float("inf")]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, LoggingConfig(tensorboard_dir="x", wandb_project="y"), 1, {})
    log.write("train", step=1)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(tmp_path / "absent", LoggingConfig(), 0, {})
    log.write("train", step=1)
    log.write("train", step=2)
    (tmp_path / "absent").mkdir()
    log.write("train", step=3)
    assert capsys.readouterr().err.count("warning: metrics.jsonl cannot be written") == 1
    assert [r["step"] for r in read_records(tmp_path / "absent")[0]] == [3]


@pytest.mark.parametrize("before, lines", [("", 1), ('{"kind":"a","step":1}\n', 2), ('{"kind":"a","step":1}', 2), ('{"ki', 2)])
def test_what_is_there_stays(tmp_path: Path, before: str, lines: int) -> None:
    (tmp_path / "metrics.jsonl").write_text(before)
    log = MetricsLog(tmp_path, LoggingConfig(), 0, {})
    log.write("train", step=2)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.startswith(before) and len(text.splitlines()) == lines and json.loads(text.splitlines()[-1])["step"] == 2


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[Writer] = []

    def summary_writer(folder: str, max_queue: int) -> Writer:
        writers.append(Writer(folder, max_queue))
        return writers[-1]

    monkeypatch.setattr(availability, "load", lambda name: types.SimpleNamespace(SummaryWriter=summary_writer))
    log = MetricsLog(tmp_path, LoggingConfig(tensorboard_dir=str(tmp_path)), 0, {})
    log.write("train", step=7, loss=1.5, grad_norm=float("nan"), samples_sha="ab", count=3)
    log.close()
    assert writers[0].scalars == [("train/loss", 1.5, 7), ("train/count", 3, 7)] and writers[0].closed


def test_a_tracker_that_breaks_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def log(self, *_: object, **__: object) -> None:
            raise ConnectionError("no network")

        def finish(self) -> None:
            raise ConnectionError("no network")

    monkeypatch.setattr(availability, "load", lambda name: types.SimpleNamespace(init=lambda **_: Broken()))
    log = MetricsLog(tmp_path, LoggingConfig(wandb_project="p"), 0, {})
    for step in (1, 2, 3):
        log.write("train", step=step)
    log.close()
    assert capsys.readouterr().err.count("no network") == 1
    assert [r["step"] for r in read_records(tmp_path)[0]] == [1, 2, 3]
