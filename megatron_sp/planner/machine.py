"""Model of a machine: placement of ranks on nodes, and the time of a collective."""

# Ranks are numbered node by node, and the axes run pp, dp, cp, sp, tp from slowest to fastest (``comm/groups.py``), so
# a tp group lies within a node if it fits, an sp group if tp * sp does, a cp group if tp * sp * cp does, and the group
# of dp x cp x sp spans all nodes with gpus_per_node / tp ranks on each.
#
#     ring          (all_gather, reduce_scatter, all_reduce) bytes of a rank / the lower bandwidth of: its link within
#                   the node; the network cards of the group's ranks on a node together, since each byte crosses once
#     all_to_all    the longer time of: bytes for the own node over the link within it; those for other nodes over the
#                   rank's own share of the cards
#     send (pp)     the rank's own share of the cards, unless all stages are on one node
#
# Latency: that of the link, and a step for each further rank (an all_reduce of small tensors goes down and up a tree).

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_sp.estimate.memory_plan import cublas_workspaces
from megatron_sp.planner.hardware import Gpu, Link


@dataclass(frozen=True)
class Machine:
    """Machine of a planned run: nodes with the same number of GPUs each."""

    gpu: Gpu
    gpus: int
    nodes: int
    inside: Link
    between: Link | None  # nodes; None with one
    cards: int  # network cards of a node
    memory_bytes: int  # of a GPU, that a program can allocate
    reserve_gib: float | None = None  # for anything but tensors; None: computed by ``reserve``

    @property
    def per_node(self) -> int:
        # GPUs of a node
        return self.gpus // self.nodes

    @property
    def is_cpu(self) -> bool:
        # true if there are no GPUs: processes on CPUs
        return self.gpu.units == 0

    def ranks_on_node(self, group: str, ranks: int, tp: int, sp: int = 1) -> int:
        # number of a group's ranks on one node; ``sp`` matters to cp alone
        if group == "pp":  # farthest apart
            return max(1, min(ranks, self.per_node * ranks // self.gpus))
        if group == "ends":  # of the first and the last stage, which share nodes only where all ranks do
            return max(1, min(ranks if self.nodes == 1 else ranks // 2, self.per_node // tp))
        axes, _, ep = group.partition(" / ")
        if ep:  # ranks that have the same experts: every so many ranks that have other tokens
            return max(1, min(ranks, self.per_node // (int(ep) * (1 if axes.endswith("tp") else tp))))
        strides = {"sp": tp, "cp": tp * sp, "dp x sp": tp, "dp x cp x sp": tp, "ep within dp x cp x sp": tp}
        stride = strides.get(group, 1)  # tp, world, pp x tp, ep, sequence, tokens: neighbours
        return max(1, min(ranks, self.per_node // stride))

    def crosses(self, group: str, ranks: int, tp: int, sp: int = 1) -> bool:
        # whether a group of ranks spans several nodes
        return self.ranks_on_node(group, ranks, tp, sp) < ranks

    def link_of(self, group: str, ranks: int, tp: int, sp: int = 1) -> Link:
        # link that limits a group of ranks
        if self.between is not None and self.crosses(group, ranks, tp, sp):
            return self.between
        return self.inside

    def seconds(self, op: str, group: str, ranks: int, tp: int, number: int, num_bytes: float, sp: int = 1) -> float:
        # time of ``number`` collectives in which a rank sends ``num_bytes`` in total
        if ranks == 1 or number == 0:
            return 0.0
        link = self.link_of(group, ranks, tp, sp)
        steps = 1 if op == "send" else ranks - 1
        if op == "all_reduce":
            steps = min(2 * steps, 4 * math.ceil(math.log2(ranks)))
        latency = number * (link.latency_us + link.step_us * steps) * 1e-6
        return latency + num_bytes / self.rate(op, group, ranks, tp, sp)

    def rate(self, op: str, group: str, ranks: int, tp: int, sp: int = 1) -> float:
        # bytes per second that a rank sends
        inside = self.inside.gbs * 1e9
        near = self.ranks_on_node(group, ranks, tp, sp)
        if near == ranks or self.between is None:
            return inside
        card = self.between.gbs * 1e9 * self.cards / self.per_node  # a rank's share
        if op == "send":
            return card
        if op == "all_to_all":
            outside = (ranks - near) / (ranks - 1)
            return 1 / max(outside / card, (1 - outside) / inside)
        return min(inside, card * near) if near > 1 else card


def cards_of(between: Link | None, per_node: int) -> int:
    """Return the usual number of network cards of a node: one for each GPU, of Ethernet up to 100 Gbit/s one."""
    return per_node if between is None or between.per_gpu else 1


# GiB of a process besides tensors and cuBLAS's workspaces: the driver's context and kernels; NCCL's buffers of a group
CONTEXT_GIB, GROUP_GIB = 0.7, 0.35
FRAGMENTS = 0.04  # share of the tensors' peak that the allocator loses to fragmentation
CPU_PROCESS_GIB = 0.35  # Python and torch


def reserve(machine: Machine, peak_bytes: int, groups: int) -> int:
    """Return the bytes of a GPU reserved for anything but tensors, with so many communicators of several ranks."""
    if machine.reserve_gib is not None:
        return int(machine.reserve_gib * 2**30)
    if machine.is_cpu:
        return int(CPU_PROCESS_GIB * 2**30)
    beside = cublas_workspaces(machine.gpu.capability).num_bytes
    return int((CONTEXT_GIB + GROUP_GIB * groups) * 2**30 + FRAGMENTS * peak_bytes) + beside
