"""Layout of samples of different lengths in rows of ``seq_length``: padded, or several samples packed into one row.

Packing takes the samples in order and begins a new row when the next one no longer fits, so the contents of a row
depend on the sample lengths alone. Each sample attends only to itself and has its own positions, which ``documents``
and ``positions`` tell the model, as for GPT (``packing``). The rest of a row is padding, which counts as a separate
document.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from megatron_sp.data.dataset import Sample


class Piece(NamedTuple):
    """One unpadded sample of n tokens.

    Attributes:
        tokens: int64 [n], the model's input.
        types: int64 [n], 0 for [CLS] A [SEP], 1 for B [SEP].
        masked: int64 [m], positions to predict.
        labels: int64 [m], original tokens at these positions.
        swapped: True if A and B are swapped; None if there is no B.
    """

    tokens: np.ndarray
    types: np.ndarray
    masked: np.ndarray
    labels: np.ndarray
    swapped: bool | None


def lay_out(pieces: list[Piece], seq_length: int, pad: int, packed: bool) -> Sample:
    """Lay out one row.

    Args:
        pieces: one sample, or with ``packed`` as many as fit.
        pad: padding id.
    Returns:
        ``tokens``, ``types`` and ``labels`` int64 [s] (labels 0 where nothing is predicted) and ``loss_mask`` float32
        [s] (1 where a token is predicted). A single sample also has ``length`` int64 [] (tokens before the padding)
        and, with two segments, ``order`` int64 [] (1 if they are swapped); packed samples have ``documents`` int64 [s]
        and ``positions`` int64 [s].
    """
    tokens, types = np.full(seq_length, pad, np.int64), np.zeros(seq_length, np.int64)
    labels, loss_mask = np.zeros(seq_length, np.int64), np.zeros(seq_length, np.float32)
    documents, positions = np.full(seq_length, len(pieces), np.int64), np.empty(seq_length, np.int64)
    at = 0
    for number, piece in enumerate(pieces):
        end = at + piece.tokens.size
        tokens[at:end], types[at:end], documents[at:end] = piece.tokens, piece.types, number
        labels[at + piece.masked], loss_mask[at + piece.masked] = piece.labels, 1.0
        positions[at:end] = np.arange(end - at)
        at = end
    positions[at:] = np.arange(seq_length - at)
    row: Sample = {"tokens": tokens, "types": types, "labels": labels, "loss_mask": loss_mask}
    if packed:
        return row | {"documents": documents, "positions": positions}
    row["length"] = np.array(at, np.int64)
    if pieces[0].swapped is not None:
        row["order"] = np.array(pieces[0].swapped, np.int64)
    return row


def row_lengths(pieces: np.ndarray, seq_length: int) -> np.ndarray:
    """Return the tokens of each document of a packed row, given those of its samples: they, and the padding if there is some."""
    padding = seq_length - int(pieces.sum())
    return np.append(pieces, padding) if padding else pieces


def pack(lengths: np.ndarray, seq_length: int) -> np.ndarray:
    """Assign samples to rows: row k holds the samples from entry k up to entry k+1.

    Args:
        lengths: [n], tokens of each sample, none above ``seq_length``.
    Returns:
        int64 [rows + 1], from 0 to n.
    """
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    next_row = array("q", (np.searchsorted(before, before[:-1] + seq_length, side="right") - 1).tobytes())
    rows, at = array("q", [0]), 0
    while at < len(next_row):
        at = next_row[at]
        rows.append(at)
    return np.frombuffer(rows, np.int64)
