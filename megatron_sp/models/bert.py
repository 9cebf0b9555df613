"""BERT: the blocks of ``language_model.py``, each position seeing all others, with a head for masked tokens and one for sentence order.

    masked tokens    act(dense(x)) -> norm -> the embedding's table, with a bias of its own -> cross entropy at the masked positions
    order            tanh(pooler(x of position 0)) -> in order or swapped? (on the sp rank that has position 0)

With norms in front (Megatron's BERT) there is a norm behind the last block; with norms behind (--norm-placement post, the original BERT,
arXiv:1810.04805) there is one behind the embedding instead. Parameter names are Megatron-core's, where it has such parameters.

On tp ranks the head's own layers are whole and work on all positions of the group alike; the table is split as always. On a CPU the head
sees the masked positions alone, which are few; a GPU would have to tell the host how many there are, and computes them all.
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
from megatron_sp.parallel.init import draw_normal
from megatron_sp.parallel.layers import Norm, ParallelLMHead
from megatron_sp.parallel.linear import column_linear, rows_of
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.utils.numbers import round_up


class BertLoss(NamedTuple):
    """Sums over a rank's share of a micro-batch, fp32 or wider, the same on every tp rank.

    Attributes:
        masked: loss of the masked tokens, each times its weight in the loss mask.
        order: loss of the sentence order, of all sequences on the sp rank that has their beginnings, elsewhere 0; None without that head.
        masked_hits: weights of the masked tokens that were found, detached.
        order_hits: sequences whose order was found, detached; None without that head.
    """

    masked: Tensor
    order: Tensor | None
    masked_hits: Tensor
    order_hits: Tensor | None


class Dense(nn.Module):
    """A linear layer that every tp rank has whole, for inputs that all of them have."""

    def __init__(
        self, name: str, in_features: int, out_features: int, std: float, seed: int, dtype: torch.dtype, layout: ParallelContext
    ) -> None:
        super().__init__()
        self.main_grad: MainGrad | None = None
        self._specs = {
            "weight": ShardSpec.whole((out_features, in_features), layout.tp.rank, layout.tp.size),
            "bias": ShardSpec.whole((out_features,), layout.tp.rank, layout.tp.size),
        }
        self.weight = nn.Parameter(draw_normal((out_features, in_features), std, seed, f"{name}.weight").to(dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Of the parameters, by their names in this module."""
        return self._specs

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, main_grad=self.main_grad)[0]


class MaskedHead(nn.Module):
    """What stands between the blocks and the table."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        assert config.hidden_size
        alike = replace(layout, tp=replace(layout.tp, seq=False))  # every tp rank has all positions of the group here
        self.dense = Dense("lm_head.dense", config.hidden_size, config.hidden_size, config.init_method_std, seed, dtype, layout)
        self.layernorm = Norm(config, config.hidden_size, dtype, alike)
        self.activation = config.head_activation

    def forward(self, x: Tensor) -> Tensor:
        wide = self.dense(x)
        if self.activation == "relu":
            return self.layernorm(F.relu(wide))
        return self.layernorm(F.gelu(wide, approximate="tanh" if self.activation == "gelu_tanh" else "none"))


class Pooler(nn.Module):
    """tanh(dense(the first position))."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        assert config.hidden_size
        self.dense = Dense("pooler.dense", config.hidden_size, config.hidden_size, config.init_method_std, seed, dtype, layout)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x))


class VocabBias(nn.Module):
    """One number for each entry of the vocabulary, split as the table is; its padding is never trained and never written to disk."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, layout: ParallelContext) -> None:
        super().__init__()
        assert config.vocab_size
        mine = round_up(config.vocab_size, config.make_vocab_size_divisible_by * layout.tp.size) // layout.tp.size
        first = min(config.vocab_size, layout.tp.rank * mine)
        self.spec = ShardSpec.split((config.vocab_size,), 0, ((first, min(config.vocab_size, first + mine) - first),))
        self.bias = nn.Parameter(torch.zeros(mine, dtype=dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Of the parameters, by their names in this module."""
        return {"bias": self.spec}


class BertModel(LanguageModel):
    """Masked tokens and sentence order; arguments are those of ``LanguageModel``."""

    stack_name = "encoder"
    selects_on = ("cpu",)
    """Kinds of devices on which the head works on the masked positions alone."""

    def _build_head(self, seed: int, dtype: torch.dtype) -> None:
        config = self.config
        assert config.hidden_size
        self.lm_head = MaskedHead(config, seed, dtype, self.layout)
        self.output_layer = VocabBias(config, dtype, self.layout)
        self.pooler: Pooler | None = None
        self.binary_head: Dense | None = None
        if config.has_order_head:
            self.pooler = Pooler(config, seed, dtype, self.layout)
            self.binary_head = Dense("binary_head", config.hidden_size, 2, config.init_method_std, seed, dtype, self.layout)

    def _head_modules(self) -> dict[str, nn.Module]:
        order = {} if self.pooler is None or self.binary_head is None else {"pooler": self.pooler, "binary_head": self.binary_head}
        return {"lm_head": self.lm_head, "output_layer": self.output_layer, **order}

    @property
    def head(self) -> ParallelLMHead:
        """The LM head on the word embeddings' table; every tp rank has all positions of the group there."""
        return ParallelLMHead(
            self.embedding.word_embeddings, tp=replace(self.layout.tp, seq=False), bias=self.output_layer.bias,
            chunk_tokens=self.kernels.lm_head_chunk_tokens,
        )  # fmt: skip

    @property
    def is_tied(self) -> Literal[True]:
        return True

    def forward(
        self, tokens: Tensor, types: Tensor | None, labels: Tensor, loss_mask: Tensor, order: Tensor | None, ctx: ForwardContext,
        events: UnitEvents | None = None,
    ) -> BertLoss:  # fmt: skip
        """Loss of this rank's share of a micro-batch.

        Args:
            tokens, labels: int64 [b, s], whole sequences, the same on every rank of the tp and sp groups.
            types: int64 [b, s], the segment of each token; None: all are of the first.
            loss_mask: [b, s], not 0 at masked tokens.
            order: int64 [b], 1 where the two segments are swapped; None only without that head.
            ctx: mask, kernel, dropout.
            events: told which unit's parameters are used next, and whose gradients are complete.
        """
        types = torch.zeros_like(tokens) if types is None else types
        x = gather_positions(self.hidden(tokens, ctx, events, types), self.layout.tp)  # [s/sp, b, h]
        cut = self.layout.cut(tokens.shape[1])
        labels, loss_mask = (cut.pad(t.t())[cut.sp_slice] for t in (labels, loss_mask))
        order_sum, order_hits = self._order(x, order)
        if x.device.type in self.selects_on:
            places = loss_mask.reshape(-1).nonzero()[:, 0]
            x, labels, loss_mask = rows_of(x)[places, None], labels.reshape(-1)[places, None], loss_mask.reshape(-1)[places, None]
        x = self.lm_head(x)
        if events is not None:
            events.before_use(0)
        made = self.head.loss(x, labels, loss_mask)
        return BertLoss(made.sum, order_sum, (made.hits * loss_mask).sum(), order_hits)

    def _order(self, x: Tensor, order: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(loss, hits) of the sentence order; x: [s/sp, b, h]."""
        if self.pooler is None or self.binary_head is None:
            return None, None
        if self.layout.sp.rank > 0:
            nothing = torch.zeros((), dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
            return nothing, nothing
        if order is None:
            raise ValueError("this model has a head for sentence order and needs the order of each sequence, int64 [b]")
        first = x[0].clone()  # a view would keep all positions until backward
        logits = _widened(self.binary_head(self.pooler(first)))
        return F.cross_entropy(logits, order, reduction="sum"), (logits.detach().argmax(1) == order).sum()

    def predictions(self, x: Tensor) -> Tensor:
        """What ``hidden`` gave, of one process -> logits of the vocabulary [..., vocab_size]."""
        return self.head.logits(self.lm_head(x))

    def pooled(self, x: Tensor) -> Tensor:
        """What ``hidden`` gave, of one process [s, b, h] -> [b, h]."""
        if self.pooler is None:
            raise ValueError("this model has no pooler: it was made with --bert-no-binary-head")
        return self.pooler(x[0])


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
