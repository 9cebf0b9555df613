"""Checkpoints written and read with one tensor in memory at a time."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.waiting import wait_until
from test_checkpoint import STATE, assert_loads, save_steps, weights, whole
from torch import Tensor

from megatron_sp.checkpoint import commit, stream
from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.lock import RunLock
from megatron_sp.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from megatron_sp.checkpoint.pieces import GlobalTensor, Piece
from megatron_sp.checkpoint.stream import FiniteTensors, NativeReader, Source, write_checkpoint
from megatron_sp.utils.errors import CheckpointError, DiskError, LockError


def sources(tensors: dict[str, Tensor]) -> dict[str, Source]:
    return {name: Source(tuple(t.shape), t.dtype, lambda t=t: t) for name, t in tensors.items()}


def counting(tensor: Tensor, calls: list[str], name: str) -> Source:
    def read() -> Tensor:
        calls.append(name)
        return tensor

    return Source(tuple(tensor.shape), tensor.dtype, read)


def test_what_is_streamed_out_loads_as_any_checkpoint(tmp_path: Path) -> None:
    told: list[int] = []
    folder = write_checkpoint(tmp_path / "new" / "run", 7, sources(weights(3)), STATE, progress=told.append)
    assert folder == tmp_path / "new" / "run" / "checkpoints" / "step-000007"
    assert_loads(folder, 3)
    checkpointer = Checkpointer(None)
    assert checkpointer.find(tmp_path / "new" / "run") == folder
    assert checkpointer.read_state(folder) == {**STATE, "format_version": 1, "step": 7}
    assert (folder.parent / "latest").read_text() == "step-000007\n"
    assert sorted(os.listdir(folder.parent.parent)) == ["checkpoints"]  # the lock was given back
    assert sum(told) == sum(t.numel() * t.element_size() for t in weights().values())
    assert read_manifest(folder).world_size == 1


def test_large_tensors_are_cut_over_files_and_read_once_or_twice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "large": torch.randn(33, 5),
        "small": torch.randn(8),
        "line": torch.randn(300),
        "wide": torch.randn(2, 200),
        "scalar": torch.ones(()),
    }
    calls: list[str] = []
    folder = write_checkpoint(tmp_path, 1, {name: counting(t, calls, name) for name, t in tensors.items()}, {}, max_file_bytes=256)
    sizes = [os.path.getsize(folder / name) for name in os.listdir(folder) if name.endswith(".safetensors")]
    assert len(sizes) > 8 and sum(size > 256 + 500 for size in sizes) == 2  # one row of "wide" is 800 bytes
    assert all(calls.count(name) <= 2 for name in tensors) and calls.count("small") == calls.count("scalar") == 1
    reader = NativeReader(folder)
    for name, tensor in tensors.items():
        assert torch.equal(reader.read(name), tensor), name
    found = {name: torch.zeros_like(t) for name, t in tensors.items()}
    Checkpointer(None).load(folder, whole(found))
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Any]] = []

    def read(value: int) -> Tensor:
        # the thread that hashes lets go of its last block a moment after it has said that it is done
        wait_until(lambda: all(ref() is None for ref in alive))
        array = np.full((64, 64), value, np.float32)
        alive.append(weakref.ref(array))
        return torch.from_numpy(array)

    tensors = {f"t{i}": Source((64, 64), torch.float32, lambda i=i: read(i)) for i in range(6)}
    folder = write_checkpoint(tmp_path, 1, tensors, {}, max_file_bytes=40_000)  # two to a file
    assert len(alive) == 6
    assert all(float(NativeReader(folder).read(f"t{i}").mean()) == i for i in range(6))


def test_reading_by_rows_from_rectangles_of_many_ranks(tmp_path: Path) -> None:
    torch.manual_seed(1)
    full = torch.randn(10, 6)
    quarters = [Piece((r, c), full[r : r + 5, c : c + 3]) for r in (0, 5) for c in (0, 3)]
    saved = Checkpointer(tmp_path).save(
        3, {"w": GlobalTensor((10, 6), torch.float32, quarters), "s": GlobalTensor.whole(torch.tensor(4))}, STATE
    )
    reader = NativeReader(saved.path or "")
    assert reader.tensors() == {"s": ((), torch.int64), "w": ((10, 6), torch.float32)}
    assert reader.tensors()["w"].num_bytes == 240 and reader.state["step"] == 3
    assert torch.equal(reader.read("w"), full) and int(reader.read("s")) == 4
    assert torch.equal(reader.read_rows("w", 3, 4), full[3:7]) and reader.read_rows("w", 10, 0).shape == (0, 6)
    blocks = list(reader.blocks("w", 80))
    assert [b.shape[0] for b in blocks] == [3, 3, 3, 1] and torch.equal(torch.cat(blocks), full)
    assert [int(b) for b in reader.blocks("s")] == [4]
    for first, count in ((-1, 2), (8, 3), (3, -1)):
        with pytest.raises(ValueError, match="has no rows"):
            reader.read_rows("w", first, count)


def flip_a_byte(folder: Path, shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def list_a_larger_tensor(folder: Path, shard: Path) -> None:
    listed = read_manifest(folder)
    tensors = {**listed.tensors, "layer.bias": ("BF16", (9,))}
    (folder / MANIFEST_NAME).write_bytes(Manifest(2, 1, listed.files, tensors).encode())


@pytest.mark.parametrize(("damage", "says"), [
    (flip_a_byte, "its contents have changed"), (lambda folder, shard: shard.unlink(), "is missing"),
    (list_a_larger_tensor, r"layer.bias \[9\] is not stored completely and once"),
])  # fmt: skip
def test_damage_is_not_read(tmp_path: Path, damage: Callable[[Path, Path], None], says: str) -> None:
    save_steps(tmp_path, 2)
    folder = tmp_path / "checkpoints" / "step-000002"
    damage(folder, folder / "rank00000-00000.safetensors")
    with pytest.raises(CheckpointError, match=says):
        NativeReader(folder)


def test_a_folder_with_checkpoints_is_left_alone(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    before = sorted(os.listdir(tmp_path / "checkpoints"))
    with pytest.raises(CheckpointError, match="has step-000002 already: name another folder"):
        write_checkpoint(tmp_path, 3, sources(weights()), STATE)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        write_checkpoint(tmp_path / "file", 3, sources(weights()), STATE)


def test_a_folder_that_a_job_writes_to_is_left_alone(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(LockError, match=f"pid {os.getpid()}"):
        write_checkpoint(tmp_path, 3, sources(weights()), STATE)
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk() -> Tensor:
        raise OSError(errno.ENOSPC, "No space left on device", "x.safetensors")

    def interrupted() -> Tensor:
        raise KeyboardInterrupt

    tensors = sources(weights())
    wrong = Source((3, 4), torch.float32, lambda: torch.zeros(4, 3))
    for source, error in ((full_disk, DiskError), (interrupted, KeyboardInterrupt)):
        with pytest.raises(error):
            write_checkpoint(tmp_path / "run", 3, {**tensors, "z": Source((2,), torch.float32, source)}, STATE)
        assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"z was announced as torch.float32 \[3, 4\], but is torch.float32 \[4, 3\]"):
        write_checkpoint(tmp_path / "run", 3, {**tensors, "z": wrong}, STATE)
    monkeypatch.setattr(commit, "free_bytes", lambda path: 10)
    with pytest.raises(DiskError, match=r"has 0\.0 MiB free"):
        write_checkpoint(tmp_path / "run", 3, tensors, STATE)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_write_left_is_cleared_away(tmp_path: Path) -> None:
    part = tmp_path / "checkpoints" / "step-000003.part-00ff"
    part.mkdir(parents=True)
    write_checkpoint(tmp_path, 3, sources(weights()), STATE)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-000003"]


def test_mistakes_of_the_caller_show_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="complex64"):
        write_checkpoint(tmp_path / "run", 1, {"c": Source((2,), torch.complex64, lambda: torch.zeros(2))}, {})
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path / "run", 1, sources(weights()), {"x": object()})
    assert os.listdir(tmp_path) == [] and stream.MAX_FILE_BYTES == 1 << 30


# Tensors that are not finite

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("numbers", "written", "message"), [
    ([1.0, NAN, NAN], torch.float32, "w has 2 NaN of 3 numbers: nothing can be trained"),
    ([-INF, 0.0], torch.float32, "w has 1 infinite of 2 numbers: "),
    ([INF, NAN], torch.bfloat16, "w has 1 NaN and 1 infinite of 2 numbers: "),
    ([7e4, -1e5, 1.0], torch.float16, r"w has 2 of 3 numbers that are too large for float16 \(up to 1e\+05\).*another --dtype; "),
])  # fmt: skip
def test_what_is_refused(numbers: list[float], written: torch.dtype, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        FiniteTensors(allow=False).look("w", torch.tensor(numbers), written)
    allowed = FiniteTensors(allow=True)
    allowed.look("w", torch.tensor(numbers), written)
    assert len(allowed.notes()) == 1 and message.startswith(allowed.notes()[0][:20])


@pytest.mark.parametrize(("numbers", "written"), [
    (torch.tensor([65510.0, -3.4e38]), torch.float32), (torch.tensor([65510.0]), torch.float16),  # is rounded to the largest
    (torch.tensor([7e4]), torch.bfloat16), (torch.empty(0), torch.float16), (torch.tensor([1 << 40]), torch.int64),
    (torch.tensor(1.0), torch.float16), (torch.ones(2).to(torch.float8_e4m3fn), torch.float8_e4m3fn),
])  # fmt: skip
def test_what_passes(numbers: torch.Tensor, written: torch.dtype) -> None:
    looks = FiniteTensors(allow=False)
    assert looks.look("w", numbers, written) is numbers and looks.notes() == []


def test_of_many_tensors_the_first_are_named() -> None:
    looks = FiniteTensors(allow=True)
    for number in range(11):
        looks.look(f"w{number}", torch.tensor([NAN]), torch.float32)
    assert len(looks.notes()) == 9 and looks.notes()[-1] == "3 more tensors have numbers that are not finite"
