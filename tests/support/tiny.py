"""A tiny GPT in fp64 whose sizes are all different, its batches, and the gradients of one step with and without flat buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_sp.config.schema import KernelConfig, ModelConfig
from megatron_sp.models.attention import SelfAttention
from megatron_sp.models.bert import BertModel
from megatron_sp.models.classifier import BertClassifier
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.ops.dropout import DropoutKeys
from megatron_sp.optim.flat import FlatUnit
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.layers import attach_main_grad, shard_specs
from support import reference

S, B, LAYERS = 8, 3, 3
BASE = ModelConfig(
    num_layers=LAYERS, hidden_size=14, num_attention_heads=4, kv_channels=6, ffn_hidden_size=10, seq_length=S, vocab_size=37,
    make_vocab_size_divisible_by=16, attention_dropout=0.0, hidden_dropout=0.0, init_method_std=0.3,
)  # fmt: skip
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    **{f"uniform {n}": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": n} for n in (1, 2, 3, 5)},
    **{f"block {n}": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": n} for n in (1, 2, 3, 4)},
    "full": {"recompute_granularity": "full"},
}
Batch = dict[str, Tensor]


class Rank:
    """A rank of a group, for what needs no messages."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Alone:
    """A group of one, without a process group behind it."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def shape(**overrides: Any) -> ModelConfig:
    return replace(BASE, **overrides)


def make_batch(config: ModelConfig = BASE, size: int = B, seed: int = 0, mask: float = 0.7) -> Batch:
    """Tokens, labels and a loss mask of weights; the share ``mask`` of tokens counts."""
    assert config.vocab_size
    g = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(0, config.vocab_size, (size, S), generator=g) for _ in range(2))
    weights = torch.rand(size, S, generator=g, dtype=torch.float64) * (torch.rand(size, S, generator=g) < mask)
    return {"tokens": tokens, "labels": labels, "loss_mask": weights, "sample_ids": torch.arange(size) + 1000 * seed}


def context(config: ModelConfig, batch: Batch, **overrides: Any) -> ForwardContext:
    keys = None
    if config.hidden_dropout or config.attention_dropout:
        keys = DropoutKeys.create(7, 3, batch["sample_ids"], torch.arange(S))
    kernel = "reference" if config.attention_dropout else "sdpa"
    return ForwardContext(**{"mask": AttentionMask(), "kernel": kernel, "dropout": keys} | overrides)


def build(
    config: ModelConfig, kernels: KernelConfig, classes: int = 0, attention: type[SelfAttention] | None = None, **more: Any
) -> Any:  # fmt: skip
    """The model of the configuration's family, or a classifier."""
    if attention is not None:
        more["attention"] = attention
    if classes:
        return BertClassifier(config, kernels, num_classes=classes, **more)
    return (BertModel if config.is_bert else GPTModel)(config, kernels, **more)


def make_model(
    config: ModelConfig, dtype: torch.dtype = torch.float64, perturb: bool = True, classes: int = 0,
    attention: type[SelfAttention] | None = None, **kernels: Any,
) -> Any:  # fmt: skip
    """A model whose norms and biases are not at their initial ones and zeros, which would hide mistakes."""
    model = build(config, KernelConfig(**kernels), classes, attention, seed=5, dtype=dtype)
    if perturb:
        g = torch.Generator().manual_seed(11)
        for p in model.parameters():
            if p.ndim == 1:
                p.data += 0.3 * torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype)
    return model


class Announce:
    """``UnitEvents`` that calls a function when a unit's backward is done."""

    def __init__(self, done: Callable[[int], None]) -> None:
        self._done = done

    def before_use(self, unit: int) -> None:
        pass

    def backward_done(self, unit: int) -> None:
        self._done(unit)


def loss_of(model: GPTModel, batch: Batch, callback: Callable[[int], None] | None = None, **overrides: Any) -> Tensor:
    events = None if callback is None else Announce(callback)
    return model(batch["tokens"], batch["labels"], batch["loss_mask"], context(model.config, batch, **overrides), events)[0]


def flatten(model: GPTModel, group: Any = None, overlap: bool = True) -> FlatGradients:
    """Put the model's parameters into flat buffers, with a main_grad."""
    names = {id(p): n for n, p in model.named_parameters()}
    specs = shard_specs(model)
    units = [FlatUnit(u.name, [(names[id(p)], p) for p in u.module.parameters()], specs) for u in model.units()]
    gradients = FlatGradients(units, group or Alone(), overlap=overlap)  # type: ignore[arg-type]
    attach_main_grad(model, gradients)
    return gradients


def flat_grads(gradients: FlatGradients) -> dict[str, Tensor]:
    return {slot.name: slot.view(unit.grads) for unit in gradients.units for slot in unit.slots}


def run_step(
    model: GPTModel, gradients: FlatGradients, batches: list[Batch], scale: float = 1.0, **overrides: Any
) -> dict[str, Tensor | None]:
    """Loss and every gradient of a whole step through the flat buffers."""
    gradients.start_step()
    total = torch.zeros((), dtype=torch.float64)
    for i, batch in enumerate(batches):
        loss = loss_of(model, batch, gradients.unit_done, **overrides) * scale
        if i == len(batches) - 1:
            gradients.last_micro_batch()
        loss.backward()
        total += loss.detach()
    gradients.finish_step()
    assert all(p.grad is None for p in model.parameters())
    return {"loss": total, **flat_grads(gradients)}


def reference_step(model: GPTModel, batches: list[Batch], scale: float = 1.0) -> dict[str, Tensor | None]:
    """The same from tests/support/reference.py, on fp64 copies of the weights."""
    weights = {n: p.detach().double().clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        ctx = context(model.config, batch)
        loss = reference.gpt_loss(model.config, weights, batch["tokens"], batch["labels"], batch["loss_mask"], ctx.dropout)[0] * scale
        loss.backward()
        total += loss.detach()
    return {"loss": total, **{n: w.grad for n, w in weights.items() if w.requires_grad}}
