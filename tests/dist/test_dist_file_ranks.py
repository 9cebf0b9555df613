"""Folders that several ranks write with torch.distributed.checkpoint, read on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_sp.convert.archive.dist_folder import DistFolder

SHAPES = {"rows": (7, 3), "columns": (4, 5), "both": (6, 2), "few": (1, 4)}


def full(name: str) -> torch.Tensor:
    return torch.arange(torch.Size(SHAPES[name]).numel(), dtype=torch.float32).view(SHAPES[name]) + len(name)


def save(world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    places = {"rows": Shard(0), "columns": Shard(1), "both": Replicate(), "few": Shard(0)}
    state = {name: distribute_tensor(full(name), mesh, [places[name]]) for name in SHAPES}
    dcp.save(state | {"half": full("rows").bfloat16(), "step": 7}, checkpoint_id=folder)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_what_ranks_save_is_read_whole(tmp_path: Path, world_size: int) -> None:
    run_ranks(save, world_size, tmp_path, world_size, tmp_path / "a")
    folder = DistFolder(tmp_path / "a")
    for name in SHAPES:
        assert torch.equal(folder.read(name), full(name)), name
    assert len(folder.tensors["columns"].chunks) == world_size and folder.read_object("step") == 7
    assert torch.equal(folder.read("half"), full("rows").bfloat16())
