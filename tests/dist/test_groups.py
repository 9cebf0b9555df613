"""The groups of a layout: who is in them, for every way to split a world."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.waiting import PATIENCE_S

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import ParallelGroups, destroy_process_group, groups_of_pairs, init_process_group
from megatron_sp.utils.launch import Launch

CPU = torch.device("cpu")


def _members(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(getattr(group, "process_group", group))


def _layout(tp: int, sp: int, cp: int, pp: int, check: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = ParallelGroups.create(CPU, tp_size=tp, sp_size=sp, cp_size=cp, pp_size=pp, check=check)
    places = torch.arange(world).view(pp, -1, cp, sp, tp)
    pp_rank, dp_rank, cp_rank, sp_rank, tp_rank = (int(at) for at in (places == rank).nonzero()[0])
    assert _members(groups.tp) == places[pp_rank, dp_rank, cp_rank, sp_rank].tolist()
    assert _members(groups.sp) == places[pp_rank, dp_rank, cp_rank, :, tp_rank].tolist()
    assert _members(groups.cp) == places[pp_rank, dp_rank, :, sp_rank, tp_rank].tolist()
    assert _members(groups.dp) == places[pp_rank, :, cp_rank, sp_rank, tp_rank].tolist()
    assert _members(groups.pp) == places[:, dp_rank, cp_rank, sp_rank, tp_rank].tolist()
    assert _members(groups.dp_cp_sp) == places[pp_rank, ..., tp_rank].flatten().tolist()
    assert _members(groups.pp_tp) == places[:, dp_rank, cp_rank, sp_rank].flatten().tolist()
    if pp == 1 or pp_rank not in (0, pp - 1):
        assert groups.ends is None
    else:
        assert groups.ends is not None and _members(groups.ends) == places[[0, -1]][..., tp_rank].flatten().tolist()
    assert _members(groups.world) == _members(groups.control) == list(range(world))
    assert (groups.rank, groups.world_size) == (rank, world)
    assert (groups.dp_rank, groups.dp_size) == (dp_rank, world // (tp * sp * cp * pp))
    assert (groups.pp_rank, groups.cp.rank(), groups.sp.rank(), groups.tp_rank) == (pp_rank, cp_rank, sp_rank, tp_rank)
    assert groups.is_first_of_replica == (pp_rank == cp_rank == sp_rank == tp_rank == 0)
    assert groups.mesh.mesh_dim_names == ("pp", "dp", "cp", "sp", "tp")
    for group in (groups.tp, groups.sp, groups.cp, groups.dp, groups.pp, groups.dp_cp_sp, groups.pp_tp, groups.ends):
        if group is not None:
            assert float(all_reduce(torch.tensor([float(rank)]), group)) == sum(_members(group))
        if group is not None and group.size() > 1 and not check:  # the time that run_ranks gave the world
            assert group._get_backend(CPU).options._timeout == timedelta(seconds=PATIENCE_S)
    groups.destroy()


@pytest.mark.parametrize("world, tp, sp, cp, pp", [
    (1, 1, 1, 1, 1), (2, 1, 1, 1, 1), (4, 2, 2, 1, 1), (4, 1, 2, 1, 1), (3, 1, 1, 3, 1), (4, 2, 1, 2, 1), (8, 2, 2, 2, 1),
    (4, 2, 1, 1, 2), (6, 2, 1, 1, 3), (8, 1, 2, 2, 2),
])  # fmt: skip
def test_members_and_their_timeout(tmp_path: Path, world: int, tp: int, sp: int, cp: int, pp: int) -> None:
    run_ranks(_layout, world, tmp_path, tp, sp, cp, pp, False)


@pytest.mark.parametrize("pp", [1, 2])
def test_members_of_checked_groups(tmp_path: Path, pp: int) -> None:
    run_ranks(_layout, 4 * pp, tmp_path, 1, 2, 2, pp, True)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("is_ring", [False, True])
def test_no_pipeline_rank_has_two_neighbours_in_a_group(p: int, is_ring: bool) -> None:
    """On NCCL a receive from one would hold up a send to the other."""
    steps = [(r, (r + 1) % p) for r in range(p if is_ring else p - 1)]
    found = groups_of_pairs({*steps, *((b, a) for a, b in steps)})
    assert len(found) == len({*steps, *((b, a) for a, b in steps)}) and len(set(found.values())) <= 6
    for number in set(found.values()):
        ranks = [rank for pair, group in found.items() if group == number for rank in pair]
        assert len(ranks) == len(set(ranks))


def _indivisible() -> None:
    words = r"world_size \(3\) must be a multiple of pp_size \* cp_size \* sp_size \* tp_size \(1 \* 2 \* 1 \* 2 = 4\)"
    with pytest.raises(ValueError, match=words):
        ParallelGroups.create(torch.device("cpu"), tp_size=2, cp_size=2)


def test_a_layout_that_does_not_fit(tmp_path: Path) -> None:
    run_ranks(_indivisible, 3, tmp_path)


def test_a_plain_python_process_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR"):
            monkeypatch.delenv(name)
    launch = Launch.from_env()
    assert launch == Launch(rank=0, local_rank=0, world_size=1, local_world_size=1, attempt=0)
    init_process_group(launch, torch.device("cpu"), "auto", timedelta(seconds=20))
    try:
        groups = ParallelGroups.create(torch.device("cpu"))
        assert groups.world_size == groups.dp_size == 1 and groups.dp_cp_sp.size() == 1
    finally:
        destroy_process_group()
    destroy_process_group()  # leaving twice is harmless
