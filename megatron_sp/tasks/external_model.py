"""A model that is not ours, split by a schedule, as the training loop wants a model: units, specs, and a sum of token losses.

The model itself is not wrapped: this module has the same children under the same names, so checkpoints know them by the names they always
had. Logits are made for this rank's positions only; their loss is summed in fp32 or wider.
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
    """The adapter.

    Args:
        model: split; its forward takes ``input_ids``, ``attention_mask`` and perhaps ``token_type_ids``, and returns ``logits``.
        applied: what ``Schedule.apply`` made of it.
    Raises:
        ConfigError: the model has no list of blocks.
    """

    def __init__(self, model: nn.Module, applied: Applied) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self.model: nn.Module
        self.__dict__["model"] = model  # not as a child, which would put a name in front of all others
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
        """Where each parameter lies in the whole one."""
        return self.applied.specs

    def units(self) -> list[Unit]:
        """What is not in a block, then the blocks."""
        return self._units

    def unit_order(self, *, backward: bool) -> list[int]:
        """Units in the order in which a pass reads them."""
        return order_of(len(self.blocks), backward=backward)

    def attach_units(self, units: list[FlatUnit]) -> None:
        """Be told where the parameters are."""
        sharded = units[0].zero.stage == 3 and units[0].zero.group.size() > 1
        self._hooks.sharded = units if sharded else []

    def train(self, mode: bool = True) -> ExternalModel:
        super().train(mode)
        self.model.training = mode
        return self

    def forward(self, batch: MicroBatch, events: UnitEvents | None) -> tuple[Tensor, Tensor]:
        """(sum of masked token losses of this rank's positions; which of its tokens were right, summed with the same mask)."""
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
