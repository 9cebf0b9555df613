"""Which GPU a process takes, and that two with the same one are refused before NCCL is asked."""

from __future__ import annotations

import os
from datetime import timedelta
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.waiting import PATIENCE_S

from megatron_sp.comm import groups as groups_module
from megatron_sp.comm.devices import gpu_of, identity_of, require_own_gpu
from megatron_sp.comm.groups import init_process_group
from megatron_sp.utils.errors import ConfigError
from megatron_sp.utils.launch import Launch


def sees(monkeypatch: pytest.MonkeyPatch, count: int, **properties: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))


@pytest.mark.parametrize("visible, local_rank, index", [(8, 0, 0), (8, 7, 7), (1, 0, 0), (1, 3, 0)])
def test_the_only_one_or_that_of_the_local_rank(monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, index: int) -> None:
    sees(monkeypatch, visible)
    assert gpu_of(local_rank) == torch.device("cuda", index)


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    sees(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"local rank 2 has no GPU of its own: this process sees 2; start at most .*--gpus-per-task=1"):
        gpu_of(2)
    for local_rank, speaks in ((2, True), (3, False)):  # rank 0 has a GPU: the first one beyond says it, once for a host
        with pytest.raises(ConfigError) as error:
            gpu_of(local_rank)
        assert error.value.on_all_ranks is not speaks


def test_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0 of one process and device 0 of another may be one GPU or two."""
    gpu = torch.device("cuda", 0)
    assert identity_of(torch.device("cpu")) == ""
    sees(monkeypatch, 1, uuid="1f3e", pci_bus_id=7)
    assert identity_of(gpu) == "GPU-1f3e"
    sees(monkeypatch, 1, pci_domain_id=0, pci_bus_id=7, pci_device_id=1)
    assert identity_of(gpu) == f"0:7:1 of {os.uname().nodename}"
    sees(monkeypatch, 1, uuid="00000000-0000-0000-0000-000000000000", pci_domain_id=0, pci_bus_id=7, pci_device_id=1)
    assert identity_of(gpu) == f"0:7:1 of {os.uname().nodename}", "a driver that does not know"
    sees(monkeypatch, 1)
    assert identity_of(gpu) == "", "nothing is known, so nothing is compared"


def compared(identities: list[str]) -> list[str]:
    """What each rank says."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=PATIENCE_S))
    said = [""] * len(identities)

    def one(rank: int) -> None:
        try:
            require_own_gpu(store, rank, len(identities), identities[rank])
        except ConfigError as error:
            said[rank] = str(error)

    threads = [Thread(target=one, args=(rank,)) for rank in range(len(identities))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    return said


def test_each_its_own() -> None:
    assert compared(["GPU-a", "GPU-b", "GPU-c"]) == ["", "", ""]
    assert compared(["", "", "GPU-c"]) == ["", "", ""]


@pytest.mark.parametrize("identities", [["GPU-a", "GPU-a"], ["GPU-b", "GPU-a", "GPU-c", "GPU-a"], ["GPU-a", "GPU-b", "GPU-a", "GPU-b"]])
def test_a_shared_one_is_an_error_on_every_rank(identities: list[str]) -> None:
    said = compared(identities)
    assert len(set(said)) == 1 and "use the same GPU (GPU-" in said[0] and "CUDA_VISIBLE_DEVICES" in said[0]


def test_it_is_compared_before_the_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's communicator is made with the group; without a GPU, or alone, there is nothing to compare."""
    order: list[str] = []
    monkeypatch.setattr(groups_module, "fresh_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(groups_module, "identity_of", lambda device: f"GPU-{device}")
    monkeypatch.setattr(groups_module, "require_own_gpu", lambda _store, *given: order.append(str(given)))
    monkeypatch.setattr(groups_module.dist, "init_process_group", lambda backend, **_: order.append(backend))
    for device, world_size in (("cuda:0", 2), ("cuda:0", 1), ("cpu", 2)):
        launch = Launch(1 if world_size > 1 else 0, 1, world_size, world_size, 0, ("here", 1))
        init_process_group(launch, torch.device(device), "auto", timedelta(seconds=1))
    assert order == ["(1, 2, 'GPU-cuda:0')", "nccl", "nccl", "gloo"]
