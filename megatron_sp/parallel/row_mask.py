"""Attention mask of a row of positions, in plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

Run = tuple[int, int]  # start and stop
Runs = tuple[Run, ...]


@dataclass(frozen=True)
class RowMask:
    """Attention mask of a row, for the b sequences of a micro-batch; masks that mean the same are equal."""

    length: int  # s, positions of the row
    causal: bool = True  # a query sees keys up to its own position
    # a query sees itself and the ``window`` - 1 keys before it; requires ``causal``. None: all keys before it.
    window: int | None = None
    # for each sequence the ends of its documents, the last of which is the end of the row; a query sees keys of its own
    # document alone
    documents: tuple[tuple[int, ...], ...] | None = None
    # for each sequence its number of real keys; those behind are padding, which no query sees. Queries at padding see
    # what their position allows. Cannot be combined with ``documents``.
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        s = self.length
        if s < 1:
            raise ValueError(f"a row has at least one position, not {s}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: a query sees at least itself, so it must be 1 or more")
        if self.window is not None and not self.causal:
            raise ValueError(f"a window ({self.window}) is for causal attention, and this mask is bidirectional")
        if self.documents is not None and self.lengths is not None:
            raise ValueError("documents and lengths cannot be combined: let the padding be the last document")
        if self.documents == () or self.lengths == ():
            raise ValueError("documents and lengths need an entry for each sequence of the micro-batch, at least one")
        for sequence, ends in enumerate(self.documents or ()):
            if not ends or ends[-1] != s or ends[0] < 1 or any(a >= b for a, b in pairwise(ends)):
                few = str(list(ends)) if len(ends) <= 8 else f"[{', '.join(map(str, ends[:4]))}, ... {ends[-1]}]"
                text = f"ends of documents of sequence {sequence} must rise from at least 1 to the row's length {s}"
                raise ValueError(f"{text}: {few}")
        for sequence, length in enumerate(self.lengths or ()):
            if length < 0:
                raise ValueError(f"sequence {sequence} has {length} real keys: 0 or more are possible")

        # what changes nothing is None, and sequences that are alike are described once
        if self.window is not None and self.window >= s:
            object.__setattr__(self, "window", None)
        if self.lengths is not None:
            lengths = _once_if_alike(tuple(min(length, s) for length in self.lengths))
            object.__setattr__(self, "lengths", None if lengths == (s,) else lengths)
        if self.documents is not None:
            documents = _once_if_alike(self.documents)
            object.__setattr__(self, "documents", None if documents == ((s,),) else documents)

    @property
    def sequences(self) -> int:  # that differ in their keys; 1 if all b are alike
        return len(self.documents or self.lengths or (None,))


def _once_if_alike(entries: tuple) -> tuple:  # type: ignore[type-arg]
    return entries[:1] if all(entry == entries[0] for entry in entries) else entries


def merge_runs(runs: Iterable[Run]) -> Runs:
    """Return the union of runs, in order; those that touch become one."""
    merged: list[Run] = []
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)
