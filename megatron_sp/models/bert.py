"""BERT: the blocks of ``language_model.py`` with bidirectional attention, heads for masked tokens and sentence order.

masked tokens    act(dense(x)) -> norm -> tied embedding table plus a bias -> cross entropy at the masked positions
order            tanh(pooler(x of position 0)) -> two classes, in order or swapped (on the rank that has position 0)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_sp.comm.shard_spec import ShardSpec
from megatron_sp.config.schema import ModelConfig
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.ops.main_grad import MainGrad
from megatron_sp.parallel.forward_context import ForwardContext, UnitEvents
from megatron_sp.parallel.gather import gather_positions
from megatron_sp.parallel.layers import Norm, ParallelLMHead, WeightInit
from megatron_sp.parallel.linear import column_linear, rows_of
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.utils.numbers import round_up


class BertLoss(NamedTuple):
    """Sums over a rank's share of a micro-batch, the same on every tp rank."""

    masked: Tensor  # loss of the masked tokens, each times its weight in the loss mask
    order: Tensor | None  # sentence-order loss on the rank that has position 0, elsewhere 0; None without that head
    masked_hits: Tensor  # summed weights of the masked tokens predicted correctly, detached
    order_hits: Tensor | None  # number of sequences whose order was predicted correctly, detached


class Dense(nn.Module):
    """A linear layer replicated on the tp ranks, whose inputs are the same."""

    def __init__(self, in_features: int, out_features: int, init: WeightInit, layout: ParallelContext) -> None:
        super().__init__()
        self.main_grad: MainGrad | None = None
        self._specs = {
            "weight": ShardSpec.whole((out_features, in_features), layout.tp.rank, layout.tp.size),
            "bias": ShardSpec.whole((out_features,), layout.tp.rank, layout.tp.size),
        }
        self.weight = nn.Parameter(init.draw((out_features, in_features)).to(init.dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=init.dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return self._specs

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, main_grad=self.main_grad)[0]


class MaskedHead(nn.Module):
    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        assert config.hidden_size
        alike = replace(layout, tp=replace(layout.tp, seq=False))  # every tp rank has all positions of the group here
        init = WeightInit("lm_head.dense", config.init_method_std, seed, dtype)
        self.dense = Dense(config.hidden_size, config.hidden_size, init, layout)
        self.layernorm = Norm(config, config.hidden_size, dtype, alike)
        self.activation = config.head_activation

    def forward(self, x: Tensor) -> Tensor:
        wide = self.dense(x)
        if self.activation == "relu":
            return self.layernorm(F.relu(wide))
        return self.layernorm(F.gelu(wide, approximate="tanh" if self.activation == "gelu_tanh" else "none"))


class Pooler(nn.Module):
    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        assert config.hidden_size
        init = WeightInit("pooler.dense", config.init_method_std, seed, dtype)
        self.dense = Dense(config.hidden_size, config.hidden_size, init, layout)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x))


class VocabBias(nn.Module):
    """A bias for each vocabulary entry, split like the table."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        assert config.vocab_size
        size = config.vocab_size
        rows = round_up(size, config.make_vocab_size_divisible_by * layout.tp.size) // layout.tp.size
        first = min(size, layout.tp.rank * rows)
        # rows of padding are never trained and never written to disk
        self.spec = ShardSpec.split((size,), 0, ((first, min(size, first + rows) - first),))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"bias": self.spec}


class BertModel(LanguageModel):
    """BERT with heads for masked tokens and sentence order."""

    stack_name = "encoder"
    # devices on which the head works on the masked positions alone; a GPU would have to be waited for their number
    selects_on = ("cpu",)

    def _build_head(self, seed: int, dtype: torch.dtype) -> None:
        config = self.config
        assert config.hidden_size
        self.lm_head = MaskedHead(config, seed, dtype, self.layout)
        self.output_layer = VocabBias(config, dtype, self.layout)
        self.pooler: Pooler | None = None
        self.binary_head: Dense | None = None
        if config.has_order_head:
            self.pooler = Pooler(config, seed, dtype, self.layout)
            init = WeightInit("binary_head", config.init_method_std, seed, dtype)
            self.binary_head = Dense(config.hidden_size, 2, init, self.layout)

    def _head_modules(self) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {"lm_head": self.lm_head, "output_layer": self.output_layer}
        if self.pooler is not None and self.binary_head is not None:
            modules |= {"pooler": self.pooler, "binary_head": self.binary_head}
        return modules

    @property
    def head(self) -> ParallelLMHead:
        # every tp rank has all positions of the group here
        return ParallelLMHead(
            self.embedding.word_embeddings, tp=replace(self.layout.tp, seq=False), bias=self.output_layer.bias,
            chunk_tokens=self.kernels.lm_head_chunk_tokens,
        )  # fmt: skip

    @property
    def is_tied(self) -> Literal[True]:
        return True

    def forward(
        self, tokens: Tensor, types: Tensor | None, labels: Tensor, loss_mask: Tensor, order: Tensor | None,
        ctx: ForwardContext, events: UnitEvents | None = None,
    ) -> BertLoss:  # fmt: skip
        """Compute the loss of this rank's share of sequences [b, s]; ``order`` [b]: 1 where segments are swapped."""
        types = torch.zeros_like(tokens) if types is None else types
        x = gather_positions(self.hidden(tokens, ctx, events, types), self.layout.tp)  # [L/sp, b, h]
        cut = self.cut(tokens, ctx)
        labels, loss_mask = (cut.take(t.t())[cut.sp_slice] for t in (labels, loss_mask))
        order_sum, order_hits = self._order(x, cut.row_of(0), order)
        if x.device.type in self.selects_on:
            places = loss_mask.reshape(-1).nonzero()[:, 0]
            x = rows_of(x)[places, None]
            labels, loss_mask = (t.reshape(-1)[places, None] for t in (labels, loss_mask))
        x = self.lm_head(x)
        self.use_table(events)
        loss = self.head.loss(x, labels, loss_mask)
        return BertLoss(loss.sum, order_sum, (loss.hits * loss_mask).sum(), order_hits)

    def _order(self, x: Tensor, row: int | None, order: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        # (loss, hits) of the sentence-order head; x: [L/sp, b, h], ``row``: the one of position 0, if it is here
        if self.pooler is None or self.binary_head is None:
            return None, None
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if row is None:
            nothing = torch.zeros((), dtype=wide, device=x.device)
            return nothing, nothing
        if order is None:
            raise ValueError("this model has a head for sentence order and needs the order of each sequence, int64 [b]")
        first = x[row].clone()  # a view would keep all positions until backward
        logits = self.binary_head(self.pooler(first)).to(wide)
        return F.cross_entropy(logits, order, reduction="sum"), (logits.detach().argmax(1) == order).sum()

    def predictions(self, x: Tensor) -> Tensor:
        # vocabulary logits from the output of ``hidden``, for a single process
        return self.head.logits(self.lm_head(x))

    def pooled(self, x: Tensor) -> Tensor:
        # [b, h], from the output of ``hidden``, for a single process
        if self.pooler is None:
            raise ValueError("this model has no pooler: it was made with --bert-no-binary-head")
        return self.pooler(x[0])
