"""Where a run takes place: versions, device, hosts, layout. Written with each start, so that a report can tell what changed on a resume."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_sp import __version__


def versions() -> dict[str, str]:
    """Of this package and of what it stands on; CUDA's and NCCL's only where there is a GPU."""
    found = {"megatron_sp": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def environment(device: torch.device, hosts: Sequence[str], layout: dict[str, Any], attention: str) -> dict[str, Any]:
    """For metrics.jsonl.

    Args:
        device: of rank 0.
        hosts: of every rank.
        layout: as in a checkpoint.
        attention: the kernel in use.
    """
    return {
        "versions": versions(), "device": device_name(device), "hosts": dict(Counter(hosts)), "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}", "layout": layout, "attention": attention,
    }  # fmt: skip


def device_name(device: torch.device) -> str:
    """What the maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name() or platform.machine() or "CPU"


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Of the first processor; empty where the system does not say."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")), "")
