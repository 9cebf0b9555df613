"""KV caches, with which a generated token costs one position instead of its whole sequence.

A rank caches the keys and values of its own heads: its share under tensor parallelism and, of that, under Ulysses. A
prompt passes through the exchanges like a training sequence, split over the sp ranks; the heads that arrive at the
attention, with all positions, are cached. So is a generated token: it is a sequence of one position (and padding), so
the first sp rank has its activations, and each rank computes attention for its own heads. Thus a context too long for
one device is distributed over all, including the cache.

Both caches are written in ``parallel.ulysses.Core.attend``; the pipeline around it does not depend on them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """KV cache of one sequence, or of several of the same length.

    Args:
        num_layers: layers of the model.
        max_length: capacity in positions.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0  # positions that hold something
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [s_new, m, 1, d]; return all keys and values so far [length + s_new, m, 1, d]."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            keys, values = (t.new_empty(self.max_length, *t.shape[1:]) for t in (k, v))
            self._keys[layer], self._values[layer] = keys, values
        end = self.length + k.shape[0]
        keys[self.length : end], values[self.length : end] = k, v
        return keys[:end], values[:end]

    def advance(self, num_positions: int) -> None:
        self.length += num_positions

    def positions(self, num_new: int, device: torch.device) -> Tensor:
        """Return the position ids of the next ``num_new`` tokens, int64 [num_new]."""
        return torch.arange(self.length, self.length + num_new, device=device)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the cached keys and values of a layer, [length, m, 1, d]."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None and values is not None, "no forward pass has filled this cache"
        return keys[: self.length], values[: self.length]


class BatchCache:
    """KV cache of several sequences of different lengths, which get one new position each in every forward pass.

    The sequences are in rows 0, 1, ... without gaps: when one is removed, the last takes its row.

    Args:
        num_layers: layers of the model.
        max_rows: capacity in sequences.
        max_length: capacity of each in positions.
    """

    def __init__(self, num_layers: int, max_rows: int, max_length: int) -> None:
        self.num_layers, self.max_rows, self.max_length = num_layers, max_rows, max_length
        self.lengths: list[int] = []
        self._keys: list[Tensor | None] = [None] * num_layers  # each [max_length, max_rows, m, 1, d]
        self._values: list[Tensor | None] = [None] * num_layers
        self._at: Tensor | None = None  # the lengths, where the keys are

    def add(self, one: KVCache) -> int:
        """Copy a sequence into the cache; return its row."""
        row = len(self.lengths)
        assert row < self.max_rows, "there is no room for another sequence"
        for layer in range(self.num_layers):
            for kept, new in zip((self._keys, self._values), one.of_layer(layer), strict=True):
                buffer = kept[layer]
                if buffer is None:
                    kept[layer] = buffer = new.new_zeros(self.max_length, self.max_rows, *new.shape[1:])
                buffer[: one.length, row] = new
        self.lengths.append(one.length)
        self._at = None
        return row

    def remove(self, row: int) -> None:
        """Remove a sequence; the last one takes its row."""
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[last]
            for buffer in (*self._keys, *self._values):
                assert buffer is not None
                buffer[:length, row] = buffer[:length, last]
            self.lengths[row] = self.lengths[last]
        del self.lengths[last]
        self._at = None

    def lengths_with_new(self, device: torch.device) -> Tensor:
        """Return the length of each sequence, including the next position, int64 [b]."""
        return self._lengths_on(device) + 1

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [1, b*m, 1, d]; return [longest + 1, b*m, 1, d], with stale contents after the ends of shorter sequences."""
        rows = len(self.lengths)
        end = max(self.lengths) + 1
        at = self._lengths_on(k.device)
        found = []
        for kept, new in ((self._keys[layer], k), (self._values[layer], v)):
            assert kept is not None
            kept[at, torch.arange(rows, device=k.device)] = new[0].view(rows, -1, *new.shape[2:])  # [1, b*m, 1, d] -> [b, m, 1, d]
            found.append(kept[:end, :rows].flatten(1, 2))  # [end, b, m, 1, d] -> [end, b*m, 1, d]
        return found[0], found[1]

    def advance(self, num_positions: int) -> None:
        self.lengths = [length + num_positions for length in self.lengths]
        self._at = None

    def positions(self, num_new: int, device: torch.device) -> Tensor:
        """Return the position id of the next token of each sequence, int64 [b, 1]."""
        assert num_new == 1, "sequences of different lengths get one position at a time"
        return self._lengths_on(device)[:, None]

    def _lengths_on(self, device: torch.device) -> Tensor:
        if self._at is None:
            self._at = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        return self._at
