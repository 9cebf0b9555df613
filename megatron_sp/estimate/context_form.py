"""Rows of keys and values between the ranks of context parallelism, as far as flags say the mask: causal or not, and the window.

Documents and padding differ from row to row and are not known beforehand, so each row counts as one document without
padding. Packed documents send less.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_sp.config.schema import ModelConfig, ParallelConfig
from megatron_sp.parallel.context_plan import ContextPlan, cut_row, plan_context
from megatron_sp.parallel.row_mask import RowMask


def row_mask_of(model: ModelConfig) -> RowMask:
    """Return the mask of a row: one document, without padding."""
    assert model.seq_length
    return RowMask(model.seq_length, causal=not model.is_bert, window=None if model.is_bert else model.window_size)


def context_plan(model: ModelConfig, parallel: ParallelConfig) -> ContextPlan:
    """Return who sends which rows to whom over the cp ranks of a configuration."""
    return _plan_of(row_mask_of(model), parallel.context_parallel_size, parallel.cp_chunks)


@lru_cache(maxsize=64)
def _plan_of(mask: RowMask, cp_size: int, num_chunks: int | None) -> ContextPlan:
    return plan_context(mask, cut_row(mask, cp_size, num_chunks))
