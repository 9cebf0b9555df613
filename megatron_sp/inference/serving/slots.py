"""The model with the sequences in progress, on every rank of a team.

Rank 0 decides; before it calls the model it sends the command to the other ranks as JSON, and they do the same. So the
scheduler and HTTP exist only once, and a model on several tp or sp ranks is served like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_sp.inference.kv_cache import BatchCache, KVCache
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext

STOP = "stop"


class Slots:
    """Up to ``max_rows`` sequences in rows 0, 1, ... without gaps; when one is dropped, the last takes its row.

    Args:
        model: this rank's part of the model.
        max_rows: number of sequences generated at once.
        vocab_size: vocabulary size of the tokenizer, to which logits are truncated.
        tell: sends a command to the other ranks; None: there are none, or this is one of them.
    """

    def __init__(self, model: GPTModel, max_rows: int, vocab_size: int, tell: Callable[[list[Any]], None] | None = None) -> None:
        self.model, self.max_rows, self.vocab_size = model, max_rows, vocab_size
        self.has_followers = tell is not None
        self._tell = tell or (lambda command: None)
        self._device = model.embedding.word_embeddings.weight.device
        self.clear()

    def clear(self) -> None:
        """Drop all sequences."""
        layers = len(self.model.stack.layers)
        self._prompt: KVCache | None = None  # of the prompt that was read last, for its further samples
        self._cache = BatchCache(layers, self.max_rows, self.model.config.max_positions)

    @property
    def num_rows(self) -> int:
        """Number of rows in the batch."""
        return len(self._cache.lengths)

    def read(self, tokens: list[int], keep: bool, everywhere: bool, more: bool = False) -> Tensor:
        """Prefill a prompt; with ``keep``, into the next row.

        Args:
            everywhere: return the logits of all its positions, not only of the last.
            more: ``again`` will be called for it.
        Returns:
            Logits on the CPU, [s, v] or [1, v].
        """
        self._tell(["read", tokens, keep, everywhere, more])
        self._prompt = None
        ids = torch.tensor([tokens], dtype=torch.int64, device=self._device)
        cache = KVCache(len(self.model.stack.layers), len(tokens)) if keep else None
        context = ForwardContext(AttentionMask(), cache=cache)
        logits = self.model.all_logits(ids, context)[:, 0] if everywhere else self.model.next_logits(ids, context)
        if cache is not None:
            self._cache.add(cache)
            self._prompt = cache if more else None
        return logits[:, : self.vocab_size].cpu()

    def again(self, more: bool) -> None:
        """Copy the prompt that was read last into another row; ``more``: ``again`` will be called once more."""
        self._tell(["again", more])
        assert self._prompt is not None, "the last prompt was not kept for further samples"
        self._cache.add(self._prompt)
        self._prompt = self._prompt if more else None

    def forget(self) -> None:
        """Release the last prompt, for which ``again`` will not be called any more."""
        self._tell(["forget"])
        self._prompt = None

    def step(self, tokens: list[int]) -> Tensor:
        """Append a token to each row; return the logits after them on the CPU, [rows, v]."""
        self._tell(["step", tokens])
        ids = torch.tensor(tokens, dtype=torch.int64, device=self._device)[:, None]
        mask = AttentionMask(causal=False, key_lengths=self._cache.lengths_with_new(self._device))
        return self.model.next_logits(ids, ForwardContext(mask, cache=self._cache))[:, : self.vocab_size].cpu()

    def drop(self, row: int) -> None:
        """Drop a row; the last one takes its number."""
        self._tell(["drop", row])
        self._cache.remove(row)

    def idle(self) -> None:
        """Send a no-op, so that the other ranks do not time out."""
        self._tell(["idle"])

    def stop(self) -> None:
        """End ``follow`` on the other ranks."""
        self._tell([STOP])

    def follow(self, hear: Callable[[], list[Any]]) -> None:
        """Execute the commands of rank 0 until it stops; for all other ranks."""
        while (command := hear())[0] != STOP:
            getattr(self, command[0])(*command[1:])
