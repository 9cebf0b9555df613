"""A failure on any one rank becomes the same failure on all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.object_collectives import RemoteError, all_ranks_agree
from megatron_sp.utils.errors import EXIT_DATA, EXIT_DISK, ConfigError, DataError, DiskError, ReportedError


def _one_fails(culprit: int) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    with pytest.raises(ReportedError) as caught, all_ranks_agree(group):
        if rank == culprit:
            raise DataError("/données/x.bin is missing: 数据")
    assert str(caught.value) == "/données/x.bin is missing: 数据"
    assert caught.value.exit_code == EXIT_DATA  # type: ignore[attr-defined]
    assert type(caught.value) is (DataError if rank == culprit else RemoteError)
    _still_in_step()


def _several_fail(culprits: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    with pytest.raises(ReportedError) as caught, all_ranks_agree(dist.group.WORLD):
        if rank in culprits:
            raise (DiskError if rank == min(culprits) else DataError)(f"trouble on {rank}")
    assert str(caught.value) == f"trouble on {min(culprits)}"
    assert caught.value.exit_code == EXIT_DISK  # type: ignore[attr-defined]
    if rank in culprits and rank != min(culprits):
        assert str(caught.value.__cause__) == f"trouble on {rank}"  # this rank's own trouble is not lost
    _still_in_step()


def _bug(culprit: int) -> None:
    rank = dist.get_rank()
    with pytest.raises(KeyError if rank == culprit else RemoteError) as caught, all_ranks_agree(dist.group.WORLD):
        if rank == culprit:
            {}["absent"]
    if rank != culprit:
        assert str(caught.value).endswith("KeyError: 'absent'\n") and "test_agree.py" in str(caught.value)  # where it happened
        assert caught.value.exit_code == 1  # type: ignore[attr-defined]
    _still_in_step()


def _nobody_fails() -> None:
    with all_ranks_agree(dist.group.WORLD):
        pass
    with all_ranks_agree(dist.group.WORLD):
        result = dist.get_rank()
    assert result == dist.get_rank()
    _still_in_step()


def _long_and_odd() -> None:
    rank = dist.get_rank()
    text = "é" * 9000 + "\ud800"
    with pytest.raises(ConfigError if rank == 1 else RemoteError) as caught, all_ranks_agree(dist.group.WORLD):
        if rank == 1:
            raise ConfigError(text)
    assert str(caught.value).startswith("é" * 4000)
    _still_in_step()


def _still_in_step() -> None:
    assert all_reduce(torch.ones(1), dist.group.WORLD) == dist.get_world_size()


def _all_failures(several: list[tuple[int, ...]]) -> None:
    _nobody_fails()
    for culprit in range(dist.get_world_size()):
        _one_fails(culprit)
        _bug(culprit)
    for culprits in several:
        _several_fail(culprits)


@pytest.mark.parametrize(("world_size", "several"), [(1, []), (2, [(0, 1)]), (3, [(1, 2), (0, 1, 2)])])
def test_a_failure_on_any_rank_is_the_same_on_all(tmp_path: Path, world_size: int, several: list[tuple[int, ...]]) -> None:
    run_ranks(_all_failures, world_size, tmp_path, several)


def test_messages_that_are_long_or_not_text(tmp_path: Path) -> None:
    run_ranks(_long_and_odd, 2, tmp_path)
