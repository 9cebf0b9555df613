"""Keys and values of past positions, so that a generated token costs one position and not its whole sequence again.

A rank keeps those of its own heads: its tensor-parallel ones and, of these, the ones that Ulysses gives it. A prompt goes through the
exchanges as a training sequence does, cut over the sp ranks, and what arrives at the attention, all positions of the rank's heads, is
what is kept. A generated token goes the same way: it is a sequence of one position (and padding), so the first sp rank carries its
activations, and each rank attends to it with its heads. Thus a context that is too long for one device is shared by all, cache included.

Both caches are written in ``parallel.ulysses.Core.attend``: the pipeline around it knows nothing of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Of one sequence, or of several that are always equally long.

    Args:
        num_layers: of the model.
        max_length: positions there is room for.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0  # positions that hold something
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v [s_new, m, 1, d]; returns all keys and values so far [length + s_new, m, 1, d]."""
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
        """int64 [num_new]."""
        return torch.arange(self.length, self.length + num_new, device=device)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that are held, [length, m, 1, d]."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None and values is not None, "no forward pass has filled this cache"
        return keys[: self.length], values[: self.length]


class BatchCache:
    """Of several sequences, each with a length of its own, that get one new position each with every forward pass.

    The sequences are rows 0, 1, ... without gaps: where one goes, the last takes its place.

    Args:
        num_layers: of the model.
        max_rows: sequences there is room for.
        max_length: positions of each.
    """

    def __init__(self, num_layers: int, max_rows: int, max_length: int) -> None:
        self.num_layers, self.max_rows, self.max_length = num_layers, max_rows, max_length
        self.lengths: list[int] = []
        self._keys: list[Tensor | None] = [None] * num_layers  # each [max_length, max_rows, m, 1, d]
        self._values: list[Tensor | None] = [None] * num_layers
        self._at: Tensor | None = None  # the lengths, where the keys are

    def add(self, one: KVCache) -> int:
        """Take over a sequence; returns its row."""
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
        """Forget a sequence; the last one now has its row."""
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
        """int64 [b]: positions of each sequence, the one that comes included."""
        return self._lengths_on(device) + 1

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put k and v [1, b*m, 1, d] behind each sequence; returns [longest + 1, b*m, 1, d], in which shorter ones end in leftovers."""
        rows = len(self.lengths)
        end = max(self.lengths) + 1
        at = self._lengths_on(k.device)
        found = []
        for kept, new in ((self._keys[layer], k), (self._values[layer], v)):
            assert kept is not None
            kept[at, torch.arange(rows, device=k.device)] = new[0].view(rows, -1, *new.shape[2:])
            found.append(kept[:end, :rows].flatten(1, 2))  # [end, b, m, 1, d] -> [end, b*m, 1, d]
        return found[0], found[1]

    def advance(self, num_positions: int) -> None:
        self.lengths = [length + num_positions for length in self.lengths]
        self._at = None

    def positions(self, num_new: int, device: torch.device) -> Tensor:
        """int64 [b, 1]."""
        assert num_new == 1, "sequences of different lengths get one position at a time"
        return self._lengths_on(device)[:, None]

    def _lengths_on(self, device: torch.device) -> Tensor:
        if self._at is None:
            self._at = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        return self._at
