"""GPT: the blocks of ``language_model.py`` with a head that predicts the next token.

The same class implements GPT-2 (learned positions, LayerNorm, GELU, tied head), GPT-NeoX (rotary on a part of each
head, attention parallel to the MLP), Llama (rotary, RMSNorm, SwiGLU, grouped-query attention) and Mistral (a sliding
window), as set in ``ModelConfig``.
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
    """A decoder-only language model; arguments are those of ``LanguageModel``."""

    output_layer: VocabParallelEmbedding | None

    def _build_head(self, seed: int, dtype: torch.dtype) -> None:
        config = self.config
        assert config.vocab_size and config.hidden_size
        self.output_layer = None
        if config.untie_embeddings_and_output_weights:
            init = WeightInit("output_layer", config.init_method_std, seed, dtype)
            self.output_layer = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                init,
                self.layout,
                divisible_by=config.make_vocab_size_divisible_by,
            )

    def _head_modules(self) -> dict[str, nn.Module]:
        return {} if self.output_layer is None else {"output_layer": self.output_layer}

    @property
    def head(self) -> ParallelLMHead:
        """The LM head; with tied weights its table is that of the word embeddings."""
        return ParallelLMHead(
            self.output_layer or self.embedding.word_embeddings, chunk_tokens=self.kernels.lm_head_chunk_tokens
        )

    @property
    def is_tied(self) -> bool:
        return not self.config.untie_embeddings_and_output_weights

    def forward(
        self, tokens: Tensor, labels: Tensor, loss_mask: Tensor, ctx: ForwardContext, events: UnitEvents | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of this rank's positions of a micro-batch.

        Args:
            tokens, labels: int64 [b, s], whole sequences, the same on every rank of the tp, sp and cp groups.
            loss_mask: [b, s].
            events: notified which unit's parameters are used next, and which unit's gradients are complete.
        Returns:
            (sum of the masked token losses of this rank's positions, a scalar, the same on every tp rank; loss of each
            of these positions [L/sp, b], detached).
        """
        made = self._head_loss(tokens, labels, loss_mask, ctx, events)
        return made.sum, made.tokens

    @torch.no_grad()
    def score(self, tokens: Tensor, labels: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Compute the loss of each label and whether it is the model's most likely token, for evaluation.

        Args:
            tokens, labels: int64 [b, s], as for ``forward``.
        Returns:
            (loss of each label [b, s], fp32 or wider; True where no other token is likelier, bool [b, s]), the same on
            every rank of the tp, sp and cp groups.
        """
        made = self._head_loss(tokens, labels, torch.ones_like(labels), ctx, None)
        cut = self.cut(tokens, ctx)
        return whole_sequence(made.tokens, cut).t(), whole_sequence(made.hits, cut).t()

    def _head_loss(
        self, tokens: Tensor, labels: Tensor, loss_mask: Tensor, ctx: ForwardContext, events: UnitEvents | None
    ) -> HeadLoss:
        x = self.hidden(tokens, ctx, events)
        self.use_table(events)
        cut = self.cut(tokens, ctx)
        labels, loss_mask = (cut.take(t.t())[cut.sp_slice] for t in (labels, loss_mask))
        return self.head.loss(x, labels, loss_mask)

    def logits(self, x: Tensor) -> Tensor:
        """Compute logits [..., vocab_size] from x [..., h], which must be the same on every tp rank; for generation."""
        return self.head.logits(x)

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute the logits after the last of the tokens [b, s]: [b, vocab_size], on every rank of the tp, sp and cp groups."""
        return self.logits(last_position(self.hidden(tokens, ctx), self.cut(tokens, ctx)))

    @torch.no_grad()
    def all_logits(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute the logits after each of the tokens [b, s]: [s, b, vocab_size] (large), on every rank of the tp, sp and cp groups."""
        return self.logits(whole_sequence(self.hidden(tokens, ctx), self.cut(tokens, ctx)))
