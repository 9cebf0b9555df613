"""What a step makes of BERT's batches: everybody sees everybody but padding."""

from __future__ import annotations

import torch

from megatron_sp.parallel.forward_context import micro_batch_context


def test_the_mask_of_a_batch_with_lengths() -> None:
    batch = {"tokens": torch.zeros(2, 4, dtype=torch.int64), "length": torch.tensor([4, 2]), "sample_ids": torch.arange(2)}
    mask = micro_batch_context(batch, seed=1, step=1, drops=False, kernel="sdpa", causal=False).mask
    assert not mask.causal and mask.key_lengths is not None and mask.key_lengths.tolist() == [4, 2] and mask.documents is None


def test_packed_rows_are_documents() -> None:
    batch = {"tokens": torch.zeros(1, 4, dtype=torch.int64), "documents": torch.tensor([[0, 0, 1, 1]]), "sample_ids": torch.arange(1)}
    mask = micro_batch_context(batch, seed=1, step=1, drops=False, kernel="sdpa", causal=False).mask
    assert not mask.causal and mask.key_lengths is None and mask.documents == ((2, 4),)
