"""KV cache, with which a generated token costs one position instead of its whole sequence.

A rank caches the keys and values of its own heads: its share under tensor parallelism and, of that, under Ulysses. A
prompt passes through the exchanges like a training sequence, split over the sp ranks; the heads that arrive at the
attention, with all positions, are cached. So is a generated token: it is a sequence of one position (and padding), so
the first sp rank has its activations, and each rank computes attention for its own heads. Thus a context too long for
one device is distributed over all, including the cache.

It is written in ``models.transformer.AttentionCore.attend``; the pipeline around it does not depend on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sp.ops.attention import AttentionMask


class KVCache:
    """Keys and values of several sequences, each in a row; their memory is allocated by the first pass, and stays where it is.

    Args:
        num_layers: layers of the model.
        max_rows: capacity in sequences.
        max_length: capacity of each in positions.
    """

    def __init__(self, num_layers: int, max_rows: int, max_length: int) -> None:
        self.max_rows, self.max_length = max_rows, max_length
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def of_layer(self, layer: int, like: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Return the buffers of a layer's keys and values, [max_length, max_rows, groups, 1, d] with dtype, device and d of ``like``."""
        found = self._layers[layer]
        if found is None:
            shape = (self.max_length, self.max_rows, groups, 1, like.shape[-1])
            found = like.new_zeros(shape), like.new_zeros(shape)  # a hidden position counts 0 times what is there: no NaN
            self._layers[layer] = found
        return found

    def _buffers(self) -> list[Tensor]:
        return [buffer for pair in self._layers if pair is not None for buffer in pair]

    def copy(self, row: int, to: int, length: int) -> None:
        """Copy the first ``length`` positions of a row to another."""
        for buffer in self._buffers():
            buffer[:length, to] = buffer[:length, row]

    def clear(self) -> None:
        """Remove what is left of a pass that failed, which need not be numbers."""
        for buffer in self._buffers():
            buffer.zero_()


class RowPass:
    """One forward pass that appends positions to one row (implements ``forward_context.Cache``).

    Args:
        cache: of the row.
        row, start: where they are appended.
    """

    def __init__(self, cache: KVCache, row: int, start: int) -> None:
        self._cache, self._row, self._start = cache, row, start

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Cache``; k and v [s_new, m, 1, d]."""
        start, end, row = self._start, self._start + k.shape[0], self._row
        keys, values = self._cache.of_layer(layer, k, k.shape[1])
        keys[start:end, row], values[start:end, row] = k, v
        return (keys[:end, row], values[:end, row]) if start else (k, v)

    def positions(self, num_new: int, device: torch.device) -> Tensor:
        """See ``Cache``; [num_new]."""
        return torch.arange(self._start, self._start + num_new, device=device)

    def mask(self, groups: int, window: int | None) -> AttentionMask:
        """See ``Cache``."""
        return AttentionMask(window=window)


class StepPass:
    """One forward pass that appends one position to each of the first rows; its work depends on ``span`` alone.

    Args:
        cache: of the rows.
        lengths: int64 [b], of the sequences in them, on their device.
        span: number of keys that are read, more than the longest sequence has.
    """

    def __init__(self, cache: KVCache, lengths: Tensor, span: int) -> None:
        self._cache, self._lengths, self._span = cache, lengths, span
        self._places = lengths * cache.max_rows + torch.arange(lengths.shape[0], device=lengths.device)
        self._dtype = torch.float32
        self._bias: Tensor | None = None

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Cache``; k and v [1, b*m, 1, d]."""
        rows = self._lengths.shape[0]
        self._dtype, groups = k.dtype, k.shape[1] // rows
        found = []
        for kept, new in zip(self._cache.of_layer(layer, k, groups), (k, v), strict=True):
            kept.flatten(0, 1).index_copy_(0, self._places, new.view(rows, groups, *new.shape[2:]))
            found.append(kept[: self._span, :rows].flatten(1, 2))  # a view
        return found[0], found[1]

    def positions(self, num_new: int, device: torch.device) -> Tensor:
        """See ``Cache``; [b, 1]."""
        assert num_new == 1, "sequences of different lengths get one position at a time"
        return self._lengths[:, None]

    def mask(self, groups: int, window: int | None) -> AttentionMask:
        """See ``Cache``; the layers share one."""
        if self._bias is None:
            at, last = torch.arange(self._span, device=self._lengths.device), self._lengths[:, None]
            hidden = at > last if window is None else (at > last) | (at <= last - window)
            bias = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._bias = bias.repeat_interleave(groups, 0)[:, None, None]  # [b*m, 1, 1, span]
        return AttentionMask(causal=False, bias=self._bias)
