"""BERT for text classification: dropout and one linear layer on the pooler's output."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_sp.config.schema import KernelConfig, ModelConfig
from megatron_sp.models.attention import SITE_EMBEDDING
from megatron_sp.models.bert import Dense, Pooler
from megatron_sp.models.language_model import LanguageModel, OnUnit
from megatron_sp.ops.dropout import DropoutKeys, hash_dropout
from megatron_sp.parallel.forward_context import ForwardContext, UnitEvents
from megatron_sp.parallel.gather import gather_positions
from megatron_sp.parallel.layers import WeightInit
from megatron_sp.parallel.parallel_context import ParallelContext

NEW_PARAMETERS = ("classification_head.", "pooler.")
"""Beginnings of names that a checkpoint of pretraining need not have."""


class ClassifierLoss(NamedTuple):
    """Loss of a micro-batch; on ranks without position 0 the sums are zero and ``logits`` is None."""

    sum: Tensor  # cross entropy of each sequence times its weight, summed, fp32 or wider
    hits: Tensor  # summed weights of the sequences classified correctly, detached
    logits: Tensor | None  # [b, classes], detached


class BertClassifier(LanguageModel):
    """BERT with a classification head."""

    stack_name = "encoder"

    def __init__(
        self, config: ModelConfig, kernels: KernelConfig, *, num_classes: int, seed: int, dtype: torch.dtype,
        layout: ParallelContext | None = None, on_unit: OnUnit | None = None,
    ) -> None:  # fmt: skip
        self._num_classes = num_classes
        super().__init__(config, kernels, seed=seed, dtype=dtype, layout=layout, on_unit=on_unit)

    def _build_head(self, seed: int, dtype: torch.dtype) -> None:
        config = self.config
        assert config.hidden_size
        self.pooler = Pooler(config, seed, dtype, self.layout)
        init = WeightInit("classification_head", config.init_method_std, seed, dtype)
        self.classification_head = Dense(config.hidden_size, self._num_classes, init, self.layout)

    def _head_modules(self) -> dict[str, nn.Module]:
        return {"pooler": self.pooler, "classification_head": self.classification_head}

    @property
    def is_tied(self) -> Literal[False]:
        return False

    def forward(
        self, tokens: Tensor, types: Tensor, label: Tensor, weight: Tensor, ctx: ForwardContext,
        events: UnitEvents | None = None,
    ) -> ClassifierLoss:  # fmt: skip
        """Compute the loss of whole sequences [b, s], given their classes, int64 [b], and weights [b]."""
        x = gather_positions(self.hidden(tokens, ctx, events, types), self.layout.tp)  # [L/sp, b, h]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        row = self.cut(tokens, ctx).row_of(0)
        if row is None:
            return ClassifierLoss(x[:0].sum().to(wide), torch.zeros((), dtype=wide, device=x.device), None)
        pooled = self.pooler(x[row].clone())  # a view would keep all positions until backward
        if ctx.dropout is not None:
            keys = DropoutKeys(ctx.dropout.token_keys[:1]).row_keys(self.stages[-1].num_layers, SITE_EMBEDDING)[0]
            pooled = hash_dropout(pooled, self.config.hidden_dropout, keys)
        logits = self.classification_head(pooled).to(wide)
        losses = F.cross_entropy(logits, label, reduction="none")
        hits = (logits.detach().argmax(1) == label).to(wide) * weight
        return ClassifierLoss((losses * weight).sum(), hits.sum(), logits.detach())
