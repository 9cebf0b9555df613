"""Routers in a training step: contexts, the passes that count first, and what is reported of the load."""

# The balance of a step is said in three numbers, over all layers: the largest load of an expert as a multiple of the
# mean, how many experts had no token, and the entropy of the loads as a share of that of even ones.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_sp.optim.weights import WholeWeights
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch

if TYPE_CHECKING:
    from megatron_sp.parallel.router_pass import RouterStep


def with_routers(
    context: ForwardContext, routers: RouterStep, batch: MicroBatch, replayed: Tensor | None = None
) -> ForwardContext:
    rows, length = batch["tokens"].shape
    return replace(context, routers=routers.micro_batch(rows, length, replayed))


def count_first(
    routers: RouterStep, model: nn.Module, weights: WholeWeights, num_micro_batches: int, run: Callable[[int], Any]
) -> None:
    """Run forward passes without gradients, if the loads must be known before. Collective."""
    if not routers.counts_first:
        return
    with routers.counting(), torch.no_grad():
        weights.start_step(num_micro_batches, model.unit_order(backward=False))  # type: ignore[operator]
        for index in range(num_micro_batches):
            run(index)


@dataclass(frozen=True)
class RouterReport:
    loads: list[list[int]]  # tokens of each expert, for each layer with experts
    balance: float | None  # balance term, the mean over layers, 1 for even loads; None: there is none
    z: float | None  # z term, the mean over layers; None: there is none

    @classmethod
    def of(cls, routers: RouterStep, values: Sequence[float], sequences: float, tokens: float) -> RouterReport:
        """Build the report from all ranks' counters."""
        layers, experts = routers.loads.shape
        by = tokens**2 if routers.spec.kind == "global" else sequences
        loads = [[int(load) for load in values[2 + i * experts : 2 + (i + 1) * experts]] for i in range(layers)]
        balance = values[0] / max(by, 1.0) / layers if routers.spec.kind != "none" else None
        return cls(loads, balance, values[1] / max(tokens, 1.0) / layers if routers.spec.z else None)

    @property
    def largest(self) -> list[float]:
        """Largest load of an expert in each layer, relative to the mean."""
        return [max(layer) * len(layer) / max(1, sum(layer)) for layer in self.loads]

    @property
    def idle(self) -> int:
        return sum(load == 0 for layer in self.loads for load in layer)

    @property
    def evenness(self) -> float:
        # entropy of the loads as a share of that of even loads, the mean over layers
        shares = []
        for layer in self.loads:
            if sum(layer) and len(layer) > 1:
                entropy = -sum(load / sum(layer) * math.log(load / sum(layer)) for load in layer if load)
                shares.append(entropy / math.log(len(layer)))
        return sum(shares) / len(shares) if shares else 1.0

    def record(self) -> dict[str, Any]:
        largest = self.largest
        return {
            "expert_load_max": max(largest), "experts_idle": self.idle, "expert_entropy": self.evenness,
            "balance_loss": self.balance, "z_loss": self.z,
            "expert_load_max_by_layer": [round(each, 4) for each in largest],
            "experts_idle_by_layer": [layer.count(0) for layer in self.loads],
        }  # fmt: skip
