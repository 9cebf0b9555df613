"""Adapter of an external model, sharded by a schedule, to the training loop: units, specs, and a sum of token losses.

The model is not wrapped: this module has the same children under the same names, so that names in checkpoints do not
change. Logits are computed for this rank's positions only; their loss is summed in fp32 or wider.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.optim.flat import FlatUnit
from megatron_sp.parallel.forward_context import MicroBatch, Unit, UnitEvents
from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.apply.units import UnitHooks, find_blocks, order_of, units_of
from megatron_sp.utils.errors import ConfigError


class ExternalModel(nn.Module):
    """Adapter of an external model to the training loop.

    Args:
        model: sharded model; its forward takes ``input_ids`` and, where the data need them, ``attention_mask`` and
            ``token_type_ids``, and returns ``logits``.
        applied: result of ``Schedule.apply``.
    Raises:
        ConfigError: the model has no list of blocks.
    """

    def __init__(self, model: nn.Module, applied: Applied) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self.model: nn.Module
        self.__dict__["model"] = model  # not as a child, which would put a name before all others
        self.applied = applied
        self.blocks = find_blocks(model)
        if not self.blocks:
            raise ConfigError(
                f"{type(model).__name__} has no list of two or more blocks of one class, which would be the units of training"
            )
        self._hooks = UnitHooks(model, self.blocks)
        self._units = units_of(model, self.blocks)

    @property
    def parameter_specs(self) -> dict[str, ShardSpec]:
        """Placement of each parameter's shard in the whole parameter, by name."""
        return self.applied.specs

    def units(self) -> list[Unit]:
        """Return the units: everything outside the blocks, then the blocks."""
        return self._units

    def unit_order(self, *, backward: bool) -> list[int]:
        """Return the units in the order in which a pass reads them."""
        return order_of(len(self.blocks), backward=backward)

    def attach_units(self, units: list[FlatUnit]) -> None:
        """Pass the flat units to the hooks, which gather parameters at ZeRO stage 3."""
        sharded = units[0].zero.stage == 3 and units[0].zero.group.size() > 1
        self._hooks.sharded = units if sharded else []

    def train(self, mode: bool = True) -> ExternalModel:
        """Set training mode; the model's own switch follows."""
        super().train(mode)
        self.model.training = mode
        return self

    def forward(self, batch: MicroBatch, events: UnitEvents | None) -> tuple[Tensor, Tensor]:
        """Return (sum of token losses, number of correct tokens) at this rank's positions, both weighted with the loss mask."""
        self._hooks.events = events
        self._hooks.forget()
        tokens = batch["tokens"]
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if "length" in batch:
            lengths = batch["length"].to(tokens.device)
            given["attention_mask"] = (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]).long()
        if "types" in batch:
            given["token_type_ids"] = batch["types"]
        logits = self.model(**given)["logits"]
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        labels, mask = batch["labels"], batch["loss_mask"].to(logits.dtype)
        if self.applied.ulysses is not None:
            labels, mask = (self.applied.ulysses.take(t) for t in (labels, mask))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        hits = (logits.detach().argmax(-1) == labels).to(mask.dtype)
        return (losses * mask.flatten()).sum(), (hits * mask).sum()
