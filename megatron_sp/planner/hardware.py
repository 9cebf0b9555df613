"""Specifications of the GPUs and links that the planner knows: peak rates, and the rates that training achieves."""

# Peaks are data-sheet values (dense, not sparse). Achieved rates are measured or published where ``source`` says so,
# else a typical share of the peak; each such share is a separate field, so that it is visible and can be changed.
# Attention rates count causal pairs only. Nothing here is more accurate than about 10%: clocks depend on power and
# cooling.

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from megatron_sp.utils.errors import ConfigError

GIB = 2**30
SUSTAINED = 0.88
"""Fitted to ten published runs on A100s with short sequences, and tested on others: ``benchmarks/plan_check.py``."""
HOST_MS = 6.0
"""Measured beside an H200: 79.5 ms of 12 layers with 16K tokens, 80 with 64, 225 to 325 of 32 layers with Ulysses."""


@dataclass(frozen=True)
class Gpu:
    """Specification of one accelerator, or of one CPU process."""

    name: str
    memory_bytes: int  # that a program can allocate on an otherwise idle device; 0: determined from the host
    peak_tflops: float  # dense bf16 peak for MFU (for a CPU: measured)
    matmul_tflops: float  # achieved rate of large products
    attention_forward_tflops: float  # achieved with head size 128 and long sequences, counting causal pairs only
    attention_backward_tflops: float
    memory_gbs: float  # that elementwise kernels read and write
    units: int  # multiprocessors, for the wave quantization of matrix products; 0: not modelled
    link: str  # between the GPUs of a node
    source: str  # of the figures
    narrow_heads: float = 0.8  # share of attention's rates with head size 64
    flash2_share: float = 1.0  # share of them that FlashAttention 2 achieves, and torch's flash kernel, which is one
    launch_us: float = 3.0  # of a kernel, on the device
    host_ms: float = HOST_MS  # of Python for a layer of a micro-batch, forward and backward, without exchanges
    host_gbs: float = 48.0  # copies from and to pinned host memory, per direction, all GPUs of a node at once (PCIe 5)
    overlap_cost: float = 0.15  # slowdown of the computation that hides communication, of the hidden time
    sustained: float = SUSTAINED  # of its kernels' rates: clocks under load, gaps between kernels, the slowest rank
    activation_gbs: float = 0.0  # ``memory_gbs`` of the MLP's activation and of the optimizer, where they differ
    update_gbs: float = 0.0
    capability: tuple[int, int] = (8, 0)  # decides what cuBLAS works in


@dataclass(frozen=True)
class Link:
    """Link between GPUs or nodes."""

    name: str
    peak_gbs: float  # of one GPU (within a node) or of one network card (between nodes), per direction
    achieved: float  # share of the peak that large collectives achieve
    latency_us: float  # of a collective before the first byte
    step_us: float  # more for each further rank of a ring
    between_nodes: bool
    source: str
    per_gpu: bool = True  # a node has one for each GPU; else one in all

    @property
    def gbs(self) -> float:
        """Achieved bandwidth in GB/s."""
        return self.peak_gbs * self.achieved


_A100 = "data sheet; matmul 260 of 312 as reported for training shapes; FlashAttention-2's own figures; memory 0.85 of "
_REACHED = "matmul, attention and memory: shares of the peak that are usual, not measured here"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40g", int(39.4 * GIB), 312, 260, 190, 165, 1320, 108, "nvlink3",
            _A100 + "1555 GB/s; host: PCIe 4, 24 of 32 GB/s", host_gbs=24.0),
        Gpu("a100-80g", int(79.2 * GIB), 312, 260, 190, 165, 1730, 108, "nvlink3",
            _A100 + "2039 GB/s; host: PCIe 4, 24 of 32 GB/s", host_gbs=24.0),
        Gpu("h100-80g", int(79.1 * GIB), 989, 700, 600, 540, 2800, 132, "nvlink4",
            "SXM data sheet; matmul 700 of 989 (power-limited); cuDNN and FlashAttention-3 as published, version 2"
            " beside it (arXiv:2407.08608); memory 0.84 of 3350 GB/s", flash2_share=0.58, capability=(9, 0)),
        Gpu("h200", int(139.7 * GIB), 989, 740, 625, 550, 4100, 132, "nvlink4",
            "data sheet; one measured: matmul 769 to 798 alone and 720 to 766 in a step, copies 4300 GB/s, here less"
            " for a hot GPU; cuDNN at 64K tokens; steps of 124M to 7B parameters take 1.04 of what these rates say",
            flash2_share=0.56, sustained=0.96, capability=(9, 0)),
        Gpu("b200", int(178.0 * GIB), 2250, 1600, 1400, 1150, 6800, 148, "nvlink5",
            "data sheet; FlashAttention-4's 1605 forward at its best, version 2 about as fast as on an H100; "
            + _REACHED, flash2_share=0.25, capability=(10, 0)),
        Gpu("l40s", int(44.4 * GIB), 362, 230, 180, 150, 730, 142, "pcie4", "data sheet; " + _REACHED, host_gbs=24.0,
            overlap_cost=0.1, capability=(8, 9)),
        Gpu("mi300x", int(191.5 * GIB), 1307, 640, 450, 300, 4000, 304, "xgmi",
            "data sheet; matmul about half of the peak, as several have published; " + _REACHED),
    )
}  # fmt: skip
"""By name. ``cpu-core`` is not among them: it is measured when it is asked for (``planner/calibrate.py``)."""
CPU = "cpu-core"

_FRACTION = "data sheet; share of it usual for collectives of many MB"
LINKS = {
    link.name: link
    for link in (
        Link("nvlink3", 300, 0.75, 12, 1.5, False, "A100: 12 links of 25 GB/s; 225 GB/s reported for all-to-all"),
        Link("nvlink4", 450, 0.76, 12, 1.5, False, "H100, H200: 18 links of 25 GB/s; 340 GB/s reported for all-to-all"),
        Link("nvlink5", 900, 0.76, 12, 1.5, False, "B200: 18 links of 50 GB/s; share as its predecessor's"),
        Link("xgmi", 448, 0.65, 15, 2, False, "MI300X: 7 links of 64 GB/s; " + _FRACTION),
        Link("pcie4", 32, 0.65, 15, 3, False, "16 lanes; through the host's switches"),
        Link("pcie5", 64, 0.65, 15, 3, False, "16 lanes; through the host's switches"),
        Link("ib-200g", 25, 0.84, 20, 4, True, "HDR; " + _FRACTION),
        Link("ib-400g", 50, 0.84, 20, 4, True, "NDR; 42 GB/s reported"),
        Link("ib-800g", 100, 0.84, 20, 4, True, "XDR; share as its predecessor's"),
        Link("eth-1g", 0.125, 0.92, 60, 40, True, "TCP; 118 MB/s less headers", per_gpu=False),
        Link("eth-10g", 1.25, 0.85, 50, 25, True, "TCP", per_gpu=False),
        Link("eth-25g", 3.125, 0.80, 50, 25, True, "TCP", per_gpu=False),
        Link("eth-100g", 12.5, 0.75, 40, 15, True, "TCP with several sockets, or RoCE", per_gpu=False),
        Link("eth-400g", 50, 0.78, 25, 6, True, "RoCE; a card for each GPU"),
    )
}  # fmt: skip


def find_gpu(name: str, flag: str = "--gpu") -> Gpu:
    """Return the GPU of that name. Raises ConfigError, with the nearest names, if it is unknown."""
    return _find(name, GPUS, flag, (CPU,) if flag == "--gpu" else ())


def find_link(name: str, flag: str, between_nodes: bool) -> Link:
    """Return the link of that name. Raises ConfigError, with near names, if it is unknown or of the other kind."""
    link = _find(name, LINKS, flag)
    if link.between_nodes != between_nodes:
        place, names = ("nodes", True) if between_nodes else ("the GPUs of a node", False)
        fitting = ", ".join(other.name for other in LINKS.values() if other.between_nodes == names)
        raise ConfigError(f"{flag} {name} does not join {place}: use one of {fitting}")
    return link


_Entry = TypeVar("_Entry")


def _find(name: str, table: Mapping[str, _Entry], flag: str, more: Iterable[str] = ()) -> _Entry:
    if name in table:
        return table[name]
    names = [*table, *more]
    begun = [other for other in names if other.startswith(name.lower())]
    alike = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    near = begun or alike or [n for n in names if n[:2] == name.lower()[:2]]
    meant = f": did you mean {' or '.join(near)}" if near else ""
    raise ConfigError(f"{flag} {name} is unknown{meant}{'?' if near else '.'} Known are {', '.join(names)}")
