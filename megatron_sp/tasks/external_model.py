"""Adapter of an external model, sharded by a schedule, to the training loop: units, specs, and a sum of token losses.

The model is not wrapped: this module has the same children under the same names, so that names in checkpoints do not
change. Logits are computed for this rank's positions only; their loss is summed in fp32 or wider.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.config.schema import ModelConfig
from megatron_sp.estimate.flops import seen_share
from megatron_sp.optim.flat import FlatUnit
from megatron_sp.parallel.forward_context import MicroBatch, Unit, UnitEvents
from megatron_sp.schedule.apply.applied import Applied
from megatron_sp.schedule.apply.units import UnitHooks, find_blocks, order_of, units_of
from megatron_sp.utils.errors import CheckpointError, ConfigError

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_OF_PROGRAMS = (
    "transformers_version", "architectures", "dtype", "use_cache", "output_", "return_dict", "tokenizer_class",
    "bos_token_id", "eos_token_id", "id2label", "label2id",
)  # fmt: skip
"""In names of entries that do not change what is trained. Dropout may differ from one process of a run to the next."""
_OF_LENGTHS = ("rope", "rotary", "max_position_embeddings", "sliding_window", "layer_types")
"""In names of entries that a new run may change."""


def _entries(config: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if name.startswith("_") or "drop" in name or any(part in name for part in _OF_PROGRAMS):
            continue
        if isinstance(value, dict):
            yield f"{place}{name}", "entries"  # where the other one may have nothing
            yield from _entries(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def count_products(model: nn.Module) -> float:
    """Return the multiply-adds of a model's matrices for one token: tables are looked up, and some experts chosen."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    number = next((n for name in _NUM_EXPERTS if isinstance(n := getattr(text, name, None), int) and n), 0)
    chosen = getattr(text, "num_experts_per_tok", None) or number
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in tables:
            found += parameter.numel() * (chosen / number if ".experts." in name and number else 1.0)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and id(head.weight) in tables:  # tied
        found += head.weight.numel()
    return found


class ExternalModel(nn.Module):
    """Adapter of an external model to the training loop.

    Args:
        model: sharded model; its forward takes ``input_ids`` and, where the data need them, ``attention_mask`` and
            ``token_type_ids``, and returns ``logits``.
        applied: result of ``Schedule.apply``.
        products: multiply-adds of the whole model for one token (``count_products``).
    Raises:
        ConfigError: the model has no list of blocks.
    """

    def __init__(self, model: nn.Module, applied: Applied, products: float) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self.model: nn.Module
        self.__dict__["model"] = model  # not as a child, which would put a name before all others
        self.applied, self._products = applied, products
        self.blocks = find_blocks(model)
        if not self.blocks:
            raise ConfigError(
                f"{type(model).__name__} has no list of two or more blocks (modules of one class, or transformers'"
                " layers), the units of training"
            )
        self._units = units_of(model, self.blocks)
        self._hooks = UnitHooks(model, self.blocks, len(self._units))

    @property
    def description(self) -> dict[str, Any] | None:
        """The model's class and configuration, which a checkpoint keeps; None if it is none of transformers'."""
        config: Any = getattr(self.model, "config", None)
        if not hasattr(config, "to_dict"):
            return None
        return {"class": type(self.model).__name__, "config": json.loads(json.dumps(config.to_dict(), default=str))}

    def require_same(self, stored: dict[str, Any] | None, *, finetunes: bool) -> None:
        """Compare with the description in a checkpoint (None: it has none).

        Args:
            finetunes: a new run begins with the weights, which may see further than before.
        Raises:
            CheckpointError: the model is another one; the message lists the entries that differ.
        """
        now = self.description
        if now is None or not isinstance(stored, dict) or not isinstance(stored.get("config"), dict):
            return
        before, after = (dict(_entries(of["config"])) for of in (stored, now))
        # what only one version of transformers knows is not compared
        entries = {"class": (stored.get("class"), now["class"])}
        entries |= {name: (before[name], after[name]) for name in before if name in after}
        rows = [
            f"  {name}: {old} in the checkpoint, {new} here"
            for name, (old, new) in entries.items()
            if old != new and not (finetunes and any(part in name for part in _OF_LENGTHS))
        ]
        if rows:
            raise CheckpointError(
                "the checkpoint is of another model:\n"
                + "\n".join(rows)
                + "\ngive --model the folder that the run has begun with"
            )

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that belong to the model's state and are whole on every rank, by name."""
        own = {id(buffer): name for name, buffer in self.model.named_buffers() if name not in self.applied.splits}
        return {own[id(t)]: t for t in self.model.state_dict(keep_vars=True).values() if id(t) in own}

    def flops_per_token(self, config: ModelConfig) -> tuple[float, float]:
        """Return (causal, full) FLOPs of forward and backward for one token, as ``estimate/flops.py`` counts them.

        Args:
            config: lengths and heads; the products are those of the model itself.
        """
        assert config.num_layers and config.num_attention_heads and config.seq_length
        text = getattr(self.model, "config", None)
        text = getattr(text, "get_text_config", lambda: text)()
        attends = text is None or hasattr(text, "num_attention_heads")  # models without attention say nothing of heads
        scores = attends * 4.0 * config.num_layers * config.seq_length * config.num_attention_heads * config.head_dim
        return 3.0 * (2.0 * self._products + scores * seen_share(config)), 3.0 * (2.0 * self._products + scores)

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
        """Return (sum of token losses, number of correct tokens) at this rank's positions, both under the loss mask."""
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
