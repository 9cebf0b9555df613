"""Environment of a run: versions, device, hosts, layout. Recorded at each start, so that a report can show what changed on a resume."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_sp import __version__


def versions() -> dict[str, str]:
    """Return the versions of this package, torch and Python, and of CUDA and NCCL where there is a GPU."""
    found = {"megatron_sp": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def environment(
    device: torch.device, hosts: Sequence[str], layout: dict[str, Any], attention: str, kernels: dict[str, str]
) -> dict[str, Any]:
    """Return the description of the environment for ``metrics.jsonl``.

    Args:
        device: device of rank 0.
        hosts: host name of every rank.
        layout: layout record, as in a checkpoint.
        attention: name of the attention kernel.
        kernels: whose fused kernels compute AdamW and the norms, by op.
    """
    return {
        "versions": versions(), "device": device_name(device), "hosts": dict(Counter(hosts)), "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}", "layout": layout, "attention": attention,
        "kernels": kernels,
    }  # fmt: skip


def device_name(device: torch.device) -> str:
    """Return the vendor's name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name() or platform.machine() or "CPU"


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the first processor; empty if the system does not report it."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")), "")
