"""Dealing of the rows of a global batch to data-parallel ranks by the attention that they need (--balance-rows).

    by index   micro-batch 0: rank 0 has rows 0 .. b-1, rank 1 has rows b .. 2b-1, ...
    by area    each rank as many rows, and about as many pairs of tokens that see each other

Rows of packed documents have as many tokens, so that GEMMs are even, but a row of one long document may need a hundred
times the attention of a row of short ones, and all ranks wait for the slowest at the end of a step. Only who computes a
row changes: the loss is a sum over the rows of a step, dropout is keyed by their ids, and what is recorded of them is
in the order of the global batch. So losses, gradients and weights are the same to rounding, and so are checkpoints.

The rows go to ranks as chunks go to cp ranks (``load_balancing.py``), the largest first and each to the rank with the
least so far, and swaps at the end. A rank takes its own in order of area, so that large rows are computed at the same
time everywhere: with --zero-stage 2 and 3 ranks wait for one another in every micro-batch. Dynamic context parallelism
(Megatron-LM #2282) and WLB-LLM (arXiv:2503.17924) even out more, by other groups of ranks for long documents or other
documents in a row; here groups stay, and so does the order of the data. A row that exceeds a rank's fair share by
itself is one for context parallelism.

Every rank finds the same order by itself, from the lengths of the documents of all rows of the step, which an index of
the data set knows without reading a token. So nothing is exchanged, and no row is read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_sp.parallel.load_balancing import deal_chunks


@dataclass(frozen=True)
class RowDealer:
    """Order in which the rows of a global batch are dealt to ranks, from the lengths of their documents.

    Attributes:
        causal, window: the model's attention, as in ``RowMask``.
    """

    # tokens of each document of a sample, given its id; the same on every rank
    document_lengths: Callable[[int], np.ndarray]
    micro_batch_size: int  # b, rows per micro-batch and rank
    dp_size: int
    causal: bool = True
    window: int | None = None

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Return the places of a global batch, int64 [rows], in the order in which ``data/loader.py :: deal`` deals them.

        Args:
            ids: samples of the global batch, int64 [rows], in order.
        """
        return order_by_area(self.areas(ids), self.micro_batch_size, self.dp_size)

    def areas(self, ids: np.ndarray) -> list[int]:
        """Return the area of each of these samples."""
        return [area_of_documents(self.document_lengths(i), self.causal, self.window) for i in ids.tolist()]


def area_of_documents(lengths: np.ndarray, causal: bool, window: int | None) -> int:
    """Return the number of pairs of tokens of which one sees the other, in a row of packed documents.

    Args:
        lengths: tokens of each document, int64.
    """
    if not causal:
        return int((lengths * lengths).sum())
    grown = (
        lengths if window is None else np.minimum(lengths, window)
    )  # a token sees one key more than that before it, up to so many
    return int((grown * (grown + 1) // 2 + (lengths - grown) * grown).sum())


def order_by_area(areas: Sequence[int], micro_batch_size: int, dp_size: int) -> np.ndarray:
    """Return the order in which rows are dealt so that the rank with the largest area has little more than the mean.

    Args:
        areas: area of each row of a global batch of whole micro-batches.
    Returns:
        Places of the global batch, int64 [rows]: for each micro-batch, for each rank, b of them. Those by index unless the
        largest area of a rank becomes smaller.
    """
    by_index = np.arange(len(areas))
    held = deal_chunks(areas, (), dp_size)
    largest_by_index = max(
        sum(areas[i] for i in rows.flat) for rows in by_index.reshape(-1, dp_size, micro_batch_size).swapaxes(0, 1)
    )
    if max(sum(areas[i] for i in rows) for rows in held) >= largest_by_index:
        return by_index
    order = np.empty((len(areas) // (dp_size * micro_batch_size), dp_size, micro_batch_size), np.int64)
    for rank, rows in enumerate(held):
        order[:, rank] = np.reshape(sorted(rows, key=lambda i: (-areas[i], i)), (-1, micro_batch_size))
    return np.sort(order, axis=2).reshape(-1)
