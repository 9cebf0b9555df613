"""Collectives and their handles, on one rank and several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.sent_bytes import Wire

from megatron_sp.comm.collectives import all_reduce, all_reduce_async, all_to_all_async, barrier, broadcast


def _reduce() -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = torch.tensor([float(rank), -float(rank), 1.0])
    for op, want in (("sum", [sum(range(size)), -sum(range(size)), size]), ("max", [size - 1, 0, 1]), ("min", [0, 1 - size, 1])):
        mine = x.clone()
        assert all_reduce(mine, group, op) is mine  # type: ignore[arg-type]
        assert mine.tolist() == want
    handles = [all_reduce_async(x + i, group) for i in range(5)]  # in flight together, waited for in another order
    for i in (3, 0, 4, 1, 2):
        assert handles[i].wait()[2] == size * (1 + i)
    for group_src in range(size):
        mine = torch.full((3,), rank)
        assert broadcast(mine, group, group_src) is mine
        assert mine.tolist() == [group_src] * 3
    empty = torch.empty(0)
    assert all_reduce(empty, group) is empty
    barrier(group)
    handle = all_reduce_async(torch.ones(2, 3), group)
    handle.wait()
    with pytest.raises(RuntimeError, match=r"wait\(\) was called twice on all_reduce of \(2, 3\)"):
        handle.wait()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results(tmp_path: Path, world_size: int) -> None:
    run_ranks(_reduce, world_size, tmp_path)


def test_a_group_of_one_needs_no_backend_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone:
        def size(self) -> int:
            return 1

    def called(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a collective ran")

    for name in ("all_reduce", "broadcast", "barrier"):
        monkeypatch.setattr(dist, name, called)
    group: Any = Alone()
    x = torch.ones(2)
    assert all_reduce(x, group) is x and broadcast(x, group) is x and all_reduce_async(x, group).wait() is x
    barrier(group)
    assert x.tolist() == [1, 1]


def _sent() -> None:
    """Of uneven parts, what goes to others; of equal ones the same."""
    group, rank = dist.group.WORLD, dist.get_rank()
    with Wire(3) as wire:
        counts = [5 * to + rank for to in range(3)]
        receive = [5 * rank + source for source in range(3)]
        all_to_all_async(torch.ones(sum(counts)), counts, torch.empty(sum(receive)), receive, group).wait()  # type: ignore[arg-type]
    assert wire.calls["alltoall_base_"] == 1 and wire.num_bytes["alltoall_base_"] == 4 * (sum(counts) - counts[rank])
    with Wire(3) as wire:
        only = [4 if to == (rank + 1) % 3 else 0 for to in range(3)]
        source = [4 if of == (rank - 1) % 3 else 0 for of in range(3)]
        all_to_all_async(torch.ones(4, dtype=torch.bfloat16), only, torch.empty(4, dtype=torch.bfloat16), source, group).wait()  # type: ignore[arg-type]
    assert wire.num_bytes["alltoall_base_"] == 8
    with Wire(3) as wire:
        dist.all_to_all_single(torch.empty(6), torch.ones(6))
        all_to_all_async(torch.ones(0), [0] * 3, torch.empty(0), [0] * 3, group).wait()  # type: ignore[arg-type]
    assert wire.calls["alltoall_base_"] == 2 and wire.num_bytes["alltoall_base_"] == 16


def test_bytes_are_counted_below_every_wrapper(tmp_path: Path) -> None:
    run_ranks(_sent, 3, tmp_path)
