"""The GPU of a process, and the check that it is nobody else's."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from megatron_sp.utils.errors import ConfigError


def gpu_of(local_rank: int) -> torch.device:
    """Return the only visible GPU, or that of the local rank."""
    visible = torch.cuda.device_count()
    if visible == 1:
        return torch.device("cuda", 0)
    if local_rank >= visible:
        error = ConfigError(
            f"local rank {local_rank} has no GPU of its own: this process sees {visible}; start at most that many"
            " processes on a host (--nproc-per-node), let each see one alone (Slurm's --gpus-per-task=1), or use"
            " --device cpu"
        )
        error.on_all_ranks = local_rank != visible  # rank 0 has a GPU; the first rank beyond speaks for its host
        raise error
    return torch.device("cuda", local_rank)


def identity_of(device: torch.device) -> str:
    # a GPU's UUID, or else host and place on the bus; "" for a CPU
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None and str(uuid).strip("0-"):  # all zeros: the driver does not know it
        return f"GPU-{uuid}"
    place = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return f"{':'.join(map(str, place))} of {socket.gethostname()}" if None not in place else ""


def require_own_gpu(store: dist.Store, rank: int, world_size: int, identity: str) -> None:
    """Refuse on all ranks that two processes use one GPU. Collective."""
    # before NCCL is asked, which would hang: with each process seeing one GPU alone, as device 0, a wrong setting, such
    # as one CUDA_VISIBLE_DEVICES for all, shows only in the GPUs' identity
    if identity:
        owner = store.compare_set(f"gpu/{identity}", "", str(rank)).decode()
        if owner != str(rank):
            store.compare_set("gpu shared", "", f"ranks {owner} and {rank} use the same GPU ({identity})")
    if store.add("gpus compared", 1) == world_size:
        store.set("all gpus compared", "1")
    store.get("all gpus compared")  # waits
    if store.check(["gpu shared"]):
        raise ConfigError(
            f"{store.get('gpu shared').decode()}: each process needs one of its own. Let all processes of a host see"
            " all its GPUs, or each another one alone (CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task=1), and start no"
            " more processes than there are GPUs"
        )


def available_backends() -> dict[str, bool]:
    """Return which of gloo and nccl this torch has."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
