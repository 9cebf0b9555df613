"""Saving while training goes on: what is written is what was there when the save began, and nothing is lost or said twice."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from support.waiting import PATIENCE_S

from megatron_sp.checkpoint import background as background_module
from megatron_sp.checkpoint import safetensors_file
from megatron_sp.checkpoint.background import BackgroundSaves
from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.manifest import read_manifest
from megatron_sp.checkpoint.pieces import GlobalTensor, Piece
from megatron_sp.utils.faults import FaultPlan


class Gate(FaultPlan):
    """Holds whoever reaches a point until it is let through."""

    def __init__(self, point: str) -> None:
        object.__setattr__(self, "faults", ())
        object.__setattr__(self, "point", point)
        object.__setattr__(self, "reached", threading.Event())
        object.__setattr__(self, "open", threading.Event())

    def at(self, point: str, step: int) -> None:
        if point == self.point:  # type: ignore[attr-defined]
            self.reached.set()  # type: ignore[attr-defined]
            assert self.open.wait(PATIENCE_S)  # type: ignore[attr-defined]


def some_tensors(seed: int = 0) -> dict[str, GlobalTensor]:
    """Of several types, one of them a transposed piece, one empty, one without dims."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(6, 5, generator=generator)
    return {
        "a": GlobalTensor.whole(torch.randn(300, 70, generator=generator)),
        "turned": GlobalTensor((5, 6), torch.float32, [Piece((0, 0), wide.t()[:, :2]), Piece((0, 2), wide.t()[:, 2:])]),
        "half": GlobalTensor.whole(torch.randn(77, generator=generator).bfloat16()),
        "count": GlobalTensor.whole(torch.tensor(seed)),
        "none": GlobalTensor.whole(torch.empty(0, 3)),
    }


def saves(run: Path, faults: FaultPlan | None = None, **options: int) -> tuple[Checkpointer, BackgroundSaves]:
    checkpointer = Checkpointer(run, faults=faults, **options)
    checkpointer.prepare()
    background = BackgroundSaves(checkpointer)
    assert background.reserve(some_tensors()) is None
    return checkpointer, background


def on_cores(monkeypatch: pytest.MonkeyPatch, of_rank: int, computing: int) -> None:
    """As on a host with so many cores for this rank, on some of which torch computes."""
    monkeypatch.setattr(safetensors_file, "cores_of_rank", lambda: of_rank)
    monkeypatch.setattr(safetensors_file, "io_threads", lambda: max(1, min(4, of_rank)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: computing)


def overwrite(tensors: dict[str, GlobalTensor]) -> None:
    for tensor in tensors.values():
        for piece in tensor.pieces:
            piece.tensor.fill_(7)


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 2000])
def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path: Path, max_file_bytes: int) -> None:
    state = {"consumed_samples": 12, "nested": {"list": [1, 2]}}
    report = Checkpointer(tmp_path / "waited", max_file_bytes=max_file_bytes).save(4, some_tensors(), state)
    gate = Gate("save.hash")
    _, background = saves(tmp_path / "background", gate, max_file_bytes=max_file_bytes)
    tensors = some_tensors()
    background.start(4, tensors, state)
    assert gate.reached.wait(PATIENCE_S) and background.in_flight and background.poll() is None  # type: ignore[attr-defined]
    overwrite(tensors)
    state["nested"]["list"].append(3)  # type: ignore[index]
    gate.open.set()  # type: ignore[attr-defined]
    outcome = background.wait()
    assert outcome is not None and outcome.saved and outcome.num_bytes == report.num_bytes
    assert background.wait() is None and background.poll() is None and not background.in_flight, "it is told once"
    folders = [tmp_path / name / "checkpoints" / "step-000004" for name in ("waited", "background")]
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert contents[0] == contents[1] and len(contents[0]) > (4 if max_file_bytes == 2000 else 3)


def test_the_memory_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = background_module.host_empty
    monkeypatch.setattr(background_module, "host_empty", lambda shape, *rest: (made.append(shape[0]), original(shape, *rest))[1])
    checkpointer, background = saves(tmp_path)
    for step in range(1, 4):
        background.start(step, some_tensors(step), {})
        assert background.wait().saved  # type: ignore[union-attr]
    assert made == [background.num_bytes] and background.num_bytes >= 4 * 300 * 70
    folder = checkpointer.find(tmp_path)
    found = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in some_tensors().items()}
    checkpointer.load(folder, {name: GlobalTensor.whole(t) for name, t in found.items()})
    assert torch.equal(found["a"], some_tensors(3)["a"].pieces[0].tensor) and int(found["count"]) == 3
    assert json.loads((folder / "state.json").read_text())["step"] == 3


def test_a_full_disk_is_a_report_and_the_next_save_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for point in ("hash", "write", "shard", "manifest", "rename"):
        monkeypatch.setenv("MEGATRON_SP_FAULT", f"full:at=save.{point}:step=2")
        run = tmp_path / point
        checkpointer, background = saves(run, FaultPlan.from_env(True, 0))
        outcomes = []
        for step in (1, 2, 3):
            background.start(step, some_tensors(), {})
            outcomes.append(background.wait())
        assert [o.saved for o in outcomes if o] == [True, False, True], point
        assert "No space left" in outcomes[1].reason  # type: ignore[union-attr]
        assert checkpointer.find(run).name == "step-000003"
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step-000001", "step-000003"]


def test_a_mistake_shows_at_once_and_a_bug_where_somebody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer, background = saves(tmp_path)
    with pytest.raises(TypeError):
        background.start(1, some_tensors(), {"a set": {1}})
    with pytest.raises(ValueError, match="bytes are to be copied into"):
        background.start(1, {**some_tensors(), "more": GlobalTensor.whole(torch.zeros(99999))}, {})
    assert not background.in_flight
    monkeypatch.setattr(checkpointer, "write", lambda *_, **__: {}["bug"])
    background.start(1, some_tensors(), {})
    with pytest.raises(KeyError):
        background.wait()
    assert not background.in_flight


def test_one_at_a_time(tmp_path: Path) -> None:
    gate = Gate("save.write")
    _, background = saves(tmp_path, gate)
    background.start(1, some_tensors(), {})
    with pytest.raises(RuntimeError, match="no other save in flight"):
        background.start(2, some_tensors(), {})
    assert background.wait(0.0) is None and background.in_flight
    gate.open.set()  # type: ignore[attr-defined]
    assert background.wait().saved  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])
def test_memory_that_is_not_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: object) -> None:
        raise error

    background = BackgroundSaves(Checkpointer(tmp_path))
    assert "of host memory and 0.1 MiB are left" in str(background.reserve(some_tensors(), 70_000))
    monkeypatch.setattr(background_module, "host_empty", refuse)
    assert "could not be allocated" in str(background.reserve(some_tensors(), 10**9))
    with pytest.raises(RuntimeError, match="reserve"):
        background.start(1, some_tensors(), {})


@pytest.mark.parametrize(("of_rank", "threads"), [(2, 1), (3, 2)])
def test_a_save_in_the_background_leaves_cores_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_rank: int, threads: int) -> None:
    """A file is hashed and written by one thread, and files that go at once have an idle core each."""
    on_cores(monkeypatch, of_rank, 1)
    seen: dict[str, set[int]] = {point: set() for point in ("save.hash", "save.write", "save.shard")}
    together = threading.Barrier(threads)

    class Watch(Gate):
        def at(self, point: str, step: int) -> None:
            if point in seen:
                if threading.get_ident() not in seen["save.hash"]:
                    together.wait(PATIENCE_S)  # so many threads there are
                seen[point].add(threading.get_ident())

    _, background = saves(tmp_path, Watch(""), max_file_bytes=2000)
    background.start(1, some_tensors(), {})
    assert background.wait().saved and threading.get_ident() not in seen["save.hash"]  # type: ignore[union-attr]
    assert len(seen["save.hash"]) == threads and seen["save.hash"] == seen["save.write"] == seen["save.shard"]
    assert len(read_manifest(tmp_path / "checkpoints" / "step-000001").files) > 3


@pytest.mark.parametrize(("of_rank", "parts"), [(1, 1), (2, 2)])
def test_two_cores_copy_where_one_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_rank: int, parts: int) -> None:
    on_cores(monkeypatch, of_rank, 1)
    copied: dict[int, int] = {}
    original = background_module._copy

    def copy(moves: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        copied[threading.get_ident()] = copied.get(threading.get_ident(), 0) + sum(to.nbytes for to, _ in moves)
        original(moves)

    monkeypatch.setattr(background_module, "_copy", copy)
    _, background = saves(tmp_path)
    tensors = some_tensors()
    background.start(1, tensors, {})
    assert background.wait().saved  # type: ignore[union-attr]
    total = sum(copied.values())
    assert sum(n > 0 for n in copied.values()) == parts and total == sum(p.tensor.nbytes for t in tensors.values() for p in t.pieces)

    def fail(moves: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if threading.current_thread() is not threading.main_thread() and moves:
            raise RuntimeError("a tensor is gone")

    monkeypatch.setattr(background_module, "_copy", fail)
    if parts == 2:
        with pytest.raises(RuntimeError, match="a tensor is gone"):
            background.start(2, tensors, {})
