"""--async-save on a GPU: pinned copies on a stream of their own, taken of the weights as they were, while the device goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_sp.checkpoint.background import BackgroundSaves, HostCopy
from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.pieces import GlobalTensor, Piece
from megatron_sp.checkpoint.safetensors_file import NamedPiece

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def weights(value: float, count: int = 4) -> dict[str, GlobalTensor]:
    """64 MiB each, one of them on the host and one a part of a tensor that is not contiguous."""
    found = {f"w{i}": GlobalTensor.whole(torch.full((4096, 4096), value + i, device=CUDA)) for i in range(count)}
    found["host"] = GlobalTensor.whole(torch.full((1000,), value))
    wide = torch.full((512, 512), value, device=CUDA)
    found["columns"] = GlobalTensor((512, 256), torch.float32, [Piece((0, 0), wide[:, :256])])
    return found


def items_of(tensors: dict[str, GlobalTensor]) -> list[NamedPiece]:
    return [NamedPiece(name, tensor.shape, piece) for name, tensor in tensors.items() for piece in tensor.pieces]


def test_the_copy_is_of_the_values_that_were_there() -> None:
    """What the current stream still has to compute comes before the copy, what it is given after join() after it."""
    items = items_of(weights(0.0))
    copy = HostCopy(items)
    assert copy._memory.is_pinned()
    for round_ in range(3):
        for item in items:
            for _ in range(20):  # not done when the copy is asked for
                item.piece.tensor.add_(1.0)
        copies = copy.take(items)
        copy.join()
        for item in items:
            if item.piece.tensor.is_cuda:
                item.piece.tensor.add_(1000.0)
        copy.wait()
        for item, there in zip(items, copies, strict=True):
            first = float(item.name[1:]) if item.name.startswith("w") else 0.0
            passed = round_ * (1020.0 if item.piece.tensor.is_cuda else 20.0)
            assert there.piece.tensor.device.type == "cpu" and (there.piece.tensor == first + 20.0 + passed).all(), item.name
    torch.cuda.synchronize()


def test_a_save_in_the_background_is_that_of_its_step(tmp_path: Path) -> None:
    tensors = weights(3.0)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.prepare()
    background = BackgroundSaves(checkpointer)
    assert background.reserve(tensors) is None
    background.start(1, tensors, {})
    background.join()
    for tensor in tensors.values():
        tensor.pieces[0].tensor.fill_(-1.0)
    report = background.wait()
    assert report is not None and report.saved and report.path is not None
    found = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    checkpointer.load(report.path, {name: GlobalTensor.whole(t) for name, t in found.items()})
    assert all((found[f"w{i}"] == 3.0 + i).all() for i in range(4)) and (found["columns"] == 3.0).all() and (found["host"] == 3.0).all()
