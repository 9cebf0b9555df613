"""Records are JSON whatever they hold, trackers and disks may fail, and only rank 0 writes."""

from __future__ import annotations

import collections
import errno
import importlib.util
import io
import json
import logging
import math
import os
import shutil
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_sp.config.schema import LoggingConfig
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
    odd = {"loss": math.nan, "up": math.inf, "down": -math.inf, "nothing": None, "name": "é\n", "small": 1e-300, "inner": {"a": [math.nan]}}
    log.write("train", step=1, **odd)
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


def defined_in(file: Path, module: str, source: str) -> types.ModuleType:
    """A module of that name, as an error's frames show it."""
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


THREADED = """
import threading

class Worker(threading.Thread):
    error = None

    def run(self):
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            self.error = error
            raise

class SummaryWriter:
    def __init__(self, folder, max_queue):
        self.worker = Worker()
        self.worker.start()
        self.worker.join()

    def add_scalar(self, name, value, step):
        raise self.worker.error

    def close(self):
        self.worker.join()
"""


def test_tensorboard_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its writer's thread ends with the error, which every later call raises again."""
    hook = threading.excepthook
    package = defined_in(tmp_path / "writer.py", "tensorboard.summary.writer.event_file_writer", THREADED)
    monkeypatch.setattr(availability, "load", lambda name: package)
    log = MetricsLog(tmp_path, LoggingConfig(tensorboard_dir=str(tmp_path)), 0, {})
    for step in (1, 2):
        log.write("train", step=step, loss=1.0)
    log.close()
    said = capsys.readouterr().err
    assert said == "warning: TensorBoard cannot be written ([Errno 28] No space left on device); training goes on without it\n"
    assert log.lost == {"TensorBoard": "No space left on device"} and threading.excepthook is hook
    assert [r["step"] for r in read_records(tmp_path)[0]] == [1, 2]


def test_an_error_in_another_thread_is_not_taken_for_a_tracker_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    monkeypatch.setattr(availability, "load", lambda name: types.SimpleNamespace(SummaryWriter=Writer))
    log = MetricsLog(tmp_path, LoggingConfig(tensorboard_dir=str(tmp_path)), 0, {})
    worker = threading.Thread(target=lambda: {}["absent"])
    worker.start()
    worker.join()
    log.close()
    assert [one.exc_type for one in ended] == [KeyError] and log.lost == {}


class Offline:
    """As W&B is: a process of its own writes the records, and its log is written through ``logging``."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self.logged, self.logger, handler = 0, logging.Logger("wandb"), logging.StreamHandler(io.StringIO())
        handler.flush = flush  # type: ignore[method-assign]
        self.logger.addHandler(handler)

    def log(self, *_: object, **__: object) -> None:
        self.logged += 1
        self.logger.warning("published")

    def finish(self) -> None:
        self.logger.warning("finished")


@pytest.mark.parametrize("free, lost", [(1 << 30, False), (4096, True)])
def test_wandb_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free: int, lost: bool
) -> None:
    def flush() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run, usage = Offline(flush), collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(availability, "load", lambda name: types.SimpleNamespace(init=lambda **_: run))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 0, free))
    log = MetricsLog(tmp_path, LoggingConfig(wandb_project="p"), 0, {})
    for step in (1, 2):
        log.write("train", step=step)
    log.close()
    said = capsys.readouterr().err
    assert said.count("warning: W&B cannot be written") == len(said.splitlines()) == lost, said
    assert run.logged == 2 and ("W&B" in log.lost) == lost and logging.raiseExceptions
