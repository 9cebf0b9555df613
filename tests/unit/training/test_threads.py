"""How many threads a process computes with."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from megatron_sp.config.schema import Config, KernelConfig
from megatron_sp.training.setup import set_threads
from megatron_sp.utils.launch import Launch


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("ranks, variable, flag, threads", [
    (1, None, None, 6), (1, "2", None, 2), (1, "3,2", None, 3), (1, "2", 1, 1), (1, "0", None, 6), (1, "many", None, 6), (1, "", None, 6),
    (2, None, None, 3), (2, "1", None, 3), (2, "1", 2, 2), (9, "1", None, 1),
])  # fmt: skip
def test_set_threads(monkeypatch: pytest.MonkeyPatch, ranks: int, variable: str | None, flag: int | None, threads: int) -> None:
    """OMP_NUM_THREADS counts for one process alone; for several it is torchrun's doing."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    config = Config(kernels=KernelConfig(num_threads=flag))
    assert set_threads(config, Launch(0, 0, ranks, ranks, 0)) == torch.get_num_threads() == threads
