"""GPT: the blocks of ``language_model.py`` with a head that predicts the next token.

``ModelConfig`` makes it GPT-2, GPT-NeoX, Llama or Mistral.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_sp.models.language_model import LanguageModel
from megatron_sp.parallel.forward_context import ForwardContext, UnitEvents
from megatron_sp.parallel.gather import last_position, whole_sequence
from megatron_sp.parallel.layers import ParallelLMHead, VocabParallelEmbedding, WeightInit
from megatron_sp.parallel.lm_head import HeadLoss


class GPTModel(LanguageModel):
    """A decoder-only language model."""

    output_layer: VocabParallelEmbedding | None

    def _build_head(self, seed: int, dtype: torch.dtype) -> None:
        config = self.config
        assert config.vocab_size and config.hidden_size
        self.output_layer = None
        if config.untie_embeddings_and_output_weights:
            init = WeightInit("output_layer", config.init_method_std, seed, dtype)
            padding = config.make_vocab_size_divisible_by
            table = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, init, self.layout, divisible_by=padding
            )
            self.output_layer = table

    def _head_modules(self) -> dict[str, nn.Module]:
        return {} if self.output_layer is None else {"output_layer": self.output_layer}

    @property
    def head(self) -> ParallelLMHead:
        table = self.output_layer or self.embedding.word_embeddings
        return ParallelLMHead(table, chunk_tokens=self.kernels.lm_head_chunk_tokens)

    @property
    def is_tied(self) -> bool:
        return not self.config.untie_embeddings_and_output_weights

    def forward(
        self, tokens: Tensor, labels: Tensor, loss_mask: Tensor, ctx: ForwardContext, events: UnitEvents | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss of this rank's positions, and that of each [L/sp, b], detached."""
        loss = self._head_loss(tokens, labels, loss_mask, ctx, events)
        return loss.sum, loss.tokens

    @torch.no_grad()
    def score(self, tokens: Tensor, labels: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return the loss of each label [b, s] and whether no other token is likelier."""
        loss, cut = self._head_loss(tokens, labels, torch.ones_like(labels), ctx, None), self.cut(tokens, ctx)
        return whole_sequence(loss.tokens, cut).t(), whole_sequence(loss.hits, cut).t()

    def _head_loss(
        self, tokens: Tensor, labels: Tensor, loss_mask: Tensor, ctx: ForwardContext, events: UnitEvents | None
    ) -> HeadLoss:
        x = self.hidden(tokens, ctx, events)
        self.use_table(events)
        cut = self.cut(tokens, ctx)
        labels, loss_mask = (cut.take(t.t())[cut.sp_slice] for t in (labels, loss_mask))
        return self.head.loss(x, labels, loss_mask)

    def logits(self, x: Tensor) -> Tensor:
        return self.head.logits(x)

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        # after the last of the tokens [b, s], on every rank of the tp, sp and cp groups
        return self.logits(last_position(self.hidden(tokens, ctx), self.cut(tokens, ctx)))

    @torch.no_grad()
    def all_logits(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        # after each of them, [s, b, vocab_size]: large
        return self.logits(whole_sequence(self.hidden(tokens, ctx), self.cut(tokens, ctx)))
